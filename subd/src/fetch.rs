//! Gets objects from object servers into the cache.
//!
//! One fetch at a time. Sources are tried in their order; each is asked for what is still missing,
//! in batches, two at a time. What arrives is hashed by the thread that writes it and has its name
//! only then. What has arrived stays when the rest fails.
//!
//! Nothing is synced here: Prepare does that, and an object that a crash spoilt is found when the
//! cache is hashed at the next start.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::api::object_server::{GetObjectsRequest, IDS_MAX};
use common::api::subd::{FetchFailure, FetchObject, FetchRequest, LastFetch, Space};
use common::object::ObjectId;
use common::report::report;
use common::wire::client::{Client, Peer};
use common::wire::object_stream::Head;
use common::wire::{Fault, FaultCode};
use futures_util::StreamExt;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::board::{Board, FetchProgress, UpdatePhase};
use crate::cache::{Cache, CacheError, Receiving};
use crate::root::Root;

/// The port of a source that names none: that of the imageserver.
pub const SOURCE_PORT: u16 = 6971;

/// The most sources of one fetch.
pub const SOURCES_MAX: usize = 16;

/// The most objects that are asked for at once.
const BATCH_OBJECTS_MAX: usize = 2_000;

/// The most that is asked for at once, in bytes; a larger object is asked for alone.
const BATCH_BYTES_MAX: u64 = 64 << 20;

/// How many batches are under way at once.
const BATCHES_IN_FLIGHT: usize = 2;

/// How many pieces may wait to be written.
const PIECES_MAX: usize = 16;

/// How often progress is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// What a file takes at least on the usual file-systems, in bytes.
const BLOCK_BYTES: u64 = 4_096;

/// What is left free for the machine: this, in bytes, or a hundredth of what is free.
const RESERVE_BYTES_MAX: u64 = 64 << 20;

/// What is left free for the machine, in inodes.
const RESERVE_INODES: u64 = 256;

/// Starts fetches and reports them to the board.
#[derive(Clone)]
pub struct Fetcher {
    /// Where objects go.
    pub cache: Arc<Cache>,
    /// Who is told.
    pub board: Arc<Board>,
    /// Whose space is used.
    pub root: Arc<Root>,
    /// What runs.
    pub tasks: TaskTracker,
    /// When to give up.
    pub stop: CancellationToken,
    /// Bytes that arrived since subd started.
    pub fetched_bytes: Arc<AtomicU64>,
}

/// What has arrived so far.
#[derive(Default)]
struct Progress {
    objects: AtomicU64,
    bytes: AtomicU64,
    arrived: Mutex<Vec<ObjectId>>,
}

impl Fetcher {
    /// Starts a fetch; one with the id of the current or the last fetch is not started again.
    ///
    /// # Errors
    ///
    /// `BadRequest` for a request that makes no sense, `Busy` during another fetch or an update.
    pub fn start(&self, request: FetchRequest) -> Result<(), Fault> {
        check(&request)?;
        let fetch_id = request.fetch_id;
        let started = self.board.try_change(|state| {
            let current = state.fetch.map(|fetch| fetch.fetch_id);
            let last = state.last_fetch.as_ref().map(|last| last.fetch_id);
            if current == Some(fetch_id) || (current.is_none() && last == Some(fetch_id)) {
                return Ok(None);
            }
            if let Some(current) = current {
                let text = format!("fetch {current} is under way");
                return Err(Fault::new(FaultCode::Busy, text));
            }
            if let UpdatePhase::Preparing(id) | UpdatePhase::Updating(id) = state.update {
                let text = format!("update {id} is under way");
                return Err(Fault::new(FaultCode::Busy, text));
            }
            state.fetch = Some(FetchProgress { fetch_id, ..FetchProgress::default() });
            Ok(Some(()))
        })?;
        if started.is_some() {
            let fetcher = self.clone();
            self.tasks.spawn(async move { fetcher.run(request).await });
        }
        Ok(())
    }

    async fn run(&self, request: FetchRequest) {
        let started = Instant::now();
        let fetch_id = request.fetch_id;
        let progress = Arc::new(Progress::default());
        let result = self.fetch_all(&request, &progress).await;
        self.report(&progress);
        let (objects, bytes) =
            (progress.objects.load(Ordering::Relaxed), progress.bytes.load(Ordering::Relaxed));
        if let Err(error) = &result {
            tracing::warn!(fetch_id, ?error, "the fetch failed");
        }
        let took_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(fetch_id, objects, bytes, took_ms, "the fetch has ended");
        let last = LastFetch { fetch_id, error: result.err(), objects, bytes, took_ms };
        self.board.change(|state| {
            state.fetch = None;
            state.last_fetch = Some(last);
        });
    }

    async fn fetch_all(
        &self,
        request: &FetchRequest,
        progress: &Arc<Progress>,
    ) -> Result<(), FetchFailure> {
        let mut missing = self.missing(&request.objects);
        if missing.is_empty() {
            return Ok(());
        }
        let space = self.root.space().map_err(|error| FetchFailure::Local(report(&error)))?;
        check_space(&missing, space)?;
        let mut complaints: Vec<String> = Vec::new();
        for source in &request.sources {
            let asking = self.ask(source, &missing, progress);
            let complaint = self.reporting(progress, asking).await?;
            missing = self.missing(&missing);
            if missing.is_empty() {
                break;
            }
            let complaint = complaint.unwrap_or_else(|| "it lacks objects".to_owned());
            complaints.push(format!("{source}: {complaint}"));
        }
        if missing.is_empty() {
            return Ok(());
        }
        let (count, first) = (missing.len(), missing[0].id);
        let complaints = complaints.join("; ");
        Err(FetchFailure::Sources(format!("{count} objects missing ({first}...): {complaints}")))
    }

    /// Waits for `work`, and reports progress meanwhile; gives up when subd stops.
    async fn reporting<T>(
        &self,
        progress: &Progress,
        work: impl Future<Output = Result<T, FetchFailure>>,
    ) -> Result<T, FetchFailure> {
        let mut interval = tokio::time::interval(PROGRESS_INTERVAL);
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                result = &mut work => return result,
                () = self.stop.cancelled() => {
                    return Err(FetchFailure::Local("subd is stopping".to_owned()));
                }
                _ = interval.tick() => self.report(progress),
            }
        }
    }

    fn report(&self, progress: &Progress) {
        let arrived = {
            let mut arrived = progress.arrived.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *arrived)
        };
        if arrived.is_empty() {
            return;
        }
        self.board.add_to_cache(&arrived, |id| self.cache.size_of(id).is_some());
        self.board.change(|state| {
            if let Some(fetch) = &mut state.fetch {
                fetch.objects = progress.objects.load(Ordering::Relaxed);
                fetch.bytes = progress.bytes.load(Ordering::Relaxed);
            }
        });
    }

    /// Those of `objects` that are not cached, each once.
    fn missing(&self, objects: &[FetchObject]) -> Vec<FetchObject> {
        let mut seen = BTreeSet::new();
        objects
            .iter()
            .filter(|object| seen.insert(object.id) && self.cache.size_of(&object.id).is_none())
            .copied()
            .collect()
    }

    /// Asks one source for `missing`; gives what is to be said against it, if something is.
    async fn ask(
        &self,
        source: &str,
        missing: &[FetchObject],
        progress: &Arc<Progress>,
    ) -> Result<Option<String>, FetchFailure> {
        let peer = match Peer::parse(source, SOURCE_PORT) {
            Ok(peer) => peer,
            Err(error) => return Ok(Some(report(&error))),
        };
        let client = Client::new(peer);
        let asking = batches(missing).into_iter().map(|batch| {
            let (client, progress) = (client.clone(), Arc::clone(progress));
            self.ask_for_batch(client, batch, progress)
        });
        let mut answers = futures_util::stream::iter(asking).buffer_unordered(BATCHES_IN_FLIGHT);
        let mut complaint = None;
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(()) => {}
                Err(BatchError::Local(text)) => return Err(FetchFailure::Local(text)),
                Err(BatchError::Content(text)) => complaint = complaint.or(Some(text)),
                // The connection is of no use: the other batches would fail alike.
                Err(BatchError::Source(text)) => return Ok(Some(text)),
            }
        }
        Ok(complaint)
    }

    async fn ask_for_batch(
        &self,
        client: Client,
        batch: Vec<FetchObject>,
        progress: Arc<Progress>,
    ) -> Result<(), BatchError> {
        let request = GetObjectsRequest { ids: batch.iter().map(|object| object.id).collect() };
        let source = |error: &dyn std::error::Error| BatchError::Source(report(error));
        let mut reader = client.get_objects(&request).await.map_err(|error| source(&error))?;
        let (sender, receiver) = mpsc::channel(PIECES_MAX);
        let writer = Writer {
            cache: Arc::clone(&self.cache),
            wanted: batch.iter().map(|object| (object.id, object.size_bytes)).collect(),
            progress,
            fetched_bytes: Arc::clone(&self.fetched_bytes),
        };
        let writing = tokio::task::spawn_blocking(move || writer.run(receiver));
        let reading = async {
            loop {
                let (id, size_bytes) = match reader.head().await? {
                    Head::Object { id, size_bytes } => (id, size_bytes),
                    // What is absent stays missing, which is noticed at the end.
                    Head::Absent(_) => continue,
                    Head::End => return Ok(()),
                };
                let mut open = sender.send(Piece::Begin { id, size_bytes }).await.is_ok();
                while let Some(chunk) = reader.chunk().await? {
                    open = open && sender.send(Piece::Chunk(chunk)).await.is_ok();
                }
                open = open && sender.send(Piece::End).await.is_ok();
                // The writer ends early only with an error, which is the one that counts.
                if !open {
                    return Ok(());
                }
            }
        };
        let read: Result<(), common::wire::client::StreamError> = reading.await;
        drop(sender);
        let written = writing.await.map_err(|error| BatchError::Local(error.to_string()))?;
        written?;
        read.map_err(|error| source(&error))
    }
}

/// A batch that did not arrive as it should.
enum BatchError {
    /// The source cannot be used.
    Source(String),
    /// The source gave wrong content.
    Content(String),
    /// The cache cannot be written.
    Local(String),
}

/// What the reader of a batch hands to its writer.
enum Piece {
    Begin { id: ObjectId, size_bytes: u64 },
    Chunk(Bytes),
    End,
}

/// Hashes and writes what arrives.
struct Writer {
    cache: Arc<Cache>,
    wanted: BTreeMap<ObjectId, u64>,
    progress: Arc<Progress>,
    fetched_bytes: Arc<AtomicU64>,
}

impl Writer {
    /// Writes until the sender is gone. Wrong objects are skipped, and told at the end.
    fn run(&self, mut pieces: mpsc::Receiver<Piece>) -> Result<(), BatchError> {
        let mut current: Option<(ObjectId, Receiving<'_>)> = None;
        let mut wrong: Option<String> = None;
        while let Some(piece) = pieces.blocking_recv() {
            let result = match piece {
                Piece::Begin { id, size_bytes } => match self.begin(id, size_bytes) {
                    Ok(receiving) => {
                        current = Some((id, receiving));
                        Ok(())
                    }
                    Err(error) => Err(error),
                },
                Piece::Chunk(chunk) => match &mut current {
                    Some((_, receiving)) => receiving.write(&chunk).map_err(classify),
                    None => Ok(()),
                },
                Piece::End => match current.take() {
                    Some((id, receiving)) => self.end(id, receiving),
                    None => Ok(()),
                },
            };
            match result {
                Ok(()) => {}
                Err(BatchError::Content(text)) => {
                    current = None;
                    wrong = wrong.or(Some(text));
                }
                Err(error) => return Err(error),
            }
        }
        wrong.map_or(Ok(()), |text| Err(BatchError::Content(text)))
    }

    fn begin(&self, id: ObjectId, size_bytes: u64) -> Result<Receiving<'_>, BatchError> {
        match self.wanted.get(&id) {
            None => Err(BatchError::Content(format!("it sent {id}, which nobody asked for"))),
            Some(wanted) if *wanted != size_bytes => Err(BatchError::Content(format!(
                "it has {size_bytes} bytes for object {id} of {wanted} bytes"
            ))),
            Some(_) => self.cache.receive(id, size_bytes).map_err(classify),
        }
    }

    fn end(&self, id: ObjectId, receiving: Receiving<'_>) -> Result<(), BatchError> {
        receiving.finish().map_err(classify)?;
        let bytes = self.wanted.get(&id).copied().unwrap_or(0);
        self.progress.objects.fetch_add(1, Ordering::Relaxed);
        self.progress.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.progress.arrived.lock().unwrap_or_else(PoisonError::into_inner).push(id);
        Ok(())
    }
}

fn classify(error: CacheError) -> BatchError {
    match error {
        CacheError::Wrong { .. } => BatchError::Content(report(&error)),
        _ => BatchError::Local(report(&error)),
    }
}

fn check(request: &FetchRequest) -> Result<(), Fault> {
    let (objects, sources) = (request.objects.len(), request.sources.len());
    if objects > IDS_MAX {
        let text = format!("{objects} objects in one fetch: at most {IDS_MAX} are accepted");
        return Err(Fault::new(FaultCode::TooLarge, text));
    }
    if sources > SOURCES_MAX || (sources == 0 && objects > 0) {
        let text = format!("{sources} sources: 1 to {SOURCES_MAX} are accepted");
        return Err(Fault::new(FaultCode::BadRequest, text));
    }
    Ok(())
}

/// Checks that `missing` fits into `space` and leaves a reserve.
fn check_space(missing: &[FetchObject], space: Space) -> Result<(), FetchFailure> {
    match shortage(missing.iter().map(|object| object.size_bytes), space) {
        None => Ok(()),
        Some(need_bytes) => {
            Err(FetchFailure::InsufficientSpace { need_bytes, free_bytes: space.free_bytes })
        }
    }
}

/// What is needed, in bytes, to write files of `sizes` bytes and leave a reserve, if `space` is not
/// enough for it.
#[must_use]
pub fn shortage(sizes: impl Iterator<Item = u64>, space: Space) -> Option<u64> {
    let blocks = |size: u64| size.max(1).div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES);
    let (mut sum, mut need_inodes) = (0_u64, RESERVE_INODES);
    for size in sizes {
        sum = sum.saturating_add(blocks(size));
        need_inodes += 1;
    }
    let reserve = RESERVE_BYTES_MAX.min(space.free_bytes / 100);
    let need_bytes = sum.saturating_add(reserve);
    (need_bytes > space.free_bytes || need_inodes > space.free_inodes).then_some(need_bytes)
}

/// Splits objects into batches that keep their order.
fn batches(objects: &[FetchObject]) -> Vec<Vec<FetchObject>> {
    let mut batches: Vec<Vec<FetchObject>> = Vec::new();
    let mut bytes = 0_u64;
    for object in objects {
        bytes = bytes.saturating_add(object.size_bytes);
        match batches.last_mut() {
            Some(batch) if batch.len() < BATCH_OBJECTS_MAX && bytes <= BATCH_BYTES_MAX => {
                batch.push(*object);
            }
            _ => {
                bytes = object.size_bytes;
                batches.push(vec![*object]);
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use common::object::Algorithm;

    use super::*;

    fn object(number: u64, size_bytes: u64) -> FetchObject {
        FetchObject { id: Algorithm::Blake3.digest(&number.to_le_bytes()), size_bytes }
    }

    #[test]
    fn batches_are_limited_in_number_and_in_bytes() {
        let lengths = |objects: &[FetchObject]| -> Vec<usize> {
            batches(objects).iter().map(Vec::len).collect()
        };
        assert_eq!(lengths(&[]), [0_usize; 0]);
        let many: Vec<_> = (0..4_001).map(|number| object(number, 1)).collect();
        assert_eq!(lengths(&many), [2_000, 2_000, 1]);
        let mib = 1 << 20;
        let sizes = [40, 20, 10, 100, 64, 0, 1].map(|size| size * mib);
        let large: Vec<_> = (0..).zip(sizes).map(|(number, size)| object(number, size)).collect();
        assert_eq!(lengths(&large), [2, 1, 1, 2, 1]);
    }

    #[test]
    fn space_is_counted_in_blocks_with_a_reserve() {
        let space = |free_bytes, free_inodes| Space { free_bytes, free_inodes };
        let two = [object(0, 1), object(1, 4_097)];
        assert_eq!(check_space(&two, space(12_412, 258)), Ok(()));
        let failure = |need_bytes, free_bytes| {
            Err(FetchFailure::InsufficientSpace { need_bytes, free_bytes })
        };
        assert_eq!(check_space(&two, space(12_400, 258)), failure(12_412, 12_400));
        assert_eq!(check_space(&two, space(1_000_000, 257)), failure(22_288, 1_000_000));
        let huge = [object(0, u64::MAX), object(1, u64::MAX)];
        assert!(check_space(&huge, space(u64::MAX - 1, u64::MAX)).is_err());
    }
}
