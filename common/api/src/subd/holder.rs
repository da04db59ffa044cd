//! Which dominator gives orders to a machine: `Subd.HoldMachine` and `Subd.TakeOver`.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};

/// How long a dominator holds a machine after each call, in seconds.
pub const HOLD_SECONDS: u32 = 3_600;

/// The longest name of a dominator, in bytes.
pub const DOMINATOR_BYTES_MAX: usize = 255;

/// Holds a machine for a dominator before it gives orders, so that two dominators with different
/// images do not take turns. The answer is [`crate::fault::FaultCode::Held`], with the name of the
/// holder, while another one holds it. Orders by hand need no hold.
pub enum HoldMachine {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HoldMachineRequest {
    /// The name of the dominator, which is kept over its restarts: at most [`DOMINATOR_BYTES_MAX`].
    pub dominator: String,
    /// Random for each start of it. If an earlier start calls again, two run with one state.
    #[serde(with = "model::json::LargeNumber")]
    pub start: u64,
}

impl Method for HoldMachine {
    const NAME: &'static str = "Subd.HoldMachine";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = HoldMachineRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("dominator", &request.dominator)
    }
}

/// Gives a machine to another dominator at once.
pub enum TakeOver {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TakeOverRequest {
    /// The dominator that may hold the machine; `None` for the first that asks.
    pub dominator: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TakeOverReply {
    /// The dominator that held the machine until now.
    pub former: Option<String>,
}

impl Method for TakeOver {
    const NAME: &'static str = "Subd.TakeOver";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = TakeOverRequest;
    type Reply = TakeOverReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with_some("dominator", request.dominator.as_ref())
    }
}
