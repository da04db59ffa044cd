//! What operators ask about the machine database.

use serde::{Deserialize, Serialize};

use crate::Done;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::mdb::Machine;
use model::object::ObjectId;
use model::tree::Time;

/// A machine database that is held until an operator accepts it: it would change too much at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldMdb {
    /// Tells it from others.
    pub digest: ObjectId,
    /// What it would change.
    pub why: String,
    /// Since when it is held.
    pub since: Time,
}

/// Gives a machine database.
pub enum ShowMdb {}

/// See [`ShowMdb`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShowMdbRequest {
    /// The one that is held, instead of the one in force.
    pub held: bool,
}

/// See [`ShowMdb`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// Puts the machine database that is held in force.
pub enum AcceptMdb {}

/// See [`AcceptMdb`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptMdbRequest {
    /// Which: another one may be held by now.
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

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("digest", request.digest).why(&request.why).who(&request.who)
    }
}
