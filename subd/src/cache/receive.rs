//! Objects that are being received into the cache.
//!
//! What has come as a whole is hashed, and then written to a file with its name. A large object is
//! hashed while it is written to another file, which is renamed. A transfer that is cut leaves a
//! *partial*: the file, and the state of its hash. The next transfer continues where it ended. A
//! partial of a former run of subd is hashed again from the disk.
//!
//! # Invariants
//!
//! * At most [`PARTIALS_MAX`] partials, each of at least [`PARTIAL_BYTES_MIN`], are kept.
//! * A partial is not trusted: the object as a whole must hash to its id.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::MutexGuard;

use model::lock::locked;
use model::object::{Hasher, ObjectId};
use nix::errno::Errno;

use crate::cache::{BUFFER_BYTES, Cache, CacheError, CachedObject, FileState, name_of};
use crate::root::{Directory, Kind, Status};

/// The most partials that are kept. A further one replaces the smallest.
pub const PARTIALS_MAX: usize = 16;

/// The smallest partial that is kept, in bytes. Less is fetched again.
pub const PARTIAL_BYTES_MIN: u64 = 64 << 10;

/// The start of the names of incomplete files; the id follows.
const PARTIAL: &[u8] = b"partial.";

/// The received part of an object.
pub(super) struct Partial {
    got_bytes: u64,
    /// The state of the hash; `None` if the file must be hashed.
    hasher: Option<Hasher>,
}

impl fmt::Debug for Partial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Partial({} bytes)", self.got_bytes)
    }
}

/// Returns the partial of a former run in the file `name`, if it can be used.
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
        locked(&self.partials)
    }

    /// Returns how much of the object was received, in bytes; 0 if nothing is kept.
    pub fn partial_bytes(&self, id: &ObjectId) -> u64 {
        self.partials().get(id).map_or(0, |partial| partial.got_bytes)
    }

    /// Starts to receive an object of `size_bytes` from its first byte.
    pub fn receive(&self, id: ObjectId, size_bytes: u64) -> Result<Receiving<'_>, CacheError> {
        self.partials().remove(&id);
        self.receive_into(partial_name(&id), id, size_bytes)
    }

    /// Adds the object `id`, which has come as a whole. False if it is cached already; then nothing
    /// is written.
    ///
    /// # Errors
    ///
    /// [`CacheError::Wrong`] if `content` does not hash to `id`; then nothing is written either.
    pub fn add(&self, id: ObjectId, content: &[u8]) -> Result<bool, CacheError> {
        let (got, got_bytes) = (id.algorithm().digest(content), content.len() as u64);
        if got != id {
            return Err(CacheError::Wrong { want: id, want_bytes: got_bytes, got, got_bytes });
        }
        if self.size_of(&id).is_some() {
            return Ok(false);
        }
        // To rename it afterwards costs as much as all else.
        let name = name_of(&id);
        let mut file = match self.directory.create_file(&name, 0o600) {
            Err(error) if error.errno() == Some(Errno::EEXIST) => {
                // Somebody else is adding it, or something was left there. Not the name of its
                // partial: a fetch may be receiving it.
                let mut receiving = self.receive_into(self.temporary(), id, got_bytes)?;
                receiving.write(content)?;
                receiving.finish()?;
                return Ok(true);
            }
            created => created?,
        };
        let written = file
            .write_all(content)
            .map_err(|source| CacheError::Content { operation: "write", id, source })
            .and_then(|()| self.state_of(&file, &name));
        match written {
            Ok(state) => self.lock().insert(id, CachedObject::Stored(state)),
            Err(error) => {
                // Somebody else may have put the whole object there meanwhile.
                let own = self.state_of(&file, &name).ok();
                let there = self.directory.stat(&name).ok();
                if own.is_some() && own == there.map(|status| FileState::of(&status)) {
                    self.unlink_incomplete(&name);
                }
                return Err(error);
            }
        };
        Ok(true)
    }

    /// Reads the state of the file that was opened by `name`.
    fn state_of(&self, file: &File, name: &[u8]) -> Result<FileState, CacheError> {
        let status = Status::of(file)
            .map_err(|errno| self.directory.error("read the status of", name, errno))?;
        Ok(FileState::of(&status))
    }

    fn unlink_incomplete(&self, name: &[u8]) {
        if let Err(error) = self.directory.unlink(name) {
            let error = model::display::error_chain(&error);
            tracing::warn!(%error, "cannot remove an incomplete object");
        }
    }

    fn receive_into(
        &self,
        name: Vec<u8>,
        id: ObjectId,
        size_bytes: u64,
    ) -> Result<Receiving<'_>, CacheError> {
        let file = match self.directory.create_file(&name, 0o600) {
            Err(error) if error.errno() == Some(Errno::EEXIST) => {
                crate::state::directories::remove_all(&self.directory, &name)?;
                self.directory.create_file(&name, 0o600)?
            }
            other => other?,
        };
        let hasher = Hasher::new(id.algorithm());
        Ok(Receiving {
            cache: self,
            id,
            size_bytes,
            name,
            file,
            hasher,
            got_bytes: 0,
            detached: false,
        })
    }

    /// Continues to receive an object of `size_bytes` where its partial ends; `None` if there is
    /// none, or if it has changed.
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
        let status = Status::of(&file)
            .map_err(|errno| self.directory.error("read the status of", &name, errno))?;
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
        let detached = false;
        Ok(Some(Receiving { cache: self, id, size_bytes, name, file, hasher, got_bytes, detached }))
    }

    /// Removes the partial of the object.
    pub fn discard_partial(&self, id: &ObjectId) -> Result<(), CacheError> {
        if self.partials().remove(id).is_some() {
            crate::state::directories::remove_all(&self.directory, &partial_name(id))?;
        }
        Ok(())
    }

    /// Removes all partials but those of objects that are `wanted`.
    pub fn discard_partials(&self, wanted: impl Fn(&ObjectId) -> bool) -> Result<(), CacheError> {
        let unwanted: Vec<ObjectId> =
            self.partials().keys().filter(|id| !wanted(id)).copied().collect();
        unwanted.iter().try_for_each(|id| self.discard_partial(id))
    }

    /// Adds a partial, and removes the smallest if there are too many.
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

/// An object that is being received. If it is dropped before [`Receiving::finish`] or
/// [`Receiving::keep_partial`], its file is removed.
pub struct Receiving<'cache> {
    cache: &'cache Cache,
    id: ObjectId,
    size_bytes: u64,
    name: Vec<u8>,
    file: File,
    hasher: Hasher,
    got_bytes: u64,
    /// True if the file no longer belongs to this value.
    detached: bool,
}

impl Receiving<'_> {
    /// Returns how much was received, in bytes.
    pub fn got_bytes(&self) -> u64 {
        self.got_bytes
    }

    /// Returns the digest of what was received.
    pub fn digest(&self) -> ObjectId {
        self.hasher.finish()
    }

    /// Writes the next part of the content.
    ///
    /// # Errors
    ///
    /// [`CacheError::Wrong`] if more comes than the object has, [`CacheError::Content`] if it
    /// cannot be written.
    pub fn write(&mut self, chunk: &[u8]) -> Result<(), CacheError> {
        if self.got_bytes + chunk.len() as u64 > self.size_bytes {
            self.got_bytes += chunk.len() as u64;
            return Err(self.wrong_content());
        }
        self.file.write_all(chunk).map_err(|source| self.failed("write", source))?;
        self.hasher.update(chunk);
        self.got_bytes += chunk.len() as u64;
        Ok(())
    }

    /// Takes the whole content from the file `from` by sharing its blocks, and reads it to hash it.
    /// Calls `read` with the length of each part that was read. False if the file-system cannot
    /// share blocks; then nothing was taken.
    pub fn share(&mut self, from: &File, read: &mut dyn FnMut(u64)) -> Result<bool, CacheError> {
        use rustix::io::Errno;
        match rustix::fs::ioctl_ficlone(&self.file, from) {
            Ok(()) => {}
            // Another file-system, one without shared blocks, or a file that may not be shared.
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

    /// Puts the object into the cache, if its content hashes to its id.
    ///
    /// # Errors
    ///
    /// [`CacheError::Wrong`] if it is not, [`CacheError::Directory`] if it cannot be renamed.
    pub fn finish(mut self) -> Result<(), CacheError> {
        if self.got_bytes != self.size_bytes || self.hasher.finish() != self.id {
            return Err(self.wrong_content());
        }
        let directory = &self.cache.directory;
        let name = name_of(&self.id);
        directory.rename_over(&self.name, directory, &name)?;
        self.detached = true;
        let state = self.cache.state_of(&self.file, &name)?;
        let mut objects = self.cache.lock();
        // A copy that an update has taken stays there; this is another one.
        objects.insert(self.id, CachedObject::Stored(state));
        Ok(())
    }

    /// Keeps what was received for [`Cache::resume`]. Returns how much that is, in bytes; 0 if it
    /// is too little to be kept.
    pub fn keep_partial(mut self) -> Result<u64, CacheError> {
        let got_bytes = self.got_bytes;
        if !(PARTIAL_BYTES_MIN..self.size_bytes).contains(&got_bytes) {
            return Ok(0);
        }
        self.detached = true;
        let fresh = Hasher::new(self.id.algorithm());
        let hasher = Some(std::mem::replace(&mut self.hasher, fresh));
        self.cache.keep_partial(self.id, Partial { got_bytes, hasher })?;
        Ok(got_bytes)
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> CacheError {
        CacheError::Content { operation, id: self.id, source }
    }

    fn wrong_content(&self) -> CacheError {
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
        if !self.detached {
            self.cache.unlink_incomplete(&self.name);
        }
    }
}

/// Hashes at most `limit` bytes of `file`. Returns how many were hashed.
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
