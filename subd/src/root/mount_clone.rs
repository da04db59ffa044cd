//! The mount through which the tree is reached, which no other process sees.
//!
//! A clone of the mount of the root (`open_tree`) has nothing mounted upon it, so what lies under
//! the mount points of the machine is visible through it. It stays in the mount namespace of the
//! machine, attached nowhere: there the kernel refuses (`EBUSY`) to rename or remove a mount point.
//! In a namespace of subd's own the kernel would instead detach what is mounted there from the
//! whole machine, so subd never creates one.
//!
//! A clone keeps the flags that the mount had when it was made. If that was read-only, as early in
//! a boot, the clone stays so after the machine has made its own mount writable: see
//! `MountClone::is_outdated`.

use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;
use nix::sys::statvfs::{FsFlags, fstatvfs};
use rustix::mount::{OpenTreeFlags, open_tree};

/// The descriptors of a root.
#[derive(Debug)]
pub(super) struct MountClone {
    /// The directory through which everything is opened.
    pub(super) directory: OwnedFd,
    /// The directory as all processes see it. It also keeps the file-system from being unmounted.
    pub(super) seen: OwnedFd,
    /// Keeps the clone alive; `None` if the root is used as it is mounted.
    _clone: Option<OwnedFd>,
}

impl MountClone {
    /// Opens `path` through a clone of its mount or, if the kernel makes none, as all processes see
    /// it.
    pub(super) fn cloned(path: &Path) -> Result<Self, Errno> {
        let seen = Self::as_seen(path)?;
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        let clone = match open_tree(&seen.seen, "", flags) {
            Ok(clone) => clone,
            Err(error) => {
                tracing::warn!(
                    root = %path.display(),
                    "mount points are left alone, with all that lies under them: {error}"
                );
                return Ok(seen);
            }
        };
        // The descriptor of the clone itself cannot be synced.
        let directory = openat(&clone, ".", directory_flags(), Mode::empty())?;
        warn_of_own_namespace();
        Ok(Self { directory, _clone: Some(clone), ..seen })
    }

    /// Opens `path` as all processes see it.
    pub(super) fn as_seen(path: &Path) -> Result<Self, Errno> {
        let directory = open(path, directory_flags(), Mode::empty())?;
        let seen = openat(&directory, ".", directory_flags(), Mode::empty())?;
        Ok(Self { directory, seen, _clone: None })
    }

    /// True if nothing can be written: the file-system is read-only, or its mount is.
    pub(super) fn is_read_only(&self) -> Result<bool, Errno> {
        Ok(is_read_only(&self.directory)? || is_read_only(&self.seen)?)
    }

    /// True if the clone is read-only and the mount that it was cloned from no longer is.
    pub(super) fn is_outdated(&self) -> Result<bool, Errno> {
        Ok(is_read_only(&self.directory)? && !is_read_only(&self.seen)?)
    }
}

fn directory_flags() -> OFlag {
    OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC
}

fn is_read_only(descriptor: &OwnedFd) -> Result<bool, Errno> {
    Ok(fstatvfs(descriptor)?.flags().contains(FsFlags::ST_RDONLY))
}

/// Logs a warning if the mounts that this process sees may not be those of the machine.
fn warn_of_own_namespace() {
    let namespace_of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    if let (Some(own), Some(first)) = (namespace_of("thread-self"), namespace_of("1"))
        && own != first
    {
        tracing::warn!(
            "this subd runs in a mount namespace of its own: what only others have mounted is \
             neither seen nor protected"
        );
    }
}
