//! Which image each machine must have: that of the machine database, or that of an environment.
//!
//! Only `RequiredImage` and an empty `PlannedImage` are changed; all else is as in the machine
//! database. A machine in no environment has just the record of the machine database.

use std::collections::BTreeMap;
use std::sync::Arc;

use model::mdb::Machine;

use crate::document::{Direction, Revision};
use crate::state::{EnvironmentState, SharedMachines, State};

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

/// Returns what environments say about the machine with this record; `None` if the image of the
/// machine database applies.
#[must_use]
pub fn gated(state: &State, machine: &Machine) -> Option<Gated> {
    let mut selecting: Vec<_> = state
        .environments
        .iter()
        .filter_map(|(name, one)| Some((one.order, name, one.revision_on(machine)?)))
        .collect();
    selecting.sort_by_key(|(order, name, _)| (*order, *name));
    let mut selecting = selecting.into_iter();
    let (_, name, (revision, stored)) = selecting.next()?;
    Some(Gated {
        environment: name.clone(),
        revision,
        image: stored.image_of(&machine.hostname).to_owned(),
        conflicts: selecting.map(|(_, name, _)| name.clone()).collect(),
    })
}

/// Returns the machine database that is in force, given the one that operators wrote.
#[must_use]
pub fn effective(state: &State, mdb: &SharedMachines) -> SharedMachines {
    if state.environments.is_empty() {
        return mdb.clone();
    }
    let pending = pending(state);
    let record = |(hostname, machine): (&String, &Arc<Machine>)| {
        (hostname.clone(), effective_record(state, &pending, machine))
    };
    mdb.iter().map(record).collect()
}

/// Returns the environments that get another revision, with it.
fn pending(state: &State) -> BTreeMap<&str, Revision> {
    let mut pending = BTreeMap::new();
    for step in state.unfinished().flat_map(|record| &record.rollout.steps) {
        let wanted = step.revision.filter(|_| step.direction == Direction::Forward);
        if let Some(revision) = wanted.filter(|_| !step.state.is_finished()) {
            pending.insert(step.environment.as_str(), revision);
        }
    }
    pending
}

fn effective_record(
    state: &State,
    pending: &BTreeMap<&str, Revision>,
    machine: &Arc<Machine>,
) -> Arc<Machine> {
    let gated = gated(state, machine);
    let required = gated.as_ref().map_or(&machine.required_image, |gated| &gated.image);
    let next = |(name, revision): (&&str, &Revision)| {
        let environment: &EnvironmentState = state.environments.get(*name)?;
        let stored = environment.revisions.get(revision)?;
        let image = stored.image_of(&machine.hostname);
        let is_wanted = !image.is_empty() && image != required;
        (is_wanted && stored.definition.select.selects(machine)).then_some(image)
    };
    let planned = match machine.planned_image.as_str() {
        "" => pending.iter().find_map(next).unwrap_or_default(),
        planned => planned,
    };
    if *required == machine.required_image && planned == machine.planned_image {
        return Arc::clone(machine);
    }
    Arc::new(Machine {
        required_image: required.clone(),
        planned_image: planned.to_owned(),
        ..Machine::clone(machine)
    })
}
