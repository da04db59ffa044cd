//! `ImageServer.Collect`: removes objects that nothing needs.

use serde::{Deserialize, Serialize};

use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};

/// Removes objects that no image needs and no lease holds, those first that were stored first.
/// Answers when that is done, which may take minutes.
pub enum Collect {}

/// See [`Collect`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectRequest {
    /// Say what could be removed, and remove nothing.
    pub dry_run: bool,
    /// Stop when this much space is free that was not before; 0 for all that can be removed.
    #[serde(with = "model::wide")]
    pub bytes: u64,
}

/// So many objects, and the space that they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Amount {
    /// How many.
    #[serde(with = "model::wide")]
    pub objects: u64,
    /// What they take on the medium, in bytes.
    #[serde(with = "model::wide")]
    pub bytes: u64,
}

impl Amount {
    /// Counts one more object, which takes so many bytes.
    pub fn count(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }
}

/// See [`Collect`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectReply {
    /// How many images were looked through.
    #[serde(with = "model::wide")]
    pub images: u64,
    /// Objects that no image needs, before any was removed.
    pub unneeded: Amount,
    /// Those of them that leases held.
    pub leased: Amount,
    /// Those of them that were removed; with `dry_run`, that would have been.
    pub removed: Amount,
    /// With `dry_run`: for how much longer nothing at all is removed, in seconds.
    #[serde(with = "model::wide")]
    pub held_seconds: u64,
}

impl Method for Collect {
    const NAME: &'static str = "ImageServer.Collect";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Relieves;
    type Request = CollectRequest;
    type Reply = CollectReply;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default().with("dry-run", request.dry_run).with("bytes", request.bytes)
    }
}
