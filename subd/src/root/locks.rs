//! The flags of an inode that keep it from being changed: immutable and append-only (`chattr`).
//!
//! They are read without opening the file, and set only on the expected inode, so that nobody can
//! have them cleared on another file by swapping names.

use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, fstat};
use rustix::fs::{
    AtFlags, IFlags, StatxAttributes, StatxFlags, ioctl_getflags, ioctl_setflags, statx,
};
use serde::{Deserialize, Serialize};

use crate::root::directory::Directory;
use crate::root::{RootError, open_below};

/// The flags of an inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Locks {
    /// Nothing of it can be changed.
    pub immutable: bool,
    /// Content can only be appended.
    pub append_only: bool,
}

impl Locks {
    /// No flags.
    pub const NONE: Self = Self { immutable: false, append_only: false };

    fn flags(self) -> IFlags {
        let mut flags = IFlags::empty();
        flags.set(IFlags::IMMUTABLE, self.immutable);
        flags.set(IFlags::APPEND, self.append_only);
        flags
    }
}

impl Directory {
    /// Returns the inode number of the entry `name` and its flags, as far as the file-system
    /// reports them.
    pub fn locks(&self, name: &[u8]) -> Result<(u64, Locks), RootError> {
        self.on("read the status of", name, || {
            locks_of(self.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW)
        })
    }

    /// As [`Directory::locks`], of the directory itself.
    pub fn own_locks(&self) -> Result<(u64, Locks), RootError> {
        locks_of(self.as_fd(), b"", AtFlags::EMPTY_PATH)
            .map_err(|source| RootError::call("read the status of", self.path().clone(), source))
    }

    /// Sets the flags of the entry `name` to `locks`, if its inode is `inode`. True if it is.
    pub fn set_locks(&self, name: &[u8], inode: u64, locks: Locks) -> Result<bool, RootError> {
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        self.on("change the flags of", name, || {
            let (found, present) = locks_of(self.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW)?;
            // Devices have no flags and are not opened, because that can have effects.
            if found != inode || present == locks {
                return Ok(found == inode);
            }
            let held = open_below(&self.descriptor, name, flags, Mode::empty())?;
            if fstat(&held)?.st_ino != inode {
                return Ok(false);
            }
            set(held.as_fd(), locks).map(|()| true)
        })
    }

    /// As [`Directory::set_locks`], of the directory itself.
    pub fn set_own_locks(&self, locks: Locks) -> Result<(), RootError> {
        set(self.as_fd(), locks)
            .map_err(|source| RootError::call("change the flags of", self.path().clone(), source))
    }
}

impl Directory {
    /// Returns why entries of `other` cannot be moved into this directory, as far as its flags
    /// tell: ext4 and XFS refuse that for directories with a project id, and all file-systems for
    /// encrypted directories.
    pub fn barrier_to(&self, other: &Self) -> Result<Option<&'static str>, RootError> {
        let has = |directory: &Self| -> Result<_, RootError> {
            let flags = StatxFlags::BASIC_STATS;
            let found = statx(directory.as_fd(), "", AtFlags::EMPTY_PATH, flags);
            let is_encrypted =
                found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::ENCRYPTED));
            // Not every file-system has such flags.
            let flags = ioctl_getflags(directory.as_fd()).unwrap_or(IFlags::empty());
            Ok((flags.contains(IFlags::PROJECT_INHERIT), is_encrypted))
        };
        let (here, there) = (has(self)?, has(other)?);
        Ok(match (here.0 && !there.0, here.1 && !there.1) {
            (true, _) => Some("its directory has a project id, and nothing can be moved into it"),
            (_, true) => Some("its directory is encrypted, and nothing can be moved into it"),
            _ => None,
        })
    }
}

fn locks_of(directory: BorrowedFd<'_>, name: &[u8], how: AtFlags) -> Result<(u64, Locks), Errno> {
    let found =
        statx(directory, name, how | AtFlags::STATX_DONT_SYNC, StatxFlags::INO).map_err(errno)?;
    let has = |attribute| found.stx_attributes.contains(attribute);
    let locks = Locks {
        immutable: has(StatxAttributes::IMMUTABLE),
        append_only: has(StatxAttributes::APPEND),
    };
    Ok((found.stx_ino, locks))
}

fn set(held: BorrowedFd<'_>, locks: Locks) -> Result<(), Errno> {
    let present = ioctl_getflags(held).map_err(errno)?;
    let wanted = (present - (IFlags::IMMUTABLE | IFlags::APPEND)) | locks.flags();
    if wanted == present { Ok(()) } else { ioctl_setflags(held, wanted).map_err(errno) }
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}
