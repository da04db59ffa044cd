//! Decides whether the subd that answers at an address belongs to the machine that is meant.
//!
//! Addresses are given to other machines, and machines are copied. The table holds what every sub
//! says of itself, and by which machine id each machine was last known. A machine is doubted if
//!
//! 1. its subd also answers for another record;
//! 2. its machine id is not the one by which it was last known;
//! 3. it reports the host name of another record.
//!
//! A machine with the id by which it was last known is the right one, whatever its host name is. A
//! host name or machine id that is the content of a file of the image proves nothing: all machines
//! of the image have it. Nor does a host name that several subds of one boot report: they run on
//! one host. A copy whose host name was changed is not noticed (docs/decisions/0007).
//!
//! # Invariants
//!
//! * A verdict does not depend on who was reached first, with one exception: a machine that is
//!   doubted for its host name waits until another subd of its boot has answered.
//! * What a machine was last known by changes only after an update that may have changed it, by an
//!   operator's order, or when its record goes.
// tidy: core

mod sighting;
#[cfg(test)]
mod tests;
mod words;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::tree::Time;

pub use sighting::{KnownIdentity, Origin, Origins, Sighting, Trust};

use words::{first_label, is_called};

/// What the state machine of one sub reports to the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityReport {
    /// A sub answered, and says this of itself. The number tells sightings apart.
    Seen(u64, Arc<Sighting>),
    /// The sub does not answer any more.
    Lost,
    /// A Commit is sent for an update that may change the machine id.
    Changing,
    /// The machine equals its image.
    Synced,
}

/// Whether a machine is the one that is meant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdentityVerdict {
    /// The sighting that was judged.
    pub number: u64,
    /// Why it is another machine, if it is.
    pub wrong: Option<Arc<str>>,
}

/// Verdicts that changed, by the host name of the record.
pub type ChangedVerdicts = Vec<(Arc<str>, IdentityVerdict)>;

/// Why a machine cannot be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    #[error("{hostname} has not been reached yet: there is nothing to trust")]
    NotSeen { hostname: String },
    #[error("{hostname} is not in doubt")]
    NoDoubt { hostname: String },
    /// One subd answers for two records: an order cannot make two machines of it.
    #[error("trust cannot help {hostname}: {why}")]
    SameSubd { hostname: String, why: String },
}

/// The instance of a subd, and the record that it answers for.
type InstanceOfRecord = (u64, Arc<str>);

#[derive(Clone, Debug, Default)]
struct Entry {
    /// Tells the runs of state machines for one record apart.
    run: u64,
    sighting: Option<(u64, Arc<Sighting>)>,
    is_present: bool,
    known: Option<KnownIdentity>,
    wrong: Option<Arc<str>>,
}

/// A record for which a subd answers; the record that fits best sorts first.
type Claimant = (Reverse<(bool, bool)>, Arc<str>);

/// What all machines say of themselves, and were last known by.
#[derive(Debug, Default)]
pub struct IdentityTable {
    entries: BTreeMap<Arc<str>, Entry>,
    last_run: u64,
    /// Records by the first label of their names.
    records: BTreeMap<String, BTreeSet<Arc<str>>>,
    /// Records by the first label of the host name that their subs report.
    reported: BTreeMap<String, BTreeSet<Arc<str>>>,
    /// Records by the instance of the subd that answers for them.
    instances: BTreeMap<u64, BTreeSet<Claimant>>,
    /// Instances of the subs that answer now, by host name (in lower case) and boot id, each with
    /// its record.
    boots: BTreeMap<(String, String), BTreeSet<InstanceOfRecord>>,
    /// Host names, in lower case, that prove nothing.
    common_names: BTreeSet<String>,
    /// What is known of machines for which no record was entered yet.
    waiting: BTreeMap<Arc<str>, KnownIdentity>,
    /// Machines of which the saved identity is not up to date.
    dirty: BTreeSet<Arc<str>>,
}

impl IdentityTable {
    /// Makes a table without records; each machine was last known by what `waiting` says.
    #[must_use]
    pub fn new(waiting: BTreeMap<Arc<str>, KnownIdentity>) -> Self {
        Self { waiting, ..Self::default() }
    }

    /// Adds a record, or takes its new address. Returns the number of the run of its state machine,
    /// and the verdicts that changed.
    pub fn enter(&mut self, name: &str) -> (u64, ChangedVerdicts) {
        self.last_run += 1;
        let run = self.last_run;
        let name: Arc<str> = name.into();
        let changed = if self.entries.contains_key(&name) {
            self.change(&name, |entry| {
                (entry.sighting, entry.is_present) = (None, false);
            })
        } else {
            let known = self.waiting.remove(&name);
            self.entries.insert(Arc::clone(&name), Entry::default());
            let label = first_label(&name);
            self.records.entry(label.clone()).or_default().insert(Arc::clone(&name));
            let mut changed = self.change(&name, |entry| entry.known = known);
            changed.extend(self.judge_reported(&label));
            changed
        };
        if let Some(entry) = self.entries.get_mut(&name) {
            entry.run = run;
        }
        (run, changed)
    }

    /// Removes a record, and what its machine was known by.
    pub fn leave(&mut self, name: &str) -> ChangedVerdicts {
        let name: Arc<str> = name.into();
        let mut changed = self.change(&name, |entry| *entry = Entry::default());
        if self.entries.remove(&name).is_some() {
            self.dirty.insert(Arc::clone(&name));
        }
        let label = first_label(&name);
        remove_from(&mut self.records, &label, &name);
        changed.extend(self.judge_reported(&label));
        changed.retain(|(other, _)| *other != name);
        changed
    }

    /// Forgets what is known of machines that have no record.
    pub fn forget_the_others(&mut self) {
        self.dirty.extend(std::mem::take(&mut self.waiting).into_keys());
    }

    /// Takes the report of a state machine about the record called `name`; one of an earlier run is
    /// ignored. Returns the verdicts that changed; a sighting is always answered.
    pub fn take_report(&mut self, name: &str, run: u64, report: IdentityReport) -> ChangedVerdicts {
        let Some((name, entry)) = self.entries.get_key_value(name) else { return Vec::new() };
        if entry.run != run {
            return Vec::new();
        }
        let name = Arc::clone(name);
        match report {
            IdentityReport::Seen(number, sighting) => self.change(&name, |entry| {
                entry.sighting = Some((number, sighting));
                entry.is_present = true;
            }),
            IdentityReport::Lost => self.change(&name, |entry| entry.is_present = false),
            IdentityReport::Changing => self.know(&name, |known, _| match known.is_own {
                true => KnownIdentity { trust: known.trust.clone(), ..KnownIdentity::default() },
                false => known.clone(),
            }),
            IdentityReport::Synced => self.know(&name, |known, sighting| {
                let is_own = matches!(sighting.origins.machine_id, Origin::Machine);
                if is_own && sighting.machine_id.is_empty() {
                    return known.clone();
                }
                let (machine_id, trust) = (sighting.machine_id.clone(), known.trust.clone());
                KnownIdentity { machine_id, is_own, trust }
            }),
        }
    }

    /// Returns what will be known of a machine when an operator trusts what answers for it now.
    /// [`IdentityTable::take_trust`] puts it in force.
    pub fn trusted(
        &self,
        name: &str,
        who: &str,
        why: &str,
        now: Time,
    ) -> Result<KnownIdentity, TrustError> {
        let hostname = || name.to_owned();
        let entry = self.entries.get(name);
        let Some((entry, (_, sighting))) =
            entry.and_then(|entry| Some((entry, entry.sighting.as_ref()?)))
        else {
            return Err(TrustError::NotSeen { hostname: hostname() });
        };
        if let Some(why) = self.same_subd(name, sighting) {
            return Err(TrustError::SameSubd { hostname: hostname(), why });
        }
        if entry.wrong.is_none() {
            return Err(TrustError::NoDoubt { hostname: hostname() });
        }
        Ok(KnownIdentity {
            machine_id: sighting.machine_id.clone(),
            is_own: !sighting.machine_id.is_empty() && !sighting.has_id_of_image(),
            trust: Some(Trust {
                hostname: sighting.hostname.clone(),
                who: who.to_owned(),
                why: why.to_owned(),
                since: now,
            }),
        })
    }

    /// Puts an operator's order in force, which is saved already.
    pub fn take_trust(&mut self, name: &str, known: KnownIdentity) -> ChangedVerdicts {
        let name: Arc<str> = name.into();
        if !self.entries.contains_key(&name) {
            return Vec::new();
        }
        self.change(&name, |entry| entry.known = Some(known))
    }

    /// True if what answers for the record may be another machine.
    #[must_use]
    pub fn is_doubted(&self, name: &str) -> bool {
        self.entries.get(name).is_some_and(|entry| entry.wrong.is_some())
    }

    /// Returns what to save, or to remove (`None`), since the last call.
    pub fn take_dirty(&mut self) -> Vec<(Arc<str>, Option<KnownIdentity>)> {
        let dirty = std::mem::take(&mut self.dirty).into_iter();
        dirty
            .map(|name| {
                let known = self.entries.get(&name).and_then(|entry| entry.known.clone());
                (name, known)
            })
            .collect()
    }

    /// Has these machines saved again, because saving failed.
    pub fn dirty_again(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        self.dirty.extend(names);
    }

    /// True if something is to be saved.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Changes what a machine that is not in doubt is known by.
    fn know(
        &mut self,
        name: &Arc<str>,
        next: impl FnOnce(&KnownIdentity, &Sighting) -> KnownIdentity,
    ) -> ChangedVerdicts {
        let Some(entry) = self.entries.get(name).filter(|entry| entry.wrong.is_none()) else {
            return Vec::new();
        };
        let Some((_, sighting)) = &entry.sighting else { return Vec::new() };
        let now = entry.known.clone().unwrap_or_default();
        let next = next(&now, sighting);
        if next == now {
            return Vec::new();
        }
        self.dirty.insert(Arc::clone(name));
        self.change(name, |entry| entry.known = Some(next))
    }

    /// Changes one entry, and judges all machines that this concerns.
    fn change(&mut self, name: &Arc<str>, change: impl FnOnce(&mut Entry)) -> ChangedVerdicts {
        let Some(old) = self.entries.remove(name) else { return Vec::new() };
        let mut new = old.clone();
        change(&mut new);
        let instance = |entry: &Entry| entry.sighting.as_ref().map(|(_, seen)| seen.instance);
        let instances: BTreeSet<u64> =
            [instance(&old), instance(&new)].into_iter().flatten().collect();
        let before: Vec<_> =
            instances.iter().map(|&instance| self.best_claimants(instance)).collect();
        self.unlist(name, &old);
        self.list(name, &new);
        let number = |entry: &Entry| entry.sighting.as_ref().map(|(number, _)| *number);
        let is_seen_again = number(&old) != number(&new);
        self.entries.insert(Arc::clone(name), new);
        let mut judged = BTreeSet::from([Arc::clone(name)]);
        if let Some(label) = self.learn_common_name(name) {
            judged.extend(self.reported.get(&label).into_iter().flatten().cloned());
        }
        // The verdicts on all members of a group depend on its best two.
        for (instance, before) in instances.into_iter().zip(before) {
            if self.best_claimants(instance) != before {
                let members = self.instances.get(&instance).into_iter().flatten();
                judged.extend(members.map(|(_, member)| Arc::clone(member)));
            }
        }
        let mut changed = self.judge(judged);
        if is_seen_again && !changed.iter().any(|(other, _)| other == name) {
            let verdict = self.verdict(name);
            changed.push((Arc::clone(name), verdict));
        }
        changed
    }

    fn list(&mut self, name: &Arc<str>, entry: &Entry) {
        let Some((_, sighting)) = &entry.sighting else { return };
        let claimant = claimant(name, entry, sighting);
        self.instances.entry(sighting.instance).or_default().insert(claimant);
        let label = first_label(&sighting.hostname);
        self.reported.entry(label).or_default().insert(Arc::clone(name));
        if let Some(boot) = boot_of(entry, sighting) {
            let member = (sighting.instance, Arc::clone(name));
            self.boots.entry(boot).or_default().insert(member);
        }
    }

    fn unlist(&mut self, name: &Arc<str>, entry: &Entry) {
        let Some((_, sighting)) = &entry.sighting else { return };
        let claimant = claimant(name, entry, sighting);
        remove_from(&mut self.instances, &sighting.instance, &claimant);
        remove_from(&mut self.reported, &first_label(&sighting.hostname), name);
        if let Some(boot) = boot_of(entry, sighting) {
            remove_from(&mut self.boots, &boot, &(sighting.instance, Arc::clone(name)));
        }
    }

    /// The two records that fit a subd best.
    fn best_claimants(&self, instance: u64) -> [Option<Claimant>; 2] {
        let mut members = self.instances.get(&instance).into_iter().flatten().cloned();
        [members.next(), members.next()]
    }

    /// Judges these, and returns the verdicts that changed.
    fn judge(&mut self, names: BTreeSet<Arc<str>>) -> ChangedVerdicts {
        let mut changed = Vec::new();
        for name in names {
            let wrong = self.doubt(&name);
            let Some(entry) = self.entries.get_mut(&name) else { continue };
            if entry.wrong.as_deref() != wrong.as_deref() {
                entry.wrong = wrong.map(Arc::from);
                let verdict = self.verdict(&name);
                changed.push((name, verdict));
            }
        }
        changed
    }

    fn judge_reported(&mut self, label: &str) -> ChangedVerdicts {
        let names = self.reported.get(label).cloned().unwrap_or_default();
        self.judge(names)
    }

    fn verdict(&self, name: &str) -> IdentityVerdict {
        let Some(entry) = self.entries.get(name) else { return IdentityVerdict::default() };
        let number = entry.sighting.as_ref().map_or(0, |(number, _)| *number);
        IdentityVerdict { number, wrong: entry.wrong.clone() }
    }

    /// Why what answers for the record is another machine, if it is.
    fn doubt(&self, name: &str) -> Option<String> {
        let entry = self.entries.get(name)?;
        let (_, sighting) = entry.sighting.as_ref()?;
        if let Some(why) = self.same_subd(name, sighting) {
            return Some(why);
        }
        let id = sighting.machine_id.as_str();
        let is_other_id =
            |known: &KnownIdentity| known.is_own && !id.is_empty() && known.machine_id != id;
        if let Some(known) = entry.known.as_ref().filter(|known| is_other_id(known))
            && !sighting.has_id_of_image()
        {
            return Some(words::other_id(name, sighting, &known.machine_id));
        }
        let is_trusted = entry.known.as_ref().is_some_and(|known| {
            let owns = known.is_own && known.machine_id == id;
            owns || known.trust.as_ref().is_some_and(|word| word.hostname == sighting.hostname)
        });
        if is_trusted {
            return None;
        }
        if self.common_names.contains(&sighting.hostname.to_lowercase()) {
            return None;
        }
        let other = self.called(name, &sighting.hostname)?;
        Some(words::other_name(name, sighting, &other))
    }

    /// Why one subd answers for this record and for another, if it does and is the other's.
    fn same_subd(&self, name: &str, sighting: &Sighting) -> Option<String> {
        let mut claimants = self.instances.get(&sighting.instance)?.iter();
        let ((first_fit, first), (second_fit, second)) = (claimants.next()?, claimants.next()?);
        let is_decided = first_fit != second_fit;
        if **first == *name {
            return (!is_decided).then(|| words::same_subd(sighting, second));
        }
        Some(if is_decided {
            words::subd_of(sighting, first)
        } else {
            words::same_subd(sighting, first)
        })
    }

    /// The other record that a machine is, if it is called `hostname`.
    fn called(&self, name: &str, hostname: &str) -> Option<Arc<str>> {
        if !words::is_name(hostname) || is_called(name, hostname) {
            return None;
        }
        let records = self.records.get(&first_label(hostname))?;
        let others = || records.iter().filter(|other| ***other != *name);
        let same = others().find(|other| other.eq_ignore_ascii_case(hostname));
        same.or_else(|| others().find(|other| is_called(other, hostname))).cloned()
    }

    /// Notes that the host name which the sub of this record reports proves nothing. Returns its
    /// first label then; `None` if that is not so, or was known.
    fn learn_common_name(&mut self, name: &str) -> Option<String> {
        let entry = self.entries.get(name)?;
        let (_, sighting) = entry.sighting.as_ref()?;
        let hostname = sighting.hostname.to_lowercase();
        if self.common_names.contains(&hostname) || self.called(name, &hostname).is_none() {
            return None;
        }
        let same_boot = boot_of(entry, sighting).and_then(|boot| self.boots.get(&boot));
        let is_common = sighting.origins.hostname.brings(&sighting.hostname)
            || same_boot.into_iter().flatten().any(|(instance, other)| {
                *instance != sighting.instance && !is_called(other, &hostname)
            });
        is_common.then(|| {
            let label = first_label(&hostname);
            self.common_names.insert(hostname);
            label
        })
    }
}

fn claimant(name: &Arc<str>, entry: &Entry, sighting: &Sighting) -> Claimant {
    let owns = entry.known.as_ref().is_some_and(|known| {
        known.is_own && !known.machine_id.is_empty() && known.machine_id == sighting.machine_id
    });
    (Reverse((is_called(name, &sighting.hostname), owns)), Arc::clone(name))
}

/// Host name and boot id of a sub that answers now, if it has both.
fn boot_of(entry: &Entry, sighting: &Sighting) -> Option<(String, String)> {
    let is_known = entry.is_present && !sighting.boot_id.is_empty();
    is_known.then(|| (sighting.hostname.to_lowercase(), sighting.boot_id.clone()))
}

fn remove_from<K: Ord, V: Ord>(groups: &mut BTreeMap<K, BTreeSet<V>>, key: &K, member: &V) {
    if let Some(group) = groups.get_mut(key) {
        group.remove(member);
        if group.is_empty() {
            groups.remove(key);
        }
    }
}
