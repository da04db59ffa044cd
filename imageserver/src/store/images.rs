//! Images by name: one record each, made visible in one step.
//!
//! Memory holds only an index of the images. Changes are made one after the other; reads never wait
//! for them.

pub mod changes;

use std::ops::Bound;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use api::image_server::ImageSummary;
use model::image::tags::{self, Tags};
use model::image::{Image, ImageName, Notes};
use model::lock::locked;
use model::tree::Time;
use system::random::random;
use tokio::sync::{Notify, watch};

use super::contract::{FoundRecord, RecordVersion, Records, Refresh};
use super::record::Record;
use crate::core::directories::{Sums, is_below};
use crate::core::replication::master::ChangeLog;
use crate::store::error::StoreError;
use crate::store::image_index::{ImageIndex, Tombstone};
use crate::store::image_trees::ImageRoots;
use crate::store::private_images::Reader;

/// The images of a store.
pub struct Images {
    records: Box<dyn Records>,
    index: RwLock<ImageIndex>,
    // Held while the records change, so that a name cannot be deleted while it is being added.
    change: Mutex<()>,
    added: Notify,
    sequence: watch::Sender<u64>,
}

/// Some of the images, sorted by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageList {
    pub images: Vec<ImageSummary>,
    /// True if there are more after the last of these.
    pub more: bool,
}

impl Images {
    pub(super) fn open(records: Box<dyn Records>) -> Result<Self, StoreError> {
        let images = Self {
            records,
            index: RwLock::new(ImageIndex::new(random())),
            change: Mutex::new(()),
            added: Notify::new(),
            sequence: watch::Sender::new(0),
        };
        images.refresh(Refresh::Complete)?;
        let mut index = images.write_index();
        // None of these images was added since the start.
        index.additions = 0;
        index.log = ChangeLog::new(random());
        drop(index);
        Ok(images)
    }

    /// Records what other servers have changed, if several share the store.
    pub fn refresh(&self, look: Refresh) -> Result<(), StoreError> {
        self.records.changes(look, &mut |name, found| self.note(&name, found))
    }

    /// Records what is under `name` now.
    fn note(&self, name: &ImageName, found: Result<FoundRecord, StoreError>) {
        let record = match found {
            Ok(FoundRecord::Record(bytes, _)) => decode(name, &bytes),
            Ok(FoundRecord::Absent) => {
                self.changed(name, |index| index.remove(name));
                return;
            }
            Ok(FoundRecord::Gone(ending)) => {
                let mark = self.tombstone_of(name, ending);
                self.changed(name, |index| index.end(name, mark));
                return;
            }
            Err(error) => Err(error),
        };
        let is_new = self.changed(name, |index| index.insert_read(name, record));
        if is_new {
            self.added.notify_waiters();
        }
    }

    fn read_index(&self) -> RwLockReadGuard<'_, ImageIndex> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_index(&self) -> RwLockWriteGuard<'_, ImageIndex> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a name that is or was used.
    pub fn expect_new(&self, name: &ImageName) -> Result<(), StoreError> {
        self.records.expect_new(name)
    }

    /// Makes an image durable, then visible. All that it needs is durable already.
    pub fn add(&self, record: &Record) -> Result<(), StoreError> {
        let name = &record.image.content.name;
        let bytes =
            record.encode().map_err(|source| StoreError::Record { name: name.clone(), source })?;
        let _change = locked(&self.change);
        self.records.create(name, &bytes)?;
        let mut index = self.write_index();
        // Unless a refresh has added the image already.
        index.additions += u64::from(!index.images.contains_key(name));
        index.insert(record);
        self.publish(&mut index, name);
        drop(index);
        self.added.notify_waiters();
        Ok(())
    }

    /// Reads an image.
    pub fn get(&self, name: &ImageName) -> Result<Record, StoreError> {
        self.read(name).map(|(record, _)| record)
    }

    fn read(&self, name: &ImageName) -> Result<(Record, RecordVersion), StoreError> {
        match self.records.read(name)? {
            // A record that is still being made durable is not there yet.
            FoundRecord::Record(_, version) if !self.is_visible(name, &version) => {
                Err(StoreError::NotFound { name: name.clone() })
            }
            FoundRecord::Record(bytes, version) => Ok((decode(name, &bytes)?, version)),
            FoundRecord::Absent => Err(StoreError::NotFound { name: name.clone() }),
            FoundRecord::Gone(ending) => Err(StoreError::Gone { name: name.clone(), ending }),
        }
    }

    /// Returns true if the index has `name`, or if the record was added by another server in one
    /// step.
    fn is_visible(&self, name: &ImageName, version: &RecordVersion) -> bool {
        let index = self.read_index();
        !version.0.is_empty() || index.images.contains_key(name) || index.damaged.contains_key(name)
    }

    /// Resolves when an image has been added after this call.
    pub fn added(&self) -> tokio::sync::futures::Notified<'_> {
        self.added.notified()
    }

    /// Returns at most `limit` images whose names sort after `after`.
    #[must_use]
    pub fn list(&self, after: Option<&ImageName>, limit: usize) -> ImageList {
        self.list_for(&Reader::Everything, after, limit)
    }

    /// Returns at most `limit` images that `reader` may read and whose names sort after `after`.
    #[must_use]
    pub fn list_for(&self, reader: &Reader, after: Option<&ImageName>, limit: usize) -> ImageList {
        let index = self.read_index();
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let rest = index.images.range::<ImageName, _>((start, Bound::Unbounded));
        let mut rest = rest.filter(|(name, _)| reader.may_read_image(name));
        let images = rest.by_ref().take(limit).map(|(_, summary)| summary.clone()).collect();
        ImageList { images, more: rest.next().is_some() }
    }

    /// The image of `directory` itself that was added last, of those that have all of `tags`.
    #[must_use]
    pub fn latest(&self, directory: &ImageName, tags: &Tags) -> Option<ImageName> {
        let index = self.read_index();
        let below =
            index.images.range::<ImageName, _>((Bound::Excluded(directory), Bound::Unbounded));
        let images = below
            .map(|(_, image)| image)
            .take_while(|image| image.name.as_str().starts_with(directory.as_str()))
            .filter(|image| image.name.directory() == Some(directory.as_str()))
            .filter(|image| tags::contain_all(&image.tags, tags));
        let latest = images.max_by_key(|image| (image.created_on, &image.name));
        latest.map(|image| image.name.clone())
    }

    /// Returns how many images were added since the start.
    #[must_use]
    pub fn additions(&self) -> u64 {
        self.read_index().additions
    }

    /// Returns what all images need, and how many had been added.
    #[must_use]
    pub fn roots(&self) -> (u64, Vec<ImageRoots>) {
        let index = self.read_index();
        let start = |(name, summary): (&ImageName, &ImageSummary)| ImageRoots {
            image: name.clone(),
            root: summary.root,
            build_log: index.build_logs.get(name).copied(),
        };
        (index.additions, index.images.iter().map(start).collect())
    }

    /// Returns the number of images.
    #[must_use]
    pub fn count(&self) -> usize {
        self.read_index().images.len()
    }

    /// The images whose records cannot be used, with the reasons.
    #[must_use]
    pub fn damaged(&self) -> Vec<(ImageName, String)> {
        let index = self.read_index();
        index.damaged.iter().map(|(name, why)| (name.clone(), why.clone())).collect()
    }

    /// Calls `visit` with each image below `directory`, or with all.
    pub fn visit(&self, directory: Option<&ImageName>, mut visit: impl FnMut(&ImageSummary)) {
        let index = self.read_index();
        let start = directory.map_or(Bound::Unbounded, Bound::Excluded);
        let images = index.images.range::<ImageName, _>((start, Bound::Unbounded));
        images
            .map(|(_, image)| image)
            .take_while(|image| directory.is_none_or(|above| begins(&image.name, above)))
            .filter(|image| directory.is_none_or(|above| is_below(&image.name, above)))
            .for_each(&mut visit);
    }

    /// Returns the sums over all images that `reader` may read, by directory.
    #[must_use]
    pub fn sums(&self, reader: &Reader) -> Sums {
        let mut sums = Sums::default();
        self.visit(None, |image| {
            if reader.may_read_image(&image.name) {
                sums.count(&image.name, image.totals.bytes);
            }
        });
        sums
    }

    /// Returns how many images are below `directory`, damaged ones included.
    #[must_use]
    pub fn count_below(&self, directory: &ImageName) -> u64 {
        let mut count = 0;
        self.visit(Some(directory), |_| count += 1);
        let index = self.read_index();
        count + index.damaged.keys().filter(|name| is_below(name, directory)).count() as u64
    }

    /// Deletes an image and reserves its name. Its objects stay.
    pub fn delete(&self, name: &ImageName, mark: &str) -> Result<(), StoreError> {
        let _change = locked(&self.change);
        self.delete_locked(name, None, mark)
    }

    /// Deletes an image if `is_due` returns true for its expiry. Returns true if it was deleted.
    pub fn expire(
        &self,
        name: &ImageName,
        mark: &str,
        is_due: impl FnOnce(Option<Time>) -> bool,
    ) -> Result<bool, StoreError> {
        let _change = locked(&self.change);
        let expires_at = {
            let index = self.read_index();
            index.images.get(name).map(|summary| summary.expires_at)
        };
        if expires_at.is_none() {
            return Ok(false);
        }
        // Another server may have changed the expiry, or deleted the image.
        let (record, version) = match self.read(name) {
            Ok(found) => found,
            Err(StoreError::Gone { .. } | StoreError::NotFound { .. }) => {
                self.write_index().remove(name);
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        if !is_due(record.image.notes.expires_at) {
            return Ok(false);
        }
        match self.delete_locked(name, Some(&version), mark) {
            Err(StoreError::Gone { .. } | StoreError::Raced { .. }) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// Returns all images that expire, with their expiry.
    #[must_use]
    pub fn expiring(&self) -> Vec<(ImageName, Time)> {
        let index = self.read_index();
        let images = index.images.values();
        images.filter_map(|image| Some((image.name.clone(), image.expires_at?))).collect()
    }

    /// Changes the notes of an image by `change`, durably, and returns the new notes.
    pub fn change<E: From<StoreError>>(
        &self,
        name: &ImageName,
        change: impl FnOnce(&mut Notes) -> Result<(), E>,
    ) -> Result<Notes, E> {
        let _change = locked(&self.change);
        let (mut record, version) = self.read(name)?;
        let former = record.image.notes.clone();
        change(&mut record.image.notes)?;
        if record.image.notes != former {
            self.replace(name, &record, &version)?;
        }
        Ok(record.image.notes)
    }

    fn replace(
        &self,
        name: &ImageName,
        record: &Record,
        version: &RecordVersion,
    ) -> Result<(), StoreError> {
        let bytes =
            record.encode().map_err(|source| StoreError::Record { name: name.clone(), source })?;
        let replaced = self.records.replace(name, version, &bytes);
        match &replaced {
            Ok(()) => {
                let mut index = self.write_index();
                index.insert(record);
                self.publish(&mut index, name);
            }
            // Either version may be there.
            Err(_) => self.note(name, self.records.read(name)),
        }
        replaced
    }

    fn delete_locked(
        &self,
        name: &ImageName,
        version: Option<&RecordVersion>,
        mark: &str,
    ) -> Result<(), StoreError> {
        let mark = Tombstone::text(mark, self.digest(name));
        let deleted = self.records.end(name, version, &mark, &mut || {
            let mut index = self.write_index();
            index.end(name, Tombstone::read(mark.as_bytes()));
            self.publish(&mut index, name);
        });
        if matches!(deleted, Err(StoreError::Gone { .. })) {
            // Another server may have been first.
            self.write_index().remove(name);
        }
        deleted
    }
}

/// Returns true if one name begins with all of the other, be it below it or not.
fn begins(name: &ImageName, with: &ImageName) -> bool {
    name.as_str().starts_with(with.as_str())
}

fn decode(name: &ImageName, bytes: &[u8]) -> Result<Record, StoreError> {
    let record = Record::decode(bytes)
        .map_err(|source| StoreError::Damaged { name: name.clone(), source })?;
    let Image { content, .. } = &record.image;
    if content.name == *name {
        return Ok(record);
    }
    // A record copied to another name must not be served under that name.
    let source = super::record::RecordError::Damaged;
    Err(StoreError::Damaged { name: name.clone(), source })
}
