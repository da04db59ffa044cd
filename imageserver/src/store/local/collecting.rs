//! Collects the objects of a data directory, as [`crate::core::collection::removal`] decides.

use std::sync::{Arc, PoisonError, RwLock};

use api::image_server::collection::{CollectReply, CollectRequest, ObjectTotals};
use model::object::ObjectId;

use crate::core::collection::removal::{
    Candidate, OldestObjects, REMEMBERED_MAX, RemovalDecision, WalkedImages, decide,
};
use crate::store::contract::{Collecting, CollectionProgress, Leasing as _};
use crate::store::error::{CollectError, StoreError};
use crate::store::image_trees::walk;
use crate::store::images::Images;
use crate::store::local::leasing::LocalLeasing;
use crate::store::local::objects::LocalObjects;
use crate::store::local::removal::RemovedObject;

/// The most files that are renamed while no image can be added and no lease given.
const BATCH_MAX: usize = 64;

/// Collects the objects of a data directory that only this server has.
pub struct LocalCollecting {
    pub(in crate::store) objects: Arc<LocalObjects>,
    pub(in crate::store) leasing: Arc<LocalLeasing>,
    pub(in crate::store) images: Arc<Images>,
    /// [`crate::store::Store::adding`]
    pub(in crate::store) adding: Arc<RwLock<()>>,
}

impl Collecting for LocalCollecting {
    fn collect(
        &self,
        request: CollectRequest,
        progress: &dyn CollectionProgress,
        stop: &dyn Fn() -> bool,
    ) -> Result<CollectReply, CollectError> {
        LocalCollection::new(self, request, progress, stop)?.run()
    }
}

/// One collection.
struct LocalCollection<'run> {
    local: &'run LocalCollecting,
    request: CollectRequest,
    progress: &'run dyn CollectionProgress,
    stop: &'run dyn Fn() -> bool,
    knowledge: WalkedImages,
    reply: CollectReply,
}

impl<'run> LocalCollection<'run> {
    fn new(
        local: &'run LocalCollecting,
        request: CollectRequest,
        progress: &'run dyn CollectionProgress,
        stop: &'run dyn Fn() -> bool,
    ) -> Result<Self, CollectError> {
        let held_seconds = local.leasing.everything_held_for();
        if held_seconds > 0 && !request.dry_run {
            return Err(CollectError::Held { seconds: held_seconds });
        }
        let reply = CollectReply { held_seconds, ..CollectReply::default() };
        Ok(Self { local, request, progress, stop, knowledge: WalkedImages::default(), reply })
    }

    fn run(mut self) -> Result<CollectReply, CollectError> {
        self.walk()?;
        let mut is_first = true;
        loop {
            let oldest = self.list(is_first)?;
            is_first = false;
            let is_complete = oldest.is_complete();
            let candidates = oldest.into_vec();
            if self.request.dry_run {
                self.estimate(&candidates);
                return Ok(self.reply);
            }
            let before = self.reply.removed.objects;
            self.remove(&candidates)?;
            if is_complete || self.is_enough() || self.reply.removed.objects == before {
                return Ok(self.reply);
            }
        }
    }

    /// Walks all images that were not walked yet.
    fn walk(&mut self) -> Result<(), CollectError> {
        let images = &self.local.images;
        if let Some((image, _)) = images.damaged().into_iter().next() {
            return Err(CollectError::Damaged { image });
        }
        let (additions, roots) = images.roots();
        let walked = walk(&*self.local.objects, &mut self.knowledge.needed, &roots, self.stop);
        if !walked.map_err(|source| CollectError::Walk { source })? {
            return Err(CollectError::Stopped);
        }
        self.knowledge.additions = additions;
        self.reply.images = roots.len() as u64;
        Ok(())
    }

    /// Finds what no image needs. Counts it when it does so for the first time.
    fn list(&mut self, is_first: bool) -> Result<OldestObjects, CollectError> {
        let local = self.local;
        let now = local.leasing.now();
        let mut oldest = OldestObjects::new(REMEMBERED_MAX);
        let (mut unneeded, mut leased) = (ObjectTotals::default(), ObjectTotals::default());
        let needed = &self.knowledge.needed;
        let go_on = || !(self.stop)();
        let all = local.objects.visit(
            go_on,
            |id| !needed.contains(id),
            |candidate| {
                unneeded.count(candidate.bytes);
                if local.leasing.table().is_leased(now, &candidate.id) {
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
        self.progress.unneeded(unneeded);
        Ok(oldest)
    }

    fn is_enough(&self) -> bool {
        self.request.bytes > 0 && self.reply.removed.bytes >= self.request.bytes
    }

    /// Counts what would be removed.
    fn estimate(&mut self, candidates: &[Candidate]) {
        if self.request.bytes == 0 {
            let ObjectTotals { objects, bytes } = self.reply.unneeded;
            let leased = self.reply.leased;
            self.reply.removed =
                ObjectTotals { objects: objects - leased.objects, bytes: bytes - leased.bytes };
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
            match self.take_out(batch) {
                BatchOutcome::WalkAgain => self.walk()?,
                BatchOutcome::Done { taken, failed } => {
                    rest = &rest[batch.len()..];
                    let mut failed = failed.map_or(Ok(()), Err);
                    for one in taken {
                        self.note(one.bytes());
                        // After a failure the others are removed all the same.
                        failed = failed.and(one.remove());
                    }
                    failed?;
                }
            }
        }
        Ok(())
    }

    /// Takes out the objects of `batch` that may be removed, while no image is added and no lease
    /// given.
    fn take_out(&self, batch: &[Candidate]) -> BatchOutcome {
        let LocalCollecting { objects, leasing, images, adding } = self.local;
        let _no_image = adding.write().unwrap_or_else(PoisonError::into_inner);
        let additions = images.additions();
        let leases = leasing.table();
        let now = leasing.now();
        let mut taken = Vec::new();
        let mut bytes = self.reply.removed.bytes;
        for candidate in batch {
            if self.request.bytes > 0 && bytes >= self.request.bytes {
                break;
            }
            let id: &ObjectId = &candidate.id;
            match decide(&self.knowledge, additions, &leases, now, id) {
                RemovalDecision::WalkAgain => return BatchOutcome::WalkAgain,
                RemovalDecision::Needed | RemovalDecision::Leased => {}
                RemovalDecision::Remove => match objects.take_out(id) {
                    Ok(None) => {}
                    Ok(Some(one)) => {
                        bytes += one.bytes();
                        taken.push(one);
                    }
                    Err(error) => return BatchOutcome::Done { taken, failed: Some(error) },
                },
            }
        }
        BatchOutcome::Done { taken, failed: None }
    }

    /// Records that an object of so many bytes was removed.
    fn note(&mut self, bytes: u64) {
        self.reply.removed.count(bytes);
        self.progress.removed(bytes);
    }
}

/// The result of taking out a batch.
enum BatchOutcome {
    /// An image was added: nothing was done.
    WalkAgain,
    /// These were taken out, until one failed.
    Done { taken: Vec<RemovedObject>, failed: Option<StoreError> },
}
