//! What is to be done about the runs of a task.

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::file::{OnTemplateChange, Task, Template};
use crate::runs::{Observed, Run};
use crate::schedule::Moment;

/// What is to be done, and when to ask again if nothing is observed before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Decision {
    pub create: Vec<Create>,
    pub delete: Vec<Named>,
    pub release: Vec<Named>,
    /// A run that is due and is not made.
    pub refused: Option<Refused>,
    pub wake_at: Option<Timestamp>,
}

/// A run to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Create {
    pub name: String,
    pub run_id: u32,
    /// It must not be started before it is released.
    pub held: bool,
    pub scheduled_at: Timestamp,
    pub manual: bool,
    pub reason: String,
}

/// A run to be deleted or released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Named {
    pub name: String,
    pub reason: String,
}

/// A run that is due and is not made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    pub scheduled_at: Timestamp,
    pub reason: String,
}

/// The run that may be live, all others being on their way out.
enum Chosen<'runs> {
    None,
    Present(&'runs Run),
    New(Create),
}

impl Decision {
    /// True if there is nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.create.is_empty() && self.delete.is_empty() && self.release.is_empty()
    }

    fn delete(&mut self, run: &Run, reason: &str) {
        // One deletion is enough.
        if !run.is_deleting() {
            self.delete.push(Named { name: run.name.clone(), reason: reason.to_owned() });
        }
    }
}

/// Decides about the runs of `task`, whose present version is `template`.
///
/// Whether a run is there counts, not how it fares: what is done about one that has failed is a
/// matter of the restart policy.
#[must_use]
pub fn decide(task: &Task, template: &Template, moment: &Moment, observed: &Observed) -> Decision {
    let runs = observed.present();
    let mut decision = Decision::default();
    if observed.suspended {
        runs.iter().for_each(|run| decision.delete(run, "the task is suspended"));
        return decision;
    }
    decision.wake_at = moment.next.as_ref().map(|event| event.time);
    let mut current = Vec::new();
    for run in &runs {
        match run.outdated(task, template, moment) {
            Some(reason) => decision.delete(run, &reason),
            None => current.push(*run),
        }
    }

    // Outside of the hours only what an operator made may live.
    let may_live = current.iter().copied().filter(|run| moment.should_run || run.manual);
    let best = may_live.max_by(|one, other| one.compare(other, template));
    let chosen = match best {
        Some(run) if must_be_replaced(task, template, run) => {
            let reason = format!("{} is of a former version of the task", run.name);
            let highest = runs.iter().filter_map(|run| run.run_id).max();
            let first_id = highest.map_or(0, |id| id.saturating_add(1));
            let scheduled_at = run.scheduled_at.unwrap_or(moment.now);
            let new = new_run(task, &runs, first_id, scheduled_at, reason);
            Chosen::New(Create { manual: run.manual, ..new })
        }
        Some(run) => Chosen::Present(run),
        None if moment.should_run => match missed(task, moment) {
            Some(refused) => {
                decision.refused = Some(refused);
                Chosen::None
            }
            None => {
                let reason = "the task must run, and no run is there".to_owned();
                let scheduled_at = moment.period_start.unwrap_or(moment.now);
                Chosen::New(new_run(task, &runs, 0, scheduled_at, reason))
            }
        },
        None => Chosen::None,
    };

    for run in current.iter().filter(|run| !run.is_finished()) {
        match &chosen {
            Chosen::Present(kept) if std::ptr::eq(*kept, *run) => {}
            Chosen::Present(kept) => {
                decision.delete(run, &format!("{} is kept, and there may be one", kept.name));
            }
            Chosen::New(new) => decision.delete(run, &format!("{} replaces it", new.name)),
            Chosen::None => decision.delete(run, "it is outside of the hours"),
        }
    }
    start(task, observed, &runs, chosen, &mut decision);
    decision
}

/// Makes or releases the chosen run.
fn start(
    task: &Task,
    observed: &Observed,
    runs: &[&Run],
    chosen: Chosen<'_>,
    decision: &mut Decision,
) {
    let live = |run: &&&Run| !run.is_finished();
    let permits = observed.permits(task);
    match chosen {
        Chosen::None => {}
        Chosen::New(new) => {
            let other = runs.iter().find(live);
            let why_held = match other {
                Some(other) => Some(format!("held, because {} may be live", other.name)),
                None => (!permits).then(|| "held, because this machine has no permit".to_owned()),
            };
            let reason =
                why_held.iter().fold(new.reason, |reason, held| format!("{reason}; {held}"));
            decision.create.push(Create { held: why_held.is_some(), reason, ..new });
        }
        Chosen::Present(run) => {
            let alone = runs.iter().filter(live).all(|other| std::ptr::eq(*other, run));
            let waits = run.is_held() && run.held_by.is_none();
            if alone && waits && !run.is_finished() && !run.is_deleting() && permits {
                let reason = "no other run can be live".to_owned();
                decision.release.push(Named { name: run.name.clone(), reason });
            }
        }
    }
}

/// True if a run may be live and is of another version than it should be. One that an operator
/// holds or is stopping must not come back because of that.
fn must_be_replaced(task: &Task, template: &Template, run: &Run) -> bool {
    task.on_template_change() == OnTemplateChange::Recreate
        && !run.is_of(template)
        && !run.is_finished()
        && run.held_by.is_none()
        && !run.is_deleting()
}

/// Says that the run that is due comes too late, if it does.
fn missed(task: &Task, moment: &Moment) -> Option<Refused> {
    let deadline_s = task.schedule.as_ref()?.start_deadline_s?;
    let scheduled_at = moment.period_start?;
    let late = moment.now.duration_since(scheduled_at);
    (late > SignedDuration::from_secs(deadline_s.into())).then(|| Refused {
        scheduled_at,
        reason: format!("the start deadline of {deadline_s} s after {scheduled_at} has passed"),
    })
}

/// Makes a run with the first id from `first_id` on whose name none of `runs` has.
pub(crate) fn new_run(
    task: &Task,
    runs: &[&Run],
    first_id: u32,
    scheduled_at: Timestamp,
    reason: String,
) -> Create {
    let name = |id: u32| format!("{}-{}-{id}", task.name, scheduled_at.as_second());
    let is_free = |id: &u32| runs.iter().all(|run| run.name != name(*id));
    let run_id = (first_id..=u32::MAX).find(is_free).unwrap_or(u32::MAX);
    Create { name: name(run_id), run_id, held: true, scheduled_at, manual: false, reason }
}
