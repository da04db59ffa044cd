//! Methods about the machine database.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::audit::call_details::CallDetails;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::mdb::Machine;
use model::object::ObjectId;
use model::tree::Time;

/// A machine database that is held until an operator accepts it, because it would change too much
/// at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HeldMdb {
    /// Identifies it.
    pub digest: ObjectId,
    /// What it would change.
    pub why: String,
    pub since: Time,
}

/// Returns the machine database in force, or the one that is held.
pub enum ShowMdb {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ShowMdbRequest {
    /// Returns the held one instead of the one in force.
    pub held: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ShowMdbReply {
    /// The machines, sorted by host name.
    pub machines: Vec<Machine>,
    /// Set if one is held, whichever was asked for.
    pub held: Option<HeldMdb>,
}

impl Method for ShowMdb {
    const NAME: &'static str = "Dominator.ShowMdb";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ShowMdbRequest;
    type Reply = ShowMdbReply;
}

/// Accepts the machine database that is held.
pub enum AcceptMdb {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AcceptMdbRequest {
    /// The digest of the one to accept: another one may be held by now.
    pub digest: ObjectId,
    /// Who says so, as long as no certificate tells.
    pub who: String,
    /// Why; may be empty.
    #[serde(default)]
    pub why: String,
}

impl Method for AcceptMdb {
    const NAME: &'static str = "Dominator.AcceptMdb";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = AcceptMdbRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("digest", request.digest).why(&request.why).who(&request.who)
    }
}
