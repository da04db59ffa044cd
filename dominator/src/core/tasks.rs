//! What is shown of the daemon tasks of machines: which of them have trouble, how many are in each
//! state, and why one runs or does not.
// tidy: core

use core::time::Duration;
use std::collections::BTreeMap;

use api::dominator::tasks::WantedTaskOrder;
use api::subd::{Health, TaskReport, TaskState};
use model::display::{ago, counted, utc};
use model::image::ImageName;
use model::tree::Time;

use crate::core::alarms::{IMAGE_UNHEALTHY, TASK_BACK_OFF, TASK_FAILED, TASK_UNHEALTHY};
use crate::core::timing::Now;

/// How long a task has trouble before operators are told, unless it is over for good.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How long a task must run so that its trouble is over.
pub const WELL_FOR: Duration = Duration::from_secs(60);

/// What is wrong with a task, or with the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TroubleKind {
    Unhealthy,
    /// It has ended and is not started again, or cannot be run.
    Failed,
    /// It ends again and again.
    BackOff,
    /// The health check of the image fails. The trouble is not that of a task.
    Image,
}

impl TroubleKind {
    fn of(state: TaskState) -> Option<Self> {
        match state {
            TaskState::Unhealthy => Some(Self::Unhealthy),
            TaskState::NotRestarted | TaskState::Failed | TaskState::Refused => Some(Self::Failed),
            TaskState::Waiting => Some(Self::BackOff),
            _ => None,
        }
    }

    /// The kind of the alarm, and the name of the event.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unhealthy => TASK_UNHEALTHY,
            Self::Failed => TASK_FAILED,
            Self::BackOff => TASK_BACK_OFF,
            Self::Image => IMAGE_UNHEALTHY,
        }
    }

    fn patience(self) -> Duration {
        match self {
            Self::Unhealthy | Self::BackOff | Self::Image => PATIENCE,
            Self::Failed => Duration::ZERO,
        }
    }
}

/// The trouble of one task, or of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// That of the task, or of the image.
    pub name: Box<str>,
    pub kind: TroubleKind,
    /// When it began.
    pub since: Time,
    pub text: Box<str>,
    /// The same on the clock of [`Now::elapsed`].
    began: Duration,
    /// Since when it runs again.
    well: Option<Duration>,
    is_raised: bool,
}

/// What operators are told once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskEvent {
    pub name: String,
    pub text: String,
}

impl TaskEvent {
    fn new(name: &str, task: &str, text: &str) -> Self {
        Self { name: name.to_owned(), text: format!("{task}: {text}") }
    }
}

/// The troubles of one machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Troubles(Vec<Trouble>);

impl Troubles {
    /// Takes how the tasks are now, and what the health check of the image says. Returns what
    /// operators are told.
    pub fn take(
        &mut self,
        tasks: &[TaskReport],
        image: Option<(&ImageName, &Health)>,
        now: Now,
    ) -> Vec<TaskEvent> {
        let mut events = Vec::new();
        let former = Self(std::mem::take(&mut self.0));
        for task in tasks {
            let trouble = former.of(&task.name, false);
            match (TroubleKind::of(task.state), trouble) {
                (Some(kind), trouble) => {
                    let text = trouble_text(task);
                    self.0.push(Trouble::after(trouble, &task.name, kind, &text, now));
                }
                (None, None) => {}
                (None, Some(trouble)) => match task.state {
                    TaskState::Starting | TaskState::Stopping => self.0.push(trouble),
                    TaskState::Running => self.0.push(trouble.well(now)),
                    _ if trouble.is_raised => {
                        let name = format!("task-{}", task.state.name());
                        events.push(TaskEvent::new(&name, &task.name, &task.detail));
                    }
                    _ => {}
                },
            }
        }
        if let Some((image, health)) = image {
            let trouble = former.of(image.as_str(), true);
            self.0.extend(match health {
                Health::Failed(why) => {
                    let (kind, why) = (TroubleKind::Image, why.trim_end());
                    Some(Trouble::after(trouble, image.as_str(), kind, why, now))
                }
                Health::Passed => trouble.map(|trouble| trouble.well(now)),
            });
        }
        events.extend(self.look(now));
        events
    }

    /// Returns the trouble of a task, or of an image.
    fn of(&self, name: &str, is_image: bool) -> Option<Trouble> {
        let is_of = |trouble: &&Trouble| {
            *trouble.name == *name && (trouble.kind == TroubleKind::Image) == is_image
        };
        self.0.iter().find(is_of).cloned()
    }

    /// Notes that time has passed. Returns what operators are told.
    pub fn look(&mut self, now: Now) -> Vec<TaskEvent> {
        let mut events = Vec::new();
        self.0.retain_mut(|trouble| {
            let (name, task) = (trouble.kind.name(), &trouble.name);
            match trouble.due() {
                Some(due) if due <= now.elapsed => {}
                _ => return true,
            }
            if trouble.well.is_some() {
                if trouble.is_raised {
                    let since = format!("it was {name} since {}", utc(trouble.since));
                    let over = match trouble.kind {
                        TroubleKind::Image => "image-healthy",
                        _ => "task-running",
                    };
                    events.push(TaskEvent::new(over, task, &since));
                }
                return false;
            }
            events.push(TaskEvent::new(name, task, &trouble.text));
            trouble.is_raised = true;
            true
        });
        events
    }

    /// When to look next, on the clock of [`Now::elapsed`].
    #[must_use]
    pub fn next(&self) -> Option<Duration> {
        self.0.iter().filter_map(Trouble::due).min()
    }

    /// Those that operators are told of.
    pub fn raised(&self) -> impl Iterator<Item = &Trouble> {
        self.0.iter().filter(|trouble| trouble.is_raised)
    }
}

impl Trouble {
    /// Returns the trouble of this kind, from that before if it was of the same kind.
    fn after(former: Option<Self>, name: &str, kind: TroubleKind, text: &str, now: Now) -> Self {
        match former.filter(|former| former.kind == kind) {
            Some(former) => Self { text: text.into(), well: None, ..former },
            None => Self {
                name: name.into(),
                kind,
                since: now.wall,
                text: text.into(),
                began: now.elapsed,
                well: None,
                is_raised: false,
            },
        }
    }

    /// Notes that all is well since now at the latest.
    fn well(self, now: Now) -> Self {
        Self { well: self.well.or(Some(now.elapsed)), ..self }
    }

    /// What the trouble is of: a task or an image of `hostname`.
    #[must_use]
    pub fn about(&self, hostname: &str) -> String {
        match self.kind {
            TroubleKind::Image => hostname.to_owned(),
            _ => format!("{hostname}/{}", self.name),
        }
    }

    fn due(&self) -> Option<Duration> {
        match (self.well, self.is_raised) {
            (Some(well), _) => Some(well + WELL_FOR),
            (None, false) => Some(self.began + self.kind.patience()),
            (None, true) => None,
        }
    }
}

fn trouble_text(task: &TaskReport) -> String {
    let last = task.last_end.as_ref().map(|end| format!("it {end}"));
    let why = match (task.state, &task.health) {
        (TaskState::Unhealthy, Some(Health::Failed(why))) => Some(why.trim_end().to_owned()),
        (TaskState::Waiting | TaskState::Failed, _) => last,
        _ => None,
    };
    format!("{}: {}", task.state.name(), why.as_ref().unwrap_or(&task.detail))
}

/// How many tasks are in each state; states without tasks are left out.
pub type TaskCounts = BTreeMap<TaskState, u32>;

/// Describes `counts` in one line: `2 active, 3 launching, 1 unhealthy`.
#[must_use]
pub fn counts_text(counts: &TaskCounts) -> String {
    let mut rows: Vec<(TaskState, u32)> =
        counts.iter().map(|(state, one)| (*state, *one)).collect();
    let is_usual = |state| matches!(state, TaskState::Running | TaskState::Starting);
    rows.sort_by_key(|(state, _)| (!is_usual(*state), *state != TaskState::Running, *state));
    let texts = rows.iter().map(|(state, count)| format!("{count} {}", count_name(*state)));
    texts.collect::<Vec<_>>().join(", ")
}

fn count_name(state: TaskState) -> &'static str {
    match state {
        TaskState::Running => "active",
        TaskState::Starting => "launching",
        state => state.name(),
    }
}

/// What is known of a task, to explain it.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    pub hostname: &'a str,
    pub report: &'a TaskReport,
    pub wanted: &'a [WantedTaskOrder],
    /// The last order that the machine has refused, and why.
    pub refused: Option<&'a str>,
    /// Why the machine does not answer.
    pub away: Option<&'a str>,
    pub seen: Option<Time>,
    pub now: Time,
}

/// Says why a task runs or does not, and when it will.
#[must_use]
pub fn explain(known: &Known<'_>) -> Vec<String> {
    let Known { hostname, report, now, .. } = *known;
    let state = report.state.name();
    // The reason of an operator begins with the state.
    let said = report.detail.strip_prefix(state).and_then(|detail| detail.strip_prefix(": "));
    let detail = said.unwrap_or(&report.detail);
    let mut lines = vec![format!("{} on {hostname} is {state}: {detail}", report.name)];
    if let Some(why) = known.away {
        let seen = known.seen.map_or_else(|| "never".to_owned(), |seen| ago(now, seen));
        lines.push(format!("that is what the machine has said last, {seen}; now: {why}"));
    }
    if let Some(started) = report.started {
        let times = counted(report.starts.into(), "start");
        lines.push(format!(
            "its program was started {}, {}; {times} of the run",
            ago(now, started),
            utc(started)
        ));
    }
    lines.extend(report.last_end.as_ref().map(|end| format!("before, it {end}")));
    match &report.health {
        Some(Health::Passed) => lines.push("its health command passes".to_owned()),
        Some(Health::Failed(why)) => lines.push(format!("it is not healthy: {}", why.trim_end())),
        None => {}
    }
    lines.push(next_text(known));
    lines.extend(known.wanted.iter().map(|order| {
        let WantedTaskOrder { order, who, why, since, .. } = order;
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        format!(
            "the machine has not taken the order to {} it, given by {who} {}{why}",
            order.name(),
            ago(now, *since)
        )
    }));
    lines.extend(known.refused.map(str::to_owned));
    lines
}

/// True if all is well, but for the permit of an exclusive task, which one machine has.
#[must_use]
pub fn waits_for_permit(report: &TaskReport) -> bool {
    let has_none = report.permit.as_ref().is_some_and(|permit| permit.until.is_none());
    report.state == TaskState::Held && has_none && !report.detail.starts_with("held:")
}

/// Says when the task will run, or stop, and what an operator can do about it.
fn next_text(known: &Known<'_>) -> String {
    let Known { hostname, report, .. } = *known;
    let order = |verb: &str| format!("domtool task {verb} {hostname} {}", report.name);
    let event = |none: &str| match report.next_at {
        Some(at) => format!("the next event of its schedule is at {}", utc(at)),
        None => none.to_owned(),
    };
    match report.state {
        TaskState::NotRun => "the machine runs no tasks".to_owned(),
        TaskState::Refused => {
            "it runs when its definition can be read, or the machine has what it needs".to_owned()
        }
        TaskState::Suspended => format!("it runs again after: {}", order("resume")),
        TaskState::Held if waits_for_permit(report) => {
            "it runs when this machine has the permit, which one machine has at a time".to_owned()
        }
        TaskState::Held => format!("it runs again after: {}", order("release")),
        TaskState::Idle => {
            format!("{}; to run it now: {}", event("its schedule starts it never"), order("start"))
        }
        TaskState::Starting => "it is started at once".to_owned(),
        TaskState::Running | TaskState::Unhealthy => {
            event("it runs until it ends, or somebody stops it")
        }
        TaskState::Stopping => "it is being stopped".to_owned(),
        TaskState::Waiting => {
            let at =
                report.again_at.map_or_else(|| "soon".to_owned(), |at| format!("at {}", utc(at)));
            format!("it is started again {at}; to start it now: {}", order("restart"))
        }
        TaskState::NotRestarted => {
            let now = order("restart");
            format!("it is started again when its environment is active; to start it now: {now}")
        }
        TaskState::Succeeded | TaskState::Failed => {
            format!(
                "{}; to run it now: {}",
                event("it is not started again by itself before its next version"),
                order("restart")
            )
        }
    }
}

#[cfg(test)]
mod tests;
