//! What is to be started and stopped on each machine.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::batch::{Batch, tasks_of};
use crate::document::{Document, Machine, MachineTaskState, Revision, Rollout};

/// What is to be done on a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Actions {
    pub host: String,
    pub stop: Vec<Action>,
    pub start: Vec<Action>,
}

/// A revision of an environment's task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Action {
    pub environment: String,
    pub revision: Revision,
    pub reason: String,
}

/// Returns what is to be done on the machines, but not on those that need nothing.
///
/// A start is ordered only when nothing of the environment is left on the machine.
#[must_use]
pub fn machine_tasks(
    document: &Document,
    rollout: Option<&Rollout>,
    batches: &[Batch],
) -> Vec<Actions> {
    let machines = document.machines.iter().filter(|machine| machine.reachable);
    let actions = machines.map(|machine| {
        let mut actions = Actions { host: machine.host.clone(), ..Actions::default() };
        for environment in &document.environments {
            let name = environment.name.as_str();
            let (wanted, reason) = wanted(document, rollout, batches, machine, name);
            act(machine, name, wanted, reason, &mut actions);
        }
        actions
    });
    actions.filter(|actions| !actions.stop.is_empty() || !actions.start.is_empty()).collect()
}

/// Returns which revision of `environment` the machine shall run, and why.
fn wanted(
    document: &Document,
    rollout: Option<&Rollout>,
    batches: &[Batch],
    machine: &Machine,
    environment: &str,
) -> (Option<Revision>, &'static str) {
    if !machine.environments.contains(environment) {
        return (None, "the environment does not select the machine");
    }
    let steps = rollout.into_iter().flat_map(|rollout| &rollout.steps);
    let mut on_machines =
        steps.filter(|step| step.environment == environment && step.state.is_on_machines());
    let revisions: BTreeSet<Revision> =
        tasks_of(machine, environment).map(|task| task.revision).collect();
    if let Some(step) = on_machines.next() {
        let is_in_batch = batches
            .iter()
            .any(|batch| batch.step == step.id && batch.hosts.contains(&machine.host));
        // A machine whose former task was stopped for the step goes on to the new one.
        let has_begun = step.revision.is_some_and(|revision| revisions.contains(&revision));
        if is_in_batch || has_begun {
            return (step.revision, "the rollout has come to the machine");
        }
    }
    let present = tasks_of(machine, environment).filter(|task| task.state.is_present());
    if let Some(task) = present.max_by_key(|task| (task.state.is_healthy(), task.revision)) {
        return (Some(task.revision), "there may be one");
    }
    let is_active = document.environment(environment).is_some_and(|one| one.active);
    let committed = document.environment(environment).and_then(|one| one.committed);
    match revisions.last() {
        _ if !is_active => (None, "the environment is not active"),
        Some(dead) => (Some(*dead), "it is dead"),
        None => (committed, "the machine is new in the environment"),
    }
}

fn act(
    machine: &Machine,
    environment: &str,
    wanted: Option<Revision>,
    reason: &str,
    actions: &mut Actions,
) {
    let action = |revision: Revision, reason: &str| Action {
        environment: environment.to_owned(),
        revision,
        reason: reason.to_owned(),
    };
    let mut is_kept = false;
    let mut is_free = true;
    for task in tasks_of(machine, environment).filter(|task| task.state.is_present()) {
        is_free = false;
        let is_stopping = task.state == MachineTaskState::Stopping;
        if Some(task.revision) == wanted && !is_kept && !is_stopping {
            is_kept = true;
        } else if !is_stopping {
            let reason = if is_kept { "there may be one" } else { reason };
            actions.stop.push(action(task.revision, reason));
        }
    }
    if let Some(revision) = wanted.filter(|_| is_free) {
        actions.start.push(action(revision, reason));
    }
}
