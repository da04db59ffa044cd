//! Permits of exclusive tasks, and machines that are fenced.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::tree::Time;

/// Says that a machine is off, so that others get its permits at once, and that it gets none; or
/// ends that.
pub enum FenceMachine {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FenceMachineRequest {
    pub hostname: String,
    /// False to end it.
    pub is_off: bool,
    /// The reason; must not be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    #[serde(default)]
    pub who: String,
}

impl Method for FenceMachine {
    const NAME: &'static str = "Dominator.FenceMachine";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    type Request = FenceMachineRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with("host", &request.hostname)
            .with("off", request.is_off)
            .why(&request.why)
            .who(&request.who)
    }
}

/// Returns which machines have the permits of exclusive tasks, and which are fenced.
pub enum ListPermits {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListPermitsReply {
    /// How long the dominator gives none because it was started, in seconds; zero when that is
    /// over.
    pub opens_in_s: u32,
    /// By task.
    pub tasks: Vec<TaskPermits>,
    /// By host name.
    pub fenced: Vec<Fence>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TaskPermits {
    /// The name of the task, or `resource ID` for a resource of the fleet.
    pub task: String,
    /// The machines that may run it. More than one is a conflict.
    pub holders: Vec<PermitHolder>,
}

/// A machine that has the permit of an exclusive task, or runs the task without.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PermitHolder {
    pub hostname: String,
    #[serde(with = "model::json::LargeNumber")]
    pub number: u64,
    /// When another machine may get the permit if it is not prolonged, in seconds.
    pub ends_in_s: u32,
    /// True if a process of the task may live, as the machine said last.
    pub is_live: bool,
}

/// That a machine is off, as an operator says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Fence {
    pub hostname: String,
    pub who: String,
    pub why: String,
    pub since: Time,
}

impl Method for ListPermits {
    const NAME: &'static str = "Dominator.ListPermits";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = ();
    type Reply = ListPermitsReply;
}
