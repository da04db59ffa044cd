//! The store: a directory that holds objects by digest and images by name.
//!
//! [`objects`] keeps content, [`images`] keeps records; [`layout`] says where. One server at a
//! time has a data directory: it holds a lock for as long as it lives. What the rest of the server
//! knows of all that is in [`contract`], so that a store may lie on something else than a disk.
//!
//! # Invariants
//!
//! * A file under an object's name has passed through its digest. What a crash or a failing disk
//!   makes of it later is found before it is served.
//! * When an image is visible, all that it needs is on the medium.
//! * A name that was deleted is never used again.

pub mod bucket;
pub mod comparing;
pub mod content;
pub mod contract;
pub mod directories;
pub mod holding;
pub mod holdings;
pub mod images;
pub mod layout;
pub mod leasing;
pub mod needs;
pub mod objects;
pub mod packed;
pub mod reading;
pub mod receive;
pub mod record;
pub mod records;
pub mod removal;
pub mod small;
mod unsynced;
mod verified;
pub mod wounds;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::fcntl::{Flock, FlockArg};

use bucket::BucketError;
use bucket::settings::Settings;
use contract::{Collecting, Holding, Leasing, Objects};
use directories::{KeptDirectories, LocalRegister};
use holding::LocalHolding;
use images::Images;
use leasing::LocalLeasing;
use objects::LocalObjects;
use records::LocalRecords;

use crate::collection::LocalCollecting;

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
        want: model::object::ObjectId,
        /// What came.
        got: model::object::ObjectId,
    },
    /// What is sent has the digest of an object that is here, and is not the same.
    #[error(
        "two contents have the digest {id}: what came is not what is here, byte by byte. The \
         digest is broken, or the memory of a machine is: nothing was stored. Keep both, and tell \
         those who make this program"
    )]
    Collision {
        /// The digest.
        id: model::object::ObjectId,
    },
    /// An image of that name is there.
    #[error("image {name} exists already; an image never changes, so add it under another name")]
    Exists {
        /// The name.
        name: model::image::ImageName,
    },
    /// An image of that name was there.
    #[error("image {name} {}; a name is never used again, so take another", ending.words())]
    Gone {
        /// The name.
        name: model::image::ImageName,
        /// What became of it.
        ending: Ending,
    },
    /// The tags of an image are not changed.
    #[error("the tags of image {name} are not changed")]
    Tags {
        /// The name.
        name: model::image::ImageName,
        /// Why.
        #[source]
        source: model::image::tags::TagsError,
    },
    /// The signatures of an image are not changed.
    #[error("the signatures of image {name} are not changed")]
    Signatures {
        /// The name.
        name: model::image::ImageName,
        /// Why.
        #[source]
        source: model::signing::signature::SignaturesError,
    },
    /// The expiry of an image is not changed.
    #[error("the expiry of image {name} is not changed")]
    Shorter {
        /// The name.
        name: model::image::ImageName,
        /// Why.
        #[source]
        source: crate::expiry::due::ShorterError,
    },
    /// There is no image of that name.
    #[error("there is no image {name}")]
    NotFound {
        /// The name.
        name: model::image::ImageName,
    },
    /// The record of an image cannot be used.
    #[error("the record of image {name} cannot be used")]
    Damaged {
        /// The name.
        name: model::image::ImageName,
        /// What is wrong with it.
        #[source]
        source: record::RecordError,
    },
    /// A record cannot be written as JSON.
    #[error("cannot write the record of image {name}")]
    Record {
        /// The name.
        name: model::image::ImageName,
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
        name: model::image::ImageName,
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
        name: model::image::ImageName,
    },
    /// An object is being removed, which takes too long.
    #[error(
        "object {id} is being removed by the server {server}, which has not ended that: try again; \
         if it was killed, start it again, or wait for half an hour"
    )]
    Removing {
        /// The object.
        id: model::object::ObjectId,
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

/// An open store.
pub struct Store {
    /// Content by digest.
    pub objects: Arc<dyn Objects>,
    /// Records by name.
    pub images: Images,
    /// Which directories were made, and who owns them.
    pub directories: KeptDirectories,
    /// Which images are in use.
    pub holding: Box<dyn Holding>,
    /// Which objects are held for callers.
    pub leasing: Arc<dyn Leasing>,
    /// Removes objects that nothing needs.
    pub collecting: Box<dyn Collecting>,
    /// Shared by those who add images, from the first look at what one needs until it is visible.
    /// Who has it alone may remove objects.
    pub adding: RwLock<()>,
    data: PathBuf,
    _lock: Flock<std::fs::File>,
}

impl Store {
    /// Opens the data directory, makes what is missing in it, and removes what a former server
    /// had not finished. Reads the record of each image, but looks at no object.
    ///
    /// # Errors
    ///
    /// [`StoreError::Locked`] if another server has it; otherwise what the file-system says.
    pub fn open(data: &Path) -> Result<Self, StoreError> {
        Self::open_packing(data, 0)
    }

    /// The same, and packs objects that come with this level of zstd, if they gain enough. What is
    /// there stays as it is.
    ///
    /// # Errors
    ///
    /// As [`Store::open`].
    pub fn open_packing(data: &Path, level: i32) -> Result<Self, StoreError> {
        make_directory(data)?;
        let lock = lock(data)?;
        if data.join(layout::SERVER).exists() {
            return Err(StoreError::OfTheOtherKind {
                path: data.to_owned(),
                what: "is what a server with a --bucket keeps on its own disk",
            });
        }
        let incoming = data.join(layout::INCOMING);
        make_directory(&incoming)?;
        empty(&incoming)?;
        let is_new = !data.join(layout::OBJECTS).exists();
        let objects = Arc::new(LocalObjects::open_packing(data, level)?);
        let leasing = Arc::new(LocalLeasing::open(data, is_new)?);
        let collecting = LocalCollecting::new(Arc::clone(&objects), Arc::clone(&leasing));
        Ok(Self {
            objects,
            images: Images::open(Box::new(LocalRecords::open(data)?))?,
            directories: KeptDirectories::open(Box::new(LocalRegister::new(data))),
            holding: Box::new(LocalHolding::open(data)),
            leasing,
            collecting: Box::new(collecting),
            adding: RwLock::new(()),
            data: data.to_owned(),
            _lock: lock,
        })
    }

    /// Opens the store in a bucket, which this server may share with others. `data` is for what
    /// is its own; the bucket is talked to on `runtime`.
    ///
    /// # Errors
    ///
    /// As [`Store::open`]; [`StoreError::Bucket`] if the bucket cannot be used.
    pub fn open_bucket(
        data: &Path,
        settings: &Settings,
        runtime: tokio::runtime::Handle,
    ) -> Result<Self, StoreError> {
        bucket::open(data, settings, runtime)
    }

    /// The data directory.
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.data
    }
}

/// Takes the data directory for this process alone.
pub(crate) fn lock(data: &Path) -> Result<Flock<std::fs::File>, StoreError> {
    let path = data.join(layout::LOCK);
    let file = fs_err::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(failed("lock the data directory"))?;
    Flock::lock(file.into_file(), FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno
    {
        nix::errno::Errno::EWOULDBLOCK => StoreError::Locked { path: data.to_owned() },
        errno => failed("lock the data directory")(errno.into()),
    })
}

/// Makes a directory that only this server may enter, and its parents. Leaves one that is there
/// as it is.
pub(crate) fn make_directory(path: &Path) -> Result<(), StoreError> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(failed(format!("make the directory `{}`", path.display())))
}

fn empty(directory: &Path) -> Result<(), StoreError> {
    let why = || failed("remove what a former server had not finished");
    for entry in fs_err::read_dir(directory).map_err(why())? {
        let entry = entry.map_err(why())?;
        fs_err::remove_file(entry.path()).map_err(why())?;
    }
    Ok(())
}

/// Makes the entries of a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<(), StoreError> {
    let why = || failed("make a directory durable");
    fs_err::File::open(path).map_err(why())?.sync_all().map_err(why())
}
