//! The tree that a machine must have.
//!
//! It is the tree of its image without the machine's own exclusions. Computed files that were not
//! filled in block the plan.

use std::sync::Arc;

use crate::filter::Patterns;
use crate::image::composition::LeftOut;
use crate::image::{Content, ImageName};
use crate::object::ObjectId;
use crate::scope::{ScanSettings, visible};
use crate::signing::Signature;
use crate::signing::signature::IMAGE_SIGNATURES;
use crate::tree::{Tree, TreeError};

/// An image with its tree, ready to compare machines with.
#[derive(Clone, Debug)]
pub struct RequiredImage {
    /// The digest of the image's content, which identifies the image.
    pub digest: ObjectId,
    /// Name, filter, triggers.
    pub content: Content,
    pub tree: Tree,
    /// How a sub must scan to be compared with it.
    pub scan: ScanSettings,
    /// The signatures, unverified, because only machines know which keys they trust. A composed
    /// image has none of its own.
    pub signatures: Vec<Signature>,
    /// What it is composed of, in the order of its name; empty if it is not composed.
    pub parts: Vec<Arc<RequiredImage>>,
    /// The parts that do not fit, and are not in its tree.
    pub left_out: Vec<LeftOut>,
    /// Bundles that are not part of it, whose files go with the update to it.
    pub leaving: Vec<Arc<RequiredImage>>,
}

impl RequiredImage {
    /// Combines an image and its tree, which the caller has verified to match.
    #[must_use]
    pub fn new(content: Content, tree: Tree) -> Self {
        let scan = content.scan_settings(&tree);
        Self {
            digest: content.digest(),
            content,
            tree,
            scan,
            signatures: Vec::new(),
            parts: Vec::new(),
            left_out: Vec::new(),
            leaving: Vec::new(),
        }
    }

    /// Returns the images that it is composed of; itself if it is not composed.
    pub fn signed_parts(&self) -> impl Iterator<Item = &Self> {
        let itself = self.parts.is_empty().then_some(self);
        itself.into_iter().chain(self.parts.iter().map(|part| &**part))
    }

    /// True if `other` has the same signatures.
    #[must_use]
    pub fn is_signed_as(&self, other: &Self) -> bool {
        let own = self.signed_parts().map(|part| &part.signatures);
        own.eq(other.signed_parts().map(|part| &part.signatures))
    }

    /// Returns the image with these signatures; without any if they are too many or too long.
    #[must_use]
    pub fn with_signatures(self, signatures: Vec<Signature>) -> Self {
        let signatures = if IMAGE_SIGNATURES.allow(&signatures) { signatures } else { Vec::new() };
        Self { signatures, ..self }
    }

    /// Returns the images that are in the tree: those of [`RequiredImage::signed_parts`] that are
    /// not left out.
    pub fn used_parts(&self) -> impl Iterator<Item = &Self> {
        let parts = self.signed_parts().enumerate();
        parts.filter(|(index, _)| self.is_used(*index)).map(|(_, part)| part)
    }

    /// True if the part at this place is in the tree.
    #[must_use]
    pub fn is_used(&self, index: usize) -> bool {
        self.left_out.iter().all(|left_out| left_out.index != index)
    }

    #[must_use]
    pub fn name(&self) -> &ImageName {
        &self.content.name
    }
}

/// Returns the tree that a machine with these `exclusions` must have to be synced with `image`.
pub fn required_tree(image: &RequiredImage, exclusions: &Patterns) -> Result<Tree, TreeError> {
    visible(&image.tree, exclusions)
}
