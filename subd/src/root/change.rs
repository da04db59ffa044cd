//! An open directory: changes of its entries, and test files in directories of subd's own.
//!
//! Modes given to the calls that make entries pass through the umask of the process; the mode that
//! counts is set by [`Directory::set_mode`] at the end.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;

use model::tree::{Device, Time, TimePrecision};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, RenameFlags, renameat, renameat2};
use nix::sys::stat::{
    FchmodatFlags, Mode, SFlag, UtimensatFlags, fchmodat, fstat, futimens, makedev, mkdirat,
    mknodat, utimensat,
};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, fsync, linkat, symlinkat, unlinkat};

use crate::root::directory::{Directory, errno_of};
use crate::root::{Kind, RootError, SET_ATTRIBUTE, Status, open_below};

impl Directory {
    /// Creates the empty file `name`, which must not exist, and opens it for writing.
    pub fn create_file(&self, name: &[u8], mode: u32) -> Result<File, RootError> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL;
        self.on("create", name, || {
            open_below(&self.descriptor, name, flags, mode_of(mode)).map(File::from)
        })
    }

    /// Opens the file `name`, which must exist, for reading and for writing at its end: for subd's
    /// own files, never for the tree.
    ///
    /// # Errors
    ///
    /// [`RootError`], with `ELOOP` for a symlink.
    pub fn append_file(&self, name: &[u8]) -> Result<File, RootError> {
        let flags = OFlag::O_RDWR | OFlag::O_APPEND | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        self.on("open", name, || {
            open_below(&self.descriptor, name, flags, Mode::empty()).map(File::from)
        })
    }

    /// Creates the directory `name`, which must not exist.
    pub fn make_directory(&self, name: &[u8], mode: u32) -> Result<(), RootError> {
        self.on("make the directory", name, || mkdirat(&self.descriptor, name, mode_of(mode)))
    }

    /// Creates the symlink `name`, which must not exist, with `target`.
    pub fn make_symlink(&self, name: &[u8], target: &[u8]) -> Result<(), RootError> {
        self.on("make the symlink", name, || symlinkat(target, &self.descriptor, name))
    }

    /// Creates the device or fifo `name`, which must not exist.
    pub fn make_special(&self, name: &[u8], device: Device, mode: u32) -> Result<(), RootError> {
        let (kind, number) = match device {
            Device::Fifo => (SFlag::S_IFIFO, 0),
            Device::Block { major, minor } => {
                (SFlag::S_IFBLK, makedev(u64::from(major), u64::from(minor)))
            }
            Device::Character { major, minor } => {
                (SFlag::S_IFCHR, makedev(u64::from(major), u64::from(minor)))
            }
        };
        self.on("make the special file", name, || {
            mknodat(&self.descriptor, name, kind, mode_of(mode), number)
        })
    }

    /// Links the file `name` to `new_name` in `to`, which must not exist.
    pub fn link(&self, name: &[u8], to: &Self, new_name: &[u8]) -> Result<(), RootError> {
        to.check("link", new_name)?;
        self.on("link", name, || {
            linkat(&self.descriptor, name, &to.descriptor, new_name, AtFlags::empty())
        })
    }

    /// Moves `name` to `new_name` in `to`, which must not exist. Some file-systems, such as NFS and
    /// many of FUSE, cannot refuse to replace something: there it is looked for before.
    pub fn rename_noreplace(
        &self,
        name: &[u8],
        to: &Self,
        new_name: &[u8],
    ) -> Result<(), RootError> {
        let renamed = self.rename(name, to, new_name, RenameFlags::RENAME_NOREPLACE);
        let Err(error) = renamed else { return Ok(()) };
        let is_unknown = error.errno().is_some_and(is_unknown_flag);
        match is_unknown.then(|| to.stat(new_name)) {
            Some(Err(absent)) if absent.is_absent() => self.rename_over(name, to, new_name),
            _ => Err(error),
        }
    }

    /// Swaps `name` and `new_name` in `to` in one step; both must exist.
    pub fn exchange(&self, name: &[u8], to: &Self, new_name: &[u8]) -> Result<(), RootError> {
        self.rename(name, to, new_name, RenameFlags::RENAME_EXCHANGE)
    }

    /// Moves `name` to `new_name` in `to`, replacing what may be there: for subd's own files, never
    /// for the tree.
    pub fn rename_over(&self, name: &[u8], to: &Self, new_name: &[u8]) -> Result<(), RootError> {
        to.check("rename", new_name)?;
        self.on("rename", name, || renameat(&self.descriptor, name, &to.descriptor, new_name))
    }

    fn rename(
        &self,
        name: &[u8],
        to: &Self,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Result<(), RootError> {
        to.check("rename", new_name)?;
        self.on("rename", name, || {
            renameat2(&self.descriptor, name, &to.descriptor, new_name, flags)
        })
    }

    /// Removes the entry `name`, which must be no directory.
    pub fn unlink(&self, name: &[u8]) -> Result<(), RootError> {
        self.on("remove", name, || unlinkat(&self.descriptor, name, UnlinkatFlags::NoRemoveDir))
    }

    /// Removes the directory `name`, which must be empty.
    pub fn remove_directory(&self, name: &[u8]) -> Result<(), RootError> {
        self.on("remove the directory", name, || {
            unlinkat(&self.descriptor, name, UnlinkatFlags::RemoveDir)
        })
    }

    /// Sets owner and group of the entry `name`, not following a symlink. The kernel then drops
    /// set-id bits and capabilities of files.
    pub fn set_owner(&self, name: &[u8], uid: u32, gid: u32) -> Result<(), RootError> {
        self.on("change the owner of", name, || {
            let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            fchownat(&self.descriptor, name, uid, gid, AtFlags::AT_SYMLINK_NOFOLLOW)
        })
    }

    /// Sets the mode of the entry `name`, which must be no symlink (these have no mode).
    ///
    /// # Errors
    ///
    /// [`RootError`], with `EOPNOTSUPP` for a symlink.
    pub fn set_mode(&self, name: &[u8], mode: u32) -> Result<(), RootError> {
        self.on("change the mode of", name, || {
            // The descriptor refers to the inode, so that nobody can replace it with a symlink
            // between the check and the change.
            let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
            let held = open_below(&self.descriptor, name, flags, Mode::empty())?;
            if Status::new(&fstat(&held)?).kind == Kind::Symlink {
                return Err(Errno::EOPNOTSUPP);
            }
            let path = format!("/proc/self/fd/{}", held.as_raw_fd());
            fchmodat(AT_FDCWD, path.as_str(), mode_of(mode), FchmodatFlags::FollowSymlink)
        })
    }

    /// Sets the time of modification of the entry `name`, not following a symlink; the time of
    /// access stays.
    pub fn set_mtime(&self, name: &[u8], mtime: Time) -> Result<(), RootError> {
        let time = TimeSpec::new(mtime.seconds, i64::from(mtime.nanoseconds));
        self.on("set the time of", name, || {
            let flag = UtimensatFlags::NoFollowSymlink;
            utimensat(&self.descriptor, name, &TimeSpec::UTIME_OMIT, &time, flag)
        })
    }

    /// Sets an extended attribute of the entry `name`, not following a symlink.
    pub fn set_xattr(&self, name: &[u8], key: &[u8], value: &[u8]) -> Result<(), RootError> {
        self.on(SET_ATTRIBUTE, name, || {
            xattr::set(self.descriptor_path(name), OsStr::from_bytes(key), value).map_err(errno_of)
        })
    }

    /// Removes an extended attribute of the entry `name`; one that is absent is no error.
    pub fn remove_xattr(&self, name: &[u8], key: &[u8]) -> Result<(), RootError> {
        self.on("remove an extended attribute of", name, || {
            xattr::remove(self.descriptor_path(name), OsStr::from_bytes(key)).or_else(|error| {
                match errno_of(error) {
                    Errno::ENODATA => Ok(()),
                    errno => Err(errno),
                }
            })
        })
    }

    /// Writes the entries of this directory (their names, not their content) to the medium.
    pub fn sync(&self) -> Result<(), RootError> {
        fsync(&self.descriptor).map_err(|source| RootError::call("sync", self.path.clone(), source))
    }
}

fn mode_of(mode: u32) -> Mode {
    Mode::from_bits_truncate(mode)
}

/// The name of the test file. What a crash leaves of it is removed by the next test.
const TEST_FILE: &[u8] = b"trial";

/// How much is written as a test: a block of most file-systems, so that it is not stored in the
/// inode.
const TEST_BYTES: usize = 4_096;

/// Outside of the range of times that any file-system keeps.
const SECONDS_OUT_OF_RANGE: [i64; 2] = [i64::MIN, i64::MAX];

/// Tests in a directory of subd's own.
impl Directory {
    /// Finds out which times the file-system keeps as they are set. Uses the directory itself: a
    /// new file needs an inode and a block, and there may be none.
    pub(super) fn kept_times(&self) -> Result<TimePrecision, RootError> {
        let kept = |time: Time| -> Result<Time, RootError> {
            self.set_own_mtime(time)?;
            self.status().map(|Status { mtime, .. }| mtime)
        };
        let former = self.status()?.mtime;
        let kept_of_trial = kept(TimePrecision::PROBE)?;
        let [first, last] = SECONDS_OUT_OF_RANGE.map(|seconds| {
            let time = Time { seconds, nanoseconds: 0 };
            // A file-system that refuses such a time says nothing of its range.
            kept(time).unwrap_or(time)
        });
        self.set_own_mtime(former)?;
        Ok(TimePrecision::from_probe(kept_of_trial, first, last))
    }

    fn set_own_mtime(&self, mtime: Time) -> Result<(), RootError> {
        let time = TimeSpec::new(mtime.seconds, i64::from(mtime.nanoseconds));
        futimens(&self.descriptor, &TimeSpec::UTIME_OMIT, &time)
            .map_err(|source| RootError::call("set the time of", self.path().clone(), source))
    }

    /// Writes a test file, and waits until it is on the medium.
    pub(super) fn try_to_write(&self) -> Result<(), RootError> {
        self.with_test_file(|file| {
            let written = file.write_all(&[0; TEST_BYTES]).and_then(|()| file.sync_all());
            written.map_err(|error| self.error("write", TEST_FILE, errno_of(error)))
        })
    }

    /// Creates the test file, calls `test`, and removes the file whatever happens.
    fn with_test_file<T>(
        &self,
        test: impl FnOnce(&mut File) -> Result<T, RootError>,
    ) -> Result<T, RootError> {
        match self.unlink(TEST_FILE) {
            Err(error) if !error.is_absent() => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let mut file = self.create_file(TEST_FILE, 0o600)?;
        let result = test(&mut file);
        let removed = self.unlink(TEST_FILE);
        result.and_then(|value| removed.map(|()| value))
    }
}

/// True for the errors of a file-system that does not know a flag of rename.
pub fn is_unknown_flag(errno: Errno) -> bool {
    matches!(errno, Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP)
}
