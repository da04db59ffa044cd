//! `MdbServer`: the machine database, for whoever follows it.

use serde::{Deserialize, Serialize};

use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::mdb::Machine;
use model::object::ObjectId;

/// The longest that [`GetMdb`] waits for news, in milliseconds.
pub const MDB_WAIT_MS_MAX: u32 = 120_000;

/// Gives the machine database that is in force. Answers when its version is not `have`, and
/// otherwise after `wait_ms`.
pub enum GetMdb {}

/// See [`GetMdb`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetMdbRequest {
    /// The version that the caller has.
    pub have: Option<ObjectId>,
    /// How long to wait for another one, in milliseconds: at most [`MDB_WAIT_MS_MAX`].
    pub wait_ms: u32,
}

/// See [`GetMdb`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetMdbReply {
    /// What the database is known by: equal databases have equal versions, over restarts too.
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
