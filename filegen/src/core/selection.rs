//! Chooses a file of a directory for a machine, by what its record says.
// tidy: core

use core::fmt;
use core::str::FromStr;
use std::collections::BTreeMap;

use model::mdb::Machine;

/// The file that is chosen if no other is.
pub const DEFAULT: &str = "*";

/// The part of a machine's record that chooses its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    Hostname,
    Location,
    /// The value of the tag with this name.
    Tag(String),
}

/// A text that names no selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected \"Location\", \"Hostname\" or \"Tags.NAME\"")]
pub struct SelectorError;

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        match (text, text.strip_prefix("Tags.")) {
            ("Hostname", _) => Ok(Self::Hostname),
            ("Location", _) => Ok(Self::Location),
            (_, Some(tag)) if !tag.is_empty() => Ok(Self::Tag(tag.to_owned())),
            _ => Err(SelectorError),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hostname => formatter.write_str("Hostname"),
            Self::Location => formatter.write_str("Location"),
            Self::Tag(tag) => write!(formatter, "Tags.{tag}"),
        }
    }
}

/// Why no file is chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectionError {
    #[error("{selector} is `{value}`, which is no path below the directory")]
    Value { selector: Selector, value: String },
    #[error("the directory has no file for {selector} `{value}`, and none called `{DEFAULT}`")]
    None { selector: Selector, value: String },
}

impl Selector {
    fn value<'a>(&self, machine: &'a Machine) -> &'a str {
        match self {
            Self::Hostname => &machine.hostname,
            Self::Location => &machine.location,
            Self::Tag(tag) => machine.tags.get(tag).map_or("", String::as_str),
        }
    }

    /// Returns the file of `files`, by their paths below the directory, that `machine` gets. For
    /// the value `a/b/c` that is the first one of `a/b/c`, `a/b`, `a` and `*`; without a value `*`.
    ///
    /// # Errors
    ///
    /// [`SelectionError`] if `files` has no such file, or if the value is not a relative path of
    /// plain names: a faulty record must not get the file for all others.
    pub fn choose<'a, T>(
        &self,
        files: &'a BTreeMap<String, T>,
        machine: &Machine,
    ) -> Result<&'a T, SelectionError> {
        let value = self.value(machine);
        let is_plain = |name: &str| !matches!(name, "" | "." | "..") && !name.contains('\0');
        if !value.is_empty() && !value.split('/').all(is_plain) {
            let (selector, value) = (self.clone(), model::escape::escape(value.as_bytes()));
            return Err(SelectionError::Value { selector, value });
        }
        let mut path = Some(value).filter(|value| !value.is_empty());
        while let Some(tried) = path {
            if let Some(file) = files.get(tried) {
                return Ok(file);
            }
            path = tried.rsplit_once('/').map(|(parent, _)| parent);
        }
        let none = || SelectionError::None { selector: self.clone(), value: value.to_owned() };
        files.get(DEFAULT).ok_or_else(none)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(location: &str) -> Machine {
        let tags = [("zone".to_owned(), "a/b".to_owned())].into();
        Machine { hostname: "web1".into(), location: location.into(), tags, ..Machine::default() }
    }

    #[test]
    fn the_longest_path_with_a_file_is_chosen() {
        let files = |names: &[&str]| -> BTreeMap<String, String> {
            names.iter().map(|name| ((*name).to_owned(), (*name).to_owned())).collect()
        };
        #[rustfmt::skip]
        let table = [
            ("Location",    "a/b/c", "a/b/c a/b a *", Ok("a/b/c")),
            ("Location",    "a/b/c", "a/b a *",       Ok("a/b")),
            ("Location",    "a/b/c", "a *",           Ok("a")),
            ("Location",    "a/b/c", "b c *",         Ok("*")),
            ("Location",    "",      "a *",           Ok("*")),
            ("Hostname",    "a",     "web1 *",        Ok("web1")),
            ("Tags.zone",   "",      "a *",           Ok("a")),
            ("Tags.absent", "a",     "a *",           Ok("*")),
            ("Location",    "a/b",   "c",
             Err("the directory has no file for Location `a/b`, and none called `*`")),
            ("Location",    "../a",  "a *",
             Err("Location is `../a`, which is no path below the directory")),
            ("Location",    "a/../b", "a *",
             Err("Location is `a/../b`, which is no path below the directory")),
            ("Location",    "/etc/passwd", "a *",
             Err("Location is `/etc/passwd`, which is no path below the directory")),
            ("Location",    "a//b",  "a *",
             Err("Location is `a//b`, which is no path below the directory")),
            ("Location",    "a\0",   "a *",
             Err("Location is `a\\x00`, which is no path below the directory")),
        ];
        for (selector, location, names, expected) in table {
            let selector: Selector = selector.parse().unwrap();
            let files = files(&names.split(' ').collect::<Vec<_>>());
            let got = selector.choose(&files, &machine(location));
            let got = got.map(String::as_str).map_err(|error| error.to_string());
            assert_eq!(got, expected.map_err(str::to_owned), "{selector} {location} {names}");
        }
    }

    #[test]
    fn selectors_are_named_as_in_the_machine_database() {
        for text in ["Hostname", "Location", "Tags.a", "Tags.a.b"] {
            assert_eq!(text.parse::<Selector>().unwrap().to_string(), text);
        }
        for text in ["", "location", "Tags", "Tags.", "RequiredImage"] {
            assert_eq!(text.parse::<Selector>(), Err(SelectorError), "{text}");
        }
    }
}
