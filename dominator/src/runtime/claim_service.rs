//! Takes the claims of all machines and notifies each of the answer. `core::claims` decides.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::dominator::orders::{BudgetReport, StoppedImage};
use model::image::ImageName;
use model::lock::locked;
use model::mdb::Machine;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::core::budget::ClaimantId;
use crate::core::claims::{Claim, ClaimAnswer, ClaimKind, ClaimSettings, ClaimTable, Release};
use crate::core::orders::Order;
use crate::runtime::clock::Clock;
use crate::runtime::saver::Saver;
use crate::storage::{Storage, StorageError, with_order};

/// The pause after the list of stopped images could not be saved.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct ServiceState {
    claims: ClaimTable,
    machines: BTreeMap<ClaimantId, Arc<Notify>>,
    last: u64,
    /// When [`ClaimService::run`] wakes.
    wake: Option<Duration>,
    /// The stopped images that were logged.
    logged: BTreeSet<ImageName>,
}

#[derive(Debug)]
pub struct ClaimService {
    clock: Clock,
    inner: Mutex<ServiceState>,
    /// Has the list of stopped images. The images that are found to fail are written behind: if the
    /// dominator is killed before the write, the same failures stop the image again.
    state: Arc<Storage>,
    saver: Saver,
    /// Notified when `wake` is earlier than before.
    changed: Notify,
}

impl ClaimService {
    /// Creates a service without claims. Updates to the stopped images of `state` stay stopped.
    pub fn new(clock: Clock, settings: ClaimSettings, state: Arc<Storage>) -> Self {
        let stopped = Vec::clone(&state.stopped_images.get());
        for stop in &stopped {
            tracing::warn!(image = %stop.image, "updates to this image have stopped: {}", stop.why);
        }
        let logged = stopped.iter().map(|stop| stop.image.clone()).collect();
        let claims = ClaimTable::new(settings, stopped, clock.now());
        let inner = ServiceState { claims, machines: BTreeMap::new(), last: 0, wake: None, logged };
        Self {
            clock,
            inner: Mutex::new(inner),
            state,
            saver: Saver::new("the list of stopped images", Duration::ZERO, RETRY_PAUSE),
            changed: Notify::new(),
        }
    }

    /// Adds a machine. Returns the number under which it claims. `nudge` is notified whenever the
    /// answer to one of its claims changes.
    pub fn enroll(&self, nudge: Arc<Notify>) -> ClaimantId {
        let mut inner = self.locked();
        inner.last += 1;
        let claimant = ClaimantId(inner.last);
        inner.claims.enroll(claimant, self.clock.now());
        inner.machines.insert(claimant, nudge);
        claimant
    }

    /// Releases all claims of a machine and removes it.
    pub fn leave(&self, claimant: ClaimantId) {
        self.change(|claims, clock| claims.leave(claimant, clock.now()));
        self.locked().machines.remove(&claimant);
    }

    /// Sets how many machines there are at each location, and which images are in use.
    pub fn set_machines<'all>(
        &self,
        machines: impl Iterator<Item = &'all Arc<Machine>>,
        images: &BTreeSet<ImageName>,
    ) {
        let mut population: BTreeMap<String, u32> = BTreeMap::new();
        for machine in machines {
            *population.entry(machine.location.clone()).or_default() += 1;
        }
        self.change(|claims, clock| claims.set_machines(&population, images, clock.now()));
    }

    /// Changes the limits. What is granted stays granted.
    pub fn set(&self, settings: ClaimSettings) {
        self.change(|claims, clock| claims.set(settings, clock.now()));
    }

    pub fn claim(&self, claimant: ClaimantId, claim: Claim) {
        self.change(|claims, clock| claims.claim(claimant, claim, clock.now()));
    }

    pub fn release(&self, claimant: ClaimantId, what: Release) {
        self.change(|claims, clock| claims.release(claimant, what, clock.now()));
    }

    /// Notes that it is known what a machine was doing when the dominator started.
    pub fn activity_known(&self, claimant: ClaimantId) {
        self.change(|claims, clock| claims.activity_known(claimant, clock.now()));
    }

    /// Notes that a Commit is about to be sent. Returns false if it must not be sent.
    #[must_use]
    pub fn begin(&self, claimant: ClaimantId) -> bool {
        self.locked().claims.begin(claimant)
    }

    /// Returns the answer to a claim.
    pub fn answer(&self, claimant: ClaimantId, purpose: ClaimKind) -> Option<ClaimAnswer> {
        self.locked().claims.answer(claimant, purpose, self.clock.now())
    }

    pub fn report(&self) -> BudgetReport {
        self.locked().claims.report()
    }

    /// Resumes updates to an image. Returns false if they had not stopped. On an error the image
    /// stays stopped. Blocks on the disk.
    pub fn resume(&self, image: &ImageName, order: &Order) -> Result<bool, StorageError> {
        if !self.locked().claims.stopped().iter().any(|stop| stop.image == *image) {
            return Ok(false);
        }
        let remove = |stopped: &mut Vec<StoppedImage>| {
            stopped.retain(|stop| stop.image != *image);
            Ok::<_, StorageError>(())
        };
        self.state.stopped_images.modify_through(remove, with_order(order))?;
        Ok(self.change(|claims, clock| claims.resume(image, clock.now())))
    }

    /// Advances the claims with time and saves the list of stopped images, until `stop` is
    /// cancelled.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let state = Arc::clone(&self.state);
        let save = move || state.stopped_images.save();
        // Apart, so that no machine waits for the disk.
        tokio::join!(self.advance(&stop), self.saver.run(save, &stop));
    }

    async fn advance(&self, stop: &CancellationToken) {
        while !stop.is_cancelled() {
            let wake = {
                let mut inner = self.locked();
                inner.wake = inner.claims.wake_at(self.clock.now());
                inner.wake
            };
            let sleep = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(self.clock.moment(at).into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = self.changed.notified() => {}
                () = sleep => self.change(|claims, clock| claims.advance(clock.now())),
            }
        }
    }

    /// Changes the claims, and nudges the machines whose answers changed.
    fn change<T>(&self, change: impl FnOnce(&mut ClaimTable, Clock) -> T) -> T {
        let mut inner = self.locked();
        let before = inner.claims.stopped_version();
        let result = change(&mut inner.claims, self.clock);
        if inner.claims.stopped_version() != before {
            self.take_stopped(&mut inner);
        }
        let news = inner.claims.take_changed();
        for nudge in news.iter().filter_map(|claimant| inner.machines.get(claimant)) {
            nudge.notify_one();
        }
        let wake = inner.claims.wake_at(self.clock.now());
        let is_earlier = wake.is_some_and(|at| inner.wake.is_none_or(|known| at < known));
        drop(inner);
        if is_earlier {
            self.changed.notify_one();
        }
        result
    }

    /// Logs which images have stopped, and puts their list into the state.
    fn take_stopped(&self, inner: &mut ServiceState) {
        let stopped = inner.claims.stopped();
        for stop in &stopped {
            if !inner.logged.contains(&stop.image) {
                let why = &stop.why;
                tracing::error!(image = %stop.image, "updates to this image have stopped: {why}");
            }
        }
        inner.logged = stopped.iter().map(|stop| stop.image.clone()).collect();
        self.state.stopped_images.set_behind(stopped);
        self.saver.notify();
    }

    fn locked(&self) -> MutexGuard<'_, ServiceState> {
        locked(&self.inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::budget::limits::MachineLimits;
    use crate::core::budget::{Demand, Impact, UpdateClass};
    use crate::core::claims::{UpdateClaim, UpdateEnd};
    use crate::core::image_breaker::{FailureLimits, UpdateFailure};

    /// A claim service that stops updates to an image at the first failure.
    fn claim_service(state: &Arc<Storage>) -> ClaimService {
        let settings = ClaimSettings {
            updating: MachineLimits::default(),
            high_impact: MachineLimits::default(),
            network: None,
            failures: FailureLimits { percent: 0, blocked_percent: 0, failures_min: 1 },
        };
        ClaimService::new(Clock::start(), settings, Arc::clone(state))
    }

    fn fail(claim_service: &ClaimService, image: &str) {
        let demand = Demand {
            class: UpdateClass::Rollout,
            impact: Impact::Plain,
            location: String::new(),
            since: Duration::ZERO,
        };
        let new_parts = vec![ImageName::new(image).unwrap()];
        let claimant = claim_service.enroll(Arc::default());
        claim_service.claim(claimant, Claim::UnderWay(UpdateClaim { demand, new_parts }));
        claim_service.release(claimant, Release::Update(UpdateEnd::Failed(UpdateFailure::Stuck)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_cannot_be_saved_is_tried_again_in_a_while_whatever_else_happens() {
        let directory = tempfile::tempdir().unwrap();
        let state = Arc::new(Storage::open(directory.path()).unwrap());
        let claim_service = Arc::new(claim_service(&state));
        let tries: Arc<Mutex<Vec<(u64, usize)>>> = Arc::default();
        let (noted, started) = (Arc::clone(&tries), tokio::time::Instant::now());
        let saved = Arc::clone(&state);
        let save = move || {
            if saved.stopped_images.is_saved() {
                return Ok(());
            }
            let mut tries = noted.lock().unwrap();
            tries.push((started.elapsed().as_secs(), saved.stopped_images.get().len()));
            match tries.len() {
                0..=3 => Err(StorageError::InUse { path: "full".into() }),
                _ => Ok(saved.stopped_images.save()?),
            }
        };
        let stop = CancellationToken::new();
        let (saving, stopping) = (Arc::clone(&claim_service), stop.clone());
        let saving = tokio::spawn(async move { saving.saver.run(save, &stopping).await });
        fail(&claim_service, "one");
        // The fleet goes on meanwhile: each of these would have the disk asked again.
        for _ in 0..25 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            claim_service.changed.notify_one();
            claim_service.saver.notify();
        }
        fail(&claim_service, "two");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(*tries.lock().unwrap(), [(0, 1), (10, 1), (20, 1), (30, 2)]);
        stop.cancel();
        saving.await.unwrap();
        drop((claim_service, state));
        let stopped = Storage::open(directory.path()).unwrap().stopped_images.get();
        let stopped: Vec<&str> = stopped.iter().map(|stop| stop.image.as_str()).collect();
        assert_eq!(stopped, ["one", "two"]);
    }
}
