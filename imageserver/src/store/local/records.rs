//! The records of images as files: one for each, made visible in one step.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use model::image::ImageName;

use crate::store::contract::{Found, Look, Records, Version};
use crate::store::layout::{self, Placed};
use crate::store::{
    error::{Ending, StoreError, failed},
    files::{make_directory, sync_directory},
};

/// The records of a data directory, which only this server changes.
pub struct LocalRecords {
    root: PathBuf,
    incoming: PathBuf,
    is_read: AtomicBool,
}

impl LocalRecords {
    pub(in crate::store) fn open(data: &Path) -> Result<Self, StoreError> {
        let root = data.join(layout::IMAGES);
        make_directory(&root)?;
        let incoming = data.join(layout::INCOMING);
        Ok(Self { root, incoming, is_read: AtomicBool::new(false) })
    }

    fn image_path(&self, name: &ImageName) -> PathBuf {
        self.root.join(layout::image_path(name))
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
}

impl Records for LocalRecords {
    fn changes(
        &self,
        _: Look,
        take: &mut dyn FnMut(ImageName, Result<Found, StoreError>),
    ) -> Result<(), StoreError> {
        if self.is_read.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let mut deleted = Vec::new();
        for entry in walkdir::WalkDir::new(&self.root).min_depth(1) {
            let entry = entry.map_err(|error| failed("read the images")(error.into()))?;
            let below = entry.path().strip_prefix(&self.root).expect("the walk began at the root");
            match layout::placed(below) {
                _ if entry.file_type().is_dir() => {}
                Some(Placed::Image(name)) => {
                    let read = fs_err::read(entry.path());
                    let found = read.map(|bytes| Found::Record(bytes, Version::default()));
                    let found = found.map_err(failed(format!("read image {name}")));
                    take(name, found);
                }
                Some(Placed::Deleted(name)) => deleted.push(name),
                None => tracing::warn!(path = %entry.path().display(), "not a file of the server"),
            }
        }
        // A server that was killed between the two steps of a deletion has left the record.
        for name in deleted {
            let path = self.image_path(&name);
            match fs_err::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed(format!("delete image {name}"))(error));
                }
                _ => take(name, Ok(Found::Gone(Ending::Deleted))),
            }
        }
        Ok(())
    }

    fn read(&self, name: &ImageName) -> Result<Found, StoreError> {
        match fs_err::read(self.image_path(name)) {
            Ok(bytes) => Ok(Found::Record(bytes, Version::default())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => match self.expect_new(name) {
                Ok(()) | Err(StoreError::Exists { .. }) => Ok(Found::Absent),
                Err(StoreError::Gone { ending, .. }) => Ok(Found::Gone(ending)),
                Err(other) => Err(other),
            },
            Err(error) => Err(failed(format!("read image {name}"))(error)),
        }
    }

    fn expect_new(&self, name: &ImageName) -> Result<(), StoreError> {
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

    fn create(&self, name: &ImageName, bytes: &[u8]) -> Result<(), StoreError> {
        self.expect_new(name)?;
        self.place(&self.image_path(name), bytes, &format!("store image {name}"))
    }

    fn replace(&self, name: &ImageName, _: &Version, bytes: &[u8]) -> Result<(), StoreError> {
        let (path, temporary) = (self.image_path(name), self.incoming.join("image"));
        write(&temporary, bytes)
            .and_then(|()| fs_err::rename(&temporary, &path))
            .map_err(failed(format!("change image {name}")))?;
        sync_directory(path.parent().expect("it is below the directory of images"))
    }

    fn bury(
        &self,
        name: &ImageName,
        _: Option<&Version>,
        mark: &str,
        gone: &mut dyn FnMut(),
    ) -> Result<(), StoreError> {
        match self.expect_new(name) {
            Ok(()) => return Err(StoreError::NotFound { name: name.clone() }),
            Err(StoreError::Exists { .. }) => {}
            Err(other) => return Err(other),
        }
        let what = format!("delete image {name}");
        self.place(&self.root.join(layout::deleted_path(name)), mark.as_bytes(), &what)?;
        gone();
        // The mark has deleted it: what fails now is made up for at the next start.
        if let Err(error) = fs_err::remove_file(self.image_path(name)) {
            tracing::warn!(%error, "the record of a deleted image stays until the next start");
        }
        Ok(())
    }

    fn mark(&self, name: &ImageName) -> Result<Option<Vec<u8>>, StoreError> {
        match fs_err::read(self.root.join(layout::deleted_path(name))) {
            Ok(mark) => Ok(Some(mark)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(format!("look for image {name}"))(error)),
        }
    }

    fn reserve(&self, name: &ImageName, mark: &str) -> Result<(), StoreError> {
        self.expect_new(name)?;
        let what = format!("keep that image {name} has ended");
        self.place(&self.root.join(layout::deleted_path(name)), mark.as_bytes(), &what)
    }

    fn forget(&self, name: &ImageName) -> Result<bool, StoreError> {
        let path = self.image_path(name);
        fs_err::remove_file(&path).map_err(failed(format!("drop image {name}")))?;
        let directory = path.parent().expect("it is below the directory of images");
        Ok(sync_directory(directory).is_ok())
    }
}

/// Writes a file of which nobody knows yet, durably.
pub(crate) fn write(temporary: &Path, bytes: &[u8]) -> io::Result<()> {
    fs_err::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(temporary)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
}
