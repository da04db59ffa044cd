//! Objects on their way into the cache.
//!
//! What comes is hashed while it is written, into a file named after the object it should become.
//! A transfer that is cut leaves a *partial*: the file, and the state of its hash. Whoever brings
//! the rest goes on where it ended. A partial of a former run of subd is hashed again from the
//! disk.
//!
//! # Invariants
//!
//! * At most [`PARTIALS_MAX`] partials, each of at least [`PARTIAL_BYTES_MIN`], are kept.
//! * A partial is trusted by nobody: the object as a whole must hash to its id.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::{MutexGuard, PoisonError};

use model::object::{Hasher, ObjectId};
use nix::errno::Errno;

use super::{BUFFER_BYTES, Cache, CacheError, Holding, Seal, name_of};
use crate::root::{Directory, Kind, Status};

/// The most partials that are kept; further ones take the place of the smallest.
pub const PARTIALS_MAX: usize = 16;

/// The least that is worth keeping, in bytes: less is as well asked for again.
pub const PARTIAL_BYTES_MIN: u64 = 64 << 10;

/// The start of the names of files that are not complete; the id follows.
const PARTIAL: &[u8] = b"partial.";

/// What has arrived of an object.
pub(super) struct Partial {
    got_bytes: u64,
    /// The state of the hash; `None` if it is to be made from the file.
    hasher: Option<Hasher>,
}

impl fmt::Debug for Partial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Partial({} bytes)", self.got_bytes)
    }
}

/// The partial of a former run that the file `name` is, if it may be used as one.
pub(super) fn leftover(directory: &Directory, name: &[u8]) -> Option<(ObjectId, Partial)> {
    let id = std::str::from_utf8(name.strip_prefix(PARTIAL)?).ok()?.parse().ok()?;
    let status = directory.stat(name).ok()?;
    let usable = is_private(&status) && status.size_bytes >= PARTIAL_BYTES_MIN;
    usable.then_some((id, Partial { got_bytes: status.size_bytes, hasher: None }))
}

fn is_private(status: &Status) -> bool {
    (status.kind, status.links, status.uid, status.mode) == (Kind::File, 1, 0, 0o600)
}

fn partial_name(id: &ObjectId) -> Vec<u8> {
    [PARTIAL, id.to_string().as_bytes()].concat()
}

impl Cache {
    fn partials(&self) -> MutexGuard<'_, BTreeMap<ObjectId, Partial>> {
        // As for the objects: each change is one insertion or removal.
        self.partials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much of the object has arrived, in bytes; 0 if nothing of it is kept.
    #[must_use]
    pub fn partial_bytes(&self, id: &ObjectId) -> u64 {
        self.partials().get(id).map_or(0, |partial| partial.got_bytes)
    }

    /// Starts to store an object of `size_bytes` from its first byte on.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if no file can be made.
    pub fn receive(&self, id: ObjectId, size_bytes: u64) -> Result<Receiving<'_>, CacheError> {
        let name = partial_name(&id);
        self.partials().remove(&id);
        let file = match self.directory.create_file(&name, 0o600) {
            Err(error) if error.errno() == Some(Errno::EEXIST) => {
                crate::state::directories::remove_all(&self.directory, &name)?;
                self.directory.create_file(&name, 0o600)?
            }
            other => other?,
        };
        let hasher = Hasher::new(id.algorithm());
        Ok(Receiving { cache: self, id, size_bytes, name, file, hasher, got_bytes: 0, over: false })
    }

    /// Goes on to store an object of `size_bytes` where its partial ends; `None` if there is none,
    /// or if it is not what it was.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if the file cannot be read.
    pub fn resume(
        &self,
        id: ObjectId,
        size_bytes: u64,
    ) -> Result<Option<Receiving<'_>>, CacheError> {
        let Some(Partial { got_bytes, hasher }) = self.partials().remove(&id) else {
            return Ok(None);
        };
        let name = partial_name(&id);
        let mut file = match self.directory.append_file(&name) {
            Err(error) if error.is_absent() => return Ok(None),
            other => other?,
        };
        let status =
            Status::of(&file).map_err(|errno| self.directory.error("look at", &name, errno))?;
        if !is_private(&status) || status.size_bytes != got_bytes || got_bytes >= size_bytes {
            crate::state::directories::remove_all(&self.directory, &name)?;
            return Ok(None);
        }
        let hasher = match hasher {
            Some(hasher) => hasher,
            None => {
                let mut hasher = Hasher::new(id.algorithm());
                hash(&mut file, &mut hasher, got_bytes, &mut |_| {})
                    .map_err(|source| CacheError::Content { operation: "read", id, source })?;
                hasher
            }
        };
        let over = false;
        Ok(Some(Receiving { cache: self, id, size_bytes, name, file, hasher, got_bytes, over }))
    }

    /// Removes what has arrived of the object, if it is not complete.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if the file cannot be removed.
    pub fn discard_partial(&self, id: &ObjectId) -> Result<(), CacheError> {
        if self.partials().remove(id).is_some() {
            crate::state::directories::remove_all(&self.directory, &partial_name(id))?;
        }
        Ok(())
    }

    /// Removes all partials but those of objects that are `wanted`.
    ///
    /// # Errors
    ///
    /// [`CacheError`] for the first file that cannot be removed.
    pub fn discard_partials(&self, wanted: impl Fn(&ObjectId) -> bool) -> Result<(), CacheError> {
        let unwanted: Vec<ObjectId> =
            self.partials().keys().filter(|id| !wanted(id)).copied().collect();
        unwanted.iter().try_for_each(|id| self.discard_partial(id))
    }

    /// Keeps one more partial, and the largest of all.
    fn keep_partial(&self, id: ObjectId, partial: Partial) -> Result<(), CacheError> {
        let mut partials = self.partials();
        partials.insert(id, partial);
        if partials.len() <= PARTIALS_MAX {
            return Ok(());
        }
        let smallest = partials.iter().min_by_key(|(_, partial)| partial.got_bytes);
        let smallest = smallest.map(|(id, _)| *id);
        drop(partials);
        smallest.map_or(Ok(()), |id| self.discard_partial(&id))
    }
}

/// An object that is being received. Dropped before [`Receiving::finish`] or [`Receiving::keep`],
/// nothing stays.
pub struct Receiving<'cache> {
    cache: &'cache Cache,
    id: ObjectId,
    size_bytes: u64,
    name: Vec<u8>,
    file: File,
    hasher: Hasher,
    got_bytes: u64,
    /// True if the file is no longer this value's.
    over: bool,
}

impl Receiving<'_> {
    /// How much has arrived, in bytes.
    #[must_use]
    pub fn got_bytes(&self) -> u64 {
        self.got_bytes
    }

    /// The digest of what has arrived.
    #[must_use]
    pub fn digest(&self) -> ObjectId {
        self.hasher.finish()
    }

    /// Takes the next part of the content.
    ///
    /// # Errors
    ///
    /// [`CacheError::Wrong`] if more comes than the object has, [`CacheError::Content`] if it
    /// cannot be written.
    pub fn write(&mut self, chunk: &[u8]) -> Result<(), CacheError> {
        if self.got_bytes + chunk.len() as u64 > self.size_bytes {
            self.got_bytes += chunk.len() as u64;
            return Err(self.wrong());
        }
        self.file.write_all(chunk).map_err(|source| self.failed("write", source))?;
        self.hasher.update(chunk);
        self.got_bytes += chunk.len() as u64;
        Ok(())
    }

    /// Takes the whole content from the file `from` by sharing its blocks, and reads it to hash
    /// it; `read` is told of each part that was read. False if the file-system cannot share them;
    /// then nothing was taken.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if the file cannot be written or read.
    pub fn share(&mut self, from: &File, read: &mut dyn FnMut(u64)) -> Result<bool, CacheError> {
        use rustix::io::Errno;
        match rustix::fs::ioctl_ficlone(&self.file, from) {
            Ok(()) => {}
            // Another file-system, or one that cannot; a file that may not be shared.
            Err(Errno::NOTSUP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::TXTBSY) => {
                return Ok(false);
            }
            Err(errno) => return Err(self.failed("share the blocks of", errno.into())),
        }
        let limit = self.size_bytes.saturating_add(1);
        match hash(&mut self.file, &mut self.hasher, limit, read) {
            Ok(got_bytes) => self.got_bytes = got_bytes,
            Err(source) => return Err(self.failed("read", source)),
        }
        Ok(true)
    }

    /// Puts the object into the cache, if its content is what its id says.
    ///
    /// # Errors
    ///
    /// [`CacheError::Wrong`] if it is not, [`CacheError::Directory`] if it cannot be renamed.
    pub fn finish(mut self) -> Result<(), CacheError> {
        if self.got_bytes != self.size_bytes || self.hasher.finish() != self.id {
            return Err(self.wrong());
        }
        let directory = &self.cache.directory;
        let name = name_of(&self.id);
        directory.rename_over(&self.name, directory, &name)?;
        self.over = true;
        let status = directory.stat(&name)?;
        let mut objects = self.cache.lock();
        // A copy that an update has taken stays taken; this one is one more.
        objects.insert(self.id, Holding::Stored(Seal::of(&status)));
        Ok(())
    }

    /// Keeps what has arrived for [`Cache::resume`]; gives how much that is, in bytes: 0 if it is
    /// too little to be worth it.
    ///
    /// # Errors
    ///
    /// [`CacheError`] if a smaller partial cannot be removed in its favour.
    pub fn keep(mut self) -> Result<u64, CacheError> {
        let got_bytes = self.got_bytes;
        if !(PARTIAL_BYTES_MIN..self.size_bytes).contains(&got_bytes) {
            return Ok(0);
        }
        self.over = true;
        let fresh = Hasher::new(self.id.algorithm());
        let hasher = Some(std::mem::replace(&mut self.hasher, fresh));
        self.cache.keep_partial(self.id, Partial { got_bytes, hasher })?;
        Ok(got_bytes)
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> CacheError {
        CacheError::Content { operation, id: self.id, source }
    }

    fn wrong(&self) -> CacheError {
        CacheError::Wrong {
            want: self.id,
            want_bytes: self.size_bytes,
            got: self.hasher.finish(),
            got_bytes: self.got_bytes,
        }
    }
}

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        if !self.over
            && let Err(error) = self.cache.directory.unlink(&self.name)
        {
            let error = model::report::report(&error);
            tracing::warn!(%error, "cannot remove an incomplete object");
        }
    }
}

/// Hashes at most `limit` bytes of `file`; gives how many they were.
fn hash(
    file: &mut File,
    hasher: &mut Hasher,
    limit: u64,
    read: &mut dyn FnMut(u64),
) -> io::Result<u64> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut rest = file.take(limit);
    let mut total = 0;
    loop {
        match rest.read(&mut buffer)? {
            0 => return Ok(total),
            length => {
                hasher.update(&buffer[..length]);
                total += length as u64;
                read(length as u64);
            }
        }
    }
}
