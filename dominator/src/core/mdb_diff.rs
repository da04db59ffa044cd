//! The machine database in force, and its differences to a new one.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use api::dominator::Status;
use model::image::ImageName;
use model::mdb::{Machine, Machines};

/// How much a new machine database may change without being held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EditLimits {
    /// The share of the machines that it may lack, in percent.
    pub drop_percent: u8,
    /// The share of the machines to which it may give another image, in percent; no limit if
    /// `None`.
    pub reimage_percent: Option<u8>,
}

/// Why a machine database is held until an operator accepts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HoldReason {
    #[error("it lists no machine at all, while {machines} are known")]
    AllGone { machines: usize },
    #[error("it lacks {dropped} of the {machines} machines that are known, more than {percent} %")]
    TooManyGone { dropped: usize, machines: usize, percent: u8 },
    #[error(
        "it has another image for {reimaged} of the {machines} machines that are known, more than \
         {percent} %"
    )]
    TooManyReimaged { reimaged: usize, machines: usize, percent: u8 },
}

/// Smaller fleets may change without limits, as long as the database is not empty.
const FLEET_MIN: usize = 10;

/// A change of the machine database for one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MdbChange {
    /// The machine is new: manage it from now on.
    Start(Arc<Machine>),
    /// Its record has changed.
    Update(Arc<Machine>),
    /// The machine was removed: do not manage it any more.
    Stop(String),
}

/// The machines of the database that is in force.
#[derive(Clone, Debug, Default)]
pub struct CurrentMdb {
    machines: BTreeMap<String, Arc<Machine>>,
}

impl CurrentMdb {
    /// Returns why a new machine database must be held, if it must.
    #[must_use]
    pub fn hold_reason(&self, new: &Machines, limits: EditLimits) -> Option<HoldReason> {
        let machines = self.machines.len();
        if new.is_empty() && machines > 0 {
            return Some(HoldReason::AllGone { machines });
        }
        if machines < FLEET_MIN {
            return None;
        }
        let (mut dropped, mut reimaged) = (0, 0);
        for (hostname, old) in &self.machines {
            match new.get(hostname) {
                None => dropped += 1,
                Some(new) => reimaged += usize::from(old.required() != new.required()),
            }
        }
        let exceeds = |count: usize, percent: u8| count * 100 > machines * usize::from(percent);
        if exceeds(dropped, limits.drop_percent) {
            let percent = limits.drop_percent;
            return Some(HoldReason::TooManyGone { dropped, machines, percent });
        }
        let percent = limits.reimage_percent.filter(|&percent| exceeds(reimaged, percent))?;
        Some(HoldReason::TooManyReimaged { reimaged, machines, percent })
    }

    /// Takes a new machine database. Returns the changes, sorted by host name.
    pub fn take(&mut self, mut new: Machines) -> Vec<MdbChange> {
        let mut changes = Vec::new();
        let hostnames: BTreeSet<String> = self.machines.keys().chain(new.keys()).cloned().collect();
        for hostname in hostnames {
            let old = self.machines.get(&hostname);
            match (old, new.remove(&hostname)) {
                (Some(old), Some(new)) if **old == new => {}
                (old, Some(new)) => {
                    let is_known = old.is_some();
                    let new = Arc::new(new);
                    self.machines.insert(hostname, Arc::clone(&new));
                    changes.push(if is_known {
                        MdbChange::Update(new)
                    } else {
                        MdbChange::Start(new)
                    });
                }
                (_, None) => {
                    self.machines.remove(&hostname);
                    changes.push(MdbChange::Stop(hostname));
                }
            }
        }
        changes
    }

    /// Returns the machines by host name.
    #[must_use]
    pub fn machines(&self) -> &BTreeMap<String, Arc<Machine>> {
        &self.machines
    }
}

/// Returns the images that machines must have or will get next.
#[must_use]
pub fn images_of(machines: &BTreeMap<String, Arc<Machine>>) -> BTreeSet<ImageName> {
    let images = |machine: &Arc<Machine>| machine.required().into_iter().chain(machine.planned());
    machines.values().flat_map(images).collect()
}

/// Returns what differs between the records of machines, sorted by host name.
#[must_use]
pub fn changes_between(
    before: &BTreeMap<String, Arc<Machine>>,
    after: &BTreeMap<String, Arc<Machine>>,
) -> Vec<MdbChange> {
    let hostnames: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let change = |hostname: &String| match (before.get(hostname), after.get(hostname)) {
        (Some(old), Some(new)) if Arc::ptr_eq(old, new) || old == new => None,
        (Some(_), Some(new)) => Some(MdbChange::Update(Arc::clone(new))),
        (None, Some(new)) => Some(MdbChange::Start(Arc::clone(new))),
        (_, None) => Some(MdbChange::Stop(hostname.clone())),
    };
    hostnames.into_iter().filter_map(change).collect()
}

/// Counts the machines of each status. Omits statuses without machines.
#[must_use]
pub fn count_statuses(statuses: impl IntoIterator<Item = Status>) -> Vec<(Status, u32)> {
    let mut counts: BTreeMap<Status, u32> = BTreeMap::new();
    for status in statuses {
        *counts.entry(status).or_default() += 1;
    }
    counts.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(hostname: &str, image: &str) -> Machine {
        Machine { hostname: hostname.into(), required_image: image.into(), ..Machine::default() }
    }

    fn database(machines: &[(&str, &str)]) -> Machines {
        machines
            .iter()
            .map(|(hostname, image)| ((*hostname).to_owned(), machine(hostname, image)))
            .collect()
    }

    #[test]
    fn a_new_database_changes_only_what_differs() {
        let mut current = CurrentMdb::default();
        let start = |hostname, image| MdbChange::Start(Arc::new(machine(hostname, image)));
        let update = |hostname, image| MdbChange::Update(Arc::new(machine(hostname, image)));
        let changes = current.take(database(&[("b", "x"), ("a", "x"), ("c", "")]));
        assert_eq!(changes, [start("a", "x"), start("b", "x"), start("c", "")]);
        assert_eq!(images_of(current.machines()), BTreeSet::from([ImageName::new("x").unwrap()]));
        assert_eq!(current.take(database(&[("a", "x"), ("b", "x"), ("c", "")])), []);
        let changes = current.take(database(&[("a", "x"), ("b", "y"), ("d", "z")]));
        assert_eq!(changes, [update("b", "y"), MdbChange::Stop("c".into()), start("d", "z")]);
        let images: Vec<String> =
            images_of(current.machines()).into_iter().map(String::from).collect();
        assert_eq!(images, ["x", "y", "z"]);
    }

    #[test]
    fn a_database_that_changes_too_much_is_doubted() {
        let names: Vec<String> = (0..10).map(|number| format!("m{number}")).collect();
        // `count` machines, of which `moved` have another image.
        let fleet = |count: usize, moved: usize| -> Machines {
            let image = |index| if index < moved { "y" } else { "x" };
            let machines = names.iter().take(count).enumerate();
            machines.map(|(index, name)| (name.clone(), machine(name, image(index)))).collect()
        };
        let known = |count| {
            let mut current = CurrentMdb::default();
            current.take(fleet(count, 0));
            current
        };
        let gone = |dropped| Some(HoldReason::TooManyGone { dropped, machines: 10, percent: 50 });
        let moved =
            |reimaged| Some(HoldReason::TooManyReimaged { reimaged, machines: 10, percent: 30 });
        // Known machines; those of the new database, and how many of them have another image.
        let table = [
            ((0, 0, 0), None),
            ((2, 0, 0), Some(HoldReason::AllGone { machines: 2 })),
            ((10, 10, 0), None),
            ((10, 5, 0), None),
            ((10, 4, 0), gone(6)),
            ((10, 0, 0), Some(HoldReason::AllGone { machines: 10 })),
            ((10, 10, 3), None),
            ((10, 10, 4), moved(4)),
            ((10, 4, 4), gone(6)),
            // A small fleet may change without limits.
            ((9, 1, 1), None),
        ];
        let limits = EditLimits { drop_percent: 50, reimage_percent: Some(30) };
        for ((before, count, changed), hold_reason) in table {
            let new = fleet(count, changed);
            assert_eq!(
                known(before).hold_reason(&new, limits),
                hold_reason,
                "{before} {count} {changed}"
            );
        }
        let limits = EditLimits { reimage_percent: None, ..limits };
        assert_eq!(known(10).hold_reason(&fleet(10, 10), limits), None);
    }

    #[test]
    fn counts_leave_out_what_no_machine_has() {
        let statuses = [Status::Synced, Status::Fetching, Status::Synced];
        assert_eq!(count_statuses(statuses), [(Status::Fetching, 1), (Status::Synced, 2)]);
    }
}
