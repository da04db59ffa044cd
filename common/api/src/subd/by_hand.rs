//! What operators ask of one machine by hand, with `subtool`.

use serde::{Deserialize, Serialize};

use crate::Done;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::escape::ByteText;
use model::path::TreePath;
use model::tree::Time;
use model::when::moment;

/// Starts passes over the tree now, without limits until each has come to its end. The counters of
/// [`super::Poll`] tell when that is.
pub enum ScanNow {}

/// See [`ScanNow`]. A metadata pass is always made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScanNowRequest {
    /// Hash every file, through the page cache.
    pub content: bool,
    /// Hash every file as the medium has it, around the page cache.
    pub media: bool,
}

impl Method for ScanNow {
    const NAME: &'static str = "Subd.ScanNow";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ScanNowRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("content", request.content).with("media", request.media)
    }
}

/// That no update may be made on a machine for a while.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paused {
    /// Until when, by the machine's clock.
    pub until: Time,
    /// Why.
    pub reason: String,
}

/// Refuses every Prepare and Commit until a time, over restarts, whatever a dominator asks for.
/// An earlier pause is replaced.
pub enum Pause {}

impl Method for Pause {
    const NAME: &'static str = "Subd.Pause";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Relieves;
    type Request = Paused;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("until", moment(request.until)).why(&request.reason)
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

/// Gives pieces of regular files of the root.
pub enum GetFiles {}

/// The most pieces in one request.
pub const PIECES_MAX: usize = 256;

/// The most bytes in one piece; a longer one is cut short.
pub const PIECE_BYTES_MAX: u32 = 1 << 20;

/// A piece of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The file.
    pub path: TreePath,
    /// Where the piece starts, in bytes.
    #[serde(with = "model::wide")]
    pub offset: u64,
    /// How long it is, in bytes: at most [`PIECE_BYTES_MAX`].
    pub length: u32,
}

/// See [`GetFiles`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetFilesRequest {
    /// The pieces: at most [`PIECES_MAX`].
    pub pieces: Vec<Piece>,
}

/// What a file held where a piece was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PieceContent {
    /// The length of the whole file, in bytes.
    #[serde(with = "model::wide")]
    pub size_bytes: u64,
    /// When its content was changed: another time between two pieces means another file.
    pub mtime: Time,
    /// The bytes; fewer than asked for at the end of the file.
    pub bytes: ByteText,
}

/// See [`GetFiles`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// Runs the health check of the last image now, and tells how it ended. Nothing is undone.
pub enum CheckHealth {}

/// See [`CheckHealth`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckHealthReply {
    /// How it ended; `None` if the last image names no check.
    pub health: Option<super::Health>,
}

impl Method for CheckHealth {
    const NAME: &'static str = "Subd.CheckHealth";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ();
    type Reply = CheckHealthReply;
}
