//! `Root`: the only way in which subd reaches the tree it manages.
//!
//! A [`Root`] is a descriptor of the directory given by `--root`. Every path below it is opened by
//! the kernel with `openat2` and `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV`, so that
//! nothing that somebody does to the tree meanwhile can lead subd out of it: a symlink in the
//! place of a directory is `ELOOP`, a mount point is `EXDEV`. All that is done to an entry is
//! done by its single name in an open [`Directory`].
//!
//! The descriptor is one of a mount that only subd has, so what lies under the mount points of the
//! machine is part of the tree: see `handle`. subd's own directories are reached through it too,
//! because nothing can be renamed from one mount to another.

pub mod aligned_buffer;
mod change;
mod directory;
pub mod entry;
mod error;
mod locks;
pub mod mount_clone;
mod occupied;
mod status;
pub mod write_check;

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use api::subd::Space;
use model::path::TreePath;
use model::plan::Occupant;
use model::tree::Times;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{Mode, lstat};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::syncfs;
use rustix::fs::{AtFlags, StatxFlags, statx};

pub use crate::root::entry::OpenEntry;
pub use directory::{AttributeList, Directory, ENTRIES_MAX, OpenedFile};
pub use error::RootError;
pub use locks::Locks;
pub use status::{Kind, Status};

use crate::root::mount_clone::MountClone;

/// The longest piece of a path that is given to the kernel at once, in bytes. Linux refuses
/// strings of 4,096 bytes; longer paths are opened in several steps.
const PIECE_BYTES_MAX: usize = 4_000;

/// The tree that subd manages.
#[derive(Debug)]
pub struct Root {
    handle: MountClone,
    path: PathBuf,
    times: OnceLock<Times>,
}

impl Root {
    /// Opens the directory `path` as the root, with what lies under the mount points in it.
    /// Symlinks in `path` itself are followed. Where this process may not look under mount points
    /// it says so in the log, and leaves them alone.
    ///
    /// # Errors
    ///
    /// [`RootError::Open`] if it is no directory or cannot be opened; [`RootError::NoProc`] if
    /// `/proc` is not mounted.
    pub fn open(path: &Path) -> Result<Self, RootError> {
        Self::open_by(path, MountClone::cloned)
    }

    /// As [`Root::open`], without what lies under mount points: for directories of subd's own that
    /// are elsewhere.
    ///
    /// # Errors
    ///
    /// As [`Root::open`].
    pub fn open_as_seen(path: &Path) -> Result<Self, RootError> {
        Self::open_by(path, MountClone::as_seen)
    }

    fn open_by(
        path: &Path,
        open: impl FnOnce(&Path) -> Result<MountClone, Errno>,
    ) -> Result<Self, RootError> {
        // Modes and extended attributes have no calls of their own by descriptor and name.
        lstat("/proc/self/fd").map_err(|source| RootError::NoProc { source })?;
        let handle =
            open(path).map_err(|source| RootError::Open { path: path.to_owned(), source })?;
        Ok(Self { handle, path: path.to_owned(), times: OnceLock::new() })
    }

    /// True if what lies under mount points is part of the tree.
    #[must_use]
    pub fn sees_under_mounts(&self) -> bool {
        self.handle.is_clone()
    }

    /// True if nothing can be written: the file-system of the root or its mount is read-only.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel said.
    pub fn is_read_only(&self) -> Result<bool, RootError> {
        self.handle.is_read_only().map_err(|source| self.unasked(source))
    }

    /// True if the machine has made the root writable and this handle of it is still read-only: it
    /// must be opened again.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel said.
    pub fn is_outdated(&self) -> Result<bool, RootError> {
        self.handle.is_outdated().map_err(|source| self.unasked(source))
    }

    fn unasked(&self, source: Errno) -> RootError {
        RootError::call("ask for the flags of", TreePath::root(), source)
    }

    /// The paths of the tree that the kernel uses now, whether they exist or are hidden: mount
    /// points and active swap files.
    ///
    /// # Errors
    ///
    /// [`RootError`] if the kernel does not tell.
    pub fn occupied(&self) -> Result<BTreeMap<TreePath, Occupant>, RootError> {
        let fail = |source| RootError::call("ask for mount points in", TreePath::root(), source);
        let read = |path: &str| match std::fs::read(path) {
            // A kernel without swap has no such file.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            other => other.map_err(|error| fail(directory::errno_of(&error))),
        };
        let seen = &self.handle.seen;
        let found = statx(seen, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
            .map_err(|error| fail(Errno::from_raw(error.raw_os_error())))?;
        let path = std::fs::read_link(format!("/proc/self/fd/{}", seen.as_raw_fd()))
            .map_err(|error| fail(directory::errno_of(&error)))?;
        let place = occupied::Place { mount: found.stx_mnt_id, path: path.as_os_str().as_bytes() };
        let (mountinfo, swaps) = (read("/proc/thread-self/mountinfo")?, read("/proc/swaps")?);
        Ok(occupied::occupied(place, &mountinfo, &swaps))
    }

    /// What the file-system keeps of a time that is set: everything, until
    /// [`Root::learn_times`] has found out.
    #[must_use]
    pub fn times(&self) -> Times {
        self.times.get().copied().unwrap_or_default()
    }

    /// Finds out what the file-system keeps of a time, by a file that it makes for a moment in
    /// `directory`, which is one of subd's own on the file-system of the root. Where that fails it
    /// says so in the log, and every time is believed to be kept.
    pub fn learn_times(&self, directory: &Directory) {
        match write_check::times(directory) {
            Ok(times) => {
                let _known = self.times.set(times);
            }
            Err(error) => {
                let error = model::report::report(&error);
                tracing::warn!("cannot find out what times the file-system keeps: {error}");
            }
        }
    }

    /// Writes a file as a trial in `/.subd`, waits until it is on the medium, and removes it.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel refused.
    pub fn try_to_write(&self) -> Result<(), RootError> {
        let own = TreePath::new(model::scope::SUBD_DIRECTORY).expect("the constant is a path");
        write_check::write(&self.directory(&own)?)
    }

    /// Where the root was found, to be shown to people; nothing is opened by it again.
    #[must_use]
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

    /// Opens the directory that holds `path`; gives it with the name that `path` has there.
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

    /// Writes all that is changed in the file-system of the root to its medium, and waits for it.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel said.
    pub fn sync_filesystem(&self) -> Result<(), RootError> {
        syncfs(&self.handle.directory)
            .map_err(|source| RootError::call("sync", TreePath::root(), source))
    }

    /// The free space of the file-system of the root.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel said.
    pub fn space(&self) -> Result<Space, RootError> {
        let status = fstatvfs(&self.handle.directory).map_err(|source| {
            RootError::call("ask for the free space of", TreePath::root(), source)
        })?;
        // `f_bfree`, not `f_bavail`: subd runs as root, for whom the reserve is.
        let free_bytes = status.blocks_free().saturating_mul(status.fragment_size());
        // btrfs has no limit of inodes and says that it has none at all.
        let free_inodes = if status.files() == 0 { u64::MAX } else { status.files_free() };
        Ok(Space { free_bytes, free_inodes })
    }
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
