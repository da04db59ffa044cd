//! Which machines are meant by what operators write: names and patterns of hosts, and locations.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};

use api::dominator::orders::PATTERNS_MAX;
use globset::{Glob, GlobSet, GlobSetBuilder};

/// Patterns of host names.
#[derive(Clone, Debug)]
pub struct HostPatterns(GlobSet);

impl HostPatterns {
    /// Reads them; `None` if there are none, and nothing is asked for.
    ///
    /// # Errors
    ///
    /// If one is no pattern.
    pub fn new(patterns: &[String]) -> Result<Option<Self>, globset::Error> {
        if patterns.is_empty() {
            return Ok(None);
        }
        let mut globs = GlobSetBuilder::new();
        for pattern in patterns {
            globs.add(Glob::new(pattern)?);
        }
        globs.build().map(|globs| Some(Self(globs)))
    }

    /// True if one of them means this machine.
    #[must_use]
    pub fn is_match(&self, hostname: &str) -> bool {
        self.0.is_match(hostname)
    }
}

/// Why names and patterns mean no machines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostsError {
    /// No machine is named, or too many are.
    #[error("name 1 to {PATTERNS_MAX} machines or patterns")]
    Count,
    /// Something is no pattern.
    #[error("`{pattern}` is no pattern of host names: {why}")]
    Pattern {
        /// What was given.
        pattern: String,
        /// What is wrong with it.
        why: String,
    },
    /// A name or pattern means no machine.
    #[error("no machine of the machine database is called {pattern}")]
    Nobody {
        /// What was given.
        pattern: String,
    },
}

/// The machines of `known`, sorted, that `hosts` mean. A name comes before a pattern.
///
/// # Errors
///
/// [`HostsError`] if one of them is no pattern, or means no machine.
pub fn hosts_of<V>(
    hosts: &[String],
    known: &BTreeMap<String, V>,
) -> Result<Vec<String>, HostsError> {
    if hosts.is_empty() || hosts.len() > PATTERNS_MAX {
        return Err(HostsError::Count);
    }
    let mut chosen = BTreeSet::new();
    for pattern in hosts {
        if known.contains_key(pattern) {
            chosen.insert(pattern.clone());
            continue;
        }
        let glob = Glob::new(pattern).map_err(|error| HostsError::Pattern {
            pattern: pattern.clone(),
            why: error.kind().to_string(),
        })?;
        let glob = glob.compile_matcher();
        let mut meant = known.keys().filter(|hostname| glob.is_match(hostname.as_str())).peekable();
        if meant.peek().is_none() {
            return Err(HostsError::Nobody { pattern: pattern.clone() });
        }
        chosen.extend(meant.cloned());
    }
    Ok(chosen.into_iter().collect())
}

/// A location, or the name of an image, without slashes at its ends, which mean nothing.
#[must_use]
pub fn trimmed(path: &str) -> &str {
    path.trim_matches('/')
}

/// True if `path` is `wanted` or below it, slashes at their ends aside; nothing is below an empty
/// one.
#[must_use]
pub fn is_within(path: &str, wanted: &str) -> bool {
    let (path, wanted) = (trimmed(path), trimmed(wanted));
    path.strip_prefix(wanted)
        .is_some_and(|rest| !wanted.is_empty() && (rest.is_empty() || rest.starts_with('/')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn names_come_before_patterns_and_each_must_mean_a_machine() {
        let known = texts(&["db1", "web*", "web1", "web2"]);
        let known: BTreeMap<String, ()> = known.into_iter().map(|host| (host, ())).collect();
        let hosts = |hosts: &[&str]| hosts_of(&texts(hosts), &known);
        let nobody = |pattern: &str| Err(HostsError::Nobody { pattern: pattern.to_owned() });
        let chosen = |hosts: &[&str]| Ok(texts(hosts));
        assert_eq!(hosts(&["web1"]), chosen(&["web1"]));
        assert_eq!(hosts(&["web?", "web1", "db1"]), chosen(&["db1", "web*", "web1", "web2"]));
        // It is the name of a machine.
        assert_eq!(hosts(&["web*"]), chosen(&["web*"]));
        assert_eq!(hosts(&["web1", "mail"]), nobody("mail"));
        assert_eq!(hosts(&["mail*"]), nobody("mail*"));
        assert_eq!(hosts(&[]), Err(HostsError::Count));
        assert!(matches!(hosts(&["web["]), Err(HostsError::Pattern { .. })));
    }

    #[test]
    fn no_patterns_are_none_and_each_of_several_is_enough() {
        assert!(HostPatterns::new(&[]).unwrap().is_none());
        assert!(HostPatterns::new(&texts(&["web["])).is_err());
        let patterns = HostPatterns::new(&texts(&["web?", "db[12]", "{mail,dns}"])).unwrap();
        let patterns = patterns.unwrap();
        let table =
            [("web1", true), ("web10", false), ("db2", true), ("db3", false), ("dns", true)];
        for (hostname, expected) in table {
            assert_eq!(patterns.is_match(hostname), expected, "{hostname}");
        }
    }

    #[test]
    fn paths_end_at_slashes() {
        let table = [
            ("nyc", "nyc", true),
            ("nyc/r1", "nyc", true),
            ("/nyc/r1/", "/nyc/", true),
            ("nyc2", "nyc", false),
            ("", "nyc", false),
            ("nyc", "", false),
            ("", "", false),
            ("", "/", false),
        ];
        for (path, wanted, expected) in table {
            assert_eq!(is_within(path, wanted), expected, "{path} in {wanted}");
        }
    }
}
