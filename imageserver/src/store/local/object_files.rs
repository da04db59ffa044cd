//! The files of objects: their paths and lengths, and whether they are on the medium.

use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use api::object_stream::ContentForm;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use model::lock::locked;
use model::object::{Algorithm, ObjectId};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use system::random::random;

use crate::core::collection::disk_pressure::Space;
use crate::store::damaged_objects::{Damage, DamagedObjects};
use crate::store::error::{StoreError, failed};
use crate::store::files::{if_found, make_directory};
use crate::store::layout;
use crate::store::object_counts::ObjectCounter;
use crate::store::packed::{PackedReader, is_damage};

/// The file that holds an object.
pub(super) struct Located {
    pub path: PathBuf,
    pub form: ContentForm,
    pub metadata: std::fs::Metadata,
    /// False if it is no regular file, or if this process may not read it.
    is_readable: bool,
}

impl Located {
    /// Returns the length of the file in bytes; `None` for the empty file that a crash leaves, and
    /// for what cannot be read.
    pub fn length(&self, id: &ObjectId) -> Option<u64> {
        if !self.is_readable {
            return None;
        }
        let length = self.metadata.len();
        let is_object = length > 0 || (self.form == ContentForm::Plain && is_empty_object(id));
        is_object.then_some(length)
    }
}

/// The files of the objects of a data directory.
pub struct ObjectFiles {
    pub(super) root: PathBuf,
    incoming: PathBuf,
    pub(super) quarantine: PathBuf,
    // Opened at start, so that failed write-backs of all later objects are reported to it.
    pub(super) handle: fs_err::File,
    next: AtomicU64,
    pub(super) unsynced: UnsyncedObjects,
    pub(super) counter: ObjectCounter,
    pub(super) damaged_objects: DamagedObjects,
    /// Files that were read from the medium, or received, since the start; only while objects are
    /// doubtful.
    pub(super) on_medium: VerifiedFiles,
}

impl ObjectFiles {
    pub(super) fn open(data: &Path) -> Result<Self, StoreError> {
        let root = data.join(layout::OBJECTS);
        for algorithm in layout::ALGORITHMS {
            for directory in layout::fan_out(algorithm) {
                make_directory(&root.join(directory))?;
            }
        }
        let handle = fs_err::File::open(&root).map_err(failed("open the objects"))?;
        let files = Self {
            root,
            incoming: data.join(layout::INCOMING),
            quarantine: data.join(layout::QUARANTINE),
            handle,
            // Files of a former server may be there still.
            next: AtomicU64::new(random()),
            unsynced: UnsyncedObjects::open(data)?,
            counter: ObjectCounter::new(),
            damaged_objects: DamagedObjects::default(),
            on_medium: VerifiedFiles::default(),
        };
        make_directory(&files.quarantine)?;
        files.expect_same_device(&files.incoming)?;
        files.expect_same_device(&files.quarantine)?;
        Ok(files)
    }

    /// Refuses a directory on another file-system: objects are renamed into it or out of it.
    pub(super) fn expect_same_device(&self, path: &Path) -> Result<(), StoreError> {
        let why = || failed("open the objects");
        let device = self.handle.metadata().map_err(why())?.dev();
        if fs_err::metadata(path).map_err(why())?.dev() == device {
            return Ok(());
        }
        Err(StoreError::TwoFileSystems { path: path.to_owned() })
    }

    pub(super) fn path(&self, id: &ObjectId, form: ContentForm) -> PathBuf {
        self.root.join(layout::stored_path(id, form))
    }

    /// Opens the file of an object. Never follows a link, or waits for what is no regular file. The
    /// time of access stays as it is, where this process may ask for that: each one that changes is
    /// written to the medium.
    pub(super) fn open_file(
        &self,
        id: &ObjectId,
        form: ContentForm,
    ) -> io::Result<(File, Metadata)> {
        let path = layout::stored_path(id, form);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        // From the directory on, which is faster than from the root.
        let open = |flags| openat(&self.handle, &path, flags, Mode::empty());
        let file = match open(flags | OFlags::NOATIME) {
            Err(Errno::PERM) => open(flags)?,
            other => other?,
        };
        let file = File::from(file);
        let metadata = file.metadata()?;
        if metadata.is_file() { Ok((file, metadata)) } else { Err(Errno::ISDIR.into()) }
    }

    pub(super) fn locate_as(
        &self,
        id: &ObjectId,
        form: ContentForm,
    ) -> Result<Option<Located>, StoreError> {
        let path = self.path(id, form);
        let found = if_found(fs_err::symlink_metadata(&path));
        let metadata = found.map_err(failed(format!("look for object {id}")))?;
        let Some(metadata) = metadata else { return Ok(None) };
        let is_readable = metadata.is_file() && may_read(&path, &metadata);
        if !is_readable {
            self.damaged_objects.add(*id, Damage::Unreadable);
        }
        Ok(Some(Located { path, form, metadata, is_readable }))
    }

    /// Returns the file of the object; otherwise what is in its place, which has no length.
    pub(super) fn locate(&self, id: &ObjectId) -> Result<Option<Located>, StoreError> {
        let mut empty = None;
        for form in layout::FORMS {
            match self.locate_as(id, form)? {
                Some(located) if located.length(id).is_some() => return Ok(Some(located)),
                located => empty = empty.or(located),
            }
        }
        Ok(empty)
    }

    /// Removes files of the object in other forms than `form`, in which it is there.
    pub(super) fn remove_others(&self, id: &ObjectId, form: ContentForm) {
        for other in layout::FORMS.into_iter().filter(|other| *other != form) {
            match if_found(fs_err::remove_file(self.path(id, other))) {
                Ok(Some(())) => {
                    tracing::info!(object = %id, "removed the second file of an object");
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(object = %id, %error, "cannot remove the other file");
                }
            }
        }
    }

    /// Renames the complete file `temporary` to the object. A directory in its place is moved to
    /// the quarantine.
    pub(super) fn put(&self, temporary: &Path, id: &ObjectId, form: ContentForm) -> io::Result<()> {
        let path = self.path(id, form);
        let put = || std::fs::rename(temporary, &path);
        match self.unsynced.place(put) {
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
                let inode = fs_err::symlink_metadata(&path)?.ino();
                let target = self.quarantine.join(layout::quarantine_name(id, form, inode));
                fs_err::rename(&path, &target)?;
                let quarantine = target.display();
                tracing::error!(object = %id, %quarantine, "a directory was in place of an object");
                self.unsynced.place(put)
            }
            result => result,
        }
    }

    /// A path in the directory of what is being written that no one else uses.
    pub(super) fn temporary(&self) -> PathBuf {
        self.incoming.join(format!("object-{}", self.next.fetch_add(1, Ordering::Relaxed)))
    }

    /// Returns the length of the object in bytes, or `None` if it is not there. Its content is not
    /// read.
    pub(super) fn size_bytes(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        match self.locate(id)? {
            Some(located) if located.length(id).is_some() => content_bytes(id, &located),
            _ => Ok(None),
        }
    }

    pub(super) fn is_doubtful(&self) -> bool {
        self.unsynced.is_doubtful()
    }

    /// Records that this server has put `id` in place: it learns of failed write-backs.
    pub(super) fn received(&self, id: &ObjectId) {
        self.damaged_objects.mark_repaired(id);
        if self.is_doubtful()
            && let Ok(Some(located)) = self.locate(id)
        {
            self.on_medium.remember(id, &located.metadata);
        }
    }

    /// Returns the free space for writers without privileges, in bytes.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let status = self.status()?;
        Ok(status.blocks_available().saturating_mul(status.fragment_size()))
    }

    pub(super) fn status(&self) -> Result<nix::sys::statvfs::Statvfs, StoreError> {
        nix::sys::statvfs::fstatvfs(self.handle.file())
            .map_err(|errno| failed("ask how much space is free")(errno.into()))
    }

    /// The space of the file-system.
    pub fn space(&self) -> Result<Space, StoreError> {
        let status = self.status()?;
        let unit = status.fragment_size();
        Ok(Space {
            used: status.blocks().saturating_sub(status.blocks_free()).saturating_mul(unit),
            free: status.blocks_available().saturating_mul(unit),
        })
    }
}

/// Returns true if this process may read the file.
fn may_read(path: &Path, metadata: &std::fs::Metadata) -> bool {
    let is_own = metadata.uid() == nix::unistd::geteuid().as_raw();
    is_own && metadata.mode() & 0o400 != 0
        || nix::unistd::access(path, nix::unistd::AccessFlags::R_OK).is_ok()
}

/// Records, for the start after a crash, that objects may not be on the medium.
///
/// After a power failure a file-system may have kept the name and length of a file and lost its
/// content. A server that ends after a failed write-back forgets the failure. Therefore an empty
/// file, [`layout::UNSYNCED`], is created before the first object is put in place and removed after
/// all were synced. It need not be synced itself: a file-system with a journal keeps the order of
/// names, so the file is there whenever such an object is. A server that finds it at start verifies
/// each object before it uses it.
pub(super) struct UnsyncedObjects {
    mark: PathBuf,
    /// True if a former server has left such objects, and not all have been read since.
    doubtful: AtomicBool,
    state: Mutex<State>,
}

struct State {
    marked: bool,
    /// How many objects were put in place since the start.
    placed: u64,
}

impl UnsyncedObjects {
    pub fn open(data: &Path) -> Result<Self, StoreError> {
        let mark = data.join(layout::UNSYNCED);
        let found = if_found(fs_err::symlink_metadata(&mark));
        let marked = found.map_err(failed("ask how the former server ended"))?.is_some();
        if marked {
            tracing::warn!(
                "the former server did not stop cleanly: each object is verified before it is used"
            );
        }
        let state = Mutex::new(State { marked, placed: 0 });
        Ok(Self { mark, doubtful: AtomicBool::new(marked), state })
    }

    /// Creates the mark if it is missing, then puts an object in place by `put`.
    pub fn place(&self, put: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = locked(&self.state);
        if !state.marked {
            let mut options = fs_err::OpenOptions::new();
            options.create(true).truncate(false).write(true).mode(0o600).open(&self.mark)?;
            state.marked = true;
        }
        put()?;
        state.placed += 1;
        Ok(())
    }

    /// Returns how many objects were put in place until now.
    pub fn placed(&self) -> u64 {
        locked(&self.state).placed
    }

    /// Removes the mark after a sync, if no object was put in place since there were `before`.
    pub fn synced(&self, before: u64) {
        let mut state = locked(&self.state);
        if !state.marked || state.placed != before || self.is_doubtful() {
            return;
        }
        match fs_err::remove_file(&self.mark) {
            Ok(()) => state.marked = false,
            Err(error) => {
                tracing::warn!(%error, "the next start will verify each object before it is used");
            }
        }
    }

    /// Returns true if an object may be damaged that no server has read.
    pub fn is_doubtful(&self) -> bool {
        self.doubtful.load(Ordering::Acquire)
    }

    /// Records that every object was read since the start.
    pub fn all_read(&self) {
        self.doubtful.store(false, Ordering::Release);
    }
}

/// The most files that are remembered: 17 bytes each, and as much again while the table grows.
const REMEMBERED_MAX: usize = 250_000;

/// Remembers which object files were verified since the server started.
///
/// A large object is hashed before it is served, and not again while its file is unchanged: same
/// inode, length, and times of change. A user cannot set the ctime back. Memory holds a short
/// digest of these; when it is full it is cleared, which only costs hashing again.
#[derive(Default)]
pub struct VerifiedFiles(Mutex<HashSet<[u8; 16]>>);

impl VerifiedFiles {
    /// Returns true if the file that `metadata` describes was found to be the object `id`.
    pub fn knows(&self, id: &ObjectId, metadata: &std::fs::Metadata) -> bool {
        locked(&self.0).contains(&stamp(id, metadata))
    }

    /// Records that the file of `metadata` is the object `id`.
    pub fn remember(&self, id: &ObjectId, metadata: &std::fs::Metadata) {
        let mut stamps = locked(&self.0);
        if stamps.len() >= REMEMBERED_MAX {
            stamps.clear();
        }
        stamps.insert(stamp(id, metadata));
    }

    /// Forgets that the file of `metadata` is the object `id`.
    pub fn forget(&self, id: &ObjectId, metadata: &std::fs::Metadata) {
        let mut stamps = locked(&self.0);
        stamps.remove(&stamp(id, metadata));
    }
}

fn stamp(id: &ObjectId, metadata: &std::fs::Metadata) -> [u8; 16] {
    let mut bytes = Vec::with_capacity(64 + 7 * 8);
    bytes.extend_from_slice(id.digest());
    for number in [metadata.dev(), metadata.ino(), metadata.size()] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    let times = [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()];
    for number in times {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    let digest = Algorithm::Blake3.digest(&bytes);
    let mut short = [0; 16];
    short.copy_from_slice(&digest.digest()[..16]);
    short
}

/// Returns the length of the object in a file, in bytes; `None` if a damaged file does not tell it.
pub(super) fn content_bytes(id: &ObjectId, located: &Located) -> Result<Option<u64>, StoreError> {
    match located.form {
        ContentForm::Plain => Ok(Some(located.metadata.len())),
        ContentForm::Packed => {
            read_size(&located.path, id).map_err(failed(format!("look for object {id}")))
        }
    }
}

/// The length of the content that the packed file of `id` says to have.
pub(crate) fn read_size(path: &Path, id: &ObjectId) -> io::Result<Option<u64>> {
    match std::fs::File::open(path).and_then(|file| PackedReader::open(file, id)) {
        Ok(reader) => Ok(Some(reader.size_bytes())),
        Err(error) if is_damage(&error) || error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn is_empty_object(id: &ObjectId) -> bool {
    id.algorithm().digest(&[]) == *id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_there_while_an_object_may_not_be_on_the_medium() {
        let data = tempfile::tempdir().unwrap();
        let mark = data.path().join(layout::UNSYNCED);
        let unsynced = UnsyncedObjects::open(data.path()).unwrap();
        assert!(!mark.exists() && !unsynced.is_doubtful());
        let put = || {
            assert!(mark.exists(), "it is there before the object is");
            Ok(())
        };
        unsynced.place(put).unwrap();
        let before = unsynced.placed();
        unsynced.place(put).unwrap();
        unsynced.synced(before);
        assert!(mark.exists(), "one came while the others were synced");
        unsynced.synced(unsynced.placed());
        assert!(!mark.exists());
        unsynced.synced(unsynced.placed());
        unsynced.place(put).unwrap();
        unsynced.place(|| Err(io::ErrorKind::StorageFull.into())).unwrap_err();

        // It was killed.
        let unsynced = UnsyncedObjects::open(data.path()).unwrap();
        assert!(unsynced.is_doubtful());
        unsynced.synced(unsynced.placed());
        assert!(mark.exists(), "what the former server left has not been read");
        unsynced.all_read();
        unsynced.synced(unsynced.placed());
        assert!(!mark.exists() && !unsynced.is_doubtful());
    }
}
