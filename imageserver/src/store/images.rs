//! Images by name: one record each, made visible in one step.
//!
//! In memory there is only what lists show of each image. Changes are made one after the other;
//! reading never waits for them.

pub mod changes;

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock};

use common::api::image_server::ImageSummary;
use common::image::tags::{self, Tags};
use common::image::{Image, ImageName, Notes};
use common::object::ObjectId;
use common::report::report;
use common::tree::Time;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use tokio::sync::{Notify, watch};

use super::layout::{self, Placed};
use super::record::Record;
use super::{StoreError, failed, make_directory, sync_directory};
use crate::clock::random;
use crate::collection::walk::Start;
use crate::replication::log::Log;
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

/// The images of a data directory.
pub struct Images {
    root: PathBuf,
    incoming: PathBuf,
    index: RwLock<Index>,
    // Held while the files change, so that a name cannot be deleted while it is being added.
    change: Mutex<()>,
    added: Notify,
    told: watch::Sender<u64>,
}

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
    fn of(mark: &[u8]) -> Self {
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

/// Some of the images, sorted by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The images.
    pub images: Vec<ImageSummary>,
    /// True if there are more after the last of these.
    pub more: bool,
}

impl Images {
    pub(super) fn open(data: &Path) -> Result<Self, StoreError> {
        let root = data.join(layout::IMAGES);
        make_directory(&root)?;
        let mut index = Index::new(random());
        let mut deleted = Vec::new();
        for entry in walkdir::WalkDir::new(&root).min_depth(1) {
            let entry = entry.map_err(|error| failed("read the images")(error.into()))?;
            let below = entry.path().strip_prefix(&root).expect("the walk began at the root");
            match layout::placed(below) {
                _ if entry.file_type().is_dir() => {}
                Some(Placed::Image(name)) => index.take(&name, entry.path()),
                Some(Placed::Deleted(name)) => deleted.push(name),
                None => tracing::warn!(path = %entry.path().display(), "not a file of the server"),
            }
        }
        // A server that was killed between the two steps of a deletion has left the record.
        for name in deleted {
            if index.remove(&name) {
                let path = root.join(layout::image_path(&name));
                fs_err::remove_file(path).map_err(failed(format!("delete image {name}")))?;
            }
            let mark = fs_err::read(root.join(layout::deleted_path(&name)));
            index.end(&name, Mark::read(&mark.map_err(failed(format!("look for image {name}")))?));
        }
        Ok(Self {
            root,
            incoming: data.join(layout::INCOMING),
            index: RwLock::new(index),
            change: Mutex::new(()),
            added: Notify::new(),
            told: watch::Sender::new(0),
        })
    }

    fn image_path(&self, name: &ImageName) -> PathBuf {
        self.root.join(layout::image_path(name))
    }

    /// Refuses a name that is or was used.
    ///
    /// # Errors
    ///
    /// [`StoreError::Exists`] or [`StoreError::Gone`].
    pub fn expect_new(&self, name: &ImageName) -> Result<(), StoreError> {
        let why = || failed(format!("look for image {name}"));
        match fs_err::read(self.root.join(layout::deleted_path(name))) {
            Ok(mark) => {
                let ending = Ending::of(&mark);
                return Err(StoreError::Gone { name: name.clone(), ending });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(why()(error)),
        }
        match fs_err::symlink_metadata(self.image_path(name)) {
            Ok(_) => Err(StoreError::Exists { name: name.clone() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(why()(error)),
        }
    }

    /// Makes an image durable, then visible. All that it needs is durable already.
    ///
    /// # Errors
    ///
    /// As [`Images::expect_new`]; otherwise what the file-system says.
    pub fn add(&self, record: &Record) -> Result<(), StoreError> {
        let name = &record.image.content.name;
        let bytes =
            record.encode().map_err(|source| StoreError::Record { name: name.clone(), source })?;
        let _change = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        self.expect_new(name)?;
        self.place(&self.image_path(name), &bytes, &format!("store image {name}"))?;
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.insert(record);
        index.additions += 1;
        self.tell(&mut index, name);
        drop(index);
        self.added.notify_waiters();
        Ok(())
    }

    /// Writes a file that appears at `path` complete or not at all, and survives a crash. The
    /// name must be new.
    fn place(&self, path: &Path, bytes: &[u8], what: &str) -> Result<(), StoreError> {
        let directory = path.parent().expect("it is below the directory of images");
        make_directory(directory)?;
        let temporary = self.incoming.join("image");
        let written = write(&temporary, bytes)
            .and_then(|()| fs_err::hard_link(&temporary, path))
            .map_err(failed(what));
        match fs_err::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, "a temporary file stays until the next start");
            }
            _ => {}
        }
        written?;
        let synced = self.sync_up(directory);
        if synced.is_err() {
            // What was refused must not be there after the next start either.
            fs_err::remove_file(path).map_err(failed(what))?;
        }
        synced
    }

    /// Makes the entries of `directory`, and of those above it, durable.
    fn sync_up(&self, directory: &Path) -> Result<(), StoreError> {
        for directory in directory.ancestors() {
            sync_directory(directory)?;
            if directory == self.root {
                break;
            }
        }
        Ok(())
    }

    /// Reads an image.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Gone`], or [`StoreError::Damaged`].
    pub fn get(&self, name: &ImageName) -> Result<Record, StoreError> {
        // A record that is still being made durable is not there yet.
        if !self.is_visible(name) {
            return Err(self.why_absent(name));
        }
        match fs_err::read(self.image_path(name)) {
            Ok(bytes) => decode(name, &bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(self.why_absent(name)),
            Err(error) => Err(failed(format!("read image {name}"))(error)),
        }
    }

    fn is_visible(&self, name: &ImageName) -> bool {
        let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
        index.images.contains_key(name) || index.damaged.contains_key(name)
    }

    fn why_absent(&self, name: &ImageName) -> StoreError {
        match self.expect_new(name) {
            Ok(()) | Err(StoreError::Exists { .. }) => StoreError::NotFound { name: name.clone() },
            Err(other) => other,
        }
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

    /// Deletes an image, and lets no other have its name. Its objects stay.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`] or [`StoreError::Gone`]; otherwise what the file-system says.
    pub fn delete(&self, name: &ImageName, mark: &str) -> Result<(), StoreError> {
        let _change = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        self.delete_locked(name, mark)
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
        let _change = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let expires_at = {
            let index = self.index.read().unwrap_or_else(PoisonError::into_inner);
            index.images.get(name).map(|summary| summary.expires_at)
        };
        if !expires_at.is_some_and(is_due) {
            return Ok(false);
        }
        self.delete_locked(name, mark).map(|()| true)
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
        let _change = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let mut record = self.get(name)?;
        let former = record.image.notes.clone();
        change(&mut record.image.notes)?;
        if record.image.notes != former {
            self.replace(name, &record)?;
        }
        Ok(record.image.notes)
    }

    /// Puts `record` in the place of the one that is there: whoever reads gets either of them.
    fn replace(&self, name: &ImageName, record: &Record) -> Result<(), StoreError> {
        let bytes =
            record.encode().map_err(|source| StoreError::Record { name: name.clone(), source })?;
        let (path, temporary) = (self.image_path(name), self.incoming.join("image"));
        write(&temporary, &bytes)
            .and_then(|()| fs_err::rename(&temporary, &path))
            .map_err(failed(format!("change image {name}")))?;
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.insert(record);
        self.tell(&mut index, name);
        drop(index);
        sync_directory(path.parent().expect("it is below the directory of images"))
    }

    fn delete_locked(&self, name: &ImageName, mark: &str) -> Result<(), StoreError> {
        match self.expect_new(name) {
            Ok(()) => return Err(StoreError::NotFound { name: name.clone() }),
            Err(StoreError::Exists { .. }) => {}
            Err(other) => return Err(other),
        }
        let what = format!("delete image {name}");
        let mark = Mark::text(mark, self.digest(name));
        self.place(&self.root.join(layout::deleted_path(name)), mark.as_bytes(), &what)?;
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.end(name, Mark::read(mark.as_bytes()));
        self.tell(&mut index, name);
        drop(index);
        // The mark has deleted it: what fails now is made up for at the next start.
        if let Err(error) = fs_err::remove_file(self.image_path(name)) {
            tracing::warn!(%error, "the record of a deleted image stays until the next start");
        }
        Ok(())
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

    /// Takes the image whose record is at `path` into the lists, or among the damaged.
    fn take(&mut self, name: &ImageName, path: &Path) {
        let record = fs_err::read(path)
            .map_err(failed(format!("read image {name}")))
            .and_then(|bytes| decode(name, &bytes));
        match record {
            Ok(record) => {
                self.insert(&record);
            }
            Err(error) => {
                let why = report(&error);
                tracing::error!(image = %name, error = %why, "an image cannot be used");
                self.damaged.insert(name.clone(), why);
            }
        }
    }
}

/// Writes a file of which nobody knows yet, durably.
fn write(temporary: &Path, bytes: &[u8]) -> io::Result<()> {
    fs_err::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(temporary)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
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
