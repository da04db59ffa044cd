//! What one pass leaves for the next: the identity and the content of every entry, and the files
//! whose medium is damaged; and the files with several names.
//!
//! A file is not read again if its inode, size, time of modification and time of change are those
//! of its last reading: only the kernel sets the time of change. But that time has a granularity. A
//! file that is changed twice within one tick, the second time after it was read, has the same
//! times as the file that was read. So a file that is read soon after a change is read again by the
//! next pass (git calls it "racily clean"). How soon depends on the file-system: some keep whole
//! seconds.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use model::escape::ByteText;
use model::object::{Algorithm, CompactId};
use model::path::TreePath;
use model::scope::Attributes;
use model::tree::node::SYMLINK_MODE;
use model::tree::{
    Child, Device, Directory, Entry, File, Leaf, Metadata, Name, Special, Symlink, Time,
    TimePrecision, TreeError, Xattrs,
};

use crate::root::{Kind, Status};

/// Twice the longest tick of a kernel's clock (HZ=100).
pub const RACY_WINDOW: Duration = Duration::from_millis(20);

/// The identity of an entry when it was read. Whatever changes an entry sets its time of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    inode: u64,
    /// The time of change; not a [`Time`], which is larger because of its alignment.
    ctime_seconds: i64,
    ctime_nanoseconds: u32,
    settled: bool,
    attributes: Attributes,
}

impl Stamp {
    /// Describes an entry that was read from `started` on and had `status` before and after, on a
    /// file-system that keeps `times`.
    pub fn new(
        status: &Status,
        started: Time,
        attributes: Attributes,
        times: TimePrecision,
    ) -> Self {
        Self {
            inode: status.inode,
            ctime_seconds: status.ctime.seconds,
            ctime_nanoseconds: status.ctime.nanoseconds,
            settled: is_settled(status.ctime, started, times),
            attributes,
        }
    }

    /// As [`Stamp::new`], of an entry that changed while it was read: the next pass reads it.
    pub fn unsettled(status: &Status, attributes: Attributes) -> Self {
        let times = TimePrecision::default();
        Self { settled: false, ..Self::new(status, Time::default(), attributes, times) }
    }

    /// True if an entry with `status` is the one that was read, unchanged.
    pub fn holds(&self, status: &Status) -> bool {
        let ctime = Time { seconds: self.ctime_seconds, nanoseconds: self.ctime_nanoseconds };
        self.settled && self.inode == status.inode && ctime == status.ctime
    }

    /// As [`Stamp::holds`], and the attributes read then are those wanted now.
    pub fn holds_attributes(&self, status: &Status, attributes: Attributes) -> bool {
        self.attributes == attributes && self.holds(status)
    }
}

/// True if no later change can have the time of change `ctime` again, if reading `started` at that
/// time. A time far in the future is settled too: the clock was set back since, so the next change
/// has another time.
fn is_settled(ctime: Time, started: Time, times: TimePrecision) -> bool {
    let nanoseconds =
        |time: Time| i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanoseconds);
    let distance = nanoseconds(started) - nanoseconds(ctime);
    let window = RACY_WINDOW.as_nanos() + u128::from(times.granularity_ns);
    distance.unsigned_abs() > window
}

/// An entry that is no directory, as it was read.
#[derive(Clone, Debug)]
pub struct KnownLeaf {
    pub stamp: Stamp,
    pub leaf: Leaf,
}

impl KnownLeaf {
    /// Returns the entry as it is with `status`, if its content is known without reading it. Its
    /// extended attributes are those that were read.
    pub fn with_status(self, status: &Status, algorithm: Algorithm) -> Option<Self> {
        let is_known = match (&self.leaf, status.kind) {
            (Leaf::File(file), Kind::File) => {
                let size_and_time = (file.size_bytes, file.mtime);
                file.object.id().algorithm() == algorithm
                    && size_and_time == (status.size_bytes, status.mtime)
            }
            (Leaf::Symlink(_), Kind::Symlink) => true,
            (Leaf::Special(was), Kind::Special(is)) => was.device == is,
            _ => false,
        };
        if !is_known || !self.stamp.holds(status) {
            return None;
        }
        let Self { stamp, leaf } = self;
        let leaf = match leaf {
            Leaf::File(File { metadata, object, .. }) => file_leaf(status, metadata.xattrs, object),
            Leaf::Symlink(Symlink { metadata, target }) => {
                symlink_leaf(status, metadata.xattrs, target)
            }
            Leaf::Special(Special { metadata, device, .. }) => {
                special_leaf(status, metadata.xattrs, device)
            }
            leaf @ (Leaf::Computed(_) | Leaf::HardLink(_)) => leaf,
        };
        Some(Self { stamp, leaf })
    }
}

/// Returns the regular file with `status`.
pub fn file_leaf(status: &Status, xattrs: Xattrs, object: CompactId) -> Leaf {
    let Status { mode, uid, gid, mtime, size_bytes, .. } = *status;
    Leaf::File(File { metadata: Metadata { mode, uid, gid, xattrs }, mtime, size_bytes, object })
}

/// Returns the symlink with `status`.
pub fn symlink_leaf(status: &Status, xattrs: Xattrs, target: ByteText) -> Leaf {
    let Status { uid, gid, .. } = *status;
    Leaf::Symlink(Symlink { metadata: Metadata { mode: SYMLINK_MODE, uid, gid, xattrs }, target })
}

/// Returns the device or fifo with `status`.
pub fn special_leaf(status: &Status, xattrs: Xattrs, device: Device) -> Leaf {
    let Status { mode, uid, gid, mtime, .. } = *status;
    Leaf::Special(Special { metadata: Metadata { mode, uid, gid, xattrs }, mtime, device })
}

/// A directory as it was read.
#[derive(Clone, Debug)]
pub struct KnownDirectory {
    pub stamp: Stamp,
    pub xattrs: Xattrs,
    /// The directory of the last complete pass, shared if nothing has changed.
    pub built: Option<Arc<Directory>>,
    pub entries: KnownEntries,
}

/// The entries of a directory as they were read.
#[derive(Clone, Debug)]
pub enum KnownEntries {
    /// Those of the directory that was built, in its order.
    OfBuilt(Box<[Mark]>),
    /// What a pass left that ended early, sorted by name.
    Named(Vec<(Name, KnownEntry)>),
}

/// What is known of an entry besides what the tree says of it.
#[derive(Clone, Debug)]
pub enum Mark {
    /// Nothing: a further name of a file.
    Nothing,
    Leaf(Stamp),
    Directory(Box<KnownDirectory>),
}

/// There is one for each entry of the machine.
const _: () = assert!(size_of::<Mark>() == 24);

/// An entry as it was read.
#[derive(Clone, Debug)]
pub enum KnownEntry {
    /// Not a directory.
    Leaf(KnownLeaf),
    Directory(Box<KnownDirectory>),
}

impl KnownEntry {
    /// Returns what `mark` and the tree's `child` say together, if anything.
    pub fn new(mark: Mark, child: &Child) -> Option<Self> {
        match (mark, child) {
            (Mark::Leaf(stamp), Child::Leaf(leaf)) => {
                Some(Self::Leaf(KnownLeaf { stamp, leaf: leaf.clone() }))
            }
            (Mark::Directory(directory), _) => Some(Self::Directory(directory)),
            _ => None,
        }
    }

    /// Returns the leaf, if this is one.
    pub fn into_leaf(self) -> Option<KnownLeaf> {
        match self {
            Self::Leaf(leaf) => Some(leaf),
            Self::Directory(_) => None,
        }
    }

    /// Returns the directory, if this is one.
    pub fn into_directory(self) -> Option<KnownDirectory> {
        match self {
            Self::Leaf(_) => None,
            Self::Directory(directory) => Some(*directory),
        }
    }
}

/// The entries of a directory that a pass has recorded, in order. As long as they are those of the
/// directory that the last pass built, they are not held twice.
#[derive(Debug)]
pub struct RecordedEntries {
    built: Option<Arc<Directory>>,
    /// How many are those of `built`.
    same: usize,
    /// All, from the first difference on.
    changed: Option<Vec<Entry>>,
    /// How many there can be.
    capacity: usize,
}

impl RecordedEntries {
    /// Starts with none of at most `capacity` entries.
    pub fn new(built: Option<Arc<Directory>>, capacity: usize) -> Self {
        Self { built, same: 0, changed: None, capacity }
    }

    /// Adds the next entry.
    pub fn add(&mut self, entry: Entry) {
        let former = self.built.as_deref().map_or(&[][..], Directory::entries);
        if self.changed.is_none() && former.get(self.same) == Some(&entry) {
            self.same += 1;
            return;
        }
        let changed = self.changed.get_or_insert_with(|| {
            let mut all = Vec::with_capacity(self.capacity);
            all.extend_from_slice(&former[..self.same]);
            all
        });
        changed.push(entry);
    }

    /// Returns all entries, sorted by name.
    pub fn into_entries(self) -> Vec<Entry> {
        match (self.changed, self.built) {
            (Some(changed), _) => changed,
            (None, Some(built)) => built.entries()[..self.same].to_vec(),
            (None, None) => Vec::new(),
        }
    }

    /// Returns the directory: that of the last pass itself if it is equal.
    pub fn finish(
        self,
        algorithm: Algorithm,
        metadata: Metadata,
    ) -> Result<Arc<Directory>, TreeError> {
        match &self.built {
            Some(built)
                if self.changed.is_none()
                    && self.same == built.entries().len()
                    && built.digest().algorithm() == algorithm
                    && *built.metadata() == metadata =>
            {
                Ok(Arc::clone(built))
            }
            _ => Directory::new(algorithm, metadata, self.into_entries()).map(Arc::new),
        }
    }
}

struct LinkGroup {
    carrier: TreePath,
    found: u64,
    links: u64,
}

/// The files with several names that a pass has found. A pass meets paths in component order, so
/// the first name is the one that carries the file in a tree.
#[derive(Default)]
pub struct LinkGroups {
    groups: BTreeMap<(u64, u64), LinkGroup>,
    specials: BTreeSet<TreePath>,
}

impl LinkGroups {
    /// Returns the path that carries the file with `status`, if one of its names was found before.
    /// Counts one more name.
    pub fn meet(&mut self, status: &Status) -> Option<&TreePath> {
        let group = self.groups.get_mut(&(status.filesystem, status.inode))?;
        group.found += 1;
        group.links = status.links;
        Some(&group.carrier)
    }

    /// Records `path` as the first name of the file with `status`.
    pub fn carry(&mut self, status: &Status, path: &TreePath) {
        if status.links > 1 {
            let group = LinkGroup { carrier: path.clone(), found: 1, links: status.links };
            self.groups.insert((status.filesystem, status.inode), group);
        }
    }

    /// Records the special file at `path` if it has other names: a tree cannot say that special
    /// files share an inode.
    pub fn special(&mut self, status: &Status, path: &TreePath) {
        if status.links > 1 {
            self.specials.insert(path.clone());
        }
    }

    /// Returns the carriers of the files that have more names than were found, and the special
    /// files that have other names, sorted.
    pub fn externally_linked(self) -> Vec<TreePath> {
        let outside = self.groups.into_values().filter(|group| group.found < group.links);
        let carriers = outside.map(|group| group.carrier);
        let mut carriers: Vec<TreePath> = carriers.chain(self.specials).collect();
        carriers.sort_unstable();
        carriers
    }
}

/// The most files that are recorded. A device with more must be replaced.
const FILES_MAX: usize = 10_000;

/// The identity of a file when its medium was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileState {
    inode: u64,
    size_bytes: u64,
    mtime: Time,
    ctime: Time,
}

impl FileState {
    fn of(status: &Status) -> Self {
        let Status { inode, size_bytes, mtime, ctime, .. } = *status;
        Self { inode, size_bytes, mtime, ctime }
    }
}

/// The files whose medium differs from the page cache. All passes read them around the cache: the
/// tree shows what is on the medium, because that is what remains. That ends when the file is
/// changed or replaced, as a repair does.
#[derive(Debug, Default)]
pub struct DamagedFiles {
    files: BTreeMap<TreePath, FileState>,
}

impl DamagedFiles {
    /// Adds the file at `path`, unless there are too many.
    pub fn add(&mut self, path: TreePath, status: &Status) {
        if self.files.len() < FILES_MAX || self.files.contains_key(&path) {
            self.files.insert(path, FileState::of(status));
        }
    }

    /// True if the file at `path` that has `status` must be read around the cache.
    pub fn has(&self, path: &TreePath, status: &Status) -> bool {
        // The map is almost always empty.
        !self.files.is_empty() && self.files.get(path) == Some(&FileState::of(status))
    }

    /// Forgets the files for which `is_there` is false.
    pub fn retain(&mut self, is_there: impl Fn(&TreePath) -> bool) {
        self.files.retain(|path, _| is_there(path));
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod links_tests {
    use model::tree::Time;

    use super::*;
    use crate::root::Kind;

    #[test]
    fn finds_the_carrier_and_what_is_linked_from_outside() {
        let status = |inode, links| Status {
            kind: Kind::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size_bytes: 0,
            mtime: Time::default(),
            ctime: Time::default(),
            inode,
            filesystem: 1,
            links,
        };
        let path = |text: &str| text.parse::<TreePath>().unwrap();
        let mut groups = LinkGroups::default();
        groups.carry(&status(1, 2), &path("/z"));
        groups.carry(&status(2, 3), &path("/b"));
        groups.carry(&status(3, 1), &path("/c"));
        groups.carry(&status(4, 2), &path("/a"));
        assert_eq!(groups.meet(&status(1, 2)), Some(&path("/z")));
        assert_eq!(groups.meet(&status(2, 3)), Some(&path("/b")));
        assert_eq!(groups.meet(&status(3, 1)), None);
        assert_eq!(groups.meet(&status(5, 2)), None);
        groups.special(&status(6, 2), &path("/aa"));
        groups.special(&status(7, 1), &path("/ab"));
        assert_eq!(groups.externally_linked(), [path("/a"), path("/aa"), path("/b")]);
    }
}

#[cfg(test)]
mod medium_tests {
    use super::*;
    use crate::root::Kind;

    #[test]
    fn a_file_is_read_around_the_cache_until_it_changes() {
        let status = |inode, seconds| Status {
            kind: Kind::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size_bytes: 7,
            mtime: Time::default(),
            ctime: Time { seconds, nanoseconds: 0 },
            inode,
            filesystem: 1,
            links: 1,
        };
        let path = |text: &str| text.parse::<TreePath>().unwrap();
        let mut files = DamagedFiles::default();
        files.add(path("/f"), &status(1, 1));
        assert!(files.has(&path("/f"), &status(1, 1)));
        assert!(!files.has(&path("/f"), &status(1, 2)));
        assert!(!files.has(&path("/f"), &status(2, 1)));
        assert!(!files.has(&path("/g"), &status(1, 1)));
        files.add(path("/f"), &status(1, 2));
        assert!(files.has(&path("/f"), &status(1, 2)));
        files.retain(|_| false);
        assert!(!files.has(&path("/f"), &status(1, 2)));
    }
}
