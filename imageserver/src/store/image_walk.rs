//! Walks the directories of images, each once, and marks what they need.
//!
//! The server keeps no tree: a directory is read, what it names is marked, and it is forgotten.

use super::error::{AdmissionError, WalkError};
use model::image::ImageName;
use model::object::ObjectId;
use model::tree::encode::references;

use crate::core::collection::needed_objects::Marks;
use crate::store::admission::read_directory;
use crate::store::contract::Objects;

/// What an image needs, beside what its tree names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The image.
    pub image: ImageName,
    /// Its tree.
    pub root: ObjectId,
    /// Its build log.
    pub build_log: Option<ObjectId>,
}

/// Marks what the images need. Walks no directory that was walked before. False if `stop` said so
/// before all were walked.
///
/// # Errors
///
/// [`WalkError`] if a directory is missing or cannot be read: nobody knows what is below it.
pub fn walk(
    store: &dyn Objects,
    marks: &mut Marks,
    starts: &[Start],
    stop: impl Fn() -> bool,
) -> Result<bool, WalkError> {
    for Start { image, root, build_log } in starts {
        if let Some(log) = build_log {
            marks.need(log);
        }
        let failed = |source| WalkError { image: image.clone(), source };
        let mut stack = Vec::new();
        if marks.enter(root) {
            stack.push(*root);
        }
        while let Some(id) = stack.pop() {
            if stop() {
                return Ok(false);
            }
            let encoding = read_directory(store, id).map_err(failed)?;
            let named = references(root.algorithm(), &encoding)
                .map_err(|source| failed(AdmissionError::NoDirectory { id, source }))?;
            for (file, _) in &named.files {
                marks.need(file);
            }
            let before = stack.len();
            stack.extend(named.directories.into_iter().filter(|below| marks.enter(below)));
            store.ahead(&stack[before..]);
        }
    }
    Ok(true)
}
