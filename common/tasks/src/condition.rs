//! Whether a task runs, whether that is expected, and since when.

use jiff::Timestamp;
use serde::Serialize;

use crate::file::{Task, Template};
use crate::runs::{Observed, Run, RunState};
use crate::schedule::Moment;

/// The condition of a task on a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Condition {
    /// A run is there that is not held and has not failed. One that has succeeded counts until
    /// its period ends: it has done what it should.
    pub running: bool,
    /// An operator or the schedule wants it so.
    pub expected: bool,
    /// Since when it is so, as far as the schedule and the runs tell.
    pub since: Option<Timestamp>,
    pub reason: String,
}

/// Returns the condition of `task`, whose present version is `template`.
#[must_use]
pub fn condition(
    task: &Task,
    template: &Template,
    moment: &Moment,
    observed: &Observed,
) -> Condition {
    let runs = observed.present();
    let best = runs.iter().copied().max_by(|one, other| one.compare(other, template));
    let is_current = |run: &&Run| run.manual && run.outdated(task, template, moment).is_none();
    let manual = runs.iter().copied().any(|run| is_current(&run));
    let wanted = !observed.suspended && (moment.should_run || manual);
    let why_wanted = match (moment.should_run, &task.schedule) {
        (true, Some(_)) => "in its hours",
        (true, None) => "wanted always",
        (false, _) => "started by an operator",
    };
    let why_not = if observed.suspended { "suspended" } else { "outside of its hours" };
    let scheduled_at = best.and_then(|run| run.scheduled_at);
    let is_running = |run: &&Run| run.state != RunState::Failed && !run.is_held();
    if let Some(run) = best.filter(is_running) {
        let (name, state) = (&run.name, run.state.describe());
        let why = if wanted { why_wanted } else { why_not };
        // One that should have stopped is wrong since then.
        let since = if wanted { scheduled_at } else { scheduled_at.max(moment.last_stop) };
        let reason = format!("{name} {state}; the task is {why}");
        return Condition { running: true, expected: wanted, since, reason };
    }
    if !wanted {
        let reason = format!("the task is {why_not}");
        return Condition { running: false, expected: true, since: moment.last_stop, reason };
    }
    let since = moment.period_start.filter(|_| moment.should_run).or(scheduled_at);
    let (expected, reason) = match best {
        None => (false, format!("the task is {why_wanted}, and no run is there")),
        Some(run) => why_held(run, observed.permits(task)),
    };
    Condition { running: false, expected, since, reason }
}

/// Says why a run that should run does not, and whether somebody wants that.
fn why_held(run: &Run, permits: bool) -> (bool, String) {
    let name = &run.name;
    match &run.held_by {
        _ if run.state == RunState::Failed => (false, format!("{name} has failed")),
        Some(operator) => (true, format!("{name} is held by {operator}")),
        None if !permits => (true, format!("{name} waits for the permit of this machine")),
        None => (false, format!("{name} waits until no other run can be live")),
    }
}
