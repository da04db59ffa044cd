//! Which machines an environment has.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use globset::{Glob, GlobSet, GlobSetBuilder};
use model::JsonSchema;
use model::json::KeyError;
use model::mdb::{Machine, is_within};
use serde::{Deserialize, Serialize};

/// Selects machines by their records. All that it names must fit; of each, one value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Selector {
    /// Patterns of host names, such as `web*`; empty for any.
    pub hosts: HostPatterns,
    /// Locations; those below them fit too. Empty for any.
    pub locations: Vec<String>,
    /// Tags, each with the values that fit.
    pub tags: BTreeMap<String, Vec<String>>,
}

impl Selector {
    /// True if the machine with this record is selected.
    #[must_use]
    pub fn selects(&self, machine: &Machine) -> bool {
        let has = |(key, values): (&String, &Vec<String>)| {
            machine.tags.get(key).is_some_and(|value| values.contains(value))
        };
        self.tags.iter().all(has)
            && (self.locations.is_empty()
                || self.locations.iter().any(|wanted| is_within(&machine.location, wanted)))
            && self.hosts.fit(&machine.hostname)
    }

    /// Checks that it names something, and that its patterns are valid.
    ///
    /// # Errors
    ///
    /// [`KeyError`] names the key.
    pub fn check(&self, at: &str) -> Result<(), KeyError> {
        if *self == Self::default() {
            let problem = "names nothing; for all machines: {\"hosts\": [\"*\"]}";
            return Err(KeyError::new(at, problem));
        }
        for pattern in &self.hosts.patterns {
            if let Err(error) = Glob::new(pattern) {
                let problem = format!("invalid pattern `{pattern}`: {}", error.kind());
                return Err(KeyError::new(&format!("{at}.hosts"), problem));
            }
        }
        match self.tags.iter().find(|(_, values)| values.is_empty()) {
            Some((key, _)) => {
                Err(KeyError::new(&format!("{at}.tags.{key}"), "has no value: nothing fits"))
            }
            None => Ok(()),
        }
    }
}

/// Patterns of host names.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct HostPatterns {
    patterns: Vec<String>,
    /// Made when it is first asked.
    #[serde(skip)]
    compiled: OnceLock<GlobSet>,
}

impl HostPatterns {
    /// Makes it of patterns.
    #[must_use]
    pub fn new(patterns: Vec<String>) -> Self {
        Self { patterns, compiled: OnceLock::new() }
    }

    /// Returns the patterns.
    #[must_use]
    pub fn patterns(&self) -> &[String] {
        &self.patterns
    }

    fn fit(&self, hostname: &str) -> bool {
        self.patterns.is_empty() || self.compiled().is_match(hostname)
    }

    /// An invalid pattern fits nothing; [`Selector::check`] refuses it.
    fn compiled(&self) -> &GlobSet {
        self.compiled.get_or_init(|| {
            let mut globs = GlobSetBuilder::new();
            for glob in self.patterns.iter().filter_map(|pattern| Glob::new(pattern).ok()) {
                globs.add(glob);
            }
            globs.build().unwrap_or_default()
        })
    }
}

impl PartialEq for HostPatterns {
    fn eq(&self, other: &Self) -> bool {
        self.patterns == other.patterns
    }
}

impl Eq for HostPatterns {}
