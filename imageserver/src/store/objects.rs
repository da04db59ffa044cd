//! Content by digest: files that are written once and never changed.
//!
//! An object is written to a temporary file while it is hashed, and renamed to its name when its
//! length and digest are what was announced. Its own directory is not made durable for each:
//! [`Objects::sync`] does that for all at once, before an image that needs them is seen. After a
//! power failure an object that no image needs yet may therefore be empty or damaged: an empty one
//! is not counted as there, a damaged one is found when it is read.

use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use common::object::{Hasher, ObjectId};

use super::holdings::{Change, Holdings, Tally};
use super::receive::Receiving;
use super::verified::Verified;
use super::{StoreError, failed, layout, make_directory};

/// The longest object that is read, hashed and sent in one piece, in bytes.
pub const WHOLE_BYTES_MAX: u64 = 256 << 10;

/// How much of a larger object is read at once, in bytes.
pub const CHUNK_BYTES: usize = 256 << 10;

/// How many large objects may be checked at one time, each by one thread. Of those that ask for
/// the same one, the others wait for the first.
const CHECKS_MAX: usize = 64;

/// The objects of a data directory.
pub struct Objects {
    pub(super) root: PathBuf,
    pub(super) incoming: PathBuf,
    quarantine: PathBuf,
    // Opened at start, so that a failed write-back of any object written since is reported to it.
    handle: fs_err::File,
    unsynced: AtomicBool,
    next: AtomicU64,
    pub(super) verified: Verified,
    checks: [Mutex<()>; CHECKS_MAX],
    pub(super) tally: Tally,
    corrupt: AtomicU64,
}

/// An object whose content was found to be what its id says.
pub enum Content {
    /// All of it.
    Whole(Bytes),
    /// The file, at its beginning, and its length in bytes.
    File(fs_err::File, u64),
}

impl Content {
    /// Its length, in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        match self {
            Self::Whole(bytes) => bytes.len() as u64,
            Self::File(_, size_bytes) => *size_bytes,
        }
    }
}

impl Objects {
    pub(super) fn open(data: &Path) -> Result<Self, StoreError> {
        let root = data.join(layout::OBJECTS);
        for algorithm in layout::ALGORITHMS {
            for directory in layout::fan_out(algorithm) {
                make_directory(&root.join(directory))?;
            }
        }
        let incoming = data.join(layout::INCOMING);
        let quarantine = data.join(layout::QUARANTINE);
        make_directory(&quarantine)?;
        let handle = fs_err::File::open(&root).map_err(failed("open the objects"))?;
        let device = handle.metadata().map_err(failed("open the objects"))?.dev();
        for path in [&incoming, &quarantine] {
            if fs_err::metadata(path).map_err(failed("open the objects"))?.dev() != device {
                return Err(StoreError::TwoFileSystems { path: path.clone() });
            }
        }
        Ok(Self {
            root,
            incoming,
            quarantine,
            handle,
            unsynced: AtomicBool::new(false),
            next: AtomicU64::new(0),
            verified: Verified::default(),
            checks: [const { Mutex::new(()) }; CHECKS_MAX],
            tally: Tally::new(),
            corrupt: AtomicU64::new(0),
        })
    }

    pub(super) fn path(&self, id: &ObjectId) -> PathBuf {
        self.root.join(layout::object_path(id))
    }

    /// A path in the directory of what is being written that no one else uses.
    pub(super) fn temporary(&self) -> PathBuf {
        self.incoming.join(format!("object-{}", self.next.fetch_add(1, Ordering::Relaxed)))
    }

    /// The length of the object in bytes, or `None` if it is not there. Its content is not read.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn size_bytes(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        match fs_err::symlink_metadata(self.path(id)) {
            Ok(metadata) => Ok(length_of(id, &metadata)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(format!("look for object {id}"))(error)),
        }
    }

    /// Those of `ids` that are not there, in order.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn missing(&self, ids: &[ObjectId]) -> Result<Vec<ObjectId>, StoreError> {
        let mut missing = Vec::new();
        for id in ids {
            if self.size_bytes(id)?.is_none() {
                missing.push(*id);
            }
        }
        Ok(missing)
    }

    /// Starts to store an object of `size_bytes`, of which nothing is seen until it is complete.
    ///
    /// # Errors
    ///
    /// [`StoreError::TooLittle`] if it cannot fit.
    pub fn receive(&self, id: ObjectId, size_bytes: u64) -> Result<Receiving<'_>, StoreError> {
        Receiving::new(self, id, size_bytes)
    }

    /// Opens an object, and makes sure that its content is what its id says. `None` if it is not
    /// there, or is corrupt: then it is put aside, so that it can be uploaded again.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn open_verified(&self, id: &ObjectId) -> Result<Option<Content>, StoreError> {
        let why = || failed(format!("read object {id}"));
        let path = self.path(id);
        let mut file = match fs_err::File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(why()(error)),
        };
        let metadata = file.metadata().map_err(why())?;
        if metadata.len() <= WHOLE_BYTES_MAX {
            let mut content = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0) + 1);
            // One byte more than a whole object may have: the file may have grown.
            let limit = WHOLE_BYTES_MAX + 1;
            file.by_ref().take(limit).read_to_end(&mut content).map_err(why())?;
            if id.algorithm().digest(&content) == *id {
                return Ok(Some(Content::Whole(content.into())));
            }
        } else if self.is_intact(id, &mut file, &metadata)? {
            io::Seek::rewind(&mut file).map_err(why())?;
            return Ok(Some(Content::File(file, metadata.len())));
        }
        self.put_aside(id, &metadata)?;
        Ok(None)
    }

    /// Hashes a large object, unless that was done since its file was last changed.
    fn is_intact(
        &self,
        id: &ObjectId,
        file: &mut fs_err::File,
        metadata: &std::fs::Metadata,
    ) -> Result<bool, StoreError> {
        if self.verified.knows(id, metadata) {
            return Ok(true);
        }
        let check = &self.checks[usize::from(id.digest()[0]) % CHECKS_MAX];
        let _check = check.lock().unwrap_or_else(PoisonError::into_inner);
        if self.verified.knows(id, metadata) {
            return Ok(true);
        }
        let mut hasher = Hasher::new(id.algorithm());
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            match file.read(&mut chunk).map_err(failed(format!("read object {id}")))? {
                0 => break,
                length => hasher.update(&chunk[..length]),
            }
        }
        let intact = hasher.finish() == *id;
        if intact {
            self.verified.remember(id, metadata);
        }
        Ok(intact)
    }

    /// Moves a corrupt object out of the way, unless a good one has taken its place by now.
    fn put_aside(&self, id: &ObjectId, bad: &std::fs::Metadata) -> Result<(), StoreError> {
        self.corrupt.fetch_add(1, Ordering::Relaxed);
        let path = self.path(id);
        let aside = self.quarantine.join(format!("{}-{}-{}", id.algorithm(), id.hex(), bad.ino()));
        self.tally.note(id, || {
            let stays = |size_bytes| Change { before: size_bytes, after: size_bytes };
            match fs_err::symlink_metadata(&path) {
                Ok(now) if now.ino() == bad.ino() => (),
                Ok(now) => return Ok(stays(length_of(id, &now))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(stays(None)),
                Err(error) => return Err(failed(format!("read object {id}"))(error)),
            }
            tracing::error!(
                object = %id, size_bytes = bad.len(), aside = %aside.display(),
                "an object is corrupt: put aside, not served; upload it again and check the disk"
            );
            fs_err::rename(&path, &aside)
                .map_err(failed(format!("put the corrupt object {id} aside")))?;
            Ok(Change { before: length_of(id, bad), after: None })
        })
    }

    /// Makes every object that was stored before this call durable.
    ///
    /// # Errors
    ///
    /// What the file-system says; from then on [`StoreError::Unsynced`], because the kernel
    /// reports a failed write once and then forgets it.
    pub fn sync(&self) -> Result<(), StoreError> {
        if self.unsynced.load(Ordering::Acquire) {
            return Err(StoreError::Unsynced);
        }
        nix::unistd::syncfs(self.handle.file()).map_err(|errno| {
            self.unsynced.store(true, Ordering::Release);
            failed("make the objects durable")(errno.into())
        })
    }

    /// How much a writer without privileges could store now, in bytes.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let status = self.status()?;
        Ok(status.blocks_available().saturating_mul(status.fragment_size()))
    }

    pub(super) fn status(&self) -> Result<nix::sys::statvfs::Statvfs, StoreError> {
        nix::sys::statvfs::fstatvfs(self.handle.file())
            .map_err(|errno| failed("ask how much space is free")(errno.into()))
    }

    /// Counts the objects of former runs, one after the other, until `stop` says so. The others
    /// are counted as they come.
    pub fn count(&self, stop: impl Fn() -> bool) {
        self.tally.count(&self.root, stop);
    }

    /// How many objects there are.
    #[must_use]
    pub fn holdings(&self) -> Holdings {
        self.tally.holdings()
    }

    /// How many corrupt objects were found since the server started.
    #[must_use]
    pub fn corrupt(&self) -> u64 {
        self.corrupt.load(Ordering::Relaxed)
    }
}

/// The length of the object that lies in such a file, in bytes. `None` if that is none: a crash of
/// the machine leaves files that were just made empty.
pub(super) fn length_of(id: &ObjectId, metadata: &std::fs::Metadata) -> Option<u64> {
    (metadata.len() > 0 || is_empty_object(id)).then_some(metadata.len())
}

pub(super) fn is_empty_object(id: &ObjectId) -> bool {
    id.algorithm().digest(&[]) == *id
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::object::Algorithm;

    #[test]
    fn what_is_put_aside_is_counted_no_more_and_empty_files_never_were() {
        let data = tempfile::tempdir().unwrap();
        fs_err::create_dir(data.path().join(layout::INCOMING)).unwrap();
        let objects = Objects::open(data.path()).unwrap();
        let [good, cut, bad, empty] = [&b"good"[..], b"cut", b"bad", b""].map(|content| {
            let id = Algorithm::Blake3.digest(content);
            fs_err::write(objects.path(&id), content).unwrap();
            id
        });
        // As after a power cut, and a fault of the disk.
        fs_err::write(objects.path(&cut), b"").unwrap();
        fs_err::write(objects.path(&bad), b"BAD").unwrap();
        objects.count(|| false);
        let held = |objects, bytes| Holdings { objects, bytes, complete: true };
        assert_eq!(objects.holdings(), held(3, 7));
        for (id, is_there, after) in [
            (cut, false, held(3, 7)),
            (bad, false, held(2, 4)),
            (good, true, held(2, 4)),
            (empty, true, held(2, 4)),
        ] {
            assert_eq!(objects.open_verified(&id).unwrap().is_some(), is_there);
            assert_eq!(objects.holdings(), after);
        }
        assert_eq!(objects.corrupt(), 2);
    }
}
