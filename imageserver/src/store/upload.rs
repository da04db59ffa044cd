//! Moves a stream of objects from the network to the store.
//!
//! One thread for each upload hashes and writes while the next objects arrive. The queue between
//! them is bounded, so memory does not grow with the size of objects or with a slow disk.
//!
//! An uploaded object that is stored already is compared byte by byte. No two contents with the
//! same digest are known for the algorithms in use. If there are two, or if the memory of a machine
//! is faulty, no caller may get one for the other.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::Read as _;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use api::fault::{Fault, FaultCode};
use api::object_server::{AddObjectsReply, LEASE_SECONDS_MAX};
use api::object_stream::ObjectHead;
use bytes::Bytes;
use model::display::error_chain;
use model::object::{Hasher, ObjectId};
use rpc::server::{ObjectReader, StreamError};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::content::{Content, ContentReader};
use crate::store::contract::{PendingStore, Receiving};
use crate::store::error::{StoreError, failed, fault_of_store, joined};
use crate::store::private_images::Reader;
use crate::store::{Counters, Store};

/// The most content that is handed to the writer at once, in bytes.
const BATCH_BYTES_MAX: usize = 256 << 10;

/// The most steps that are handed to the writer at once.
const BATCH_STEPS_MAX: usize = 256;

/// How many batches may wait for the writer.
const BATCHES_MAX: usize = 4;

/// The most objects of one upload that are complete but not yet stored.
const PENDING_MAX: usize = 64;

/// A step for the writer.
enum UploadStep {
    Begin { id: ObjectId, size_bytes: u64 },
    Content(Bytes),
    Finish,
}

/// The writer has failed; its result tells why.
struct WriterGone;

/// Why the stream was not read to its end.
enum ReadError {
    Writer,
    Stream(StreamError),
    Absent(ObjectId),
}

impl From<WriterGone> for ReadError {
    fn from(_: WriterGone) -> Self {
        Self::Writer
    }
}

/// What a frame without content means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AbsentObjects {
    /// The sender may lack objects that it was asked for.
    Skipped,
    /// An uploader must have what it sends.
    Refused,
}

/// Stores all objects of the stream, each as soon as it is complete.
pub(crate) async fn store_objects(
    store: Arc<Store>,
    counters: Arc<Counters>,
    tasks: &TaskTracker,
    reader: ObjectReader,
    absent: AbsentObjects,
) -> Result<AddObjectsReply, Fault> {
    store_objects_of(Reader::Everything, store, counters, tasks, reader, absent).await
}

/// The same for objects that `sender` may use in images from then on.
pub(crate) async fn store_objects_of(
    sender: Reader,
    store: Arc<Store>,
    counters: Arc<Counters>,
    tasks: &TaskTracker,
    reader: ObjectReader,
    absent: AbsentObjects,
) -> Result<AddObjectsReply, Fault> {
    let (steps, receiver) = mpsc::channel(BATCHES_MAX);
    let writer = tasks.spawn_blocking(move || Writer::new(sender, &store, &counters).run(receiver));
    let read = {
        let mut feed = Feed { sender: steps, batch: Vec::new(), batch_bytes: 0 };
        let read = feed.read(reader, absent).await;
        // Objects that were complete when the stream broke are stored.
        let flushed = feed.flush().await;
        read.and(flushed.map_err(ReadError::from))
    };
    let written = joined(writer.await)?;
    // If both failed, the writer did first: it stopped listening, the caller then stopped sending.
    let reply = written.map_err(|error| fault_of_store(&error))?;
    match read {
        Ok(()) => Ok(reply),
        Err(ReadError::Stream(error)) => {
            Err(Fault::new(FaultCode::BadRequest, error_chain(&error)))
        }
        Err(ReadError::Absent(id)) => Err(Fault::new(
            FaultCode::BadRequest,
            format!("object {id} is said to be absent in a stream that should bring it"),
        )),
        Err(ReadError::Writer) => {
            Err(Fault::new(FaultCode::Internal, "the writer of the upload went away"))
        }
    }
}

/// Gathers steps, so that the writer is not woken for each of sixteen thousand small objects.
struct Feed {
    sender: mpsc::Sender<Vec<UploadStep>>,
    batch: Vec<UploadStep>,
    batch_bytes: usize,
}

impl Feed {
    /// Reads the stream to its end and hands it to the writer.
    async fn read(
        &mut self,
        mut reader: ObjectReader,
        absent: AbsentObjects,
    ) -> Result<(), ReadError> {
        loop {
            match self.flush_unless_ready(reader.head()).await?.map_err(ReadError::Stream)? {
                ObjectHead::End => return Ok(()),
                ObjectHead::Absent(_) if absent == AbsentObjects::Skipped => continue,
                ObjectHead::Absent(id) => return Err(ReadError::Absent(id)),
                ObjectHead::Object { id, size_bytes } => {
                    self.push(UploadStep::Begin { id, size_bytes }).await?;
                }
            }
            while let Some(content) =
                self.flush_unless_ready(reader.chunk()).await?.map_err(ReadError::Stream)?
            {
                self.push(UploadStep::Content(content)).await?;
            }
            self.push(UploadStep::Finish).await?;
        }
    }

    async fn push(&mut self, step: UploadStep) -> Result<(), WriterGone> {
        if let UploadStep::Content(content) = &step {
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

    /// Waits for `future`. If it is not ready at once, the batch is flushed first, so that an
    /// object is stored as soon as it is complete.
    async fn flush_unless_ready<F: Future>(&mut self, future: F) -> Result<F::Output, WriterGone> {
        let mut future = pin!(future);
        match poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await {
            Poll::Ready(output) => Ok(output),
            Poll::Pending => {
                self.flush().await?;
                // A refused caller gets its fault even if it sends nothing more.
                tokio::select! {
                    biased;
                    output = future => Ok(output),
                    () = self.sender.closed() => Err(WriterGone),
                }
            }
        }
    }
}

/// The object that is being uploaded.
enum CurrentUpload<'store> {
    /// Between two objects.
    None,
    /// A new object is being stored.
    Stored(ObjectId, Box<dyn Receiving + 'store>, u64),
    /// The object is stored already, so the upload is only compared with it.
    Known(ComparedUpload, u64),
}

/// Carries out the steps of one upload.
struct Writer<'store> {
    sender: Reader,
    store: &'store Store,
    counters: &'store Counters,
    current: CurrentUpload<'store>,
    /// Complete objects that are not stored yet, with their lengths.
    pending: VecDeque<(ObjectId, PendingStore, u64)>,
    reply: AddObjectsReply,
}

impl<'store> Writer<'store> {
    fn new(sender: Reader, store: &'store Store, counters: &'store Counters) -> Self {
        let reply = AddObjectsReply::default();
        let pending = VecDeque::new();
        Self { sender, store, counters, current: CurrentUpload::None, pending, reply }
    }

    /// Runs until the sender is gone. An incomplete object is discarded.
    fn run(
        mut self,
        mut batches: mpsc::Receiver<Vec<UploadStep>>,
    ) -> Result<AddObjectsReply, StoreError> {
        while let Some(batch) = batches.blocking_recv() {
            let begun = |step: &UploadStep| match step {
                UploadStep::Begin { id, .. } => Some(*id),
                UploadStep::Content(_) | UploadStep::Finish => None,
            };
            let ids: Vec<ObjectId> = batch.iter().filter_map(begun).collect();
            // Leased before the lookup, so that objects that are found stay.
            self.store.leasing.give(&ids, LEASE_SECONDS_MAX)?;
            for step in batch {
                self.step(step)?;
            }
        }
        self.finish_pending(0)?;
        Ok(self.reply)
    }

    /// Waits until at most `left` objects are not stored yet.
    fn finish_pending(&mut self, left: usize) -> Result<(), StoreError> {
        while self.pending.len() > left {
            let Some((id, pending, size_bytes)) = self.pending.pop_front() else { break };
            pending.wait()?;
            self.sender.note_sent(&id);
            self.reply.added += 1;
            self.reply.added_bytes += size_bytes;
            self.counters.objects_added.inc();
            self.counters.objects_added_bytes.inc_by(size_bytes);
        }
        Ok(())
    }

    fn step(&mut self, step: UploadStep) -> Result<(), StoreError> {
        match step {
            UploadStep::Begin { id, size_bytes } => {
                if self.pending.iter().any(|(pending, ..)| *pending == id) {
                    self.finish_pending(0)?;
                }
                let objects = &self.store.objects;
                let here = match objects.known(&id)? {
                    Some(_) => objects.open_verified(&id)?,
                    None => None,
                };
                self.current = match here {
                    Some(content) => {
                        let comparing = ComparedUpload::new(id, size_bytes, content);
                        CurrentUpload::Known(comparing, size_bytes)
                    }
                    None => CurrentUpload::Stored(id, objects.receive(id, size_bytes)?, size_bytes),
                };
            }
            UploadStep::Content(content) => match &mut self.current {
                CurrentUpload::None => {}
                CurrentUpload::Stored(_, receiving, _) => receiving.write(&content)?,
                CurrentUpload::Known(comparing, _) => comparing.write(&content)?,
            },
            UploadStep::Finish => match std::mem::replace(&mut self.current, CurrentUpload::None) {
                CurrentUpload::None => {}
                CurrentUpload::Known(comparing, size_bytes) => {
                    let id = comparing.id;
                    comparing.finish()?;
                    // The sender is not told that a private image has it.
                    if self.sender.note_sent(&id) {
                        self.reply.added += 1;
                        self.reply.added_bytes += size_bytes;
                    } else {
                        self.reply.known += 1;
                    }
                }
                CurrentUpload::Stored(id, receiving, size_bytes) => {
                    self.pending.push_back((id, receiving.finish()?, size_bytes));
                    self.finish_pending(PENDING_MAX)?;
                }
            },
        }
        Ok(())
    }
}

/// Compares what comes with what is here.
pub struct ComparedUpload {
    id: ObjectId,
    hasher: Hasher,
    content: ContentReader,
    buffer: Vec<u8>,
    differs: bool,
}

impl ComparedUpload {
    /// Compares an upload of `size_bytes` with the stored and verified `content`.
    #[must_use]
    pub fn new(id: ObjectId, size_bytes: u64, content: Content) -> Self {
        let (hasher, differs) = (Hasher::new(id.algorithm()), content.size_bytes() != size_bytes);
        Self { id, hasher, content: content.into_reader(), buffer: Vec::new(), differs }
    }

    /// Compares the next part.
    pub fn write(&mut self, part: &[u8]) -> Result<(), StoreError> {
        self.hasher.update(part);
        if self.differs {
            return Ok(());
        }
        self.buffer.clear();
        (&mut self.content)
            .take(part.len() as u64)
            .read_to_end(&mut self.buffer)
            .map_err(failed(format!("read object {}", self.id)))?;
        self.differs = self.buffer != part;
        Ok(())
    }

    /// Ends the comparison.
    pub fn finish(self) -> Result<(), StoreError> {
        let got = self.hasher.finish();
        if got != self.id {
            return Err(StoreError::Content { want: self.id, got });
        }
        if self.differs {
            return Err(StoreError::Collision { id: self.id });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn what_comes_is_the_same_or_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let id = Algorithm::Blake3.digest(b"abcdef");
        // What the store says to have, and what comes as `id`.
        let table: [(&[u8], &[u8], &str); 5] = [
            (b"abcdef", b"abcdef", "same"),
            (b"abcdef", b"abcdeX", "other content"),
            (b"abcdef", b"abc", "other content"),
            (b"abXdef", b"abcdef", "collision"),
            (b"abcde", b"abcdef", "collision"),
        ];
        for (here, comes, expected) in table {
            let path = directory.path().join("object");
            std::fs::write(&path, here).unwrap();
            let file = fs_err::File::open(&path).unwrap();
            let whole = Content::Whole(Bytes::copy_from_slice(here));
            for content in [whole, Content::File(file, here.len() as u64)] {
                let mut comparing = ComparedUpload::new(id, comes.len() as u64, content);
                comes.chunks(2).for_each(|part| comparing.write(part).unwrap());
                let got = match comparing.finish() {
                    Ok(()) => "same",
                    Err(StoreError::Content { .. }) => "other content",
                    Err(StoreError::Collision { .. }) => "collision",
                    Err(error) => panic!("{error}"),
                };
                assert_eq!(got, expected, "{here:?} {comes:?}");
            }
        }
    }
}
