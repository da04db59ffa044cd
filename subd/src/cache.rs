//! The object cache: files named by id in `/.subd/objects`.
//!
//! # Invariants
//!
//! * An object gets its name only after its content was hashed to it. A name alone proves nothing,
//!   because a crash may leave incomplete files: all are hashed again when subd starts.
//! * The inode, the size and the ctime of each object are recorded when it is hashed. If one of
//!   them has changed, the object is hashed again before it is used.
//! * An object that was taken for a staged update still counts as cached: it is put back if the
//!   update is discarded.
//! * At most [`PARTIALS_MAX`] incomplete files are kept.
//!
//! [`PARTIALS_MAX`]: receive::PARTIALS_MAX

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use model::display::error_chain;
use model::lock::locked;
use model::object::{Algorithm, Hasher, ObjectId};
use model::scope::Attributes;
use model::tree::{Time, only_root_writes};
use receive::Partial;
use tokio_util::sync::CancellationToken;

use crate::root::{Directory, Kind, RootError, Status, errno_of, is_full};

pub mod receive;

/// The start of the names of files that are put back from an update, or that take the place of
/// another file.
const TEMPORARY: &[u8] = b"incoming.";

/// How much is read at once, in bytes.
const BUFFER_BYTES: usize = 128 << 10;

/// A failure of the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    #[error("the object cache failed")]
    Directory {
        #[from]
        source: RootError,
    },
    #[error("cannot {operation} object {id}")]
    Content { operation: &'static str, id: ObjectId, source: io::Error },
    #[error("subd is stopping")]
    Stopping,
    #[error("{got_bytes} bytes that hash to {got} came for object {want} of {want_bytes} bytes")]
    Wrong {
        want: ObjectId,
        /// The size of `want`, in bytes.
        want_bytes: u64,
        got: ObjectId,
        /// How much was received, in bytes. At most one byte too many is read.
        got_bytes: u64,
    },
    #[error("object {id} is not in the cache")]
    Absent { id: ObjectId },
}

impl CacheError {
    /// True if the file-system is full.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Directory { source } => source.is_full(),
            Self::Content { source, .. } => is_full(source),
            Self::Wrong { .. } | Self::Absent { .. } | Self::Stopping => false,
        }
    }
}

/// How much of an object is copied at once, in bytes.
const COPY_BYTES: u64 = 16 << 20;

/// Identifies the state of a file when it was hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileState {
    size_bytes: u64,
    inode: u64,
    ctime: Time,
}

impl FileState {
    fn of(status: &Status) -> Self {
        let Status { size_bytes, inode, ctime, .. } = *status;
        Self { size_bytes, inode, ctime }
    }
}

#[derive(Clone, Copy, Debug)]
enum CachedObject {
    /// In the cache directory.
    Stored(FileState),
    /// Moved into a staged update.
    Taken { size_bytes: u64 },
}

/// The object cache.
#[derive(Debug)]
pub struct Cache {
    directory: Arc<Directory>,
    objects: Mutex<BTreeMap<ObjectId, CachedObject>>,
    partials: Mutex<BTreeMap<ObjectId, Partial>>,
    next_temporary: AtomicU64,
}

/// The objects that were found when a cache was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenReport {
    /// Objects that hash to their names.
    pub objects: usize,
    /// Files that were removed because they are no objects.
    pub removed: usize,
}

impl Cache {
    /// Opens the cache in `directory`: hashes every object and removes those with wrong content.
    /// Incomplete objects stay, and are hashed when the rest arrives. What cannot be removed, as on
    /// a root that is read-only, is logged and not in the cache.
    pub fn open(directory: Arc<Directory>) -> Result<(Self, OpenReport), CacheError> {
        let mut objects = BTreeMap::new();
        let mut partials = BTreeMap::new();
        let mut opened = OpenReport::default();
        for name in directory.names()? {
            if partials.len() < receive::PARTIALS_MAX
                && let Some((id, partial)) = receive::leftover(&directory, &name)
            {
                partials.insert(id, partial);
                continue;
            }
            match examine(&directory, &name) {
                Some((id, state)) => {
                    objects.insert(id, CachedObject::Stored(state));
                    opened.objects += 1;
                }
                None => match crate::state::directories::remove_all(&directory, &name) {
                    Ok(()) => opened.removed += 1,
                    Err(error) => {
                        tracing::warn!("a file that is no object stays: {}", error_chain(&error));
                    }
                },
            }
        }
        let (objects, partials) = (Mutex::new(objects), Mutex::new(partials));
        let next_temporary = AtomicU64::new(0);
        Ok((Self { directory, objects, partials, next_temporary }, opened))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ObjectId, CachedObject>> {
        // A panic elsewhere leaves the map as it was: each change is one insertion or removal.
        locked(&self.objects)
    }

    /// Returns the ids of all objects, sorted.
    pub fn ids(&self) -> Vec<ObjectId> {
        self.lock().keys().copied().collect()
    }

    /// Returns the size of the object in bytes, if it is cached.
    pub fn size_of(&self, id: &ObjectId) -> Option<u64> {
        self.lock().get(id).map(|holding| match holding {
            CachedObject::Stored(state) => state.size_bytes,
            CachedObject::Taken { size_bytes } => *size_bytes,
        })
    }

    /// Removes objects that no update has taken. Returns those that were removed.
    ///
    /// # Errors
    ///
    /// [`CacheError`] for the first that cannot be removed; those before it are gone.
    pub fn remove(&self, ids: &[ObjectId]) -> Result<Vec<ObjectId>, CacheError> {
        let mut objects = self.lock();
        let mut removed = Vec::new();
        for id in ids {
            if matches!(objects.get(id), Some(CachedObject::Stored(_))) {
                crate::state::directories::remove_all(&self.directory, &name_of(id))?;
                objects.remove(id);
                removed.push(*id);
            }
            self.discard_partial(id)?;
        }
        Ok(removed)
    }

    /// Checks that the object is what its name says. Hashes it if it may have changed.
    fn check(&self, id: &ObjectId) -> Result<FileState, CacheError> {
        let known = match self.lock().get(id) {
            Some(CachedObject::Stored(state)) => *state,
            _ => return Err(CacheError::Absent { id: *id }),
        };
        let name = name_of(id);
        match self.directory.stat(&name) {
            Ok(status) if FileState::of(&status) == known => return Ok(known),
            Ok(_) => {}
            Err(error) if error.is_absent() => {}
            Err(error) => return Err(error.into()),
        }
        match examine(&self.directory, &name) {
            Some((_, state)) => {
                self.lock().insert(*id, CachedObject::Stored(state));
                Ok(state)
            }
            None => {
                crate::state::directories::remove_all(&self.directory, &name)?;
                self.lock().remove(id);
                Err(CacheError::Absent { id: *id })
            }
        }
    }

    /// Moves the object to `name` in `to`; it stays counted as cached until [`Cache::forget`].
    pub fn take(&self, id: &ObjectId, to: &Directory, name: &[u8]) -> Result<(), CacheError> {
        let state = self.check(id)?;
        self.directory.rename_noreplace(&name_of(id), to, name)?;
        self.lock().insert(*id, CachedObject::Taken { size_bytes: state.size_bytes });
        Ok(())
    }

    /// Reads the object. Of one that has more than `bytes_max` bytes, only so many and one more are
    /// read.
    pub fn read(&self, id: &ObjectId, bytes_max: u64) -> Result<Vec<u8>, CacheError> {
        self.check(id)?;
        let fail = |source| CacheError::Content { operation: "read", id: *id, source };
        let mut bytes = Vec::new();
        let file = self.directory.open_file(&name_of(id))?;
        file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(fail)?;
        Ok(bytes)
    }

    /// Copies the object to the new file `name` in `to`, sharing its blocks where the file-system
    /// can.
    pub fn copy(
        &self,
        id: &ObjectId,
        to: &Directory,
        name: &[u8],
        stop: &CancellationToken,
    ) -> Result<(), CacheError> {
        let state = self.check(id)?;
        let fail = |source| CacheError::Content { operation: "copy", id: *id, source };
        let mut from = self.directory.open_file(&name_of(id))?;
        let mut file = to.create_file(name, 0o600)?;
        let mut copied = 0;
        loop {
            if stop.is_cancelled() {
                return Err(CacheError::Stopping);
            }
            // The kernel does the copying (`copy_file_range`).
            let part = io::copy(&mut (&mut from).take(COPY_BYTES), &mut file).map_err(fail)?;
            copied += part;
            if part == 0 {
                break;
            }
        }
        if copied != state.size_bytes {
            return Err(fail(io::Error::other("its length changed while it was copied")));
        }
        Ok(())
    }

    /// Forgets objects that were taken for an update that succeeded. Returns those that were
    /// forgotten.
    #[must_use]
    pub fn forget(&self, ids: &[ObjectId]) -> Vec<ObjectId> {
        let mut objects = self.lock();
        let mut gone = Vec::new();
        for id in ids {
            if matches!(objects.get(id), Some(CachedObject::Taken { .. })) {
                objects.remove(id);
                gone.push(*id);
            }
        }
        gone
    }

    /// Moves an object that was taken back into the cache directory: `name` in `from`. It is cached
    /// again only after [`Cache::restore`].
    ///
    /// # Errors
    ///
    /// [`CacheError`] if it cannot be moved; then it is not cached any more.
    pub fn retrieve(
        &self,
        id: &ObjectId,
        from: &Directory,
        name: &[u8],
        visible: Visible,
    ) -> Result<Retrieved, CacheError> {
        let temporary = self.temporary();
        match from.rename_noreplace(name, &self.directory, &temporary) {
            Ok(()) => Ok(Retrieved { id: *id, temporary, visible }),
            Err(error) => {
                self.lock().remove(id);
                Err(error.into())
            }
        }
    }

    /// Caches an object that was retrieved. It is hashed again, because others may have been able
    /// to change it; it must have no other name by now. If others than root could write to it while
    /// it was visible, it is removed: a process may have it open, and could write to what is made
    /// of it later.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if it is no longer the object; then it is not cached any more.
    pub fn restore(&self, retrieved: Retrieved) -> Result<(), CacheError> {
        let id = retrieved.id;
        let restored = self.put_back(&retrieved);
        match &restored {
            Ok(state) => self.lock().insert(id, CachedObject::Stored(*state)),
            Err(_) => self.lock().remove(&id),
        };
        restored.map(|_| ())
    }

    fn put_back(&self, retrieved: &Retrieved) -> Result<FileState, CacheError> {
        let Retrieved { id, temporary, visible } = retrieved;
        let directory = &self.directory;
        let status = directory.stat(temporary)?;
        let was_open = *visible == Visible::Yes && !only_root_writes(status.uid, status.mode);
        if status.kind != Kind::File || status.links != 1 || was_open {
            // If something else was in its slot, its other names must not be changed.
            crate::state::directories::remove_all(directory, temporary)?;
            return Err(CacheError::Absent { id: *id });
        }
        for (key, _) in directory.xattrs(temporary, model::scope::Attributes::Labels)? {
            directory.remove_xattr(temporary, &key)?;
        }
        directory.set_owner(temporary, 0, 0)?;
        directory.set_mode(temporary, 0o600)?;
        let name = name_of(id);
        directory.rename_over(temporary, directory, &name)?;
        if let Some((_, state)) = examine(directory, &name) {
            return Ok(state);
        }
        crate::state::directories::remove_all(directory, &name)?;
        Err(CacheError::Absent { id: *id })
    }

    fn temporary(&self) -> Vec<u8> {
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        [TEMPORARY, number.to_string().as_bytes()].concat()
    }
}

/// An object that was moved back, but is not cached yet.
#[derive(Debug)]
pub struct Retrieved {
    id: ObjectId,
    temporary: Vec<u8>,
    visible: Visible,
}

/// Whether other programs could see the entries of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visible {
    No,
    /// They were in the tree, and the update was undone.
    Yes,
}

fn name_of(id: &ObjectId) -> Vec<u8> {
    id.to_string().into_bytes()
}

/// Hashes the file `name`. Returns its id if it is a file of root alone, with one name, and its
/// content is what its name says.
fn examine(directory: &Directory, name: &[u8]) -> Option<(ObjectId, FileState)> {
    let id: ObjectId = std::str::from_utf8(name).ok()?.parse().ok()?;
    let mut file = directory.open_file(name).ok()?;
    let before = Status::of(&file).ok()?;
    let got = digest_as(&mut file, id.algorithm()).ok()?;
    let after = Status::of(&file).ok()?;
    let private = after.links == 1 && (after.uid, after.mode) == (0, 0o600);
    (got == id && private && FileState::of(&before) == FileState::of(&after))
        .then(|| (id, FileState::of(&after)))
}

fn digest_as(file: &mut File, algorithm: Algorithm) -> io::Result<ObjectId> {
    let mut hasher = Hasher::new(algorithm);
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            length => hasher.update(&buffer[..length]),
        }
    }
}

/// A file that is in the cache now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    pub id: ObjectId,
    /// Its length, in bytes.
    pub size_bytes: u64,
    /// True if the cache had the same object already; then the file was removed.
    pub duplicate: bool,
}

impl Cache {
    /// Moves the file `name` in `from` into the cache as an object, named by its hash and owned by
    /// root alone.
    ///
    /// `from` must be a directory that only root can enter, on the file-system of the cache, and no
    /// process may have the file open for writing: what is hashed must be what is cached.
    ///
    /// # Errors
    ///
    /// [`CacheError`]; then the file is still in `from`.
    pub fn adopt(
        &self,
        from: &Directory,
        name: &[u8],
        algorithm: Algorithm,
    ) -> Result<Adopted, CacheError> {
        for (key, _) in from.xattrs(name, Attributes::Labels)? {
            from.remove_xattr(name, &key)?;
        }
        from.set_owner(name, 0, 0)?;
        from.set_mode(name, 0o600)?;
        let mut file = from.open_file(name)?;
        let unread = |source: std::io::Error| from.error("read", name, errno_of(source));
        let status = |file: &File| {
            Status::of(file).map_err(|errno| from.error("read the status of", name, errno))
        };
        let before = status(&file)?;
        let id = digest_as(&mut file, algorithm).map_err(unread)?;
        let after = status(&file)?;
        let private = after.links == 1 && (after.uid, after.mode) == (0, 0o600);
        if !private || FileState::of(&before) != FileState::of(&after) {
            return Err(from.error("verify", name, nix::errno::Errno::EBUSY).into());
        }
        let size_bytes = after.size_bytes;
        let duplicate = self.size_of(&id).is_some();
        if duplicate {
            from.unlink(name)?;
        } else {
            let object = name_of(&id);
            from.rename_noreplace(name, &self.directory, &object)?;
            let state = FileState::of(&self.directory.stat(&object)?);
            self.lock().insert(id, CachedObject::Stored(state));
        }
        Ok(Adopted { id, size_bytes, duplicate })
    }
}

#[cfg(test)]
mod tests;
