//! What is told of tasks.
// tidy: core

use ::tasks::supervise::{Attempt, Phase, RunRecord, TaskRecord, needs_permit, observed};
use ::tasks::{Task, Template, condition};
use api::subd::{Health, PermitReport, TaskReport, TaskState};
use jiff::Timestamp;
use model::boot_time::BootTime;
use model::tree::Time;

/// What is known of a task at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    pub task: &'a Task,
    pub template: &'a Template,
    pub now: Timestamp,
    pub boot_now: &'a BootTime,
    pub record: &'a TaskRecord,
    pub attempt: &'a Attempt,
    pub health: Option<&'a Health>,
    pub next_at: Option<Timestamp>,
}

/// Returns the report of a task that cannot be run, or is not.
#[must_use]
pub fn not_run(name: &str, state: TaskState, detail: &str) -> TaskReport {
    TaskReport {
        name: name.to_owned(),
        state,
        detail: detail.to_owned(),
        run: None,
        started: None,
        starts: 0,
        last_end: None,
        health: None,
        next_at: None,
        again_at: None,
        permit: None,
        order_number: 0,
        not_restarted: None,
    }
}

/// Returns the report of a task.
#[must_use]
pub fn report(known: &Known<'_>) -> TaskReport {
    let Known { task, template, now, boot_now, record, attempt, health, next_at } = *known;
    let has_permit = record.permits(task, boot_now);
    // One that is being deleted counts only while there is no other.
    let run = record.runs.iter().max_by_key(|run| (!run.deleting, run.run_id));
    let condition = condition(task, template, &task.moment(now), &observed(record, has_permit));
    let not_restarted = record.not_restarted.as_deref();
    let why_ended = run.and_then(|run| run.why_not_restarted(not_restarted));
    let state = match (&record.suspended, run) {
        (_, Some(run)) if is_live(run, attempt) => live_state(run, record, health),
        (Some(_), _) => TaskState::Suspended,
        (None, None) => TaskState::Idle,
        (None, Some(run)) if run.held || run.held_by.is_some() => TaskState::Held,
        (None, Some(_)) if why_ended.is_some() => TaskState::NotRestarted,
        (None, Some(run)) => match run.phase {
            Phase::Due | Phase::Started { .. } | Phase::Waiting { .. } if !has_permit => {
                TaskState::Held
            }
            Phase::Due | Phase::Started { .. } => TaskState::Starting,
            Phase::Waiting { .. } => TaskState::Waiting,
            Phase::Ended { succeeded: true } => TaskState::Succeeded,
            Phase::Ended { succeeded: false } => TaskState::Failed,
        },
    };
    let last_end = run.and_then(|run| run.last_end.as_ref());
    let detail = match (&record.suspended, run, last_end) {
        (Some(why), _, _) => format!("suspended: {why}"),
        (None, Some(RunRecord { held_by: Some(why), .. }), _) => format!("held: {why}"),
        (None, Some(run), Some(end)) if state == TaskState::Waiting || why_ended.is_some() => {
            let next = why_ended.map_or_else(
                || "is started again".to_owned(),
                |why| format!("is not started again: {why}"),
            );
            format!("{} {}, and {next}", run.name, end.exit.describe())
        }
        _ => condition.reason,
    };
    let started = run.and_then(|run| match run.phase {
        Phase::Started { at, .. } => Some(time(at)),
        _ => None,
    });
    TaskReport {
        name: task.name.clone(),
        state,
        detail,
        run: run.map(|run| run.name.clone()),
        started,
        starts: run.map_or(0, |run| run.starts),
        last_end: last_end.map(|end| format!("{} at {:.0}", end.exit.describe(), end.at)),
        health: health.cloned().filter(|_| run.is_some_and(|run| is_live(run, attempt))),
        next_at: next_at.map(time),
        again_at: run.filter(|_| state == TaskState::Waiting).and_then(|run| match run.phase {
            Phase::Waiting { until } => Some(time(until)),
            _ => None,
        }),
        permit: task.exclusive.then(|| PermitReport {
            number: record.permit.number,
            until: record.permit.until.clone(),
            is_wanted: needs_permit(record),
            is_live: matches!(attempt, Attempt::Live { .. }),
        }),
        order_number: record.order_number,
        not_restarted: record.not_restarted.clone(),
    }
}

/// True if dominators are to ask for `reports`, because they differ from `former`. Each time that a
/// health command fails it may say something else, which is no news.
#[must_use]
pub fn are_news(former: &[TaskReport], reports: &[TaskReport]) -> bool {
    let is_healthy =
        |report: &TaskReport| report.health.as_ref().map(|health| matches!(health, Health::Passed));
    let is_same = |(former, report): (&TaskReport, &TaskReport)| {
        let health = former.health.clone();
        is_healthy(former) == is_healthy(report)
            && *former == TaskReport { health, ..report.clone() }
    };
    former.len() != reports.len() || !former.iter().zip(reports).all(is_same)
}

/// Says why a task is not as it should be. `asks` is true if it says how its health is found.
#[must_use]
pub fn why_not_well(name: &str, report: Option<&TaskReport>, asks: bool) -> Option<String> {
    let Some(report) = report else { return Some(format!("task {name} is not known yet")) };
    let (state, last) = (report.state, report.last_end.as_deref());
    let why = match state {
        TaskState::Running if asks && report.health.is_none() => "its health is not known yet",
        TaskState::Running
        | TaskState::Succeeded
        | TaskState::Idle
        | TaskState::Held
        // It does not undo updates: files are repaired while its environment is not active.
        | TaskState::NotRestarted
        | TaskState::Suspended
        | TaskState::NotRun => return None,
        TaskState::Unhealthy => match &report.health {
            Some(Health::Failed(why)) => why,
            _ => "it is not healthy",
        },
        TaskState::Refused => &report.detail,
        TaskState::Starting | TaskState::Stopping | TaskState::Waiting | TaskState::Failed => {
            last.unwrap_or(&report.detail)
        }
    };
    Some(format!("task {name} is {}: {why}", state.name()))
}

fn is_live(run: &RunRecord, observed: &Attempt) -> bool {
    let Attempt::Live { attempt: live } = observed else { return false };
    matches!(&run.phase, Phase::Started { attempt, .. } if attempt == live)
}

fn live_state(run: &RunRecord, record: &TaskRecord, health: Option<&Health>) -> TaskState {
    let ends = run.deleting || run.again || run.held_by.is_some() || record.suspended.is_some();
    match health {
        _ if ends => TaskState::Stopping,
        Some(Health::Failed(_)) => TaskState::Unhealthy,
        Some(Health::Passed) | None => TaskState::Running,
    }
}

fn time(at: Timestamp) -> Time {
    Time { seconds: at.as_second(), nanoseconds: 0 }
}
