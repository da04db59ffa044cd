//! `ObjectServer`: objects by id, in batches. Single objects are at `GET /objects/<id>`.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::object::ObjectId;

/// The most ids in one request.
pub const IDS_MAX: usize = 65_536;

/// The longest lease of one request, in seconds. A longer one is shortened to this.
pub const LEASE_SECONDS_MAX: u32 = 24 * 3_600;

/// Returns which objects the server lacks, and takes a lease on all of them.
pub enum CheckObjects {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckObjectsRequest {
    /// The ids to look for: at most [`IDS_MAX`].
    pub ids: Vec<ObjectId>,
    /// How long the lease lasts, in seconds. It covers objects that exist and those that are added
    /// later. At most [`LEASE_SECONDS_MAX`], or a lower limit of the server.
    pub lease_seconds: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckObjectsReply {
    /// Those of the ids that the server lacks, in the order of the request.
    pub missing: Vec<ObjectId>,
}

impl Method for CheckObjects {
    const NAME: &'static str = "ObjectServer.CheckObjects";
    const ACCESS: Access = Access::Authenticated;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    const REPLY_BYTES_MAX: usize = 16 << 20;
    type Request = CheckObjectsRequest;
    type Reply = CheckObjectsReply;
}

/// Stores objects. The request's body is an object stream ([`crate::object_stream`]), not
/// [`AddObjects::Request`]. Each object is stored as soon as it is complete, with a lease of
/// [`LEASE_SECONDS_MAX`], so that an upload can be resumed after it was cut.
pub enum AddObjects {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AddObjectsReply {
    /// Objects that are new to the server.
    #[serde(with = "model::json::LargeNumber")]
    pub added: u64,
    /// Their total length, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub added_bytes: u64,
    /// Objects that existed already.
    #[serde(with = "model::json::LargeNumber")]
    pub known: u64,
}

impl Method for AddObjects {
    const NAME: &'static str = "ObjectServer.AddObjects";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ();
    type Reply = AddObjectsReply;
}

/// Returns objects. The reply's body is an object stream in the order of the request; a missing or
/// corrupt object is marked as absent.
pub enum GetObjects {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetObjectsRequest {
    /// The ids: at most [`IDS_MAX`].
    pub ids: Vec<ObjectId>,
}

impl Method for GetObjects {
    const NAME: &'static str = "ObjectServer.GetObjects";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = GetObjectsRequest;
    type Reply = ();
}
