//! What happens next to a rollout, and why.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::approval::{take, votes};
use crate::batch::{Batch, Pace, batch};
use crate::constraints::{Cleanup, Edge, cleanups, edges};
use crate::dependencies::{Dependencies, scanned};
use crate::document::{
    Direction, Document, Environment, Event, MachineTaskState, Rollout, RolloutState, Scan,
    StartEvent, Step, StepState,
};
use crate::lock::{Lock, lock};
use crate::machine_tasks::{Actions, machine_tasks};
use crate::steps::{Said, advance, waits_for};

/// What happens next. `rollout` and `pending` have the form of the document: put back there, they
/// are what is asked about next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// What is said about the event.
    pub event: Option<Said>,
    pub rollout: Option<Rollout>,
    pub pending: Option<Rollout>,
    /// What each step waits for, and whose votes count.
    pub steps: Vec<StepDetails>,
    /// The environments that a start would take, with what they depend on, for each scan.
    pub scan: Scans,
    /// Steps of which a plan is to be made now.
    pub ready: Vec<String>,
    /// Steps that this decision has aborted.
    pub abort: Vec<String>,
    /// Steps that this decision has made to go back.
    pub rollback: Vec<String>,
    pub batches: Vec<Batch>,
    pub lock: Lock,
    pub tasks: Vec<Actions>,
    /// What environments require of each other when the rollout has ended.
    pub graph: Vec<Edge>,
    pub cleanup: Vec<Cleanup>,
}

/// More about a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StepDetails {
    pub id: String,
    pub depends_on: BTreeSet<String>,
    pub approvers: BTreeSet<String>,
    pub rejecters: BTreeSet<String>,
}

/// Environments by scan, each with those of the others that it depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Scans {
    pub graph: BTreeMap<String, BTreeSet<String>>,
    pub plan: BTreeMap<String, BTreeSet<String>>,
}

/// Decides about a document that [`Document::parse`] has checked.
#[must_use]
pub fn decide(document: &Document) -> Answer {
    let dependencies = Dependencies::of(document);
    let mut rollout = document.rollout.clone();
    let mut pending = document.pending.clone();
    let event = document
        .event
        .as_ref()
        .map(|event| happen(document, &dependencies, event, &mut rollout, &mut pending));
    let is_over =
        |rollout: &Rollout| !rollout.state.holds_lock() && rollout.state != RolloutState::Pending;
    rollout = rollout.map(|rollout| start_pending(document, &dependencies, rollout));
    rollout = rollout.map(|rollout| advance(document, &dependencies, rollout));
    if pending.is_some() && rollout.as_ref().is_none_or(is_over) {
        rollout = pending.take().map(|next| start_pending(document, &dependencies, next));
        rollout = rollout.map(|rollout| advance(document, &dependencies, rollout));
    }

    let steps = rollout.as_ref().map_or(&[][..], |rollout| &rollout.steps);
    let is_new = |step: &&Step, state: StepState| {
        let former = document.rollout.iter().flat_map(|rollout| &rollout.steps);
        step.state == state
            && !former.into_iter().any(|one| one.id == step.id && one.state == state)
    };
    let ids = |steps: Vec<&Step>| steps.iter().map(|step| step.id.clone()).collect::<Vec<_>>();
    let batches = batches(document, rollout.as_ref());
    let graph = edges(document, &dependencies, rollout.as_ref());
    let is_known = |step: &&Step| {
        document.rollout.iter().flat_map(|one| &one.steps).any(|one| one.id == step.id)
    };
    Answer {
        steps: details(document, &dependencies, steps),
        scan: scans(document, &dependencies),
        ready: ids(steps.iter().filter(|step| step.state == StepState::Planning).collect()),
        abort: ids(steps.iter().filter(|step| is_new(step, StepState::Aborted)).collect()),
        rollback: ids(steps
            .iter()
            .filter(|step| step.direction == Direction::Back && !is_known(step))
            .collect()),
        lock: rollout
            .as_ref()
            .map_or_else(Lock::default, |rollout| lock(document, &dependencies, rollout)),
        tasks: machine_tasks(document, rollout.as_ref(), &batches),
        cleanup: cleanups(document, &graph),
        event,
        batches,
        graph,
        rollout,
        pending,
    }
}

/// Returns what each step on machines does now. A machine that one of them takes down does not
/// serve another one that concerns it too.
fn batches(document: &Document, rollout: Option<&Rollout>) -> Vec<Batch> {
    let Some(rollout) = rollout else { return Vec::new() };
    let steps: Vec<&Step> =
        rollout.steps.iter().filter(|step| step.state.is_on_machines()).collect();
    let mut seen = Cow::Borrowed(document);
    let mut batches: Vec<Batch> = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let Some(environment) = document.environment(&step.environment) else { continue };
        let batch = batch(&seen, Pace::of(environment, rollout, step), step);
        if index + 1 < steps.len() && !batch.hosts.is_empty() {
            let taken: BTreeSet<&String> = batch.hosts.iter().collect();
            let machines = seen.to_mut().machines.iter_mut();
            let tasks = machines.filter(|machine| taken.contains(&machine.host));
            for task in tasks.flat_map(|machine| &mut machine.tasks) {
                task.state = MachineTaskState::Starting;
            }
        }
        batches.push(batch);
    }
    batches
}

/// Lets the event of `document` happen to `rollout`, and nothing that follows from it.
pub(crate) fn take_event(document: &Document, rollout: &mut Rollout) -> Said {
    let dependencies = Dependencies::of(document);
    let mut place = Some(rollout.clone());
    let said = match &document.event {
        Some(event) => happen(document, &dependencies, event, &mut place, &mut None),
        None => Said::new(400, "nothing has happened"),
    };
    if let Some(changed) = place {
        *rollout = changed;
    }
    said
}

/// Takes the event.
fn happen(
    document: &Document,
    dependencies: &Dependencies<'_>,
    event: &Event,
    rollout: &mut Option<Rollout>,
    pending: &mut Option<Rollout>,
) -> Said {
    match event {
        Event::Vote(vote) => match rollout {
            Some(rollout) => take(document, rollout, vote),
            None => Said::new(404, "there is no rollout"),
        },
        Event::Failure(failure) => {
            let steps = rollout.iter_mut().flat_map(|rollout| &mut rollout.steps);
            let Some(step) = steps.into_iter().find(|step| step.id == failure.step) else {
                return Said::new(404, format!("there is no step `{}`", failure.step));
            };
            if step.state.is_finished() {
                return Said::new(409, format!("{} is finished", step.id));
            }
            (step.state, step.cause) = (StepState::Failed, failure.reason.clone());
            Said::new(200, format!("{} has failed", step.id))
        }
        Event::Invalid(invalid) => {
            let message =
                format!("{}: {}: nothing is recorded", invalid.environment, invalid.reason);
            Said::new(400, message)
        }
        Event::Start(start) => match new_rollout(document, dependencies, start) {
            Ok(new) => {
                let replaced = replace(rollout, pending, new);
                let replaced =
                    replaced.map_or_else(String::new, |id| format!("; it replaces {id}"));
                Said::new(200, format!("{} is started{replaced}", start.id))
            }
            Err(said) => said,
        },
    }
}

/// Puts a new rollout in the place of one that waits.
fn replace(
    rollout: &mut Option<Rollout>,
    pending: &mut Option<Rollout>,
    new: Rollout,
) -> Option<String> {
    let waits = |rollout: &Rollout| rollout.state == RolloutState::Pending;
    let place = if rollout.as_ref().is_some_and(waits) { rollout } else { pending };
    place.replace(new).map(|former| former.id)
}

fn new_rollout(
    document: &Document,
    dependencies: &Dependencies<'_>,
    start: &StartEvent,
) -> Result<Rollout, Said> {
    let mut changed = BTreeSet::new();
    for text in &start.environments {
        let parts = text.split_once('@');
        let (name, revision) = parts
            .and_then(|(name, revision)| Some((name, revision.parse::<u64>().ok()?)))
            .ok_or_else(|| Said::new(400, format!("`{text}` is not of the form NAME@REVISION")))?;
        let environment = document
            .environment(name)
            .ok_or_else(|| Said::new(404, format!("there is no environment `{name}`")))?;
        if environment.desired != revision {
            let newest = environment.desired;
            let message = format!("{name} has revision {newest} now, and {revision} was named");
            return Err(Said::new(409, message));
        }
        changed.insert(environment.name.as_str());
    }
    if changed.is_empty() {
        return Err(Said::new(400, "no environment is named"));
    }
    let taken = scanned(document, dependencies, document.scan, changed);
    let taken = taken.iter().filter_map(|name| document.environment(name));
    let step = |environment: &Environment| Step {
        id: environment.name.clone(),
        environment: environment.name.clone(),
        revision: Some(environment.desired),
        from: environment.committed,
        ..Step::default()
    };
    Ok(Rollout {
        id: start.id.clone(),
        by: start.by.clone(),
        steps: taken.map(step).collect(),
        ..Rollout::default()
    })
}

/// Lets a rollout run that waits for nothing.
fn start_pending(
    document: &Document,
    dependencies: &Dependencies<'_>,
    mut rollout: Rollout,
) -> Rollout {
    if rollout.state == RolloutState::Pending {
        match lock(document, dependencies, &rollout).holder {
            Some(holder) => rollout.cause = format!("waits for the lock of {holder}"),
            None => (rollout.state, rollout.cause) = (RolloutState::Running, String::new()),
        }
    }
    rollout
}

fn details(
    document: &Document,
    dependencies: &Dependencies<'_>,
    steps: &[Step],
) -> Vec<StepDetails> {
    let waits = waits_for(dependencies, steps);
    let details = steps.iter().map(|step| {
        let environment = document.environment(&step.environment);
        let approval = environment.map(|one| document.approval(one)).unwrap_or_default();
        let votes = votes(&approval, step);
        StepDetails {
            id: step.id.clone(),
            depends_on: owned(waits.get(step.id.as_str()).into_iter().flatten()),
            approvers: votes.approvers,
            rejecters: votes.rejecters,
        }
    });
    details.collect()
}

fn scans(document: &Document, dependencies: &Dependencies<'_>) -> Scans {
    let changed = document.environments.iter().filter(|one| one.committed != Some(one.desired));
    let changed: BTreeSet<&str> = changed.map(|one| one.name.as_str()).collect();
    let scan = |scan: Scan| {
        let taken = scanned(document, dependencies, scan, changed.clone());
        let reduced = dependencies.reduced(&taken).into_iter();
        reduced.map(|(name, needed)| (name.to_owned(), owned(&needed))).collect()
    };
    Scans { graph: scan(Scan::Graph), plan: scan(Scan::Plan) }
}

fn owned<'a>(names: impl IntoIterator<Item = &'a &'a str>) -> BTreeSet<String> {
    names.into_iter().map(|&name| name.to_owned()).collect()
}
