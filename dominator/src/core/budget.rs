//! Budgets: how many machines may be under way at once, and whose turn it is.
//!
//! A machine that must be updated has a *claim*. It waits until every limit that covers the machine
//! has a place for it, and holds these places until it is released. Limits are those of the fleet,
//! of a location with all below it, and of each location; for all updates, and once more for those
//! of high impact.
//!
//! # Invariants
//!
//! * No limit has more claims granted than places; only what was under way before is counted
//!   beyond.
//! * Repairs and rollouts have places of their own ([`Places`]), so that neither delays the other.
//!   A limit of one place gives it in turns.
//! * Of claims of one class that have the same limits the oldest is granted first. The oldest of
//!   its class, once it has waited for [`STARVING`], keeps every place that it needs, so that
//!   claims that need fewer places do not overtake it for ever.
// tidy: core

pub mod limits;

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use api::dominator::budgets::LimitUse;

use self::limits::{Limit, Limits, Places, machines};
use crate::core::selectors::{is_within, trimmed};

/// After so long, nobody overtakes the oldest claim of its class any more.
pub const STARVING: Duration = Duration::from_secs(600);

/// How far the places in the queue are counted.
const BEFORE_MAX: usize = 1_000;

/// Tells the claims of one machine from those of others, and from those of the same machine under
/// another address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClaimantId(pub u64);

/// Which share of the budgets an update takes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Brings a machine back to the image that it has, or is tried again after it failed.
    Repair,
    /// Brings a machine to another image.
    Rollout,
}

/// How much an update disturbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Impact {
    /// Files change, services restart.
    Plain,
    /// The machine reboots, or a trigger of high impact fires.
    High,
}

/// What a claim is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The share that it takes from.
    pub class: Class,
    /// Which limits count it.
    pub impact: Impact,
    /// Where the machine stands.
    pub location: String,
    /// Since when the machine needs it.
    pub since: Duration,
}

/// The machines that one limit counts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Fleet,
    Below(String),
    Each(String),
}

/// One limit at one place, with what is taken of it, by class.
#[derive(Clone, Debug)]
struct Scope {
    impact: Impact,
    place: Place,
    limit: Limit,
    places: Places,
    used: [u32; 2],
    waiting: [u32; 2],
}

impl Scope {
    /// True if there is a place for a claim of this class, beside those that others `keep`.
    fn has_room(&self, class: Class, keep: [u32; 2]) -> bool {
        let used: u32 = self.used.iter().sum();
        let at = class as usize;
        if self.places.is_common() {
            return used + keep.iter().sum::<u32>() < self.places.all;
        }
        used < self.places.all && self.used[at] + keep[at] < self.places_of(class)
    }

    fn places_of(&self, class: Class) -> u32 {
        match class {
            _ if self.places.is_common() => self.places.all,
            Class::Repair => self.places.repairs,
            Class::Rollout => self.places.all - self.places.repairs,
        }
    }

    /// The flag that says so.
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

/// Claims that are counted by the same limits.
#[derive(Clone, Debug)]
struct Group {
    class: Class,
    scopes: Vec<usize>,
    waiting: BTreeSet<(Duration, ClaimantId)>,
}

#[derive(Clone, Debug)]
struct Claim {
    demand: Demand,
    group: usize,
    is_held: bool,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Budget {
    updating: Limits,
    high_impact: Limits,
    /// How many machines there are at each location.
    population: BTreeMap<String, u32>,
    scopes: Vec<Scope>,
    groups: Vec<Group>,
    known: BTreeMap<(Class, Impact, String), usize>,
    claims: BTreeMap<ClaimantId, Claim>,
    last: Class,
}

impl Budget {
    /// No machine has a claim.
    #[must_use]
    pub fn new(updating: Limits, high_impact: Limits) -> Self {
        Self {
            updating,
            high_impact,
            population: BTreeMap::new(),
            scopes: Vec::new(),
            groups: Vec::new(),
            known: BTreeMap::new(),
            claims: BTreeMap::new(),
            last: Class::Rollout,
        }
    }

    /// Says how many machines there are at each location. Claims that are granted stay.
    pub fn set_machines(&mut self, population: &BTreeMap<String, u32>) {
        self.population.clear();
        for (location, count) in population {
            *self.population.entry(trimmed(location).to_owned()).or_default() += count;
        }
        self.rebuild();
    }

    /// Other limits hold from now on. Claims that are granted stay.
    pub fn set_limits(&mut self, updating: Limits, high_impact: Limits) {
        (self.updating, self.high_impact) = (updating, high_impact);
        self.rebuild();
    }

    /// Counts anew.
    fn rebuild(&mut self) {
        (self.scopes, self.groups) = (Vec::new(), Vec::new());
        self.known.clear();
        for (claimant, claim) in std::mem::take(&mut self.claims) {
            self.insert(claimant, claim.demand, claim.is_held);
        }
    }

    /// Lets a machine wait for its turn, or goes on with what it has if that is for the same.
    pub fn ask(&mut self, claimant: ClaimantId, demand: Demand) {
        if self.claims.get(&claimant).is_some_and(|claim| claim.demand == demand) {
            return;
        }
        self.release(claimant);
        self.insert(claimant, demand, false);
    }

    /// Counts a machine that is under way already, whatever the limits are.
    pub fn count(&mut self, claimant: ClaimantId, demand: Demand) {
        self.release(claimant);
        self.insert(claimant, demand, true);
    }

    /// Takes the claim of a machine away, if it has one.
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

    /// Grants all claims that there are places for, and names their machines. While not `is_open`
    /// only those that no limit counts.
    pub fn grant(&mut self, now: Duration, is_open: bool) -> Vec<ClaimantId> {
        let mut granted = Vec::new();
        while let Some((class, claimant)) = self.next(now, is_open) {
            let demand = self.claims[&claimant].demand.clone();
            self.release(claimant);
            self.insert(claimant, demand, true);
            self.last = class;
            granted.push(claimant);
        }
        granted
    }

    /// True if the claim of a machine is granted.
    #[must_use]
    pub fn is_held(&self, claimant: ClaimantId) -> bool {
        self.claims.get(&claimant).is_some_and(|claim| claim.is_held)
    }

    /// How many claims are granted, and how many wait.
    #[must_use]
    pub fn totals(&self) -> (u32, u32) {
        let held = self.claims.values().filter(|claim| claim.is_held).count();
        let number = |count| u32::try_from(count).unwrap_or(u32::MAX);
        (number(held), number(self.claims.len() - held))
    }

    /// The limits, and what is taken of each.
    #[must_use]
    pub fn uses(&self) -> Vec<LimitUse> {
        let uses = self.scopes.iter().map(|scope| LimitUse {
            limit: scope.flag(),
            places: scope.places.all,
            for_repairs: scope.places.repairs,
            repairs: scope.used[Class::Repair as usize],
            rollouts: scope.used[Class::Rollout as usize],
            waiting: scope.waiting.iter().sum(),
        });
        uses.collect()
    }

    /// What a claim waits for, in words.
    #[must_use]
    pub fn why(&self, claimant: ClaimantId) -> String {
        let Some(claim) = self.claims.get(&claimant) else { return String::new() };
        let group = &self.groups[claim.group];
        let before = before(self.before(claim, claimant));
        let mut scopes = group.scopes.iter().map(|&scope| &self.scopes[scope]);
        let Some(full) = scopes.find(|scope| !scope.has_room(group.class, [0; 2])) else {
            return format!("a machine that has waited longer comes first; {before}");
        };
        let used: u32 = match full.places.is_common() {
            true => full.used.iter().sum(),
            false => full.used[group.class as usize],
        };
        let (places, flag) = (full.places_of(group.class), full.flag());
        let share = match group.class {
            _ if full.places.is_common() => "allows at once",
            Class::Repair => "keeps for repairs",
            Class::Rollout => "allows at once beside repairs",
        };
        format!("{} under way of the {places} that {flag} {share}; {before}", machines(used))
    }

    /// How many claims that wait for the same limits are older, as far as that is counted.
    fn before(&self, claim: &Claim, claimant: ClaimantId) -> usize {
        let mine = &self.groups[claim.group];
        let Some(shared) = mine.scopes.first() else { return 0 };
        let mut count = 0;
        for group in &self.groups {
            if group.class == mine.class && group.scopes.contains(shared) {
                let older = group.waiting.range(..(claim.demand.since, claimant));
                count += older.take(BEFORE_MAX + 1 - count).count();
            }
            if count > BEFORE_MAX {
                break;
            }
        }
        count
    }

    /// The claim that is granted next, if any can be.
    fn next(&self, now: Duration, is_open: bool) -> Option<(Class, ClaimantId)> {
        let heads = |class: Class| {
            let groups = self.groups.iter().filter(move |group| group.class == class);
            groups.filter_map(|group| Some((*group.waiting.first()?, group)))
        };
        // Who has waited so long that nobody younger takes a place that it needs.
        let starving: Vec<((Duration, ClaimantId), &Group)> = [Class::Repair, Class::Rollout]
            .into_iter()
            .filter_map(|class| heads(class).min_by_key(|(head, _)| *head))
            .filter(|((since, _), _)| now.saturating_sub(*since) >= STARVING)
            .collect();
        let keep = |scope: usize, head: (Duration, ClaimantId)| {
            let mut keep = [0; 2];
            for (older, group) in &starving {
                if *older < head && group.scopes.contains(&scope) {
                    keep[group.class as usize] += 1;
                }
            }
            keep
        };
        let order = match self.last {
            Class::Repair => [Class::Rollout, Class::Repair],
            Class::Rollout => [Class::Repair, Class::Rollout],
        };
        order.into_iter().find_map(|class| {
            let fitting = heads(class).filter(|(head, group)| {
                (is_open || group.scopes.is_empty())
                    && group
                        .scopes
                        .iter()
                        .all(|&scope| self.scopes[scope].has_room(class, keep(scope, *head)))
            });
            fitting.map(|(head, _)| head).min().map(|(_, claimant)| (class, claimant))
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
        self.claims.insert(claimant, Claim { demand, group, is_held });
    }

    fn group_of(&mut self, demand: &Demand) -> usize {
        let location = trimmed(&demand.location);
        let key = (demand.class, demand.impact, location.to_owned());
        if let Some(group) = self.known.get(&key) {
            return *group;
        }
        let mut scopes = self.scopes_of(Impact::Plain, location);
        if demand.impact == Impact::High {
            scopes.extend(self.scopes_of(Impact::High, location));
        }
        self.groups.push(Group { class: demand.class, scopes, waiting: BTreeSet::new() });
        self.known.insert(key, self.groups.len() - 1);
        self.groups.len() - 1
    }

    /// The limits of one kind that count a machine at `location`, the widest first.
    fn scopes_of(&mut self, impact: Impact, location: &str) -> Vec<usize> {
        let limits = match impact {
            Impact::Plain => &self.updating,
            Impact::High => &self.high_impact,
        };
        let mut found: Vec<(Place, Limit)> =
            limits.fleet.iter().map(|limit| (Place::Fleet, *limit)).collect();
        let below = limits.below.iter().filter(|(prefix, _)| is_within(location, prefix));
        found.extend(below.map(|(prefix, limit)| (Place::Below(prefix.clone()), *limit)));
        let each = limits.each.filter(|_| !location.is_empty());
        found.extend(each.map(|limit| (Place::Each(location.to_owned()), limit)));
        found.into_iter().map(|(place, limit)| self.scope_at(impact, place, limit)).collect()
    }

    fn scope_at(&mut self, impact: Impact, place: Place, limit: Limit) -> usize {
        let is_it = |scope: &Scope| scope.impact == impact && scope.place == place;
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
        self.scopes.push(Scope { impact, place, limit, places, used: [0; 2], waiting: [0; 2] });
        self.scopes.len() - 1
    }
}

fn before(count: usize) -> String {
    match count {
        0 => "it is the next".to_owned(),
        1 => "1 waits before it".to_owned(),
        count if count > BEFORE_MAX => format!("more than {BEFORE_MAX} wait before it"),
        count => format!("{count} wait before it"),
    }
}

#[cfg(test)]
mod tests;
