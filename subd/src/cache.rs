//! The object cache: files named by id in `/.subd/objects`.
//!
//! # Invariants
//!
//! * An object has its name only after its content was hashed to it. A name by itself is trusted
//!   by nobody: at the start all objects are hashed again.
//! * Of each object the inode, its size and its ctime are known from when it was hashed. If one
//!   has moved the object is hashed again before it is used.
//! * An object that was taken for an update that is merely prepared is still counted as cached:
//!   it comes back if the update is given up.
//! * At most [`PARTIALS_MAX`] files that are not complete are kept.
//!
//! [`PARTIALS_MAX`]: receive::PARTIALS_MAX

pub mod adopt;
pub mod receive;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::object::{Algorithm, Hasher, ObjectId};
use model::tree::Time;

use crate::root::{Directory, Kind, RootError, Status};
use receive::Partial;
pub use receive::Receiving;

/// The start of the names of files that come back from an update.
const TEMPORARY: &[u8] = b"incoming.";

/// How much is read at once, in bytes.
const BUFFER_BYTES: usize = 128 << 10;

/// A failure of the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The directory or a file in it cannot be used.
    #[error("the object cache failed")]
    Directory {
        /// What and why.
        #[from]
        source: RootError,
    },
    /// An object cannot be read or written.
    #[error("cannot {operation} object {id}")]
    Content {
        /// What was tried.
        operation: &'static str,
        /// Which object.
        id: ObjectId,
        /// What the kernel said.
        source: io::Error,
    },
    /// What came is not what was asked for.
    #[error("{got_bytes} bytes that hash to {got} came for object {want} of {want_bytes} bytes")]
    Wrong {
        /// What was asked for.
        want: ObjectId,
        /// Its size, in bytes.
        want_bytes: u64,
        /// What came.
        got: ObjectId,
        /// How much came, in bytes; no more is read than one byte too many.
        got_bytes: u64,
    },
    /// The object is not in the cache.
    #[error("object {id} is not in the cache")]
    Absent {
        /// Which object.
        id: ObjectId,
    },
}

impl CacheError {
    /// True if there is no space for what was to be written.
    #[must_use]
    pub fn is_full(&self) -> bool {
        use nix::errno::Errno;
        let errno = match self {
            Self::Directory { source } => source.errno(),
            Self::Content { source, .. } => source.raw_os_error().map(Errno::from_raw),
            Self::Wrong { .. } | Self::Absent { .. } => None,
        };
        matches!(errno, Some(Errno::ENOSPC | Errno::EDQUOT))
    }
}

/// What a file was like when it was hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seal {
    size_bytes: u64,
    inode: u64,
    ctime: Time,
}

impl Seal {
    fn of(status: &Status) -> Self {
        let Status { size_bytes, inode, ctime, .. } = *status;
        Self { size_bytes, inode, ctime }
    }
}

#[derive(Clone, Copy, Debug)]
enum Holding {
    /// It is in the directory.
    Stored(Seal),
    /// An update that is prepared has it.
    Taken { size_bytes: u64 },
}

/// The object cache.
#[derive(Debug)]
pub struct Cache {
    directory: Arc<Directory>,
    objects: Mutex<BTreeMap<ObjectId, Holding>>,
    partials: Mutex<BTreeMap<ObjectId, Partial>>,
    next_temporary: AtomicU64,
}

/// What was found when a cache was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// Objects that were hashed and are right.
    pub objects: usize,
    /// Files that were removed: incomplete, wrong or strange.
    pub removed: usize,
}

impl Cache {
    /// Opens the cache in `directory`: hashes every object and removes what is not right. What had
    /// arrived of objects that are not complete stays, to be hashed when the rest comes.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if the directory cannot be read or a file cannot be removed.
    pub fn open(directory: Arc<Directory>) -> Result<(Self, Opened), CacheError> {
        let mut objects = BTreeMap::new();
        let mut partials = BTreeMap::new();
        let mut opened = Opened::default();
        for name in directory.names()? {
            if partials.len() < receive::PARTIALS_MAX
                && let Some((id, partial)) = receive::leftover(&directory, &name)
            {
                partials.insert(id, partial);
                continue;
            }
            match examine(&directory, &name) {
                Some((id, seal)) => {
                    objects.insert(id, Holding::Stored(seal));
                    opened.objects += 1;
                }
                None => {
                    crate::state::directories::remove_all(&directory, &name)?;
                    opened.removed += 1;
                }
            }
        }
        let (objects, partials) = (Mutex::new(objects), Mutex::new(partials));
        let next_temporary = AtomicU64::new(0);
        Ok((Self { directory, objects, partials, next_temporary }, opened))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ObjectId, Holding>> {
        // A panic elsewhere leaves the map as it was: each change is one insertion or removal.
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All objects, sorted.
    #[must_use]
    pub fn ids(&self) -> Vec<ObjectId> {
        self.lock().keys().copied().collect()
    }

    /// The size of the object in bytes, if it is cached.
    #[must_use]
    pub fn size_of(&self, id: &ObjectId) -> Option<u64> {
        self.lock().get(id).map(|holding| match holding {
            Holding::Stored(seal) => seal.size_bytes,
            Holding::Taken { size_bytes } => *size_bytes,
        })
    }

    /// Removes objects that no update has taken; gives those that went.
    ///
    /// # Errors
    ///
    /// [`CacheError`] for the first that cannot be removed; those before it are gone.
    pub fn remove(&self, ids: &[ObjectId]) -> Result<Vec<ObjectId>, CacheError> {
        let mut objects = self.lock();
        let mut removed = Vec::new();
        for id in ids {
            if matches!(objects.get(id), Some(Holding::Stored(_))) {
                crate::state::directories::remove_all(&self.directory, &name_of(id))?;
                objects.remove(id);
                removed.push(*id);
            }
            self.discard_partial(id)?;
        }
        Ok(removed)
    }

    /// Makes sure that the object is what its name says; hashes it if it may have changed.
    fn check(&self, id: &ObjectId) -> Result<Seal, CacheError> {
        let known = match self.lock().get(id) {
            Some(Holding::Stored(seal)) => *seal,
            _ => return Err(CacheError::Absent { id: *id }),
        };
        let name = name_of(id);
        match self.directory.stat(&name) {
            Ok(status) if Seal::of(&status) == known => return Ok(known),
            Ok(_) => {}
            Err(error) if error.is_absent() => {}
            Err(error) => return Err(error.into()),
        }
        match examine(&self.directory, &name) {
            Some((_, seal)) => {
                self.lock().insert(*id, Holding::Stored(seal));
                Ok(seal)
            }
            None => {
                crate::state::directories::remove_all(&self.directory, &name)?;
                self.lock().remove(id);
                Err(CacheError::Absent { id: *id })
            }
        }
    }

    /// Moves the object to `name` in `to`; it stays counted as cached until [`Cache::forget`].
    ///
    /// # Errors
    ///
    /// [`CacheError`] if it is absent, was tampered with, or cannot be moved.
    pub fn take(&self, id: &ObjectId, to: &Directory, name: &[u8]) -> Result<(), CacheError> {
        let seal = self.check(id)?;
        self.directory.rename_noreplace(&name_of(id), to, name)?;
        self.lock().insert(*id, Holding::Taken { size_bytes: seal.size_bytes });
        Ok(())
    }

    /// Copies the object to the new file `name` in `to`, sharing its blocks where the file-system
    /// can.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if it is absent, was tampered with, or cannot be copied.
    pub fn copy(&self, id: &ObjectId, to: &Directory, name: &[u8]) -> Result<(), CacheError> {
        let seal = self.check(id)?;
        let fail = |source| CacheError::Content { operation: "copy", id: *id, source };
        let mut from = self.directory.open_file(&name_of(id))?;
        let mut file = to.create_file(name, 0o600)?;
        // The kernel does the copying (`copy_file_range`).
        let copied = io::copy(&mut from, &mut file).map_err(fail)?;
        if copied != seal.size_bytes {
            return Err(fail(io::Error::other("its length changed meanwhile")));
        }
        Ok(())
    }

    /// Forgets objects that were taken for an update which is done; gives those that went.
    #[must_use]
    pub fn forget(&self, ids: &[ObjectId]) -> Vec<ObjectId> {
        let mut objects = self.lock();
        let mut gone = Vec::new();
        for id in ids {
            if matches!(objects.get(id), Some(Holding::Taken { .. })) {
                objects.remove(id);
                gone.push(*id);
            }
        }
        gone
    }

    /// Brings an object that was taken back: `name` in `from`. It is cached again, and as itself,
    /// only after [`Cache::restore`].
    ///
    /// # Errors
    ///
    /// [`CacheError`] if it cannot be moved; then it is not cached any more.
    pub fn retrieve(
        &self,
        id: &ObjectId,
        from: &Directory,
        name: &[u8],
    ) -> Result<Retrieved, CacheError> {
        let temporary = self.temporary();
        match from.rename_noreplace(name, &self.directory, &temporary) {
            Ok(()) => Ok(Retrieved { id: *id, temporary }),
            Err(error) => {
                self.lock().remove(id);
                Err(error.into())
            }
        }
    }

    /// Puts an object that was retrieved into its place. It is hashed again, because it may have
    /// been in reach of others meanwhile; by now it must have no other name.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if it is no longer the object; then it is not cached any more.
    pub fn restore(&self, retrieved: Retrieved) -> Result<(), CacheError> {
        let id = retrieved.id;
        let restored = self.put_back(&retrieved);
        match &restored {
            Ok(seal) => self.lock().insert(id, Holding::Stored(*seal)),
            Err(_) => self.lock().remove(&id),
        };
        restored.map(|_| ())
    }

    fn put_back(&self, retrieved: &Retrieved) -> Result<Seal, CacheError> {
        let Retrieved { id, temporary } = retrieved;
        let directory = &self.directory;
        let status = directory.stat(temporary)?;
        if status.kind != Kind::File || status.links != 1 {
            // Something else was in its slot; what other names it has, nobody shall touch.
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
        if let Some((_, seal)) = examine(directory, &name) {
            return Ok(seal);
        }
        crate::state::directories::remove_all(directory, &name)?;
        Err(CacheError::Absent { id: *id })
    }

    fn temporary(&self) -> Vec<u8> {
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        [TEMPORARY, number.to_string().as_bytes()].concat()
    }
}

/// An object that was taken and is back, but not yet in its place.
#[derive(Debug)]
pub struct Retrieved {
    id: ObjectId,
    temporary: Vec<u8>,
}

fn name_of(id: &ObjectId) -> Vec<u8> {
    id.to_string().into_bytes()
}

/// Hashes the file `name`; gives what it is if it is a file of root alone, with one name, and its
/// content is what its name says.
fn examine(directory: &Directory, name: &[u8]) -> Option<(ObjectId, Seal)> {
    let id: ObjectId = std::str::from_utf8(name).ok()?.parse().ok()?;
    let mut file = directory.open_file(name).ok()?;
    let before = Status::of(&file).ok()?;
    let got = digest_as(&mut file, id.algorithm()).ok()?;
    let after = Status::of(&file).ok()?;
    let private = after.links == 1 && (after.uid, after.mode) == (0, 0o600);
    (got == id && private && Seal::of(&before) == Seal::of(&after)).then(|| (id, Seal::of(&after)))
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

#[cfg(test)]
mod tests;
