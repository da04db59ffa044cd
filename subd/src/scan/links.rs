//! Groups the names of files that have several.
//!
//! A pass meets paths in component order, so the first name met is the one that carries the file
//! in a tree.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use model::path::TreePath;

use crate::root::Status;

struct Group {
    carrier: TreePath,
    found: u64,
    links: u64,
}

/// The files with several names that a pass has met.
#[derive(Default)]
pub struct LinkGroups {
    groups: BTreeMap<(u64, u64), Group>,
    specials: BTreeSet<TreePath>,
}

impl LinkGroups {
    /// The path that carries the file with `status`, if one of its names was met; counts one more.
    pub fn meet(&mut self, status: &Status) -> Option<&TreePath> {
        let group = self.groups.get_mut(&(status.filesystem, status.inode))?;
        group.found += 1;
        group.links = status.links;
        Some(&group.carrier)
    }

    /// Lets `path` carry the file with `status`, whose first name it is.
    pub fn carry(&mut self, status: &Status, path: &TreePath) {
        if status.links > 1 {
            let group = Group { carrier: path.clone(), found: 1, links: status.links };
            self.groups.insert((status.filesystem, status.inode), group);
        }
    }

    /// Notes the special file at `path` if it has other names: a tree has no links to it, so that
    /// none of its names is told to share an inode with another.
    pub fn special(&mut self, status: &Status, path: &TreePath) {
        if status.links > 1 {
            self.specials.insert(path.clone());
        }
    }

    /// The carriers of the files that have more names than were met, and the special files that
    /// have other names, sorted.
    pub fn externally_linked(self) -> Vec<TreePath> {
        let outside = self.groups.into_values().filter(|group| group.found < group.links);
        let carriers = outside.map(|group| group.carrier);
        let mut carriers: Vec<TreePath> = carriers.chain(self.specials).collect();
        carriers.sort_unstable();
        carriers
    }
}

#[cfg(test)]
mod tests {
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
