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

use super::content::Content;
use crate::core::collection::disk_pressure::Space;
use crate::core::image_holds::{Holder, TooManyError};
use crate::store::damaged_objects::DamagedObjects;
use crate::store::error::CollectError;
use crate::store::error::{Ending, StoreError, failed};
use crate::store::medium_reader::MediumReader;
use crate::store::medium_reader::OnMedium;
use crate::store::object_counts::ObjectCounts;

/// Content by digest. What is given out was checked against its digest.
pub trait Objects: Send + Sync {
    /// The length of the object in bytes, or `None` if it is not there. Its content is not read.
    fn size_bytes(&self, id: &ObjectId) -> Result<Option<u64>, StoreError>;

    /// The length in bytes of an object that an image may need, or `None` if it has to be
    /// uploaded. It stays for as long as it is leased.
    fn held(&self, id: &ObjectId) -> Result<Option<u64>, StoreError>;

    /// The same of many, in their order.
    fn all_held(&self, ids: &[ObjectId]) -> Result<Vec<Option<u64>>, StoreError> {
        ids.iter().map(|id| self.held(id)).collect()
    }

    /// Those of `ids` that have to be uploaded, in order.
    fn missing(&self, ids: &[ObjectId]) -> Result<Vec<ObjectId>, StoreError> {
        let held = self.all_held(ids)?;
        let missing = ids.iter().zip(held).filter(|(_, held)| held.is_none());
        Ok(missing.map(|(id, _)| *id).collect())
    }

    /// The length in bytes of an object that certainly need not be uploaded, if that is known
    /// without asking far away.
    fn known(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        self.held(id)
    }

    /// Holds `ids` while an image is added, before it is looked whether they are there: nothing
    /// has to be done for that where `Store::adding` keeps objects from being removed.
    fn pin(&self, ids: &[ObjectId]) -> Result<Option<Box<dyn Pin>>, StoreError> {
        let _ = ids;
        Ok(None)
    }

    /// Takes note that these are read next, unless they are large.
    fn ahead(&self, ids: &[ObjectId]) {
        let _ = ids;
    }

    /// Starts to store an object of `size_bytes`, of which nothing is seen until it is complete.
    ///
    /// # Errors
    ///
    /// [`StoreError::TooLittle`] if it cannot fit.
    fn receive(&self, id: ObjectId, size_bytes: u64)
    -> Result<Box<dyn Receiving + '_>, StoreError>;

    /// Opens an object, and makes sure that its content is what its id says. `None` if it is not
    /// there, or is corrupt: then it is put aside, so that it can be uploaded again.
    fn open_verified(&self, id: &ObjectId) -> Result<Option<Content>, StoreError>;

    /// Makes every object that was stored before this call durable.
    fn sync(&self) -> Result<(), StoreError>;

    /// The space for objects; `None` if there is no end of it that the server knows.
    fn space(&self) -> Result<Option<Space>, StoreError>;

    /// Counts the objects of former runs, until `stop` says so.
    fn count(&self, stop: &dyn Fn() -> bool);

    /// How many objects there are.
    fn object_counts(&self) -> ObjectCounts;

    /// How many corrupt objects were found since the server started.
    fn corrupt(&self) -> u64;

    /// The objects that are known to be lost or unreadable.
    fn damaged_objects(&self) -> &DamagedObjects;

    /// The objects in one of the directories of [`super::layout::places`], in the order in which
    /// they are best read.
    fn list(&self, below: &Path) -> Result<Vec<ObjectId>, StoreError>;

    /// Reads an object from the medium, whatever is in memory, and puts it aside if it is corrupt.
    /// `pace` as for [`MediumReader::hash`].
    fn read_medium(
        &self,
        id: &ObjectId,
        reader: &mut MediumReader,
        pace: &mut dyn FnMut(u64) -> bool,
    ) -> Result<OnMedium, StoreError>;

    /// True if a former server has left objects that may not be what they should be, and not all
    /// have been read from the medium since.
    fn is_doubtful(&self) -> bool;

    /// Takes note that every object that a former server has left was read from the medium since
    /// the start.
    fn all_read(&self);
}

/// An object that is being stored. Dropped before [`Receiving::finish`], it leaves nothing.
pub trait Receiving {
    /// Adds `content` to the end.
    ///
    /// # Errors
    ///
    /// [`StoreError::Full`], or what else the store says.
    fn write(&mut self, content: &[u8]) -> Result<(), StoreError>;

    /// Puts the object in place if its content is what was announced.
    ///
    /// # Errors
    ///
    /// [`StoreError::Content`] if it is not; otherwise what the store says.
    fn finish(self: Box<Self>) -> Result<PendingStore, StoreError>;
}

/// An object that is complete, and on its way to its place.
#[must_use = "it is there when it has landed"]
pub struct PendingStore(Option<Box<dyn FnOnce() -> Result<(), StoreError> + Send>>);

impl PendingStore {
    /// It is there.
    pub fn done() -> Self {
        Self(None)
    }

    /// It is there when `wait` has returned.
    pub fn later(wait: impl FnOnce() -> Result<(), StoreError> + Send + 'static) -> Self {
        Self(Some(Box::new(wait)))
    }

    /// Waits until the object is there.
    pub fn wait(self) -> Result<(), StoreError> {
        self.0.map_or(Ok(()), |wait| wait())
    }
}

/// Holds objects for an image that is being added, until it is dropped.
pub trait Pin: Send {
    /// False if it took so long that the objects may be gone soon.
    fn holds(&self) -> bool;
}

/// What a store has under the name of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing, and nothing ever was.
    Absent,
    /// The bytes of a record, and what tells them from those of another time.
    Record(Vec<u8>, Version),
    /// The mark that the name was used.
    Gone(Ending),
}

/// Tells what a record was from what it has become. Empty where only one server changes records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version(pub String);

/// How closely it is looked for changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// It is enough to hear of them within minutes, and mostly within seconds.
    Often,
    /// All are found that were complete when it began.
    Close,
}

/// The records of images. Changes by this server are made one after the other.
pub trait Records: Send + Sync {
    /// Gives what has changed since this was last called; at first all that there is. Who calls it
    /// may be told again of what it has changed itself.
    fn changes(
        &self,
        look: Look,
        take: &mut dyn FnMut(ImageName, Result<Found, StoreError>),
    ) -> Result<(), StoreError>;

    /// What is under `name`.
    fn read(&self, name: &ImageName) -> Result<Found, StoreError>;

    /// Refuses a name that is or was used.
    ///
    /// # Errors
    ///
    /// [`StoreError::Exists`] or [`StoreError::Gone`].
    fn expect_new(&self, name: &ImageName) -> Result<(), StoreError>;

    /// Makes a record durable, then visible, complete or not at all.
    fn create(&self, name: &ImageName, bytes: &[u8]) -> Result<(), StoreError>;

    /// Puts `bytes` in the place of the record of that version: whoever reads gets either of them.
    fn replace(&self, name: &ImageName, version: &Version, bytes: &[u8]) -> Result<(), StoreError>;

    /// Puts `mark` in the place of a record that is there, for ever; only of that version, if one
    /// is given. `gone` is called when it is in force.
    ///
    /// # Errors
    ///
    /// [`StoreError::Raced`] if it is of another version; otherwise what the store says. Then the
    /// record is there.
    fn bury(
        &self,
        name: &ImageName,
        version: Option<&Version>,
        mark: &str,
        gone: &mut dyn FnMut(),
    ) -> Result<(), StoreError>;

    /// The mark that is under `name`; `None` if there is none, or it is not known.
    fn mark(&self, _name: &ImageName) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(None)
    }

    /// Puts `mark` under a name that is and was not used, for ever.
    fn reserve(&self, name: &ImageName, _mark: &str) -> Result<(), StoreError> {
        Err(cannot(format!("keep that image {name} has ended")))
    }

    /// Takes a record away and leaves no mark. True if that is on the medium.
    ///
    /// # Errors
    ///
    /// What the store says; then the record is there.
    fn forget(&self, name: &ImageName) -> Result<bool, StoreError> {
        Err(cannot(format!("drop image {name}")))
    }
}

/// The one file that says which directories were made, and who owns them.
pub trait Register: Send + Sync {
    /// What it holds, and what tells that from what it holds at another time; `None` if nothing
    /// was ever written. It has at most `bytes_max` bytes.
    fn read(&self, bytes_max: usize) -> Result<Option<(Vec<u8>, Version)>, StoreError>;

    /// Puts `bytes` in the place of that version, durably. If it fails the former one is there.
    ///
    /// # Errors
    ///
    /// [`StoreError::RacedDirectories`] if it is of another version; otherwise what the store says.
    fn replace(&self, version: &Version, bytes: &[u8]) -> Result<Version, StoreError>;

    /// True if it may have another version than that one.
    fn has_changed(&self, version: &Version) -> Result<bool, StoreError>;

    /// Where it is, for people.
    fn place(&self) -> PathBuf;
}

/// What callers were promised to find there.
pub trait Leasing: Send + Sync {
    /// Gives no lease that is longer than so many seconds from now on.
    fn set_longest(&self, seconds: u32);

    /// Holds `ids` for `seconds`, or as long as leases are at most. Whoever then finds one of them
    /// there will find it there until the lease ends.
    fn give(&self, ids: &[ObjectId], seconds: u32) -> Result<(), StoreError>;

    /// Keeps that time has passed.
    fn count_down(&self) -> Result<(), StoreError>;

    /// For how many seconds more nothing at all is removed.
    fn everything_for(&self) -> u64;

    /// How many objects are leased.
    fn count(&self) -> usize;
}

/// Which images are in use.
pub trait Holding: Send + Sync {
    /// Takes note that `holder` uses `names`, and no others, for `seconds`.
    fn note(
        &self,
        holder: &str,
        names: BTreeSet<ImageName>,
        seconds: u32,
    ) -> Result<(), TooManyError>;

    /// Who uses `name`.
    ///
    /// # Errors
    ///
    /// If that is not known, because the store does not say what others were told.
    fn holders(&self, name: &ImageName) -> Result<Vec<Holder>, StoreError>;

    /// How many images are in use.
    fn count(&self) -> usize;
}

/// Removes what nothing needs.
pub trait Collecting: Send + Sync {
    /// Removes it, or says what could be removed, and tells `progress` how far it is. Ends early if
    /// `stop` says so.
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

    /// Does what must be done from time to time.
    fn tend(&self) {}

    /// True if the time has come to collect without being asked to, however much space there is.
    fn is_due(&self) -> bool {
        false
    }
}

/// Is told how far a collection is.
pub trait CollectionProgress {
    /// No image needs so much.
    fn unneeded(&self, amount: api::image_server::collection::Amount);

    /// An object of so many bytes was removed.
    fn removed(&self, bytes: u64);
}

/// What a kind of store says that cannot follow a master.
fn cannot(what: String) -> StoreError {
    failed(what)(std::io::ErrorKind::Unsupported.into())
}
