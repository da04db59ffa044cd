//! The errors of the store, and the faults that callers get for them.

use std::io;
use std::path::PathBuf;

use api::fault::{Fault, FaultCode};
use model::display::{error_chain, rough_duration};
use model::image::{ImageError, ImageName};
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::TreeError;
use tasks::image::ImageTaskError;
use tokio::task::JoinError;

use super::bucket_error::BucketError;
use super::record::RecordError;
use crate::core::image_expiry::ShorterError;

/// How an image has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Somebody deleted the image.
    Deleted,
    /// The image has expired.
    Expired,
}

impl Ending {
    /// Reads the ending from a tombstone.
    pub(crate) fn read(mark: &[u8]) -> Self {
        if mark.starts_with(b"expired") { Self::Expired } else { Self::Deleted }
    }

    /// Returns the ending as a predicate.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Deleted => "was deleted",
            Self::Expired => "has expired",
        }
    }
}

/// Why the store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error("cannot {what}")]
    Io {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("no space left to {what}")]
    Full {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("no space left to {what}: it has {need_bytes} bytes, {free_bytes} bytes are free")]
    TooLittle { what: String, need_bytes: u64, free_bytes: u64 },
    #[error("the content sent as {want} hashes to {got}")]
    Content { want: ObjectId, got: ObjectId },
    #[error(
        "two different contents have the digest {id}: the upload differs from the stored object. \
         The digest algorithm is broken, or the memory of a machine is faulty. Nothing was stored. \
         Keep both contents and report this"
    )]
    Collision { id: ObjectId },
    #[error("image {name} exists already; an image never changes, so add it under another name")]
    Exists { name: ImageName },
    #[error("image {name} {}; a name is never used again, so take another", ending.words())]
    Gone { name: ImageName, ending: Ending },
    #[error("the tags of image {name} are not changed")]
    Tags {
        name: ImageName,
        #[source]
        source: model::image::tags::TagsError,
    },
    #[error("the signatures of image {name} are not changed")]
    Signatures {
        name: ImageName,
        #[source]
        source: model::signing::signature::SignaturesError,
    },
    #[error("the expiry of image {name} is not changed")]
    Shorter {
        name: ImageName,
        #[source]
        source: ShorterError,
    },
    #[error("there is no image {name}")]
    NotFound { name: ImageName },
    #[error("the record of image {name} cannot be used")]
    Damaged {
        name: ImageName,
        #[source]
        source: RecordError,
    },
    #[error("cannot write the record of image {name}")]
    Record {
        name: ImageName,
        #[source]
        source: api::codec::CodecError,
    },
    #[error("another imageserver is running on `{path}`")]
    Locked { path: PathBuf },
    #[error(
        "`{path}` is on another file-system than the directory of objects; objects are renamed \
         from one to the other, so all of the data directory must be on one"
    )]
    TwoFileSystems { path: PathBuf },
    #[error("`{path}` {what}: give this server another --data directory")]
    OfTheOtherKind { path: PathBuf, what: &'static str },
    #[error("cannot {what}")]
    Bucket {
        what: String,
        #[source]
        source: BucketError,
    },
    #[error("the bucket did not answer in time to {what}")]
    Slow { what: String },
    #[error("`{path}` has no aws_access_key_id and aws_secret_access_key of the profile {profile}")]
    Credentials { path: PathBuf, profile: String },
    #[error("image {name} was changed through another server at the same time: try again")]
    Raced { name: ImageName },
    #[error("the directories were changed through another server at the same time: try again")]
    RacedDirectories,
    #[error(
        "the name {name} is too long for a bucket, where each byte except letters, digits, `.`, \
         `_` and `-` counts threefold"
    )]
    LongName { name: ImageName },
    #[error(
        "the server {server} is removing object {id} and has not finished: try again; if that \
         server was killed, start it again, or wait for half an hour"
    )]
    Removing { id: ObjectId, server: String },
    #[error("the lease of the collector was not renewed in time: nothing more is removed")]
    GcLeaseLost,
    #[error("adding the image took so long that its objects may have been removed: add it again")]
    TooLate,
    #[error(
        "the disk failed to write objects earlier; check it, then restart this server, which \
         checks each object before it serves it"
    )]
    Unsynced,
}

/// Converts an I/O error into a [`StoreError`]; `what` names the operation that failed.
pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> StoreError {
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            StoreError::Full { what: what.into(), source }
        }
        _ => StoreError::Io { what: what.into(), source },
    }
}

/// Why a tree is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdmissionError {
    #[error("directory {id} of the tree is not on this server ({more} more are missing)")]
    MissingDirectory { id: ObjectId, more: usize },
    #[error("object {id} of {path} is not on this server ({more} more are missing)")]
    MissingObject { path: TreePath, id: ObjectId, more: usize },
    #[error("{path} has {want} bytes in the tree, but its object {id} has {got}")]
    WrongSize { path: TreePath, id: ObjectId, want: u64, got: u64 },
    #[error("{what} is larger than {limit} bytes, which is more than any machine has")]
    TooLarge { what: String, limit: u64 },
    #[error("object {id}, which the tree names as a directory, is not a valid directory")]
    NoDirectory {
        id: ObjectId,
        #[source]
        source: TreeError,
    },
    #[error("invalid tree {root}")]
    Tree {
        root: ObjectId,
        #[source]
        source: TreeError,
    },
    #[error("the image cannot be added")]
    Image {
        #[source]
        source: ImageError,
    },
    #[error("the daemon tasks of the image cannot run")]
    Task {
        #[source]
        source: ImageTaskError,
    },
    #[error("the resources of the image cannot be provisioned")]
    Resources {
        #[from]
        source: provisioning::image::ImageError,
    },
    #[error("cannot look through the image")]
    Store {
        #[source]
        source: StoreError,
    },
}

impl From<StoreError> for AdmissionError {
    fn from(source: StoreError) -> Self {
        Self::Store { source }
    }
}

/// Why an image could not be walked.
#[derive(Debug, thiserror::Error)]
#[error("cannot look through image {image}")]
pub struct WalkError {
    pub image: ImageName,
    #[source]
    pub source: AdmissionError,
}

/// Why a collection failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectError {
    #[error("a collection is running: try again when it has ended")]
    Busy,
    #[error(
        "the server {server} is collecting, or was stopped during a collection: try again later"
    )]
    Elsewhere { server: String },
    #[error(
        "nothing is collected for another {}: until then, objects that were uploaded or leased \
         before the restart of the server may still be added to an image",
        rough_duration(*seconds)
    )]
    Held { seconds: u64 },
    #[error(
        "nothing is collected, because the record of image {image} is damaged and its objects are \
         unknown: restore the record, or delete the image"
    )]
    Damaged { image: ImageName },
    #[error(
        "nothing is collected, because the needs of an image are unknown: upload its missing \
         objects, or delete it"
    )]
    Walk {
        #[source]
        source: WalkError,
    },
    #[error("the image server is stopping: the collection was interrupted")]
    Stopped,
    #[error("the collection failed")]
    Store {
        #[source]
        source: StoreError,
    },
}

impl From<StoreError> for CollectError {
    fn from(source: StoreError) -> Self {
        Self::Store { source }
    }
}

/// Returns the result of a task. A panic of the task fails only this call.
pub(crate) fn joined<T>(done: Result<T, JoinError>) -> Result<T, Fault> {
    done.map_err(|error| Fault::new(FaultCode::Internal, format!("the task failed: {error}")))
}

/// Converts an error of the store into the fault that the caller gets.
pub(crate) fn fault_of_store(error: &StoreError) -> Fault {
    let code = match error {
        StoreError::Full { .. } | StoreError::TooLittle { .. } => FaultCode::NoSpace,
        StoreError::Content { .. }
        | StoreError::Shorter { .. }
        | StoreError::Tags { .. }
        | StoreError::Signatures { .. } => FaultCode::BadRequest,
        StoreError::Exists { .. } => FaultCode::Exists,
        StoreError::Gone { .. } => FaultCode::Gone,
        StoreError::NotFound { .. } => FaultCode::NotFound,
        StoreError::Unsynced
        | StoreError::Slow { .. }
        | StoreError::Removing { .. }
        | StoreError::GcLeaseLost
        | StoreError::TooLate => FaultCode::Unavailable,
        StoreError::Raced { .. } | StoreError::RacedDirectories => FaultCode::Busy,
        StoreError::LongName { .. } => FaultCode::BadRequest,
        StoreError::Bucket { source, .. } => match source {
            BucketError::Unreachable { .. } => FaultCode::Unavailable,
            BucketError::Full { .. } => FaultCode::NoSpace,
            _ => FaultCode::Internal,
        },
        _ => FaultCode::Internal,
    };
    let message = error_chain(error);
    if matches!(code, FaultCode::Internal | FaultCode::NoSpace | FaultCode::Unavailable) {
        tracing::error!("{message}");
    }
    Fault::new(code, message)
}
