//! `Subd.CountOwners`: how many entries outside a scan belong to given users and groups.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::access::Access;
use crate::method::{Effect, Method};
use model::scope::ScanSettings;

/// Counts the kept entries of the root, which are those that a scan with these settings leaves out,
/// by owner. Entries are files, directories, symlinks and special files; names of one file count
/// each. What is mounted upon paths of the root is not counted. Nothing changes.
///
/// One count at a time is made, within the limits of the machine; another one meanwhile is answered
/// `busy`. It ends early when an update begins.
pub enum CountOwners {}

/// The most users and groups in one request.
pub const OWNERS_MAX: usize = 1_000;

/// The longest time for which a sub counts, in milliseconds.
pub const COUNT_MS_MAX: u32 = 60_000;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CountOwnersRequest {
    /// The settings of the scan that leaves them out.
    pub scan: ScanSettings,
    /// Numbers of users and groups: together at most [`OWNERS_MAX`].
    pub users: Vec<u32>,
    pub groups: Vec<u32>,
    /// How long the sub counts before it answers with what it has: at most [`COUNT_MS_MAX`].
    pub time_ms: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CountOwnersReply {
    /// How many kept entries each of the users has, in the order of the request.
    pub users: Vec<u32>,
    /// The same for the groups.
    pub groups: Vec<u32>,
    /// How many entries were looked at.
    pub looked_at: u32,
    /// Why there may be more; `None` if everything was counted.
    pub unfinished: Option<String>,
}

impl Method for CountOwners {
    const NAME: &'static str = "Subd.CountOwners";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = CountOwnersRequest;
    type Reply = CountOwnersReply;
}
