//! Images by name: one record each, made visible in one step.
//!
//! In memory there is only what lists show of each image. Changes are made one after the other;
//! reading never waits for them.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock};

use common::api::image_server::ImageSummary;
use common::image::{Image, ImageName};
use common::report::report;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use tokio::sync::Notify;

use super::layout::{self, Placed};
use super::record::Record;
use super::{StoreError, failed, make_directory, sync_directory};

#[derive(Default)]
struct Index {
    images: BTreeMap<ImageName, ImageSummary>,
    damaged: BTreeMap<ImageName, String>,
}

/// The images of a data directory.
pub struct Images {
    root: PathBuf,
    incoming: PathBuf,
    index: RwLock<Index>,
    // Held while the files change, so that a name cannot be deleted while it is being added.
    change: Mutex<()>,
    added: Notify,
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
        let mut index = Index::default();
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
            if index.images.remove(&name).is_some() || index.damaged.remove(&name).is_some() {
                let path = root.join(layout::image_path(&name));
                fs_err::remove_file(path).map_err(failed(format!("delete image {name}")))?;
            }
        }
        Ok(Self {
            root,
            incoming: data.join(layout::INCOMING),
            index: RwLock::new(index),
            change: Mutex::new(()),
            added: Notify::new(),
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
        let exists = |path: PathBuf| match fs_err::symlink_metadata(path) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(failed(format!("look for image {name}"))(error)),
        };
        if exists(self.root.join(layout::deleted_path(name)))? {
            return Err(StoreError::Gone { name: name.clone() });
        }
        if exists(self.image_path(name))? {
            return Err(StoreError::Exists { name: name.clone() });
        }
        Ok(())
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
        index.images.insert(name.clone(), record.summary());
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
        let written = fs_err::OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)
            .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
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
        match self.expect_new(name) {
            Ok(()) => return Err(StoreError::NotFound { name: name.clone() }),
            Err(StoreError::Exists { .. }) => {}
            Err(other) => return Err(other),
        }
        let what = format!("delete image {name}");
        self.place(&self.root.join(layout::deleted_path(name)), mark.as_bytes(), &what)?;
        let mut index = self.index.write().unwrap_or_else(PoisonError::into_inner);
        index.images.remove(name);
        index.damaged.remove(name);
        drop(index);
        // The mark has deleted it: what fails now is made up for at the next start.
        if let Err(error) = fs_err::remove_file(self.image_path(name)) {
            tracing::warn!(%error, "the record of a deleted image stays until the next start");
        }
        Ok(())
    }
}

impl Index {
    /// Takes the image whose record is at `path` into the lists, or among the damaged.
    fn take(&mut self, name: &ImageName, path: &Path) {
        let record = fs_err::read(path)
            .map_err(failed(format!("read image {name}")))
            .and_then(|bytes| decode(name, &bytes));
        match record {
            Ok(record) => {
                self.images.insert(name.clone(), record.summary());
            }
            Err(error) => {
                let why = report(&error);
                tracing::error!(image = %name, error = %why, "an image cannot be used");
                self.damaged.insert(name.clone(), why);
            }
        }
    }
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
