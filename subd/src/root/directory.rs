//! An open directory: reading its entries.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use model::path::{TreePath, fault_of_name};
use model::scope::Attributes;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, readlinkat};
use nix::sys::stat::{Mode, fstat, fstatat};
use xattr::FileExt;

use crate::root::{Kind, RootError, Status, open_below, open_directory};

/// The most entries of a directory that [`Directory::names`] returns.
pub const ENTRIES_MAX: usize = 4_000_000;

/// Extended attributes, names with values.
pub type AttributeList = Vec<(Vec<u8>, Vec<u8>)>;

/// An open directory of the managed tree.
///
/// Names are single components; anything else is refused before the kernel is asked.
#[derive(Debug)]
pub struct Directory {
    pub(super) descriptor: OwnedFd,
    pub(super) path: TreePath,
}

/// A regular file, and its status when it was opened.
#[derive(Debug)]
pub struct OpenedFile {
    /// Open for reading.
    pub file: File,
    pub status: Status,
    /// The allocated bytes: less than its length if it has holes.
    pub allocated_bytes: u64,
}

impl Directory {
    pub(super) fn new(descriptor: OwnedFd, path: TreePath) -> Self {
        Self { descriptor, path }
    }

    /// Returns the path by which it was opened. It may have been moved since.
    pub fn path(&self) -> &TreePath {
        &self.path
    }

    pub(super) fn check(&self, operation: &'static str, name: &[u8]) -> Result<(), RootError> {
        match fault_of_name(name) {
            None => Ok(()),
            Some(why) => Err(RootError::bad_name(operation, &self.path, name, why)),
        }
    }

    /// Returns the error of `operation` on the entry `name`.
    pub fn error(&self, operation: &'static str, name: &[u8], source: Errno) -> RootError {
        RootError::entry(operation, &self.path, name, source)
    }

    /// Checks `name` and carries out `call`; its error names `operation` and the path.
    pub(super) fn on<T>(
        &self,
        operation: &'static str,
        name: &[u8],
        call: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, RootError> {
        self.check(operation, name)?;
        call().map_err(|source| RootError::entry(operation, &self.path, name, source))
    }

    /// Returns the names of all entries but `.` and `..`, sorted.
    ///
    /// # Errors
    ///
    /// [`RootError`] if the directory cannot be read to its end, or has more than
    /// [`ENTRIES_MAX`] entries (`EOVERFLOW`).
    pub fn names(&self) -> Result<Vec<Box<[u8]>>, RootError> {
        self.names_that(ENTRIES_MAX, |_| true)
    }

    /// As [`Directory::names`], of those entries for which `is_wanted` is true, which are at most
    /// `max`. Only their names are in memory.
    pub fn names_that(
        &self,
        max: usize,
        mut is_wanted: impl FnMut(&[u8]) -> bool,
    ) -> Result<Vec<Box<[u8]>>, RootError> {
        let fail = |source| RootError::call("list", self.path.clone(), source);
        // Opened again, because the position in the directory belongs to the open description.
        let descriptor = open_directory(&self.descriptor, b".").map_err(fail)?;
        let mut names = Vec::new();
        for entry in Dir::from_fd(descriptor).map_err(fail)?.iter() {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." || !is_wanted(name) {
                continue;
            }
            if names.len() == max {
                return Err(fail(Errno::EOVERFLOW));
            }
            names.push(Box::from(name));
        }
        names.sort_unstable();
        // An entry that was moved in the meantime may be listed twice.
        names.dedup();
        Ok(names)
    }

    /// Reads the status of the entry called `name`, not following a symlink.
    pub fn stat(&self, name: &[u8]) -> Result<Status, RootError> {
        self.on("read the status of", name, || {
            fstatat(&self.descriptor, name, AtFlags::AT_SYMLINK_NOFOLLOW)
                .map(|status| Status::new(&status))
        })
    }

    /// Reads the status of the directory itself.
    pub fn status(&self) -> Result<Status, RootError> {
        fstat(&self.descriptor)
            .map(|status| Status::new(&status))
            .map_err(|source| RootError::call("read the status of", self.path.clone(), source))
    }

    /// Opens the directory called `name`.
    ///
    /// # Errors
    ///
    /// [`RootError`]: `ELOOP` for a symlink, `ENOTDIR` for what is no directory, `EXDEV` for a
    /// mount point.
    pub fn open_child(&self, name: &[u8]) -> Result<Self, RootError> {
        let operation = "open the directory";
        let descriptor = self.on(operation, name, || open_directory(&self.descriptor, name))?;
        let path = self.path.join(name).expect("the name was checked");
        Ok(Self::new(descriptor, path))
    }

    /// Opens the regular file called `name` for reading; never waits for the writer of a fifo.
    ///
    /// # Errors
    ///
    /// [`RootError::NotRegular`] if it is something else, and otherwise what the kernel said.
    pub fn open_file(&self, name: &[u8]) -> Result<File, RootError> {
        self.open_seen(name).map(|opened| opened.file)
    }

    /// As [`Directory::open_file`], with the status of the file when it was opened.
    pub fn open_seen(&self, name: &[u8]) -> Result<OpenedFile, RootError> {
        let operation = "open";
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let open = |flags| open_below(&self.descriptor, name, flags, Mode::empty());
        let descriptor = self.on(operation, name, || {
            // Reading must not change the time of access. Only the owner may request that.
            match open(flags | OFlag::O_NOATIME) {
                Err(Errno::EPERM) => open(flags),
                other => other,
            }
        })?;
        let seen = fstat(&descriptor)
            .map_err(|source| RootError::entry(operation, &self.path, name, source))?;
        let status = Status::new(&seen);
        if status.kind != Kind::File {
            let path = self.path.join(name).expect("the name was checked");
            return Err(RootError::NotRegular { path });
        }
        let allocated_bytes = u64::try_from(seen.st_blocks).unwrap_or(0).saturating_mul(512);
        Ok(OpenedFile { file: File::from(descriptor), status, allocated_bytes })
    }

    /// True if something is mounted upon the entry called `name`.
    pub fn is_mount_point(&self, name: &[u8]) -> Result<bool, RootError> {
        self.on("open", name, || {
            let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
            match open_below(&self.descriptor, name, flags, Mode::empty()) {
                Ok(_) => Ok(false),
                Err(Errno::EXDEV) => Ok(true),
                Err(error) => Err(error),
            }
        })
    }

    /// Returns the target of the symlink `name`.
    ///
    /// # Errors
    ///
    /// [`RootError`], with `EINVAL` if it is no symlink.
    pub fn read_link(&self, name: &[u8]) -> Result<Vec<u8>, RootError> {
        self.on("read the symlink", name, || {
            readlinkat(&self.descriptor, name).map(OsStringExt::into_vec)
        })
    }

    /// Returns a path of the entry for calls that take only paths. It leads to this very directory,
    /// whatever has been renamed since.
    pub(super) fn descriptor_path(&self, name: &[u8]) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()))
            .join(OsStr::from_bytes(name))
    }

    /// Reads the extended attributes of the entry `name` that `attributes` manage. A file-system
    /// without attributes has none.
    pub fn xattrs(&self, name: &[u8], attributes: Attributes) -> Result<AttributeList, RootError> {
        let operation = "read the extended attributes of";
        let path = self.descriptor_path(name);
        self.on(operation, name, || {
            read_attributes(attributes, || xattr::list(&path), |key| xattr::get(&path, key))
        })
    }

    /// As [`Directory::xattrs`], of an open file; `name` is what it was opened by.
    pub fn xattrs_of(
        &self,
        name: &[u8],
        file: &File,
        attributes: Attributes,
    ) -> Result<AttributeList, RootError> {
        self.on("read the extended attributes of", name, || {
            read_attributes(attributes, || file.list_xattr(), |key| file.get_xattr(key))
        })
    }

    /// Reads the extended attributes of the directory itself that `attributes` manage.
    pub fn own_xattrs(&self, attributes: Attributes) -> Result<AttributeList, RootError> {
        // The trailing dot makes the no-follow calls go through the link of /proc.
        let path = self.descriptor_path(b".");
        read_attributes(attributes, || xattr::list(&path), |key| xattr::get(&path, key)).map_err(
            |source| {
                let operation = "read the extended attributes of";
                RootError::call(operation, self.path.clone(), source)
            },
        )
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Returns the errno of an error of the standard library.
pub fn errno_of(error: std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

pub(super) fn read_attributes(
    attributes: Attributes,
    list: impl FnOnce() -> std::io::Result<xattr::XAttrs>,
    get: impl Fn(&OsStr) -> std::io::Result<Option<Vec<u8>>>,
) -> Result<AttributeList, Errno> {
    let names = match list().map_err(errno_of) {
        Ok(names) => names,
        Err(Errno::EOPNOTSUPP) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for name in names.filter(|name| attributes.manage(name.as_bytes())) {
        // An attribute that was removed in between counts as absent.
        if let Some(value) = get(&name).map_err(errno_of)? {
            found.push((name.into_vec(), value));
        }
    }
    found.sort_unstable();
    Ok(found)
}
