//! What one pass leaves for the next: the identity and the content of every entry.
//!
//! A file is not read again if its inode, size, time of modification and time of change are those
//! of its last reading: only the kernel sets the time of change. That time has a granularity,
//! though. A file that is changed twice within one tick, the second time after it was read, looks
//! like the file that was read; so a reading soon after a change settles nothing and the file is
//! read again by the next pass ("racily clean", as git calls it). How soon is a matter of the
//! file-system: some keep whole seconds.
// tidy: core

use std::sync::Arc;
use std::time::Duration;

use model::escape::ByteText;
use model::object::{Algorithm, ObjectId};
use model::scope::Attributes;
use model::tree::node::SYMLINK_MODE;
use model::tree::{
    Child, Device, Directory, Entry, File, Leaf, Metadata, Special, Symlink, Time, Times,
    TreeError, Xattrs,
};

use crate::root::{Kind, Status};

/// Twice the longest tick of a kernel's clock (HZ=100).
pub const RACY_WINDOW: Duration = Duration::from_millis(20);

/// The identity of an entry when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    inode: u64,
    size_bytes: u64,
    mtime: Time,
    ctime: Time,
    settled: bool,
    attributes: Attributes,
}

impl Stamp {
    /// Describes an entry that was read from `started` on and had `status` before and after, on a
    /// file-system that keeps `times`.
    pub fn new(status: &Status, started: Time, attributes: Attributes, times: Times) -> Self {
        Self {
            inode: status.inode,
            size_bytes: status.size_bytes,
            mtime: status.mtime,
            ctime: status.ctime,
            settled: is_settled(status.ctime, started, times),
            attributes,
        }
    }

    /// As [`Stamp::new`], of an entry that changed while it was read: the next pass reads it.
    pub fn unsettled(status: &Status, attributes: Attributes) -> Self {
        let times = Times::default();
        Self { settled: false, ..Self::new(status, Time::default(), attributes, times) }
    }

    /// True if an entry with `status` is the one that was read, unchanged.
    pub fn holds(&self, status: &Status) -> bool {
        self.settled
            && self.inode == status.inode
            && self.size_bytes == status.size_bytes
            && self.mtime == status.mtime
            && self.ctime == status.ctime
    }

    /// As [`Stamp::holds`], and the attributes read then are those wanted now.
    pub fn holds_attributes(&self, status: &Status, attributes: Attributes) -> bool {
        self.attributes == attributes && self.holds(status)
    }
}

/// True if no later change can show the time of change `ctime` again, given that reading
/// `started` at that time. A time far in the future is as good: the clock was set back since, so
/// that the next change shows another one.
fn is_settled(ctime: Time, started: Time, times: Times) -> bool {
    let nanoseconds =
        |time: Time| i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds);
    let distance = nanoseconds(started) - nanoseconds(ctime);
    let window = RACY_WINDOW.as_nanos() + u128::from(times.granularity_ns);
    distance.unsigned_abs() > window
}

/// The content of an entry, besides its `lstat`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// The content of a regular file.
    File(ObjectId),
    /// The target of a symlink.
    Symlink(ByteText),
    /// Nothing: a device or fifo.
    Special(Device),
}

/// An entry that is no directory, as it was read.
#[derive(Clone, Debug)]
pub struct LeafMemory {
    pub stamp: Stamp,
    pub content: Content,
    pub xattrs: Xattrs,
}

impl LeafMemory {
    /// What the entry with `status` holds, if that is known without reading it.
    pub fn content_of(&self, status: &Status, algorithm: Algorithm) -> Option<&Content> {
        let fits = match (&self.content, status.kind) {
            (Content::File(object), Kind::File) => object.algorithm() == algorithm,
            (Content::Symlink(_), Kind::Symlink) => true,
            (Content::Special(was), Kind::Special(is)) => *was == is,
            _ => false,
        };
        (fits && self.stamp.holds(status)).then_some(&self.content)
    }
}

/// A directory as it was read.
#[derive(Debug)]
pub struct DirectoryMemory {
    pub stamp: Stamp,
    pub xattrs: Xattrs,
    /// What the last complete pass made of it, to be shared if nothing has changed.
    pub built: Option<Arc<Directory>>,
    /// Its entries, sorted by name.
    pub entries: Vec<(Box<[u8]>, Memory)>,
}

/// An entry as it was read.
#[derive(Debug)]
pub enum Memory {
    /// Not a directory.
    Leaf(LeafMemory),
    Directory(Box<DirectoryMemory>),
}

impl Memory {
    /// The memory of a leaf, if this is one.
    pub fn into_leaf(self) -> Option<LeafMemory> {
        match self {
            Self::Leaf(leaf) => Some(leaf),
            Self::Directory(_) => None,
        }
    }

    /// The memory of a directory, if this is one.
    pub fn into_directory(self) -> Option<DirectoryMemory> {
        match self {
            Self::Leaf(_) => None,
            Self::Directory(directory) => Some(*directory),
        }
    }
}

/// The entry of a tree that has `status` and holds what `memory` says.
pub fn leaf_of(status: &Status, memory: &LeafMemory) -> Leaf {
    let metadata = Metadata {
        mode: status.mode,
        uid: status.uid,
        gid: status.gid,
        xattrs: memory.xattrs.clone(),
    };
    match &memory.content {
        Content::File(object) => Leaf::File(File {
            metadata,
            mtime: status.mtime,
            size_bytes: status.size_bytes,
            object: *object,
        }),
        Content::Symlink(target) => Leaf::Symlink(Symlink {
            metadata: Metadata { mode: SYMLINK_MODE, ..metadata },
            target: target.clone(),
        }),
        Content::Special(device) => {
            Leaf::Special(Special { metadata, mtime: status.mtime, device: *device })
        }
    }
}

/// Makes the directory of `entries`, sorted by name; gives `previous` itself if it is the same.
pub fn assemble(
    algorithm: Algorithm,
    metadata: Metadata,
    entries: Vec<Entry>,
    previous: Option<Arc<Directory>>,
) -> Result<Arc<Directory>, TreeError> {
    match previous {
        Some(previous)
            if previous.digest().algorithm() == algorithm
                && *previous.metadata() == metadata
                && same_entries(previous.entries(), &entries) =>
        {
            Ok(previous)
        }
        _ => Directory::new(algorithm, metadata, entries).map(Arc::new),
    }
}

fn same_entries(left: &[Entry], right: &[Entry]) -> bool {
    left.len() == right.len()
        && left.iter().zip(right).all(|(left, right)| {
            left.name == right.name
                && match (&left.child, &right.child) {
                    // By digest, which is at hand.
                    (Child::Directory(left), Child::Directory(right)) => left == right,
                    (Child::Leaf(left), Child::Leaf(right)) => left == right,
                    _ => false,
                }
        })
}

#[cfg(test)]
mod tests;
