//! Reads and hashes one file, a chunk at a time, and notices when it changes meanwhile.

use std::fs::File;
use std::io::{self, Read};
use std::time::{SystemTime, UNIX_EPOCH};

use common::object::{Algorithm, Hasher, ObjectId};
use common::scope::Attributes;
use common::tree::{Time, Xattrs};

use crate::root::{Directory, RootError, Status};

/// How much of a file is read at once: what a command waits for at most, in bytes.
pub const CHUNK_BYTES: usize = 256 << 10;

/// How far a file may grow while it is read before reading it is given up, in bytes.
const GROWTH_BYTES_MAX: u64 = 1 << 20;

/// A file that is being read.
pub struct Reading {
    file: File,
    hasher: Hasher,
    before: Status,
    started: Time,
    bytes: u64,
}

/// A file that was read.
pub struct WasRead {
    /// What was read.
    pub object: ObjectId,
    /// Its managed extended attributes.
    pub xattrs: Xattrs,
    /// Who was read, as it was afterwards, with the size that was read.
    pub status: Status,
    /// When reading began.
    pub started: Time,
    /// True if nothing changed while it was read.
    pub stable: bool,
}

impl Reading {
    /// Opens the regular file called `name`.
    ///
    /// # Errors
    ///
    /// As [`Directory::open_file`].
    pub fn start(
        directory: &Directory,
        name: &[u8],
        algorithm: Algorithm,
    ) -> Result<Self, RootError> {
        let started = now();
        let file = directory.open_file(name)?;
        let before = status_of(&file, directory, name)?;
        Ok(Self { file, hasher: Hasher::new(algorithm), before, started, bytes: 0 })
    }

    /// Reads one more chunk into `buffer`; gives its length, 0 at the end.
    ///
    /// # Errors
    ///
    /// What the kernel said.
    pub fn step(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.bytes > self.before.size_bytes.saturating_add(GROWTH_BYTES_MAX) {
            return Ok(0);
        }
        let length = loop {
            match self.file.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.hasher.update(&buffer[..length]);
        self.bytes += length as u64;
        Ok(length)
    }

    /// Ends with what was read so far, and the extended attributes that `attributes` manage.
    ///
    /// # Errors
    ///
    /// [`RootError`] if the file cannot be looked at once more.
    pub fn finish(
        self,
        directory: &Directory,
        name: &[u8],
        attributes: Attributes,
    ) -> Result<WasRead, RootError> {
        let xattrs = directory.xattrs_of(name, &self.file, attributes)?;
        let after = status_of(&self.file, directory, name)?;
        // Whatever is changed moves the time of change.
        let stable = after.size_bytes == self.bytes
            && after.mtime == self.before.mtime
            && after.ctime == self.before.ctime;
        Ok(WasRead {
            object: self.hasher.finish(),
            xattrs: Xattrs::from_iter(xattrs),
            status: Status { size_bytes: self.bytes, ..after },
            started: self.started,
            stable,
        })
    }
}

fn status_of(file: &File, directory: &Directory, name: &[u8]) -> Result<Status, RootError> {
    Status::of(file).map_err(|source| directory.error("look at", name, source))
}

/// The time of the machine's clock.
pub fn now() -> Time {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(since) => Time {
            seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: since.subsec_nanos(),
        },
        Err(_) => Time::default(),
    }
}
