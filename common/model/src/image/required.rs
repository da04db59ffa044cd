//! The tree that a machine must have.
//!
//! It is the tree of its image without the machine's own exclusions. Computed files that were not
//! filled in block the plan.

use crate::filter::Patterns;
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
    /// The signatures, unverified, because only machines know which keys they trust.
    pub signatures: Vec<Signature>,
}

impl RequiredImage {
    /// Combines an image and its tree, which the caller has verified to match.
    #[must_use]
    pub fn new(content: Content, tree: Tree) -> Self {
        let scan = content.scan_settings(&tree);
        Self { digest: content.digest(), content, tree, scan, signatures: Vec::new() }
    }

    /// Returns the image with these signatures; without any if they are too many or too long.
    #[must_use]
    pub fn with_signatures(self, signatures: Vec<Signature>) -> Self {
        let signatures = if IMAGE_SIGNATURES.allow(&signatures) { signatures } else { Vec::new() };
        Self { signatures, ..self }
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
