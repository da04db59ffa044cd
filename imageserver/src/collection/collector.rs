//! When collections are made, one at a time, and what became of them.

use crate::store::error::CollectError;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use api::image_server::collection::{Amount, CollectReply, CollectRequest};
use model::lock::locked;
use model::report::report;
use model::tree::Time;
use rpc::audit_log::AuditLog;
use tokio::sync::Notify;

use crate::clock::wall;
use crate::core::collection::disk_pressure::{Bounds, Pressure};
use crate::store::Store;
use crate::store::contract::CollectionProgress;

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
    started: Instant,
    running: Mutex<()>,
    state: Mutex<State>,
    uploaded: Notify,
    audit: AuditLog,
}

impl Collector {
    /// Collects by itself within `bounds`, when it is told that time has passed.
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

    /// Has what is collected without being asked for recorded in `audit`.
    #[must_use]
    pub fn recording(self, audit: AuditLog) -> Self {
        Self { audit, ..self }
    }

    fn record(&self, reply: &CollectReply, why: &str) {
        let Amount { objects, bytes } = reply.removed;
        if objects > 0 {
            let arguments = format!("objects={objects} bytes={bytes}");
            self.audit.decided("collect-objects", &arguments, why);
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
            Ok(Some(space)) => space,
            // It is never full.
            Ok(None) => return self.tend(stop),
            Err(error) => return tracing::error!("{}", report(&error)),
        };
        let goal = self.state().pressure.goal(self.bounds, space, self.now());
        let Some(bytes) = goal else { return };
        let used = space.percent();
        tracing::info!(used_percent = used, bytes, "the disk is nearly full: collects objects");
        let freed = match self.collect(CollectRequest { dry_run: false, bytes }, stop) {
            Ok(reply) => {
                self.record(&reply, "the disk is nearly full");
                reply.removed.bytes
            }
            Err(CollectError::Busy | CollectError::Stopped) => return,
            Err(error) => {
                tracing::error!(used_percent = used, "{}", report(&error));
                0
            }
        };
        self.state().pressure.note(self.now(), bytes, freed);
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

    /// Does what a store needs from time to time that has no end.
    fn tend(&self, stop: impl Fn() -> bool) {
        self.store.collecting.tend();
        if !self.store.collecting.is_due() {
            return;
        }
        match self.collect(CollectRequest { dry_run: false, bytes: 0 }, stop) {
            Ok(reply) => self.record(&reply, "no image needed them for long enough"),
            Err(CollectError::Stopped) => {}
            Err(error @ (CollectError::Busy | CollectError::Elsewhere { .. })) => {
                tracing::info!("{}", report(&error));
            }
            Err(error) => tracing::error!("{}", report(&error)),
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
        let result = self.store.collecting.collect(request, self, &stop);
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
        locked(&self.state)
    }

    /// Seconds since the server started.
    fn now(&self) -> u64 {
        self.started.elapsed().as_secs()
    }
}

impl CollectionProgress for Collector {
    fn unneeded(&self, amount: Amount) {
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
