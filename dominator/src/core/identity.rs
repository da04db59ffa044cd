//! Decides whether the subd that answers at an address runs on the machine of the record.
//!
//! Addresses are reassigned, and machines are copied. The table contains the identity that each sub
//! reports, and the last known machine id of each machine. It finds a mismatch if
//!
//! 1. the subd also answers for another record;
//! 2. the machine id is not the last known one;
//! 3. the machine reports the host name of another record.
//!
//! A machine with its last known id is the right one, whatever its host name is. A host name or
//! machine id that is the content of a file of the image identifies no machine, because all
//! machines of the image have it. Nor does a host name that several subds of one boot report,
//! because they run on one host. A copy whose host name was changed is not detected
//! (docs/decisions/0007).
//!
//! # Invariants
//!
//! * A verdict does not depend on the order in which machines are reached, with one exception: a
//!   mismatch of the host name lasts until another subd of the same boot has answered.
//! * The last known identity of a machine changes only after an update that may have changed it, by
//!   an operator's order, or when its record is removed.
// tidy: core

mod groups;
mod reported;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::tree::Time;

pub use reported::{FileOrigin, FileOrigins, KnownIdentity, ReportedIdentity, TrustRecord};

use groups::Groups;
use reported::{first_label, is_identifying, names_match};

/// What the state machine of one sub reports to the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityReport {
    /// A sub answered and reported this identity, which has this number.
    Seen(u64, Arc<ReportedIdentity>),
    /// The sub does not answer any more.
    Lost,
    /// A Commit is sent for an update that may change the machine id.
    Changing,
    /// The machine equals its image.
    Synced,
}

/// Whether the right machine answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdentityVerdict {
    /// The number of the reported identity that was judged.
    pub number: u64,
    /// Why another machine answers, if it does.
    pub mismatch: Option<Arc<str>>,
}

/// Verdicts that changed, by the host name of the record.
pub type ChangedVerdicts = Vec<(Arc<str>, IdentityVerdict)>;

/// Why an order to trust a machine is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    #[error("{hostname} has not been reached yet: there is no identity to trust")]
    NotSeen { hostname: String },
    #[error("{hostname} is the right machine already: there is nothing to trust")]
    NoMismatch { hostname: String },
    /// One subd answers for two records, which an order cannot change.
    #[error("trust cannot help {hostname}: {why}")]
    SameSubd { hostname: String, why: String },
}

/// The instance of a subd, and the record that it answers for.
type InstanceOfRecord = (u64, Arc<str>);

#[derive(Clone, Debug, Default)]
struct Entry {
    /// The number of the state machine that reports for the record.
    run: u64,
    reported: Option<(u64, Arc<ReportedIdentity>)>,
    is_present: bool,
    known: Option<KnownIdentity>,
    mismatch: Option<Arc<str>>,
}

/// A record for which a subd answers. The record that matches best sorts first.
type MatchingRecord = (Reverse<(bool, bool)>, Arc<str>);

/// The reported and the last known identities of all machines.
#[derive(Debug, Default)]
pub struct IdentityTable {
    entries: BTreeMap<Arc<str>, Entry>,
    last_run: u64,
    /// Records by the first label of their names.
    by_name: Groups<String, Arc<str>>,
    /// Records by the first label of the host name that their subs report.
    by_reported_name: Groups<String, Arc<str>>,
    /// Records by the instance of the subd that answers for them.
    by_instance: Groups<u64, MatchingRecord>,
    /// Instances of the subs that answer now, by host name (in lower case) and boot id, each with
    /// its record.
    boots: Groups<(String, String), InstanceOfRecord>,
    /// Host names, in lower case, that identify no machine.
    common_names: BTreeSet<String>,
    /// The saved identities of machines whose records were not added yet.
    unlisted: BTreeMap<Arc<str>, KnownIdentity>,
    /// Machines whose saved identity is out of date.
    dirty: BTreeSet<Arc<str>>,
}

impl IdentityTable {
    /// Makes a table without records from the saved identities.
    #[must_use]
    pub fn new(saved: BTreeMap<Arc<str>, KnownIdentity>) -> Self {
        Self { unlisted: saved, ..Self::default() }
    }

    /// Adds a record, or handles that its address has changed. Returns the number of its new state
    /// machine, and the verdicts that changed.
    pub fn enter(&mut self, name: &str) -> (u64, ChangedVerdicts) {
        self.last_run += 1;
        let run = self.last_run;
        let name: Arc<str> = name.into();
        let changed = if self.entries.contains_key(&name) {
            self.change(&name, |entry| {
                (entry.reported, entry.is_present) = (None, false);
            })
        } else {
            let known = self.unlisted.remove(&name);
            self.entries.insert(Arc::clone(&name), Entry::default());
            let label = first_label(&name);
            self.by_name.add(label.clone(), Arc::clone(&name));
            let mut changed = self.change(&name, |entry| entry.known = known);
            changed.extend(self.judge_reported(&label));
            changed
        };
        if let Some(entry) = self.entries.get_mut(&name) {
            entry.run = run;
        }
        (run, changed)
    }

    /// Removes a record and the known identity of its machine.
    pub fn leave(&mut self, name: &str) -> ChangedVerdicts {
        let name: Arc<str> = name.into();
        let mut changed = self.change(&name, |entry| *entry = Entry::default());
        if self.entries.remove(&name).is_some() {
            self.dirty.insert(Arc::clone(&name));
        }
        let label = first_label(&name);
        self.by_name.remove(&label, &name);
        changed.extend(self.judge_reported(&label));
        changed.retain(|(other, _)| *other != name);
        changed
    }

    /// Removes the known identities of machines that have no record.
    pub fn forget_unlisted(&mut self) {
        self.dirty.extend(std::mem::take(&mut self.unlisted).into_keys());
    }

    /// Takes the report of a state machine about the record called `name`. Ignores it if `run` is
    /// not the last state machine. Returns the verdicts that changed; [`IdentityReport::Seen`]
    /// always returns one.
    pub fn take_report(&mut self, name: &str, run: u64, report: IdentityReport) -> ChangedVerdicts {
        let Some((name, entry)) = self.entries.get_key_value(name) else { return Vec::new() };
        if entry.run != run {
            return Vec::new();
        }
        let name = Arc::clone(name);
        match report {
            IdentityReport::Seen(number, reported) => self.change(&name, |entry| {
                entry.reported = Some((number, reported));
                entry.is_present = true;
            }),
            IdentityReport::Lost => self.change(&name, |entry| entry.is_present = false),
            IdentityReport::Changing => self.set_known(&name, |known, _| match known.is_own {
                true => KnownIdentity { trust: known.trust.clone(), ..KnownIdentity::default() },
                false => known.clone(),
            }),
            IdentityReport::Synced => self.set_known(&name, |known, reported| {
                let is_own = matches!(reported.origins.machine_id, FileOrigin::Machine);
                if is_own && reported.machine_id.is_empty() {
                    return known.clone();
                }
                let (machine_id, trust) = (reported.machine_id.clone(), known.trust.clone());
                KnownIdentity { machine_id, is_own, trust }
            }),
        }
    }

    /// Returns the known identity of a machine if an operator trusts the one that answers now.
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
        let Some((entry, (_, reported))) =
            entry.and_then(|entry| Some((entry, entry.reported.as_ref()?)))
        else {
            return Err(TrustError::NotSeen { hostname: hostname() });
        };
        if let Some(why) = self.same_subd(name, reported) {
            return Err(TrustError::SameSubd { hostname: hostname(), why });
        }
        if entry.mismatch.is_none() {
            return Err(TrustError::NoMismatch { hostname: hostname() });
        }
        Ok(KnownIdentity {
            machine_id: reported.machine_id.clone(),
            is_own: !reported.machine_id.is_empty() && !reported.has_id_of_image(),
            trust: Some(TrustRecord {
                hostname: reported.hostname.clone(),
                who: who.to_owned(),
                why: why.to_owned(),
                since: now,
            }),
        })
    }

    /// Puts an order to trust in force, which has been saved.
    pub fn take_trust(&mut self, name: &str, known: KnownIdentity) -> ChangedVerdicts {
        let name: Arc<str> = name.into();
        if !self.entries.contains_key(&name) {
            return Vec::new();
        }
        self.change(&name, |entry| entry.known = Some(known))
    }

    /// True if another machine may answer for the record.
    #[must_use]
    pub fn has_identity_mismatch(&self, name: &str) -> bool {
        self.entries.get(name).is_some_and(|entry| entry.mismatch.is_some())
    }

    /// Returns the identities to save, or to remove (`None`), since the last call.
    pub fn take_dirty(&mut self) -> Vec<(Arc<str>, Option<KnownIdentity>)> {
        let dirty = std::mem::take(&mut self.dirty).into_iter();
        dirty
            .map(|name| {
                let known = self.entries.get(&name).and_then(|entry| entry.known.clone());
                (name, known)
            })
            .collect()
    }

    /// Marks the identities of these machines for saving again, because saving failed.
    pub fn mark_dirty(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        self.dirty.extend(names);
    }

    /// True if an identity must be saved.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Changes the known identity of a machine without a mismatch.
    fn set_known(
        &mut self,
        name: &Arc<str>,
        next: impl FnOnce(&KnownIdentity, &ReportedIdentity) -> KnownIdentity,
    ) -> ChangedVerdicts {
        let Some(entry) = self.entries.get(name).filter(|entry| entry.mismatch.is_none()) else {
            return Vec::new();
        };
        let Some((_, reported)) = &entry.reported else { return Vec::new() };
        let now = entry.known.clone().unwrap_or_default();
        let next = next(&now, reported);
        if next == now {
            return Vec::new();
        }
        self.dirty.insert(Arc::clone(name));
        self.change(name, |entry| entry.known = Some(next))
    }

    /// Changes one entry, and judges all machines that this affects.
    fn change(&mut self, name: &Arc<str>, change: impl FnOnce(&mut Entry)) -> ChangedVerdicts {
        let Some(old) = self.entries.remove(name) else { return Vec::new() };
        let mut new = old.clone();
        change(&mut new);
        let instance =
            |entry: &Entry| entry.reported.as_ref().map(|(_, reported)| reported.instance);
        let instances: BTreeSet<u64> =
            [instance(&old), instance(&new)].into_iter().flatten().collect();
        let before: Vec<_> =
            instances.iter().map(|&instance| self.best_matches(instance)).collect();
        self.remove_from_indexes(name, &old);
        self.add_to_indexes(name, &new);
        let number = |entry: &Entry| entry.reported.as_ref().map(|(number, _)| *number);
        let is_reported_again = number(&old) != number(&new);
        self.entries.insert(Arc::clone(name), new);
        let mut judged = BTreeSet::from([Arc::clone(name)]);
        if let Some(label) = self.find_common_name(name) {
            judged.extend(self.by_reported_name.of(&label).iter().cloned());
        }
        // The verdicts on all records of one instance depend on its best two.
        for (instance, before) in instances.into_iter().zip(before) {
            if self.best_matches(instance) != before {
                let members = self.by_instance.of(&instance).iter();
                judged.extend(members.map(|(_, member)| Arc::clone(member)));
            }
        }
        let mut changed = self.judge(judged);
        if is_reported_again && !changed.iter().any(|(other, _)| other == name) {
            let verdict = self.verdict(name);
            changed.push((Arc::clone(name), verdict));
        }
        changed
    }

    fn add_to_indexes(&mut self, name: &Arc<str>, entry: &Entry) {
        let Some((_, reported)) = &entry.reported else { return };
        let matching = matching_record(name, entry, reported);
        self.by_instance.add(reported.instance, matching);
        let label = first_label(&reported.hostname);
        self.by_reported_name.add(label, Arc::clone(name));
        if let Some(boot) = boot_of(entry, reported) {
            self.boots.add(boot, (reported.instance, Arc::clone(name)));
        }
    }

    fn remove_from_indexes(&mut self, name: &Arc<str>, entry: &Entry) {
        let Some((_, reported)) = &entry.reported else { return };
        let matching = matching_record(name, entry, reported);
        self.by_instance.remove(&reported.instance, &matching);
        self.by_reported_name.remove(&first_label(&reported.hostname), name);
        if let Some(boot) = boot_of(entry, reported) {
            self.boots.remove(&boot, &(reported.instance, Arc::clone(name)));
        }
    }

    /// Returns the two records that match a subd best.
    fn best_matches(&self, instance: u64) -> [Option<MatchingRecord>; 2] {
        let mut members = self.by_instance.of(&instance).iter().cloned();
        [members.next(), members.next()]
    }

    /// Judges these machines, and returns the verdicts that changed.
    fn judge(&mut self, names: BTreeSet<Arc<str>>) -> ChangedVerdicts {
        let mut changed = Vec::new();
        for name in names {
            let mismatch = self.mismatch(&name);
            let Some(entry) = self.entries.get_mut(&name) else { continue };
            if entry.mismatch.as_deref() != mismatch.as_deref() {
                entry.mismatch = mismatch.map(Arc::from);
                let verdict = self.verdict(&name);
                changed.push((name, verdict));
            }
        }
        changed
    }

    fn judge_reported(&mut self, label: &str) -> ChangedVerdicts {
        let names = self.by_reported_name.of(label).iter().cloned().collect();
        self.judge(names)
    }

    fn verdict(&self, name: &str) -> IdentityVerdict {
        let Some(entry) = self.entries.get(name) else { return IdentityVerdict::default() };
        let number = entry.reported.as_ref().map_or(0, |(number, _)| *number);
        IdentityVerdict { number, mismatch: entry.mismatch.clone() }
    }

    /// Returns why another machine answers for the record, if it does.
    fn mismatch(&self, name: &str) -> Option<String> {
        let entry = self.entries.get(name)?;
        let (_, reported) = entry.reported.as_ref()?;
        if let Some(why) = self.same_subd(name, reported) {
            return Some(why);
        }
        let id = reported.machine_id.as_str();
        let is_other_id =
            |known: &KnownIdentity| known.is_own && !id.is_empty() && known.machine_id != id;
        if let Some(known) = entry.known.as_ref().filter(|known| is_other_id(known))
            && !reported.has_id_of_image()
        {
            return Some(reported::other_id(name, reported, &known.machine_id));
        }
        let is_trusted = entry.known.as_ref().is_some_and(|known| {
            let trust = known.trust.as_ref();
            known.owns(id) || trust.is_some_and(|trust| trust.hostname == reported.hostname)
        });
        if is_trusted {
            return None;
        }
        if self.common_names.contains(&reported.hostname.to_lowercase()) {
            return None;
        }
        let other = self.other_record_named(name, &reported.hostname)?;
        Some(reported::other_name(name, reported, &other))
    }

    /// Returns why the subd does not belong to this record, if it also answers for another record
    /// that matches as well or better.
    fn same_subd(&self, name: &str, reported: &ReportedIdentity) -> Option<String> {
        let mut records = self.by_instance.of(&reported.instance).iter();
        let ((first_match, first), (second_match, second)) = (records.next()?, records.next()?);
        let is_decided = first_match != second_match;
        if **first == *name {
            return (!is_decided).then(|| reported::same_subd(reported, second));
        }
        Some(if is_decided {
            reported::subd_of_other(reported, first)
        } else {
            reported::same_subd(reported, first)
        })
    }

    /// Returns another record whose name matches `hostname`, if that of `name` does not.
    fn other_record_named(&self, name: &str, hostname: &str) -> Option<Arc<str>> {
        if !is_identifying(hostname) || names_match(name, hostname) {
            return None;
        }
        let records = self.by_name.of(first_label(hostname).as_str());
        let others = || records.iter().filter(|other| ***other != *name);
        let same = others().find(|other| other.eq_ignore_ascii_case(hostname));
        same.or_else(|| others().find(|other| names_match(other, hostname))).cloned()
    }

    /// Finds out whether the host name which the sub of this record reports identifies no machine.
    /// Returns its first label if that was not known before.
    fn find_common_name(&mut self, name: &str) -> Option<String> {
        let entry = self.entries.get(name)?;
        let (_, reported) = entry.reported.as_ref()?;
        let hostname = reported.hostname.to_lowercase();
        if self.common_names.contains(&hostname)
            || self.other_record_named(name, &hostname).is_none()
        {
            return None;
        }
        let boot = boot_of(entry, reported);
        let same_boot = boot.as_ref().map_or(&[][..], |boot| self.boots.of(boot));
        let is_common = reported.origins.hostname.is_content(&reported.hostname)
            || same_boot.iter().any(|(instance, other)| {
                *instance != reported.instance && !names_match(other, &hostname)
            });
        is_common.then(|| {
            let label = first_label(&hostname);
            self.common_names.insert(hostname);
            label
        })
    }
}

fn matching_record(name: &Arc<str>, entry: &Entry, reported: &ReportedIdentity) -> MatchingRecord {
    let known = entry.known.as_ref();
    let owns =
        known.is_some_and(|known| !known.machine_id.is_empty() && known.owns(&reported.machine_id));
    (Reverse((names_match(name, &reported.hostname), owns)), Arc::clone(name))
}

/// Returns the host name and boot id of a sub that answers now, if its boot id is known.
fn boot_of(entry: &Entry, reported: &ReportedIdentity) -> Option<(String, String)> {
    let is_known = entry.is_present && !reported.boot_id.is_empty();
    is_known.then(|| (reported.hostname.to_lowercase(), reported.boot_id.clone()))
}
