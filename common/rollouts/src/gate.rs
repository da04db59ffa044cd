//! Which image each machine must have: that of the machine database, or that of an environment.
//!
//! Only `RequiredImage` and an empty `PlannedImage` are changed; all else is as in the machine
//! database. A machine in no environment has just the record of the machine database.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::mdb::Machine;

use crate::document::{Direction, Revision};
use crate::selector_index::SelectorIndex;
use crate::state::{EnvironmentState, SharedMachines, State, StoredRevision};

/// What environments say about a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gated {
    /// The environment that applies, and the revision of it that the machine has.
    pub environment: String,
    pub revision: Revision,
    /// The required image; empty for none.
    pub image: String,
    /// Other environments that select the machine too, and are not applied.
    pub conflicts: Vec<String>,
}

/// Decides about machines, given what is remembered.
#[derive(Debug)]
pub struct Gate<'a>(SelectorIndex<'a, InUse<'a>>);

/// A revision that machines may have.
#[derive(Clone, Copy, Debug)]
struct InUse<'a> {
    name: &'a String,
    environment: &'a EnvironmentState,
    number: Revision,
    stored: &'a StoredRevision,
}

impl<'a> Gate<'a> {
    /// Makes it of what is remembered.
    #[must_use]
    pub fn new(state: &'a State) -> Self {
        let in_use = state.environments.iter().flat_map(|(name, environment)| {
            let moved = environment.moved.values().copied();
            let numbers: BTreeSet<Revision> = moved.chain([environment.committed]).collect();
            numbers.into_iter().filter_map(move |number| {
                let stored = environment.revisions.get(&number)?;
                let selector = &stored.definition.select;
                Some((selector, InUse { name, environment, number, stored }))
            })
        });
        Self(SelectorIndex::new(in_use))
    }

    /// Returns what environments say about the machine with this record; `None` if the image of
    /// the machine database applies.
    #[must_use]
    pub fn gated(&self, machine: &Machine) -> Option<Gated> {
        let hostname = &machine.hostname;
        let mut selecting = self.0.selecting(machine);
        selecting.retain(|one| {
            one.environment.number_on(hostname) == one.number && one.environment.has(hostname)
        });
        selecting.sort_by_key(|one| (one.environment.order, one.name));
        let mut selecting = selecting.into_iter();
        let InUse { name, number, stored, .. } = selecting.next()?;
        Some(Gated {
            environment: name.clone(),
            revision: number,
            image: stored.image_of(hostname).to_owned(),
            conflicts: selecting.map(|one| one.name.clone()).collect(),
        })
    }

    /// Returns the image that the machine with this record must have; empty for none.
    #[must_use]
    pub fn image_of(&self, machine: &Machine) -> String {
        self.gated(machine).map_or_else(|| machine.required_image.clone(), |gated| gated.image)
    }
}

/// Returns the machine database that is in force, given the one that operators wrote.
#[must_use]
pub fn effective(state: &State, mdb: &SharedMachines) -> SharedMachines {
    if state.environments.is_empty() {
        return mdb.clone();
    }
    let (gate, pending) = (Gate::new(state), pending(state));
    let record = |(hostname, machine): (&String, &Arc<Machine>)| {
        (hostname.clone(), effective_record(&gate, &pending, machine))
    };
    mdb.iter().map(record).collect()
}

/// Returns the revisions that environments get.
fn pending(state: &State) -> SelectorIndex<'_, &StoredRevision> {
    let mut pending = BTreeMap::new();
    for step in state.unfinished().flat_map(|record| &record.rollout.steps) {
        let wanted = step.revision.filter(|_| step.direction == Direction::Forward);
        if let Some(revision) = wanted.filter(|_| !step.state.is_finished()) {
            pending.insert(step.environment.as_str(), revision);
        }
    }
    SelectorIndex::new(pending.into_iter().filter_map(|(name, revision)| {
        let stored = state.environments.get(name)?.revisions.get(&revision)?;
        Some((&stored.definition.select, stored))
    }))
}

fn effective_record(
    gate: &Gate<'_>,
    pending: &SelectorIndex<'_, &StoredRevision>,
    machine: &Arc<Machine>,
) -> Arc<Machine> {
    let required = gate.image_of(machine);
    let planned = match machine.planned_image.as_str() {
        "" => {
            let next = pending.selecting(machine).into_iter();
            let mut images = next.map(|stored| stored.image_of(&machine.hostname));
            images.find(|image| !image.is_empty() && **image != required).unwrap_or_default()
        }
        planned => planned,
    };
    if required == machine.required_image && planned == machine.planned_image {
        return Arc::clone(machine);
    }
    Arc::new(Machine {
        required_image: required,
        planned_image: planned.to_owned(),
        ..Machine::clone(machine)
    })
}
