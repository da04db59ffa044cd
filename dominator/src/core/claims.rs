//! Who may be updated now, and who may fetch: budgets, stopped images and the share of the network
//! together.
//!
//! A machine asks before it stages an update and keeps its claim until the update is known to have
//! ended well or not. So a claim is under way for longer than the update, reboot and verification
//! included, and nothing is staged that would expire before its turn.
//!
//! # Invariants
//!
//! * A Commit begins only with a claim that is granted ([`ClaimTable::begin`]): within all budgets, and
//!   not to an image to which updates have stopped, unless the machine has that image already.
//! * After a restart nothing that is limited is granted before all machines were asked what they
//!   are doing, or [`LEARNING`] is over: what was under way before counts.
// tidy: core

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::dominator::budgets::{BudgetReport, StoppedImage};
use model::image::ImageName;
use model::words::counted;

use super::budget::limits::Limits;
use super::budget::{Budget, ClaimantId, Demand};
use super::sub::Now;
use crate::core::image_breaker::{FailureLimits, ImageBreaker, UpdateFailure};
use crate::core::network_budget::{Download, NetworkBudget};

/// How long a dominator that starts waits for machines that do not answer.
pub const LEARNING: Duration = Duration::from_secs(60);

/// How many limits are shown: there may be one for each location.
const LIMITS_SHOWN: usize = 100;

/// What is configured.
#[derive(Clone, Debug)]
pub struct ClaimSettings {
    /// How many machines may be updating.
    pub updating: Limits,
    /// How many machines may be under work of high impact.
    pub high_impact: Limits,
    /// How much may be fetched, in bytes per second.
    pub network: Option<u64>,
    /// When updates to an image stop.
    pub failures: FailureLimits,
}

/// An update that a machine needs, or that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateClaim {
    /// What it takes of the budgets.
    pub demand: Demand,
    /// The image that it is for; `None` if that is not known.
    pub image: Option<ImageName>,
    /// True if it brings the machine to another image: then its end counts for the image, and it
    /// is held back when updates to the image have stopped.
    pub is_new: bool,
}

/// What a machine asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// To be updated.
    Update(UpdateClaim),
    /// Nothing: it is being updated.
    UnderWay(UpdateClaim),
    /// To fetch.
    Fetch(Download),
}

/// What a claim is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimKind {
    /// An update.
    Update,
    /// A fetch.
    Fetch,
}

/// How an update ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateEnd {
    /// It was not begun, or is not known to have been.
    Withdrawn,
    /// The machine is as the update makes it.
    Good,
    /// It failed.
    Failed(UpdateFailure),
}

/// What a machine does not need any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The claim for an update, because of this.
    Update(UpdateEnd),
    /// The claim for a fetch: it is ordered, or not needed.
    Fetch,
}

/// What a machine is told about its claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimAnswer {
    /// Go ahead.
    Granted,
    /// Not yet, and why.
    Waits(Arc<str>),
    /// Not before updates to the image go on; why they have stopped.
    Stopped(Arc<str>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClaimState {
    /// For its turn, or for updates to the image to go on.
    Waiting,
    Granted,
    Begun,
}

#[derive(Clone, Debug)]
struct HeldClaim {
    update: UpdateClaim,
    state: ClaimState,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct ClaimTable {
    started: Duration,
    budget: Budget,
    breaker: ImageBreaker,
    network: NetworkBudget,
    updates: BTreeMap<ClaimantId, HeldClaim>,
    /// Machines that were there when the dominator started and that nobody has met yet.
    unmet: BTreeSet<ClaimantId>,
    /// True once it is known which machines there are.
    is_populated: bool,
    /// Machines that should look at the answer to their claim again.
    news: BTreeSet<ClaimantId>,
    /// Counts how often the list of stopped images has changed.
    stops: u64,
}

impl ClaimTable {
    /// The dominator starts `now`; updates to `stopped` had stopped before.
    #[must_use]
    pub fn new(settings: ClaimSettings, stopped: Vec<StoppedImage>, now: Now) -> Self {
        Self {
            started: now.elapsed,
            budget: Budget::new(settings.updating, settings.high_impact),
            breaker: ImageBreaker::new(settings.failures, stopped),
            network: NetworkBudget::new(settings.network),
            updates: BTreeMap::new(),
            unmet: BTreeSet::new(),
            is_populated: false,
            news: BTreeSet::new(),
            stops: 0,
        }
    }

    /// A machine is looked after from now on.
    pub fn enroll(&mut self, claimant: ClaimantId, now: Now) {
        if now.elapsed < self.started + LEARNING {
            self.unmet.insert(claimant);
        }
    }

    /// What a machine was doing when the dominator started is known, or that it does not answer.
    pub fn met(&mut self, claimant: ClaimantId, now: Now) {
        if self.unmet.remove(&claimant) && self.is_open(now) {
            self.advance(now);
        }
    }

    /// A machine is looked after no more.
    pub fn leave(&mut self, claimant: ClaimantId, now: Now) {
        self.unmet.remove(&claimant);
        self.updates.remove(&claimant);
        self.budget.release(claimant);
        self.network.cancel(claimant);
        self.breaker.forget(claimant);
        self.news.remove(&claimant);
        self.advance(now);
    }

    /// The machines are these from now on: so many at each location, and they must have `images` or
    /// will get them next.
    pub fn set_machines(
        &mut self,
        population: &BTreeMap<String, u32>,
        images: &BTreeSet<ImageName>,
        now: Now,
    ) {
        self.is_populated = true;
        self.budget.set_machines(population);
        self.stops += u64::from(self.breaker.retain(images));
        self.advance(now);
    }

    /// Other limits hold from now on. What is granted stays.
    pub fn set(&mut self, settings: ClaimSettings, now: Now) {
        self.budget.set_limits(settings.updating, settings.high_impact);
        self.network.set_limit(settings.network);
        self.breaker.set_limits(settings.failures);
        self.advance(now);
    }

    /// A machine asks, or asks once more; [`ClaimTable::answer`] has the answer.
    pub fn claim(&mut self, claimant: ClaimantId, claim: Claim, now: Now) {
        match claim {
            Claim::Fetch(download) => self.network.ask(claimant, download),
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
        // Whoever asks gets an answer.
        self.news.remove(&claimant);
    }

    /// A Commit is about to be sent: true if it may be. One that was lost on its way is sent again
    /// only if updates to its image have not stopped since.
    #[must_use]
    pub fn begin(&mut self, claimant: ClaimantId) -> bool {
        let held = self.updates.get(&claimant);
        let is_stopped = held.is_some_and(|held| self.stop_of(&held.update).is_some());
        let Some(held) = self.updates.get_mut(&claimant) else { return false };
        if is_stopped && held.state != ClaimState::Waiting {
            held.state = ClaimState::Waiting;
            self.budget.release(claimant);
            self.news.insert(claimant);
        }
        if held.state == ClaimState::Waiting {
            return false;
        }
        held.state = ClaimState::Begun;
        true
    }

    /// A machine needs something no more.
    pub fn release(&mut self, claimant: ClaimantId, release: Release, now: Now) {
        match release {
            Release::Fetch => self.network.cancel(claimant),
            Release::Update(end) => {
                self.budget.release(claimant);
                if let Some(held) = self.updates.remove(&claimant) {
                    self.ended(claimant, &held.update, end, now);
                }
            }
        }
        self.advance(now);
    }

    fn ended(&mut self, claimant: ClaimantId, update: &UpdateClaim, end: UpdateEnd, now: Now) {
        let result = match end {
            UpdateEnd::Withdrawn => return,
            UpdateEnd::Good => None,
            UpdateEnd::Failed(failed) => Some(failed),
        };
        let Some(image) = update.image.as_ref().filter(|_| update.is_new) else { return };
        if !self.breaker.note(claimant, image, result, now.wall) {
            return;
        }
        self.stops += 1;
        // Those who have not begun do not begin.
        for (&claimant, held) in &mut self.updates {
            if held.state != ClaimState::Begun
                && held.update.is_new
                && held.update.image.as_ref() == Some(image)
            {
                held.state = ClaimState::Waiting;
                self.budget.release(claimant);
                self.news.insert(claimant);
            }
        }
    }

    /// Lets updates to an image go on, and begins to count anew; false if they had not stopped.
    pub fn resume(&mut self, image: &ImageName, now: Now) -> bool {
        if !self.breaker.resume(image) {
            return false;
        }
        self.stops += 1;
        for (&claimant, held) in &self.updates {
            if held.state == ClaimState::Waiting && held.update.image.as_ref() == Some(image) {
                self.budget.ask(claimant, held.update.demand.clone());
                self.news.insert(claimant);
            }
        }
        self.advance(now);
        true
    }

    /// Grants what can be granted by now.
    pub fn advance(&mut self, now: Now) {
        let is_open = self.is_open(now);
        for claimant in self.budget.grant(now.elapsed, is_open) {
            if let Some(held) = self.updates.get_mut(&claimant) {
                held.state = ClaimState::Granted;
            }
            self.news.insert(claimant);
        }
        self.news.extend(self.network.grant(now.elapsed));
    }

    /// When [`ClaimTable::advance`] is wanted, if nothing else happens before.
    #[must_use]
    pub fn wake_at(&self, now: Now) -> Option<Duration> {
        let learning = (!self.is_open(now)).then_some(self.started + LEARNING);
        [learning, self.network.next()].into_iter().flatten().min()
    }

    /// What a machine is told about its claim; `None` if it has none.
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
                "the dominator has just started, and learns first what is under way; {} still to \
                 answer",
                counted(self.unmet.len() as u64, "machine")
            );
            return Some(ClaimAnswer::Waits(why.into()));
        }
        Some(ClaimAnswer::Waits(self.budget.why(claimant).into()))
    }

    fn stop_of(&self, update: &UpdateClaim) -> Option<&StoppedImage> {
        let image = update.image.as_ref().filter(|_| update.is_new)?;
        self.breaker.stop_of(image)
    }

    fn is_open(&self, now: Now) -> bool {
        now.elapsed >= self.started + LEARNING || (self.is_populated && self.unmet.is_empty())
    }

    /// Machines that should look at the answer to their claim again.
    pub fn take_news(&mut self) -> BTreeSet<ClaimantId> {
        std::mem::take(&mut self.news)
    }

    /// All images to which updates have stopped, by name.
    #[must_use]
    pub fn stopped(&self) -> Vec<StoppedImage> {
        self.breaker.stopped()
    }

    /// How often that list has changed.
    #[must_use]
    pub fn stops(&self) -> u64 {
        self.stops
    }

    /// What operators are shown.
    #[must_use]
    pub fn report(&self) -> BudgetReport {
        let (held, waiting) = self.budget.totals();
        let (fetches_waiting, bytes_waiting) = self.network.waiting();
        let mut limits = self.budget.uses();
        limits.sort_by_key(|limit| std::cmp::Reverse(limit.waiting));
        limits.truncate(LIMITS_SHOWN);
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
