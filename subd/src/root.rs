//! `Root`: the only way in which subd reaches the tree it manages.
//!
//! A [`Root`] is a descriptor of the directory given by `--root`. Every path below it is opened by
//! the kernel with `openat2` and `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV`, so that
//! nothing that somebody does to the tree meanwhile can lead subd out of it: a symlink in the
//! place of a directory is `ELOOP`, a mount point is `EXDEV`. All that is done to an entry is
//! done by its single name in an open [`Directory`].
//!
//! Mount points are not looked under yet: that needs a handle made by `open_tree`, which takes the
//! place of the descriptor in [`Root::open`] and changes nothing else here.

mod change;
mod directory;
mod error;
mod held;
mod status;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use common::api::subd::Space;
use common::path::TreePath;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::{Mode, lstat};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::syncfs;

pub use directory::{AttributeList, Directory, ENTRIES_MAX};
pub use error::RootError;
pub use held::Held;
pub use status::{Kind, Status};

/// The longest piece of a path that is given to the kernel at once, in bytes. Linux refuses
/// strings of 4,096 bytes; longer paths are opened in several steps.
const PIECE_BYTES_MAX: usize = 4_000;

/// The tree that subd manages.
#[derive(Debug)]
pub struct Root {
    descriptor: OwnedFd,
    path: PathBuf,
}

impl Root {
    /// Opens the directory `path` as the root. Symlinks in `path` itself are followed.
    ///
    /// # Errors
    ///
    /// [`RootError::Open`] if it is no directory or cannot be opened; [`RootError::NoProc`] if
    /// `/proc` is not mounted.
    pub fn open(path: &Path) -> Result<Self, RootError> {
        // Modes and extended attributes have no calls of their own by descriptor and name.
        lstat("/proc/self/fd").map_err(|source| RootError::NoProc { source })?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let descriptor = open(path, flags, Mode::empty())
            .map_err(|source| RootError::Open { path: path.to_owned(), source })?;
        Ok(Self { descriptor, path: path.to_owned() })
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
        let mut descriptor = open_directory(&self.descriptor, b".").map_err(fail)?;
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
        syncfs(&self.descriptor).map_err(|source| RootError::call("sync", TreePath::root(), source))
    }

    /// The free space of the file-system of the root.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel said.
    pub fn space(&self) -> Result<Space, RootError> {
        let status = fstatvfs(&self.descriptor).map_err(|source| {
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
