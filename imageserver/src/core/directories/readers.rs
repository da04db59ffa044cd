//! The machines that may read the private images below a directory: its access list.
//!
//! A list has patterns of host names, and applies to all that is below its directory. Lists are
//! part of the directories, and so of their version.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use api::access::identity::matches;
use api::image_server::private::READERS_BYTES_MAX;
use model::image::ImageName;
use model::tree::Time;

use super::{Directories, DirectoryError, above};

/// The longest pattern, in bytes.
const PATTERN_BYTES_MAX: usize = 255;

/// Why an access list is not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadersError {
    #[error(
        "`{pattern}` is no host name of a machine: it has letters, digits, `.`, `-` and `_`, and \
         `*` for any of them"
    )]
    Pattern {
        /// The pattern, escaped.
        pattern: String,
    },
    #[error("the machines of directory {directory} do not include `{pattern}`")]
    Absent { directory: ImageName, pattern: String },
    #[error(
        "the names of all machines of directory {directory} have at most {READERS_BYTES_MAX} bytes \
         together: name many at once, such as `web*`"
    )]
    TooLong { directory: ImageName },
}

/// Refuses a pattern that is no host name, apart from stars.
pub fn verify(pattern: &str) -> Result<(), ReadersError> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_*".contains(&byte);
    if (1..=PATTERN_BYTES_MAX).contains(&pattern.len()) && pattern.bytes().all(is_allowed) {
        return Ok(());
    }
    let pattern = model::escape::escape(&pattern.as_bytes()[..pattern.len().min(64)]);
    Err(ReadersError::Pattern { pattern })
}

impl Directories {
    /// Returns true if the list of `directory`, or of one above it, has the machine.
    #[must_use]
    pub fn has_reader(&self, directory: &ImageName, machine: &str) -> bool {
        let is_in = |name: &ImageName| {
            self.machines_of(name).any(|one| matches(one.as_bytes(), machine.as_bytes()))
        };
        is_in(directory) || above(directory).iter().any(is_in)
    }

    fn machines_of(&self, directory: &ImageName) -> impl Iterator<Item = &String> {
        self.made.get(directory).into_iter().flat_map(|made| &made.machines)
    }

    /// Returns the list of each directory that has one.
    #[must_use]
    pub fn readers(&self) -> BTreeMap<ImageName, BTreeSet<String>> {
        let lists = self.made.iter().filter(|(_, made)| !made.machines.is_empty());
        lists.map(|(name, made)| (name.clone(), made.machines.clone())).collect()
    }

    /// Replaces all lists. Those of directories that were not made are left out.
    pub fn set_readers(&mut self, mut lists: BTreeMap<ImageName, BTreeSet<String>>) {
        for (name, made) in &mut self.made {
            made.machines = lists.remove(name).unwrap_or_default();
        }
    }

    /// Removes and adds machines of `name`, and returns its list. A directory that exists only by
    /// its content is made.
    pub fn change_readers(
        &mut self,
        name: &ImageName,
        (add, remove): (BTreeSet<String>, &BTreeSet<String>),
        now: Time,
        has_images: impl Fn(&ImageName) -> bool,
    ) -> Result<BTreeSet<String>, DirectoryError> {
        add.iter().try_for_each(|pattern| verify(pattern))?;
        let mut machines: BTreeSet<String> = self.machines_of(name).cloned().collect();
        if !self.is_there(name, has_images) {
            return Err(DirectoryError::NotFound { name: name.clone() });
        }
        for pattern in remove {
            if !machines.remove(pattern) {
                let (directory, pattern) =
                    (name.clone(), model::escape::escape(pattern.as_bytes()));
                return Err(ReadersError::Absent { directory, pattern }.into());
            }
        }
        machines.extend(add);
        if machines.iter().map(String::len).sum::<usize>() > READERS_BYTES_MAX {
            return Err(ReadersError::TooLong { directory: name.clone() }.into());
        }
        if !self.made.contains_key(name) {
            self.make(name, vec![name.clone()], None, now)?;
        }
        let made = self.made.get_mut(name).expect("it was made");
        made.machines.clone_from(&machines);
        Ok(machines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> ImageName {
        ImageName::new(text).unwrap()
    }

    fn set(machines: &[&str]) -> BTreeSet<String> {
        machines.iter().map(|&machine| machine.to_owned()).collect()
    }

    type Changed<'text> = Result<BTreeSet<String>, &'text str>;

    fn change(
        directories: &mut Directories,
        directory: &str,
        add: &[&str],
        remove: &[&str],
    ) -> Result<BTreeSet<String>, String> {
        let (name, lists) = (name(directory), (set(add), &set(remove)));
        let has_images = |one: &ImageName| one.as_str() == "images";
        let done = directories.change_readers(&name, lists, Time::default(), has_images);
        done.map_err(|error| error.to_string())
    }

    #[test]
    fn lists_are_changed_as_a_whole_or_not_at_all() {
        let mut directories = Directories::default();
        directories.make(&name("db"), vec![name("db")], None, Time::default()).unwrap();
        let long: Vec<String> = (0..300).map(|one| format!("{one:0>250}")).collect();
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        #[rustfmt::skip]
        let table: [(&str, &[&str], &[&str], Changed<'_>); 9] = [
            ("none", &["db1"], &[], Err("there is no directory none")),
            ("db", &["db1", "web*.example.org"], &[], Ok(set(&["db1", "web*.example.org"]))),
            ("db", &["db1"], &[], Ok(set(&["db1", "web*.example.org"]))),
            ("db", &["db2"], &["db1"], Ok(set(&["db2", "web*.example.org"]))),
            ("db", &["db3"], &["db1"], Err("the machines of directory db do not include `db1`")),
            ("db", &["a b"], &[], Err("`a b` is no host name of a machine: it has letters, digits, \
                                       `.`, `-` and `_`, and `*` for any of them")),
            ("db", &[""], &[], Err("`` is no host name of a machine: it has letters, digits, `.`, \
                                    `-` and `_`, and `*` for any of them")),
            ("db", &long, &[], Err("the names of all machines of directory db have at most 65536 \
                                    bytes together: name many at once, such as `web*`")),
            ("images", &["*"], &[], Ok(set(&["*"]))),
        ];
        for (directory, add, remove, expected) in table {
            let got = change(&mut directories, directory, add, remove);
            assert_eq!(got, expected.map_err(str::to_owned), "{directory} {add:?} {remove:?}");
        }
        let lists = directories.readers();
        let expected = [("db", set(&["db2", "web*.example.org"])), ("images", set(&["*"]))];
        assert_eq!(lists, expected.map(|(directory, list)| (name(directory), list)).into());
    }

    #[test]
    fn a_list_applies_to_all_below_its_directory_and_to_nothing_else() {
        let mut directories = Directories::default();
        for directory in ["db", "db/prod/x"] {
            let made = name(directory);
            directories.make(&made, vec![made.clone()], None, Time::default()).unwrap();
        }
        change(&mut directories, "db", &["db*"], &[]).unwrap();
        change(&mut directories, "db/prod/x", &["web1"], &[]).unwrap();
        #[rustfmt::skip]
        let table = [
            ("db",        "db1",  true),  ("db/prod",     "db1",  true), ("db/prod/x", "db1", true),
            ("db-2",      "db1",  false), ("db",          "web1", false), ("db/prod",  "web1", false),
            ("db/prod/x", "web1", true),  ("db/prod/x/y", "web1", true),
            ("db/prod/x", "web2", false), ("db/prod/x",   "xdb1", false),
        ];
        for (directory, machine, expected) in table {
            let got = directories.has_reader(&name(directory), machine);
            assert_eq!(got, expected, "{directory} {machine}");
        }
    }
}
