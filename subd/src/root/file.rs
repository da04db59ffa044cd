//! What `lstat` returns for an entry, and memory for reads around the page cache (`O_DIRECT`).

use model::tree::{Device, Time};
use nix::sys::stat::{FileStat, SFlag, major, minor};

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Directory,
    File,
    Symlink,
    Special(Device),
    /// A socket, or a kind that this release does not know.
    Other,
}

/// The status of an entry. Symlinks are not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    pub kind: Kind,
    /// Permission, set-id and sticky bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Length, in bytes.
    pub size_bytes: u64,
    /// The time of modification, which anybody may set.
    pub mtime: Time,
    /// The time of change, which only the kernel sets.
    pub ctime: Time,
    /// The number of the inode.
    pub inode: u64,
    /// The file-system. Overlays report another one for files than for directories.
    pub filesystem: u64,
    /// The number of its names.
    pub links: u64,
}

impl Status {
    /// Reads the status of an open file.
    pub fn of(file: &std::fs::File) -> Result<Self, nix::errno::Errno> {
        nix::sys::stat::fstat(file).map(|status| Self::new(&status))
    }

    pub(super) fn new(status: &FileStat) -> Self {
        let number = |part: u64| u32::try_from(part).unwrap_or(u32::MAX);
        let (major, minor) = (number(major(status.st_rdev)), number(minor(status.st_rdev)));
        let kind = match SFlag::from_bits_truncate(status.st_mode & SFlag::S_IFMT.bits()) {
            SFlag::S_IFDIR => Kind::Directory,
            SFlag::S_IFREG => Kind::File,
            SFlag::S_IFLNK => Kind::Symlink,
            SFlag::S_IFBLK => Kind::Special(Device::Block { major, minor }),
            SFlag::S_IFCHR => Kind::Special(Device::Character { major, minor }),
            SFlag::S_IFIFO => Kind::Special(Device::Fifo),
            _ => Kind::Other,
        };
        Self {
            kind,
            mode: status.st_mode & model::tree::node::MODE_BITS,
            uid: status.st_uid,
            gid: status.st_gid,
            size_bytes: u64::try_from(status.st_size).unwrap_or(0),
            mtime: time(status.st_mtime, status.st_mtime_nsec),
            ctime: time(status.st_ctime, status.st_ctime_nsec),
            inode: status.st_ino,
            filesystem: status.st_dev,
            links: status.st_nlink,
        }
    }
}

fn time(seconds: i64, nanoseconds: i64) -> Time {
    // The kernel keeps nanoseconds below a thousand million.
    Time { seconds, nanoseconds: u32::try_from(nanoseconds).unwrap_or(0) }
}

/// The alignment of such reads in the file and in memory, in bytes. No device in use requires more.
pub const ALIGNMENT: usize = 4_096;

/// A buffer that is aligned to [`ALIGNMENT`].
#[derive(Debug)]
pub struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    /// Allocates `length` bytes.
    pub fn new(length: usize) -> Self {
        let memory = vec![0; length + ALIGNMENT];
        // The vector never grows, so its address stays the same.
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { memory, start, length }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.length]
    }
}
