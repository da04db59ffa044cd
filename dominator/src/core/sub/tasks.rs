//! The daemon tasks of the machine: asks how they are, and gives orders about them.
//!
//! A sub whose tasks differ has another status, so it is asked after a poll with another status
//! than at the last time. As polls do, this goes on while the machine takes no orders.
//!
//! What it has told is kept encoded: in a fleet the states of tasks are many, and seldom looked at.
// tidy: core

mod not_restarted;

use core::time::Duration;
use std::collections::BTreeSet;

use api::codec::{Encoding, decode, encode};
use api::dominator::tasks::WantedTaskOrder;
use api::subd::{
    GetTaskStatesReply, GetTaskStatesRequest, Health, OrderTaskRequest, TaskReport, TaskStates,
    TasksVersion,
};
use model::backoff::{doubled, jittered};
use model::boot_time::BootTime;
use model::display::safe_text;
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::trigger::Kind;

use not_restarted::Inactive;

use super::calls::CallPurpose;
use super::{Call, Effect, Failure, FailureKind, RequestId, Step, Sub, TaskEffect, View};
use crate::core::claims::Claim;
use crate::core::tasks::{TaskEvent, Trouble, Troubles};
use crate::core::timing::{Attempt, RETRY_FIRST, RETRY_LONGEST};

/// The longest text of a task that is kept, in bytes. It comes from the machine.
const TEXT_BYTES_MAX: usize = 500;

/// The most that is kept of the tasks of a machine, in bytes.
const STATES_BYTES_MAX: usize = 256 << 10;

/// How long a machine that refuses to tell is not asked again: the power may be missing.
const NOT_ASKED: Duration = Duration::from_secs(600);

/// What is known of the tasks.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    /// The request that is under way.
    asking: Option<RequestId>,
    /// The instance and status of the sub when it was asked last, if it has answered since.
    asked: Option<(u64, u64)>,
    /// When that was.
    asked_at: Duration,
    /// Not before then it is asked again.
    not_before: Duration,
    failures: u32,
    /// The instance of the sub that does not know the method.
    is_without: Option<u64>,
    told: Option<Box<Told>>,
    /// Why nothing is known, if that is so.
    unknown: Option<Box<str>>,
    troubles: Troubles,
    /// True if there was trouble that operators are told of.
    ill_parts: BTreeSet<ImageName>,
    orders: Option<Box<Giving>>,
    /// While the machine has, or is to have, tasks that are not restarted.
    inactive: Option<Box<Inactive>>,
}

#[derive(Debug)]
struct Told {
    version: TasksVersion,
    /// When it was received, and when the machine has said it. Only if a task is exclusive.
    said_at: Option<(Duration, BootTime)>,
    /// True if there are tasks that are not started again.
    has_not_restarted: bool,
    /// [`TaskStates`].
    encoded: Box<[u8]>,
}

/// Orders that the machine has not taken yet.
#[derive(Debug, Default)]
struct Giving {
    wanted: Vec<WantedTaskOrder>,
    /// The task and number of the one that was sent last.
    sent: Option<(String, u64)>,
    attempt: Attempt,
    /// Of each task the last that was refused, and why.
    refused: Vec<(String, String)>,
}

impl Told {
    fn states(&self) -> TaskStates {
        let decoded = decode(Encoding::Bincode, "task states", &self.encoded, STATES_BYTES_MAX);
        decoded.expect("this release has encoded it")
    }
}

/// Cuts the texts of a machine to what may be kept and shown.
fn clipped(states: TaskStates) -> TaskStates {
    let text = |text: String| safe_text(&text, TEXT_BYTES_MAX);
    let health = |health: Option<Health>| match health {
        Some(Health::Failed(why)) => Some(Health::Failed(text(why))),
        known => known,
    };
    let task = |task: TaskReport| TaskReport {
        name: text(task.name),
        detail: text(task.detail),
        run: task.run.map(text),
        last_end: task.last_end.map(text),
        not_restarted: task.not_restarted.map(text),
        health: health(task.health),
        ..task
    };
    let tasks = states.tasks.into_iter().map(task).collect();
    let image_health = health(states.image_health);
    TaskStates { not_run: states.not_run.map(text), tasks, image_health }
}

impl Sub {
    /// Asks how the tasks are, if that may have changed, and gives orders about them.
    pub(super) fn sync_tasks(&mut self, view: &View, step: &mut Step<'_>) {
        self.ask_for_tasks(view, step);
        self.give_task_orders(step);
        self.sync_not_restarted(step);
    }

    /// Notes that time has passed.
    pub(super) fn look_at_tasks(&mut self, step: &mut Step<'_>) {
        let events = self.tasks.troubles.look(step.now);
        step.effects.extend(events.into_iter().map(tell));
        if let Some(next) = self.tasks.troubles.next() {
            self.wake_by(next);
        }
        let ill: BTreeSet<ImageName> = self.ill_parts().collect();
        let former = std::mem::replace(&mut self.tasks.ill_parts, ill.clone());
        let last = self.view.as_ref().and_then(|view| view.report.last_image.as_ref());
        if last.is_none() || last != self.required().as_ref() {
            return;
        }
        for image in ill.symmetric_difference(&former) {
            let claim = Claim::Health { image: image.clone(), is_ill: ill.contains(image) };
            step.effects.push(Effect::Claim(claim));
        }
    }

    /// Returns the parts of the image that have brought what is in trouble: a task, or the health
    /// check, which is that of the first part.
    pub fn ill_parts(&self) -> impl Iterator<Item = ImageName> {
        let parts = || self.image.ready().into_iter().flat_map(|image| image.signed_parts());
        self.tasks.troubles.raised().filter_map(move |trouble| {
            let mut having = parts().filter(|part| has_task(part, &trouble.name));
            having.next().or_else(|| parts().next()).map(|part| part.name().clone())
        })
    }

    fn ask_for_tasks(&mut self, view: &View, step: &mut Step<'_>) {
        let version = view.report.version;
        let (instance, status) = (version.instance, version.status);
        // Permits are counted from what the machine has said.
        let has_permits = self.tasks.told.as_ref().is_some_and(|told| told.said_at.is_some());
        let is_old = has_permits && self.tasks.asked_at < self.polls.answered;
        let is_asked = self.tasks.asked == Some((instance, status)) && !is_old;
        if self.tasks.asking.is_some() || is_asked || self.tasks.is_without == Some(instance) {
            return;
        }
        if step.now.elapsed < self.tasks.not_before {
            return self.wake_by(self.tasks.not_before);
        }
        let request_id = self.next_request_id();
        self.tasks.asking = Some(request_id);
        self.tasks.asked = Some((instance, status));
        self.tasks.asked_at = step.now.elapsed;
        let have = self.tasks.told.as_ref().map(|told| told.version);
        step.effects.push(Effect::Task(TaskEffect::Ask(request_id, GetTaskStatesRequest { have })));
    }

    /// Takes the answer of the machine about its tasks.
    pub(super) fn take_tasks(
        &mut self,
        request_id: RequestId,
        answer: Result<GetTaskStatesReply, Failure>,
        step: &mut Step<'_>,
    ) {
        if self.tasks.asking.take_if(|asking| *asking == request_id).is_none() {
            return;
        }
        let reply = match answer {
            Ok(reply) => reply,
            Err(failure) => return self.tasks.failed(failure, step),
        };
        self.tasks.failures = 0;
        let GetTaskStatesReply { version, said_at, states } = reply;
        let Some(states) = states else {
            if let Some((at, said)) =
                self.tasks.told.as_mut().and_then(|told| told.said_at.as_mut())
            {
                (*at, *said) = (step.now.elapsed, said_at);
            }
            return;
        };
        let states = clipped(states);
        let encoded = encode(Encoding::Bincode, "task states", &states).unwrap_or_default();
        if encoded.is_empty() || encoded.len() > STATES_BYTES_MAX {
            self.tasks.told = None;
            self.tasks.unknown = Some("the machine tells more of its tasks than is kept".into());
            return;
        }
        let has_permits = states.tasks.iter().any(|task| task.permit.is_some());
        let said_at = has_permits.then_some((step.now.elapsed, said_at));
        let has_not_restarted = states.tasks.iter().any(|task| task.not_restarted.is_some());
        let told = Told { version, said_at, has_not_restarted, encoded: encoded.into() };
        self.tasks.told = Some(Box::new(told));
        self.tasks.unknown = None;
        let image = self.view.as_ref().and_then(|view| view.report.last_image.as_ref());
        let image = image.zip(states.image_health.as_ref());
        let events = self.tasks.troubles.take(&states.tasks, image, step.now);
        step.effects.extend(events.into_iter().map(tell));
        self.end_superseded_orders(&states.tasks, step);
        let departed = states.tasks.into_iter().filter(TaskReport::is_departed);
        let departed: Vec<_> = departed.map(|task| (task.name, task.order_number)).collect();
        if !departed.is_empty() {
            step.effects.push(Effect::Task(TaskEffect::Resume(departed)));
        }
    }

    /// Ends the orders up to the number that the machine has told.
    fn end_superseded_orders(&mut self, tasks: &[TaskReport], step: &mut Step<'_>) {
        let Some(giving) = &mut self.tasks.orders else { return };
        giving.wanted.retain(|order| {
            let report = tasks.iter().find(|report| report.name == order.task);
            let is_wanted = report.is_none_or(|report| report.order_number < order.number);
            if !is_wanted {
                let (task, number) = (order.task.clone(), order.number);
                step.effects.push(Effect::Task(TaskEffect::OrderEnded(task, number)));
            }
            is_wanted
        });
    }

    /// Sets the orders that the machine is to take.
    pub(super) fn want_task_orders(&mut self, wanted: Vec<WantedTaskOrder>) {
        if wanted.is_empty() && self.tasks.orders.is_none() {
            return;
        }
        let giving = self.tasks.orders.get_or_insert_default();
        giving.refused.retain(|(task, _)| wanted.iter().all(|order| order.task != *task));
        giving.wanted = wanted;
        giving.attempt = Attempt::default();
    }

    fn give_task_orders(&mut self, step: &mut Step<'_>) {
        // What the machine has told may show that it has taken them.
        if self.tasks.told.is_none() || self.holding.refuses(step.now) {
            return;
        }
        let Some(giving) = &self.tasks.orders else { return };
        let Some(order) = giving.wanted.first() else { return };
        if let Some(until) = giving.attempt.held_until(step.now.elapsed) {
            return self.wake_by(until);
        }
        let WantedTaskOrder { task, order, why, number, .. } = order.clone();
        let sent = Some((task.clone(), number));
        let request = OrderTaskRequest { task, order, why, number };
        if self.call(CallPurpose::OrderTask, Call::OrderTask(request), step)
            && let Some(giving) = &mut self.tasks.orders
        {
            giving.sent = sent;
        }
    }

    /// Handles that the machine has taken the order that was sent last.
    pub(super) fn task_order_taken(&mut self, effects: &mut Vec<Effect>) {
        let Some(giving) = &mut self.tasks.orders else { return };
        giving.attempt = Attempt::default();
        effects.extend(giving.end_sent());
    }

    /// Handles that the machine has not taken it.
    pub(super) fn task_order_failed(&mut self, failure: Failure, step: &mut Step<'_>) {
        let Some(giving) = &mut self.tasks.orders else { return };
        match failure.kind {
            FailureKind::Unreachable
            | FailureKind::Busy
            | FailureKind::Unavailable
            | FailureKind::Held
            | FailureKind::Cancelled => {
                let attempt = &mut giving.attempt;
                let pause = attempt.count(RETRY_FIRST, RETRY_LONGEST, step.context.jitter);
                attempt.hold(step.now.elapsed + pause, failure.text);
            }
            _ => {
                giving.attempt = Attempt::default();
                if let Some((task, number)) = &giving.sent
                    && let Some(order) = giving.wanted.iter().find(|order| is(order, task, *number))
                {
                    let verb = order.order.name();
                    let why = format!("the machine refused to {verb} it: {}", failure.text);
                    giving.refused.retain(|(refused, _)| refused != task);
                    giving.refused.push((task.clone(), safe_text(&why, TEXT_BYTES_MAX)));
                }
                step.effects.extend(giving.end_sent());
            }
        }
    }

    /// Returns how the tasks are, as the machine has told it last. The error is why that is not
    /// known.
    pub fn tasks(&self) -> Result<TaskStates, String> {
        if let Some(told) = &self.tasks.told {
            return Ok(told.states());
        }
        let unknown = self.tasks.unknown.as_ref().map(ToString::to_string);
        Err(unknown.unwrap_or_else(|| match self.expect_right_machine() {
            Ok(()) => "the machine has not told them yet".to_owned(),
            Err(why) => why,
        }))
    }

    /// When the machine has told how its tasks are, on the dominator's clock of elapsed time and on
    /// its own. `None` if no task is exclusive.
    #[must_use]
    pub fn tasks_said_at(&self) -> Option<&(Duration, BootTime)> {
        self.tasks.told.as_ref()?.said_at.as_ref()
    }

    /// Returns the tasks with trouble of which operators are told.
    pub fn task_troubles(&self) -> impl Iterator<Item = &Trouble> {
        self.tasks.troubles.raised()
    }

    /// Returns the orders about tasks that the machine has not taken yet.
    #[must_use]
    pub fn wanted_task_orders(&self) -> &[WantedTaskOrder] {
        self.tasks.orders.as_ref().map_or(&[], |giving| &giving.wanted)
    }

    /// Returns why the last order about `task` was refused, if it was.
    #[must_use]
    pub fn refused_task_order(&self, task: &str) -> Option<&str> {
        let refused = &self.tasks.orders.as_ref()?.refused;
        refused.iter().find(|(refused, _)| refused == task).map(|(_, why)| why.as_str())
    }
}

impl Tasks {
    /// Takes why the machine has not told how they are.
    fn failed(&mut self, failure: Failure, step: &mut Step<'_>) {
        let asked = self.asked.take();
        match failure.kind {
            FailureKind::NoMethod => {
                self.is_without = asked.map(|(instance, _)| instance);
                self.forget("its subd is of an earlier release, which does not tell");
            }
            FailureKind::Refused => {
                self.not_before = step.now.elapsed + NOT_ASKED;
                self.forget(&format!("the machine does not tell: {}", failure.text));
            }
            _ => {
                self.failures = self.failures.saturating_add(1);
                let pause = doubled(RETRY_FIRST, RETRY_LONGEST, self.failures);
                let pause = jittered(pause, step.context.jitter);
                self.not_before = step.now.elapsed + pause;
            }
        }
    }

    fn forget(&mut self, why: &str) {
        self.told = None;
        self.troubles = Troubles::default();
        self.unknown = Some(safe_text(why, TEXT_BYTES_MAX).into());
    }
}

fn tell(event: TaskEvent) -> Effect {
    Effect::Task(TaskEffect::Tell(event))
}

/// True if this part of an image brings the task.
fn has_task(part: &RequiredImage, task: &str) -> bool {
    let triggers = &part.content.triggers.0;
    triggers.iter().any(|trigger| trigger.kind == Kind::Task && *trigger.service == *task)
}

fn is(order: &WantedTaskOrder, task: &str, number: u64) -> bool {
    order.task == task && order.number == number
}

impl Giving {
    /// Ends the order that was sent last.
    fn end_sent(&mut self) -> Option<Effect> {
        let (task, number) = self.sent.take()?;
        self.wanted.retain(|order| !is(order, &task, number));
        Some(Effect::Task(TaskEffect::OrderEnded(task, number)))
    }
}
