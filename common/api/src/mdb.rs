//! `MdbServer`: returns the machine database and its changes.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::mdb::Machine;
use model::object::ObjectId;

/// The longest wait of [`GetMdb`], in milliseconds.
pub const MDB_WAIT_MS_MAX: u32 = 120_000;

/// Returns the machine database in force. Answers when its version is not `have`, or after
/// `wait_ms`.
pub enum GetMdb {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetMdbRequest {
    /// The version that the caller has.
    pub have: Option<ObjectId>,
    /// How long to wait for another one, in milliseconds: at most [`MDB_WAIT_MS_MAX`].
    pub wait_ms: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetMdbReply {
    /// The version. Equal databases have equal versions, also after a restart.
    pub version: ObjectId,
    /// The machines, sorted by host name; `None` if the caller has this version.
    pub machines: Option<Vec<Machine>>,
}

impl Method for GetMdb {
    const NAME: &'static str = "MdbServer.GetMdb";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = GetMdbRequest;
    type Reply = GetMdbReply;
}
