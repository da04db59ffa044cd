//! Makes the changes of the master in the store, each step completely or not at all.

use std::sync::PoisonError;

use api::image_server::replication::ImageEnd;
use model::image::{Image, ImageName, tags};
use model::object::ObjectId;

use crate::store::Store;
use crate::store::error::{AdmissionError, StoreError};
use crate::store::image_trees::check_tree;
use crate::store::record::Record;

/// Why an image of the master was not added.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    #[error("cannot take image {name}")]
    Admission {
        name: ImageName,
        #[source]
        source: AdmissionError,
    },
    #[error("cannot take image {name}: its build log {log} is missing")]
    BuildLog { name: ImageName, log: ObjectId },
    #[error("cannot take image {name}")]
    Tags {
        name: ImageName,
        #[source]
        source: tags::TagsError,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Adds an image of the master with its notes. All its objects must be here. Returns false if the
/// image is here already.
pub fn receive(store: &Store, image: Image) -> Result<bool, ReceiveError> {
    let name = image.content.name.clone();
    let digest = image.content.digest();
    verify(&image)?;
    // From here on until the image is visible no object is removed.
    let _adding = store.adding.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(log) = image.notes.build_log
        && store.objects.held(&log)?.is_none()
    {
        return Err(ReceiveError::BuildLog { name, log });
    }
    let checked = check_tree(&*store.objects, &image.content)
        .map_err(|source| ReceiveError::Admission { name: name.clone(), source })?;
    // All objects must be on the medium before an image that needs them is visible.
    store.objects.sync()?;
    match store.add_image(&Record { image, totals: checked.totals }) {
        Err(StoreError::Exists { .. }) if store.images.digest(&name) == Some(digest) => Ok(false),
        other => Ok(other.map(|()| true)?),
    }
}

/// Replaces the notes of an image by those on the master. Returns false if the local image differs.
pub fn update_notes(store: &Store, image: &Image) -> Result<bool, ReceiveError> {
    let Image { content, notes } = image;
    verify(image)?;
    let _adding = store.adding.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(log) = notes.build_log
        && store.objects.held(&log)?.is_none()
    {
        return Err(ReceiveError::BuildLog { name: content.name.clone(), log });
    }
    Ok(store.images.replace_notes(&content.name, content.digest(), notes)?)
}

fn verify(image: &Image) -> Result<(), ReceiveError> {
    tags::verify(&image.notes.tags)
        .map_err(|source| ReceiveError::Tags { name: image.content.name.clone(), source })
}

/// Ends the image of that digest, as on `master`. Returns false if the local image differs.
pub fn end(
    store: &Store,
    name: &ImageName,
    digest: ObjectId,
    how: ImageEnd,
    master: &str,
) -> Result<bool, StoreError> {
    store.images.end(name, digest, &tombstone(how, master))
}

/// Records that an image has ended that never was here.
pub fn add_tombstone(
    store: &Store,
    name: &ImageName,
    digest: Option<ObjectId>,
    how: ImageEnd,
    master: &str,
) -> Result<(), StoreError> {
    store.images.add_tombstone(name, digest, &tombstone(how, master))
}

fn tombstone(how: ImageEnd, master: &str) -> String {
    let how = how.word();
    format!("{how} on {master}, which this server followed; the name is never used again\n")
}
