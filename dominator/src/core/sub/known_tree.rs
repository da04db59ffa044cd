//! The tree of a machine, in as little memory as possible.
//!
//! A machine that has all that it must have shares the directories of its image, except those above
//! its computed files: each machine would hold some of its own. They are made again when needed.
// tidy: core

use std::sync::Arc;

use model::image::computed::{ComputedFiles, fill_in};
use model::image::required::RequiredImage;
use model::object::ObjectId;
use model::tree::Tree;

/// The tree that a machine has.
#[derive(Debug)]
pub(super) enum KnownTree {
    Whole(Tree),
    /// The tree of an image with the content of computed files, and the digest of both.
    Filled(Arc<RequiredImage>, Arc<ComputedFiles>, ObjectId),
}

impl KnownTree {
    pub(super) fn digest(&self) -> ObjectId {
        match self {
            Self::Whole(tree) => tree.digest(),
            Self::Filled(.., digest) => *digest,
        }
    }

    /// Returns the tree.
    pub(super) fn tree(&self) -> Tree {
        match self {
            Self::Whole(tree) => tree.clone(),
            Self::Filled(image, files, _) => {
                filled(image, files).expect("the same tree was made before")
            }
        }
    }

    /// Saves memory if the tree is that of `image` with `files`.
    pub(super) fn compact(&mut self, image: &Arc<RequiredImage>, files: &Arc<ComputedFiles>) {
        let digest = self.digest();
        if filled(image, files).is_some_and(|tree| tree.digest() == digest) {
            *self = Self::Filled(Arc::clone(image), Arc::clone(files), digest);
        }
    }
}

/// Returns the tree of `image` with `files`, whose modification times are those of their content.
fn filled(image: &RequiredImage, files: &ComputedFiles) -> Option<Tree> {
    fill_in(&image.tree, files, &Tree::empty(image.tree.algorithm())).ok()
}
