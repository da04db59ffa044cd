//! Takes rollouts on, with what is seen of machines.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::mdb::Machine as Record;
use model::tree::Time;

use crate::batch::Pace;
use crate::definition::Subject;
use crate::document::{
    Analysis, Direction, Document, Event, FailureEvent, Kind, Machine, MachineTask,
    MachineTaskState, Rollout, Step, StepState, name_of,
};
use crate::gate::Gate;
use crate::plan::{Obstacle, change, check_plan, not_given, parts_of, plan};
use crate::state::{EnvironmentState, RolloutRecord, SharedMachines, State, StoredRevision};
use crate::view::{Question, View};
use crate::{Answer, decide};

/// How often a rollout is decided about in one go at most: a plan may lead to the next state.
const PASSES_MAX: usize = 4;

/// What came of [`advance`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advanced {
    /// True if the state has changed, and must be saved before it is carried out.
    pub changed: bool,
    /// What happened, for events: the id of a rollout, and a sentence.
    pub events: Vec<(String, String)>,
    /// What each step on machines does now, by rollout.
    pub batches: BTreeMap<u64, Vec<crate::batch::Batch>>,
}

/// Takes all rollouts as far as they go.
pub fn advance(
    state: &mut State,
    mdb: &SharedMachines,
    view: &mut impl View,
    now: Time,
) -> Advanced {
    let before = state.clone();
    let mut advanced = Advanced::default();
    state.end_freezes(now);
    let gated = state.unfinished_gated();
    let numbers: Vec<u64> = gated.map(|record| record.number).collect();
    for number in numbers {
        for _ in 0..PASSES_MAX {
            let Some(record) = state.rollouts.get(&number).cloned() else { break };
            let gate = Gate::new(state);
            if has_unknown(state, &gate, mdb, view, &record) {
                break;
            }
            let answer = ask(state, &gate, mdb, view, &record, now);
            let batches = answer.batches.clone();
            let moves = apply(state, mdb, &record, answer, now, &mut advanced);
            advanced.batches.insert(number, batches);
            let is_same = state.rollouts.get(&number) == Some(&record);
            if is_same && !moves {
                break;
            }
        }
    }
    advanced.events.extend(state.start_cleanups(now));
    let is_noted = |(name, one): (&String, &Arc<EnvironmentState>)| {
        !one.active || state.members.contains_key(name)
    };
    if !state.environments.iter().all(is_noted) {
        state.note_members(mdb, now);
    }
    state.follow_automatic(mdb, view, now);
    state.forget_old();
    advanced.changed = *state != before;
    advanced
}

/// True if a machine that the rollout may change has not been tried to reach yet, as after a start.
fn has_unknown(
    state: &State,
    gate: &Gate<'_>,
    mdb: &SharedMachines,
    view: &impl View,
    record: &RolloutRecord,
) -> bool {
    let steps = record.rollout.steps.iter().filter(|step| step.state.is_on_machines());
    let is_unknown =
        |machine: &Record| view.machine(&machine.hostname).is_none_or(|seen| seen.unknown);
    steps
        .into_iter()
        .any(|step| mdb.values().any(|one| concerns(state, gate, step, one) && is_unknown(one)))
}

/// Decides about one rollout.
fn ask(
    state: &State,
    gate: &Gate<'_>,
    mdb: &SharedMachines,
    view: &mut impl View,
    record: &RolloutRecord,
    now: Time,
) -> Answer {
    let mut document = state.document(Some(record));
    let machines = mdb.values().filter_map(|one| machine(state, gate, record, view, one));
    document.machines = machines.collect();
    let changed = record.rollout.environments();
    let of_it = document.environments.iter_mut().filter(|one| changed.contains(&one.name));
    for environment in of_it {
        environment.closed = state.opening(&environment.name, now).err();
    }
    document.event = timed_out(state, &document, record, now).map(Event::Failure);
    if let Some(mut rollout) = document.rollout.take() {
        let refused = with_plans(state, mdb, view, &document, &mut rollout, record, now);
        document.event = refused.map(Event::Failure).or(document.event);
        document.rollout = Some(rollout);
    }
    decide(&document)
}

/// Adds the plans of steps that need one, and how machines that were changed have been. Returns why
/// a plan cannot be carried out, if so.
fn with_plans(
    state: &State,
    mdb: &SharedMachines,
    view: &mut impl View,
    document: &Document,
    rollout: &mut Rollout,
    record: &RolloutRecord,
    now: Time,
) -> Option<FailureEvent> {
    let mut failure = None;
    let mut steps = std::mem::take(&mut rollout.steps);
    for step in &mut steps {
        match step.state {
            // Machines of an environment that only depends on others stay as they are.
            StepState::Planning if step.revision == step.from => step.plan_is_empty = true,
            StepState::Planning | StepState::AwaitingApproval => {
                let revision = step.revision.unwrap_or_default();
                let plan =
                    plan(state, mdb, &step.environment, revision, |image| view.digest(image));
                // Machines that were moved have to come back although no image differs.
                step.plan_is_empty = plan.is_empty() && !is_mixed(state, step);
                let is_new = step.state == StepState::Planning;
                match check_plan((state, mdb), view, rollout, step, &plan, now) {
                    Err(Obstacle::Refused(reason)) => {
                        failure = Some(FailureEvent { step: step.id.clone(), reason });
                    }
                    Err(Obstacle::Waits(cause)) if is_new => step.cause = cause,
                    _ if !plan.digest.is_empty() => step.digest = Some(plan.digest),
                    _ if is_new => step.cause = not_given(plan.unknown_images),
                    _ => {}
                }
            }
            StepState::Applying | StepState::Soaking => {
                let healthy = !document.machines.iter().any(|machine| is_converging(machine, step));
                step.healthy_for_s = Some(view.healthy_for_s(record.number, &step.id, healthy));
                let since =
                    record.since.get(&step.id).filter(|_| step.state == StepState::Applying);
                step.applying_for_s = since.map(|since| seconds_between(*since, now));
                if healthy {
                    step.analysis = analysis(view, document, rollout, step, record.number);
                }
                let environment = state.environments.get(&step.environment);
                let revision = environment.and_then(|one| one.revisions.get(&step.revision?));
                let is_forward = step.state == StepState::Applying && !rollout.goes_back(step);
                let revision = revision.filter(|_| is_forward);
                if let Some(reason) = revision.and_then(|one| one.replaced_content(view)) {
                    failure = Some(FailureEvent { step: step.id.clone(), reason });
                }
            }
            _ => {}
        }
    }
    rollout.steps = steps;
    failure
}

fn seconds_between(since: Time, now: Time) -> u64 {
    u64::try_from(now.seconds.saturating_sub(since.seconds)).unwrap_or_default()
}

/// Returns what the analysis says about the machines that a step has changed, if it is to be asked.
fn analysis(
    view: &mut impl View,
    document: &Document,
    rollout: &Rollout,
    step: &Step,
    number: u64,
) -> Option<Analysis> {
    let environment = document.environment(&step.environment)?;
    let parameters = Pace::of(environment, rollout, step).question(step)?;
    let has_it = |machine: &&Machine| machine.tasks.iter().any(|task| has_revision_of(step, task));
    let changed = document.machines.iter().filter(has_it);
    let hosts: Vec<&str> = changed.map(|machine| machine.host.as_str()).collect();
    if hosts.is_empty() {
        return None;
    }
    view.analysis(Question {
        number,
        rollout: &rollout.id,
        step: &step.id,
        environment: &step.environment,
        revision: step.revision.unwrap_or_default(),
        hosts,
        analysis: parameters,
    })
}

fn is_mixed(state: &State, step: &Step) -> bool {
    let environment = state.environments.get(&step.environment);
    environment.is_some_and(|one| {
        one.moved.values().any(|moved| Some(*moved) != step.revision)
            || Some(one.committed) != step.revision
    })
}

/// True if a machine is on its way to be healthy. One that has failed counts against what the
/// percentage allows, and holds nothing up.
fn is_converging(machine: &Machine, step: &Step) -> bool {
    let mut tasks = machine.tasks.iter().filter(|task| has_revision_of(step, task));
    machine.reachable && tasks.any(|task| !task.state.is_healthy() && !task.state.has_failed())
}

/// True if it is what the step brings.
fn has_revision_of(step: &Step, task: &MachineTask) -> bool {
    task.environment == step.environment && Some(task.revision) == step.revision
}

/// Returns how a step ends that takes too long, or that nobody votes about.
fn timed_out(
    state: &State,
    document: &Document,
    record: &RolloutRecord,
    now: Time,
) -> Option<FailureEvent> {
    let steps = record.rollout.steps.iter();
    steps.filter(|step| !step.state.is_finished()).find_map(|step| {
        let environment = document.environment(&step.environment)?;
        let since = *record.since.get(&step.id)?;
        let (limit, what, since) = match step.state {
            StepState::AwaitingApproval => {
                (document.approval(environment).timeout_s, "nobody has decided for", since)
            }
            StepState::Applying | StepState::Soaking => {
                let limit = environment.strategy.timeout_s;
                let opened = state.opening(&environment.name, now).ok()?.unwrap_or(since);
                (limit, "its machines were not changed within", since.max(opened))
            }
            _ => return None,
        };
        let lasted = seconds_between(since, now);
        let reason = format!("{what} {limit} s");
        (limit > 0 && lasted > limit).then(|| FailureEvent { step: step.id.clone(), reason })
    })
}

/// True if the step may give the machine another image, or has. Others change when it is committed.
fn concerns(state: &State, gate: &Gate<'_>, step: &Step, machine: &Record) -> bool {
    let to = step.revision.unwrap_or_default();
    let moved = state.environments.get(&step.environment).map(|one| &one.moved);
    if moved.is_some_and(|moved| moved.get(&machine.hostname) == Some(&to)) {
        return true;
    }
    let Some((now, after)) = change(state, gate, &step.environment, to, machine) else {
        return false;
    };
    let stored = |revision| state.environments.get(&step.environment)?.revisions.get(&revision);
    let has_bundles =
        state.environments.get(&step.environment).is_some_and(|one| one.has_bundles());
    let from = stored(step.from.unwrap_or_default());
    if let Some(content) = from.and_then(StoredRevision::content_text) {
        let is_selected = from.is_some_and(|from| from.definition.select.selects(machine));
        return now != after || (is_selected && content != after);
    }
    let before = match from {
        Some(from) if from.definition.select.selects(machine) => from.image_of(&machine.hostname),
        _ if has_bundles => "".into(),
        _ => machine.required_image.as_str().into(),
    };
    now != after || before != after
}

/// Returns how a machine is with the content that an environment gates; `None` for one of images or
/// bundles, `Some(None)` for a machine without such files.
fn content(
    state: &State,
    view: &impl View,
    environment: &str,
    machine: &Record,
) -> Option<Option<MachineTaskState>> {
    let one = state.environments.get(environment)?;
    let stored = one.revisions.get(&one.number_on(&machine.hostname))?;
    let (server, content) = stored.definition.source.content().zip(stored.content)?;
    if !stored.definition.select.selects(machine) {
        return None;
    }
    Some(view.content(&machine.hostname, server, content))
}

/// Returns a machine as decisions see it, if the rollout concerns it.
fn machine(
    state: &State,
    gate: &Gate<'_>,
    record: &RolloutRecord,
    view: &impl View,
    machine: &Record,
) -> Option<Machine> {
    let steps = record.rollout.steps.iter();
    let steps = steps.filter(|step| concerns(state, gate, step, machine));
    let steps = steps.filter(|step| content(state, view, &step.environment, machine) != Some(None));
    let selecting: BTreeSet<String> = steps.map(|step| step.environment.clone()).collect();
    if selecting.is_empty() {
        return None;
    }
    let seen = view.machine(&machine.hostname);
    if seen.as_ref().is_some_and(|seen| seen.held_out) {
        return None;
    }
    let image = gate.image_of(machine);
    let task = |name: &String| {
        let one = state.environments.get(name)?;
        let revision = one.number_on(&machine.hostname);
        let seen = seen.as_ref()?;
        let mut steps = record.rollout.steps.iter();
        let is_brought =
            steps.any(|step| step.environment == *name && step.revision == Some(revision));
        if let Some(content) = content(state, view, name, machine).filter(|_| is_brought) {
            let state = match content? {
                MachineTaskState::Synced if seen.image != image => MachineTaskState::Starting,
                MachineTaskState::Synced => seen.state,
                _ if seen.state.has_failed() => seen.state,
                other => other,
            };
            return Some(MachineTask { environment: name.clone(), revision, state });
        }
        let stored = one.revisions.get(&revision).filter(|_| one.has_bundles());
        let bundles = stored.map(|stored| parts_of(&stored.image_of(&machine.hostname)));
        let is_left_out = |bundle: &String| seen.left_out.contains(bundle);
        if seen.image == image && bundles.iter().flatten().any(is_left_out) {
            let (environment, state) = (name.clone(), MachineTaskState::Failed);
            return Some(MachineTask { environment, revision, state });
        }
        // It is to have no image, and has none.
        if image.is_empty() && seen.state == MachineTaskState::Stopped {
            let mut steps = record.rollout.steps.iter().filter(|step| step.environment == *name);
            let is_reached = steps.any(|step| step.revision == Some(revision));
            let state = MachineTaskState::Synced;
            return is_reached.then(|| MachineTask { environment: name.clone(), revision, state });
        }
        // It has not heard of its image yet.
        let state = if seen.image == image { seen.state } else { MachineTaskState::Starting };
        Some(MachineTask { environment: name.clone(), revision, state })
    };
    Some(Machine {
        host: machine.hostname.clone(),
        reachable: seen.as_ref().is_some_and(|seen| seen.reachable),
        tasks: selecting.iter().filter_map(task).collect(),
        environments: selecting,
    })
}

/// Takes an answer. Returns true if machines were moved.
fn apply(
    state: &mut State,
    mdb: &SharedMachines,
    record: &Arc<RolloutRecord>,
    answer: Answer,
    now: Time,
    advanced: &mut Advanced,
) -> bool {
    let Some(mut rollout) = answer.rollout else { return false };
    for step in &mut rollout.steps {
        (step.healthy_for_s, step.applying_for_s, step.analysis) = (None, None, None);
    }
    let mut next = RolloutRecord { rollout, ..RolloutRecord::clone(record) };
    let id = next.rollout.id.clone();
    for step in &next.rollout.steps {
        let before = record.rollout.steps.iter().find(|one| one.id == step.id);
        if before.is_some_and(|before| before.state == step.state) {
            continue;
        }
        next.since.insert(step.id.clone(), now);
        if step.state.is_on_machines() {
            next.began.entry(step.id.clone()).or_insert(now);
        }
        let name = name_of(&step.state);
        advanced.events.push((id.clone(), format!("{} is {name}: {}", step.id, step.cause)));
        if step.revision == step.from {
            continue;
        }
        if step.state == StepState::Planning && step.direction == Direction::Forward {
            state.note_kept(&step.environment, step.revision.unwrap_or_default());
        }
        if step.state.is_done() {
            commit(state, mdb, step, next.rollout.kind, now);
        }
    }
    if next.rollout.state != record.rollout.state {
        let name = name_of(&next.rollout.state);
        advanced.events.push((id, format!("the rollout is {name}: {}", next.rollout.cause)));
    }
    if next.is_ended() {
        next.ended = Some(now);
    }
    let steps: BTreeMap<&str, &Step> =
        next.rollout.steps.iter().map(|step| (step.id.as_str(), step)).collect();
    let mut moves = false;
    for batch in answer.batches.iter().filter(|batch| !batch.hosts.is_empty()) {
        let order = state.next_order();
        let Some(step) = steps.get(batch.step.as_str()) else { continue };
        let Some(environment) = state.environments.get_mut(&step.environment) else { continue };
        let revision = step.revision.unwrap_or_default();
        let is_new = |host: &&String| environment.moved.get(*host) != Some(&revision);
        let hosts: Vec<String> = batch.hosts.iter().filter(is_new).cloned().collect();
        if hosts.is_empty() {
            continue;
        }
        let environment = Arc::make_mut(environment);
        environment.comes(revision, order);
        environment.moved.extend(hosts.into_iter().map(|host| (host, revision)));
        moves = true;
    }
    state.rollouts.insert(next.number, Arc::new(next));
    moves
}

/// Makes the revision of a step the committed one. Machines that were left out, because they could
/// not be reached, follow by themselves.
fn commit(state: &mut State, mdb: &SharedMachines, step: &Step, kind: Kind, now: Time) {
    let (name, revision) = (&step.environment, step.revision.unwrap_or_default());
    let Some(environment) = state.environments.get(name) else { return };
    let gate = Gate::new(state);
    // Of content it is not known here who has such files.
    let is_content = environment.subject() == Some(Subject::Content);
    let others = mdb.values().filter(|one| environment.number_on(&one.hostname) != revision);
    let others = others.filter(|_| !is_content);
    let left_out = others.filter(|one| {
        let change = change(state, &gate, name, revision, one);
        change.is_some_and(|(from, to)| from != to)
    });
    let left_out = left_out.map(|one| one.hostname.clone()).collect();
    let order = state.next_order();
    if let Some(environment) = state.environments.get_mut(name) {
        Arc::make_mut(environment).commit(revision, kind, order);
    }
    // Whom it selects is as the rollout has brought it.
    state.members.remove(name);
    state.start_automatic(Kind::HealthRepair, name, left_out, now);
}
