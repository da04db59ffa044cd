//! The tree that a machine must have.
//!
//! It is the tree of its image, less what the machine's own exclusions hide from its scan.
//! Computed files that nobody filled in stay what they are, and make the plan `blocked`.

use crate::filter::Patterns;
use crate::image::{Content, ImageName};
use crate::object::ObjectId;
use crate::scope::{ScanSettings, visible};
use crate::signing::Signature;
use crate::signing::signature::are_bounded;
use crate::tree::{Tree, TreeError};

/// An image with its tree, ready to compare machines with.
#[derive(Clone, Debug)]
pub struct RequiredImage {
    /// The digest of the image's content: what the image is known by.
    pub digest: ObjectId,
    /// Name, filter, triggers.
    pub content: Content,
    /// The tree.
    pub tree: Tree,
    /// How a sub must scan to be compared with it.
    pub scan: ScanSettings,
    /// Who vouches for it: not verified here, because only machines know whom they trust.
    pub signatures: Vec<Signature>,
}

impl RequiredImage {
    /// Puts an image and its tree together; the caller has verified that they belong together.
    #[must_use]
    pub fn new(content: Content, tree: Tree) -> Self {
        let scan = content.scan_settings(&tree);
        Self { digest: content.digest(), content, tree, scan, signatures: Vec::new() }
    }

    /// The same image with these signatures. Too many of them, or too long ones, are none.
    #[must_use]
    pub fn with_signatures(self, signatures: Vec<Signature>) -> Self {
        let signatures = if are_bounded(&signatures) { signatures } else { Vec::new() };
        Self { signatures, ..self }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &ImageName {
        &self.content.name
    }
}

/// The tree that a machine with these `exclusions` must have to comply with `image`.
///
/// # Errors
///
/// What [`visible`] refuses.
pub fn required_tree(image: &RequiredImage, exclusions: &Patterns) -> Result<Tree, TreeError> {
    visible(&image.tree, exclusions)
}
