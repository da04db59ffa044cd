//! What can be at one path of a tree, with the attributes that are managed.

use serde::{Deserialize, Serialize};

use crate::JsonSchema;
use crate::escape::ByteText;
use crate::object::CompactId;
use crate::path::TreePath;
use crate::tree::Xattrs;

/// The bits of a mode that are managed: permissions, set-id and sticky.
pub const MODE_BITS: u32 = 0o7777;

/// The mode that every symlink has.
pub const SYMLINK_MODE: u32 = 0o777;

/// Mode, owner and extended attributes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Metadata {
    /// Permission, set-id and sticky bits: at most `0o7777`; of a symlink always `0o777`.
    pub mode: u32,
    /// Numeric owner.
    pub uid: u32,
    /// Numeric group.
    pub gid: u32,
    /// Managed extended attributes.
    pub xattrs: Xattrs,
}

impl Metadata {
    /// Metadata without extended attributes.
    #[must_use]
    pub fn new(mode: u32, uid: u32, gid: u32) -> Self {
        Self { mode, uid, gid, xattrs: Xattrs::none() }
    }

    /// True if a file with this metadata may get that of `new` in place. It must be replaced
    /// instead if a change of the owner would lose a set-id bit or capabilities, or if a process of
    /// somebody else than root may have it open, and could write to it ever after.
    #[must_use]
    pub fn may_become(&self, new: &Self) -> bool {
        let is_private = self == new || only_root_writes(self.uid, self.mode);
        is_private && !self.is_privileged() && !new.is_privileged()
    }

    /// True if it has a set-id bit or capabilities.
    fn is_privileged(&self) -> bool {
        self.mode & 0o6000 != 0 || self.xattrs.has_capability()
    }
}

/// True if nobody but root can write to a file with this owner and mode. An ACL that lets somebody
/// write shows in the bits of the group.
#[must_use]
pub fn only_root_writes(uid: u32, mode: u32) -> bool {
    uid == 0 && mode & 0o022 == 0
}

/// A modification time.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub struct Time {
    /// Seconds since 1970-01-01 UTC; may be negative.
    #[serde(with = "crate::json::LargeNumber")]
    pub seconds: i64,
    /// Nanoseconds within the second: below 1,000,000,000.
    pub nanoseconds: u32,
}

/// A regular file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct File {
    /// Mode, owner, extended attributes.
    pub metadata: Metadata,
    /// Time of the last modification.
    pub mtime: Time,
    /// Length of the content, in bytes.
    #[serde(with = "crate::json::LargeNumber")]
    pub size_bytes: u64,
    /// The content.
    pub object: CompactId,
}

/// A regular file whose content a filegen-server computes for each machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Computed {
    /// Mode, owner, extended attributes.
    pub metadata: Metadata,
    /// `host:port` of the filegen-server.
    pub source: String,
}

/// A symbolic link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Symlink {
    /// Owner and extended attributes; the mode is always `0o777`.
    pub metadata: Metadata,
    /// What it points to: 1 to 4,095 bytes.
    pub target: ByteText,
}

/// A device or a fifo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Special {
    /// Mode, owner, extended attributes.
    pub metadata: Metadata,
    /// Time of the last modification.
    pub mtime: Time,
    pub device: Device,
}

/// The kind of a special file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Device {
    /// A block device.
    Block {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A character device.
    Character {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// A named pipe.
    Fifo,
}

/// Anything but a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Leaf {
    /// A regular file.
    File(File),
    /// A regular file with content computed for each machine.
    Computed(Computed),
    /// A symbolic link.
    Symlink(Symlink),
    /// A device or fifo.
    Special(Special),
    /// A further name of the regular file at that path.
    HardLink(TreePath),
}

/// What is at one path, without what a directory holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Node {
    /// A directory.
    Directory(Metadata),
    /// Anything else.
    Leaf(Leaf),
}

impl Node {
    /// A word for the kind, as reports use it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Directory(_) => "directory",
            Self::Leaf(Leaf::File(_)) => "file",
            Self::Leaf(Leaf::Computed(_)) => "computed file",
            Self::Leaf(Leaf::Symlink(_)) => "symlink",
            Self::Leaf(Leaf::Special(special)) => match special.device {
                Device::Block { .. } => "block device",
                Device::Character { .. } => "character device",
                Device::Fifo => "fifo",
            },
            Self::Leaf(Leaf::HardLink(_)) => "hard link",
        }
    }

    /// True for a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        matches!(self, Self::Directory(_))
    }

    /// Mode, owner and extended attributes; `None` for a hard link, whose file holds them.
    #[must_use]
    pub fn metadata(&self) -> Option<&Metadata> {
        match self {
            Self::Directory(metadata) => Some(metadata),
            Self::Leaf(Leaf::File(file)) => Some(&file.metadata),
            Self::Leaf(Leaf::Computed(computed)) => Some(&computed.metadata),
            Self::Leaf(Leaf::Symlink(symlink)) => Some(&symlink.metadata),
            Self::Leaf(Leaf::Special(special)) => Some(&special.metadata),
            Self::Leaf(Leaf::HardLink(_)) => None,
        }
    }
    /// As [`Node::metadata`], to be changed.
    pub fn metadata_mut(&mut self) -> Option<&mut Metadata> {
        match self {
            Self::Directory(metadata) => Some(metadata),
            Self::Leaf(Leaf::File(file)) => Some(&mut file.metadata),
            Self::Leaf(Leaf::Computed(computed)) => Some(&mut computed.metadata),
            Self::Leaf(Leaf::Symlink(symlink)) => Some(&mut symlink.metadata),
            Self::Leaf(Leaf::Special(special)) => Some(&mut special.metadata),
            Self::Leaf(Leaf::HardLink(_)) => None,
        }
    }
}

/// The precision and the range of times on a file-system; the default is exact. ext4 with small
/// inodes stores whole seconds, FAT every second one, ext3 nothing after 2038. A file with the time
/// of its image then shows another time, and would differ forever. So subd measures the precision,
/// and a wanted time is compared after [`TimePrecision::rounded`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TimePrecision {
    /// Times are rounded down to a multiple of this, in nanoseconds: 1 to 2,000,000,000.
    pub granularity_ns: u32,
    /// The earliest, in seconds since 1970.
    #[serde(with = "crate::json::LargeNumber")]
    pub first_seconds: i64,
    /// The latest, in seconds since 1970.
    #[serde(with = "crate::json::LargeNumber")]
    pub last_seconds: i64,
}

impl Default for TimePrecision {
    fn default() -> Self {
        Self { granularity_ns: 1, first_seconds: i64::MIN, last_seconds: i64::MAX }
    }
}

/// The granularities that file-systems have, in nanoseconds: NTFS has 100, UDF 1,000, exFAT
/// 10,000,000, ext3 a second and FAT two.
const GRANULARITIES_NS: [u32; 7] =
    [1, 100, 1_000, 1_000_000, 10_000_000, 1_000_000_000, 2_000_000_000];

impl TimePrecision {
    /// A time that reveals each granularity when it is set and read back: an odd second, and only
    /// nines after it.
    pub const PROBE: Time = Time { seconds: 1_234_567_891, nanoseconds: 999_999_999 };

    /// Returns the precision of a file-system that stored `trial` for [`TimePrecision::PROBE`], and
    /// `first` and `last` for times in the far past and future.
    #[must_use]
    pub fn from_probe(trial: Time, first: Time, last: Time) -> Self {
        let fits = |granularity_ns: &u32| {
            let times = Self { granularity_ns: *granularity_ns, ..Self::default() };
            times.rounded(Self::PROBE) == trial
        };
        let granularity_ns = GRANULARITIES_NS.into_iter().find(fits).unwrap_or(1);
        let (first_seconds, last_seconds) = (first.seconds, last.seconds);
        Self { granularity_ns, first_seconds, last_seconds }
    }

    /// Returns what is read back after `time` was set.
    #[must_use]
    pub fn rounded(self, time: Time) -> Time {
        let Time { seconds, nanoseconds } = time;
        if seconds <= self.first_seconds && self.first_seconds > i64::MIN {
            return Time { seconds: self.first_seconds, nanoseconds: 0 };
        }
        if seconds >= self.last_seconds && self.last_seconds < i64::MAX {
            return Time { seconds: self.last_seconds, nanoseconds: 0 };
        }
        let granularity_ns = self.granularity_ns.max(1);
        let whole = i64::from(granularity_ns / 1_000_000_000);
        match whole {
            0 => Time { seconds, nanoseconds: nanoseconds - nanoseconds % granularity_ns },
            _ => Time { seconds: seconds - seconds.rem_euclid(whole), nanoseconds: 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(seconds: i64, nanoseconds: u32) -> Time {
        Time { seconds, nanoseconds }
    }

    #[test]
    fn keeps_what_the_file_system_keeps() {
        let by = |granularity_ns| TimePrecision { granularity_ns, ..TimePrecision::default() };
        let ext3 =
            TimePrecision { granularity_ns: 1_000_000_000, first_seconds: -9, last_seconds: 9 };
        #[rustfmt::skip]
        let table = [
            (by(1),             time(5, 123_456_789),  time(5, 123_456_789)),
            (by(100),           time(5, 123_456_789),  time(5, 123_456_700)),
            (by(10_000_000),    time(5, 123_456_789),  time(5, 120_000_000)),
            (by(1_000_000_000), time(5, 123_456_789),  time(5, 0)),
            (by(2_000_000_000), time(5, 123_456_789),  time(4, 0)),
            (by(2_000_000_000), time(-5, 123_456_789), time(-6, 0)),
            (by(0),             time(5, 1),            time(5, 1)),
            (by(1),             time(i64::MAX, 1),     time(i64::MAX, 1)),
            (by(1),             time(i64::MIN, 1),     time(i64::MIN, 1)),
            (ext3,              time(8, 1),            time(8, 0)),
            (ext3,              time(9, 1),            time(9, 0)),
            (ext3,              time(i64::MAX, 1),     time(9, 0)),
            (ext3,              time(-10, 1),          time(-9, 0)),
        ];
        for (times, set, expected) in table {
            assert_eq!(times.rounded(set), expected, "{times:?} {set:?}");
            assert_eq!(times.rounded(expected), expected, "what was kept is kept again");
        }
    }

    #[test]
    fn learns_from_what_is_read_back() {
        let (first, last) = (time(-2_147_483_648, 0), time(2_147_483_647, 0));
        for granularity_ns in GRANULARITIES_NS {
            let times = TimePrecision {
                granularity_ns,
                first_seconds: first.seconds,
                last_seconds: last.seconds,
            };
            assert_eq!(
                TimePrecision::from_probe(times.rounded(TimePrecision::PROBE), first, last),
                times
            );
        }
        assert_eq!(TimePrecision::from_probe(time(1, 2), first, last).granularity_ns, 1);
    }
}
