//! Resource files: what must be there, made by which kind of plugin, after what.
//!
//! ```json
//! {"id": "foodb", "kind": "postgres", "needs": ["net0"], "requires": {"net": ">=1"},
//!  "provides": {"sql": "15.2"}, "spec": {"size_gib": 10}, "on_removal": "destroy",
//!  "sensitive": ["password"]}
//! ```

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use model::display::safe_text;
use model::json::{self, KeyError};
use model::names::{check_account, check_name};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::version::{Range, Version};

/// The longest resource file, in bytes.
pub const FILE_BYTES_MAX: usize = 64 << 10;

/// The most resources of one directory.
pub const RESOURCES_MAX: usize = 1_000;

/// The longest list in a resource file.
const LIST_MAX: usize = 256;

/// How deep arrays and objects of a specification, and of outputs, may lie in each other. What is
/// read must also be readable as part of the state, and readers of JSON have a limit.
const DEPTH_MAX: usize = 32;

/// A resource, as its file states it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a resource")]
pub struct Resource {
    /// Names the resource for ever: another one is another resource.
    #[serde(deserialize_with = "name")]
    pub id: String,
    /// What it is, and so which plugin makes it.
    #[serde(deserialize_with = "name")]
    pub kind: String,
    /// The resources that must be there first, and whose outputs its plugin gets.
    #[serde(default, deserialize_with = "names")]
    pub needs: Vec<String>,
    /// What it is to others, in which version.
    #[serde(default, deserialize_with = "versions")]
    pub provides: BTreeMap<String, Version>,
    /// What others must provide, in which versions.
    #[serde(default, deserialize_with = "versions")]
    pub requires: BTreeMap<String, Range>,
    /// What only its plugin understands.
    #[serde(default, deserialize_with = "specification")]
    pub spec: Map<String, Value>,
    #[serde(default)]
    pub on_removal: OnRemoval,
    #[serde(default)]
    pub on_drift: OnDrift,
    #[serde(default)]
    pub per: Per,
    /// Names of outputs that are secret.
    #[serde(default, deserialize_with = "list")]
    pub sensitive: Vec<String>,
    /// The user to whom the file with its outputs belongs; root if it is not said.
    #[serde(default, deserialize_with = "user", skip_serializing_if = "Option::is_none")]
    pub reader: Option<String>,
}

/// What happens to a resource that no file asks for any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnRemoval {
    /// It stays, and is listed as an orphan.
    #[default]
    Keep,
    /// Its plugin destroys it.
    Destroy,
}

/// What happens when a resource is not as it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnDrift {
    #[default]
    Report,
    Repair,
}

/// How many there are of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Per {
    /// One for each machine that asks for it.
    #[default]
    Machine,
    /// One for all machines together.
    Fleet,
}

impl Resource {
    /// Reads a resource file; lines that start with `#` or `//` are comments.
    ///
    /// # Errors
    ///
    /// [`KeyError`] names the key.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        if text.len() > FILE_BYTES_MAX {
            let problem = format!("has more than {FILE_BYTES_MAX} bytes");
            return Err(KeyError::new("file", problem));
        }
        json::read_object(&json::without_comments(text))
    }

    /// Returns the digest (SHA-256, in hexadecimal) of the scope, the id and the inputs of the
    /// resource. Inputs are the kind, the specification, what it provides, and the names of what
    /// it needs. If anything else changes, such as outputs of others or `on_removal`, the key stays
    /// and nothing is started.
    #[must_use]
    pub fn key(&self, machine: &str) -> String {
        let mut needs: Vec<&String> = self.needs.iter().collect();
        needs.sort_unstable();
        let inputs = json!({
            "kind": self.kind, "needs": needs, "provides": self.provides, "spec": self.spec,
        });
        key(machine, self, &inputs)
    }

    /// Returns the key of its destruction.
    #[must_use]
    pub fn removal_key(&self, machine: &str) -> String {
        key(machine, self, &Value::Null)
    }

    /// Returns `outputs` without those that are secret.
    #[must_use]
    pub fn plain_outputs(&self, outputs: &Map<String, Value>) -> Map<String, Value> {
        let plain = outputs.iter().filter(|(name, _)| !self.sensitive.contains(name));
        plain.map(|(name, value)| (name.clone(), value.clone())).collect()
    }
}

fn key(machine: &str, resource: &Resource, inputs: &Value) -> String {
    let scope = match resource.per {
        Per::Machine => json!({"machine": machine}),
        Per::Fleet => json!("fleet"),
    };
    digest(&json!({"scope": scope, "id": resource.id, "inputs": inputs}))
}

/// Returns the digest of a value.
pub(crate) fn digest(value: &Value) -> String {
    HEXLOWER.encode(&Sha256::digest(json::canonical(value)))
}

/// The resources of one directory, by id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resources {
    by_id: BTreeMap<String, Resource>,
    files: BTreeMap<String, String>,
}

/// A file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}")]
pub struct FileError {
    pub file: String,
    pub source: KeyError,
}

impl Resources {
    /// Reads files, each with its name.
    ///
    /// # Errors
    ///
    /// [`FileError`] names the file and the key.
    pub fn parse<'a>(
        files: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, FileError> {
        let mut resources = Self::default();
        for (file, text) in files {
            let failed = |source| FileError { file: file.to_owned(), source };
            let resource = Resource::parse(text).map_err(failed)?;
            if let Some(other) = resources.files.insert(resource.id.clone(), file.to_owned()) {
                let problem = format!("`{}` is the id of a resource in {other} too", resource.id);
                return Err(failed(KeyError::new("id", problem)));
            }
            resources.by_id.insert(resource.id.clone(), resource);
            if resources.by_id.len() > RESOURCES_MAX {
                let problem = format!("there are more than {RESOURCES_MAX} resources");
                return Err(failed(KeyError::new("file", problem)));
            }
        }
        Ok(resources)
    }

    /// Returns the resource of that id.
    #[must_use]
    pub fn get(&self, id: &str) -> Option<&Resource> {
        self.by_id.get(id)
    }

    /// Returns all resources, by id.
    pub fn iter(&self) -> impl Iterator<Item = &Resource> {
        self.by_id.values()
    }

    /// Returns the name of the file that states the resource.
    #[must_use]
    pub fn file(&self, id: &str) -> &str {
        self.files.get(id).map_or("", String::as_str)
    }
}

/// Checks that a value, one level below `depth`, is not too deep to be kept.
pub(crate) fn check_depth(value: &Value) -> Result<(), String> {
    fn is_deeper(value: &Value, levels: usize) -> bool {
        match value {
            Value::Object(fields) => {
                levels == 0 || fields.values().any(|value| is_deeper(value, levels - 1))
            }
            Value::Array(items) => {
                levels == 0 || items.iter().any(|item| is_deeper(item, levels - 1))
            }
            _ => false,
        }
    }
    match is_deeper(value, DEPTH_MAX) {
        true => Err(format!("lies more than {DEPTH_MAX} levels deep")),
        false => Ok(()),
    }
}

pub(crate) fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    check_name(&name).map(|()| name).map_err(D::Error::custom)
}

pub(crate) fn names<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let names = list(from)?;
    names.iter().try_for_each(|name| check_name(name)).map_err(D::Error::custom)?;
    Ok(names)
}

fn user<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let user = String::deserialize(from)?;
    check_account(&user).map(|()| Some(user)).map_err(D::Error::custom)
}

fn list<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let list = Vec::<String>::deserialize(from)?;
    let twice = list.iter().enumerate().find(|(index, name)| list[..*index].contains(name));
    match twice {
        Some((_, name)) => {
            Err(D::Error::custom(format!("`{}` is there twice", safe_text(name, 80))))
        }
        None if list.len() > LIST_MAX => {
            Err(D::Error::custom(format!("has more than {LIST_MAX} entries")))
        }
        None => Ok(list),
    }
}

fn versions<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<BTreeMap<String, T>, D::Error> {
    let versions = BTreeMap::<String, T>::deserialize(from)?;
    versions.keys().try_for_each(|name| check_name(name)).map_err(D::Error::custom)?;
    if versions.len() > LIST_MAX {
        return Err(D::Error::custom(format!("has more than {LIST_MAX} entries")));
    }
    Ok(versions)
}

fn specification<'de, D: Deserializer<'de>>(from: D) -> Result<Map<String, Value>, D::Error> {
    let spec = Map::<String, Value>::deserialize(from)?;
    spec.values().try_for_each(check_depth).map_err(D::Error::custom)?;
    Ok(spec)
}
