//! What the store could not do.

use std::io;
use std::path::PathBuf;

use api::fault::{Fault, FaultCode};
use model::image::{ImageError, ImageName};
use model::object::ObjectId;
use model::path::TreePath;
use model::report::report;
use model::tree::TreeError;
use model::when::lasting;
use tokio::task::JoinError;

use super::bucket_error::BucketError;
use super::record::RecordError;
use crate::core::image_expiry::ShorterError;

/// What became of an image whose name was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It was deleted.
    Deleted,
    /// Its time had come.
    Expired,
}

impl Ending {
    /// By the mark that was left.
    pub(crate) fn of(mark: &[u8]) -> Self {
        if mark.starts_with(b"expired") { Self::Expired } else { Self::Deleted }
    }

    /// What became of the image, as a predicate.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Deleted => "was deleted",
            Self::Expired => "has expired",
        }
    }
}

/// What the store could not do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file-system failed.
    #[error("cannot {what}")]
    Io {
        /// What was to be done.
        what: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The file-system is full.
    #[error("no space left to {what}")]
    Full {
        /// What was to be done.
        what: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// More is to be stored than the file-system has free.
    #[error("no space left to {what}: it has {need_bytes} bytes, {free_bytes} bytes are free")]
    TooLittle {
        /// What was to be done.
        what: String,
        /// How much was to be stored.
        need_bytes: u64,
        /// How much there is.
        free_bytes: u64,
    },
    /// Content does not hash to the id that it was sent under.
    #[error("the content sent as {want} hashes to {got}")]
    Content {
        /// What was announced.
        want: ObjectId,
        /// What came.
        got: ObjectId,
    },
    /// What is sent has the digest of an object that is here, and is not the same.
    #[error(
        "two contents have the digest {id}: what came is not what is here, byte by byte. The \
         digest is broken, or the memory of a machine is: nothing was stored. Keep both, and tell \
         those who make this program"
    )]
    Collision {
        /// The digest.
        id: ObjectId,
    },
    /// An image of that name is there.
    #[error("image {name} exists already; an image never changes, so add it under another name")]
    Exists {
        /// The name.
        name: ImageName,
    },
    /// An image of that name was there.
    #[error("image {name} {}; a name is never used again, so take another", ending.words())]
    Gone {
        /// The name.
        name: ImageName,
        /// What became of it.
        ending: Ending,
    },
    /// The tags of an image are not changed.
    #[error("the tags of image {name} are not changed")]
    Tags {
        /// The name.
        name: ImageName,
        /// Why.
        #[source]
        source: model::image::tags::TagsError,
    },
    /// The signatures of an image are not changed.
    #[error("the signatures of image {name} are not changed")]
    Signatures {
        /// The name.
        name: ImageName,
        /// Why.
        #[source]
        source: model::signing::signature::SignaturesError,
    },
    /// The expiry of an image is not changed.
    #[error("the expiry of image {name} is not changed")]
    Shorter {
        /// The name.
        name: ImageName,
        /// Why.
        #[source]
        source: ShorterError,
    },
    /// There is no image of that name.
    #[error("there is no image {name}")]
    NotFound {
        /// The name.
        name: ImageName,
    },
    /// The record of an image cannot be used.
    #[error("the record of image {name} cannot be used")]
    Damaged {
        /// The name.
        name: ImageName,
        /// What is wrong with it.
        #[source]
        source: RecordError,
    },
    /// A record cannot be written as JSON.
    #[error("cannot write the record of image {name}")]
    Record {
        /// The name.
        name: ImageName,
        /// What the encoder said.
        #[source]
        source: api::codec::CodecError,
    },
    /// Another server has the data directory.
    #[error("another imageserver is running on `{path}`")]
    Locked {
        /// The data directory.
        path: PathBuf,
    },
    /// The parts of the data directory are on several file-systems.
    #[error(
        "`{path}` is on another file-system than the directory of objects; objects are renamed \
         from one to the other, so all of the data directory must be on one"
    )]
    TwoFileSystems {
        /// The part that is elsewhere.
        path: PathBuf,
    },
    /// The data directory belongs to a server that keeps its store elsewhere, or the reverse.
    #[error("`{path}` {what}: give this server another --data directory")]
    OfTheOtherKind {
        /// The data directory.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// The bucket did not do what it was asked.
    #[error("cannot {what}")]
    Bucket {
        /// What was to be done.
        what: String,
        /// Why it was not.
        #[source]
        source: BucketError,
    },
    /// The bucket did not answer in time.
    #[error("the bucket did not answer in time to {what}")]
    Slow {
        /// What was to be done.
        what: String,
    },
    /// There are no credentials in the file that should have them.
    #[error("`{path}` has no aws_access_key_id and aws_secret_access_key of the profile {profile}")]
    Credentials {
        /// The file.
        path: PathBuf,
        /// The profile.
        profile: String,
    },
    /// Another server has changed the image at the same time.
    #[error("image {name} was changed through another server at the same time: try again")]
    Raced {
        /// The name.
        name: ImageName,
    },
    /// Another server has changed the directories at the same time.
    #[error("the directories were changed through another server at the same time: try again")]
    RacedDirectories,
    /// An image cannot have so long a name in a bucket.
    #[error(
        "the name {name} is too long for a bucket, where all but letters and digits counts \
         threefold"
    )]
    LongName {
        /// The name.
        name: ImageName,
    },
    /// An object is being removed, which takes too long.
    #[error(
        "object {id} is being removed by the server {server}, which has not ended that: try again; \
         if it was killed, start it again, or wait for half an hour"
    )]
    Removing {
        /// The object.
        id: ObjectId,
        /// The name of the server in the bucket.
        server: String,
    },
    /// Another server may collect by now.
    #[error("the turn to collect was not renewed in time: nothing more is removed")]
    TurnLost,
    /// An image took too long to be added.
    #[error("adding the image took so long that its objects may have been removed: add it again")]
    TooLate,
    /// A write-back failed earlier, so nothing can be known to be on the medium.
    #[error(
        "the disk failed to write objects earlier; check it, then restart this server, which \
         checks each object before it serves it"
    )]
    Unsynced,
}

/// Tells a full file-system from other failures to `what`.
pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> StoreError {
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            StoreError::Full { what: what.into(), source }
        }
        _ => StoreError::Io { what: what.into(), source },
    }
}

/// Why an image is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdmissionError {
    /// A directory is not in the store.
    #[error("directory {id} of the tree is not on this server ({more} more are missing)")]
    MissingDirectory {
        /// The first one.
        id: ObjectId,
        /// How many others are known to be missing.
        more: usize,
    },
    /// The content of a file is not in the store.
    #[error("object {id} of {path} is not on this server ({more} more are missing)")]
    MissingObject {
        /// The first path that needs it.
        path: TreePath,
        /// The first one.
        id: ObjectId,
        /// How many other objects are missing.
        more: usize,
    },
    /// The tree has another length for a file than its content.
    #[error("{path} has {want} bytes in the tree, but its object {id} has {got}")]
    WrongSize {
        /// The path.
        path: TreePath,
        /// The object.
        id: ObjectId,
        /// What the tree says.
        want: u64,
        /// What the object has.
        got: u64,
    },
    /// A directory or the tree is larger than a server takes.
    #[error("{what} is larger than {limit} bytes, which is more than any machine has")]
    TooLarge {
        /// What is too large.
        what: String,
        /// What is accepted.
        limit: u64,
    },
    /// An object that is named as a directory is none.
    #[error("object {id}, which the tree names as a directory, is none")]
    NoDirectory {
        /// The object.
        id: ObjectId,
        /// What is wrong with it.
        #[source]
        source: TreeError,
    },
    /// The directories make no tree.
    #[error("the tree {root} is not one")]
    Tree {
        /// Its digest.
        root: ObjectId,
        /// What is wrong with it.
        #[source]
        source: TreeError,
    },
    /// The image breaks a rule.
    #[error("the image cannot be added")]
    Image {
        /// Which rule.
        #[source]
        source: ImageError,
    },
    /// The store failed.
    #[error("cannot look through the image")]
    Store {
        /// What it said.
        #[source]
        source: StoreError,
    },
}

impl From<StoreError> for AdmissionError {
    fn from(source: StoreError) -> Self {
        Self::Store { source }
    }
}

/// Why it is not known what an image needs.
#[derive(Debug, thiserror::Error)]
#[error("cannot look through image {image}")]
pub struct WalkError {
    /// The image.
    pub image: ImageName,
    /// Which directory, and what is wrong with it.
    #[source]
    pub source: AdmissionError,
}

/// Why nothing, or not all, was collected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectError {
    /// One is under way.
    #[error("a collection is under way: try again when it has ended")]
    Busy,
    /// Another server collects.
    #[error("the server {server} collects, or has stopped in the middle of it: try again later")]
    Elsewhere {
        /// Its name in the bucket.
        server: String,
    },
    /// Leases that were given before the start may still hold.
    #[error(
        "nothing is collected for another {}: what was uploaded, or found to be there, before the \
         server was restarted may be on its way into an image until then",
        lasting(*seconds)
    )]
    Held {
        /// For how much longer.
        seconds: u64,
    },
    /// The record of an image cannot be used, so nobody knows what it needs.
    #[error(
        "nothing is collected, because the record of image {image} is damaged and nobody knows \
         what it needs: put the record back, or delete the image"
    )]
    Damaged {
        /// The image.
        image: ImageName,
    },
    /// An image cannot be walked.
    #[error(
        "nothing is collected, because nobody knows all that an image needs: upload what it \
         lacks, or delete it"
    )]
    Walk {
        /// Which image, and what is wrong with it.
        #[source]
        source: WalkError,
    },
    /// The server stops.
    #[error("the image server stops: the collection was broken off")]
    Stopped,
    /// The store failed.
    #[error("the collection was broken off")]
    Store {
        /// What it said.
        #[source]
        source: StoreError,
    },
}

impl From<StoreError> for CollectError {
    fn from(source: StoreError) -> Self {
        Self::Store { source }
    }
}

/// What a thread gave back; that it panicked fails the call only.
pub(crate) fn joined<T>(done: Result<T, JoinError>) -> Result<T, Fault> {
    done.map_err(|error| Fault::new(FaultCode::Internal, format!("the work was lost: {error}")))
}

/// What a caller is told of a failure of the store.
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
        | StoreError::TurnLost
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
    let message = report(error);
    if matches!(code, FaultCode::Internal | FaultCode::NoSpace | FaultCode::Unavailable) {
        tracing::error!("{message}");
    }
    Fault::new(code, message)
}
