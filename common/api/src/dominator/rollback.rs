//! Rollbacks of machines to their former images, and the list of the orders that last: pauses and
//! rollbacks.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Status;
use super::orders::UpdatePause;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::image::ImageName;
use model::tree::Time;

/// The order to keep a machine at its former image although its record requires another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Rollback {
    /// The image that was required. The rollback ends when another one is.
    pub from: ImageName,
    /// The former image.
    pub image: ImageName,
    /// Who ordered it.
    pub who: String,
    /// The reason; may be empty.
    pub why: String,
    pub since: Time,
}

/// A machine and its rollback.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RolledBackMachine {
    pub hostname: String,
    pub rollback: Rollback,
}

/// Brings machines back to their former images, also across restarts of the dominator, until their
/// records require another image than now. It overrides no brake, no pause, no DisableUpdates and
/// no safety shutoff. Machines that do not require the image to go back from are left out. If the
/// former image of one of the others is not known or was deleted, the order is refused for all.
pub enum RollBack {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RollBackRequest {
    /// Names of machines, or patterns, as in [`super::orders::PauseUpdatesRequest`].
    pub hosts: Vec<String>,
    /// The image to go back from. It makes an order harmless that is given twice.
    pub from: ImageName,
    /// The reason; may be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RollBackReply {
    /// The machines, sorted by name.
    pub machines: Vec<RolledBackMachine>,
    /// The machines that do not require the image to go back from, sorted by name.
    pub left_out: Vec<String>,
}

impl Method for RollBack {
    const NAME: &'static str = "Dominator.RollBack";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = RollBackRequest;
    type Reply = RollBackReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with_list("hosts", &request.hosts)
            .with("from", &request.from)
            .why(&request.why)
            .who(&request.who)
    }
}

/// Ends rollbacks: the machines get the images that their records require.
pub enum EndRollback {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EndRollbackRequest {
    /// Names of machines, or patterns, as in [`super::orders::PauseUpdatesRequest`].
    pub hosts: Vec<String>,
    /// The reason; may be empty.
    pub why: String,
    /// Who asks, if the call has no certificate.
    pub who: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EndRollbackReply {
    /// Those machines that were rolled back, sorted by name.
    pub machines: Vec<RolledBackMachine>,
}

impl Method for EndRollback {
    const NAME: &'static str = "Dominator.EndRollback";
    const ACCESS: Access = Access::PowerOrOwner;
    const EFFECT: Effect = Effect::Changes;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = EndRollbackRequest;
    type Reply = EndRollbackReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default()
            .with_list("hosts", &request.hosts)
            .why(&request.why)
            .who(&request.who)
    }
}

/// Lists the machines that operators have paused or rolled back.
pub enum ListLastingOrders {}

/// A machine that is paused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PausedMachine {
    pub hostname: String,
    pub pause: UpdatePause,
    /// Its status: `paused` only if it differs from its image.
    pub status: Status,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ListLastingOrdersReply {
    /// The machines that are paused now, sorted by name.
    pub paused: Vec<PausedMachine>,
    /// The machines that are rolled back, sorted by name.
    pub rolled_back: Vec<RolledBackMachine>,
}

impl Method for ListLastingOrders {
    const NAME: &'static str = "Dominator.ListLastingOrders";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ();
    type Reply = ListLastingOrdersReply;
}
