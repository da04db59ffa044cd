//! Carries collections out: walks, lists, and removes what [`super::decision`] gives free.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use common::api::image_server::collection::{Amount, CollectReply, CollectRequest};
use common::image::ImageName;
use common::object::ObjectId;
use common::report::report;
use common::tree::Time;
use common::when::lasting;
use tokio::sync::Notify;

use super::decision::{Knowledge, Verdict, decide};
use super::oldest::{Candidate, Oldest, REMEMBERED_MAX};
use super::pressure::{Bounds, Pressure};
use super::walk::{WalkError, walk};
use crate::clock::wall;
use crate::store::removal::Taken;
use crate::store::{Store, StoreError};

/// How many files are renamed at most while no image can be added and no lease given.
const BATCH_MAX: usize = 64;

/// Why nothing, or not all, was collected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectError {
    /// One is under way.
    #[error("a collection is under way: try again when it has ended")]
    Busy,
    /// Leases that were given before the start may still hold.
    #[error(
        "nothing is collected for another {}: what was uploaded, or found to be there, before the \
         server was restarted may be on its way into an image until then",
        lasting(*seconds)
    )]
    Held {
        /// For how much longer.
        seconds: u64,
    },
    /// The record of an image cannot be used, so nobody knows what it needs.
    #[error(
        "nothing is collected, because the record of image {image} is damaged and nobody knows \
         what it needs: put the record back, or delete the image"
    )]
    Damaged {
        /// The image.
        image: ImageName,
    },
    /// An image cannot be walked.
    #[error(
        "nothing is collected, because nobody knows all that an image needs: upload what it \
         lacks, or delete it"
    )]
    Walk {
        /// Which image, and what is wrong with it.
        #[source]
        source: WalkError,
    },
    /// The server stops.
    #[error("the image server stops: the collection was broken off")]
    Stopped,
    /// The store failed.
    #[error("the collection was broken off")]
    Store {
        /// What it said.
        #[source]
        source: StoreError,
    },
}

impl From<StoreError> for CollectError {
    fn from(source: StoreError) -> Self {
        Self::Store { source }
    }
}

/// What became of the last collection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastRun {
    /// When it ended.
    pub ended: Time,
    /// How long it took.
    pub took: Duration,
    /// What it did, or why it did not.
    pub outcome: Result<CollectReply, String>,
}

#[derive(Debug, Default)]
struct State {
    pressure: Pressure,
    last: Option<LastRun>,
    /// What no image needed when that was last known, less what was removed since.
    unneeded: Option<Amount>,
    removed: Amount,
}

/// Collects objects of one store, one collection at a time.
pub struct Collector {
    store: Arc<Store>,
    bounds: Bounds,
    running: Mutex<()>,
    state: Mutex<State>,
    uploaded: Notify,
}

impl Collector {
    /// Collects by itself within `bounds`, when it is told that time has passed.
    #[must_use]
    pub fn new(store: Arc<Store>, bounds: Bounds) -> Self {
        Self {
            store,
            bounds,
            running: Mutex::default(),
            state: Mutex::default(),
            uploaded: Notify::new(),
        }
    }

    /// Takes note that objects came, or found no space.
    pub fn note_upload(&self) {
        self.uploaded.notify_one();
    }

    /// Resolves when objects came since this was last waited for.
    pub async fn uploaded(&self) {
        self.uploaded.notified().await;
    }

    /// Collects if the disk is too full.
    pub fn relieve(&self, stop: impl Fn() -> bool) {
        let space = match self.store.objects.space() {
            Ok(space) => space,
            Err(error) => return tracing::error!("{}", report(&error)),
        };
        let goal = self.state().pressure.goal(self.bounds, space, self.store.leasing.now());
        let Some(bytes) = goal else { return };
        let used = space.percent();
        tracing::info!(used_percent = used, bytes, "the disk is nearly full: collects objects");
        let freed = match self.collect(CollectRequest { dry_run: false, bytes }, stop) {
            Ok(reply) => reply.removed.bytes,
            Err(CollectError::Busy | CollectError::Stopped) => return,
            Err(error) => {
                tracing::error!(used_percent = used, "{}", report(&error));
                0
            }
        };
        self.state().pressure.note(self.store.leasing.now(), bytes, freed);
        if freed < bytes {
            tracing::error!(
                used_percent = used,
                wanted = bytes,
                freed,
                "the disk is nearly full, and there is not enough that no image needs: delete \
                 images, or give the server more space"
            );
        }
    }

    /// Removes what nothing needs, or says what could be removed. Ends early if `stop` says so.
    ///
    /// # Errors
    ///
    /// [`CollectError`]. What was removed until then was not needed.
    pub fn collect(
        &self,
        request: CollectRequest,
        stop: impl Fn() -> bool,
    ) -> Result<CollectReply, CollectError> {
        let _running = match self.running.try_lock() {
            Ok(running) => running,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(CollectError::Busy),
        };
        let begun = Instant::now();
        let result = Run::new(self, request, &stop).and_then(Run::all);
        let outcome = result.as_ref().map_err(|error| report(error)).copied();
        if let Ok(reply) = &outcome {
            tracing::info!(
                images = reply.images,
                objects = reply.removed.objects,
                bytes = reply.removed.bytes,
                dry_run = request.dry_run,
                "collected objects"
            );
        }
        self.state().last = Some(LastRun { ended: wall(), took: begun.elapsed(), outcome });
        result
    }

    /// What became of the last collection; `None` if there was none since the start.
    #[must_use]
    pub fn last(&self) -> Option<LastRun> {
        self.state().last.clone()
    }

    /// What no image needed when the images were last walked, less what was removed since.
    #[must_use]
    pub fn unneeded(&self) -> Option<Amount> {
        self.state().unneeded
    }

    /// What was removed since the start.
    #[must_use]
    pub fn removed(&self) -> Amount {
        self.state().removed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One collection.
struct Run<'collector, Stop> {
    collector: &'collector Collector,
    request: CollectRequest,
    stop: &'collector Stop,
    knowledge: Knowledge,
    reply: CollectReply,
}

impl<'collector, Stop: Fn() -> bool> Run<'collector, Stop> {
    fn new(
        collector: &'collector Collector,
        request: CollectRequest,
        stop: &'collector Stop,
    ) -> Result<Self, CollectError> {
        let held_seconds = collector.store.leasing.everything_for();
        if held_seconds > 0 && !request.dry_run {
            return Err(CollectError::Held { seconds: held_seconds });
        }
        let reply = CollectReply { held_seconds, ..CollectReply::default() };
        Ok(Self { collector, request, stop, knowledge: Knowledge::default(), reply })
    }

    fn all(mut self) -> Result<CollectReply, CollectError> {
        self.walk()?;
        let mut is_first = true;
        loop {
            let oldest = self.list(is_first)?;
            is_first = false;
            let is_complete = oldest.is_complete();
            let candidates = oldest.into_vec();
            if self.request.dry_run {
                self.foresee(&candidates);
                return Ok(self.reply);
            }
            let before = self.reply.removed.objects;
            self.remove(&candidates)?;
            if is_complete || self.is_enough() || self.reply.removed.objects == before {
                return Ok(self.reply);
            }
        }
    }

    /// Walks all images that there are and that were not walked.
    fn walk(&mut self) -> Result<(), CollectError> {
        let store = &self.collector.store;
        if let Some((image, _)) = store.images.damaged().into_iter().next() {
            return Err(CollectError::Damaged { image });
        }
        let (additions, starts) = store.images.starts();
        let walked = walk(store, &mut self.knowledge.marks, &starts, self.stop);
        if !walked.map_err(|source| CollectError::Walk { source })? {
            return Err(CollectError::Stopped);
        }
        self.knowledge.additions = additions;
        self.reply.images = starts.len() as u64;
        Ok(())
    }

    /// Finds what no image needs. Counts it when it does so for the first time.
    fn list(&mut self, is_first: bool) -> Result<Oldest, CollectError> {
        let store = &self.collector.store;
        let now = store.leasing.now();
        let mut oldest = Oldest::new(REMEMBERED_MAX);
        let (mut unneeded, mut leased) = (Amount::default(), Amount::default());
        let marks = &self.knowledge.marks;
        let go_on = || !(self.stop)();
        let all = store.objects.visit(
            go_on,
            |id| !marks.needs(id),
            |candidate| {
                unneeded.count(candidate.bytes);
                if store.leasing.table().hold(now, &candidate.id) {
                    leased.count(candidate.bytes);
                } else {
                    oldest.offer(candidate);
                }
            },
        )?;
        if !all {
            return Err(CollectError::Stopped);
        }
        if is_first {
            (self.reply.unneeded, self.reply.leased) = (unneeded, leased);
        }
        self.collector.state().unneeded = Some(unneeded);
        Ok(oldest)
    }

    fn is_enough(&self) -> bool {
        self.request.bytes > 0 && self.reply.removed.bytes >= self.request.bytes
    }

    /// Says what would be removed.
    fn foresee(&mut self, candidates: &[Candidate]) {
        if self.request.bytes == 0 {
            let Amount { objects, bytes } = self.reply.unneeded;
            let leased = self.reply.leased;
            self.reply.removed =
                Amount { objects: objects - leased.objects, bytes: bytes - leased.bytes };
            return;
        }
        for candidate in candidates {
            if self.is_enough() {
                break;
            }
            self.reply.removed.count(candidate.bytes);
        }
    }

    fn remove(&mut self, candidates: &[Candidate]) -> Result<(), CollectError> {
        let mut rest = candidates;
        while !rest.is_empty() && !self.is_enough() {
            if (self.stop)() {
                return Err(CollectError::Stopped);
            }
            let batch = &rest[..rest.len().min(BATCH_MAX)];
            match self.take_away(batch) {
                Batch::WalkAgain => self.walk()?,
                Batch::Done { taken, failed } => {
                    rest = &rest[batch.len()..];
                    let mut failed = failed.map_or(Ok(()), Err);
                    for one in taken {
                        self.note(one.bytes());
                        // One that fails leaves the others nothing but to go.
                        failed = failed.and(one.remove());
                    }
                    failed?;
                }
            }
        }
        Ok(())
    }

    /// Takes those of `batch` away that are still free, while no image is added and no lease given.
    fn take_away(&self, batch: &[Candidate]) -> Batch {
        let store = &self.collector.store;
        let _no_image = store.adding.write().unwrap_or_else(PoisonError::into_inner);
        let additions = store.images.additions();
        let leases = store.leasing.table();
        let now = store.leasing.now();
        let mut taken = Vec::new();
        let mut bytes = self.reply.removed.bytes;
        for candidate in batch {
            if self.request.bytes > 0 && bytes >= self.request.bytes {
                break;
            }
            let id: &ObjectId = &candidate.id;
            match decide(&self.knowledge, additions, &leases, now, id) {
                Verdict::WalkAgain => return Batch::WalkAgain,
                Verdict::Needed | Verdict::Leased => {}
                Verdict::Remove => match store.objects.take_away(id) {
                    Ok(None) => {}
                    Ok(Some(one)) => {
                        bytes += one.bytes();
                        taken.push(one);
                    }
                    Err(error) => return Batch::Done { taken, failed: Some(error) },
                },
            }
        }
        Batch::Done { taken, failed: None }
    }

    /// Takes note that an object of so many bytes was removed.
    fn note(&mut self, bytes: u64) {
        self.reply.removed.count(bytes);
        let mut state = self.collector.state();
        state.removed.count(bytes);
        if let Some(unneeded) = &mut state.unneeded {
            unneeded.objects = unneeded.objects.saturating_sub(1);
            unneeded.bytes = unneeded.bytes.saturating_sub(bytes);
        }
    }
}

/// What became of a batch.
enum Batch {
    /// An image was added: nothing was done.
    WalkAgain,
    /// These were taken away, until one failed.
    Done { taken: Vec<Taken>, failed: Option<StoreError> },
}
