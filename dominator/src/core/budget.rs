//! Budgets: how many machines may be updated at once, and which is next.
//!
//! A machine that must be updated has a *claim*. It waits until every limit that covers the machine
//! has a place for it, and holds these places until it is released. There are limits of the fleet,
//! of a location with all below it, and of each location; for all updates, and again for updates of
//! high impact.
//!
//! # Invariants
//!
//! * No limit has more granted claims than places, except for updates that were under way before.
//! * Repairs and rollouts have places of their own ([`Places`]), so that neither delays the other.
//!   A limit of one place grants it to both in turn.
//! * Of claims of one class with the same limits, the oldest is granted first. When the oldest of
//!   its class has waited for [`STARVATION`], all places that it needs are reserved for it, so that
//!   claims that need fewer places cannot overtake it for ever.
// tidy: core

pub mod limits;

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use api::dominator::orders::LimitUse;
use model::display::counted;

use self::limits::{MachineLimit, MachineLimits, Places};
use model::mdb::{is_within, trimmed};

/// After this wait, places are reserved for the oldest claim of its class.
pub const STARVATION: Duration = Duration::from_secs(600);

/// The largest position in the queue that is counted.
const POSITION_MAX: usize = 1_000;

/// Identifies the claims of one machine. The same machine under another address has another id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimantId(pub u64);

/// The part of the budgets that an update uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UpdateClass {
    /// Restores the image that the machine already has, or retries a failed update.
    Repair,
    /// Brings a machine to another image, or to other content of computed files.
    Rollout,
    /// Brings a machine renewed certificates. It needs no place.
    Renewal,
}

/// How disruptive an update is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Impact {
    /// Files change and services restart.
    Plain,
    /// The machine reboots, or a trigger of high impact runs.
    High,
}

/// What an update needs of the budgets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    pub class: UpdateClass,
    pub impact: Impact,
    /// The location of the machine.
    pub location: String,
    /// Since when the machine needs the update.
    pub since: Duration,
}

/// The machines that one limit counts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Fleet,
    Below(String),
    Each(String),
}

/// One limit, with the places that are used and waited for, by class.
#[derive(Clone, Debug)]
struct LimitScope {
    impact: Impact,
    place: Place,
    limit: MachineLimit,
    places: Places,
    used: [u32; 2],
    waiting: [u32; 2],
}

impl LimitScope {
    /// True if a place for a claim of this class is free, besides the `reserved` ones of each
    /// class.
    fn has_room(&self, class: UpdateClass, reserved: [u32; 2]) -> bool {
        let used: u32 = self.used.iter().sum();
        let at = class as usize;
        if self.places.is_common() {
            return used + reserved.iter().sum::<u32>() < self.places.all;
        }
        used < self.places.all && self.used[at] + reserved[at] < self.places_of(class)
    }

    fn places_of(&self, class: UpdateClass) -> u32 {
        match class {
            _ if self.places.is_common() => self.places.all,
            UpdateClass::Repair => self.places.repairs,
            UpdateClass::Rollout | UpdateClass::Renewal => self.places.all - self.places.repairs,
        }
    }

    /// Returns the flag that sets the limit.
    fn flag(&self) -> String {
        let kind = match self.impact {
            Impact::Plain => "--max-updating",
            Impact::High => "--max-high-impact",
        };
        match &self.place {
            Place::Fleet => format!("{kind} {}", self.limit),
            Place::Below(location) => format!("{kind} {location}={}", self.limit),
            Place::Each(location) => format!("{kind}-per-location {} ({location})", self.limit),
        }
    }
}

/// The waiting claims of one class with the same limits.
#[derive(Clone, Debug)]
struct Group {
    class: UpdateClass,
    scopes: Vec<usize>,
    waiting: BTreeSet<(Duration, ClaimantId)>,
}

#[derive(Clone, Debug)]
struct BudgetClaim {
    demand: Demand,
    group: usize,
    is_held: bool,
}

#[derive(Clone, Debug)]
pub struct Budget {
    updating: MachineLimits,
    high_impact: MachineLimits,
    /// The number of machines at each location.
    population: BTreeMap<String, u32>,
    scopes: Vec<LimitScope>,
    groups: Vec<Group>,
    /// The index of the group of each class, impact and location.
    group_index: BTreeMap<(UpdateClass, Impact, String), usize>,
    claims: BTreeMap<ClaimantId, BudgetClaim>,
    /// The class of the claim that was granted last.
    last_class: UpdateClass,
}

impl Budget {
    #[must_use]
    pub fn new(updating: MachineLimits, high_impact: MachineLimits) -> Self {
        Self {
            updating,
            high_impact,
            population: BTreeMap::new(),
            scopes: Vec::new(),
            groups: Vec::new(),
            group_index: BTreeMap::new(),
            claims: BTreeMap::new(),
            last_class: UpdateClass::Rollout,
        }
    }

    /// Sets the number of machines at each location. Granted claims stay granted.
    pub fn set_machines(&mut self, population: &BTreeMap<String, u32>) {
        self.population.clear();
        for (location, count) in population {
            *self.population.entry(trimmed(location).to_owned()).or_default() += count;
        }
        self.rebuild();
    }

    /// Sets the limits. Granted claims stay granted.
    pub fn set_limits(&mut self, updating: MachineLimits, high_impact: MachineLimits) {
        (self.updating, self.high_impact) = (updating, high_impact);
        self.rebuild();
    }

    /// Counts all claims again.
    fn rebuild(&mut self) {
        (self.scopes, self.groups) = (Vec::new(), Vec::new());
        self.group_index.clear();
        for (claimant, claim) in std::mem::take(&mut self.claims) {
            self.insert(claimant, claim.demand, claim.is_held);
        }
    }

    /// Adds a waiting claim. Does nothing if the machine already has a claim with this demand.
    pub fn ask(&mut self, claimant: ClaimantId, demand: Demand) {
        if self.claims.get(&claimant).is_some_and(|claim| claim.demand == demand) {
            return;
        }
        self.release(claimant);
        self.insert(claimant, demand, false);
    }

    /// Counts an update that is under way already, regardless of the limits.
    pub fn count(&mut self, claimant: ClaimantId, demand: Demand) {
        self.release(claimant);
        self.insert(claimant, demand, true);
    }

    /// Removes the claim of a machine, if it has one.
    pub fn release(&mut self, claimant: ClaimantId) {
        let Some(claim) = self.claims.remove(&claimant) else { return };
        let at = claim.demand.class as usize;
        let group = &mut self.groups[claim.group];
        if !claim.is_held {
            group.waiting.remove(&(claim.demand.since, claimant));
        }
        for &scope in &group.scopes {
            let scope = &mut self.scopes[scope];
            let count = if claim.is_held { &mut scope.used[at] } else { &mut scope.waiting[at] };
            *count -= 1;
        }
    }

    /// Grants all claims for which there are places, and returns their machines. Unless `is_open`,
    /// grants only claims without limits.
    pub fn grant(&mut self, now: Duration, is_open: bool) -> Vec<ClaimantId> {
        let mut granted = Vec::new();
        while let Some((class, claimant)) = self.next_grant(now, is_open) {
            let demand = self.claims[&claimant].demand.clone();
            self.release(claimant);
            self.insert(claimant, demand, true);
            if class != UpdateClass::Renewal {
                self.last_class = class;
            }
            granted.push(claimant);
        }
        granted
    }

    /// True if the claim of a machine is granted.
    #[must_use]
    pub fn is_held(&self, claimant: ClaimantId) -> bool {
        self.claims.get(&claimant).is_some_and(|claim| claim.is_held)
    }

    /// Returns the number of granted and of waiting claims.
    #[must_use]
    pub fn totals(&self) -> (u32, u32) {
        let held = self.claims.values().filter(|claim| claim.is_held).count();
        let number = |count| u32::try_from(count).unwrap_or(u32::MAX);
        (number(held), number(self.claims.len() - held))
    }

    /// Returns the limits and how much of each is used.
    #[must_use]
    pub fn uses(&self) -> Vec<LimitUse> {
        let uses = self.scopes.iter().map(|scope| LimitUse {
            limit: scope.flag(),
            places: scope.places.all,
            for_repairs: scope.places.repairs,
            repairs: scope.used[UpdateClass::Repair as usize],
            rollouts: scope.used[UpdateClass::Rollout as usize],
            waiting: scope.waiting.iter().sum(),
        });
        uses.collect()
    }

    /// Returns what a claim waits for, as text.
    #[must_use]
    pub fn why(&self, claimant: ClaimantId) -> String {
        let Some(claim) = self.claims.get(&claimant) else { return String::new() };
        let group = &self.groups[claim.group];
        let position = position_text(self.claims_before(claim, claimant));
        let mut scopes = group.scopes.iter().map(|&scope| &self.scopes[scope]);
        let Some(full) = scopes.find(|scope| !scope.has_room(group.class, [0; 2])) else {
            return format!("a machine that has waited longer comes first; {position}");
        };
        let used: u32 = match full.places.is_common() {
            true => full.used.iter().sum(),
            false => full.used[group.class as usize],
        };
        let (places, flag) = (full.places_of(group.class), full.flag());
        let share = match group.class {
            _ if full.places.is_common() => "allows at once",
            UpdateClass::Repair => "keeps for repairs",
            UpdateClass::Rollout | UpdateClass::Renewal => "allows at once beside repairs",
        };
        let used = counted(used.into(), "machine");
        format!("{used} under way of the {places} that {flag} {share}; {position}")
    }

    /// Counts the older claims that wait for the same limits, up to one more than [`POSITION_MAX`].
    fn claims_before(&self, claim: &BudgetClaim, claimant: ClaimantId) -> usize {
        let own = &self.groups[claim.group];
        let Some(shared) = own.scopes.first() else { return 0 };
        let mut count = 0;
        for group in &self.groups {
            if group.class == own.class && group.scopes.contains(shared) {
                let older = group.waiting.range(..(claim.demand.since, claimant));
                count += older.take(POSITION_MAX + 1 - count).count();
            }
            if count > POSITION_MAX {
                break;
            }
        }
        count
    }

    /// Returns the claim that is granted next, if any can be.
    fn next_grant(&self, now: Duration, is_open: bool) -> Option<(UpdateClass, ClaimantId)> {
        let heads = |class: UpdateClass| {
            let groups = self.groups.iter().filter(move |group| group.class == class);
            groups.filter_map(|group| Some((*group.waiting.first()?, group)))
        };
        // The oldest claim of each class, if it has waited so long that places are reserved for it.
        let starving: Vec<((Duration, ClaimantId), &Group)> =
            [UpdateClass::Repair, UpdateClass::Rollout]
                .into_iter()
                .filter_map(|class| heads(class).min_by_key(|(head, _)| *head))
                .filter(|((since, _), _)| now.saturating_sub(*since) >= STARVATION)
                .collect();
        let reserved = |scope: usize, head: (Duration, ClaimantId)| {
            let mut reserved = [0; 2];
            for (older, group) in &starving {
                if *older < head && group.scopes.contains(&scope) {
                    reserved[group.class as usize] += 1;
                }
            }
            reserved
        };
        let order = match self.last_class {
            UpdateClass::Repair => [UpdateClass::Rollout, UpdateClass::Repair],
            UpdateClass::Rollout | UpdateClass::Renewal => {
                [UpdateClass::Repair, UpdateClass::Rollout]
            }
        };
        [UpdateClass::Renewal].into_iter().chain(order).find_map(|class| {
            let grantable = heads(class).filter(|(head, group)| {
                (is_open || group.scopes.is_empty())
                    && group
                        .scopes
                        .iter()
                        .all(|&scope| self.scopes[scope].has_room(class, reserved(scope, *head)))
            });
            grantable.map(|(head, _)| head).min().map(|(_, claimant)| (class, claimant))
        })
    }

    fn insert(&mut self, claimant: ClaimantId, demand: Demand, is_held: bool) {
        let group = self.group_of(&demand);
        let at = demand.class as usize;
        if !is_held {
            self.groups[group].waiting.insert((demand.since, claimant));
        }
        for &scope in &self.groups[group].scopes {
            let scope = &mut self.scopes[scope];
            *(if is_held { &mut scope.used[at] } else { &mut scope.waiting[at] }) += 1;
        }
        self.claims.insert(claimant, BudgetClaim { demand, group, is_held });
    }

    fn group_of(&mut self, demand: &Demand) -> usize {
        let location = trimmed(&demand.location);
        let key = (demand.class, demand.impact, location.to_owned());
        if let Some(group) = self.group_index.get(&key) {
            return *group;
        }
        let mut scopes = match demand.class {
            UpdateClass::Renewal => Vec::new(),
            UpdateClass::Repair | UpdateClass::Rollout => self.scopes_of(Impact::Plain, location),
        };
        if demand.impact == Impact::High {
            scopes.extend(self.scopes_of(Impact::High, location));
        }
        self.groups.push(Group { class: demand.class, scopes, waiting: BTreeSet::new() });
        self.group_index.insert(key, self.groups.len() - 1);
        self.groups.len() - 1
    }

    /// Returns the limits of one kind for a machine at `location`, the widest first.
    fn scopes_of(&mut self, impact: Impact, location: &str) -> Vec<usize> {
        let limits = match impact {
            Impact::Plain => &self.updating,
            Impact::High => &self.high_impact,
        };
        let mut found: Vec<(Place, MachineLimit)> =
            limits.fleet.iter().map(|limit| (Place::Fleet, *limit)).collect();
        let below = limits.below.iter().filter(|(prefix, _)| is_within(location, prefix));
        found.extend(below.map(|(prefix, limit)| (Place::Below(prefix.clone()), *limit)));
        let each = limits.each.filter(|_| !location.is_empty());
        found.extend(each.map(|limit| (Place::Each(location.to_owned()), limit)));
        found.into_iter().map(|(place, limit)| self.scope_at(impact, place, limit)).collect()
    }

    fn scope_at(&mut self, impact: Impact, place: Place, limit: MachineLimit) -> usize {
        let is_it = |scope: &LimitScope| scope.impact == impact && scope.place == place;
        if let Some(known) = self.scopes.iter().position(is_it) {
            return known;
        }
        let population = self.population.iter();
        let counted = population.filter(|(location, _)| match &place {
            Place::Fleet => true,
            Place::Below(prefix) => is_within(location, prefix),
            Place::Each(exact) => *location == exact,
        });
        let places = Places::share(limit.of(counted.map(|(_, count)| *count).sum()));
        self.scopes.push(LimitScope {
            impact,
            place,
            limit,
            places,
            used: [0; 2],
            waiting: [0; 2],
        });
        self.scopes.len() - 1
    }
}

fn position_text(count: usize) -> String {
    match count {
        0 => "none waits before it".to_owned(),
        1 => "1 waits before it".to_owned(),
        count if count > POSITION_MAX => format!("more than {POSITION_MAX} wait before it"),
        count => format!("{count} wait before it"),
    }
}

#[cfg(test)]
mod tests;
