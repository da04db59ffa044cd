//! `ObjectServer.AddObjects`: moves an object stream from the network to the store.
//!
//! One thread for each upload hashes and writes, while the next objects arrive. What is between
//! them is limited, so that memory does not grow with the size of objects, nor with a disk that is
//! slower than the network.

use std::collections::{BTreeSet, VecDeque};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use api::fault::{Fault, FaultCode};
use api::object_server::{AddObjectsReply, LEASE_SECONDS_MAX};
use api::object_stream::Head;
use bytes::Bytes;
use model::object::ObjectId;
use model::report::report;
use rpc::server::{ObjectReader, StreamError};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use crate::store::comparing::Comparing;
use crate::store::contract::{Landing, Receiving};
use crate::store::counters::Counters;
use crate::store::error::{fault_of_store, joined};
use crate::store::{Store, error::StoreError};

/// The most content that is handed to the writer at once, in bytes.
const BATCH_BYTES_MAX: usize = 256 << 10;

/// The most steps that are handed to the writer at once.
const BATCH_STEPS_MAX: usize = 256;

/// How many batches may wait for the writer.
const BATCHES_MAX: usize = 4;

/// How many objects of one upload may be on their way to their places.
const LANDING_MAX: usize = 64;

/// One thing for the writer to do.
enum Step {
    Begin { id: ObjectId, size_bytes: u64 },
    Content(Bytes),
    Finish,
}

/// The writer has failed and listens no more; it says why when it is joined.
struct WriterGone;

/// Why the stream was not read to its end.
enum Stopped {
    Writer,
    Stream(StreamError),
    Absent(ObjectId),
    Unasked(ObjectId),
}

impl From<WriterGone> for Stopped {
    fn from(_: WriterGone) -> Self {
        Self::Writer
    }
}

/// Stores all objects of the stream. Each is kept as soon as it is complete.
pub(crate) async fn add_objects(
    store: Arc<Store>,
    counters: Arc<Counters>,
    tasks: &TaskTracker,
    reader: ObjectReader,
) -> Result<AddObjectsReply, Fault> {
    store_stream(store, counters, tasks, reader, Expected::Anything).await
}

/// As an upload is stored, of what another server has answered that was asked for `ids`: it need
/// not have all of them, and must send no others.
pub(crate) async fn store_objects(
    store: Arc<Store>,
    counters: Arc<Counters>,
    tasks: &TaskTracker,
    reader: ObjectReader,
    ids: &[ObjectId],
) -> Result<AddObjectsReply, Fault> {
    let ids = ids.iter().copied().collect();
    store_stream(store, counters, tasks, reader, Expected::SomeOf(&ids)).await
}

/// What a stream may bring.
#[derive(Clone, Copy, Debug)]
enum Expected<'ids> {
    /// All objects that it names, whichever they are.
    Anything,
    /// Some of these.
    SomeOf(&'ids BTreeSet<ObjectId>),
}

impl Expected<'_> {
    fn has(self, id: &ObjectId) -> bool {
        match self {
            Self::Anything => true,
            Self::SomeOf(ids) => ids.contains(id),
        }
    }
}

async fn store_stream(
    store: Arc<Store>,
    counters: Arc<Counters>,
    tasks: &TaskTracker,
    reader: ObjectReader,
    expected: Expected<'_>,
) -> Result<AddObjectsReply, Fault> {
    let (sender, receiver) = mpsc::channel(BATCHES_MAX);
    let writer = tasks.spawn_blocking(move || Writer::new(&store, &counters).run(receiver));
    let read = {
        let mut feed = Feed { sender, batch: Vec::new(), batch_bytes: 0 };
        let read = feed.read(reader, expected).await;
        // What was complete when the stream broke is kept.
        let flushed = feed.flush().await;
        read.and(flushed.map_err(Stopped::from))
    };
    let written = joined(writer.await)?;
    // If both failed, the writer did first: it stopped listening, the caller then stopped sending.
    let reply = written.map_err(|error| fault_of_store(&error))?;
    match read {
        Ok(()) => Ok(reply),
        Err(Stopped::Stream(error)) => Err(Fault::new(FaultCode::BadRequest, report(&error))),
        Err(Stopped::Absent(id)) => Err(Fault::new(
            FaultCode::BadRequest,
            format!("object {id} is said to be absent in a stream that should bring it"),
        )),
        Err(Stopped::Unasked(id)) => {
            Err(Fault::new(FaultCode::BadRequest, format!("object {id} was not asked for")))
        }
        Err(Stopped::Writer) => {
            Err(Fault::new(FaultCode::Internal, "the writer of the upload went away"))
        }
    }
}

/// Gathers steps, so that the writer is not woken for each of sixteen thousand small objects.
struct Feed {
    sender: mpsc::Sender<Vec<Step>>,
    batch: Vec<Step>,
    batch_bytes: usize,
}

impl Feed {
    /// Reads the stream to its end and hands it to the writer.
    async fn read(
        &mut self,
        mut reader: ObjectReader,
        expected: Expected<'_>,
    ) -> Result<(), Stopped> {
        loop {
            match self.flush_unless_ready(reader.head()).await?.map_err(Stopped::Stream)? {
                Head::End => return Ok(()),
                Head::Absent(_) if matches!(expected, Expected::SomeOf(_)) => continue,
                Head::Absent(id) => return Err(Stopped::Absent(id)),
                Head::Object { id, .. } if !expected.has(&id) => {
                    return Err(Stopped::Unasked(id));
                }
                Head::Object { id, size_bytes } => {
                    self.push(Step::Begin { id, size_bytes }).await?;
                }
            }
            while let Some(content) =
                self.flush_unless_ready(reader.chunk()).await?.map_err(Stopped::Stream)?
            {
                self.push(Step::Content(content)).await?;
            }
            self.push(Step::Finish).await?;
        }
    }

    async fn push(&mut self, step: Step) -> Result<(), WriterGone> {
        if let Step::Content(content) = &step {
            self.batch_bytes += content.len();
        }
        self.batch.push(step);
        if self.batch_bytes >= BATCH_BYTES_MAX || self.batch.len() >= BATCH_STEPS_MAX {
            self.flush().await?;
        }
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), WriterGone> {
        self.batch_bytes = 0;
        if self.batch.is_empty() {
            return Ok(());
        }
        let batch = std::mem::take(&mut self.batch);
        self.sender.send(batch).await.map_err(|_| WriterGone)
    }

    /// Waits for `future`; if it is not ready at once, the writer gets what there is first, so
    /// that an object is kept as soon as it is complete even if nothing else ever comes.
    async fn flush_unless_ready<F: Future>(&mut self, future: F) -> Result<F::Output, WriterGone> {
        let mut future = pin!(future);
        match poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await {
            Poll::Ready(output) => Ok(output),
            Poll::Pending => {
                self.flush().await?;
                // A caller that is refused is told so, even if it sends nothing more.
                tokio::select! {
                    biased;
                    output = future => Ok(output),
                    () = self.sender.closed() => Err(WriterGone),
                }
            }
        }
    }
}

/// What becomes of the content that arrives.
enum Current<'store> {
    /// Between two objects.
    None,
    /// It is stored.
    Stored(ObjectId, Box<dyn Receiving + 'store>, u64),
    /// It is there already, so it is only compared.
    Known(Comparing),
}

/// Carries out the steps of one upload.
struct Writer<'store> {
    store: &'store Store,
    counters: &'store Counters,
    current: Current<'store>,
    /// Objects that are on their way to their places, with their lengths.
    landing: VecDeque<(ObjectId, Landing, u64)>,
    reply: AddObjectsReply,
}

impl<'store> Writer<'store> {
    fn new(store: &'store Store, counters: &'store Counters) -> Self {
        let reply = AddObjectsReply::default();
        let landing = VecDeque::new();
        Self { store, counters, current: Current::None, landing, reply }
    }

    /// Runs until the sender is gone. An object that is incomplete then leaves nothing.
    fn run(
        mut self,
        mut batches: mpsc::Receiver<Vec<Step>>,
    ) -> Result<AddObjectsReply, StoreError> {
        while let Some(batch) = batches.blocking_recv() {
            let begun = |step: &Step| match step {
                Step::Begin { id, .. } => Some(*id),
                Step::Content(_) | Step::Finish => None,
            };
            let ids: Vec<ObjectId> = batch.iter().filter_map(begun).collect();
            // Before they are looked for, so that what is found to be there stays.
            self.store.leasing.give(&ids, LEASE_SECONDS_MAX)?;
            for step in batch {
                self.step(step)?;
            }
        }
        self.land(0)?;
        Ok(self.reply)
    }

    /// Waits until at most `left` objects are still on their way.
    fn land(&mut self, left: usize) -> Result<(), StoreError> {
        while self.landing.len() > left {
            let Some((_, landing, size_bytes)) = self.landing.pop_front() else { break };
            landing.wait()?;
            self.reply.added += 1;
            self.reply.added_bytes += size_bytes;
            self.counters.objects_added.inc();
            self.counters.objects_added_bytes.inc_by(size_bytes);
        }
        Ok(())
    }

    fn step(&mut self, step: Step) -> Result<(), StoreError> {
        match step {
            Step::Begin { id, size_bytes } => {
                if self.landing.iter().any(|(landing, ..)| *landing == id) {
                    self.land(0)?;
                }
                let objects = &self.store.objects;
                let here = match objects.known(&id)? {
                    Some(_) => objects.open_verified(&id)?,
                    None => None,
                };
                self.current = match here {
                    Some(content) => Current::Known(Comparing::new(id, size_bytes, content)),
                    None => Current::Stored(id, objects.receive(id, size_bytes)?, size_bytes),
                };
            }
            Step::Content(content) => match &mut self.current {
                Current::None => {}
                Current::Stored(_, receiving, _) => receiving.write(&content)?,
                Current::Known(comparing) => comparing.write(&content)?,
            },
            Step::Finish => match std::mem::replace(&mut self.current, Current::None) {
                Current::None => {}
                Current::Known(comparing) => {
                    comparing.finish()?;
                    self.reply.known += 1;
                }
                Current::Stored(id, receiving, size_bytes) => {
                    self.landing.push_back((id, receiving.finish()?, size_bytes));
                    self.land(LANDING_MAX)?;
                }
            },
        }
        Ok(())
    }
}
