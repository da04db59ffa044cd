//! `Subd.GetRefusedChanges`: what a machine refuses to change.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::access::Access;
use crate::method::{Effect, Method};
use model::plan::RefusedChange;

/// Returns the changes that the machine refuses now, because they failed or would fail. A plan
/// without them can be carried out. [`super::ScanReport::unreadable`] lists the first of them, so
/// that polls tell when they change.
pub enum GetRefusedChanges {}

/// The most refused changes that a sub remembers.
pub const REFUSED_MAX: usize = 10_000;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GetRefusedChangesReply {
    /// At most one for each path, sorted by path.
    pub changes: Vec<RefusedChange>,
}

impl Method for GetRefusedChanges {
    const NAME: &'static str = "Subd.GetRefusedChanges";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Tells;
    const REPLY_BYTES_MAX: usize = 64 << 20;
    type Request = ();
    type Reply = GetRefusedChangesReply;
}
