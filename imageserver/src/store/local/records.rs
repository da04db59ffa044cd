//! The records of images as files, one for each, and the file of directories. Each is written
//! completely or not at all.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use model::image::ImageName;

use crate::store::contract::{DirectoriesStorage, FoundRecord, RecordVersion, Records, Refresh};
use crate::store::error::{Ending, StoreError, failed};
use crate::store::files::{if_found, make_directory, sync_directory};
use crate::store::layout::{self, ImageFile};

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

    /// Writes a new file, which appears at `path` completely or not at all, and survives a crash.
    fn place(&self, path: &Path, bytes: &[u8], what: &str) -> Result<(), StoreError> {
        let directory = path.parent().expect("it is below the directory of images");
        make_directory(directory)?;
        let temporary = self.incoming.join("image");
        let written = write(&temporary, bytes)
            .and_then(|()| fs_err::hard_link(&temporary, path))
            .map_err(failed(what));
        if let Err(error) = if_found(fs_err::remove_file(&temporary)) {
            tracing::warn!(%error, "a temporary file stays until the next start");
        }
        written?;
        let synced = self.sync_with_parents(directory);
        if synced.is_err() {
            // A refused record must not be there after the next start either.
            fs_err::remove_file(path).map_err(failed(what))?;
        }
        synced
    }

    /// Makes the entries of `directory`, and of those above it, durable.
    fn sync_with_parents(&self, directory: &Path) -> Result<(), StoreError> {
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
        _: Refresh,
        take: &mut dyn FnMut(ImageName, Result<FoundRecord, StoreError>),
    ) -> Result<(), StoreError> {
        if self.is_read.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let mut deleted = Vec::new();
        for entry in walkdir::WalkDir::new(&self.root).min_depth(1) {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    let below = error.path().and_then(|path| path.strip_prefix(&self.root).ok());
                    let directory = below.and_then(layout::image_directory);
                    let Some(directory) = directory else {
                        return Err(failed("read the images")(error.into()));
                    };
                    // Its images are not known, so that nothing is collected until it can be read.
                    let failed = failed(format!("read the images in the directory {directory}"));
                    take(directory, Err(failed(error.into())));
                    continue;
                }
            };
            let below = entry.path().strip_prefix(&self.root).expect("the walk began at the root");
            match layout::image_file(below) {
                _ if entry.file_type().is_dir() => {}
                Some(ImageFile::Image(name)) => {
                    let read = fs_err::read(entry.path());
                    let found =
                        read.map(|bytes| FoundRecord::Record(bytes, RecordVersion::default()));
                    let found = found.map_err(failed(format!("read image {name}")));
                    take(name, found);
                }
                Some(ImageFile::Deleted(name)) => deleted.push(name),
                None => tracing::warn!(path = %entry.path().display(), "ignoring an unknown file"),
            }
        }
        // A server that was killed between the two steps of a deletion has left the record.
        for name in deleted {
            if let Err(error) = if_found(fs_err::remove_file(self.image_path(&name))) {
                tracing::warn!(%error, "the record of a deleted image stays until the next start");
            }
            take(name, Ok(FoundRecord::Gone(Ending::Deleted)));
        }
        Ok(())
    }

    fn read(&self, name: &ImageName) -> Result<FoundRecord, StoreError> {
        let bytes = if_found(fs_err::read(self.image_path(name)));
        if let Some(bytes) = bytes.map_err(failed(format!("read image {name}")))? {
            return Ok(FoundRecord::Record(bytes, RecordVersion::default()));
        }
        match self.expect_new(name) {
            Ok(()) | Err(StoreError::Exists { .. }) => Ok(FoundRecord::Absent),
            Err(StoreError::Gone { ending, .. }) => Ok(FoundRecord::Gone(ending)),
            Err(other) => Err(other),
        }
    }

    fn expect_new(&self, name: &ImageName) -> Result<(), StoreError> {
        if let Some(tombstone) = self.tombstone(name)? {
            let ending = Ending::read(&tombstone);
            return Err(StoreError::Gone { name: name.clone(), ending });
        }
        let found = if_found(fs_err::symlink_metadata(self.image_path(name)));
        match found.map_err(failed(format!("look for image {name}")))? {
            Some(_) => Err(StoreError::Exists { name: name.clone() }),
            None => Ok(()),
        }
    }

    fn create(&self, name: &ImageName, bytes: &[u8]) -> Result<(), StoreError> {
        self.expect_new(name)?;
        self.place(&self.image_path(name), bytes, &format!("store image {name}"))
    }

    fn replace(&self, name: &ImageName, _: &RecordVersion, bytes: &[u8]) -> Result<(), StoreError> {
        let (path, temporary) = (self.image_path(name), self.incoming.join("image"));
        write(&temporary, bytes)
            .and_then(|()| fs_err::rename(&temporary, &path))
            .map_err(failed(format!("change image {name}")))?;
        sync_directory(path.parent().expect("it is below the directory of images"))
    }

    fn end(
        &self,
        name: &ImageName,
        _: Option<&RecordVersion>,
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
        // The tombstone is in force: a remaining record is removed at the next start.
        if let Err(error) = fs_err::remove_file(self.image_path(name)) {
            tracing::warn!(%error, "the record of a deleted image stays until the next start");
        }
        Ok(())
    }

    fn tombstone(&self, name: &ImageName) -> Result<Option<Vec<u8>>, StoreError> {
        if_found(fs_err::read(self.root.join(layout::deleted_path(name))))
            .map_err(failed(format!("look for image {name}")))
    }

    fn add_tombstone(&self, name: &ImageName, mark: &str) -> Result<(), StoreError> {
        self.expect_new(name)?;
        let what = format!("keep that image {name} has ended");
        self.place(&self.root.join(layout::deleted_path(name)), mark.as_bytes(), &what)
    }

    fn remove(&self, name: &ImageName) -> Result<bool, StoreError> {
        let path = self.image_path(name);
        fs_err::remove_file(&path).map_err(failed(format!("drop image {name}")))?;
        let directory = path.parent().expect("it is below the directory of images");
        Ok(sync_directory(directory).is_ok())
    }
}

/// Writes a file of which nobody knows yet, durably.
pub(crate) fn write(temporary: &Path, bytes: &[u8]) -> io::Result<()> {
    // One that could not be removed may be a second name of a record.
    remove(temporary)?;
    fs_err::OpenOptions::new()
        .create_new(true)
        .write(true)
        .mode(0o600)
        .open(temporary)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
}

/// The name under which the former file is kept until the new one is durable.
const FORMER: &str = "directories.former";

/// The file of a data directory, which only this server changes.
pub struct LocalDirectories(PathBuf);

impl LocalDirectories {
    pub(crate) fn new(data: &Path) -> Self {
        Self(data.to_owned())
    }
}

impl DirectoriesStorage for LocalDirectories {
    fn read(&self, _: usize) -> Result<Option<(Vec<u8>, RecordVersion)>, StoreError> {
        let bytes =
            if_found(fs_err::read(self.location())).map_err(failed("read the directories"))?;
        Ok(bytes.map(|bytes| (bytes, RecordVersion::default())))
    }

    fn replace(&self, _: &RecordVersion, bytes: &[u8]) -> Result<RecordVersion, StoreError> {
        replace(&self.0, bytes).map(|()| RecordVersion::default())
    }

    fn has_changed(&self, _: &RecordVersion) -> Result<bool, StoreError> {
        Ok(false)
    }

    fn location(&self) -> PathBuf {
        self.0.join(layout::DIRECTORIES)
    }
}

/// Replaces the file, durably. If it fails, the former file stays.
fn replace(data: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let what = || failed("change the directories");
    let path = data.join(layout::DIRECTORIES);
    let incoming = data.join(layout::INCOMING);
    let (temporary, former) = (incoming.join(layout::DIRECTORIES), incoming.join(FORMER));
    // A failed change may have left one.
    remove(&former).map_err(what())?;
    let has_former = if_found(fs_err::hard_link(&path, &former)).map_err(what())?.is_some();
    let placed = write(&temporary, bytes).and_then(|()| fs_err::rename(&temporary, &path));
    let done = match placed.map_err(what()) {
        Ok(()) => sync_directory(data).inspect_err(|_| {
            let back = if has_former { fs_err::rename(&former, &path) } else { remove(&path) };
            if let Err(error) = back {
                tracing::error!(%error, "cannot undo a failed change: it may show after a restart");
            }
        }),
        Err(error) => Err(error),
    };
    for left in [former, temporary] {
        if let Err(error) = remove(&left) {
            tracing::warn!(%error, "a temporary file stays until the next start");
        }
    }
    done
}

fn remove(path: &Path) -> io::Result<()> {
    if_found(fs_err::remove_file(path)).map(drop)
}

#[cfg(test)]
mod tests {
    use nix::unistd::{Uid, setfsuid};

    use super::*;

    #[test]
    fn a_directory_that_cannot_be_read_is_named_and_the_other_images_are_found() {
        let data = tempfile::tempdir().unwrap();
        let records = LocalRecords::open(data.path()).unwrap();
        make_directory(&data.path().join(layout::INCOMING)).unwrap();
        for name in ["a/1", "closed/1", "z/1"] {
            records.create(&ImageName::new(name).unwrap(), name.as_bytes()).unwrap();
        }
        let closed = records.image_path(&ImageName::new("closed/1").unwrap());
        let (data, closed) = (data.path().display(), closed.parent().unwrap().display());
        run(&format!("chmod -R a+rX {data}; chmod 700 {closed}"));
        // In a thread of its own: the user of files is that of a thread.
        let looking = std::thread::spawn(move || {
            setfsuid(Uid::from_raw(65_534));
            let mut found = Vec::new();
            let result = records.changes(Refresh::Complete, &mut |name, record| {
                found.push(match record {
                    Ok(_) => name.to_string(),
                    Err(error) => format!("{name}: {error}"),
                });
            });
            found.sort();
            result.map(|()| found)
        });
        let expected = ["a/1", "closed: cannot read the images in the directory closed", "z/1"];
        assert_eq!(looking.join().unwrap().unwrap(), expected);
    }

    fn run(command: &str) {
        let status = std::process::Command::new("sh").args(["-ec", command]).status();
        assert!(status.unwrap().success(), "{command}");
    }
}
