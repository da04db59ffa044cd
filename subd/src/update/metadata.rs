//! Sets and compares what an entry has besides its content: owner, mode, attributes, time.
//!
//! The order matters. `chown` drops set-id bits and capabilities; an ACL brings the group bits of
//! the mode with it. So set-id bits go first, then comes the owner, then ordinary attributes and
//! ACLs, then the mode, then capabilities, and the time at the very end.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use model::path::TreePath;
use model::scope::Attributes;
use model::tree::{Leaf, Metadata, Node, Xattrs};
use nix::errno::Errno;
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{Gid, Uid, fchown};
use xattr::FileExt;

use super::step::Appearance;
use crate::root::{Directory, Kind, OpenEntry, Root, RootError, Status};

const CAPABILITY: &[u8] = b"security.capability";

/// The bits of a mode that give a program the rights of its owner or group.
const SET_ID_BITS: u32 = 0o6000;

/// An entry of a directory, or the root directory, which is in none.
#[derive(Debug)]
pub enum Target<'a> {
    /// The entry of that name, where nobody else can put another in its place.
    Entry(&'a Directory, &'a [u8]),
    /// An entry of the tree.
    OpenEntry(&'a OpenEntry),
    /// The directory itself.
    Itself(&'a Directory),
}

impl Target<'_> {
    /// Calls `act` with the entry at `path`.
    ///
    /// # Errors
    ///
    /// [`RootError`] if the directory that holds it cannot be opened, and what `act` gives.
    pub fn with<T, E: From<RootError>>(
        root: &Root,
        path: &TreePath,
        act: impl FnOnce(&Target<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        if path.is_root() {
            return act(&Target::Itself(&root.directory(path)?));
        }
        let (parent, name) = root.parent(path)?;
        act(&Target::OpenEntry(&parent.hold(name)?))
    }

    /// Looks at it.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel said.
    pub fn status(&self) -> Result<Status, RootError> {
        match self {
            Self::Entry(directory, name) => directory.stat(name),
            Self::OpenEntry(held) => held.status(),
            Self::Itself(directory) => directory.status(),
        }
    }

    /// Its managed extended attributes.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel said.
    pub fn xattrs(&self, managed: Attributes) -> Result<Xattrs, RootError> {
        let list = match self {
            Self::Entry(directory, name) => directory.xattrs(name, managed)?,
            Self::OpenEntry(held) => held.xattrs(managed)?,
            Self::Itself(directory) => directory.own_xattrs(managed)?,
        };
        Ok(list.into_iter().collect())
    }

    /// How it is now; with the time of modification if `timed`.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel said.
    pub fn appearance(&self, managed: Attributes, timed: bool) -> Result<Appearance, RootError> {
        let Status { mode, uid, gid, mtime, .. } = self.status()?;
        let metadata = Metadata { mode, uid, gid, xattrs: self.xattrs(managed)? };
        Ok(Appearance { metadata, mtime: timed.then_some(mtime) })
    }

    /// Gives it the appearance that is wanted; may be repeated. What is so already is not touched,
    /// so that something immutable is no obstacle where nothing is to be changed.
    ///
    /// # Errors
    ///
    /// [`RootError`] for the first call that the kernel refused.
    pub fn dress(&self, managed: Attributes, wanted: &Appearance) -> Result<(), RootError> {
        let status = self.status()?;
        let symlink = status.kind == Kind::Symlink;
        let Metadata { mode, uid, gid, xattrs } = &wanted.metadata;
        if (status.uid, status.gid) != (*uid, *gid) {
            if !symlink && status.mode & SET_ID_BITS != 0 {
                self.set_mode(status.mode & !SET_ID_BITS)?;
            }
            self.set_owner(*uid, *gid)?;
        }
        let present = self.xattrs(managed)?;
        for (key, _) in present.iter().filter(|(key, _)| xattrs.get(key).is_none()) {
            self.remove_xattr(key)?;
        }
        let missing =
            |wants: bool| xattrs.iter().filter(move |(key, _)| (*key == CAPABILITY) == wants);
        for (key, value) in missing(false).filter(|(key, value)| present.get(key) != Some(value)) {
            self.set_xattr(key, value)?;
        }
        // The calls above may have changed it.
        if !symlink && self.status()?.mode != *mode {
            self.set_mode(*mode)?;
        }
        for (key, value) in missing(true).filter(|(key, value)| present.get(key) != Some(value)) {
            self.set_xattr(key, value)?;
        }
        match (wanted.mtime, self) {
            (Some(mtime), Self::Entry(directory, name)) if status.mtime != mtime => {
                directory.set_mtime(name, mtime)
            }
            (Some(mtime), Self::OpenEntry(held)) if status.mtime != mtime => held.set_mtime(mtime),
            _ => Ok(()),
        }
    }

    fn set_owner(&self, uid: u32, gid: u32) -> Result<(), RootError> {
        match self {
            Self::Entry(directory, name) => directory.set_owner(name, uid, gid),
            Self::OpenEntry(held) => held.set_owner(uid, gid),
            Self::Itself(directory) => {
                let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
                let done = fchown(directory.as_fd(), uid, gid);
                done.map_err(|source| refused("change the owner of", directory, source))
            }
        }
    }

    fn set_mode(&self, mode: u32) -> Result<(), RootError> {
        match self {
            Self::Entry(directory, name) => directory.set_mode(name, mode),
            Self::OpenEntry(held) => held.set_mode(mode),
            Self::Itself(directory) => {
                let done = fchmod(directory.as_fd(), Mode::from_bits_truncate(mode));
                done.map_err(|source| refused("change the mode of", directory, source))
            }
        }
    }

    fn set_xattr(&self, key: &[u8], value: &[u8]) -> Result<(), RootError> {
        match self {
            Self::Entry(directory, name) => directory.set_xattr(name, key, value),
            Self::OpenEntry(held) => held.set_xattr(key, value),
            Self::Itself(directory) => on_file("set an extended attribute of", directory, |file| {
                file.set_xattr(std::ffi::OsStr::from_bytes(key), value)
            }),
        }
    }

    fn remove_xattr(&self, key: &[u8]) -> Result<(), RootError> {
        match self {
            Self::Entry(directory, name) => directory.remove_xattr(name, key),
            Self::OpenEntry(held) => held.remove_xattr(key),
            Self::Itself(directory) => {
                on_file("remove an extended attribute of", directory, |file| {
                    file.remove_xattr(std::ffi::OsStr::from_bytes(key))
                })
            }
        }
    }

    /// Says in what it differs from `node`, or `None` if it is equal. The content of a file is
    /// compared by its size alone.
    ///
    /// # Errors
    ///
    /// [`RootError`] says what the kernel said.
    pub fn difference(
        &self,
        managed: Attributes,
        node: &Node,
    ) -> Result<Option<&'static str>, RootError> {
        let status = self.status()?;
        if let Some(difference) = visible_difference(&status, node) {
            return Ok(Some(difference));
        }
        if let (Node::Leaf(Leaf::Symlink(symlink)), Self::Entry(directory, name)) = (node, self)
            && directory.read_link(name)? != symlink.target.0
        {
            return Ok(Some("target"));
        }
        let Some(metadata) = node.metadata() else { return Ok(None) };
        Ok((self.xattrs(managed)? != metadata.xattrs).then_some("extended attributes"))
    }
}

/// Says in what `status` differs from `node`, as far as it tells.
#[must_use]
pub fn visible_difference(status: &Status, node: &Node) -> Option<&'static str> {
    let (kind, mtime) = match node {
        Node::Directory(_) => (status.kind == Kind::Directory, None),
        Node::Leaf(Leaf::File(file)) => (status.kind == Kind::File, Some(file.mtime)),
        Node::Leaf(Leaf::Symlink(_)) => (status.kind == Kind::Symlink, None),
        Node::Leaf(Leaf::Special(special)) => {
            (status.kind == Kind::Special(special.device), Some(special.mtime))
        }
        Node::Leaf(Leaf::Computed(_) | Leaf::HardLink(_)) => (status.kind == Kind::File, None),
    };
    if !kind {
        return Some("kind");
    }
    if let Node::Leaf(Leaf::File(file)) = node
        && file.size_bytes != status.size_bytes
    {
        return Some("size");
    }
    if let Some(metadata) = node.metadata() {
        if status.kind != Kind::Symlink && metadata.mode != status.mode {
            return Some("mode");
        }
        if (metadata.uid, metadata.gid) != (status.uid, status.gid) {
            return Some("owner");
        }
    }
    mtime.filter(|mtime| *mtime != status.mtime).map(|_| "mtime")
}

/// The appearance of `node`; `None` for a hard link, whose file has it.
#[must_use]
pub fn appearance_of(node: &Node) -> Option<Appearance> {
    let mtime = match node {
        Node::Leaf(Leaf::File(file)) => Some(file.mtime),
        Node::Leaf(Leaf::Special(special)) => Some(special.mtime),
        _ => None,
    };
    Some(Appearance { metadata: node.metadata()?.clone(), mtime })
}

fn refused(operation: &'static str, directory: &Directory, source: Errno) -> RootError {
    RootError::Call { operation, path: directory.path().clone(), source }
}

fn on_file(
    operation: &'static str,
    directory: &Directory,
    act: impl FnOnce(&File) -> std::io::Result<()>,
) -> Result<(), RootError> {
    let done = directory.as_fd().try_clone_to_owned().and_then(|owned| act(&File::from(owned)));
    done.map_err(|error| {
        refused(operation, directory, error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    })
}
