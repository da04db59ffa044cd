//! An open entry. All changes are made to the same inode, whatever replaces the entry in the
//! meantime.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use model::path::TreePath;
use model::scope::Attributes;
use model::tree::Time;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag};
use nix::sys::stat::{FchmodatFlags, Mode, UtimensatFlags, fchmodat, fstat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, fchownat};

use crate::root::directory::{AttributeList, Directory, errno_of, read_attributes};
use crate::root::{Kind, RootError, SET_ATTRIBUTE, Status, open_below};

/// An entry of any kind; of a symlink the link itself.
#[derive(Debug)]
pub struct OpenEntry {
    descriptor: OwnedFd,
    path: TreePath,
}

impl Directory {
    /// Opens the entry called `name`.
    pub fn open_entry(&self, name: &[u8]) -> Result<OpenEntry, RootError> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let open = || open_below(&self.descriptor, name, flags, Mode::empty());
        let descriptor = self.on("read the status of", name, open)?;
        let path = self.path.join(name).expect("the name was checked");
        Ok(OpenEntry { descriptor, path })
    }
}

impl OpenEntry {
    fn on<T>(
        &self,
        operation: &'static str,
        call: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, RootError> {
        call().map_err(|source| RootError::call(operation, self.path.clone(), source))
    }

    /// Returns a path that leads to this very inode, for calls that take no `O_PATH` descriptor.
    /// Following it ends at the inode, even if that is a symlink.
    fn name(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()))
    }

    /// Reads the status of it.
    pub fn status(&self) -> Result<Status, RootError> {
        self.on("read the status of", || fstat(&self.descriptor).map(|status| Status::new(&status)))
    }

    /// As [`Directory::set_owner`].
    pub fn set_owner(&self, uid: u32, gid: u32) -> Result<(), RootError> {
        self.on("change the owner of", || {
            let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            fchownat(&self.descriptor, "", uid, gid, AtFlags::AT_EMPTY_PATH)
        })
    }

    /// As [`Directory::set_mode`].
    ///
    /// # Errors
    ///
    /// [`RootError`], with `EOPNOTSUPP` for a symlink.
    pub fn set_mode(&self, mode: u32) -> Result<(), RootError> {
        let is_symlink = self.status()?.kind == Kind::Symlink;
        self.on("change the mode of", || match is_symlink {
            true => Err(Errno::EOPNOTSUPP),
            false => {
                let mode = Mode::from_bits_truncate(mode);
                fchmodat(AT_FDCWD, &self.name(), mode, FchmodatFlags::FollowSymlink)
            }
        })
    }

    /// As [`Directory::set_mtime`].
    pub fn set_mtime(&self, mtime: Time) -> Result<(), RootError> {
        let time = TimeSpec::new(mtime.seconds, i64::from(mtime.nanoseconds));
        let flag = UtimensatFlags::FollowSymlink;
        self.on("set the time of", || {
            utimensat(AT_FDCWD, &self.name(), &TimeSpec::UTIME_OMIT, &time, flag)
        })
    }

    /// As [`Directory::xattrs`].
    pub fn xattrs(&self, attributes: Attributes) -> Result<AttributeList, RootError> {
        let name = self.name();
        let list = || xattr::list_deref(&name);
        self.on("read the extended attributes of", || {
            read_attributes(attributes, list, |key| xattr::get_deref(&name, key))
        })
    }

    /// As [`Directory::set_xattr`].
    pub fn set_xattr(&self, key: &[u8], value: &[u8]) -> Result<(), RootError> {
        self.on(SET_ATTRIBUTE, || {
            xattr::set_deref(self.name(), OsStr::from_bytes(key), value).map_err(errno_of)
        })
    }

    /// As [`Directory::remove_xattr`].
    pub fn remove_xattr(&self, key: &[u8]) -> Result<(), RootError> {
        self.on("remove an extended attribute of", || {
            match xattr::remove_deref(self.name(), OsStr::from_bytes(key)).map_err(errno_of) {
                Err(Errno::ENODATA) => Ok(()),
                other => other,
            }
        })
    }
}
