//! The daemon tasks of all machines: how they are, and orders about them.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ListSubsRequest;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use crate::subd::{GetTaskLogReply, TaskOrder, TaskReport, TaskState};
use model::tree::Time;

/// The longest wait of an order, in milliseconds.
pub const ORDER_WAIT_MS_MAX: u32 = 60_000;

/// An order about a task of a machine, as the dominator keeps it until the machine has taken it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WantedTaskOrder {
    pub task: String,
    pub order: TaskOrder,
    /// Empty if no reason was given.
    pub why: String,
    pub who: String,
    /// When it was given, by the dominator's clock.
    pub since: Time,
    /// Grows with each order about the task.
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
}

/// A task of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TaskOfMachine {
    pub hostname: String,
    /// As the machine has told it last.
    pub report: TaskReport,
    /// Orders that it has not taken yet, the oldest first.
    pub wanted: Vec<WantedTaskOrder>,
    /// Why the machine does not answer, if it does not: the report may be old.
    pub away: Option<String>,
}

/// Lists tasks, by host name and task.
pub enum ListTasks {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ListTasksRequest {
    /// Only those of these machines.
    pub machines: ListSubsRequest,
    /// Only tasks whose names match one of these patterns; all if empty.
    pub tasks: Vec<String>,
    /// Only tasks in one of these states; all if empty.
    pub states: Vec<TaskState>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListTasksReply {
    pub tasks: Vec<TaskOfMachine>,
    /// The machines whose tasks are not known, and why.
    pub unknown: Vec<(String, String)>,
}

impl Method for ListTasks {
    const NAME: &'static str = "Dominator.ListTasks";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ListTasksRequest;
    type Reply = ListTasksReply;
}

/// Returns all that is known of a task of a machine.
pub enum GetTask {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetTaskRequest {
    pub hostname: String,
    pub task: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetTaskReply {
    pub task: TaskOfMachine,
    /// When the machine was last heard of.
    pub seen: Option<Time>,
    /// Why it is running or not, and when it will run.
    pub explanation: Vec<String>,
}

impl Method for GetTask {
    const NAME: &'static str = "Dominator.GetTask";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    type Request = GetTaskRequest;
    type Reply = GetTaskReply;
}

/// Gives an order about tasks. Each machine is told until it has taken it, also after a restart of
/// the dominator and while updates are disabled.
pub enum OrderTasks {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderTasksRequest {
    /// Which machines. Not empty: `*` is all.
    pub machines: ListSubsRequest,
    /// Patterns of tasks. Not empty: `*` is all.
    pub tasks: Vec<String>,
    pub order: TaskOrder,
    /// The reason. Some orders need one.
    #[serde(default)]
    pub why: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
    /// How long to wait until the machines have taken it, in milliseconds: at most
    /// [`ORDER_WAIT_MS_MAX`].
    #[serde(default)]
    pub wait_ms: u32,
}

/// What became of an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TaskOrderOutcome {
    /// The machine has taken it.
    Taken,
    /// The machine will be told.
    Wanted,
    /// Nothing is done, for this reason.
    Refused(String),
}

/// An order about one task of one machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderedTask {
    pub hostname: String,
    pub task: String,
    pub outcome: TaskOrderOutcome,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderTasksReply {
    /// By host name and task.
    pub tasks: Vec<OrderedTask>,
}

impl Method for OrderTasks {
    const NAME: &'static str = "Dominator.OrderTasks";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = OrderTasksRequest;
    type Reply = OrderTasksReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with_list("hosts", &request.machines.hosts)
            .with_list("tasks", &request.tasks)
            .with("order", request.order.name())
            .why(&request.why)
            .who(&request.who)
    }
}

/// Returns the end of what a task of a machine has written.
pub enum GetTaskLog {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetTaskLogRequest {
    pub hostname: String,
    pub task: String,
    /// How much: at most [`crate::subd::TASK_LOG_BYTES_MAX`].
    pub bytes: u32,
}

impl Method for GetTaskLog {
    const NAME: &'static str = "Dominator.GetTaskLog";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 8 << 20;
    type Request = GetTaskLogRequest;
    type Reply = GetTaskLogReply;
}
