//! `provisioners.toml`: which provisioner makes resources of which kinds, and as which user it
//! runs.
//!
//! ```toml
//! [[provisioner]]
//! name = "sql"                    # the plugin dom-provisioner-sql
//! kinds = ["postgres", "mysql"]
//! user = "postgres"
//! timeout_s = 60
//! ```

use std::collections::{BTreeMap, BTreeSet};

use model::display::{line_at, safe_text};
use model::json::KeyError;
use model::names::check_account;
use model::unknown_keys;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use crate::resource;

/// The longest binding file, in bytes.
pub const BINDINGS_BYTES_MAX: usize = 64 << 10;

/// What a plugin's name begins with.
pub const PLUGIN_PREFIX: &str = "dom-provisioner-";

/// A provisioner, and the kinds that are bound to it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Binding {
    /// Its plugin is `dom-provisioner-NAME`.
    #[serde(deserialize_with = "resource::name")]
    pub name: String,
    #[serde(deserialize_with = "resource::names")]
    pub kinds: Vec<String>,
    /// Who runs the plugin.
    #[serde(deserialize_with = "user")]
    pub user: String,
    /// How long one call may take before it is killed.
    #[serde(default = "minute", deserialize_with = "seconds")]
    pub timeout_s: u32,
}

/// The binding file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bindings {
    #[serde(default)]
    provisioner: Vec<Binding>,
}

impl Bindings {
    /// Reads a binding file. A kind that is bound twice is read: the plan tells of it.
    ///
    /// # Errors
    ///
    /// [`KeyError`] says what is wrong, with the line.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        if text.len() > BINDINGS_BYTES_MAX {
            let problem = format!("has more than {BINDINGS_BYTES_MAX} bytes");
            return Err(KeyError::new("file", problem));
        }
        let deserializer =
            toml::Deserializer::parse(text).map_err(|error| toml_error("file", text, &error))?;
        let bindings: Self = serde_path_to_error::deserialize(deserializer).map_err(|error| {
            let path = error.path().to_string();
            toml_error(if path == "." { "file" } else { &path }, text, error.inner())
        })?;
        let mut names = BTreeSet::new();
        for (index, binding) in bindings.provisioner.iter().enumerate() {
            if !names.insert(&binding.name) {
                let at = format!("provisioner[{index}].name");
                let problem = format!("`{}` is the name of another one too", binding.name);
                return Err(KeyError::new(&at, problem));
            }
        }
        Ok(bindings)
    }

    /// Returns the bindings.
    pub fn iter(&self) -> impl Iterator<Item = &Binding> {
        self.provisioner.iter()
    }

    /// Returns the provisioner of a kind; the first, if several are bound.
    #[must_use]
    pub fn of_kind(&self, kind: &str) -> Option<&Binding> {
        self.iter().find(|binding| binding.kinds.iter().any(|bound| bound == kind))
    }

    /// Returns the provisioner of that name.
    #[must_use]
    pub fn of_name(&self, name: &str) -> Option<&Binding> {
        self.iter().find(|binding| binding.name == name)
    }

    /// Returns the kinds that are bound to more than one provisioner, with these.
    #[must_use]
    pub fn bound_twice(&self) -> BTreeMap<&str, Vec<&str>> {
        let mut bound: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for binding in self.iter() {
            for kind in &binding.kinds {
                bound.entry(kind).or_default().push(&binding.name);
            }
        }
        bound.retain(|_, names| names.len() > 1);
        bound
    }
}

/// Says where a TOML text is wrong: the key, what is wrong, and the line.
fn toml_error(at: &str, text: &str, error: &toml::de::Error) -> KeyError {
    let message = error.message();
    let problem = unknown_keys::explain(message).unwrap_or_else(|| safe_text(message, 300));
    let line = line_at(text, error.span().map_or(0, |span| span.start));
    KeyError { at: safe_text(at, 80), problem: format!("{problem} at line {line}") }
}

fn minute() -> u32 {
    60
}

fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let number = u64::deserialize(from)?;
    let fits = u32::try_from(number).ok().filter(|number| (1..=3_600).contains(number));
    fits.ok_or_else(|| D::Error::custom(format!("{number} is not in 1-3600")))
}

fn user<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let user = String::deserialize(from)?;
    check_account(&user).map(|()| user).map_err(D::Error::custom)
}
