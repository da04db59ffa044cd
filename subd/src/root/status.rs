//! What `lstat` tells of an entry.

use model::tree::{Device, Time};
use nix::sys::stat::{FileStat, SFlag, major, minor};

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Directory,
    File,
    Symlink,
    Special(Device),
    /// A socket, or a kind that this release does not know.
    Other,
}

/// An entry as it was at one moment. Symlinks are not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    pub kind: Kind,
    /// Permission, set-id and sticky bits.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Length, in bytes.
    pub size_bytes: u64,
    /// When its content was changed, by whoever set it.
    pub mtime: Time,
    /// When anything of it was changed; only the kernel sets it.
    pub ctime: Time,
    /// The number of the inode.
    pub inode: u64,
    /// The file-system. Overlays show another one for files than for directories.
    pub filesystem: u64,
    /// How many names it has.
    pub links: u64,
}

impl Status {
    /// Looks at an open file.
    ///
    /// # Errors
    ///
    /// What the kernel said.
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
