//! Detects changes of a file, and whether it may still be changing.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The identity, size and times of a file, which change when it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    device: u64,
    inode: u64,
    size_bytes: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

impl FileStamp {
    /// Returns the stamp of a file with this metadata.
    #[must_use]
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size_bytes: metadata.size(),
            mtime: (metadata.mtime(), metadata.mtime_nsec()),
            ctime: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Returns true if the file changed longer than `settling` before `now`. A later change may be
    /// incomplete, or be followed by one with the same times, which the kernel counts in ticks.
    #[must_use]
    pub fn is_settled(self, settling: Duration, now: SystemTime) -> bool {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanoseconds) = self.ctime;
        let changed = Duration::new(
            u64::try_from(seconds).unwrap_or_default(),
            u32::try_from(nanoseconds).unwrap_or_default(),
        );
        now.abs_diff(changed) > settling
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_settles_and_a_change_shows() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "one").unwrap();
        let stamp = || FileStamp::of(&std::fs::metadata(&path).unwrap());
        let (first, settling) = (stamp(), Duration::from_millis(50));
        assert_eq!(stamp(), first);
        let (seconds, nanoseconds) = first.ctime;
        let changed = UNIX_EPOCH
            + Duration::from_secs(u64::try_from(seconds).unwrap())
            + Duration::from_nanos(u64::try_from(nanoseconds).unwrap());
        // A clock that was set back proves nothing about the file.
        let table = [(0, false), (50, false), (51, true)];
        for (milliseconds, is_settled) in table {
            let distance = Duration::from_millis(milliseconds);
            for now in [changed + distance, changed - distance] {
                assert_eq!(first.is_settled(settling, now), is_settled, "{distance:?}");
            }
        }
        std::fs::write(&path, "three").unwrap();
        assert_ne!(stamp(), first);
    }
}
