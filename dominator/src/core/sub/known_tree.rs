//! The tree of a machine, in as little memory as possible.
//!
//! A machine that has all that it must have shares the directories of its image, except those above
//! its computed files: each machine would hold some of its own. They are made again when needed.
// tidy: core

use std::sync::Arc;

use model::image::computed::{ComputedFile, ComputedFiles, fill_in};
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

    /// Saves memory if the tree is that of `image` with `files`, but for the times at which the
    /// machine got their content.
    pub(super) fn compact(&mut self, image: &Arc<RequiredImage>, files: &Arc<ComputedFiles>) {
        if matches!(self, Self::Filled(known, ..) if Arc::ptr_eq(known, image)) {
            return;
        }
        let (tree, digest) = (self.tree(), self.digest());
        let with_present_time = |file: &ComputedFile| match tree.file(&file.rule.path) {
            Some(present) if present.object == file.object => {
                ComputedFile { since: present.mtime, ..file.clone() }
            }
            _ => file.clone(),
        };
        let present = ComputedFiles::new(files.iter().map(with_present_time).collect());
        let files = if present == **files { Arc::clone(files) } else { Arc::new(present) };
        if filled(image, &files).is_some_and(|tree| tree.digest() == digest) {
            *self = Self::Filled(Arc::clone(image), files, digest);
        }
    }
}

/// Returns the tree of `image` with `files`, whose modification times are those of their content.
pub(super) fn filled(image: &RequiredImage, files: &ComputedFiles) -> Option<Tree> {
    fill_in(&image.tree, files, &Tree::empty(image.tree.algorithm())).ok()
}
