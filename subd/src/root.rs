//! `Root`: the only way in which subd reaches the tree it manages.
//!
//! A [`Root`] is a descriptor of the directory given by `--root`. Every path below it is opened by
//! the kernel with `openat2` and `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV`, so that
//! no concurrent change of the tree can lead subd out of it: a symlink in the place of a directory
//! is `ELOOP`, a mount point is `EXDEV`. Entries are changed by their single name in an open
//! [`Directory`].
//!
//! The descriptor belongs to a mount that only subd has, so what lies under the mount points of the
//! machine is part of the tree: see [`mount_clone`]. subd's own directories are reached through it
//! too, because nothing can be renamed from one mount to another.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use api::subd::FreeSpace;
use model::escape::escape;
use model::path::TreePath;
use model::plan::Occupant;
use model::scope::SUBD_DIRECTORY;
use model::tree::TimePrecision;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{Mode, lstat};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::syncfs;
use rustix::fs::{AtFlags, StatxFlags, statx};

mod change;
mod directory;
pub mod entry;
mod file;
mod locks;
pub mod mount_clone;
mod used_paths;

use crate::root::mount_clone::MountClone;

pub use crate::root::entry::OpenEntry;
pub use change::is_unknown_flag;
pub use directory::{AttributeList, Directory, ENTRIES_MAX, OpenedFile, errno_of};
pub use file::{ALIGNMENT, AlignedBuffer, Kind, Status};
pub use locks::Locks;

/// The operation of an error of setting an extended attribute.
pub const SET_ATTRIBUTE: &str = "set an extended attribute of";

/// The longest piece of a path that is given to the kernel at once, in bytes. Linux refuses
/// strings of 4,096 bytes; longer paths are opened in several steps.
const PIECE_BYTES_MAX: usize = 4_000;

/// The tree that subd manages.
#[derive(Debug)]
pub struct Root {
    handle: MountClone,
    path: PathBuf,
    times: OnceLock<TimePrecision>,
    /// True if this process may use the blocks that file-systems reserve for root.
    may_use_reserve: OnceLock<bool>,
}

impl Root {
    /// Opens the directory `path` as the root, with what lies under the mount points in it.
    /// Symlinks in `path` itself are followed. Where this process may not look under mount points
    /// it logs that, and leaves them alone.
    ///
    /// # Errors
    ///
    /// [`RootError::Open`] if it is no directory or cannot be opened; [`RootError::NoProc`] if
    /// `/proc` is not mounted.
    pub fn open(path: &Path) -> Result<Self, RootError> {
        Self::open_by(path, MountClone::cloned)
    }

    /// As [`Root::open`], without what lies under mount points: for subd's own directories
    /// elsewhere.
    pub fn open_as_seen(path: &Path) -> Result<Self, RootError> {
        Self::open_by(path, MountClone::as_seen)
    }

    fn open_by(
        path: &Path,
        open: impl FnOnce(&Path) -> Result<MountClone, Errno>,
    ) -> Result<Self, RootError> {
        // Modes and extended attributes are set by paths below /proc/self/fd.
        lstat("/proc/self/fd").map_err(|source| RootError::NoProc { source })?;
        let handle =
            open(path).map_err(|source| RootError::Open { path: path.to_owned(), source })?;
        let (times, may_use_reserve) = (OnceLock::new(), OnceLock::new());
        Ok(Self { handle, path: path.to_owned(), times, may_use_reserve })
    }

    /// True if nothing can be written: the file-system of the root or its mount is read-only.
    pub fn is_read_only(&self) -> Result<bool, RootError> {
        self.handle.is_read_only().map_err(|source| self.flags_error(source))
    }

    /// True if the machine has made the root writable and this handle is still read-only: it must
    /// be opened again.
    pub fn is_outdated(&self) -> Result<bool, RootError> {
        self.handle.is_outdated().map_err(|source| self.flags_error(source))
    }

    fn flags_error(&self, source: Errno) -> RootError {
        RootError::call("ask for the flags of", TreePath::root(), source)
    }

    /// Returns the paths of the tree that the kernel uses now, whether they exist or are hidden:
    /// mount points and active swap files.
    pub fn used_paths(&self) -> Result<BTreeMap<TreePath, Occupant>, RootError> {
        let fail = |source| RootError::call("ask for mount points in", TreePath::root(), source);
        let read = |path: &str| match std::fs::read(path) {
            // A kernel without swap has no such file.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            other => other.map_err(|error| fail(errno_of(error))),
        };
        let seen = &self.handle.seen;
        let found = statx(seen, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
            .map_err(|error| fail(Errno::from_raw(error.raw_os_error())))?;
        let path = std::fs::read_link(format!("/proc/self/fd/{}", seen.as_raw_fd()))
            .map_err(|error| fail(errno_of(error)))?;
        let place =
            used_paths::RootLocation { mount: found.stx_mnt_id, path: path.as_os_str().as_bytes() };
        let (mountinfo, swaps) = (read("/proc/thread-self/mountinfo")?, read("/proc/swaps")?);
        Ok(used_paths::used_paths(place, &mountinfo, &swaps))
    }

    /// Returns which times the file-system keeps as they are set: all, until [`Root::learn_times`]
    /// has measured it.
    pub fn times(&self) -> TimePrecision {
        self.times.get().copied().unwrap_or_default()
    }

    /// Measures which times the file-system keeps, by `directory`, which is one of subd's own on
    /// the file-system of the root. If that fails, it is logged, and all times count as kept.
    pub fn learn_times(&self, directory: &Directory) {
        match directory.kept_times() {
            Ok(times) => {
                let _known = self.times.set(times);
            }
            Err(error) => {
                let error = model::display::error_chain(&error);
                tracing::warn!("cannot measure which times the file-system keeps: {error}");
            }
        }
    }

    /// Writes a test file in `/.subd`, waits until it is on the medium, and removes it.
    pub fn try_to_write(&self) -> Result<(), RootError> {
        self.directory(&subd_directory())?.try_to_write()
    }

    /// Returns the path by which the root was opened, for reports only.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the directory at `path`.
    ///
    /// # Errors
    ///
    /// [`RootError`] with `ELOOP` if a component is a symlink, `EXDEV` if one is a mount point,
    /// `ENOTDIR` if one is no directory.
    pub fn directory(&self, path: &TreePath) -> Result<Directory, RootError> {
        let fail = |source| RootError::call("open the directory", path.clone(), source);
        let mut descriptor = open_directory(&self.handle.directory, b".").map_err(fail)?;
        let mut rest = path.relative();
        while !rest.is_empty() {
            let piece = match rest.get(..PIECE_BYTES_MAX) {
                None => rest,
                Some(start) => {
                    let slash = start.iter().rposition(|&byte| byte == b'/');
                    &rest[..slash.expect("a component is shorter than a piece")]
                }
            };
            descriptor = open_directory(&descriptor, piece).map_err(fail)?;
            rest = rest[piece.len()..].strip_prefix(b"/").unwrap_or_default();
        }
        Ok(Directory::new(descriptor, path.clone()))
    }

    /// Opens the parent directory of `path`. Returns it with the name of `path` in it.
    ///
    /// # Errors
    ///
    /// As [`Root::directory`]; `EINVAL` for the root itself, which is in no directory.
    pub fn parent<'path>(
        &self,
        path: &'path TreePath,
    ) -> Result<(Directory, &'path [u8]), RootError> {
        let parent = path.parent().ok_or_else(|| {
            RootError::call("open the directory above", path.clone(), Errno::EINVAL)
        })?;
        Ok((self.directory(&parent)?, path.name()))
    }

    /// Syncs the file-system of the root.
    pub fn sync_filesystem(&self) -> Result<(), RootError> {
        syncfs(&self.handle.directory)
            .map_err(|source| RootError::call("sync", TreePath::root(), source))
    }

    /// Writes to the medium what waits for it, so that the next [`Root::sync_filesystem`] has less
    /// to wait for, which also reports any error of this: the kernel reports one to each open
    /// description, and this uses one of its own.
    pub fn write_early(&self) {
        let early = open_directory(&self.handle.directory, b".").and_then(syncfs);
        if let Err(error) = early {
            tracing::debug!("the file-system cannot be synced early: {error}");
        }
    }

    /// Returns the free space of the file-system of the root.
    pub fn space(&self) -> Result<FreeSpace, RootError> {
        let status = fstatvfs(&self.handle.directory).map_err(|source| {
            RootError::call("ask for the free space of", TreePath::root(), source)
        })?;
        let may_use_reserve = *self
            .may_use_reserve
            .get_or_init(|| std::fs::read_to_string("/proc/self/uid_map").is_ok_and(is_real_root));
        let blocks = if may_use_reserve { status.blocks_free() } else { status.blocks_available() };
        let free_bytes = blocks.saturating_mul(status.fragment_size());
        // btrfs has no limit of inodes and reports 0.
        let free_inodes = if status.files() == 0 { u64::MAX } else { status.files_free() };
        Ok(FreeSpace { free_bytes, free_inodes })
    }
}

/// True for errors that mean that the file-system has no space or no inodes left.
pub fn is_full(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ENOSPC | Errno::EDQUOT))
}

/// Returns true if the user map of a process says that its root is that of the machine.
/// File-systems keep a reserve for that user, not for the root of a container.
fn is_real_root(uid_map: String) -> bool {
    let first = uid_map.lines().next().unwrap_or_default();
    first.split_whitespace().take(2).eq(["0", "0"])
}

/// Returns the path of subd's own directory.
pub fn subd_directory() -> TreePath {
    TreePath::new(SUBD_DIRECTORY).expect("the constant is a path")
}

/// Opens a directory below `descriptor` without leaving it.
fn open_directory(descriptor: &OwnedFd, piece: &[u8]) -> Result<OwnedFd, Errno> {
    open_below(descriptor, piece, OFlag::O_RDONLY | OFlag::O_DIRECTORY, Mode::empty())
}

/// Opens `piece` below `descriptor` without leaving it; never follows a symlink. One at the end is
/// `ELOOP`, unless `flags` are `O_PATH | O_NOFOLLOW`, which open the symlink itself.
fn open_below(
    descriptor: &OwnedFd,
    piece: &[u8],
    flags: OFlag,
    mode: Mode,
) -> Result<OwnedFd, Errno> {
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).mode(mode).resolve(
        ResolveFlag::RESOLVE_BENEATH
            | ResolveFlag::RESOLVE_NO_SYMLINKS
            | ResolveFlag::RESOLVE_NO_XDEV,
    );
    openat2(descriptor, piece, how)
}

/// A failed operation on the managed tree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RootError {
    #[error("cannot open the root `{}`", path.display())]
    Open { path: PathBuf, source: Errno },
    #[error("cannot see /proc/self/fd: is /proc mounted?")]
    NoProc { source: Errno },
    #[error("cannot {operation} {path}")]
    Call {
        /// The failed operation, such as `rename`.
        operation: &'static str,
        path: TreePath,
        source: Errno,
    },
    #[error("cannot {operation} `{name}` in {directory}: {why}")]
    BadName { operation: &'static str, directory: TreePath, name: String, why: &'static str },
    #[error("{path} is not a regular file")]
    NotRegular { path: TreePath },
    #[error(
        "{path} is on another file-system than the root, such as a btrfs subvolume, and nothing \
         can be moved between them: remove it, and subd makes it again"
    )]
    OtherFileSystem { path: TreePath },
}

impl RootError {
    pub(super) fn call(operation: &'static str, path: TreePath, source: Errno) -> Self {
        Self::Call { operation, path, source }
    }

    /// The error of `operation` on `name`, which may be no name at all.
    pub(super) fn entry(
        operation: &'static str,
        directory: &TreePath,
        name: &[u8],
        source: Errno,
    ) -> Self {
        match directory.join(name) {
            Ok(path) => Self::call(operation, path, source),
            Err(_) => Self::bad_name(operation, directory, name, "it is not a valid name"),
        }
    }

    pub(super) fn bad_name(
        operation: &'static str,
        directory: &TreePath,
        name: &[u8],
        why: &'static str,
    ) -> Self {
        Self::BadName { operation, directory: directory.clone(), name: escape(name), why }
    }

    /// Returns the kernel's error; `None` if it was not called.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Open { source, .. } | Self::NoProc { source } | Self::Call { source, .. } => {
                Some(*source)
            }
            Self::BadName { .. } | Self::NotRegular { .. } | Self::OtherFileSystem { .. } => None,
        }
    }

    /// True if the file-system has no space or no inodes left.
    pub fn is_full(&self) -> bool {
        matches!(self.errno(), Some(Errno::ENOSPC | Errno::EDQUOT))
    }

    /// True if the error is about the entry, and not about the file-system or this process.
    pub fn is_about_entry(&self) -> bool {
        let is_general = matches!(
            self.errno(),
            Some(
                Errno::EIO
                    | Errno::EROFS
                    | Errno::ENOSPC
                    | Errno::EDQUOT
                    | Errno::EUCLEAN
                    | Errno::ENODEV
                    | Errno::ENOMEM
                    | Errno::EMFILE
                    | Errno::ENFILE
                    | Errno::EINTR
            )
        );
        !is_general
    }

    /// True if an extended attribute could not be set.
    pub fn is_of_attribute(&self) -> bool {
        matches!(self, Self::Call { operation, .. } if *operation == SET_ATTRIBUTE)
    }

    /// True if the entry does not exist.
    pub fn is_absent(&self) -> bool {
        self.errno() == Some(Errno::ENOENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_for_the_root_of_the_machine() {
        let table = [
            ("         0          0 4294967295\n", true),
            ("0 0 1\n1 100000 65535\n", true),
            ("0 100000 65536\n", false),
            ("1000 1000 1\n", false),
            ("", false),
        ];
        for (uid_map, want) in table {
            assert_eq!(is_real_root(uid_map.to_owned()), want, "{uid_map}");
        }
    }
}
