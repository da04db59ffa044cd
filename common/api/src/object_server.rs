//! `ObjectServer`: objects by id, in batches. Single objects are at `GET /objects/<id>`.

use serde::{Deserialize, Serialize};

use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::object::ObjectId;

/// The most ids in one request.
pub const IDS_MAX: usize = 65_536;

/// The longest that objects are held for one request, in seconds. A longer lease is cut to this.
pub const LEASE_SECONDS_MAX: u32 = 24 * 3_600;

/// Says which objects the server has, and holds all of them for a while.
pub enum CheckObjects {}

/// See [`CheckObjects`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckObjectsRequest {
    /// The ids to look for: at most [`IDS_MAX`].
    pub ids: Vec<ObjectId>,
    /// For how long none of them is collected, in seconds: neither those that are there, nor those
    /// that are missing and come later. At most [`LEASE_SECONDS_MAX`],
    /// or less if the server is told so.
    pub lease_seconds: u32,
}

/// See [`CheckObjects`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
/// [`AddObjects::Request`]; each object is kept as soon as it is complete, so that an upload that
/// was cut need not send it again, and is held as by a lease of [`LEASE_SECONDS_MAX`].
pub enum AddObjects {}

/// See [`AddObjects`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddObjectsReply {
    /// Objects that are new to the server.
    #[serde(with = "model::wide")]
    pub added: u64,
    /// Their length together, in bytes.
    #[serde(with = "model::wide")]
    pub added_bytes: u64,
    /// Objects that were there already.
    #[serde(with = "model::wide")]
    pub known: u64,
}

impl Method for AddObjects {
    const NAME: &'static str = "ObjectServer.AddObjects";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ();
    type Reply = AddObjectsReply;
}

/// Gives objects. The reply's body is an object stream, in the order of the request; an object
/// that the server lacks, or that is found corrupt, is said to be absent.
pub enum GetObjects {}

/// See [`GetObjects`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
