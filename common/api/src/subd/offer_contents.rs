//! `Subd.OfferContents` and `Subd.ForgetIssued`: the signatures of the content of computed files.

use model::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Done;
use crate::access::Access;
use crate::audit::call_details::CallDetails;
use crate::method::{Effect, Method};
use model::path::TreePath;
use model::signing::Signature;

/// Gives a machine the signatures of the content that its computed files get with the next update.
/// They take the place of those that were given before. Only a machine that accepts only signed
/// images needs them, and only for an image that names signers.
pub enum OfferContents {}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OfferContentsRequest {
    /// At most [`model::signing::contents::CONTENTS_SIGNATURES`].
    pub signatures: Vec<Signature>,
}

impl Method for OfferContents {
    const NAME: &'static str = "Subd.OfferContents";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 8 << 20;
    type Request = OfferContentsRequest;
    type Reply = Done;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("signatures", request.signatures.len())
    }
}

/// Forgets when the content that a computed file has was signed, so that the file can get content
/// that was signed before.
pub enum ForgetIssued {}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForgetIssuedRequest {
    pub path: TreePath,
    /// Why, for the audit log.
    pub why: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ForgetIssuedReply {
    /// When it was signed, in seconds since 1970; `None` if nothing was known of the path.
    pub issued: Option<u64>,
}

impl Method for ForgetIssued {
    const NAME: &'static str = "Subd.ForgetIssued";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    type Request = ForgetIssuedRequest;
    type Reply = ForgetIssuedReply;

    fn audit_details(request: &Self::Request) -> CallDetails {
        CallDetails::default().with("path", &request.path).why(&request.why)
    }
}
