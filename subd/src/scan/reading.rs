//! Reads and hashes one file, a chunk at a time, and detects changes in the meantime.
//!
//! Reading leaves the page cache as it was: pages that were not in it are dropped again, so that
//! scanning does not evict the pages of other programs. Holes are hashed and not read. Reading the
//! medium bypasses the cache, which hides damage of the medium.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use model::object::{Algorithm, Hasher, ObjectId};
use model::scope::Attributes;
use model::tree::{Time, Xattrs};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rustix::fs::{Advice, SeekFrom, fadvise, seek};
use rustix::io::{ReadWriteFlags, preadv2};

use crate::limits::read_bytes;
use crate::root::ALIGNMENT;
use crate::root::{Directory, OpenedFile, RootError, Status};

/// How much of a file is read at once, in bytes. A request waits for at most one chunk.
pub const CHUNK_BYTES: usize = 256 << 10;

/// The most bytes of holes that are hashed, in one file and in one pass. A file with more is not
/// read: with a call that costs nothing anybody can make one that takes days.
pub const HOLE_BYTES_MAX: u64 = 16 << 30;

/// The content of a hole.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Where a file is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFrom {
    /// Through the page cache: what programs see.
    Cache,
    /// Around the page cache: what remains after a restart.
    Medium,
}

/// A file that is being read.
pub struct Reading {
    file: File,
    algorithm: Algorithm,
    hasher: Hasher,
    before: Status,
    started: Time,
    bytes: u64,
    via: ReadFrom,
    /// True as long as the kernel reports whether something is in the page cache.
    tells_cached: bool,
    /// The last known range of data; `None` if there are no holes.
    data: Option<Range<u64>>,
    /// The size of all holes, in bytes.
    pub hole_bytes: u64,
}

/// What was read of a file whose reading was left. Nothing is open.
pub struct Unfinished {
    algorithm: Algorithm,
    hasher: Hasher,
    before: Status,
    started: Time,
    bytes: u64,
}

/// A file that was read.
pub struct ReadFile {
    pub object: ObjectId,
    pub xattrs: Xattrs,
    /// The status after reading, with the size that was read.
    pub status: Status,
    pub started: Time,
    /// True if nothing changed while it was read.
    pub stable: bool,
}

impl Reading {
    /// Opens the regular file called `name`.
    pub fn start(
        directory: &Directory,
        name: &[u8],
        algorithm: Algorithm,
    ) -> Result<Self, RootError> {
        let started = system::clock::wall();
        let OpenedFile { file, status, allocated_bytes } = directory.open_seen(name)?;
        // The kernel must not read ahead, or it would not be known which pages were in the cache
        // already. If it does, only the cache is affected.
        if status.size_bytes > CHUNK_BYTES as u64 {
            let _advice = fadvise(&file, 0, None, Advice::Random);
        }
        Ok(Self {
            file,
            algorithm,
            hasher: Hasher::new(algorithm),
            before: status,
            started,
            bytes: 0,
            via: ReadFrom::Cache,
            tells_cached: true,
            data: (allocated_bytes < status.size_bytes).then_some(0..0),
            hole_bytes: status.size_bytes.saturating_sub(allocated_bytes),
        })
    }

    /// Returns the status of the file when it was opened.
    pub fn status(&self) -> &Status {
        &self.before
    }

    /// Continues where `former` was left, unless the file has changed since.
    pub fn resume(&mut self, former: Unfinished) {
        if former.algorithm == self.algorithm && former.before == self.before {
            let Unfinished { hasher, started, bytes, .. } = former;
            (self.hasher, self.started, self.bytes) = (hasher, started, bytes);
        }
    }

    /// Returns what was read so far. Nothing counts as read then.
    pub fn leave(&mut self) -> Unfinished {
        let hasher = mem::replace(&mut self.hasher, Hasher::new(self.algorithm));
        let Self { algorithm, before, started, .. } = *self;
        Unfinished { algorithm, hasher, before, started, bytes: mem::take(&mut self.bytes) }
    }

    /// True if nothing is left to be read.
    pub fn is_at_end(&self) -> bool {
        self.bytes >= self.before.size_bytes
    }

    /// Has the file count as one with a content that no image has, without reading it.
    pub fn skip(&mut self) {
        let Status { inode, size_bytes, ctime, .. } = &self.before;
        let text =
            format!("not read: {inode} {size_bytes} {} {}", ctime.seconds, ctime.nanoseconds);
        self.hasher.update(text.as_bytes());
        self.bytes = *size_bytes;
    }

    /// Reads the medium from now on; the buffers must be aligned
    /// ([`AlignedBuffer`](crate::root::AlignedBuffer)).
    ///
    /// # Errors
    ///
    /// `EINVAL` if the file-system cannot do that.
    pub fn go_around_cache(&mut self) -> Result<(), Errno> {
        let flags = OFlag::from_bits_retain(fcntl(&self.file, FcntlArg::F_GETFL)?);
        fcntl(&self.file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT))?;
        self.via = ReadFrom::Medium;
        Ok(())
    }

    /// Reads one more chunk into `buffer`; returns its length, 0 at the end.
    pub fn step(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // `finish` detects whether it has grown.
        if self.is_at_end() {
            return Ok(0);
        }
        let hole = self.hole();
        if hole > 0 {
            let length = usize::try_from(hole).unwrap_or(usize::MAX).min(CHUNK_BYTES);
            let mut left = length;
            while left > 0 {
                let part = left.min(ZEROS.len());
                self.hasher.update(&ZEROS[..part]);
                left -= part;
            }
            self.bytes += length as u64;
            return Ok(length);
        }
        let length = loop {
            let read = match self.via {
                ReadFrom::Cache => self.read_cached(buffer),
                ReadFrom::Medium => self.read_medium(buffer),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.hasher.update(&buffer[..length]);
        self.bytes += length as u64;
        Ok(length)
    }

    /// Returns the length of the hole at the present position, in bytes.
    fn hole(&mut self) -> u64 {
        let Some(data) = &self.data else { return 0 };
        let (at, end) = (self.bytes, self.before.size_bytes);
        if at >= end {
            return 0;
        }
        let data = if at < data.end { data.clone() } else { self.data_from(at) };
        let hole = data.start.min(end).saturating_sub(at);
        // The position after it must be aligned.
        let whole = if data.start < end { hole - hole % ALIGNMENT as u64 } else { hole };
        self.data = Some(data);
        whole
    }

    /// Returns the next range of data at `at` or after it.
    fn data_from(&self, at: u64) -> Range<u64> {
        match seek(&self.file, SeekFrom::Data(at)) {
            Ok(start) => {
                let end = seek(&self.file, SeekFrom::Hole(start)).unwrap_or(u64::MAX);
                start..end.max(start + 1)
            }
            Err(rustix::io::Errno::NXIO) => self.before.size_bytes..u64::MAX,
            // Without information on holes everything is read.
            Err(_) => at..u64::MAX,
        }
    }

    /// Reads through the page cache, and drops the pages that were not in it before.
    fn read_cached(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.tells_cached {
            let slices = &mut [IoSliceMut::new(buffer)];
            match preadv2(&self.file, slices, self.bytes, ReadWriteFlags::NOWAIT) {
                Ok(length) => return Ok(length),
                Err(rustix::io::Errno::AGAIN) => {
                    let length = self.file.read_at(buffer, self.bytes)?;
                    self.drop_cached(length);
                    return Ok(length);
                }
                Err(
                    rustix::io::Errno::OPNOTSUPP
                    | rustix::io::Errno::INVAL
                    | rustix::io::Errno::NOSYS,
                ) => {
                    self.tells_cached = false;
                }
                Err(error) => return Err(error.into()),
            }
        }
        // For example on an overlay. What was read from the device was not in the cache.
        let before = read_bytes();
        let length = self.file.read_at(buffer, self.bytes)?;
        if read_bytes() != before {
            self.drop_cached(length);
        }
        Ok(length)
    }

    /// Drops the last read from the page cache. Pages that are dirty or in use stay.
    fn drop_cached(&self, length: usize) {
        if let Some(length) = NonZeroU64::new(length as u64) {
            // A failure only leaves pages in the cache.
            let _advice = fadvise(&self.file, self.bytes, Some(length), Advice::DontNeed);
        }
    }

    fn read_medium(&self, buffer: &mut [u8]) -> io::Result<usize> {
        // A short read occurs only at the end of the file, and the offset after it is not aligned.
        let ended = !self.bytes.is_multiple_of(ALIGNMENT as u64);
        if ended { Ok(0) } else { self.file.read_at(buffer, self.bytes) }
    }

    /// Ends the reading, and reads the extended attributes that `attributes` manage, if any.
    pub fn finish(
        self,
        directory: &Directory,
        name: &[u8],
        attributes: Option<Attributes>,
    ) -> Result<ReadFile, RootError> {
        let xattrs = match attributes {
            Some(attributes) => directory.xattrs_of(name, &self.file, attributes)?,
            None => Vec::new(),
        };
        let after = status_of(&self.file, directory, name)?;
        // Every change moves the time of change.
        let stable = after.size_bytes == self.bytes
            && after.mtime == self.before.mtime
            && after.ctime == self.before.ctime;
        Ok(ReadFile {
            object: self.hasher.finish(),
            xattrs: Xattrs::from_iter(xattrs),
            status: Status { size_bytes: self.bytes, ..after },
            started: self.started,
            stable,
        })
    }
}

fn status_of(file: &File, directory: &Directory, name: &[u8]) -> Result<Status, RootError> {
    Status::of(file).map_err(|source| directory.error("read the status of", name, source))
}
