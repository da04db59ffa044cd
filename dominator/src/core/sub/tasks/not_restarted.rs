//! Tasks of environments that are not active: the machine does not start them again when they have
//! ended by themselves.
//!
//! It is told which ones these are, until it tells the same.
// tidy: core

use api::subd::{SetNotRestartedRequest, TaskReport, TasksVersion};
use model::object::ObjectId;
use rollouts::gate::InactiveParts;

use super::has_task;
use crate::core::sub::calls::CallPurpose;
use crate::core::sub::{Call, Failure, Step, Sub};
use crate::core::timing::{Attempt, HOLD_LONGEST, RETRY_FIRST};

/// Tasks that are not to be started again when they have ended by themselves.
#[derive(Debug, Default)]
pub(super) struct Inactive {
    parts: InactiveParts,
    /// What was known when they were sent last: what the machine had told of its tasks, and its
    /// image.
    sent: Option<(TasksVersion, Option<ObjectId>)>,
    /// What was known when the machine had them.
    done: Option<(TasksVersion, Option<ObjectId>)>,
    attempt: Attempt,
}

impl Sub {
    /// Sets the parts of the image that come from environments which are not active.
    pub(in crate::core::sub) fn set_inactive(&mut self, parts: InactiveParts) {
        self.tasks.inactive = Some(Box::new(Inactive { parts, ..Inactive::default() }));
    }

    /// Has the machine restart no tasks of environments that are not active, and all others.
    pub(super) fn sync_not_restarted(&mut self, step: &mut Step<'_>) {
        let Some(told) = &self.tasks.told else { return };
        let is_due = self.tasks.inactive.is_some() || told.has_not_restarted;
        if !is_due || self.holding.refuses(step.now) {
            return;
        }
        let inactive = self.tasks.inactive.get_or_insert_default();
        let image = self.image.ready();
        if image.is_none() && !inactive.parts.is_empty() {
            return;
        }
        let known = (told.version, image.map(|image| image.digest));
        if inactive.done == Some(known) {
            return;
        }
        let why = |task: &TaskReport| {
            let part = image?.signed_parts().find(|part| has_task(part, &task.name))?;
            let environment = inactive.parts.get(part.name())?;
            Some(format!("the environment {environment} is not active"))
        };
        let states = told.states();
        let is_so = |task: &TaskReport| task.not_restarted == why(task);
        if states.not_run.is_some() || states.tasks.iter().all(is_so) {
            inactive.done = Some(known);
            if inactive.parts.is_empty() {
                self.tasks.inactive = None;
            }
            return;
        }
        if let Some(until) = inactive.attempt.held_until(step.now.elapsed) {
            return self.wake_by(until);
        }
        let tasks = states.tasks.into_iter();
        let tasks = tasks.filter_map(|task| why(&task).map(|why| (task.name, why))).collect();
        let call = Call::SetNotRestarted(SetNotRestartedRequest { tasks });
        if self.call(CallPurpose::NotRestarted, call, step)
            && let Some(inactive) = &mut self.tasks.inactive
        {
            inactive.sent = Some(known);
        }
    }

    /// Handles that the machine has taken which tasks are not restarted. It will tell that.
    pub(in crate::core::sub) fn not_restarted_taken(&mut self) {
        if let Some(inactive) = &mut self.tasks.inactive {
            inactive.attempt = Attempt::default();
            inactive.done = inactive.sent.take();
        }
    }

    /// Handles that the machine has not taken it.
    pub(in crate::core::sub) fn not_restarted_failed(
        &mut self,
        failure: Failure,
        step: &mut Step<'_>,
    ) {
        if let Some(inactive) = &mut self.tasks.inactive {
            let attempt = &mut inactive.attempt;
            let pause = attempt.count(RETRY_FIRST, HOLD_LONGEST, step.context.jitter);
            attempt.hold(step.now.elapsed + pause, failure.text);
        }
    }
}
