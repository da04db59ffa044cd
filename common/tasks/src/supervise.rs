//! What a machine does next about a task: from the records that it keeps, and from what is observed
//! of the attempt that was started last.
//!
//! An *attempt* is one start of the program of a run. When a program ends, its run may be attempted
//! again, as the restart policy says.
//!
//! # Invariants
//!
//! * An attempt is started only if none is live, and its record has to be on the medium before.
//! * A program that subd has stopped itself is not held against its run.

use jiff::{SignedDuration, Timestamp};
use model::boot_time::BootTime;
use model::task_order::{TaskOrder, next_of_machine};
use serde::{Deserialize, Serialize};

use crate::decide::{Create, decide, new_run};
use crate::file::{Restart, RestartPolicy, Task, Template};
use crate::runs::{Observed, Run, RunState, RunTemplate};
use model::permit::Permit;

/// What a machine records about a task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TaskRecord {
    /// Why an operator wants no runs.
    pub suspended: Option<String>,
    /// Why its program is not started again when it has ended by itself, if that is so.
    pub not_restarted: Option<String>,
    /// Of an exclusive task.
    pub permit: Permit,
    /// The highest number of an order that was taken.
    pub order_number: u64,
    pub runs: Vec<RunRecord>,
}

/// What a machine records about a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    pub name: String,
    pub run_id: u32,
    pub scheduled_at: Timestamp,
    /// The version that it was started with last, or is to be started with.
    pub template: Template,
    pub manual: bool,
    /// It waits for its release.
    pub held: bool,
    /// Why an operator holds it.
    pub held_by: Option<String>,
    /// It is being stopped for good.
    pub deleting: bool,
    /// An operator wants it stopped and started again.
    pub again: bool,
    /// How often it was started.
    pub starts: u32,
    /// How many attempts in a row have ended soon.
    pub failures: u32,
    /// How the last attempt ended.
    pub last_end: Option<End>,
    pub phase: Phase,
}

/// How far a run has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// It is to be started as soon as it may.
    Due,
    Started {
        /// The name of the attempt.
        attempt: String,
        at: Timestamp,
    },
    /// It is to be started again then.
    Waiting { until: Timestamp },
    /// It is not started again.
    Ended { succeeded: bool },
}

/// The end of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    pub at: Timestamp,
    /// True if it had been asked to stop.
    #[serde(default)]
    pub asked: bool,
    pub exit: Exit,
}

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// It could not be started.
    NotStarted(String),
    /// What watched it was killed, and it was killed with that.
    Unwatched,
    /// The machine was started again.
    Rebooted,
}

impl Exit {
    /// Says it in a sentence about the program.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Code(code) => format!("exited with {code}"),
            Self::Signal(signal) => format!("was killed by signal {signal}"),
            Self::NotStarted(why) => format!("could not be started: {why}"),
            Self::Unwatched => "was killed, because the process that watched it was".to_owned(),
            Self::Rebooted => "ended with the machine".to_owned(),
        }
    }
}

/// What is observed of the attempt that was started last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attempt {
    None,
    /// It is live, or may be.
    Live {
        attempt: String,
    },
    Ended {
        attempt: String,
        end: End,
    },
}

/// What is known about a task at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    pub task: &'a Task,
    /// Its present version.
    pub template: &'a Template,
    pub now: Timestamp,
    pub boot_now: &'a BootTime,
    /// An update is changing the files: nothing is started, and what is stopped comes back.
    pub paused: bool,
    pub observed: &'a Attempt,
    /// The name of an attempt that is started now.
    pub next_attempt: &'a str,
}

/// What is to be done, after the record is on the medium.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The live attempt must stop, and why.
    pub stop: Option<String>,
    /// The name of the run that is started, with the attempt of the situation.
    pub start: Option<String>,
    /// When what lives after this step must stop, also if nobody asks again.
    pub stop_at: Option<Timestamp>,
    /// The same for want of a permit, in milliseconds since the boot. Zero without a permit.
    pub stop_at_boot_ms: Option<u64>,
    /// When to ask again if nothing happens.
    pub wake_at: Option<Timestamp>,
    /// What happened, for the log.
    pub notes: Vec<String>,
}

/// Decides the next step about a task, and writes into `record` what has to be on the medium before
/// it is taken.
pub fn step(situation: &Situation<'_>, record: &mut TaskRecord) -> Step {
    let schedule = situation.task.schedule.as_ref();
    let stop_at = schedule.and_then(|schedule| schedule.next_stop(situation.now));
    let Situation { task, boot_now, .. } = *situation;
    let permitted_until_ms = record.permit.stop_at_ms(task.stop_timeout_s, boot_now);
    let stop_at_boot_ms = task.exclusive.then(|| permitted_until_ms.unwrap_or(0));
    let mut step = Step { stop_at, stop_at_boot_ms, ..Step::default() };
    let has_permit = record.permits(task, boot_now);
    take_end(situation, record, &mut step);
    if !situation.paused {
        take_decision(situation, has_permit, record, &mut step);
    }
    let needs_permit = needs_permit(record);
    let live = live(situation.observed).map(str::to_owned);
    if let Some(attempt) = &live {
        step.stop = why_stop(attempt, record, has_permit, situation.paused);
        return step;
    }
    record.permit.give_up(needs_permit, boot_now);
    if !situation.paused && has_permit {
        start(situation, record, &mut step);
    }
    step
}

impl TaskRecord {
    /// True if the machine may run the task, because it has the permit or needs none.
    #[must_use]
    pub fn permits(&self, task: &Task, boot_now: &BootTime) -> bool {
        !task.exclusive || self.permit.stop_at_ms(task.stop_timeout_s, boot_now).is_some()
    }
}

/// Returns the runs of `record` as decisions see them. `has_permit` is true if the task needs none.
#[must_use]
pub fn observed(record: &TaskRecord, has_permit: bool) -> Observed {
    let runs = record.runs.iter().map(|run| run.as_observed(has_permit)).collect();
    Observed { suspended: record.suspended.is_some(), permit: Some(has_permit), runs }
}

/// True if a run of the task is live or would be, if it is exclusive and has the permit.
#[must_use]
pub fn needs_permit(record: &TaskRecord) -> bool {
    let not_restarted = record.not_restarted.as_deref();
    let needs = |run: &RunRecord| match run.phase {
        Phase::Started { .. } => true,
        Phase::Due | Phase::Waiting { .. } => {
            !run.deleting && run.held_by.is_none() && run.why_not_restarted(not_restarted).is_none()
        }
        Phase::Ended { .. } => false,
    };
    record.runs.iter().any(needs)
}

impl RunRecord {
    fn new(new: Create, template: &Template) -> Self {
        Self {
            name: new.name,
            run_id: new.run_id,
            scheduled_at: new.scheduled_at,
            template: template.clone(),
            manual: new.manual,
            held: new.held,
            held_by: None,
            deleting: false,
            again: false,
            starts: 0,
            failures: 0,
            last_end: None,
            phase: Phase::Due,
        }
    }

    fn as_observed(&self, has_permit: bool) -> Run {
        let is_next = matches!(self.phase, Phase::Due | Phase::Waiting { .. });
        let is_held = self.held || (is_next && !has_permit);
        let state = match &self.phase {
            Phase::Started { .. } if self.deleting => RunState::Stopping,
            Phase::Started { .. } => RunState::Running,
            Phase::Due | Phase::Waiting { .. } if is_held => RunState::Held,
            Phase::Due | Phase::Waiting { .. } => RunState::Starting,
            Phase::Ended { succeeded: true } => RunState::Succeeded,
            Phase::Ended { succeeded: false } => RunState::Failed,
        };
        Run {
            name: self.name.clone(),
            run_id: Some(self.run_id),
            scheduled_at: Some(self.scheduled_at),
            template: RunTemplate::Of(self.template.clone()),
            state,
            held: is_held,
            held_by: self.held_by.clone(),
            manual: self.manual,
            deleting: self.deleting,
        }
    }

    /// Returns [`TaskRecord::not_restarted`] of its task if its program has ended by itself.
    #[must_use]
    pub fn why_not_restarted<'a>(&self, not_restarted: Option<&'a str>) -> Option<&'a str> {
        let by_itself =
            |end: &End| !end.asked && matches!(end.exit, Exit::Code(_) | Exit::Signal(_));
        let waits = matches!(self.phase, Phase::Waiting { .. });
        let has_ended = waits && self.last_end.as_ref().is_some_and(by_itself);
        not_restarted.filter(|_| has_ended)
    }

    fn is_attempt(&self, name: &str) -> bool {
        matches!(&self.phase, Phase::Started { attempt, .. } if attempt == name)
    }
}

fn live(observed: &Attempt) -> Option<&str> {
    match observed {
        Attempt::Live { attempt } => Some(attempt),
        Attempt::None | Attempt::Ended { .. } => None,
    }
}

/// Records how attempts ended that are live no more.
fn take_end(situation: &Situation<'_>, record: &mut TaskRecord, step: &mut Step) {
    let Situation { task, now, observed, paused, .. } = *situation;
    for run in &mut record.runs {
        let Phase::Started { attempt, at } = &run.phase else { continue };
        let end = match observed {
            Attempt::Live { attempt: live } if live == attempt => continue,
            Attempt::Ended { attempt: ended, end } if ended == attempt => end.clone(),
            // It was recorded, and subd was killed before it could start it.
            Attempt::None | Attempt::Live { .. } | Attempt::Ended { .. } => {
                run.starts = run.starts.saturating_sub(1);
                run.phase = Phase::Due;
                continue;
            }
        };
        let up = end.at.duration_since(*at);
        step.notes.push(format!("{} {}", run.name, end.exit.describe()));
        let is_own_stop = run.deleting || run.held_by.is_some() || run.again || paused;
        run.phase = match next_attempt(&task.restart, &end, up, run.failures) {
            _ if is_own_stop => Phase::Due,
            Next::Ended { succeeded } => Phase::Ended { succeeded },
            Next::Again { after, failures } => {
                run.failures = failures;
                Phase::Waiting { until: now.checked_add(after).unwrap_or(now) }
            }
        };
        run.again = false;
        run.last_end = Some(end);
    }
    record.runs.retain(|run| !run.deleting || matches!(run.phase, Phase::Started { .. }));
}

/// What follows from the end of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Ended { succeeded: bool },
    Again { after: SignedDuration, failures: u32 },
}

/// Decides whether a run is attempted again whose attempt has ended after `up`. `failures` is how
/// many attempts before it in a row have ended soon.
#[must_use]
pub fn next_attempt(restart: &Restart, end: &End, up: SignedDuration, failures: u32) -> Next {
    let [shortest, longest] =
        restart.backoff_s.map(|seconds| SignedDuration::from_secs(seconds.into()));
    let succeeded = end.exit == Exit::Code(0);
    // Somebody else has stopped it, such as a machine that shuts down.
    let is_interrupted = end.asked || end.exit == Exit::Rebooted;
    match restart.policy {
        RestartPolicy::Never => return Next::Ended { succeeded: succeeded && !is_interrupted },
        RestartPolicy::OnFailure if succeeded && !is_interrupted => {
            return Next::Ended { succeeded: true };
        }
        RestartPolicy::Always | RestartPolicy::OnFailure => {}
    }
    if is_interrupted {
        return Next::Again { after: SignedDuration::ZERO, failures };
    }
    let failures = if up >= longest { 0 } else { failures };
    let factor = 1_i32.checked_shl(failures.min(20)).unwrap_or(i32::MAX);
    let after = shortest.checked_mul(factor).unwrap_or(longest).min(longest);
    Next::Again { after, failures: failures.saturating_add(1) }
}

/// Makes, deletes and releases runs.
fn take_decision(
    situation: &Situation<'_>,
    has_permit: bool,
    record: &mut TaskRecord,
    step: &mut Step,
) {
    let Situation { task, template, now, .. } = *situation;
    let moment = task.moment(now);
    // What a deletion or a release frees is used at once.
    for _ in 0..4 {
        let decision = decide(task, template, &moment, &observed(record, has_permit));
        step.wake_at = decision.wake_at;
        if decision.is_idle() {
            return;
        }
        for new in decision.create {
            step.notes.push(format!("{} is made: {}", new.name, new.reason));
            record.runs.push(RunRecord::new(new, template));
        }
        for named in decision.delete {
            step.notes.push(format!("{} is deleted: {}", named.name, named.reason));
            let runs = record.runs.iter_mut().filter(|run| run.name == named.name);
            runs.for_each(|run| run.deleting = true);
        }
        for named in decision.release {
            let runs = record.runs.iter_mut().filter(|run| run.name == named.name);
            runs.for_each(|run| run.held = false);
        }
        record.runs.retain(|run| !run.deleting || matches!(run.phase, Phase::Started { .. }));
    }
}

/// Says why the live attempt must stop, if it must.
fn why_stop(attempt: &str, record: &TaskRecord, has_permit: bool, paused: bool) -> Option<String> {
    let Some(run) = record.runs.iter().find(|run| run.is_attempt(attempt)) else {
        return Some("no record knows it".to_owned());
    };
    let name = &run.name;
    if run.deleting {
        Some(format!("{name} is deleted"))
    } else if let Some(why) = &run.held_by {
        Some(format!("{name} is held: {why}"))
    } else if run.again {
        Some(format!("{name} is restarted"))
    } else if !has_permit {
        Some(format!("the permit of {name} ends"))
    } else {
        paused.then(|| format!("{name} makes room for an update"))
    }
}

/// Starts the run that is due. Nothing is live.
fn start(situation: &Situation<'_>, record: &mut TaskRecord, step: &mut Step) {
    let Situation { task, template, now, next_attempt, .. } = *situation;
    let longest = SignedDuration::from_secs(task.restart.backoff_s[1].into());
    let not_restarted = record.not_restarted.as_deref();
    for run in &mut record.runs {
        let stays_ended = run.why_not_restarted(not_restarted).is_some();
        if run.held || run.held_by.is_some() || run.deleting || stays_ended {
            continue;
        }
        run.again = false;
        match &mut run.phase {
            Phase::Due => {}
            Phase::Waiting { until } => {
                // The clock may have been set back.
                *until = (*until).min(now.checked_add(longest).unwrap_or(now));
                if *until > now {
                    step.wake_at = Some(step.wake_at.map_or(*until, |at| at.min(*until)));
                    continue;
                }
            }
            Phase::Started { .. } | Phase::Ended { .. } => continue,
        }
        run.template = template.clone();
        run.starts = run.starts.saturating_add(1);
        run.phase = Phase::Started { attempt: next_attempt.to_owned(), at: now };
        step.start = Some(run.name.clone());
        return;
    }
}

/// Why an order changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    #[error("the task has no run: `resume` it if it is suspended, or wait for its hours")]
    NoRun,
    #[error("the task is not held")]
    NotHeld,
    #[error("the task is not suspended")]
    NotSuspended,
    #[error("the task is held or suspended: end that first")]
    Held,
    #[error("the task has a run already: `restart` it")]
    HasRun,
    #[error("this release cannot read the definition of the task")]
    Unreadable,
    #[error("a later order was given: number {latest}")]
    Superseded { latest: u64 },
}

/// As [`take_order`], of the order of a dominator with this `number`. Of orders the one with the
/// highest number wins. One that was taken before changes nothing.
///
/// # Errors
///
/// [`OrderError`] if it does not fit or is superseded; nothing is changed then. To end what is not
/// so is no error.
pub fn take_numbered_order(
    number: u64,
    (order, why): (TaskOrder, &str),
    now: Timestamp,
    defined: Option<(&Task, &Template)>,
    record: &mut TaskRecord,
) -> Result<(), OrderError> {
    let latest = record.order_number;
    if number < latest {
        return Err(OrderError::Superseded { latest });
    }
    if number == latest {
        return Ok(());
    }
    match take_order(order, why, now, defined, record) {
        Ok(()) | Err(OrderError::NotHeld | OrderError::NotSuspended) => {}
        Err(error) => return Err(error),
    }
    record.order_number = number;
    Ok(())
}

/// Puts an order of the machine's operator, given for the reason `why` at `now`, into `record`.
/// `defined` is the task with its present version, if its definition can be read.
///
/// # Errors
///
/// [`OrderError`] if it does not fit; nothing is changed then.
pub fn take_order(
    order: TaskOrder,
    why: &str,
    now: Timestamp,
    defined: Option<(&Task, &Template)>,
    record: &mut TaskRecord,
) -> Result<(), OrderError> {
    let is_current = |run: &&mut RunRecord| !run.deleting;
    match order {
        TaskOrder::Hold => {
            let mut runs = record.runs.iter_mut().filter(is_current).peekable();
            runs.peek().ok_or(OrderError::NoRun)?;
            runs.for_each(|run| run.held_by = Some(why.to_owned()));
        }
        TaskOrder::Release => {
            let mut held = record.runs.iter_mut().filter(|run| run.held_by.is_some()).peekable();
            held.peek().ok_or(OrderError::NotHeld)?;
            held.for_each(|run| {
                run.held_by = None;
                run.failures = 0;
                if matches!(run.phase, Phase::Ended { .. } | Phase::Waiting { .. }) {
                    run.phase = Phase::Due;
                }
            });
        }
        TaskOrder::Suspend => record.suspended = Some(why.to_owned()),
        TaskOrder::Resume => {
            record.suspended.take().ok_or(OrderError::NotSuspended)?;
        }
        TaskOrder::Start => {
            let (task, template) = defined.ok_or(OrderError::Unreadable)?;
            if record.suspended.is_some() || record.runs.iter().any(|run| run.held_by.is_some()) {
                return Err(OrderError::Held);
            }
            let has_ended = |run: &RunRecord| matches!(run.phase, Phase::Ended { .. });
            if record.runs.iter().any(|run| !run.deleting && !has_ended(run)) {
                return Err(OrderError::HasRun);
            }
            let observed = observed(record, false);
            let reason = "an operator starts it".to_owned();
            let new = new_run(task, &observed.present(), 0, now, reason);
            record.runs.push(RunRecord::new(Create { manual: true, ..new }, template));
        }
        TaskOrder::Restart => {
            if record.suspended.is_some() || record.runs.iter().any(|run| run.held_by.is_some()) {
                return Err(OrderError::Held);
            }
            let mut runs = record.runs.iter_mut().filter(is_current).peekable();
            runs.peek().ok_or(OrderError::NoRun)?;
            runs.for_each(|run| {
                run.failures = 0;
                match run.phase {
                    Phase::Started { .. } => run.again = true,
                    Phase::Due => {}
                    Phase::Waiting { .. } | Phase::Ended { .. } => run.phase = Phase::Due,
                }
            });
        }
    }
    record.order_number = next_of_machine(record.order_number);
    Ok(())
}
