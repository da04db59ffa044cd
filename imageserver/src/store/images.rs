//! Images by name: one record each, made visible in one step.
//!
//! In memory there is only what lists show of each image. Changes are made one after the other;
//! reading never waits for them.

pub mod changes;

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Mutex, PoisonError, RwLock, RwLockWriteGuard};

use api::image_server::ImageSummary;
use model::image::tags::{self, Tags};
use model::image::{Image, ImageName, Notes};
use model::lock::locked;
use model::object::ObjectId;
use model::report::report;
use model::tree::Time;
use tokio::sync::{Notify, watch};

use super::contract::{Found, Look, Records, Version};
use super::record::Record;
use crate::clock::random;
use crate::core::directories::is_below;
use crate::core::replication::change_log::Log;
use crate::store::error::StoreError;
use crate::store::image_walk::Start;
use changes::Mark;

struct Index {
    images: BTreeMap<ImageName, ImageSummary>,
    notes: BTreeMap<ImageName, ObjectId>,
    ended: BTreeMap<ImageName, Mark>,
    log: Log<ImageName>,
    damaged: BTreeMap<ImageName, String>,
    build_logs: BTreeMap<ImageName, ObjectId>,
    additions: u64,
}

/// The images of a store.
pub struct Images {
    records: Box<dyn Records>,
    index: RwLock<Index>,
    // Held while the records change, so that a name cannot be deleted while it is being added.
    change: Mutex<()>,
    added: Notify,
    told: watch::Sender<u64>,
}

/// Some of the images, sorted by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The images.
    pub images: Vec<ImageSummary>,
    /// True if there are more after the last of these.
    pub more: bool,
}

impl Images {
    pub(super) fn open(records: Box<dyn Records>) -> Result<Self, StoreError> {
        let images = Self {
            records,
            index: RwLock::new(Index::new(random())),
            change: Mutex::new(()),
            added: Notify::new(),
            told: watch::Sender::new(0),
        };
        images.refresh(Look::Close)?;
        let mut index = images.write_index();
        // None of them was added since the start.
        index.additions = 0;
        index.log = Log::new(random());
        drop(index);
        Ok(images)
    }

    /// Takes note of what other servers have changed, if several share the store.
    ///
    /// # Errors
    ///
    /// What the store says.
    pub fn refresh(&self, look: Look) -> Result<(), StoreError> {
        self.records.changes(look, &mut |name, found| self.note(&name, found))
    }

    /// Takes note of what is under `name` now.
    fn note(&self, name: &ImageName, found: Result<Found, StoreError>) {
        let record = match found {
            Ok(Found::Record(bytes, _)) => decode(name, &bytes),
            Ok(Found::Absent) => {
                self.changed(name, |index| index.remove(name));
                return;
            }
            Ok(Found::Gone(ending)) => {
                let mark = self.mark_of(name, ending);
                self.changed(name, |index| index.end(name, mark));
                return;
            }
            Err(error) => Err(error),
        };
        let is_new = self.changed(name, |index| index.take(name, record));
        if is_new {
            self.added.notify_waiters();
        }
    }

    fn write_index(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a name that is or was used.
    ///
    /// # Errors
    ///
    /// [`StoreError::Exists`] or [`StoreError::Gone`].
    pub fn expect_new(&self, name: &ImageName) -> Result<(), StoreError> {
        self.records.expect_new(name)
    }

    /// Makes an image durable, then visible. All that it needs is durable already.
    ///
    /// # Errors
    ///
    /// As [`Images::expect_new`]; otherwise what the store says.
    pub fn add(&self, record: &Record) -> Result<(), StoreError> {
        let name = &record.image.content.name;
        let bytes =
            record.encode().map_err(|source| StoreError::Record { name: name.clone(), source })?;
        let _change = locked(&self.change);
        self.records.create(name, &bytes)?;
        let mut index = self.write_index();
        // Unless it was heard of already that it is there.
        index.additions += u64::from(!index.images.contains_key(name));
        index.insert(record);
        self.tell(&mut index, name);
        drop(index);
        self.added.notify_waiters();
        Ok(())
    }

    /// Reads an image.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Gone`], or [`StoreError::Damaged`].
    pub fn get(&self, name: &ImageName) -> Result<Record, StoreError> {
        self.read(name).map(|(record, _)| record)
    }

    fn read(&self, name: &ImageName) -> Result<(Record, Version), StoreError> {
        match self.records.read(name)? {
            // A record that is still being made durable is not there yet.
            Found::Record(_, version) if !self.is_visible(name, &version) => {
                Err(StoreError::NotFound { name: name.clone() })
            }
            Found::Record(bytes, version) => Ok((decode(name, &bytes)?, version)),
            Found::Absent => Err(StoreError::NotFound { name: name.clone() }),
            Found::Gone(ending) => Err(StoreError::Gone { name: name.clone(), ending }),
        }
    }

    /// True if the list has `name`; or if others may have added it, which do so in one step.
    fn is_visible(&self, name: &ImageName, version: &Version) -> bool {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        !version.0.is_empty() || index.images.contains_key(name) || index.damaged.contains_key(name)
    }

    /// Resolves when an image has been added after this call.
    pub fn added(&self) -> tokio::sync::futures::Notified<'_> {
        self.added.notified()
    }

    /// At most `limit` images whose names sort after `after`.
    #[must_use]
    pub fn list(&self, after: Option<&ImageName>, limit: usize) -> Page {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = index.images.range::<ImageName, _>((start, Bound::Unbounded));
        let images = rest.by_ref().take(limit).map(|(_, summary)| summary.clone()).collect();
        Page { images, more: rest.next().is_some() }
    }

    /// The image of `directory` itself that was added last, of those that have all of `tags`.
    #[must_use]
    pub fn latest(&self, directory: &ImageName, tags: &Tags) -> Option<ImageName> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let below =
            index.images.range::<ImageName, _>((Bound::Excluded(directory), Bound::Unbounded));
        let images = below
            .map(|(_, image)| image)
            .take_while(|image| image.name.as_str().starts_with(directory.as_str()))
            .filter(|image| image.name.directory() == Some(directory.as_str()))
            .filter(|image| tags::have(&image.tags, tags));
        let latest = images.max_by_key(|image| (image.created_on, &image.name));
        latest.map(|image| image.name.clone())
    }

    /// How many images were added since the start.
    #[must_use]
    pub fn additions(&self) -> u64 {
        self.index.read().unwrap_or_else(PoisonError::into_inner).additions
    }

    /// What all images need, and how many of them had been added.
    #[must_use]
    pub fn starts(&self) -> (u64, Vec<Start>) {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let start = |(name, summary): (&ImageName, &ImageSummary)| Start {
            image: name.clone(),
            root: summary.root,
            build_log: index.build_logs.get(name).copied(),
        };
        (index.additions, index.images.iter().map(start).collect())
    }

    /// How many images there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.index.read().unwrap_or_else(PoisonError::into_inner).images.len()
    }

    /// The images whose records cannot be used, with the reasons.
    #[must_use]
    pub fn damaged(&self) -> Vec<(ImageName, String)> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        index.damaged.iter().map(|(name, why)| (name.clone(), why.clone())).collect()
    }

    /// Calls `visit` with each image below `directory`, or with all.
    pub fn visit(&self, directory: Option<&ImageName>, mut visit: impl FnMut(&ImageSummary)) {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let start = directory.map_or(Bound::Unbounded, Bound::Excluded);
        let images = index.images.range::<ImageName, _>((start, Bound::Unbounded));
        images
            .map(|(_, image)| image)
            .take_while(|image| directory.is_none_or(|above| begins(&image.name, above)))
            .filter(|image| directory.is_none_or(|above| is_below(&image.name, above)))
            .for_each(&mut visit);
    }

    /// How many images are below `directory`, those whose records are damaged among them.
    #[must_use]
    pub fn count_below(&self, directory: &ImageName) -> u64 {
        let mut count = 0;
        self.visit(Some(directory), |_| count += 1);
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        count + index.damaged.keys().filter(|name| is_below(name, directory)).count() as u64
    }

    /// Deletes an image, and lets no other have its name. Its objects stay.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`] or [`StoreError::Gone`]; otherwise what the file-system says.
    pub fn delete(&self, name: &ImageName, mark: &str) -> Result<(), StoreError> {
        let _change = locked(&self.change);
        self.delete_locked(name, None, mark)
    }

    /// Deletes an image if it `is_due` by when it goes. True if it was.
    ///
    /// # Errors
    ///
    /// As [`Images::delete`].
    pub fn expire(
        &self,
        name: &ImageName,
        mark: &str,
        is_due: impl FnOnce(Option<Time>) -> bool,
    ) -> Result<bool, StoreError> {
        let _change = locked(&self.change);
        let expires_at = {
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            index.images.get(name).map(|summary| summary.expires_at)
        };
        if expires_at.is_none() {
            return Ok(false);
        }
        // Another server may have changed when it goes, or have let it go.
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

    /// All images that go by themselves, with the times at which they do.
    #[must_use]
    pub fn expiring(&self) -> Vec<(ImageName, Time)> {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        let images = index.images.values();
        images.filter_map(|image| Some((image.name.clone(), image.expires_at?))).collect()
    }

    /// Changes the notes of an image by `change`, durably, and gives what they became.
    ///
    /// # Errors
    ///
    /// As [`Images::get`], or what `change` says; otherwise what the file-system says.
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
        version: &Version,
    ) -> Result<(), StoreError> {
        let bytes =
            record.encode().map_err(|source| StoreError::Record { name: name.clone(), source })?;
        let replaced = self.records.replace(name, version, &bytes);
        match &replaced {
            Ok(()) => {
                let mut index = self.write_index();
                index.insert(record);
                self.tell(&mut index, name);
            }
            // Either may be there.
            Err(_) => self.note(name, self.records.read(name)),
        }
        replaced
    }

    fn delete_locked(
        &self,
        name: &ImageName,
        version: Option<&Version>,
        mark: &str,
    ) -> Result<(), StoreError> {
        let mark = Mark::text(mark, self.digest(name));
        let deleted = self.records.bury(name, version, &mark, &mut || {
            let mut index = self.write_index();
            index.end(name, Mark::read(mark.as_bytes()));
            self.tell(&mut index, name);
        });
        if matches!(deleted, Err(StoreError::Gone { .. })) {
            // Another server may have been first.
            self.write_index().remove(name);
        }
        deleted
    }
}

impl Index {
    fn new(instance: u64) -> Self {
        let (images, notes, ended) = Default::default();
        let (damaged, build_logs) = Default::default();
        Self { images, notes, ended, log: Log::new(instance), damaged, build_logs, additions: 0 }
    }

    fn insert(&mut self, record: &Record) {
        let Image { content, notes } = &record.image;
        self.images.insert(content.name.clone(), record.summary());
        self.notes.insert(content.name.clone(), changes::notes_of(record));
        match notes.build_log {
            Some(log) => self.build_logs.insert(content.name.clone(), log),
            None => self.build_logs.remove(&content.name),
        };
    }

    /// True if it was there.
    fn remove(&mut self, name: &ImageName) -> bool {
        self.build_logs.remove(name);
        self.notes.remove(name);
        self.images.remove(name).is_some() | self.damaged.remove(name).is_some()
    }

    /// Takes an image into the lists, or among the damaged. True if it was in neither.
    fn take(&mut self, name: &ImageName, record: Result<Record, StoreError>) -> bool {
        let is_new = !self.images.contains_key(name) && !self.damaged.contains_key(name);
        match record {
            Ok(record) => {
                self.damaged.remove(name);
                self.insert(&record);
            }
            Err(error) => {
                let why = report(&error);
                tracing::error!(image = %name, error = %why, "an image cannot be used");
                self.images.remove(name);
                self.build_logs.remove(name);
                self.damaged.insert(name.clone(), why);
            }
        }
        self.additions += u64::from(is_new);
        is_new
    }
}

/// True if one name begins with all of the other, be it below it or not.
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
    // A copy under another name would be served as what it is not.
    let source = super::record::RecordError::Damaged;
    Err(StoreError::Damaged { name: name.clone(), source })
}
