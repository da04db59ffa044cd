//! The numbers of users and groups, and how those of two images differ.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::JsonSchema;

/// The users and groups of an image, with their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accounts {
    pub users: BTreeMap<String, u32>,
    pub groups: BTreeMap<String, u32>,
}

/// A user or a group.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum AccountKind {
    User,
    Group,
}

impl AccountKind {
    /// Returns the name in texts: `user`, `group`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Group => "group",
        }
    }

    /// Returns what its numbers are called: `UID`, `GID`.
    #[must_use]
    pub fn number_name(self) -> &'static str {
        match self {
            Self::User => "UID",
            Self::Group => "GID",
        }
    }
}

/// A number that meant a user or group in the former image, and does not any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedNumber {
    pub kind: AccountKind,
    pub number: u32,
    /// Who has the number in the former image.
    pub former: String,
    /// Who has it in the new image.
    pub now: Option<String>,
    /// The number in the new image of who had it; `None` if that user or group is gone.
    pub moved_to: Option<u32>,
}

/// Reads `/etc/passwd` or `/etc/group`: the name is the first field, its number the third. Of lines
/// with one name the first counts.
#[must_use]
pub fn ids(text: &str) -> BTreeMap<String, u32> {
    let id = |line: &str| {
        let mut fields = line.split(':');
        Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
    };
    // The last of equal keys stays.
    text.lines().rev().filter_map(id).collect()
}

impl Accounts {
    /// Returns the numbers of `former` that do not mean the same any more, of users and then of
    /// groups, by name. A user or group that is gone counts only if another has its number.
    #[must_use]
    pub fn changed_numbers(&self, former: &Self) -> Vec<ChangedNumber> {
        let kinds = [
            (AccountKind::User, &former.users, &self.users),
            (AccountKind::Group, &former.groups, &self.groups),
        ];
        let mut changes = Vec::new();
        for (kind, before, after) in kinds {
            // Of several with one number the first by name stays.
            let holders: BTreeMap<u32, &String> =
                after.iter().rev().map(|(name, number)| (*number, name)).collect();
            for (name, &number) in before {
                let moved_to = after.get(name).copied();
                let now = holders.get(&number).copied();
                let is_changed = match moved_to {
                    Some(new) => new != number,
                    None => now.is_some_and(|now| before.get(now) != Some(&number)),
                };
                if is_changed {
                    let (former, now) = (name.clone(), now.cloned());
                    changes.push(ChangedNumber { kind, number, former, now, moved_to });
                }
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_mean_something_else_are_found() {
        #[rustfmt::skip]
        let table = [
            ("", "", ""),
            ("root:x:0:\nredis:x:101:", "root:x:0:\nredis:x:101:\nnew:x:102:", ""),
            ("redis:x:101:", "redis:x:102:", "redis 101 was redis, is -, moved to 102"),
            ("a:x:1:\nb:x:2:", "a:x:2:\nb:x:1:",
             "a 1 was a, is b, moved to 2; b 2 was b, is a, moved to 1"),
            // One who is gone leaves its number to another, or to nobody.
            ("postfix:x:105:", "redis:x:105:", "postfix 105 was postfix, is redis, moved to -"),
            ("postfix:x:105:", "redis:x:106:", ""),
            // Two names of one number.
            ("root:x:0:\ntoor:x:0:", "root:x:0:", ""),
            ("root:x:0:\ntoor:x:0:", "root:x:0:\ntoor:x:5:", "toor 0 was toor, is root, moved to 5"),
            ("a:x:1:", "b:x:1:\nc:x:1:", "a 1 was a, is b, moved to -"),
            // An image without the file says nothing.
            ("a:x:1:", "", ""), ("", "a:x:1:", ""),
        ];
        for (before, after, expected) in table {
            let of = |text| Accounts { users: ids(text), ..Accounts::default() };
            let changes = of(after).changed_numbers(&of(before));
            let told = |change: &ChangedNumber| {
                let ChangedNumber { number, former, now, moved_to, .. } = change;
                let now = now.as_deref().unwrap_or("-");
                let moved = moved_to.map_or("-".to_owned(), |number| number.to_string());
                format!("{former} {number} was {former}, is {now}, moved to {moved}")
            };
            let told: Vec<String> = changes.iter().map(told).collect();
            assert_eq!(told.join("; "), expected, "{before:?} to {after:?}");
            let groups = |text| Accounts { groups: ids(text), ..Accounts::default() };
            let of_groups = groups(after).changed_numbers(&groups(before));
            assert!(of_groups.iter().all(|change| change.kind == AccountKind::Group));
            assert_eq!(of_groups.len(), changes.len());
        }
    }

    #[test]
    fn of_equal_names_the_first_counts_as_for_the_machine() {
        let text = "no\n:x\na:b:c:\n+::\nok:x:7\nok:x:8";
        assert_eq!(ids(text), BTreeMap::from([("ok".into(), 7)]));
    }
}
