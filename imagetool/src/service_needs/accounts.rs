//! The numbers of users and groups, and how those of two images differ.
// tidy: core

use std::collections::BTreeMap;

use crate::packages::printable;

/// The users and groups of an image, with their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accounts {
    pub users: BTreeMap<String, u32>,
    pub groups: BTreeMap<String, u32>,
}

/// Reads `/etc/passwd` or `/etc/group`: the name is the first field, its number the third. Of lines
/// with one name the first counts.
pub fn ids(text: &str) -> BTreeMap<String, u32> {
    let id = |line: &str| {
        let mut fields = line.split(':');
        Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    // The last of equal keys stays.
    text.lines().rev().filter_map(id).collect()
}

impl Accounts {
    /// Names the owner of an entry: the user, or the group if the user is root.
    pub fn owner(&self, uid: u32, gid: u32) -> String {
        let (what, ids, wanted) = match uid {
            0 => ("group", &self.groups, gid),
            _ => ("user", &self.users, uid),
        };
        match ids.iter().find(|(_, id)| **id == wanted) {
            Some((name, _)) => format!("{what} {}", printable(name)),
            None => format!("{what} {wanted}"),
        }
    }

    /// Describes each user and group that has another number than in `former`.
    pub fn renumbered(&self, former: &Self) -> Vec<String> {
        let kinds = [("user", &former.users, &self.users), ("group", &former.groups, &self.groups)];
        let mut changes = Vec::new();
        for (what, before, after) in kinds {
            for (name, old) in before {
                if let Some(new) = after.get(name).filter(|new| *new != old) {
                    let name = printable(name);
                    changes.push(format!("{what} {name}: {old} to {new}"));
                }
            }
        }
        changes
    }
}
