//! Which machines a step may change now.

use std::collections::BTreeMap;

use model::JsonSchema;
use model::display::counted;
use serde::{Deserialize, Serialize};

use crate::document::{
    Advice, Analysis, Direction, Document, Environment, Machine, MachineTask,
    MachineTaskState as State, Rollout, Step, StepState,
};
use crate::strategy::Strategy;

/// What a step does with its machines now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Batch {
    pub step: String,
    /// How many machines the environment has.
    pub machines: usize,
    pub healthy: usize,
    /// How many of the healthy ones may be taken down now.
    pub may_take_down: usize,
    /// How many are changed before all others.
    pub canary: usize,
    /// How many have what they shall have, and are healthy.
    pub done: usize,
    /// Those that have it, and are not healthy.
    pub failed: Vec<String>,
    /// The machines to be changed now.
    pub hosts: Vec<String>,
    pub state: BatchState,
    pub reason: String,
}

/// How a step goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BatchState {
    /// Machines are changed.
    Go,
    /// It waits for machines that were changed.
    Wait,
    /// There are machines to be changed, and none may be.
    NoBudget,
    /// All machines that can be reached have what they shall have.
    Done,
    /// Too many have failed.
    Failed,
}

/// How a machine stands to a step.
enum Standing {
    Done,
    /// It was changed, and is not healthy yet.
    Converging,
    Failed,
    /// Its former task was stopped, or is about to be.
    Begun,
    /// It is to be changed, and serves.
    Serving,
    /// It is to be changed, and does not serve.
    Broken,
    /// It has nothing yet.
    Empty,
    Unreachable,
    /// It was changed, and cannot be reached since.
    Lost,
}

/// How fast a step may go.
#[derive(Clone, Copy, Debug)]
pub struct Pace<'a> {
    strategy: &'a Strategy,
    soak_s: u64,
    min_duration_s: u64,
    /// True if the analysis must agree before more machines are changed.
    is_analysed: bool,
    /// Why no machine may be changed now, if none may.
    closed: Option<&'a str>,
}

impl<'a> Pace<'a> {
    /// Returns the pace of a step. What goes back is never held up.
    #[must_use]
    pub fn of(environment: &'a Environment, rollout: &Rollout, step: &Step) -> Self {
        let Environment { strategy, closed, .. } = environment;
        let is_back = rollout.goes_back(step);
        let is_free = rollout.urgent || is_back || !rollout.kind.is_gated();
        Self {
            strategy,
            soak_s: if rollout.urgent { 0 } else { strategy.soak_s },
            min_duration_s: if is_free { 0 } else { strategy.min_duration_s },
            is_analysed: strategy.analysis.is_some() && !is_back && rollout.kind.is_gated(),
            closed: closed.as_deref().filter(|_| !is_free),
        }
    }

    /// Returns what the analysis is told, if it is to be asked about the machines that were
    /// changed: they have been healthy for long enough.
    #[must_use]
    pub fn question(self, step: &Step) -> Option<&'a BTreeMap<String, String>> {
        self.strategy.analysis.as_ref().filter(|_| self.is_analysed && self.has_soaked(step))
    }

    /// Returns how many of `machines` may have been changed by now. The step has changed the last
    /// one at the end of its least duration.
    fn may_be_changed(self, step: &Step, machines: usize, canary: usize) -> usize {
        match step.applying_for_s {
            Some(seconds) if seconds < self.min_duration_s => {
                let (first, seconds) = (canary.max(1), usize::try_from(seconds).unwrap_or(0));
                let duration = usize::try_from(self.min_duration_s).unwrap_or(usize::MAX);
                let rest = machines.saturating_sub(first);
                first + rest.saturating_mul(seconds) / duration
            }
            _ => usize::MAX,
        }
    }

    /// Returns why a step whose machines are done is not at its end, if so.
    fn too_early(self, step: &Step) -> Option<String> {
        let (seconds, least) = (step.applying_for_s?, self.min_duration_s);
        (seconds < least).then(|| format!("has taken {seconds} of at least {least} s"))
    }

    /// True if machines have been healthy for long enough.
    #[must_use]
    pub fn has_soaked(self, step: &Step) -> bool {
        step.healthy_for_s.is_some_and(|seconds| seconds >= self.soak_s)
    }
}

/// How many of `machines` must stay healthy.
fn floor(strategy: &Strategy, machines: usize) -> usize {
    (machines * usize::from(strategy.min_healthy_percent)).div_ceil(100)
}

/// How many machines are changed before all others. What goes back was good before.
fn canary(strategy: &Strategy, step: &Step, machines: usize) -> usize {
    match step.direction {
        Direction::Forward => strategy.canary.unwrap_or((machines / 1_000).max(1)).min(machines),
        Direction::Back => 0,
    }
}

/// Returns the machines of an environment: those that it selects.
pub(crate) fn selected<'a>(
    document: &'a Document,
    environment: &str,
) -> impl Iterator<Item = &'a Machine> {
    document.machines.iter().filter(move |machine| machine.environments.contains(environment))
}

/// Returns what `machine` has of `environment`.
pub(crate) fn tasks_of<'a>(
    machine: &'a Machine,
    environment: &str,
) -> impl Iterator<Item = &'a MachineTask> {
    machine.tasks.iter().filter(move |task| task.environment == environment)
}

/// The machines of a step, by how they stand to it.
#[derive(Default)]
struct Groups {
    done: usize,
    converging: usize,
    unreachable: usize,
    /// Those of them that were changed.
    lost: usize,
    failed: Vec<String>,
    begun: Vec<String>,
    empty: Vec<String>,
    broken: Vec<String>,
    serving: Vec<String>,
}

impl Groups {
    fn of(machines: &[&Machine], step: &Step) -> Self {
        let mut groups = Self::default();
        for machine in machines {
            let group = match standing(machine, step) {
                Standing::Done => {
                    groups.done += 1;
                    continue;
                }
                Standing::Converging => {
                    groups.converging += 1;
                    continue;
                }
                Standing::Unreachable => {
                    groups.unreachable += 1;
                    continue;
                }
                Standing::Lost => {
                    groups.unreachable += 1;
                    groups.lost += 1;
                    continue;
                }
                Standing::Failed => &mut groups.failed,
                Standing::Begun => &mut groups.begun,
                Standing::Empty => &mut groups.empty,
                Standing::Broken => &mut groups.broken,
                Standing::Serving => &mut groups.serving,
            };
            group.push(machine.host.clone());
        }
        groups
    }

    /// How many were changed: they are not as they were before.
    fn changed(&self) -> usize {
        self.done + self.converging + self.lost + self.failed.len()
    }

    /// How many are to be changed.
    fn left(&self) -> usize {
        self.begun.len() + self.empty.len() + self.broken.len() + self.serving.len()
    }
}

/// Returns what `step` does with its machines now.
#[must_use]
pub fn batch(document: &Document, pace: Pace<'_>, step: &Step) -> Batch {
    let strategy = pace.strategy;
    let environment = step.environment.as_str();
    let machines: Vec<&Machine> = selected(document, environment).collect();
    let healthy = machines.iter().filter(|machine| is_healthy(machine, environment)).count();
    let groups = Groups::of(&machines, step);
    let all = machines.len();
    let floor = floor(strategy, all);
    let mut batch = Batch {
        step: step.id.clone(),
        machines: all,
        healthy,
        may_take_down: healthy.saturating_sub(floor),
        canary: canary(strategy, step, all),
        done: groups.done,
        failed: groups.failed.clone(),
        hosts: Vec::new(),
        state: BatchState::Done,
        reason: String::new(),
    };
    let analysed = analysed(pace, step, &groups);
    (batch.state, batch.reason) = match (analysed, ended(&batch, &groups, all - floor)) {
        (Some(failed @ (BatchState::Failed, _)), _) => failed,
        (analysed, Some((BatchState::Done, reason))) if step.state == StepState::Applying => {
            let early = || Some((BatchState::Wait, pace.too_early(step)?));
            analysed.or_else(early).unwrap_or((BatchState::Done, reason))
        }
        (_, Some(ended)) => ended,
        (analysed, None) => {
            let may_be_changed = pace.may_be_changed(step, all, batch.canary);
            let held = pace.closed.map(str::to_owned);
            let held = held.or_else(|| soaks(pace, step, &groups));
            let held = held.or_else(|| analysed.map(|(_, reason)| reason));
            batch.hosts = match held {
                Some(_) => groups.begun.clone(),
                None => chosen(&batch, &groups, strategy, all - floor, may_be_changed),
            };
            let is_paced = groups.changed() >= may_be_changed;
            let held = held.or_else(|| pace.too_early(step).filter(|_| is_paced));
            match held.filter(|_| batch.hosts.is_empty() && groups.converging == 0) {
                Some(reason) => (BatchState::Wait, reason),
                None => describe(&batch, &groups, floor),
            }
        }
    };
    batch
}

/// True if the canary has not passed yet.
fn is_canary(batch: &Batch) -> bool {
    batch.done < batch.canary
}

/// Returns how a step ends of which too many machines have failed, or none is to be changed any
/// more. `allowed` machines may be missing.
fn ended(batch: &Batch, groups: &Groups, allowed: usize) -> Option<(BatchState, String)> {
    let (failed, converging) = (groups.failed.len(), groups.converging);
    if (is_canary(batch) && failed > 0) || failed > allowed {
        let what = match is_canary(batch) {
            true => "a canary has failed".to_owned(),
            false => format!("failed: {}, {allowed} may", machines(failed)),
        };
        return Some((BatchState::Failed, format!("{what}: {}", groups.failed.join(", "))));
    }
    if groups.left() > 0 {
        return None;
    }
    let unreachable = groups.unreachable;
    Some(if converging > 0 {
        (BatchState::Wait, format!("waits for {} to be healthy", machines(converging)))
    } else if failed + unreachable > allowed {
        let reason = format!("cannot reach {}, {allowed} may be missing", machines(unreachable));
        (BatchState::Wait, reason)
    } else {
        (BatchState::Done, format!("{} of {} machines are done", batch.done, batch.machines))
    })
}

/// Returns why no more machines are changed yet, if those that were changed have not been healthy
/// for long enough.
fn soaks(pace: Pace<'_>, step: &Step, groups: &Groups) -> Option<String> {
    let (for_s, soak_s) = (step.healthy_for_s?, pace.soak_s);
    let soaks = groups.changed() > groups.failed.len() && for_s < soak_s;
    soaks.then(|| format!("healthy for {for_s} of {soak_s} s"))
}

/// Returns what the analysis says, unless it agrees that more machines are changed.
fn analysed(pace: Pace<'_>, step: &Step, groups: &Groups) -> Option<(BatchState, String)> {
    if !pace.is_analysed || groups.changed() == 0 {
        return None;
    }
    let Some(Analysis { advice, why }) = &step.analysis else {
        return Some((BatchState::Wait, "waits for the analysis of what was changed".to_owned()));
    };
    match advice {
        Advice::Go => None,
        Advice::Wait => Some((BatchState::Wait, format!("the analysis says wait: {why}"))),
        Advice::RollBack => {
            Some((BatchState::Failed, format!("the analysis says roll back: {why}")))
        }
    }
}

/// Returns the machines to be changed now.
fn chosen(
    batch: &Batch,
    groups: &Groups,
    strategy: &Strategy,
    allowed: usize,
    may_be_changed: usize,
) -> Vec<String> {
    let Groups { converging, lost, begun, empty, broken, serving, .. } = groups;
    let mut budget = batch.may_take_down;
    // The percentage leaves room for none of so few machines.
    if allowed == 0 && converging + begun.len() + broken.len() == 0 {
        budget = strategy.min_batch;
    }
    let free = begun.iter().chain(empty).chain(broken);
    let room = match is_canary(batch) {
        true => batch.canary.saturating_sub(batch.done + converging + lost),
        false => usize::MAX,
    };
    let room = room.min(may_be_changed.saturating_sub(groups.changed()));
    free.chain(serving.iter().take(budget)).take(room).cloned().collect()
}

/// Returns the state of a step that has machines to be changed, and says why.
fn describe(batch: &Batch, groups: &Groups, floor: usize) -> (BatchState, String) {
    let (left, converging) = (groups.left(), groups.converging);
    match batch.hosts.len() {
        0 if converging > 0 => {
            let of = if is_canary(batch) { " of the canary" } else { "" };
            (BatchState::Wait, format!("waits for {}{of} to be healthy", machines(converging)))
        }
        0 if is_canary(batch) && groups.lost > 0 => {
            let lost = machines(groups.lost);
            (BatchState::Wait, format!("cannot reach {lost} of the canary since the change"))
        }
        0 => {
            let reason = format!(
                "{} of {} machines are healthy, and {floor} must stay so: none of the {left} that \
                 are left may be taken down",
                batch.healthy, batch.machines
            );
            (BatchState::NoBudget, reason)
        }
        hosts if is_canary(batch) => (BatchState::Go, format!("{hosts} as canary, of {left} left")),
        hosts => (BatchState::Go, format!("{hosts} of {left} left")),
    }
}

fn machines(count: usize) -> String {
    counted(count as u64, "machine")
}

fn is_healthy(machine: &Machine, environment: &str) -> bool {
    machine.reachable && tasks_of(machine, environment).any(|task| task.state.is_healthy())
}

fn standing(machine: &Machine, step: &Step) -> Standing {
    if !machine.reachable {
        let mut tasks = tasks_of(machine, &step.environment);
        let has_it = tasks.any(|task| Some(task.revision) == step.revision);
        return if has_it { Standing::Lost } else { Standing::Unreachable };
    }
    let (new, former): (Vec<&MachineTask>, Vec<&MachineTask>) =
        tasks_of(machine, &step.environment).partition(|task| Some(task.revision) == step.revision);
    let any =
        |tasks: &[&MachineTask], is: fn(State) -> bool| tasks.iter().any(|task| is(task.state));
    if any(&former, State::is_healthy) {
        return Standing::Serving;
    }
    if any(&former, |state| state == State::Stopping) {
        return Standing::Begun;
    }
    if any(&former, |state| state.is_present() || state == State::Failed) {
        return Standing::Broken;
    }
    if step.revision.is_none() || any(&new, State::is_healthy) {
        return Standing::Done;
    }
    if any(&new, State::has_failed) {
        return Standing::Failed;
    }
    match (any(&new, State::is_present), former.is_empty()) {
        (true, _) => Standing::Converging,
        (false, false) => Standing::Begun,
        (false, true) => Standing::Empty,
    }
}
