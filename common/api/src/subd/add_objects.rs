//! `Subd.AddObjects`: content of computed files, which no image server has.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::file_generator::{BATCH_BYTES, CONTENT_BYTES_MAX, ComputedContent};
use crate::method::{Effect, Method};

/// Stores content in the object cache, for an update that follows. Content whose digest is another
/// one is refused, with all that come after it.
pub enum AddObjects {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AddObjectsRequest {
    /// A request ends after [`BATCH_BYTES`].
    pub contents: Vec<ComputedContent>,
}

impl Method for AddObjects {
    const NAME: &'static str = "Subd.AddObjects";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = BATCH_BYTES + CONTENT_BYTES_MAX + (1 << 20);
    type Request = AddObjectsRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with_list("objects", request.contents.iter().map(|one| one.id))
    }
}
