//! Whether what answers at an address is the machine that is meant.
//!
//! Addresses are given to other machines, and machines are copied with all that tells them apart.
//! The roster has what every sub says of itself, and by which machine id each machine was last
//! known. A machine is doubted if
//!
//! 1. its subd is the one that answers for another record too;
//! 2. its machine id is not the one by which it was last known;
//! 3. it says that it is another machine of the database;
//! 4. it has the machine id of another machine, and was booted apart from it.
//!
//! What an image brings to all its machines tells none apart, nor does what subds of one host
//! share. So a host name or machine id that is the content of a file of the image proves nothing,
//! nor does a host name that two machines have that are both called otherwise; machines of one boot
//! id are one host. The machine id by which a machine was last known outweighs its host name, and
//! for machines that have none yet, a host name that is the right one outweighs a machine id.
//!
//! # Invariants
//!
//! * A verdict depends on what was said, and not on who was reached first, but for this: who was
//!   not reached yet is no witness. A machine that is doubted for its host name waits until another
//!   one shows that the name proves nothing; nobody waits for machines that are not in doubt.
//! * What a machine was last known by goes only by an update that may have changed it, by an
//!   operator's word, or with its record.
// tidy: core

mod groups;
mod holders;
mod sighting;
#[cfg(test)]
mod tests;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::tree::Time;

pub use sighting::{KnownIdentity, Origin, Origins, Sighting, Trust};

use groups::{Claimant, Key, Summary, groups_of, remove_from};
use holders::{Holder, Rank, witnesses};
use sighting::id_of_image;
use words::{first_label, is_called};

/// What a state machine tells of its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityReport {
    /// A sub answered that says this of itself. The number tells sightings apart.
    Seen(u64, Arc<Sighting>),
    /// It does not answer any more.
    Lost,
    /// It is told to carry out an update that may change its machine id.
    Changing,
    /// It equals its image.
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

/// Why a machine cannot be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    /// Nothing has answered for it yet.
    #[error("{hostname} has not been reached yet: there is nobody to trust")]
    NotSeen {
        /// The machine.
        hostname: String,
    },
    /// It is not doubted.
    #[error("{hostname} is not in doubt")]
    NoDoubt {
        /// The machine.
        hostname: String,
    },
    /// One subd answers for two records: no word can make two machines of it.
    #[error("no word can help {hostname}: {why}")]
    SameSubd {
        /// The machine.
        hostname: String,
        /// What is wrong.
        why: String,
    },
}

#[derive(Clone, Debug, Default)]
struct Entry {
    /// Tells the runs of state machines for one record apart.
    seat: u64,
    sighting: Option<(u64, Arc<Sighting>)>,
    is_present: bool,
    known: Option<KnownIdentity>,
    wrong: Option<Arc<str>>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct IdentityTable {
    entries: BTreeMap<Arc<str>, Entry>,
    last_seat: u64,
    /// Records by the first label of their names.
    records: BTreeMap<String, BTreeSet<Arc<str>>>,
    /// Records by the first label of the name that their subs report.
    claims: BTreeMap<String, BTreeSet<Arc<str>>>,
    /// Names that machines report, in lower case, and that are no single machine's.
    common_names: BTreeSet<String>,
    instances: BTreeMap<u64, BTreeSet<Claimant>>,
    holders: BTreeMap<String, BTreeSet<Holder>>,
    /// Machine ids that images bring.
    image_ids: BTreeSet<String>,
    /// What is known of machines that no record was entered for.
    waiting: BTreeMap<Arc<str>, KnownIdentity>,
    /// Machines of which something else is known than was taken to be kept.
    dirty: BTreeSet<Arc<str>>,
}

impl IdentityTable {
    /// A roster without records; each machine was last known by what `waiting` says.
    #[must_use]
    pub fn new(waiting: BTreeMap<Arc<str>, KnownIdentity>) -> Self {
        let image_ids = waiting.values().filter_map(id_of_image).map(str::to_owned).collect();
        Self { waiting, image_ids, ..Self::default() }
    }

    /// A record is looked after from now on, or at another address. Gives the seat of its state
    /// machine, and the verdicts that are different now.
    pub fn enter(&mut self, name: &str) -> (u64, Vec<(Arc<str>, IdentityVerdict)>) {
        self.last_seat += 1;
        let seat = self.last_seat;
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
            changed.extend(self.judge_claims(&label));
            changed
        };
        if let Some(entry) = self.entries.get_mut(&name) {
            entry.seat = seat;
        }
        (seat, changed)
    }

    /// A record is gone, and what its machine was known by.
    pub fn leave(&mut self, name: &str) -> Vec<(Arc<str>, IdentityVerdict)> {
        let name: Arc<str> = name.into();
        let mut changed = self.change(&name, |entry| *entry = Entry::default());
        if self.entries.remove(&name).is_some() {
            self.dirty.insert(Arc::clone(&name));
        }
        let label = first_label(&name);
        remove_from(&mut self.records, &label, &name);
        changed.extend(self.judge_claims(&label));
        changed.retain(|(other, _)| *other != name);
        changed
    }

    /// Forgets what is known of machines that have no record.
    pub fn forget_the_others(&mut self) {
        self.dirty.extend(std::mem::take(&mut self.waiting).into_keys());
    }

    /// Hears what the state machine in `seat` tells of the record called `name`. Gives the verdicts
    /// that are different now; a sighting is always answered.
    pub fn hear(
        &mut self,
        name: &str,
        seat: u64,
        news: IdentityReport,
    ) -> Vec<(Arc<str>, IdentityVerdict)> {
        let Some((name, entry)) = self.entries.get_key_value(name) else { return Vec::new() };
        if entry.seat != seat {
            return Vec::new();
        }
        let name = Arc::clone(name);
        match news {
            IdentityReport::Seen(number, sighting) => self.change(&name, |entry| {
                entry.sighting = Some((number, sighting));
                entry.is_present = true;
            }),
            IdentityReport::Lost => {
                if let Some(entry) = self.entries.get_mut(&name) {
                    entry.is_present = false;
                }
                Vec::new()
            }
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

    /// What will be known of a machine when an operator trusts what answers for it now; it is
    /// trusted only by [`IdentityTable::take_trust`].
    ///
    /// # Errors
    ///
    /// [`TrustError`].
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

    /// Takes an operator's word, which is kept already.
    pub fn take_trust(
        &mut self,
        name: &str,
        known: KnownIdentity,
    ) -> Vec<(Arc<str>, IdentityVerdict)> {
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

    /// What is to be kept, or not any more, since this was last asked.
    pub fn take_dirty(&mut self) -> Vec<(Arc<str>, Option<KnownIdentity>)> {
        let dirty = std::mem::take(&mut self.dirty).into_iter();
        dirty
            .map(|name| {
                let known = self.entries.get(&name).and_then(|entry| entry.known.clone());
                (name, known)
            })
            .collect()
    }

    /// What was taken was not kept: it is to be taken again.
    pub fn dirty_again(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        self.dirty.extend(names);
    }

    /// True if something is to be kept.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Changes what a machine that is not in doubt is known by.
    fn know(
        &mut self,
        name: &Arc<str>,
        next: impl FnOnce(&KnownIdentity, &Sighting) -> KnownIdentity,
    ) -> Vec<(Arc<str>, IdentityVerdict)> {
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

    /// Changes one entry, and judges all whom that concerns.
    fn change(
        &mut self,
        name: &Arc<str>,
        change: impl FnOnce(&mut Entry),
    ) -> Vec<(Arc<str>, IdentityVerdict)> {
        let Some(old) = self.entries.remove(name) else { return Vec::new() };
        let mut new = old.clone();
        change(&mut new);
        let (before, after) = (groups_of(&old), groups_of(&new));
        let keys: BTreeSet<Key> = before.keys().chain(after.keys()).collect();
        let summaries: Vec<(Key, Summary)> =
            keys.into_iter().map(|key| (key.clone(), self.summary(&key))).collect();
        // The groups lose the member as it was before they get it as it is now.
        self.unlist(name, &old);
        self.list(name, &new);
        let number = |entry: &Entry| entry.sighting.as_ref().map(|(number, _)| *number);
        let is_seen_again = number(&old) != number(&new);
        self.entries.insert(Arc::clone(name), new);
        self.learn_common_name(name);
        let mut judged = BTreeSet::from([Arc::clone(name)]);
        for (key, summary) in summaries {
            if self.summary(&key) != summary {
                judged.extend(self.members(&key));
            }
        }
        let mut changed = self.judge(judged);
        if is_seen_again && !changed.iter().any(|(other, _)| other == name) {
            let verdict = self.verdict(name);
            changed.push((Arc::clone(name), verdict));
        }
        changed
    }

    /// Judges these, and gives the verdicts that are different now.
    fn judge(&mut self, names: BTreeSet<Arc<str>>) -> Vec<(Arc<str>, IdentityVerdict)> {
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

    fn judge_claims(&mut self, label: &str) -> Vec<(Arc<str>, IdentityVerdict)> {
        let claims = self.claims.get(label).cloned().unwrap_or_default();
        self.judge(claims)
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
        if let Some(other) = self.called(name, &sighting.hostname)
            && !self.common_names.contains(&sighting.hostname.to_lowercase())
        {
            return Some(words::other_name(name, sighting, &other));
        }
        let is_known = entry.known.as_ref().is_some_and(|known| known.machine_id == id);
        if id.is_empty() || is_known || is_called(name, &sighting.hostname) {
            return None;
        }
        let witness = self.witness(sighting)?;
        Some(words::same_id(name, sighting, &witness.name, witness.rank == Rank::Owner))
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

    /// A machine that shows that the machine id of `sighting` is not its own.
    fn witness(&self, sighting: &Sighting) -> Option<Holder> {
        let id = &sighting.machine_id;
        if sighting.boot_id.is_empty() || sighting.has_id_of_image() || self.image_ids.contains(id)
        {
            return None;
        }
        let both = witnesses(self.holders.get(id)?);
        both.into_iter().flatten().find(|holder| holder.boot.as_ref() != Some(&sighting.boot_id))
    }

    /// Takes note that the name which the sub of this record reports is no single machine's.
    fn learn_common_name(&mut self, name: &str) {
        let Some((_, sighting)) = self.entries[name].sighting.clone() else { return };
        if self.called(name, &sighting.hostname).is_none() {
            return;
        }
        let hostname = sighting.hostname.to_lowercase();
        if self.common_names.contains(&hostname) {
            return;
        }
        let claims = self.claims.get(&first_label(&hostname));
        let others = claims.into_iter().flatten().filter(|other| ***other != *name);
        let is_common = sighting.origins.hostname.brings(&sighting.hostname)
            || others.filter(|other| !is_called(other, &hostname)).any(|other| {
                let entry = &self.entries[other];
                entry.is_present
                    && entry.sighting.as_ref().is_some_and(|(_, other)| {
                        other.instance != sighting.instance
                            && other.hostname.eq_ignore_ascii_case(&hostname)
                    })
            });
        if is_common {
            self.common_names.insert(hostname);
        }
    }
}
