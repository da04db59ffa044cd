//! Which machines say the same of themselves: the groups in which verdicts on one depend on others.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::holders::{Holder, Rank, witnesses};
use super::sighting::{Origin, Sighting, id_of_image};
use super::words::{first_label, is_called};
use super::{Entry, IdentityTable};

/// A member of the group of one instance: the best first.
pub(super) type Claimant = (std::cmp::Reverse<(bool, bool)>, Arc<str>);

/// The groups that a record is in; a change of their [`Summary`] concerns all members.
pub(super) struct Groups {
    instance: Option<u64>,
    ids: Vec<String>,
    name: Option<String>,
}

/// What of a group the verdicts on its members depend on.
#[derive(PartialEq, Eq)]
pub(super) enum Summary {
    Instance([Option<Claimant>; 2]),
    Id([Option<Holder>; 2], bool),
    Name(bool),
}

/// What the groups of a roster are known by.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Instance(u64),
    Id(String),
    Name(String),
}

impl Groups {
    pub(super) fn keys(&self) -> impl Iterator<Item = Key> {
        let ids = self.ids.iter().cloned().map(Key::Id);
        let instance = self.instance.map(Key::Instance);
        ids.chain(instance).chain(self.name.clone().map(Key::Name))
    }
}

impl IdentityTable {
    pub(super) fn summary(&self, key: &Key) -> Summary {
        match key {
            Key::Instance(instance) => {
                let mut members = self.instances.get(instance).into_iter().flatten().cloned();
                Summary::Instance([members.next(), members.next()])
            }
            Key::Id(id) => Summary::Id(
                self.holders.get(id).map(witnesses).unwrap_or_default(),
                self.image_ids.contains(id),
            ),
            Key::Name(name) => Summary::Name(self.common_names.contains(name)),
        }
    }

    pub(super) fn members(&self, key: &Key) -> BTreeSet<Arc<str>> {
        match key {
            Key::Instance(instance) => {
                let members = self.instances.get(instance).into_iter().flatten();
                members.map(|(_, name)| Arc::clone(name)).collect()
            }
            Key::Id(id) => {
                let members = self.holders.get(id).into_iter().flatten();
                members.map(|holder| Arc::clone(&holder.name)).collect()
            }
            Key::Name(name) => self.claims.get(&first_label(name)).cloned().unwrap_or_default(),
        }
    }

    pub(super) fn list(&mut self, name: &Arc<str>, entry: &Entry) {
        if let Some((_, sighting)) = &entry.sighting {
            let claimant = claimant(name, entry, sighting);
            self.instances.entry(sighting.instance).or_default().insert(claimant);
            let label = first_label(&sighting.hostname);
            self.claims.entry(label).or_default().insert(Arc::clone(name));
            if sighting.has_id_of_image() {
                self.image_ids.insert(sighting.machine_id.clone());
            }
        }
        if let Some(id) = entry.known.as_ref().and_then(id_of_image) {
            self.image_ids.insert(id.to_owned());
        }
        for (id, holder) in holdings(name, entry) {
            self.holders.entry(id).or_default().insert(holder);
        }
    }

    pub(super) fn unlist(&mut self, name: &Arc<str>, entry: &Entry) {
        if let Some((_, sighting)) = &entry.sighting {
            let claimant = claimant(name, entry, sighting);
            remove_from(&mut self.instances, &sighting.instance, &claimant);
            remove_from(&mut self.claims, &first_label(&sighting.hostname), name);
        }
        for (id, holder) in holdings(name, entry) {
            remove_from(&mut self.holders, &id, &holder);
        }
    }
}

pub(super) fn remove_from<K: Ord, V: Ord>(
    groups: &mut BTreeMap<K, BTreeSet<V>>,
    key: &K,
    member: &V,
) {
    if let Some(group) = groups.get_mut(key) {
        group.remove(member);
        if group.is_empty() {
            groups.remove(key);
        }
    }
}

pub(super) fn groups_of(entry: &Entry) -> Groups {
    let sighting = entry.sighting.as_ref().map(|(_, sighting)| sighting);
    let seen = sighting.map(|sighting| sighting.machine_id.clone());
    let known = entry.known.as_ref().map(|known| known.machine_id.clone());
    Groups {
        instance: sighting.map(|sighting| sighting.instance),
        ids: seen.into_iter().chain(known).filter(|id| !id.is_empty()).collect(),
        name: sighting.map(|sighting| sighting.hostname.to_lowercase()),
    }
}

fn claimant(name: &Arc<str>, entry: &Entry, sighting: &Sighting) -> Claimant {
    let owns = entry.known.as_ref().is_some_and(|known| {
        known.is_own && !known.machine_id.is_empty() && known.machine_id == sighting.machine_id
    });
    (std::cmp::Reverse((is_called(name, &sighting.hostname), owns)), Arc::clone(name))
}

/// The machine ids that the machine has, or was known by.
fn holdings(name: &Arc<str>, entry: &Entry) -> Vec<(String, Holder)> {
    let mut holdings = Vec::new();
    let own = entry.known.as_ref().filter(|known| known.is_own && !known.machine_id.is_empty());
    let seen = entry.sighting.as_ref().map(|(_, sighting)| sighting);
    let seen = seen.filter(|sighting| !sighting.machine_id.is_empty());
    if let Some(known) = own {
        let here = seen.filter(|sighting| sighting.machine_id == known.machine_id);
        let boot = here.map(|sighting| sighting.boot_id.clone());
        let holder = Holder { rank: Rank::Owner, boot, name: Arc::clone(name) };
        holdings.push((known.machine_id.clone(), holder));
        if here.is_some() {
            return holdings;
        }
    }
    if let Some(sighting) = seen {
        let rank = match sighting.origins.machine_id {
            Origin::Machine if sighting.boot_id.is_empty() => Rank::Bystander,
            Origin::Machine if is_called(name, &sighting.hostname) => Rank::Called,
            Origin::Machine => Rank::Other,
            Origin::Unknown | Origin::Image(_) | Origin::Nobody => Rank::Bystander,
        };
        let boot = Some(sighting.boot_id.clone());
        holdings.push((sighting.machine_id.clone(), Holder { rank, boot, name: Arc::clone(name) }));
    }
    holdings
}
