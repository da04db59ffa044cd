//! The files whose medium holds something else than the page cache does.
//!
//! The tree shows what such a file has on its medium, because that is what remains. All passes must
//! read it around the cache, or the next one would take what the cache holds for the truth again.
//! That ends when the file is changed or replaced, as a repair does.
// tidy: core

use std::collections::BTreeMap;

use model::path::TreePath;
use model::tree::Time;

use crate::root::Status;

/// The most files that are remembered; with more than that the device is to be replaced.
const FILES_MAX: usize = 10_000;

/// Who a file was when its medium was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Who {
    inode: u64,
    size_bytes: u64,
    mtime: Time,
    ctime: Time,
}

impl Who {
    fn of(status: &Status) -> Self {
        let Status { inode, size_bytes, mtime, ctime, .. } = *status;
        Self { inode, size_bytes, mtime, ctime }
    }
}

/// The files to be read around the cache.
#[derive(Debug, Default)]
pub struct OnMedium {
    files: BTreeMap<TreePath, Who>,
}

impl OnMedium {
    /// Adds the file at `path`, unless there are too many.
    pub fn add(&mut self, path: TreePath, status: &Status) {
        if self.files.len() < FILES_MAX || self.files.contains_key(&path) {
            self.files.insert(path, Who::of(status));
        }
    }

    /// True if the file at `path` that has `status` is to be read around the cache.
    pub fn has(&self, path: &TreePath, status: &Status) -> bool {
        // The map is almost always empty.
        !self.files.is_empty() && self.files.get(path) == Some(&Who::of(status))
    }

    /// Forgets the files for which `is_there` is false.
    pub fn retain(&mut self, is_there: impl Fn(&TreePath) -> bool) {
        self.files.retain(|path, _| is_there(path));
    }
}

#[cfg(test)]
mod tests {
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
        let mut files = OnMedium::default();
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
