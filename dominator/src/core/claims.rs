//! The claims of all machines: combines the budgets, the stopped images and the network budget.
//!
//! A machine makes a claim before it stages an update, and holds it until the end of the update is
//! known, reboot and verification included. So no staged update expires while it waits.
//!
//! # Invariants
//!
//! * A Commit is sent only with a granted claim ([`ClaimTable::begin`]): within all budgets, and
//!   not for an image to which updates have stopped, unless the machine has that image already.
//! * After a restart no limited claim is granted before the activity of all machines is known, or
//!   [`STARTUP_WAIT`] is over, because updates that are already under way count.
// tidy: core

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::dominator::orders::{BudgetReport, StoppedImage};
use model::display::counted;
use model::image::ImageName;

use super::budget::limits::MachineLimits;
use super::budget::{Budget, ClaimantId, Demand};
use super::timing::Now;
use crate::core::image_breaker::{FailureLimits, ImageBreaker, UpdateFailure};
use crate::core::network_budget::{Download, NetworkBudget};

/// How long the dominator waits after its start for machines that do not answer.
pub const STARTUP_WAIT: Duration = Duration::from_secs(60);

/// How many limits are shown; there may be one for each location.
const LIMITS_MAX: usize = 100;

/// The configured limits.
#[derive(Clone, Debug)]
pub struct ClaimSettings {
    /// The limits of all updates.
    pub updating: MachineLimits,
    /// The limits of updates of high impact.
    pub high_impact: MachineLimits,
    /// The limit of all fetches together, in bytes per second.
    pub network: Option<u64>,
    pub failures: FailureLimits,
}

/// An update that a machine needs, or that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateClaim {
    pub demand: Demand,
    /// The parts of the image that the machine does not have now. The result counts for them, and
    /// the claim waits when updates to one of them have stopped.
    pub new_parts: Vec<ImageName>,
}

/// A claim of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// For an update.
    Update(UpdateClaim),
    /// For an update that is already under way.
    UnderWay(UpdateClaim),
    /// For a fetch.
    Fetch(Download),
    /// None: the machine cannot get an image with these new parts, because paths are blocked.
    Blocked(Vec<ImageName>),
    /// None: the machine has this image, which is not composed, and it or its tasks are not
    /// healthy, or are so again.
    Health { image: ImageName, is_ill: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimKind {
    Update,
    Fetch,
}

/// How an update ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateEnd {
    /// It did not begin, or it is not known whether it did.
    Withdrawn,
    /// It succeeded.
    Good,
    Failed(UpdateFailure),
}

/// The end of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The update ended.
    Update(UpdateEnd),
    /// The fetch is ordered, or not needed any more.
    Fetch,
}

/// The answer to a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimAnswer {
    Granted,
    /// The claim waits, for this reason.
    Waits(Arc<str>),
    /// Updates to the image have stopped, for this reason.
    Stopped(Arc<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClaimState {
    /// For a place in the budgets, or until updates to the image are resumed.
    Waiting,
    Granted,
    Begun,
}

#[derive(Clone, Debug)]
struct HeldClaim {
    update: UpdateClaim,
    state: ClaimState,
}

#[derive(Clone, Debug)]
pub struct ClaimTable {
    started: Duration,
    budget: Budget,
    breaker: ImageBreaker,
    network: NetworkBudget,
    updates: BTreeMap<ClaimantId, HeldClaim>,
    /// Machines whose activity at the start of the dominator is not known yet.
    unknown: BTreeSet<ClaimantId>,
    /// True once the machine database is known.
    is_populated: bool,
    /// Machines whose answer may have changed.
    changed: BTreeSet<ClaimantId>,
    /// Counts the changes of the list of stopped images.
    stopped_version: u64,
}

impl ClaimTable {
    /// Starts `now`; updates to `stopped` had stopped before the restart.
    #[must_use]
    pub fn new(settings: ClaimSettings, stopped: Vec<StoppedImage>, now: Now) -> Self {
        Self {
            started: now.elapsed,
            budget: Budget::new(settings.updating, settings.high_impact),
            breaker: ImageBreaker::new(settings.failures, stopped),
            network: NetworkBudget::new(settings.network),
            updates: BTreeMap::new(),
            unknown: BTreeSet::new(),
            is_populated: false,
            changed: BTreeSet::new(),
            stopped_version: 0,
        }
    }

    /// Adds a machine.
    pub fn enroll(&mut self, claimant: ClaimantId, now: Now) {
        if now.elapsed < self.started + STARTUP_WAIT {
            self.unknown.insert(claimant);
        }
    }

    /// Handles that the activity of a machine is known, or that it does not answer.
    pub fn activity_known(&mut self, claimant: ClaimantId, now: Now) {
        if self.unknown.remove(&claimant) && self.is_open(now) {
            self.advance(now);
        }
    }

    /// Removes a machine.
    pub fn leave(&mut self, claimant: ClaimantId, now: Now) {
        self.unknown.remove(&claimant);
        self.updates.remove(&claimant);
        self.budget.release(claimant);
        self.network.cancel(claimant);
        self.breaker.forget(claimant);
        self.changed.remove(&claimant);
        self.advance(now);
    }

    /// Sets the number of machines at each location, and the images that they must have or will get
    /// next.
    pub fn set_machines(
        &mut self,
        population: &BTreeMap<String, u32>,
        images: &BTreeSet<ImageName>,
        now: Now,
    ) {
        self.is_populated = true;
        self.budget.set_machines(population);
        self.stopped_version += u64::from(self.breaker.retain(images));
        self.advance(now);
    }

    /// Sets the limits. Granted claims stay granted.
    pub fn set(&mut self, settings: ClaimSettings, now: Now) {
        self.budget.set_limits(settings.updating, settings.high_impact);
        self.network.set_limit(settings.network);
        self.breaker.set_limits(settings.failures);
        self.advance(now);
    }

    /// Makes or repeats a claim. [`ClaimTable::answer`] returns the answer.
    pub fn claim(&mut self, claimant: ClaimantId, claim: Claim, now: Now) {
        match claim {
            Claim::Fetch(download) => self.network.ask(claimant, download),
            Claim::Blocked(new_parts) => {
                for image in &new_parts {
                    self.record(claimant, image, Some(UpdateFailure::Blocked), now);
                }
            }
            Claim::Health { image, is_ill } => {
                if self.breaker.has_result(claimant, &image) {
                    let result = is_ill.then_some(UpdateFailure::Unhealthy);
                    self.record(claimant, &image, result, now);
                }
            }
            Claim::UnderWay(update) => {
                self.budget.count(claimant, update.demand.clone());
                self.updates.insert(claimant, HeldClaim { update, state: ClaimState::Begun });
            }
            Claim::Update(update) => {
                if self.stop_of(&update).is_some() {
                    self.budget.release(claimant);
                } else {
                    self.budget.ask(claimant, update.demand.clone());
                }
                let is_held = self.budget.is_held(claimant);
                let state = if is_held { ClaimState::Granted } else { ClaimState::Waiting };
                self.updates.insert(claimant, HeldClaim { update, state });
            }
        }
        self.advance(now);
        // The caller reads the answer at once.
        self.changed.remove(&claimant);
    }

    /// Returns true if a Commit may be sent now. A lost Commit may be sent again only if updates to
    /// its image have not stopped meanwhile.
    #[must_use]
    pub fn begin(&mut self, claimant: ClaimantId) -> bool {
        let held = self.updates.get(&claimant);
        let is_stopped = held.is_some_and(|held| self.stop_of(&held.update).is_some());
        let Some(held) = self.updates.get_mut(&claimant) else { return false };
        if is_stopped && held.state != ClaimState::Waiting {
            held.state = ClaimState::Waiting;
            self.budget.release(claimant);
            self.changed.insert(claimant);
        }
        if held.state == ClaimState::Waiting {
            return false;
        }
        held.state = ClaimState::Begun;
        true
    }

    /// Releases a claim.
    pub fn release(&mut self, claimant: ClaimantId, release: Release, now: Now) {
        match release {
            Release::Fetch => self.network.cancel(claimant),
            Release::Update(end) => {
                self.budget.release(claimant);
                let held = self.updates.remove(&claimant);
                let result = match end {
                    UpdateEnd::Withdrawn => None,
                    UpdateEnd::Good => Some(None),
                    UpdateEnd::Failed(failed) => Some(Some(failed)),
                };
                if let (Some(HeldClaim { update, .. }), Some(result)) = (held, result) {
                    for image in &update.new_parts {
                        self.record(claimant, image, result, now);
                    }
                }
            }
        }
        self.advance(now);
    }

    /// Records how the update of a machine to `image` ended.
    fn record(
        &mut self,
        claimant: ClaimantId,
        image: &ImageName,
        result: Option<UpdateFailure>,
        now: Now,
    ) {
        if !self.breaker.record(claimant, image, result, now.wall) {
            return;
        }
        self.stopped_version += 1;
        // Updates to the image that have not begun wait.
        for (&claimant, held) in &mut self.updates {
            if held.state != ClaimState::Begun && held.update.new_parts.contains(image) {
                held.state = ClaimState::Waiting;
                self.budget.release(claimant);
                self.changed.insert(claimant);
            }
        }
    }

    /// Resumes updates to an image, and counts its failures from zero. Returns false if they had
    /// not stopped.
    pub fn resume(&mut self, image: &ImageName, now: Now) -> bool {
        if !self.breaker.resume(image) {
            return false;
        }
        self.stopped_version += 1;
        for (&claimant, held) in &self.updates {
            if held.state == ClaimState::Waiting && held.update.new_parts.contains(image) {
                self.budget.ask(claimant, held.update.demand.clone());
                self.changed.insert(claimant);
            }
        }
        self.advance(now);
        true
    }

    /// Grants all claims that can be granted now.
    pub fn advance(&mut self, now: Now) {
        let is_open = self.is_open(now);
        for claimant in self.budget.grant(now.elapsed, is_open) {
            if let Some(held) = self.updates.get_mut(&claimant) {
                held.state = ClaimState::Granted;
            }
            self.changed.insert(claimant);
        }
        self.changed.extend(self.network.grant(now.elapsed));
    }

    /// Returns when [`ClaimTable::advance`] must be called if nothing else happens before.
    #[must_use]
    pub fn wake_at(&self, now: Now) -> Option<Duration> {
        let startup = (!self.is_open(now)).then_some(self.started + STARTUP_WAIT);
        [startup, self.network.next()].into_iter().flatten().min()
    }

    /// Returns the answer to a claim; `None` if the machine has none.
    #[must_use]
    pub fn answer(
        &self,
        claimant: ClaimantId,
        purpose: ClaimKind,
        now: Now,
    ) -> Option<ClaimAnswer> {
        if purpose == ClaimKind::Fetch {
            let why = self.network.why(claimant);
            return match self.network.is_granted(claimant) {
                true => Some(ClaimAnswer::Granted),
                false => (!why.is_empty()).then(|| ClaimAnswer::Waits(why.into())),
            };
        }
        let held = self.updates.get(&claimant)?;
        if held.state != ClaimState::Waiting {
            return Some(ClaimAnswer::Granted);
        }
        if let Some(stop) = self.stop_of(&held.update) {
            return Some(ClaimAnswer::Stopped(stop.why.as_str().into()));
        }
        if !self.is_open(now) {
            let why = format!(
                "the dominator has just started, and waits for the first answers of all machines; \
                 no answer yet from {}",
                counted(self.unknown.len() as u64, "machine")
            );
            return Some(ClaimAnswer::Waits(why.into()));
        }
        Some(ClaimAnswer::Waits(self.budget.why(claimant).into()))
    }

    fn stop_of(&self, update: &UpdateClaim) -> Option<&StoppedImage> {
        update.new_parts.iter().find_map(|image| self.breaker.stop_of(image))
    }

    fn is_open(&self, now: Now) -> bool {
        now.elapsed >= self.started + STARTUP_WAIT || (self.is_populated && self.unknown.is_empty())
    }

    /// Returns the machines whose answer may have changed since the last call.
    pub fn take_changed(&mut self) -> BTreeSet<ClaimantId> {
        std::mem::take(&mut self.changed)
    }

    /// Returns all images to which updates have stopped, by name.
    #[must_use]
    pub fn stopped(&self) -> Vec<StoppedImage> {
        self.breaker.stopped()
    }

    /// Returns how often [`ClaimTable::stopped`] has changed.
    #[must_use]
    pub fn stopped_version(&self) -> u64 {
        self.stopped_version
    }

    /// Returns what operators are shown.
    #[must_use]
    pub fn report(&self) -> BudgetReport {
        let (held, waiting) = self.budget.totals();
        let (fetches_waiting, bytes_waiting) = self.network.waiting();
        let mut limits = self.budget.uses();
        limits.sort_by_key(|limit| std::cmp::Reverse(limit.waiting));
        limits.truncate(LIMITS_MAX);
        BudgetReport {
            under_way: held,
            waiting,
            fetches_waiting,
            bytes_waiting,
            limits,
            stopped: self.breaker.stopped(),
        }
    }
}

#[cfg(test)]
mod tests;
