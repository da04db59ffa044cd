//! Methods for operators on one machine, for `subtool`.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::audit::call_details::CallDetails;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::display::utc;
use model::escape::ByteText;
use model::path::TreePath;
use model::tree::Time;

/// Starts passes over the tree at once, without limits until each is complete. The counters of
/// [`super::Poll`] show when that is.
pub enum ScanNow {}

/// A metadata pass is always made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ScanNowRequest {
    /// Hashes every file, through the page cache.
    pub content: bool,
    /// Hashes every file as the medium has it, around the page cache.
    pub media: bool,
}

impl Method for ScanNow {
    const NAME: &'static str = "Subd.ScanNow";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ScanNowRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("content", request.content).with("media", request.media)
    }
}

/// A pause of updates on the machine itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Paused {
    /// When it ends, by the machine's clock.
    pub until: Time,
    pub reason: String,
}

/// Refuses every Prepare and Commit until a time, also across restarts. A new pause replaces an
/// earlier one.
pub enum Pause {}

impl Method for Pause {
    const NAME: &'static str = "Subd.Pause";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Relieves;
    type Request = Paused;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("until", utc(request.until)).why(&request.reason)
    }
}

/// Ends a pause.
pub enum Resume {}

impl Method for Resume {
    const NAME: &'static str = "Subd.Resume";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ();
    type Reply = Done;
}

/// Returns pieces of regular files of the root.
pub enum GetFiles {}

/// The most pieces in one request.
pub const PIECES_MAX: usize = 256;

/// The most bytes in one piece; a longer one is cut.
pub const PIECE_BYTES_MAX: u32 = 1 << 20;

/// A piece of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Piece {
    pub path: TreePath,
    /// The offset of the piece, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub offset: u64,
    /// Its length, in bytes: at most [`PIECE_BYTES_MAX`].
    pub length: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetFilesRequest {
    /// The pieces: at most [`PIECES_MAX`].
    pub pieces: Vec<Piece>,
}

/// The content of a piece.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PieceContent {
    /// The length of the whole file, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    pub size_bytes: u64,
    /// The modification time. If it differs between two pieces the file has changed.
    pub mtime: Time,
    /// The bytes; fewer than asked for at the end of the file.
    pub bytes: ByteText,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetFilesReply {
    /// For each piece, in the order of the request, its content or why it cannot be read. The
    /// server may stop early to keep the reply small; ask again for the rest.
    pub pieces: Vec<Result<PieceContent, String>>,
}

impl Method for GetFiles {
    const NAME: &'static str = "Subd.GetFiles";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = GetFilesRequest;
    type Reply = GetFilesReply;
}

/// Runs the health check of the last image, and returns the result. Nothing is undone.
pub enum CheckHealth {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CheckHealthReply {
    /// The result; `None` if the last image has no health check.
    pub health: Option<super::Health>,
}

impl Method for CheckHealth {
    const NAME: &'static str = "Subd.CheckHealth";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ();
    type Reply = CheckHealthReply;
}

/// Runs the triggers that failed again. Returns at once: [`super::Poll`] shows an update while they
/// run, and then those that fail still. A service that could not be stopped is stopped and started;
/// a reboot is requested if the machine still waits for it.
pub enum RetryTriggers {}

impl Method for RetryTriggers {
    const NAME: &'static str = "Subd.RetryTriggers";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ();
    type Reply = Done;
}
