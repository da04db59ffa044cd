//! Gives a machine the signed part of its image with the signatures, before an update is staged.
//!
//! Which machines take only signed images is not known here: each decides by its own configuration,
//! and one that takes everything has nothing to do. So whatever is signed is offered, once to each
//! start of a sub, and again when there are other signatures.
// tidy: core

use core::ops::ControlFlow::Continue;
use std::sync::Arc;

use api::dominator::Status;
use api::subd::{OfferImageRequest, SOURCES_MAX};
use model::signing::Signature;

use super::{Call, CallPurpose, Context, Effect, ImageState, Now, Sub, View};
use crate::core::sub::next_effects::Check;
use model::image::required::RequiredImage;

/// What was offered, and to which start of the sub.
#[derive(Clone, Debug)]
pub(super) struct SignatureOffer {
    instance: u64,
    image: Arc<RequiredImage>,
}

impl SignatureOffer {
    fn is_of(&self, instance: u64, image: &RequiredImage) -> bool {
        self.instance == instance
            && self.image.digest == image.digest
            && self.image.signatures == image.signatures
    }
}

/// The signatures of an image that is at hand.
pub(super) fn signatures_of(image: &ImageState) -> &[Signature] {
    match image {
        ImageState::Ready(image) => &image.signatures,
        ImageState::Undefined | ImageState::Missing(_) => &[],
    }
}

impl Sub {
    /// The machine has seen the signatures of the image, if there are any.
    pub(super) fn signatures_offered(
        &mut self,
        view: &View,
        image: &Arc<RequiredImage>,
        now: Now,
        context: &Context<'_>,
        effects: &mut Vec<Effect>,
    ) -> Check<()> {
        let instance = view.report.version.instance;
        let is_known = |offer: &SignatureOffer| offer.is_of(instance, image);
        if image.signatures.is_empty() || self.offered.as_ref().is_some_and(is_known) {
            return Continue(());
        }
        let request = OfferImageRequest {
            content: image.content.clone(),
            signatures: image.signatures.clone(),
            sources: context.sources.iter().take(SOURCES_MAX).cloned().collect(),
        };
        let call = Call::Offer(Box::new(request));
        if self.call(now, CallPurpose::OfferSignatures, call, effects) {
            self.offering = Some(SignatureOffer { instance, image: Arc::clone(image) });
        }
        let detail = format!("is shown who has signed {}", image.name());
        self.unless_braked(Status::Preparing, detail)
    }

    /// The machine has taken the offer, or has no use for any.
    pub(super) fn offer_taken(&mut self) {
        self.offered = self.offering.take();
    }
}
