//! Reads and hashes one file, a chunk at a time, and notices when it changes meanwhile.
//!
//! Reading leaves the page cache as it was: what was not in it is taken out again, so that scanning
//! a file does not drive out what others work with. Holes are hashed and not read. Reading the
//! medium goes around the cache, which hides what has happened there.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use model::object::{Algorithm, Hasher, ObjectId};
use model::scope::Attributes;
use model::tree::{Time, Xattrs};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rustix::fs::{Advice, SeekFrom, fadvise, seek};
use rustix::io::{Errno as Refusal, ReadWriteFlags, preadv2};

use crate::limits::usage::read_bytes;
use crate::root::aligned_buffer::ALIGNMENT;
use crate::root::{Directory, OpenedFile, RootError, Status};

/// How much of a file is read at once: what a command waits for at most, in bytes.
pub const CHUNK_BYTES: usize = 256 << 10;

/// What a hole holds.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Where a file is read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// Through the page cache: what programs see.
    Cache,
    /// Around it: what will be left after a restart.
    Medium,
}

/// A file that is being read.
pub struct Reading {
    file: File,
    hasher: Hasher,
    before: Status,
    started: Time,
    bytes: u64,
    via: Via,
    /// True as long as the kernel tells whether something is in the page cache.
    tells_cached: bool,
    /// What of the file is data, from where it was last asked; `None` if there are no holes.
    data: Option<Range<u64>>,
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
        let started = system::clock::wall();
        let OpenedFile { file, status, allocated_bytes } = directory.open_seen(name)?;
        // The kernel must not read further than it is asked to, or it could not be told what of
        // that has been in the cache already. If it does, only the cache suffers.
        if status.size_bytes > CHUNK_BYTES as u64 {
            let _advice = fadvise(&file, 0, None, Advice::Random);
        }
        Ok(Self {
            file,
            hasher: Hasher::new(algorithm),
            before: status,
            started,
            bytes: 0,
            via: Via::Cache,
            tells_cached: true,
            data: (allocated_bytes < status.size_bytes).then_some(0..0),
        })
    }

    /// Who the file was when it was opened.
    #[must_use]
    pub fn status(&self) -> &Status {
        &self.before
    }

    /// Reads the medium from now on; buffers are to be those of an [`AlignedBuffer`](crate::root::aligned_buffer::AlignedBuffer).
    ///
    /// # Errors
    ///
    /// `EINVAL` if the file-system cannot do that.
    pub fn go_around_cache(&mut self) -> Result<(), Errno> {
        let flags = OFlag::from_bits_retain(fcntl(&self.file, FcntlArg::F_GETFL)?);
        fcntl(&self.file, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT))?;
        self.via = Via::Medium;
        Ok(())
    }

    /// Reads one more chunk into `buffer`; gives its length, 0 at the end.
    ///
    /// # Errors
    ///
    /// What the kernel said.
    pub fn step(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Whether it has grown since is seen at its end.
        if self.bytes >= self.before.size_bytes {
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
                Via::Cache => self.read_cached(buffer),
                Via::Medium => self.read_medium(buffer),
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

    /// How much of a hole is ahead, in bytes.
    fn hole(&mut self) -> u64 {
        let Some(data) = &self.data else { return 0 };
        let (at, end) = (self.bytes, self.before.size_bytes);
        if at >= end {
            return 0;
        }
        let data = if at < data.end { data.clone() } else { self.data_from(at) };
        let hole = data.start.min(end).saturating_sub(at);
        // What follows is read from where the medium can be read.
        let whole = if data.start < end { hole - hole % ALIGNMENT as u64 } else { hole };
        self.data = Some(data);
        whole
    }

    /// The next data at `at` or after it.
    fn data_from(&self, at: u64) -> Range<u64> {
        match seek(&self.file, SeekFrom::Data(at)) {
            Ok(start) => {
                let end = seek(&self.file, SeekFrom::Hole(start)).unwrap_or(u64::MAX);
                start..end.max(start + 1)
            }
            Err(Refusal::NXIO) => self.before.size_bytes..u64::MAX,
            // Where nothing is known of holes, all is read.
            Err(_) => at..u64::MAX,
        }
    }

    /// Reads through the page cache, and takes out of it what was not there before.
    fn read_cached(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.tells_cached {
            let slices = &mut [IoSliceMut::new(buffer)];
            match preadv2(&self.file, slices, self.bytes, ReadWriteFlags::NOWAIT) {
                Ok(length) => return Ok(length),
                Err(Refusal::AGAIN) => {
                    let length = self.file.read_at(buffer, self.bytes)?;
                    self.drop_cached(length);
                    return Ok(length);
                }
                Err(Refusal::OPNOTSUPP | Refusal::INVAL | Refusal::NOSYS) => {
                    self.tells_cached = false;
                }
                Err(error) => return Err(error.into()),
            }
        }
        // An overlay, say. Then what the device had to give was not in the cache.
        let before = read_bytes();
        let length = self.file.read_at(buffer, self.bytes)?;
        if read_bytes() != before {
            self.drop_cached(length);
        }
        Ok(length)
    }

    /// Takes what was just read out of the page cache. What is changed or in use stays.
    fn drop_cached(&self, length: usize) {
        if let Some(length) = NonZeroU64::new(length as u64) {
            // Without it the cache is a little worse off, and nothing else.
            let _advice = fadvise(&self.file, self.bytes, Some(length), Advice::DontNeed);
        }
    }

    fn read_medium(&self, buffer: &mut [u8]) -> io::Result<usize> {
        // Only at its end does a file give less than it is asked for; and from there on its
        // offsets are none to read at.
        let ended = !self.bytes.is_multiple_of(ALIGNMENT as u64);
        if ended { Ok(0) } else { self.file.read_at(buffer, self.bytes) }
    }

    /// Ends with what was read so far, and the extended attributes that `attributes` manage;
    /// without it, none are read.
    ///
    /// # Errors
    ///
    /// [`RootError`] if the file cannot be looked at once more.
    pub fn finish(
        self,
        directory: &Directory,
        name: &[u8],
        attributes: Option<Attributes>,
    ) -> Result<WasRead, RootError> {
        let xattrs = match attributes {
            Some(attributes) => directory.xattrs_of(name, &self.file, attributes)?,
            None => Vec::new(),
        };
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
