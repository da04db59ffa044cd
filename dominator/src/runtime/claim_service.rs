//! Takes the claims of all machines and tells each the answer. `core::claims` decides.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::dominator::budgets::{BudgetReport, StoppedImage};
use model::image::ImageName;
use model::mdb::Machine;
use model::report::report;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::core::budget::ClaimantId;
use crate::core::claims::{Claim, ClaimAnswer, ClaimKind, ClaimSettings, ClaimTable, Release};
use crate::core::order::Order;
use crate::runtime::clock::Clock;
use crate::storage::{State, StateError};

/// How long after the list of stopped images could not be kept it is tried again.
const KEEP_AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Inner {
    claims: ClaimTable,
    machines: BTreeMap<ClaimantId, Arc<Notify>>,
    last: u64,
    /// When [`ClaimService::run`] wakes.
    wake: Option<Duration>,
    /// The stopped images that the log has told of.
    told: BTreeSet<ImageName>,
    /// The number of the list of stopped images that is on the disk.
    kept: u64,
}

impl Inner {
    /// Logs which images have stopped.
    fn tell(&mut self) {
        let stopped = self.claims.stopped();
        for stop in &stopped {
            if !self.told.contains(&stop.image) {
                let why = &stop.why;
                tracing::error!(image = %stop.image, "updates to this image have stopped: {why}");
            }
        }
        self.told = stopped.into_iter().map(|stop| stop.image).collect();
    }
}

#[derive(Debug)]
pub struct ClaimService {
    clock: Clock,
    inner: Mutex<Inner>,
    /// Held while the list of stopped images is written, so that disk and memory say the same.
    keeping: Mutex<()>,
    /// There is an earlier moment to wake at.
    changed: Notify,
    /// The list of stopped images is another one.
    stopped: Notify,
}

impl ClaimService {
    /// Creates a service without claims. Updates to `stopped` had stopped before a restart.
    #[must_use]
    pub fn new(clock: Clock, settings: ClaimSettings, stopped: Vec<StoppedImage>) -> Self {
        for stop in &stopped {
            tracing::warn!(image = %stop.image, "updates to this image have stopped: {}", stop.why);
        }
        let told = stopped.iter().map(|stop| stop.image.clone()).collect();
        let claims = ClaimTable::new(settings, stopped, clock.now());
        let machines = BTreeMap::new();
        let inner = Inner { claims, machines, last: 0, wake: None, told, kept: 0 };
        Self {
            clock,
            inner: Mutex::new(inner),
            keeping: Mutex::default(),
            changed: Notify::new(),
            stopped: Notify::new(),
        }
    }

    /// Gives a machine a number under which it claims. `nudge` is notified whenever the answer to
    /// one of its claims changes.
    pub fn enroll(&self, nudge: Arc<Notify>) -> ClaimantId {
        let mut inner = self.locked();
        inner.last += 1;
        let claimant = ClaimantId(inner.last);
        inner.claims.enroll(claimant, self.clock.now());
        inner.machines.insert(claimant, nudge);
        claimant
    }

    /// Gives back all claims of a machine and forgets it.
    pub fn leave(&self, claimant: ClaimantId) {
        self.act(|claims, clock| claims.leave(claimant, clock.now()));
        self.locked().machines.remove(&claimant);
    }

    /// Tells the decisions how many machines there are at each location, and which images are in
    /// use.
    pub fn set_machines<'all>(
        &self,
        machines: impl Iterator<Item = &'all Arc<Machine>>,
        images: &BTreeSet<ImageName>,
    ) {
        let mut population: BTreeMap<String, u32> = BTreeMap::new();
        for machine in machines {
            *population.entry(machine.location.clone()).or_default() += 1;
        }
        self.act(|claims, clock| claims.set_machines(&population, images, clock.now()));
    }

    /// Changes the limits. What is granted stays granted.
    pub fn set(&self, settings: ClaimSettings) {
        self.act(|claims, clock| claims.set(settings, clock.now()));
    }

    pub fn claim(&self, claimant: ClaimantId, claim: Claim) {
        self.act(|claims, clock| claims.claim(claimant, claim, clock.now()));
    }

    pub fn release(&self, claimant: ClaimantId, what: Release) {
        self.act(|claims, clock| claims.release(claimant, what, clock.now()));
    }

    /// Notes that it is known what a machine was doing when the dominator started.
    pub fn met(&self, claimant: ClaimantId) {
        self.act(|claims, clock| claims.met(claimant, clock.now()));
    }

    /// Notes that a Commit is about to be sent. Returns false if it must not be sent.
    #[must_use]
    pub fn begin(&self, claimant: ClaimantId) -> bool {
        self.locked().claims.begin(claimant)
    }

    /// Returns the answer to a claim.
    #[must_use]
    pub fn answer(&self, claimant: ClaimantId, purpose: ClaimKind) -> Option<ClaimAnswer> {
        self.locked().claims.answer(claimant, purpose, self.clock.now())
    }

    #[must_use]
    pub fn report(&self) -> BudgetReport {
        self.locked().claims.report()
    }

    /// Resumes updates to an image. Returns false if they had not stopped. Blocks on the disk.
    ///
    /// # Errors
    ///
    /// [`StateError`]; the image stays stopped then.
    pub fn resume(
        &self,
        image: &ImageName,
        state: &State,
        order: &Order,
    ) -> Result<bool, StateError> {
        let _keeping = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stopped = self.locked().claims.stopped();
        let before = stopped.len();
        stopped.retain(|stop| stop.image != *image);
        if stopped.len() == before {
            return Ok(false);
        }
        state.set_stopped_images(&stopped, Some(order))?;
        Ok(self.act(|claims, clock| claims.resume(image, clock.now())))
    }

    /// Advances the claims with time and saves the list of stopped images, until `stop` is
    /// cancelled.
    pub async fn run(self: Arc<Self>, state: Arc<State>, stop: CancellationToken) {
        let keep = move |stopped: &[StoppedImage]| state.set_stopped_images(stopped, None);
        // Apart, so that no machine waits for the disk.
        tokio::join!(self.advance(&stop), self.keep_stopped(keep, &stop));
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
                () = sleep => self.act(|claims, clock| claims.advance(clock.now())),
            }
        }
    }

    /// Calls `keep` with the list of stopped images whenever it differs from the one on the disk.
    async fn keep_stopped(
        self: &Arc<Self>,
        keep: impl Fn(&[StoppedImage]) -> Result<(), StateError> + Send + Sync + 'static,
        stop: &CancellationToken,
    ) {
        let keep = Arc::new(keep);
        while !stop.is_cancelled() {
            if self.is_kept() {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = self.stopped.notified() => {}
                }
                continue;
            }
            let (claim_service, keep) = (Arc::clone(self), Arc::clone(&keep));
            match tokio::task::spawn_blocking(move || claim_service.keep(&*keep)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::error!("cannot save the list of stopped images: {}", report(&error));
                    tokio::select! {
                        () = stop.cancelled() => {}
                        () = tokio::time::sleep(KEEP_AGAIN) => {}
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// True if the list of stopped images is on the disk.
    fn is_kept(&self) -> bool {
        let inner = self.locked();
        inner.claims.stops() == inner.kept
    }

    /// Writes the list of stopped images. Memory is ahead of the disk here: if the dominator is
    /// killed before the write, the same failures stop the image again.
    fn keep(
        &self,
        keep: impl Fn(&[StoppedImage]) -> Result<(), StateError>,
    ) -> Result<(), StateError> {
        let _keeping = self.keeping.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, stopped) = {
            let inner = self.locked();
            (inner.claims.stops(), inner.claims.stopped())
        };
        keep(&stopped)?;
        self.locked().kept = number;
        Ok(())
    }

    /// Changes the claims, and nudges the machines whose answers changed.
    fn act<T>(&self, act: impl FnOnce(&mut ClaimTable, Clock) -> T) -> T {
        let mut inner = self.locked();
        let before = inner.claims.stops();
        let result = act(&mut inner.claims, self.clock);
        let has_stopped = inner.claims.stops() != before;
        if has_stopped {
            inner.tell();
        }
        let news = inner.claims.take_news();
        for nudge in news.iter().filter_map(|claimant| inner.machines.get(claimant)) {
            nudge.notify_one();
        }
        let wake = inner.claims.wake_at(self.clock.now());
        let is_earlier = wake.is_some_and(|at| inner.wake.is_none_or(|known| at < known));
        drop(inner);
        if has_stopped {
            self.stopped.notify_one();
        }
        if is_earlier {
            self.changed.notify_one();
        }
        result
    }

    fn locked(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::budget::limits::Limits;
    use crate::core::budget::{Class, Demand, Impact};
    use crate::core::claims::{UpdateClaim, UpdateEnd};
    use crate::core::image_breaker::{FailureLimits, UpdateFailure};

    /// A claim service that stops updates to an image at the first failure.
    fn claim_service() -> Arc<ClaimService> {
        let settings = ClaimSettings {
            updating: Limits::default(),
            high_impact: Limits::default(),
            network: None,
            failures: FailureLimits { percent: 0, failures_min: 1 },
        };
        Arc::new(ClaimService::new(Clock::start(), settings, Vec::new()))
    }

    fn fail(claim_service: &ClaimService, image: &str) {
        let demand = Demand {
            class: Class::Rollout,
            impact: Impact::Plain,
            location: String::new(),
            since: Duration::ZERO,
        };
        let image = Some(ImageName::new(image).unwrap());
        let claimant = claim_service.enroll(Arc::default());
        claim_service.claim(claimant, Claim::UnderWay(UpdateClaim { demand, image, is_new: true }));
        claim_service.release(claimant, Release::Update(UpdateEnd::Failed(UpdateFailure::Stuck)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_cannot_be_kept_is_tried_again_in_a_while_whatever_else_happens() {
        let claim_service = claim_service();
        let tries: Arc<Mutex<Vec<(u64, usize)>>> = Arc::default();
        let (noted, started) = (Arc::clone(&tries), tokio::time::Instant::now());
        let keep = move |stopped: &[StoppedImage]| {
            let mut tries = noted.lock().unwrap();
            tries.push((started.elapsed().as_secs(), stopped.len()));
            match tries.len() {
                0..=3 => Err(StateError::InUse { path: "full".into() }),
                _ => Ok(()),
            }
        };
        let stop = CancellationToken::new();
        let (keeping, stopping) = (Arc::clone(&claim_service), stop.clone());
        let keeping = tokio::spawn(async move { keeping.keep_stopped(keep, &stopping).await });
        fail(&claim_service, "one");
        // The fleet goes on meanwhile: each of these would have the disk asked again.
        for _ in 0..25 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            claim_service.changed.notify_one();
            claim_service.stopped.notify_one();
        }
        fail(&claim_service, "two");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(*tries.lock().unwrap(), [(0, 1), (10, 1), (20, 1), (30, 2)]);
        assert!(claim_service.is_kept());
        stop.cancel();
        keeping.await.unwrap();
    }
}
