//! `Subd`: what a machine that trusts only signed images is told before an update.

use serde::{Deserialize, Serialize};

use crate::Done;
use crate::audit::brief::Brief;
use crate::{
    access::Access,
    method::{Effect, Method},
};
use model::image::Content;
use model::signing::Signature;

/// The most sources in one offer.
pub const SOURCES_MAX: usize = 64;

/// Gives the sub the signed part of an image with its signatures, before a Prepare for it. A sub
/// that has trusted keys verifies them and gets the directories of the tree, by digest; it answers
/// when it has them, and `busy` while it gets them: then ask again. One without trusted keys has
/// nothing to do.
pub enum OfferImage {}

/// See [`OfferImage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferImageRequest {
    /// The signed part.
    pub content: Content,
    /// Its signatures: at most [`model::signing::SIGNATURES_MAX`].
    pub signatures: Vec<Signature>,
    /// `host:port` of object servers that have the directories, tried in this order: at most
    /// [`SOURCES_MAX`].
    pub sources: Vec<String>,
}

impl Method for OfferImage {
    const NAME: &'static str = "Subd.OfferImage";
    const ACCESS: Access = Access::Power;
    const EFFECT: Effect = Effect::Changes;
    const REQUEST_BYTES_MAX: usize = 16 << 20;
    type Request = OfferImageRequest;
    type Reply = Done;

    fn brief(request: &Self::Request) -> Brief {
        Brief::default()
            .with("image", &request.content.name)
            .with("digest", request.content.digest())
            .with("signatures", request.signatures.len())
            .with_list("sources", &request.sources)
    }
}
