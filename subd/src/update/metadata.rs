//! Sets and compares the metadata of an entry: owner, mode, attributes, time.
//!
//! The order matters. `chown` drops set-id bits and capabilities; an ACL sets the group bits of the
//! mode. So set-id bits are cleared first, then the owner is set, then ordinary attributes and
//! ACLs, then the mode, then capabilities, and the time last.

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

use crate::root::{Directory, Kind, OpenEntry, Root, RootError, SET_ATTRIBUTE, Status, errno_of};
use crate::update::step::EntryMetadata;

const CAPABILITY: &[u8] = b"security.capability";

/// The set-id bits of a mode.
const SET_ID_BITS: u32 = 0o6000;

/// An entry of a directory, or the root directory, which has no parent.
#[derive(Debug)]
pub enum Target<'a> {
    /// The entry of that name, in a directory that only subd can change.
    Entry(&'a Directory, &'a [u8]),
    /// An entry of the tree.
    OpenEntry(&'a OpenEntry),
    Itself(&'a Directory),
}

impl Target<'_> {
    /// Calls `act` with the entry at `path`.
    pub fn with<T, E: From<RootError>>(
        root: &Root,
        path: &TreePath,
        act: impl FnOnce(&Target<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        if path.is_root() {
            return act(&Target::Itself(&root.directory(path)?));
        }
        let (parent, name) = root.parent(path)?;
        act(&Target::OpenEntry(&parent.open_entry(name)?))
    }

    /// Reads the status of it.
    pub fn status(&self) -> Result<Status, RootError> {
        match self {
            Self::Entry(directory, name) => directory.stat(name),
            Self::OpenEntry(held) => held.status(),
            Self::Itself(directory) => directory.status(),
        }
    }

    /// Reads its managed extended attributes.
    pub fn xattrs(&self, managed: Attributes) -> Result<Xattrs, RootError> {
        let list = match self {
            Self::Entry(directory, name) => directory.xattrs(name, managed)?,
            Self::OpenEntry(held) => held.xattrs(managed)?,
            Self::Itself(directory) => directory.own_xattrs(managed)?,
        };
        Ok(list.into_iter().collect())
    }

    /// Reads its metadata, with the time of modification if `timed`.
    pub fn entry_metadata(
        &self,
        managed: Attributes,
        timed: bool,
    ) -> Result<EntryMetadata, RootError> {
        let Status { mode, uid, gid, mtime, .. } = self.status()?;
        let metadata = Metadata { mode, uid, gid, xattrs: self.xattrs(managed)? };
        Ok(EntryMetadata { metadata, mtime: timed.then_some(mtime) })
    }

    /// Sets the wanted metadata. May be repeated. What is equal already is not set, so that an
    /// immutable entry is no obstacle if nothing changes.
    pub fn apply(&self, managed: Attributes, wanted: &EntryMetadata) -> Result<(), RootError> {
        let status = self.status()?;
        let symlink = status.kind == Kind::Symlink;
        let Metadata { mode, uid, gid, xattrs } = &wanted.metadata;
        let has_owner = (status.uid, status.gid) == (*uid, *gid);
        if !has_owner {
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
        // The calls above may have changed the mode.
        let is_untouched = has_owner && present == *xattrs;
        let present_mode = if is_untouched { status.mode } else { self.status()?.mode };
        if !symlink && present_mode != *mode {
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
            Self::Itself(directory) => on_file(SET_ATTRIBUTE, directory, |file| {
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

    /// Returns in what it differs from `node`; `None` if it is equal. `status` is its status. The
    /// content of a file is compared by its size alone.
    pub fn difference(
        &self,
        status: &Status,
        managed: Attributes,
        node: &Node,
    ) -> Result<Option<&'static str>, RootError> {
        if let Some(difference) = visible_difference(status, node) {
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

/// Returns in what `status` differs from `node`; size and time last.
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
    if let Some(metadata) = node.metadata() {
        if status.kind != Kind::Symlink && metadata.mode != status.mode {
            return Some("mode");
        }
        if (metadata.uid, metadata.gid) != (status.uid, status.gid) {
            return Some("owner");
        }
    }
    if let Node::Leaf(Leaf::File(file)) = node
        && file.size_bytes != status.size_bytes
    {
        return Some("size");
    }
    mtime.filter(|mtime| *mtime != status.mtime).map(|_| "mtime")
}

/// Returns the metadata of `node`; `None` for a hard link, whose file has it.
pub fn metadata_of(node: &Node) -> Option<EntryMetadata> {
    let mtime = match node {
        Node::Leaf(Leaf::File(file)) => Some(file.mtime),
        Node::Leaf(Leaf::Special(special)) => Some(special.mtime),
        _ => None,
    };
    Some(EntryMetadata { metadata: node.metadata()?.clone(), mtime })
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
    done.map_err(|error| refused(operation, directory, errno_of(error)))
}
