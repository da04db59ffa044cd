//! `Subd.GetTasks`, `Subd.GetTaskStates`, `Subd.OrderTask`, `Subd.SetNotRestarted`,
//! `Subd.PermitTask` and `Subd.GetTaskLog`: the daemon tasks of a machine.

use std::collections::BTreeMap;

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::poll::Health;
use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::boot_time::BootTime;
use model::escape::ByteText;
pub use model::task_order::TaskOrder;
use model::tree::Time;

/// The longest reason of an order, in bytes.
pub const TASK_WHY_BYTES_MAX: usize = 1_000;

/// The reason for which a dominator suspends the tasks of a machine that has left its machine
/// database. A dominator that has the machine resumes tasks that are suspended for this reason.
pub const DEPARTED_WHY: &str = "the machine has left the machine database of its dominator";

/// The most of a log that is returned, in bytes.
pub const TASK_LOG_BYTES_MAX: u32 = 1 << 20;

/// Returns the tasks of the machine's image, and how they are. A subd that has this method runs
/// tasks, where its root and its flags allow that.
pub enum GetTasks {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetTasksReply {
    /// What runs tasks: `systemd` or `direct`; `None` if they are not run here.
    pub supervisor: Option<String>,
    /// Why they are not run.
    pub not_run: Option<String>,
    /// By name.
    pub tasks: Vec<TaskReport>,
    /// When this was said. Permits are counted from here.
    pub said_at: BootTime,
}

/// How a task is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TaskReport {
    pub name: String,
    pub state: TaskState,
    /// Says why.
    pub detail: String,
    /// The run that counts.
    pub run: Option<String>,
    /// When its program was started last.
    pub started: Option<Time>,
    /// How often its program was started.
    pub starts: u32,
    /// How its program ended last.
    pub last_end: Option<String>,
    /// Of a live run, if the task says how that is found.
    pub health: Option<Health>,
    /// When the next event of its schedule is.
    pub next_at: Option<Time>,
    /// When its program is started again, while it waits for that.
    pub again_at: Option<Time>,
    /// Of an exclusive task.
    pub permit: Option<PermitReport>,
    /// The highest number of an order about it; zero if there was none.
    #[serde(with = "model::json::LargeNumber")]
    pub order_number: u64,
    /// Why its program is not started again when it has ended by itself, if that is so.
    pub not_restarted: Option<String>,
}

impl TaskReport {
    /// True if it is suspended because the machine has left the machine database.
    #[must_use]
    pub fn is_departed(&self) -> bool {
        self.detail.strip_prefix("suspended: ") == Some(DEPARTED_WHY)
    }
}

/// How a machine is about the permit of an exclusive task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PermitReport {
    /// The highest number of a permit that it has heard of.
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
    /// When the permit ends that it has.
    pub until: Option<BootTime>,
    /// True if it would run the task with the permit.
    pub is_wanted: bool,
    /// True if a process of the task may live.
    pub is_live: bool,
}

/// The state of a task.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum TaskState {
    /// The machine runs no tasks.
    NotRun,
    /// Its definition cannot be used.
    Refused,
    Suspended,
    /// An operator holds it.
    Held,
    /// Nothing is due: it is outside of its hours.
    Idle,
    /// It is about to be started.
    Starting,
    Running,
    /// It runs, and is not healthy.
    Unhealthy,
    Stopping,
    /// It has ended, and is started again after a pause.
    Waiting,
    /// It has ended by itself, and is not started again while its environment is not active.
    NotRestarted,
    /// It has ended, and is not started again.
    Succeeded,
    Failed,
}

impl TaskState {
    pub const ALL: [Self; 13] = [
        Self::NotRun,
        Self::Refused,
        Self::Suspended,
        Self::Held,
        Self::Idle,
        Self::Starting,
        Self::Running,
        Self::Unhealthy,
        Self::Stopping,
        Self::Waiting,
        Self::NotRestarted,
        Self::Succeeded,
        Self::Failed,
    ];

    /// The name in tables and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotRun => "not-run",
            Self::Refused => "refused",
            Self::Suspended => "suspended",
            Self::Held => "held",
            Self::Idle => "idle",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Unhealthy => "unhealthy",
            Self::Stopping => "stopping",
            Self::Waiting => "waiting",
            Self::NotRestarted => "not-restarted",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
        }
    }
}

impl Method for GetTasks {
    const NAME: &'static str = "Subd.GetTasks";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ();
    type Reply = GetTasksReply;
}

/// Returns how the tasks are, unless the caller knows that. For dominators, which ask after a poll
/// whose status differs: what is told here is part of the status.
pub enum GetTaskStates {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetTaskStatesRequest {
    /// The version that the caller knows, if it knows one.
    pub have: Option<TasksVersion>,
}

/// The version of all that [`GetTaskStates`] tells. Equal versions tell the same, also of another
/// start of subd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TasksVersion(#[serde(with = "model::json::LargeNumber")] pub u64);

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetTaskStatesReply {
    pub version: TasksVersion,
    /// When this was said. Permits are counted from here.
    pub said_at: BootTime,
    /// `None` if the caller has this version.
    pub states: Option<TaskStates>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TaskStates {
    /// Why tasks are not run here, if they are not.
    pub not_run: Option<String>,
    /// By name.
    pub tasks: Vec<TaskReport>,
    /// What the health check of the image has said last since the update to it: it is asked again
    /// each minute. `None` if it has none, or was not asked yet.
    pub image_health: Option<Health>,
}

impl Method for GetTaskStates {
    const NAME: &'static str = "Subd.GetTaskStates";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 1 << 20;
    type Request = GetTaskStatesRequest;
    type Reply = GetTaskStatesReply;
}

/// Gives an order about a task. It holds over restarts of subd and of the machine.
pub enum OrderTask {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderTaskRequest {
    pub task: String,
    pub order: TaskOrder,
    /// The reason: at most [`TASK_WHY_BYTES_MAX`]. Some orders need one.
    pub why: String,
    /// Zero for the next number of the machine. An order with a lower number than the machine has
    /// heard of is refused as `stale`; one with the same number was carried out before.
    #[serde(default, with = "model::json::LargeNumber")]
    pub number: u64,
}

impl Method for OrderTask {
    const NAME: &'static str = "Subd.OrderTask";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = OrderTaskRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("task", &request.task)
            .with("order", request.order.name())
            .with("why", &request.why)
    }
}

/// Sets which tasks are not started again when they have ended by themselves. All others are. It
/// holds over restarts of subd and of the machine.
pub enum SetNotRestarted {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetNotRestartedRequest {
    /// The tasks, each with the reason: at most [`TASK_WHY_BYTES_MAX`]. Those that the machine does
    /// not have are ignored.
    pub tasks: BTreeMap<String, String>,
}

impl Method for SetNotRestarted {
    const NAME: &'static str = "Subd.SetNotRestarted";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = SetNotRestartedRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        let tasks = request.tasks.iter().map(|(task, why)| format!("{task}: {why}"));
        CallDetails::default().with_list("tasks", tasks)
    }
}

/// Permits the machine to run an exclusive task until a moment. A later moment with the same number
/// prolongs that.
pub enum PermitTask {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PermitTaskRequest {
    pub task: String,
    /// Grows with each machine that gets the permit.
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
    /// When nothing of the task may be left on the machine.
    pub until: BootTime,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PermitTaskReply {
    /// When this was said.
    pub said_at: BootTime,
}

impl Method for PermitTask {
    const NAME: &'static str = "Subd.PermitTask";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = PermitTaskRequest;
    type Reply = PermitTaskReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("task", &request.task)
            .with("number", request.number.to_string())
    }
}

/// Returns the end of what a task has written.
pub enum GetTaskLog {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetTaskLogRequest {
    pub task: String,
    /// How much: at most [`TASK_LOG_BYTES_MAX`].
    pub bytes: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetTaskLogReply {
    pub text: ByteText,
}

impl Method for GetTaskLog {
    const NAME: &'static str = "Subd.GetTaskLog";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 8 << 20;
    type Request = GetTaskLogRequest;
    type Reply = GetTaskLogReply;
}
