//! Removes objects that no image needs.
//!
//! An object is needed if an image names it: as a directory or a file of its tree, or as its build
//! log. The collector finds these by walking the directories of all images, each once
//! ([`crate::store::image_trees`]). An object that is not needed may still be part of an image that
//! is about to be added: a client has uploaded it, or was told that it need not upload it. Such an
//! object is leased ([`crate::core::collection::leases`]). Objects that are neither needed nor
//! leased are removed, on request or when the disk is nearly full
//! ([`crate::core::collection::disk_pressure`]), the oldest first.
//!
//! # Why no object is lost
//!
//! Images are added and leases are given between the walk and a removal. Three rules are enough.
//! [`crate::core::collection::removal`] applies them; the test `interleavings` tries all orders of
//! a few steps of each party.
//!
//! 1. A lease is given before the server looks for the object. The collector reads the leases under
//!    a lock that delays new ones, and renames the file under the same lock. So an object that a
//!    client was told of stays.
//! 2. An image is checked and made visible under a lock. Nothing is removed while the lock is held.
//! 3. Nothing is removed while there is an image that was not walked: before each batch of renames
//!    the collector also walks the images that were added since.
//!
//! A crash during a collection has only removed fewer objects. A file is first renamed into the
//! directory for temporary files and removed there without a lock, because removing a large file
//! takes long. The next start empties that directory.
//!
//! If an image cannot be walked, its needs are unknown, and nothing is removed at all.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use api::image_server::collection::{CollectReply, CollectRequest, ObjectTotals};
use model::display::error_chain;
use model::lock::locked;
use model::tree::Time;
use rpc::audit_log::AuditLog;
use system::clock::wall;
use tokio::sync::Notify;

use crate::core::collection::disk_pressure::{Bounds, Pressure};
use crate::store::Store;
use crate::store::contract::CollectionProgress;
use crate::store::error::CollectError;

/// The result of the last collection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastRun {
    pub ended: Time,
    pub took: Duration,
    /// The reply, or why the collection failed.
    pub outcome: Result<CollectReply, String>,
}

#[derive(Debug, Default)]
struct State {
    pressure: Pressure,
    last: Option<LastRun>,
    /// The objects that no image needed at the last walk, less those removed since.
    unneeded: Option<ObjectTotals>,
    removed: ObjectTotals,
}

/// Collects objects of one store, one collection at a time.
pub struct Collector {
    store: Arc<Store>,
    bounds: Bounds,
    started: Instant,
    running: Mutex<()>,
    state: Mutex<State>,
    uploaded: Notify,
    audit: AuditLog,
}

impl Collector {
    /// Creates a collector that keeps the use of the disk within `bounds`.
    #[must_use]
    pub fn new(store: Arc<Store>, bounds: Bounds) -> Self {
        Self {
            store,
            bounds,
            started: Instant::now(),
            running: Mutex::default(),
            state: Mutex::default(),
            uploaded: Notify::new(),
            audit: AuditLog::none(),
        }
    }

    /// Records collections that were not requested in `audit`.
    #[must_use]
    pub fn recording(self, audit: AuditLog) -> Self {
        Self { audit, ..self }
    }

    fn record(&self, reply: &CollectReply, why: &str) {
        let ObjectTotals { objects, bytes } = reply.removed;
        if objects > 0 {
            let arguments = format!("objects={objects} bytes={bytes}");
            self.audit.record_decision("collect-objects", &arguments, why);
        }
    }

    /// Records that objects were uploaded, or that there was no space for one.
    pub fn note_upload(&self) {
        self.uploaded.notify_one();
    }

    /// Waits for an upload since the last call.
    pub async fn uploaded(&self) {
        self.uploaded.notified().await;
    }

    /// Collects if the disk is too full.
    pub fn collect_if_full(&self, stop: impl Fn() -> bool) {
        let space = match self.store.objects.space() {
            Ok(Some(space)) => space,
            // A bucket is never full.
            Ok(None) => return self.maintain(stop),
            Err(error) => return tracing::error!("{}", error_chain(&error)),
        };
        let goal = self.state().pressure.goal(self.bounds, space, self.now());
        let Some(bytes) = goal else { return };
        let used = space.percent();
        tracing::info!(used_percent = used, bytes, "the disk is nearly full: collecting objects");
        let freed = match self.collect(CollectRequest { dry_run: false, bytes }, stop) {
            Ok(reply) => {
                self.record(&reply, "the disk is nearly full");
                reply.removed.bytes
            }
            Err(CollectError::Busy | CollectError::Stopped) => return,
            Err(error) => {
                tracing::error!(used_percent = used, "{}", error_chain(&error));
                0
            }
        };
        self.state().pressure.note(self.now(), bytes, freed);
        if freed < bytes {
            tracing::error!(
                used_percent = used,
                wanted = bytes,
                freed,
                "the disk is nearly full, and images need most of the objects: delete images, or \
                 give the server more space"
            );
        }
    }

    /// Does the periodic work of a store that has no size limit.
    fn maintain(&self, stop: impl Fn() -> bool) {
        self.store.collecting.maintain();
        if !self.store.collecting.is_due() {
            return;
        }
        match self.collect(CollectRequest { dry_run: false, bytes: 0 }, stop) {
            Ok(reply) => self.record(&reply, "no image needed them for long enough"),
            Err(CollectError::Stopped) => {}
            Err(error @ (CollectError::Busy | CollectError::Elsewhere { .. })) => {
                tracing::info!("{}", error_chain(&error));
            }
            Err(error) => tracing::error!("{}", error_chain(&error)),
        }
    }

    /// Removes unneeded objects, or counts them. Ends early if `stop` returns true.
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
        let started = Instant::now();
        let result = self.store.collecting.collect(request, self, &stop);
        let outcome = result.as_ref().map_err(|error| error_chain(error)).copied();
        if let Ok(reply) = &outcome {
            tracing::info!(
                images = reply.images,
                objects = reply.removed.objects,
                bytes = reply.removed.bytes,
                dry_run = request.dry_run,
                "collected objects"
            );
        }
        self.state().last = Some(LastRun { ended: wall(), took: started.elapsed(), outcome });
        result
    }

    /// Returns the result of the last collection since the start.
    #[must_use]
    pub fn last(&self) -> Option<LastRun> {
        self.state().last.clone()
    }

    /// Returns the objects that no image needed at the last walk, less those removed since.
    #[must_use]
    pub fn unneeded(&self) -> Option<ObjectTotals> {
        self.state().unneeded
    }

    /// Returns what was removed since the start.
    #[must_use]
    pub fn removed(&self) -> ObjectTotals {
        self.state().removed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Seconds since the server started.
    fn now(&self) -> u64 {
        self.started.elapsed().as_secs()
    }
}

impl CollectionProgress for Collector {
    fn unneeded(&self, amount: ObjectTotals) {
        self.state().unneeded = Some(amount);
    }

    fn removed(&self, bytes: u64) {
        let mut state = self.state();
        state.removed.count(bytes);
        if let Some(unneeded) = &mut state.unneeded {
            unneeded.objects = unneeded.objects.saturating_sub(1);
            unneeded.bytes = unneeded.bytes.saturating_sub(bytes);
        }
    }
}
