//! Creates a tree in a new directory, exactly: content, mode, owner, attributes, links.
//!
//! The server that the tree comes from may be hostile. The types of the tree check names. Here
//! every path is opened below the descriptor of the new directory, without following symlinks, and
//! every entry is created, never opened, so that nothing outside can be written. The tree is made
//! in `DIR.incomplete`, which only its owner can enter, and is renamed last.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use model::path::TreePath;
use model::tree::{self, Device, Directory, Leaf, Metadata, Node, Special, Symlink, Time, Tree};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag};
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, UtimensatFlags};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, LinkatFlags, Uid};
use xattr::FileExt as _;

/// The longest path that is passed to the kernel at once, in bytes.
const PATH_BYTES_MAX: usize = 4_000;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    #[error("`{}` already exists and is not an empty directory", path.display())]
    NotEmpty { path: PathBuf },
    #[error("`{}` already exists: an earlier attempt was killed", path.display())]
    Leftover { path: PathBuf },
    #[error("cannot make the directory `{}`", path.display())]
    Target { path: PathBuf, source: io::Error },
    #[error("interrupted")]
    Stopped,
    #[error("cannot {what} {path}")]
    Entry { what: &'static str, path: TreePath, source: io::Error },
}

/// Something of an entry that could not be restored, by reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NotRestored {
    /// Only root may set owners.
    Owner,
    /// Devices need privileges.
    Device,
    /// The attribute needs privileges, or the file-system has none.
    Attribute,
    /// The content of computed files is made for each machine.
    Computed,
}

impl NotRestored {
    /// Returns a text for the user.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Owner => "entries have your owner and group, because only root can set others",
            Self::Device => "devices are left out, because making them takes privileges",
            Self::Attribute => {
                "entries lack extended attributes, which take privileges or which the \
                 file-system does not have"
            }
            Self::Computed => "computed files are left out: their content is made for each machine",
        }
    }
}

/// A directory in which a tree is being created.
pub struct RestoreTarget {
    path: PathBuf,
    incomplete: PathBuf,
    root: OwnedFd,
    privileged: bool,
    stopped: AtomicBool,
    not_restored: Mutex<BTreeMap<NotRestored, Vec<TreePath>>>,
}

impl RestoreTarget {
    /// Starts a tree at `path`, which must not exist or be an empty directory.
    pub fn create(path: &Path) -> Result<Self, RestoreError> {
        let failed = |source| RestoreError::Target { path: path.to_owned(), source };
        let path = match fs_err::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                std::path::absolute(path).map_err(failed)?
            }
            Err(error) => return Err(failed(error)),
            Ok(status) => {
                let is_empty = || Ok(fs_err::read_dir(path)?.next().is_none());
                if !status.is_dir() || !is_empty().map_err(failed)? {
                    return Err(RestoreError::NotEmpty { path: path.to_owned() });
                }
                fs_err::canonicalize(path).map_err(failed)?
            }
        };
        let no_name = || failed(io::Error::other("it has no name"));
        let mut name = path.file_name().ok_or_else(no_name)?.to_owned();
        name.push(".incomplete");
        let incomplete = path.with_file_name(name);
        match std::fs::DirBuilder::new().mode(0o700).create(&incomplete) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(RestoreError::Leftover { path: incomplete });
            }
            made => made.map_err(failed)?,
        }
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
        let mut options = std::fs::OpenOptions::new();
        let root = options.read(true).custom_flags(flags.bits()).open(&incomplete);
        let root = root.map_err(failed)?.into();
        let privileged = Uid::effective().is_root();
        let (stopped, not_restored) = (AtomicBool::new(false), Mutex::default());
        Ok(Self { path, incomplete, root, privileged, stopped, not_restored })
    }

    /// Makes the creation of the next entry fail with [`RestoreError::Stopped`].
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn check_not_stopped(&self) -> Result<(), RestoreError> {
        if self.stopped.load(Ordering::Relaxed) { Err(RestoreError::Stopped) } else { Ok(()) }
    }

    /// Creates all directories of `tree`, accessible only by the owner at first, and all entries
    /// without content.
    pub fn make_skeleton(&self, tree: &Tree) -> Result<(), RestoreError> {
        let mut stack: Vec<(TreePath, &Directory)> = vec![(TreePath::root(), tree.root())];
        while let Some((path, directory)) = stack.pop() {
            let parent = self.open_directory(&path).map_err(entry("open", &path))?;
            for child in directory.entries() {
                self.check_not_stopped()?;
                let name = child.name.as_bytes();
                let below = path.join(name).map_err(|error| RestoreError::Entry {
                    what: "make",
                    path: path.clone(),
                    source: io::Error::other(error),
                })?;
                match &child.child {
                    tree::Child::Directory(directory) => {
                        nix::sys::stat::mkdirat(&parent, name, Mode::S_IRWXU)
                            .map_err(entry("make the directory", &below))?;
                        stack.push((below, directory));
                    }
                    tree::Child::Leaf(Leaf::Symlink(symlink)) => {
                        self.make_symlink(&parent, &below, symlink)?;
                    }
                    tree::Child::Leaf(Leaf::Special(special)) => {
                        self.make_special(&parent, &below, special)?;
                    }
                    tree::Child::Leaf(Leaf::Computed(_)) => {
                        self.add_not_restored(NotRestored::Computed, &below);
                    }
                    tree::Child::Leaf(Leaf::File(_) | Leaf::HardLink(_)) => {}
                }
            }
        }
        Ok(())
    }

    /// Returns a creator of files. It is fastest if consecutive files are in the same directory.
    pub fn files(&self) -> FileCreator<'_> {
        FileCreator { target: self, parent: None }
    }

    /// Sets owner, attributes, mode and mtime of the written `file` at `path`.
    pub fn finish_file(
        &self,
        file: &File,
        path: &TreePath,
        metadata: &Metadata,
        mtime: Time,
    ) -> Result<(), RestoreError> {
        self.set_metadata(file, path, metadata)?;
        nix::sys::stat::futimens(file, &omit(), &spec(mtime))
            .map_err(entry("set the time of", path))
    }

    /// Creates the hard links of `tree`, whose files exist already.
    pub fn make_links(&self, tree: &Tree) -> Result<(), RestoreError> {
        if tree.root().totals().hard_links == 0 {
            return Ok(());
        }
        for (path, node) in tree.nodes() {
            let Node::Leaf(Leaf::HardLink(target)) = node else { continue };
            self.check_not_stopped()?;
            let link = || {
                let root = TreePath::root;
                let from = self.open_directory(&target.parent().unwrap_or_else(root))?;
                let to = self.open_directory(&path.parent().unwrap_or_else(root))?;
                let flags = LinkatFlags::empty();
                nix::unistd::linkat(&from, target.name(), &to, path.name(), flags)
            };
            link().map_err(entry("make the hard link", &path))?;
        }
        Ok(())
    }

    /// Sets owner, attributes and mode of all directories, the deepest first, and renames the tree.
    /// Returns what could not be restored.
    pub fn finish(self, tree: &Tree) -> Result<BTreeMap<NotRestored, Vec<TreePath>>, RestoreError> {
        let mut directories: Vec<(TreePath, Metadata)> = tree
            .nodes()
            .filter_map(|(path, node)| match node {
                Node::Directory(metadata) => Some((path, metadata)),
                Node::Leaf(_) => None,
            })
            .collect();
        while let Some((path, metadata)) = directories.pop() {
            let opened = self.open_directory(&path).map_err(entry("open", &path))?;
            self.set_metadata(&File::from(opened), &path, &metadata)?;
        }
        fs_err::rename(&self.incomplete, &self.path)
            .map_err(|source| RestoreError::Target { path: self.path.clone(), source })?;
        Ok(self.not_restored.into_inner().expect("no holder panics"))
    }

    /// Removes the incomplete directory.
    pub fn abandon(&self) -> Result<(), RestoreError> {
        std::fs::remove_dir_all(&self.incomplete)
            .map_err(|source| RestoreError::Target { path: self.incomplete.clone(), source })
    }

    fn make_symlink(
        &self,
        parent: &OwnedFd,
        path: &TreePath,
        symlink: &Symlink,
    ) -> Result<(), RestoreError> {
        nix::unistd::symlinkat(&symlink.target.0[..], parent, path.name())
            .map_err(entry("make the symlink", path))?;
        self.set_owner_of_name(parent, path, &symlink.metadata)?;
        self.set_xattrs_of_name(parent, path, &symlink.metadata)
    }

    fn make_special(
        &self,
        parent: &OwnedFd,
        path: &TreePath,
        special: &Special,
    ) -> Result<(), RestoreError> {
        let (kind, device) = match special.device {
            Device::Fifo => (SFlag::S_IFIFO, 0),
            Device::Block { major, minor } => (SFlag::S_IFBLK, device_number(major, minor)),
            Device::Character { major, minor } => (SFlag::S_IFCHR, device_number(major, minor)),
        };
        match nix::sys::stat::mknodat(parent, path.name(), kind, Mode::S_IRUSR, device) {
            Err(Errno::EPERM) => {
                self.add_not_restored(NotRestored::Device, path);
                return Ok(());
            }
            made => made.map_err(entry("make the special file", path))?,
        }
        self.set_owner_of_name(parent, path, &special.metadata)?;
        self.set_xattrs_of_name(parent, path, &special.metadata)?;
        // It was made a moment ago in a directory that nobody else can enter: no symlink.
        let follow = FchmodatFlags::FollowSymlink;
        nix::sys::stat::fchmodat(parent, path.name(), mode_of(&special.metadata), follow)
            .map_err(entry("set the mode of", path))?;
        let flag = UtimensatFlags::NoFollowSymlink;
        nix::sys::stat::utimensat(parent, path.name(), &omit(), &spec(special.mtime), flag)
            .map_err(entry("set the time of", path))
    }

    fn set_metadata(
        &self,
        file: &File,
        path: &TreePath,
        metadata: &Metadata,
    ) -> Result<(), RestoreError> {
        // The owner first: setting it takes capabilities and set-id bits away.
        let (uid, gid) = (Uid::from_raw(metadata.uid), Gid::from_raw(metadata.gid));
        if self.privileged {
            nix::unistd::fchown(file, Some(uid), Some(gid)).map_err(entry("chown", path))?;
        } else if (uid, gid) != (Uid::effective(), Gid::effective()) {
            self.add_not_restored(NotRestored::Owner, path);
        }
        for (name, value) in metadata.xattrs.iter() {
            let set = file.set_xattr(OsStr::from_bytes(name), value);
            self.attribute_set(path, set)?;
        }
        nix::sys::stat::fchmod(file, mode_of(metadata)).map_err(entry("set the mode of", path))
    }

    fn set_owner_of_name(
        &self,
        parent: &OwnedFd,
        path: &TreePath,
        metadata: &Metadata,
    ) -> Result<(), RestoreError> {
        let (uid, gid) = (Uid::from_raw(metadata.uid), Gid::from_raw(metadata.gid));
        if self.privileged {
            let flag = AtFlags::AT_SYMLINK_NOFOLLOW;
            nix::unistd::fchownat(parent, path.name(), Some(uid), Some(gid), flag)
                .map_err(entry("chown", path))?;
        } else if (uid, gid) != (Uid::effective(), Gid::effective()) {
            self.add_not_restored(NotRestored::Owner, path);
        }
        Ok(())
    }

    /// Sets the attributes of an entry that cannot be opened. The kernel has no call for a name in
    /// a directory, so the path goes through the descriptor of the directory; a symlink at the name
    /// is not followed.
    fn set_xattrs_of_name(
        &self,
        parent: &OwnedFd,
        path: &TreePath,
        metadata: &Metadata,
    ) -> Result<(), RestoreError> {
        if metadata.xattrs.is_empty() {
            return Ok(());
        }
        let directory = PathBuf::from(format!("/proc/self/fd/{}", parent.as_raw_fd()));
        let full = directory.join(OsStr::from_bytes(path.name()));
        for (name, value) in metadata.xattrs.iter() {
            self.attribute_set(path, xattr::set(&full, OsStr::from_bytes(name), value))?;
        }
        Ok(())
    }

    fn attribute_set(&self, path: &TreePath, set: io::Result<()>) -> Result<(), RestoreError> {
        let lost = [Errno::EPERM, Errno::EACCES, Errno::EOPNOTSUPP].map(|errno| errno as i32);
        match set {
            Err(error) if error.raw_os_error().is_some_and(|code| lost.contains(&code)) => {
                self.add_not_restored(NotRestored::Attribute, path);
                Ok(())
            }
            Err(source) => Err(RestoreError::Entry {
                what: "set the attributes of",
                path: path.clone(),
                source,
            }),
            Ok(()) => Ok(()),
        }
    }

    fn add_not_restored(&self, reason: NotRestored, path: &TreePath) {
        let mut not_restored = self.not_restored.lock().expect("no holder panics");
        let paths = not_restored.entry(reason).or_default();
        if paths.last() != Some(path) {
            paths.push(path.clone());
        }
    }

    /// Opens the directory `path` of the new tree, without following any symlink.
    fn open_directory(&self, path: &TreePath) -> nix::Result<OwnedFd> {
        let mut rest = path.relative();
        let mut opened = open_below(std::os::fd::AsFd::as_fd(&self.root), b".")?;
        while !rest.is_empty() {
            // Longer paths are opened in parts.
            let end = if rest.len() <= PATH_BYTES_MAX {
                rest.len()
            } else {
                let slash = rest[..PATH_BYTES_MAX].iter().rposition(|&byte| byte == b'/');
                slash.ok_or(Errno::ENAMETOOLONG)?
            };
            opened = open_below(std::os::fd::AsFd::as_fd(&opened), &rest[..end])?;
            rest = rest.get(end + 1..).unwrap_or_default();
        }
        Ok(opened)
    }
}

/// Creates the files of a tree. Keeps the directory of the last file open.
pub struct FileCreator<'target> {
    target: &'target RestoreTarget,
    parent: Option<(TreePath, OwnedFd)>,
}

impl FileCreator<'_> {
    /// Creates the file `path` and opens it for writing.
    pub fn create(&mut self, path: &TreePath) -> Result<File, RestoreError> {
        self.target.check_not_stopped()?;
        let mut create = || {
            let above = path.parent().unwrap_or_else(TreePath::root);
            let parent = match &mut self.parent {
                Some((known, parent)) if *known == above => parent,
                other => {
                    let opened = self.target.open_directory(&above)?;
                    &mut other.insert((above, opened)).1
                }
            };
            let flags = OFlag::O_CREAT
                | OFlag::O_EXCL
                | OFlag::O_NOFOLLOW
                | OFlag::O_RDWR
                | OFlag::O_CLOEXEC;
            nix::fcntl::openat(&*parent, path.name(), flags, Mode::S_IRUSR | Mode::S_IWUSR)
        };
        Ok(create().map_err(entry("create", path))?.into())
    }
}

fn open_below(directory: BorrowedFd<'_>, path: &[u8]) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    nix::fcntl::openat2(directory, path, how)
}

fn entry(what: &'static str, path: &TreePath) -> impl FnOnce(Errno) -> RestoreError {
    let path = path.clone();
    move |errno| RestoreError::Entry { what, path, source: errno.into() }
}

fn mode_of(metadata: &Metadata) -> Mode {
    Mode::from_bits_truncate(metadata.mode)
}

fn device_number(major: u32, minor: u32) -> u64 {
    nix::sys::stat::makedev(u64::from(major), u64::from(minor))
}

fn spec(time: Time) -> TimeSpec {
    TimeSpec::new(time.seconds, i64::from(time.nanoseconds))
}

/// Keeps the time of the last access.
fn omit() -> TimeSpec {
    TimeSpec::UTIME_OMIT
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;
    use model::tree::TreeBuilder;

    use super::*;

    #[test]
    fn a_target_that_was_stopped_makes_nothing_more() {
        let place = tempfile::tempdir().unwrap();
        let target = RestoreTarget::create(&place.path().join("copy")).unwrap();
        let directory = Node::Directory(Metadata::new(0o755, 0, 0));
        let mut builder = TreeBuilder::new(Algorithm::Blake3);
        builder.insert(TreePath::new("/etc").unwrap(), directory).unwrap();
        let tree = builder.finish().unwrap();
        target.stop();
        assert!(matches!(target.make_skeleton(&tree), Err(RestoreError::Stopped)));
        let file = target.files().create(&TreePath::new("/file").unwrap());
        assert!(matches!(file, Err(RestoreError::Stopped)));
        assert_eq!(std::fs::read_dir(place.path().join("copy.incomplete")).unwrap().count(), 0);
        target.abandon().unwrap();
    }
}
