//! The images that were offered last: signed by enough keys at that time, with complete trees.
// tidy: core

use std::sync::Arc;

use model::image::composition::PARTS_MAX;
use model::image::required::RequiredImage;
use model::image::{Content, ImageName};
use model::signing::Signature;

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
        if self.0.len() >= PARTS_MAX {
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

    /// Returns the parts of an image. The error is one that is not there.
    pub fn parts(&self, name: &ImageName) -> Result<Vec<Arc<RequiredImage>>, ImageName> {
        let find = |part: ImageName| {
            let found = self.0.iter().find(|image| *image.name() == part);
            found.cloned().ok_or(part)
        };
        name.parts().map(find).collect()
    }
}
