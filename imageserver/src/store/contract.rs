//! The traits that every kind of store implements. The rest of the server uses only these.
//!
//! [`Objects`] keeps content by digest, [`Records`] the records of images by name, [`Leasing`] the
//! leases of clients, [`Holding`] the images in use, and [`Collecting`] removes objects that no
//! image needs. All calls block, and run on threads that may. One test suite checks every kind.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use api::image_server::collection::{CollectReply, CollectRequest};
use model::image::ImageName;
use model::object::ObjectId;

use super::content::{Content, Opened};
use crate::core::collection::disk_pressure::Space;
use crate::core::image_holds::{Holder, TooManyError};
use crate::store::damaged_objects::DamagedObjects;
use crate::store::error::{CollectError, Ending, StoreError, failed};
use crate::store::medium_reader::{MediumReader, OnMedium};
use crate::store::object_counts::ObjectCounts;

/// Content by digest. Returned content was checked against its digest.
pub trait Objects: Send + Sync {
    /// The length of the object in bytes, or `None` if it is not there. Its content is not read.
    fn size_bytes(&self, id: &ObjectId) -> Result<Option<u64>, StoreError>;

    /// Returns the length in bytes of an object that an image may need, or `None` if it must be
    /// uploaded. A leased object stays.
    fn held(&self, id: &ObjectId) -> Result<Option<u64>, StoreError>;

    /// Returns the same for many objects, in their order.
    fn all_held(&self, ids: &[ObjectId]) -> Result<Vec<Option<u64>>, StoreError> {
        ids.iter().map(|id| self.held(id)).collect()
    }

    /// Returns the objects of `ids` that have to be uploaded, in order.
    fn missing(&self, ids: &[ObjectId]) -> Result<Vec<ObjectId>, StoreError> {
        let held = self.all_held(ids)?;
        let missing = ids.iter().zip(held).filter(|(_, held)| held.is_none());
        Ok(missing.map(|(id, _)| *id).collect())
    }

    /// Returns the length in bytes of an object that need not be uploaded, if that is known without
    /// a request to a remote store.
    fn known(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        self.held(id)
    }

    /// Holds `ids` while an image is added; called before they are looked up. Does nothing where
    /// `Store::adding` prevents removals.
    fn pin(&self, ids: &[ObjectId]) -> Result<Option<Box<dyn Pin>>, StoreError> {
        let _ = ids;
        Ok(None)
    }

    /// Records that these are read next, unless they are large.
    fn ahead(&self, ids: &[ObjectId]) {
        let _ = ids;
    }

    /// Starts to store an object of `size_bytes`, which is visible when it is complete.
    fn receive(&self, id: ObjectId, size_bytes: u64)
    -> Result<Box<dyn Receiving + '_>, StoreError>;

    /// Opens an object after its content was verified. Returns `None` if it is missing or corrupt;
    /// a corrupt object is quarantined, so that it can be uploaded again.
    fn open_verified(&self, id: &ObjectId) -> Result<Option<Content>, StoreError>;

    /// Does the same, but may append the content to `buffer` if it is small and has at most `limit`
    /// bytes. Otherwise `buffer` is as before.
    fn open_into(
        &self,
        id: &ObjectId,
        limit: usize,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Opened>, StoreError> {
        let _ = (limit, buffer);
        Ok(self.open_verified(id)?.map(Opened::Content))
    }

    /// Makes every object that was stored before this call durable.
    fn sync(&self) -> Result<(), StoreError>;

    /// Returns the space for objects; `None` if it is unlimited.
    fn space(&self) -> Result<Option<Space>, StoreError>;

    /// Counts the objects of former runs, until `stop` says so.
    fn count(&self, stop: &dyn Fn() -> bool);

    /// Returns the number of objects.
    fn object_counts(&self) -> ObjectCounts;

    /// Returns how many corrupt objects were found since the server started.
    fn corrupt(&self) -> u64;

    /// The objects that are known to be lost or unreadable.
    fn damaged_objects(&self) -> &DamagedObjects;

    /// Returns the objects in one of the [`super::layout::object_directories`], in the best order
    /// for reading.
    fn list(&self, below: &Path) -> Result<Vec<ObjectId>, StoreError>;

    /// Reads an object from the medium, whatever is in memory, and puts it aside if it is corrupt.
    /// `pace` as for [`MediumReader::hash`].
    fn read_medium(
        &self,
        id: &ObjectId,
        reader: &mut MediumReader,
        pace: &mut dyn FnMut(u64) -> bool,
    ) -> Result<OnMedium, StoreError>;

    /// Returns true if a former server has left objects that may be damaged, and not all of them
    /// were read from the medium since.
    fn is_doubtful(&self) -> bool;

    /// Records that every object of a former server was read from the medium since the start.
    fn all_read(&self);
}

/// An object that is being stored. Dropped before [`Receiving::finish`], it leaves nothing.
pub trait Receiving {
    /// Adds `content` to the end.
    fn write(&mut self, content: &[u8]) -> Result<(), StoreError>;

    /// Puts the object in place if its content has the announced digest.
    fn finish(self: Box<Self>) -> Result<PendingStore, StoreError>;
}

/// An object that is complete, and on its way to its place.
#[must_use = "it is there when it has landed"]
pub struct PendingStore(Option<Box<dyn FnOnce() -> Result<(), StoreError> + Send>>);

impl PendingStore {
    /// The object is stored already.
    pub fn done() -> Self {
        Self(None)
    }

    /// The object is stored when `wait` has returned.
    pub fn later(wait: impl FnOnce() -> Result<(), StoreError> + Send + 'static) -> Self {
        Self(Some(Box::new(wait)))
    }

    /// Waits until the object is stored.
    pub fn wait(self) -> Result<(), StoreError> {
        self.0.map_or(Ok(()), |wait| wait())
    }
}

/// Holds objects for an image that is being added, until it is dropped.
pub trait Pin: Send {
    /// Returns false if the objects may be removed soon, because adding the image took too long.
    fn is_valid(&self) -> bool;
}

/// The content under the name of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundRecord {
    /// The name was never used.
    Absent,
    /// The bytes of a record, and what tells them from those of another time.
    Record(Vec<u8>, RecordVersion),
    /// The mark that the name was used.
    Gone(Ending),
}

/// The version of a record. Empty where only one server changes records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordVersion(pub String);

/// How thoroughly changes of other servers are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refresh {
    /// Finds most changes within seconds, and all within minutes.
    Periodic,
    /// Finds all changes that were complete when the refresh began.
    Complete,
}

/// The records of images. Changes by this server are made one after the other.
pub trait Records: Send + Sync {
    /// Calls `take` with the changes since the last call; at first with all records. May include
    /// changes of this server itself.
    fn changes(
        &self,
        look: Refresh,
        take: &mut dyn FnMut(ImageName, Result<FoundRecord, StoreError>),
    ) -> Result<(), StoreError>;

    /// Reads the content under `name`.
    fn read(&self, name: &ImageName) -> Result<FoundRecord, StoreError>;

    /// Refuses a name that is or was used.
    fn expect_new(&self, name: &ImageName) -> Result<(), StoreError>;

    /// Makes a record durable, then visible, complete or not at all.
    fn create(&self, name: &ImageName, bytes: &[u8]) -> Result<(), StoreError>;

    /// Replaces the record of that version by `bytes`, atomically.
    fn replace(
        &self,
        name: &ImageName,
        version: &RecordVersion,
        bytes: &[u8],
    ) -> Result<(), StoreError>;

    /// Replaces a record by `tombstone`, for ever; only that version, if one is given. Calls `gone`
    /// when the tombstone is in force. On failure the record stays.
    ///
    /// # Errors
    ///
    /// [`StoreError::Raced`] if it is of another version; otherwise what the store says. Then the
    /// record is there.
    fn end(
        &self,
        name: &ImageName,
        version: Option<&RecordVersion>,
        mark: &str,
        gone: &mut dyn FnMut(),
    ) -> Result<(), StoreError>;

    /// Returns the tombstone of `name`; `None` if no tombstone is known.
    fn tombstone(&self, _name: &ImageName) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(None)
    }

    /// Reserves an unused name for ever, with a tombstone.
    fn add_tombstone(&self, name: &ImageName, _mark: &str) -> Result<(), StoreError> {
        Err(cannot(format!("keep that image {name} has ended")))
    }

    /// Removes a record without a tombstone. Returns true if the removal is on the medium.
    ///
    /// # Errors
    ///
    /// On failure the record stays.
    fn remove(&self, name: &ImageName) -> Result<bool, StoreError> {
        Err(cannot(format!("drop image {name}")))
    }
}

/// The one file that says which directories were made, and who owns them.
pub trait DirectoriesStorage: Send + Sync {
    /// Returns the content of at most `bytes_max` bytes, and its version; `None` if nothing was
    /// ever written.
    fn read(&self, bytes_max: usize) -> Result<Option<(Vec<u8>, RecordVersion)>, StoreError>;

    /// Replaces that version by `bytes`, durably. If it fails, the former version stays.
    fn replace(&self, version: &RecordVersion, bytes: &[u8]) -> Result<RecordVersion, StoreError>;

    /// Returns true if it may have another version than that one.
    fn has_changed(&self, version: &RecordVersion) -> Result<bool, StoreError>;

    /// The path or key, for messages.
    fn location(&self) -> PathBuf;
}

/// The leases of clients.
pub trait Leasing: Send + Sync {
    /// Limits the length of leases.
    fn set_longest(&self, seconds: u32);

    /// Leases `ids` for `seconds`, or for the longest allowed time. A leased object that is found
    /// stays until the lease ends.
    fn give(&self, ids: &[ObjectId], seconds: u32) -> Result<(), StoreError>;

    /// Saves the remaining time of the leases, and forgets ended ones.
    fn note_time_passed(&self) -> Result<(), StoreError>;

    /// Returns why the store could not be written when something was last saved; `None` if it
    /// could.
    fn write_error(&self) -> Option<String> {
        None
    }

    /// Saves the leases when the server stops: none is given any more.
    fn close(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Returns for how many seconds more nothing at all is removed.
    fn everything_held_for(&self) -> u64;

    /// Returns how many objects are leased.
    fn count(&self) -> usize;
}

/// The images that are in use.
pub trait Holding: Send + Sync {
    /// Records that `holder` uses `names`, and no others, for `seconds`.
    fn note(
        &self,
        holder: &str,
        names: BTreeSet<ImageName>,
        seconds: u32,
    ) -> Result<(), TooManyError>;

    /// Returns the holders of `name`.
    ///
    /// # Errors
    ///
    /// Fails if the store cannot be read.
    fn holders(&self, name: &ImageName) -> Result<Vec<Holder>, StoreError>;

    /// Returns how many images are in use.
    fn count(&self) -> usize;
}

/// Removes objects that no image needs.
pub trait Collecting: Send + Sync {
    /// Removes them, or counts them, and reports to `progress`. Ends early if `stop` returns true.
    ///
    /// # Errors
    ///
    /// [`CollectError`]. What was removed until then was not needed.
    fn collect(
        &self,
        request: CollectRequest,
        progress: &dyn CollectionProgress,
        stop: &dyn Fn() -> bool,
    ) -> Result<CollectReply, CollectError>;

    /// Does the periodic work of the store.
    fn maintain(&self) {}

    /// Returns true if the time has come to collect without being asked to, however much space
    /// there is.
    fn is_due(&self) -> bool {
        false
    }
}

/// Receives the progress of a collection.
pub trait CollectionProgress {
    /// Reports how much no image needs.
    fn unneeded(&self, amount: api::image_server::collection::ObjectTotals);

    /// Reports the removal of an object of so many bytes.
    fn removed(&self, bytes: u64);
}

/// Returns the error of a store that cannot follow a master.
fn cannot(what: String) -> StoreError {
    failed(what)(std::io::ErrorKind::Unsupported.into())
}
