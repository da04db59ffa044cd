//! How the steps of a rollout go on, are aborted and rolled back.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::approval::{Verdict, verdict};
use crate::batch::{BatchState, Pace, batch};
use crate::constraints::{broken, edges};
use crate::dependencies::Dependencies;
use crate::document::{
    CreatedResource, Direction, Document, OnRemoval, Rollout, RolloutState, Step, StepState,
};

/// What is said to somebody about an event, with the code of HTTP for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Said {
    pub code: u16,
    pub message: String,
}

impl Said {
    /// Says `message`.
    #[must_use]
    pub fn new(code: u16, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Returns the ids of the steps that each step waits for: forward, those of the environments that
/// its own depends on; back, those of the environments that depend on it.
#[must_use]
pub fn waits_for<'a>(
    dependencies: &Dependencies<'a>,
    steps: &'a [Step],
) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let mut waits: BTreeMap<&str, BTreeSet<&str>> =
        steps.iter().map(|step| (step.id.as_str(), BTreeSet::new())).collect();
    for direction in [Direction::Forward, Direction::Back] {
        let of_direction = || steps.iter().filter(move |step| step.direction == direction);
        let among = of_direction().map(|step| step.environment.as_str()).collect();
        let reduced = dependencies.reduced(&among);
        for step in of_direction() {
            for other in of_direction() {
                let (before, after) = match direction {
                    Direction::Forward => (other, step),
                    Direction::Back => (step, other),
                };
                let depends = reduced.get(after.environment.as_str());
                if depends.is_some_and(|needed| needed.contains(before.environment.as_str())) {
                    waits.entry(&step.id).or_default().insert(&other.id);
                }
            }
        }
    }
    waits
}

/// Takes a rollout as far as it goes with what is known.
#[must_use]
pub fn advance(document: &Document, dependencies: &Dependencies<'_>, rollout: Rollout) -> Rollout {
    let mut rollout = rollout;
    loop {
        let next = pass(document, dependencies, &rollout);
        if next == rollout {
            return rollout;
        }
        rollout = next;
    }
}

fn pass(document: &Document, dependencies: &Dependencies<'_>, rollout: &Rollout) -> Rollout {
    let mut next = rollout.clone();
    if !matches!(rollout.state, RolloutState::Running | RolloutState::RollingBack) {
        return next;
    }
    let waits = waits_for(dependencies, &rollout.steps);
    let is_done = |id: &str| rollout.steps.iter().any(|step| step.id == id && step.state.is_done());
    let is_over =
        |id: &str| rollout.steps.iter().any(|step| step.id == id && step.state.is_finished());
    for step in &mut next.steps {
        let mut before = waits.get(step.id.as_str()).into_iter().flatten();
        // One step back that fails does not keep the others from going back.
        let is_ready = match step.direction {
            Direction::Forward => before.all(|id| is_done(id)),
            Direction::Back => before.all(|id| is_over(id)),
        };
        go_on(document, dependencies, rollout, step, is_ready);
    }
    conclude(&mut next);
    next
}

/// Takes one step on.
fn go_on(
    document: &Document,
    dependencies: &Dependencies<'_>,
    rollout: &Rollout,
    step: &mut Step,
    is_ready: bool,
) {
    let Some(environment) = document.environment(&step.environment) else { return };
    let pace = Pace::of(environment, rollout, step);
    let (state, cause) = match step.state {
        StepState::Waiting if is_ready => (StepState::Planning, "a plan is to be made".to_owned()),
        StepState::Planning => {
            let edges = edges(document, dependencies, Some(rollout));
            let broken = broken(&edges, &step.environment);
            match broken.filter(|_| step.direction == Direction::Forward) {
                Some(edge) => (StepState::Failed, edge),
                None if step.plan_is_empty => {
                    (StepState::Noop, "the plan changes nothing".to_owned())
                }
                None if step.digest.is_some() => (StepState::AwaitingApproval, String::new()),
                None => return,
            }
        }
        StepState::AwaitingApproval => {
            let author = environment.author.as_deref();
            let approval = document.approval(environment);
            match verdict(&approval, author, rollout, step) {
                Verdict::Approved(why) => (StepState::Applying, why),
                Verdict::Rejected(why) => (StepState::Failed, why),
                Verdict::Open(why) => (StepState::AwaitingApproval, why),
            }
        }
        StepState::Applying => {
            let batch = batch(document, pace, step);
            match batch.state {
                BatchState::Failed => (StepState::Failed, batch.reason),
                BatchState::Done => (StepState::Soaking, batch.reason),
                _ => return,
            }
        }
        StepState::Soaking => {
            let batch = batch(document, pace, step);
            match batch.state {
                BatchState::Failed => (StepState::Failed, batch.reason),
                BatchState::Done if step.soaked || pace.has_soaked(step) => {
                    (StepState::Succeeded, batch.reason)
                }
                _ => return,
            }
        }
        _ => return,
    };
    if state == StepState::Applying && step.state != state {
        step.applying_for_s = Some(0);
    }
    (step.state, step.cause) = (state, cause);
    step.applied |= step.state.is_on_machines();
}

/// Ends a rollout whose steps are finished; aborts one of which a step has failed.
fn conclude(rollout: &mut Rollout) {
    let failed = rollout
        .steps
        .iter()
        .find(|step| step.state == StepState::Failed && step.direction == Direction::Forward);
    if let (RolloutState::Running, Some(failed)) = (rollout.state, failed) {
        let cause = format!("{} failed: {}", failed.id, failed.cause);
        for step in rollout.steps.iter_mut().filter(|step| !step.state.is_finished()) {
            step.state = StepState::Aborted;
            step.cause.clone_from(&cause);
        }
        let back = rollback(&rollout.steps);
        rollout.steps.extend(back);
        (rollout.state, rollout.cause) = (RolloutState::RollingBack, cause);
    }
    if !rollout.steps.iter().all(|step| step.state.is_finished()) {
        return;
    }
    let failed_back = rollout
        .steps
        .iter()
        .find(|step| step.state == StepState::Failed && step.direction == Direction::Back);
    match (rollout.state, failed_back) {
        (RolloutState::Running, _) => {
            rollout.state = RolloutState::Succeeded;
            rollout.cause = "all steps are done".to_owned();
        }
        (_, Some(failed)) => {
            rollout.state = RolloutState::RollbackFailed;
            rollout.cause = format!("{} failed: {}; resolve it", failed.id, failed.cause);
        }
        (_, None) => rollout.state = RolloutState::RolledBack,
    }
}

/// Returns the steps that undo those that may have changed machines.
#[must_use]
pub fn rollback(steps: &[Step]) -> Vec<Step> {
    let applied = steps.iter().filter(|step| step.direction == Direction::Forward && step.applied);
    let destroyed = |resource: &&CreatedResource| resource.on_removal == OnRemoval::Destroy;
    let back = applied.map(|step| Step {
        id: format!("{}-back", step.id),
        environment: step.environment.clone(),
        revision: step.from,
        from: step.revision,
        direction: Direction::Back,
        cause: "a step of the rollout has failed".to_owned(),
        // The last made is the first destroyed.
        destroy: step
            .created_resources
            .iter()
            .rev()
            .filter(destroyed)
            .map(|resource| resource.id.clone())
            .collect(),
        ..Step::default()
    });
    back.collect()
}
