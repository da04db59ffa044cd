//! The claims of the simulation, and counts of updates that are independent of the budgets under
//! test.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use dominator::core::budget::limits::{MachineLimit, MachineLimits, Places};
use dominator::core::budget::{ClaimantId, Impact, UpdateClass};
use dominator::core::claims::{
    Claim, ClaimKind, ClaimSettings, ClaimTable, Release, UpdateClaim, UpdateEnd,
};
use dominator::core::image_breaker::FailureLimits;
use dominator::core::sub::Event;
use dominator::core::timing::Now;
use model::image::ImageName;
use model::mdb::Machine;
use model::tree::Time;

use super::{Happening, World};

/// The time before the simulation.
pub const NEVER: Now = Now { elapsed: Duration::ZERO, wall: Time { seconds: 0, nanoseconds: 0 } };

/// Returns settings without limits, which never stop an image.
pub fn no_limits() -> ClaimSettings {
    ClaimSettings {
        updating: MachineLimits::default(),
        high_impact: MachineLimits::default(),
        network: None,
        failures: FailureLimits { percent: 100, blocked_percent: 100, failures_min: u32::MAX },
    }
}

/// Counts of updates, independent of the budgets.
#[derive(Default)]
pub struct Tally {
    asked: BTreeMap<usize, (UpdateClaim, Duration)>,
    under_way: BTreeMap<usize, UpdateClaim>,
    /// True if an update is under way that this dominator has not started.
    has_adopted: bool,
    /// The longest that a machine waited, from its first claim to its Commit, by class.
    pub waited_longest: BTreeMap<UpdateClass, Duration>,
    /// The number of machines that were ordered to change to an image, by image.
    pub begun: BTreeMap<ImageName, u32>,
    /// The outcomes of updates.
    pub ends: BTreeMap<String, u32>,
    /// The most updates that were under way at once.
    pub most: usize,
}

impl Tally {
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Removes updates that have ended.
    pub fn clear(&mut self) {
        assert!(self.under_way.is_empty(), "{:?}", self.under_way);
        *self = Self::default();
    }
}

impl World {
    /// Sets the limits, from the start of the simulation.
    pub fn limit(&mut self, settings: ClaimSettings) {
        self.settings = settings;
    }

    /// Returns the time since the start.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Sets the location of a machine.
    pub fn locate(&mut self, host: usize, location: &str) {
        let machine = Machine::clone(&self.machines[host]);
        self.move_in_population(&machine.location, location);
        self.machines[host] = Arc::new(Machine { location: location.to_owned(), ..machine });
    }

    /// Resumes updates to an image, as an operator.
    pub fn resume_image(&mut self, image: &ImageName) {
        let now = self.time();
        assert!(self.claims.resume(image, now), "updates to {image} have not stopped");
        self.tell_claims();
    }

    /// Makes a machine die.
    pub fn kill(&mut self, host: usize) {
        self.note(host, "dies");
        self.models[host].crash();
        self.updating.remove(&host);
    }

    /// Revives a dead machine.
    pub fn revive(&mut self, host: usize) {
        self.models[host].vanishes = None;
        self.schedule(Duration::from_millis(1), Happening::StartSub { host });
    }

    pub(super) fn vanishes(&self, host: usize) -> bool {
        let model = &self.models[host];
        model.vanishes.is_some() && model.vanishes.as_ref() == model.updated_to()
    }

    /// Makes the claims of a dominator that starts now. Stopped images stay stopped.
    pub(super) fn open_claims(&mut self) {
        let now = self.time();
        self.claims = ClaimTable::new(self.settings.clone(), self.claims.stopped(), now);
        let tally = &mut self.tally;
        (tally.asked, tally.under_way) = (BTreeMap::new(), BTreeMap::new());
        for host in 0..self.models.len() {
            self.claims.enroll(self.claimant(host), now);
        }
        let images = self.images.keys().map(|name| ImageName::new(name).unwrap()).collect();
        self.claims.set_machines(&self.population, &images, now);
        // The learning phase ends later.
        self.tell_claims();
    }

    fn move_in_population(&mut self, from: &str, to: &str) {
        let count = self.population.get_mut(from).expect("each location has its machines");
        *count -= 1;
        if *count == 0 {
            self.population.remove(from);
        }
        *self.population.entry(to.to_owned()).or_default() += 1;
    }

    fn claimant(&self, host: usize) -> ClaimantId {
        ClaimantId(self.run * self.models.len() as u64 + host as u64)
    }

    /// Schedules the answers to the machines that claimed.
    fn tell_claims(&mut self) {
        let (news, run) = (self.claims.take_changed(), self.run);
        for claimant in news {
            let host = usize::try_from(claimant.0 % self.models.len() as u64).unwrap();
            for purpose in [ClaimKind::Update, ClaimKind::Fetch] {
                self.schedule(Duration::ZERO, Happening::Claimed { host, run, purpose });
            }
        }
        if let Some(at) = self.claims.wake_at(self.time()) {
            let delay = at.saturating_sub(self.now).max(Duration::from_millis(1));
            if self.granting.is_none_or(|known| known <= self.now || known > self.now + delay) {
                self.granting = Some(self.now + delay);
                self.schedule(delay, Happening::Grant { run });
            }
        }
    }

    pub(super) fn claimed(&mut self, host: usize, run: u64, purpose: ClaimKind) {
        if run != self.run {
            return;
        }
        let answer = self.claims.answer(self.claimant(host), purpose, self.time());
        if let Some(answer) = answer {
            self.step(host, Event::Claimed(purpose, answer));
        }
    }

    pub(super) fn grant(&mut self, run: u64) {
        if run == self.run {
            let now = self.time();
            self.claims.advance(now);
            self.tell_claims();
        }
    }

    pub(super) fn claim(&mut self, host: usize, claim: Claim) {
        let (now, run) = (self.time(), self.run);
        let purpose = match &claim {
            Claim::Fetch(_) => Some(ClaimKind::Fetch),
            Claim::Update(update) => {
                let since = self.tally.asked.get(&host).map_or(self.now, |(_, since)| *since);
                self.tally.asked.insert(host, (update.clone(), since));
                Some(ClaimKind::Update)
            }
            Claim::UnderWay(update) => {
                self.tally.under_way.insert(host, update.clone());
                self.tally.has_adopted = true;
                None
            }
            Claim::Blocked(_) | Claim::Health { .. } => None,
        };
        self.claims.claim(self.claimant(host), claim, now);
        self.tell_claims();
        if let Some(purpose) = purpose {
            self.schedule(Duration::ZERO, Happening::Claimed { host, run, purpose });
        }
    }

    pub(super) fn release(&mut self, host: usize, what: Release) {
        let now = self.time();
        if let Release::Update(end) = what {
            self.note(host, &format!("gives its claim back: {end:?}"));
            self.tally.under_way.remove(&host);
            *self.tally.ends.entry(format!("{end:?}")).or_default() += 1;
            if end != UpdateEnd::Withdrawn {
                self.tally.asked.remove(&host);
            }
        }
        self.claims.release(self.claimant(host), what, now);
        self.tell_claims();
    }

    pub(super) fn activity_known(&mut self, host: usize) {
        let now = self.time();
        self.claims.activity_known(self.claimant(host), now);
        self.tell_claims();
    }

    /// Counts an update whose Commit is about to be sent. Returns false if it must not be sent.
    pub(super) fn begin_update(&mut self, host: usize) -> bool {
        if !self.claims.begin(self.claimant(host)) {
            return false;
        }
        let Some((update, since)) = self.tally.asked.get(&host).cloned() else {
            assert!(self.tally.under_way.contains_key(&host), "host {host} has no claim");
            return true;
        };
        let tally = &mut self.tally;
        let waited = tally.waited_longest.entry(update.demand.class).or_default();
        *waited = (*waited).max(self.now - since);
        for image in &update.new_parts {
            assert!(
                self.claims.stopped().iter().all(|stop| stop.image != *image),
                "host {host} is told to go to {image}, to which updates have stopped"
            );
            *tally.begun.entry(image.clone()).or_default() += 1;
        }
        if tally.under_way.insert(host, update).is_none() {
            tally.most = tally.most.max(tally.under_way.len());
        }
        tally.asked.remove(&host);
        self.must_be_within_budget();
        true
    }

    /// Checks all limits.
    pub(super) fn must_be_within_budget(&self) {
        let settings = &self.settings;
        let is_high = |update: &&UpdateClaim| update.demand.impact == Impact::High;
        let all: Vec<&UpdateClaim> = self.tally.under_way.values().collect();
        let high: Vec<&UpdateClaim> = all.iter().copied().filter(is_high).collect();
        if !self.tally.has_adopted {
            self.must_be_within(&settings.updating, &all);
            self.must_be_within(&settings.high_impact, &high);
        }
        // The updates that the machines really make, also across restarts of the dominator.
        if let Some(limit) = settings.updating.fleet {
            let places = limit.of(u32::try_from(self.models.len()).unwrap());
            assert!(self.updating.len() <= places as usize, "{} machines", self.updating.len());
        }
    }

    fn must_be_within(&self, limits: &MachineLimits, updates: &[&UpdateClaim]) {
        let check = |limit: MachineLimit, covers: &dyn Fn(&str) -> bool| {
            let machines =
                self.population.iter().filter(|(at, _)| covers(at)).map(|(_, n)| n).sum();
            let places = Places::share(limit.of(machines));
            let count = |class: Option<UpdateClass>| {
                let updates = updates.iter().filter(|update| {
                    covers(&update.demand.location)
                        && class.is_none_or(|class| update.demand.class == class)
                });
                u32::try_from(updates.count()).unwrap()
            };
            assert!(count(None) <= places.all, "{limit}: {}", count(None));
            if !places.is_common() {
                assert!(count(Some(UpdateClass::Repair)) <= places.repairs, "{limit}: repairs");
                let rollouts = places.all - places.repairs;
                assert!(count(Some(UpdateClass::Rollout)) <= rollouts, "{limit}: rollouts");
            }
        };
        if let Some(limit) = limits.fleet {
            check(limit, &|_| true);
        }
        for (prefix, limit) in &limits.below {
            let below = format!("{prefix}/");
            check(*limit, &|at| at == prefix || at.starts_with(&below));
        }
        if let Some(limit) = limits.each {
            let locations: BTreeSet<&str> =
                updates.iter().map(|update| update.demand.location.as_str()).collect();
            for location in locations.into_iter().filter(|location| !location.is_empty()) {
                check(limit, &|at| at == location);
            }
        }
    }
}
