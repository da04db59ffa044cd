//! Machines that have left the machine database, and what becomes of their tasks.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::tree::Time;

/// Lists the machines that have left the machine database and are not forgotten yet.
pub enum ListDeparting {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListDepartingReply {
    /// By host name.
    pub machines: Vec<DepartingMachine>,
}

/// A machine that has left the machine database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DepartingMachine {
    pub hostname: String,
    /// When it left, by the dominator's clock.
    pub since: Time,
    pub state: DepartingState,
    /// When its tasks are stopped, if nobody decides otherwise.
    pub due: Option<Time>,
    /// How many tasks it has, if that is known.
    pub tasks: Option<u32>,
    /// How many resources it has.
    pub resources: u32,
    /// Who decided; empty if no operator did.
    pub who: String,
    /// The reason of the operator, or why its tasks are not stopped yet.
    pub why: String,
}

/// What becomes of the tasks of a machine that has left the machine database.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum DepartingState {
    /// They run until their time is over.
    Waiting,
    /// They run until an operator decides, because too many machines have left at once.
    Undecided,
    /// They are being stopped.
    Stopping,
    Stopped,
    /// They run on: an operator decided so, or the machine was not reached for too long.
    Left,
    /// They run on: another dominator has the machine, or it has another name now.
    Elsewhere,
}

impl DepartingState {
    pub const ALL: [Self; 6] = [
        Self::Waiting,
        Self::Undecided,
        Self::Stopping,
        Self::Stopped,
        Self::Left,
        Self::Elsewhere,
    ];

    /// The name in tables and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Undecided => "undecided",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Left => "left",
            Self::Elsewhere => "elsewhere",
        }
    }
}

impl Method for ListDeparting {
    const NAME: &'static str = "Dominator.ListDeparting";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ();
    type Reply = ListDepartingReply;
}

/// Decides about machines that have left the machine database.
pub enum OrderDeparting {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OrderDepartingRequest {
    /// Names or patterns of machines. Not empty.
    pub hosts: Vec<String>,
    pub order: DepartingOrder,
    /// The reason; must not be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
}

/// What is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DepartingOrder {
    /// Their tasks are stopped now.
    Stop,
    /// Their tasks are left as they are.
    Leave,
    /// As [`Self::Leave`], and they and their resources are listed no more.
    Forget,
}

impl DepartingOrder {
    /// The name of the verb.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Leave => "leave",
            Self::Forget => "forget",
        }
    }
}

impl Method for OrderDeparting {
    const NAME: &'static str = "Dominator.OrderDeparting";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = OrderDepartingRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with_list("hosts", &request.hosts)
            .with("order", request.order.name())
            .why(&request.why)
            .who(&request.who)
    }
}
