//! Puts into the store what came from the master: each step is done whole or not at all.

use std::sync::PoisonError;

use api::image_server::replication::Ended;
use model::image::{Image, ImageName, tags};
use model::object::ObjectId;

use crate::store::record::Record;
use crate::store::{Store, error::StoreError};
use crate::store::{admission::admit, error::AdmissionError};

/// Why an image was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArrivalError {
    /// Something that it needs is missing here, or it breaks a rule.
    #[error("cannot take image {name}")]
    Admission {
        /// Its name.
        name: ImageName,
        /// What is missing or wrong.
        #[source]
        source: AdmissionError,
    },
    /// Its build log is missing here.
    #[error("cannot take image {name}: its build log {log} is missing")]
    BuildLog {
        /// The name.
        name: ImageName,
        /// The object.
        log: ObjectId,
    },
    /// Its tags are not allowed.
    #[error("cannot take image {name}")]
    Tags {
        /// Its name.
        name: ImageName,
        /// What is wrong with them.
        #[source]
        source: tags::TagsError,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Adds an image with the notes that it has, when all that it needs is here. False if it is here
/// already.
///
/// # Errors
///
/// [`ArrivalError`].
pub fn receive(store: &Store, image: Image) -> Result<bool, ArrivalError> {
    let name = image.content.name.clone();
    let digest = image.content.digest();
    verify(&image)?;
    // From here on until the image is visible no object is removed.
    let _adding = store.adding.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(log) = image.notes.build_log
        && store.objects.held(&log)?.is_none()
    {
        return Err(ArrivalError::BuildLog { name, log });
    }
    let admitted = admit(&*store.objects, &image.content)
        .map_err(|source| ArrivalError::Admission { name: name.clone(), source })?;
    // All objects must be on the medium before an image that needs them is seen.
    store.objects.sync()?;
    match store.images.add(&Record { image, totals: admitted.totals }) {
        Err(StoreError::Exists { .. }) if store.images.digest(&name) == Some(digest) => Ok(false),
        other => Ok(other.map(|()| true)?),
    }
}

/// Gives an image the notes that it has on the master. False if there is another image here.
///
/// # Errors
///
/// [`ArrivalError`].
pub fn renote(store: &Store, image: &Image) -> Result<bool, ArrivalError> {
    let Image { content, notes } = image;
    verify(image)?;
    let _adding = store.adding.read().unwrap_or_else(PoisonError::into_inner);
    if let Some(log) = notes.build_log
        && store.objects.held(&log)?.is_none()
    {
        return Err(ArrivalError::BuildLog { name: content.name.clone(), log });
    }
    Ok(store.images.renote(&content.name, content.digest(), notes)?)
}

fn verify(image: &Image) -> Result<(), ArrivalError> {
    tags::verify(&image.notes.tags)
        .map_err(|source| ArrivalError::Tags { name: image.content.name.clone(), source })
}

/// Ends the image of that digest, as `master` says. False if there is another image here.
///
/// # Errors
///
/// What the store says.
pub fn end(
    store: &Store,
    name: &ImageName,
    digest: ObjectId,
    how: Ended,
    master: &str,
) -> Result<bool, StoreError> {
    store.images.end(name, digest, &mark(how, master))
}

/// Keeps that an image which never was here has ended.
///
/// # Errors
///
/// What the store says.
pub fn mark_ended(
    store: &Store,
    name: &ImageName,
    digest: Option<ObjectId>,
    how: Ended,
    master: &str,
) -> Result<(), StoreError> {
    store.images.mark(name, digest, &mark(how, master))
}

fn mark(how: Ended, master: &str) -> String {
    let how = how.word();
    format!("{how} on {master}, which this server followed; the name is never used again\n")
}
