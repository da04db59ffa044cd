//! The images that were offered last: signed by enough keys at that time, with complete trees.
// tidy: core

use std::sync::Arc;

use model::image::composition::{PARTS_MAX, nothing};
use model::image::required::RequiredImage;
use model::image::{Content, ImageName};
use model::scope::{Coverage, ScanSettings};
use model::signing::Signature;

/// The most of them: the parts of an image, and bundles that leave with it.
const OFFERED_MAX: usize = 2 * PARTS_MAX;

/// One image with a filter, and some bundles; the one that was offered last comes last.
#[derive(Debug, Default)]
pub struct OfferedImages(Vec<Arc<RequiredImage>>);

impl OfferedImages {
    /// Adds an image. One with a filter replaces the one that is there, because trees of whole
    /// systems take memory.
    pub fn insert(&mut self, image: RequiredImage) {
        let is_full = !image.content.is_sparse();
        let is_replaced = |other: &RequiredImage| {
            other.name() == image.name() || (is_full && !other.content.is_sparse())
        };
        self.0.retain(|other| !is_replaced(other));
        if self.0.len() >= OFFERED_MAX {
            self.0.remove(0);
        }
        self.0.push(Arc::new(image));
    }

    /// Replaces the signatures of an image; false if it is not there.
    pub fn sign(&mut self, content: &Content, signatures: &[Signature]) -> bool {
        let Some(image) = self.0.iter().find(|image| image.content == *content) else {
            return false;
        };
        self.insert(RequiredImage::clone(image).with_signatures(signatures.to_vec()));
        true
    }

    /// Returns the bundles that leave with an update to an image without a base: those that the
    /// machine `has`, and whose paths are all scanned with these `settings`. Of others nothing is
    /// removed.
    pub fn leaving(
        &self,
        image: &RequiredImage,
        settings: &ScanSettings,
        has: impl Fn(&Content) -> bool,
    ) -> Vec<Arc<RequiredImage>> {
        let (Coverage::Paths(paths), true) = (&settings.coverage, image.name().is_without_base())
        else {
            return Vec::new();
        };
        let leaves = |one: &&Arc<RequiredImage>| {
            let is_part = image.parts.iter().any(|part| part.digest == one.digest);
            let is_scanned = || one.tree.nodes().all(|(path, _)| paths.contains(&path));
            one.content.is_sparse() && !is_part && has(&one.content) && is_scanned()
        };
        self.0.iter().filter(leaves).cloned().collect()
    }

    /// Returns the parts of an image. The error is one that is not there.
    pub fn parts(&self, name: &ImageName) -> Result<Vec<Arc<RequiredImage>>, ImageName> {
        let find = |part: ImageName| {
            if part.is_nothing() {
                return Ok(nothing());
            }
            let found = self.0.iter().find(|image| *image.name() == part);
            found.cloned().ok_or(part)
        };
        name.parts().map(find).collect()
    }
}
