//! The machines that there are, and what a change of the machine database means for each.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::api::dominator::Status;
use common::image::ImageName;
use common::mdb::{Machine, Machines};

/// A machine database that is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HerdError {
    /// The database is empty, while there are machines.
    #[error(
        "the machine database lists no machine at all, while {machines} are known: if that is \
         meant, stop the dominator instead"
    )]
    AllGone {
        /// How many machines are known.
        machines: usize,
    },
    /// The database lacks too many of the machines.
    #[error(
        "the machine database lacks {dropped} of the {machines} machines that are known, and may \
         lack {limit_percent} %: if that is meant, restart the dominator, or see --mdb-drop-max"
    )]
    TooManyGone {
        /// How many machines it lacks.
        dropped: usize,
        /// How many machines are known.
        machines: usize,
        /// How many it may lack, per cent.
        limit_percent: u8,
    },
}

/// Fleets of fewer machines may lose any number but all.
const FLEET_MIN: usize = 10;

/// What has to be done for one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The machine is new: start to look after it.
    Start(Arc<Machine>),
    /// Its record has changed.
    Update(Arc<Machine>),
    /// It is not in the database any more: let go of it.
    Stop(String),
}

/// The machines of the database that is in force.
#[derive(Clone, Debug)]
pub struct Herd {
    machines: BTreeMap<String, Arc<Machine>>,
    drop_max_percent: u8,
}

impl Herd {
    /// A herd without machines, whose databases may drop so many of the machines at once.
    #[must_use]
    pub fn new(drop_max_percent: u8) -> Self {
        Self { machines: BTreeMap::new(), drop_max_percent }
    }

    /// Takes a new machine database and says what has changed, sorted by host name.
    ///
    /// # Errors
    ///
    /// [`HerdError`] if the database would drop too much of the fleet; nothing is changed then.
    pub fn take(&mut self, mut new: Machines) -> Result<Vec<Change>, HerdError> {
        if new.is_empty() && !self.machines.is_empty() {
            return Err(HerdError::AllGone { machines: self.machines.len() });
        }
        let (machines, limit_percent) = (self.machines.len(), self.drop_max_percent);
        let dropped = self.machines.keys().filter(|known| !new.contains_key(*known)).count();
        if machines >= FLEET_MIN && dropped * 100 > machines * usize::from(limit_percent) {
            return Err(HerdError::TooManyGone { dropped, machines, limit_percent });
        }
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
                    changes.push(if is_known { Change::Update(new) } else { Change::Start(new) });
                }
                (_, None) => {
                    self.machines.remove(&hostname);
                    changes.push(Change::Stop(hostname));
                }
            }
        }
        Ok(changes)
    }

    /// The images that machines must have.
    #[must_use]
    pub fn images(&self) -> BTreeSet<ImageName> {
        self.machines.values().filter_map(|machine| machine.required()).collect()
    }

    /// The machines, by host name.
    #[must_use]
    pub fn machines(&self) -> &BTreeMap<String, Arc<Machine>> {
        &self.machines
    }
}

/// How many machines have each status; statuses without machines are left out.
#[must_use]
pub fn count(statuses: impl IntoIterator<Item = Status>) -> Vec<(Status, u32)> {
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
        let mut herd = Herd::new(50);
        let start = |hostname, image| Change::Start(Arc::new(machine(hostname, image)));
        let update = |hostname, image| Change::Update(Arc::new(machine(hostname, image)));
        let changes = herd.take(database(&[("b", "x"), ("a", "x"), ("c", "")])).unwrap();
        assert_eq!(changes, [start("a", "x"), start("b", "x"), start("c", "")]);
        assert_eq!(herd.images(), BTreeSet::from([ImageName::new("x").unwrap()]));
        assert_eq!(herd.take(database(&[("a", "x"), ("b", "x"), ("c", "")])).unwrap(), []);
        let changes = herd.take(database(&[("a", "x"), ("b", "y"), ("d", "z")])).unwrap();
        assert_eq!(changes, [update("b", "y"), Change::Stop("c".into()), start("d", "z")]);
        let images: Vec<String> = herd.images().into_iter().map(String::from).collect();
        assert_eq!(images, ["x", "y", "z"]);
    }

    #[test]
    fn an_empty_database_does_not_drop_the_fleet() {
        let mut herd = Herd::new(50);
        assert_eq!(herd.take(Machines::new()).unwrap(), []);
        herd.take(database(&[("a", "x"), ("b", "x")])).unwrap();
        assert_eq!(herd.take(Machines::new()), Err(HerdError::AllGone { machines: 2 }));
        assert_eq!(herd.machines().len(), 2);
    }

    #[test]
    fn a_database_that_lacks_more_than_a_limit_is_not_taken() {
        let mut herd = Herd::new(50);
        let names: Vec<String> = (0..10).map(|number| format!("m{number}")).collect();
        let first = |count| names.iter().take(count).map(|name| (name.as_str(), "x")).collect();
        let all: Vec<(&str, &str)> = first(10);
        herd.take(database(&all)).unwrap();
        let four: Vec<(&str, &str)> = first(4);
        let error = HerdError::TooManyGone { dropped: 6, machines: 10, limit_percent: 50 };
        assert_eq!(herd.take(database(&four)), Err(error));
        assert_eq!(herd.machines().len(), 10);
        let five: Vec<(&str, &str)> = first(5);
        assert_eq!(herd.take(database(&five)).unwrap().len(), 5);
        // A handful of machines may change as it likes.
        assert_eq!(herd.take(database(&[("m0", "x")])).unwrap().len(), 4);
    }

    #[test]
    fn counts_leave_out_what_no_machine_has() {
        let statuses = [Status::Synced, Status::Fetching, Status::Synced];
        assert_eq!(count(statuses), [(Status::Fetching, 1), (Status::Synced, 2)]);
    }
}
