//! Asks one source for the missing objects, several requests at a time.
//!
//! A request is read by a task and written by a [`Writer`]; between them is a short queue. On the
//! first error all requests are ended, and what they have received is kept. A source that sends
//! nothing for too long is handled like a lost connection.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use api::object_server::GetObjectsRequest;
use api::object_stream::ObjectHead;
use api::subd::{FetchFailure, FetchObject};
use bytes::Bytes;
use futures_util::StreamExt;
use model::display::error_chain;
use rpc::client::{CallError, Client, Extent, Peer, Remedy, StreamError};
use rpc::packing::LinkUse;
use rpc::tls::Security;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::cache::Cache;
use crate::cache::receive::PARTIAL_BYTES_MIN;
use crate::fetch::SOURCE_PORT;
use crate::fetch::network::Network;
use crate::fetch::policy::SourceError;
use crate::fetch::policy::{Request, requests};
use crate::fetch::record::FetchRecord;
use crate::fetch::writer::{Writer, WriterMessage};
use crate::limits::Budgets;
use crate::root::Root;

/// How many requests are under way at once.
const REQUESTS_IN_FLIGHT: usize = 2;

/// How many messages may wait to be written.
const QUEUE_MAX: usize = 16;

/// One attempt to get objects from one source.
pub(super) struct Transfer {
    pub cache: Arc<Cache>,
    pub root: Arc<Root>,
    pub budgets: Arc<Budgets>,
    pub network: Arc<Network>,
    pub record: Arc<FetchRecord>,
    pub fetched_bytes: Arc<AtomicU64>,
    pub client: Client,
    pub source: Arc<str>,
    /// True if the source is on this machine.
    pub local: bool,
    /// How long the source may send nothing.
    pub stall_max: Duration,
    pub stop: CancellationToken,
}

/// Returns the client of `source`, and whether it is on this machine.
pub(super) fn client_of(source: &str, security: &Security) -> Result<(Client, bool), SourceError> {
    let peer = Peer::parse(source, SOURCE_PORT)
        .map_err(|error| SourceError::Refused(error_chain(&error)))?;
    let local = peer.is_local();
    Ok((Client::new(peer, security), local))
}

impl Transfer {
    /// Asks for `missing`. Objects that the source does not have are no error.
    pub async fn run(&self, missing: &[FetchObject]) -> Result<(), SourceError> {
        let requests = requests(missing, |id| self.cache.partial_bytes(id));
        let answers = requests.into_iter().map(|request| self.answer(request));
        let mut answers = futures_util::stream::iter(answers).buffer_unordered(REQUESTS_IN_FLIGHT);
        let mut worst: Option<SourceError> = None;
        while let Some(answer) = answers.next().await {
            if let Err(trouble) = answer {
                // The other requests end too, but each is waited for: none may write when the next
                // attempt begins.
                self.stop.cancel();
                worst = Some(match worst {
                    None => trouble,
                    Some(earlier) => earlier.or_worse(trouble),
                });
            }
        }
        worst.map_or(Ok(()), Err)
    }

    async fn answer(&self, request: Request) -> Result<(), SourceError> {
        if self.stop.is_cancelled() {
            return Ok(());
        }
        match request {
            Request::Batch(objects) => self.batch(objects).await,
            Request::Rest { object, from } => self.rest(object, from).await,
        }
    }

    /// Gets whole objects.
    async fn batch(&self, objects: Vec<FetchObject>) -> Result<(), SourceError> {
        let request = GetObjectsRequest { ids: objects.iter().map(|object| object.id).collect() };
        let asking = self.in_time(self.client.get_objects(&request));
        let mut reader = asking.await?.map_err(|error| call_error(&error))?;
        let (sender, receiver) = mpsc::channel(QUEUE_MAX);
        let reading = async move {
            let mut link = LinkUse::default();
            loop {
                let head = self.timed(&mut link, self.in_time(reader.head())).await?;
                let (id, size_bytes) = match head.map_err(|error| stream_error(&error))? {
                    ObjectHead::Object { id, size_bytes } => (id, size_bytes),
                    // An absent object stays missing, which is noticed at the end.
                    ObjectHead::Absent(_) => continue,
                    ObjectHead::End => {
                        self.note_link(link);
                        return Ok(());
                    }
                };
                let is_small = size_bytes < PARTIAL_BYTES_MIN;
                let begin = WriterMessage::Begin { id, size_bytes, rest: false };
                if !is_small && !send(&sender, begin).await {
                    return Ok(());
                }
                let mut chunks = Vec::new();
                loop {
                    let chunk = self.timed(&mut link, self.in_time(reader.chunk())).await?;
                    let Some(chunk) = chunk.map_err(|error| stream_error(&error))? else {
                        break;
                    };
                    let wire_bytes = reader.take_wire_bytes();
                    link.wire_bytes += wire_bytes;
                    self.take_budgets(chunk.len(), wire_bytes, &mut link).await;
                    if is_small {
                        chunks.push(chunk);
                    } else if !send(&sender, WriterMessage::Chunk(chunk)).await {
                        return Ok(());
                    }
                }
                let end = match is_small {
                    true => WriterMessage::Whole { id, content: joined(chunks) },
                    false => WriterMessage::End,
                };
                if !send(&sender, end).await {
                    return Ok(());
                }
            }
        };
        self.written(&objects, receiver, reading).await
    }

    /// Gets the end of `object`, of which `from` bytes were received.
    async fn rest(&self, object: FetchObject, from: u64) -> Result<(), SourceError> {
        let FetchObject { id, size_bytes } = object;
        let path = format!("/objects/{id}");
        let asking = self.in_time(self.client.download(&path, from));
        let Some(mut download) = asking.await?.map_err(|error| call_error(&error))? else {
            // A source without ranges may still have it.
            return self.batch(vec![object]).await;
        };
        let rest = match download.extent() {
            Extent::Part { first, end, total_bytes }
                if (first, end) == (from, size_bytes)
                    && total_bytes.is_none_or(|total| total == size_bytes) =>
            {
                true
            }
            Extent::Whole(total) if total.is_none_or(|total| total == size_bytes) => {
                let text = format!("asked for object {id} from byte {from} on, it sends all of it");
                self.record.complain(&self.source, false, &text);
                false
            }
            extent => return Err(self.bad_extent(&object, from, extent)),
        };
        let (sender, receiver) = mpsc::channel(QUEUE_MAX);
        let reading = async move {
            let mut link = LinkUse::default();
            let mut open = send(&sender, WriterMessage::Begin { id, size_bytes, rest }).await;
            let mut left = if rest { size_bytes - from } else { size_bytes };
            while open && left > 0 {
                let chunk = self.timed(&mut link, self.in_time(download.chunk())).await?;
                match chunk.map_err(|error| stream_error(&error))? {
                    // The writer refuses more than was requested.
                    Some(chunk) => {
                        left = left.saturating_sub(chunk.len() as u64);
                        let wire_bytes = chunk.len() as u64;
                        link.wire_bytes += wire_bytes;
                        self.take_budgets(chunk.len(), wire_bytes, &mut link).await;
                        open = send(&sender, WriterMessage::Chunk(chunk)).await;
                    }
                    None => {
                        return Err(SourceError::Cut(format!(
                            "it sent {left} bytes too few of {id}"
                        )));
                    }
                }
            }
            if open {
                send(&sender, WriterMessage::End).await;
            }
            self.note_link(link);
            Ok(())
        };
        self.written(&[object], receiver, reading).await
    }

    /// Returns the error of a source that sends another part than was requested.
    fn bad_extent(&self, object: &FetchObject, from: u64, extent: Extent) -> SourceError {
        let FetchObject { id, size_bytes } = object;
        let asked = format!("asked for bytes {from} to {size_bytes} of object {id}");
        match extent {
            Extent::Whole(total) => {
                let total = total.unwrap_or_default();
                SourceError::Lie(format!("{asked}, it says that the object has {total} bytes"))
            }
            Extent::Part { first, end, total_bytes } => {
                let of_total = total_bytes.map_or_else(String::new, |total| format!(" of {total}"));
                SourceError::Lie(format!("{asked}, it sends bytes {first} to {end}{of_total}"))
            }
            Extent::Unclear => {
                let text = format!("{asked}, it does not say which bytes it sends");
                self.record.complain(&self.source, false, &text);
                // Its batches may be right: the next attempt requests the whole object.
                match self.cache.discard_partial(id) {
                    Ok(()) => SourceError::Unfit(text),
                    Err(error) => SourceError::Local(FetchFailure::Local(error_chain(&error))),
                }
            }
        }
    }

    /// Runs a writer of `objects` in parallel to `reading`, which sends it what it receives. The
    /// writer's error precedes the reader's.
    async fn written(
        &self,
        objects: &[FetchObject],
        receiver: mpsc::Receiver<WriterMessage>,
        reading: impl Future<Output = Result<(), SourceError>>,
    ) -> Result<(), SourceError> {
        let writer = Writer {
            cache: Arc::clone(&self.cache),
            root: Arc::clone(&self.root),
            record: Arc::clone(&self.record),
            source: Arc::clone(&self.source),
            wanted: objects.iter().map(|object| (object.id, object.size_bytes)).collect(),
            fetched_bytes: Arc::clone(&self.fetched_bytes),
        };
        let writing = tokio::task::spawn_blocking(move || writer.run(receiver));
        let read = tokio::select! {
            read = reading => read,
            () = self.stop.cancelled() => Ok(()),
        };
        let written = writing.await;
        let lost = |error: tokio::task::JoinError| {
            SourceError::Local(FetchFailure::Local(format!("the writer failed: {error}")))
        };
        written.map_err(lost)?.and(read)
    }

    /// Waits until so many bytes may be written, for which `wire_bytes` came over the network.
    async fn take_budgets(&self, bytes: usize, wire_bytes: u64, link: &mut LinkUse) {
        let bytes = bytes as u64;
        if self.timed(link, self.network.take(wire_bytes, self.local)).await {
            self.budgets.write.take(bytes).await;
        } else {
            self.budgets.write.note(bytes);
        }
    }

    /// Counts how long is waited for the network.
    async fn timed<T>(&self, link: &mut LinkUse, network: impl Future<Output = T>) -> T {
        let begun = Instant::now();
        let result = network.await;
        link.waited += begun.elapsed();
        result
    }

    /// Decides in which form the next objects are asked for.
    fn note_link(&self, link: LinkUse) {
        if !self.local
            && let Some(packs) = link.must_pack()
        {
            self.client.set_packing(packs);
        }
    }

    /// Waits for the source, with a time limit.
    async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, SourceError> {
        let late = |_| SourceError::Cut(format!("nothing came for {:?}", self.stall_max));
        tokio::time::timeout(self.stall_max, answer).await.map_err(late)
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Transfer({})", self.source)
    }
}

fn joined(mut chunks: Vec<Bytes>) -> Bytes {
    match chunks.len() {
        1 => chunks.remove(0),
        _ => chunks.concat().into(),
    }
}

async fn send(sender: &mpsc::Sender<WriterMessage>, piece: WriterMessage) -> bool {
    sender.send(piece).await.is_ok()
}

fn call_error(error: &CallError) -> SourceError {
    let text = error_chain(error);
    match (error, error.remedy()) {
        (CallError::Connect { .. }, _) => SourceError::Unreachable(text),
        (_, Remedy::Wait) => SourceError::Cut(text),
        (_, Remedy::Switch | Remedy::Report) => SourceError::Refused(text),
    }
}

fn stream_error(error: &StreamError) -> SourceError {
    let text = error_chain(error);
    match error {
        StreamError::Transport { .. } | StreamError::Cut { .. } | StreamError::Stalled { .. } => {
            SourceError::Cut(text)
        }
        StreamError::Unrequested { .. } => SourceError::Lie(text),
        _ => SourceError::Refused(text),
    }
}
