//! The generators in force, with all that they make files from.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use api::file_generator::{CONTENT_BYTES_MAX, Generator};
use certs::register::Register;
use minijinja::value::Serde;
use minijinja::{Value, context};
use model::mdb::Machine;
use model::object::{Algorithm, Hasher, ObjectId};
use model::path::TreePath;
use tokio::sync::Semaphore;

use super::core::certificates::{CertificateSettings, PairPart};
use super::core::contents::Content;
use super::core::selection::Selector;
use super::core::settings::{Definition, Kind, Url};
use super::core::templates::Template;
use super::outside::Program;
use super::revisions::Kept;

/// A machine that files are made for. Its record is converted once for all files.
#[derive(Debug)]
pub struct Subject {
    pub machine: Machine,
    /// The outputs of its resources, as JSON; empty if it has none.
    outputs: String,
    value: OnceCell<Value>,
    json: OnceCell<Arc<[u8]>>,
}

impl Subject {
    #[must_use]
    pub fn new(machine: Machine, outputs: String) -> Self {
        Self { machine, outputs, value: OnceCell::new(), json: OnceCell::new() }
    }

    /// Returns the record for templates, with the outputs of resources.
    fn value(&self) -> &Value {
        self.value.get_or_init(|| {
            let outputs = serde_json::from_str(&self.outputs);
            let outputs: serde_json::Map<String, serde_json::Value> = outputs.unwrap_or_default();
            let record = Value::from(Serde(&self.machine));
            context! { Resources => Value::from(Serde(outputs)), ..record }
        })
    }

    /// Returns the record as indented JSON that ends with a line feed.
    pub fn json(&self) -> &Arc<[u8]> {
        self.json.get_or_init(|| {
            let json = serde_json::to_vec_pretty(&self.machine);
            let mut json = json.expect("machines can be encoded");
            json.push(b'\n');
            json.into()
        })
    }
}

/// What makes a file.
#[derive(Debug)]
pub enum Maker {
    Fixed(Arc<Content>),
    /// One of the files of a directory, by their paths in it.
    Chosen {
        by: Selector,
        files: BTreeMap<String, Arc<Content>>,
    },
    Template(Template),
    Mdb,
    /// A certificate or its key, which is made once and kept.
    Pair(Arc<PairIssuer>, PairPart),
    /// What takes long, fails, and gives content that ends.
    Outside(Outside, Arc<Semaphore>),
}

/// Makes certificates with their keys.
#[derive(Debug)]
pub struct PairIssuer {
    pub settings: Arc<CertificateSettings>,
    pub register: Register,
    /// The digest of the settings and the authority.
    pub loaded: ObjectId,
}

/// What is outside of this program.
#[derive(Clone, Debug)]
pub enum Outside {
    Program(Program),
    Url(Url),
}

/// A generator in force.
#[derive(Debug)]
pub struct LoadedGenerator {
    pub definition: Definition,
    pub maker: Maker,
    /// The digest of its definition and of all that it makes files from.
    pub version: ObjectId,
}

impl LoadedGenerator {
    /// Makes the file for a machine; `None` if that is done outside, or if it is of a pair.
    pub fn make(&self, subject: &Subject) -> Option<Result<Arc<Content>, String>> {
        let made = match &self.maker {
            Maker::Fixed(content) => Ok(Arc::clone(content)),
            Maker::Chosen { by, files } => {
                by.choose(files, &subject.machine).cloned().map_err(|error| error.to_string())
            }
            Maker::Template(template) => match template.render(subject.value()) {
                Ok(text) => Ok(Content::new(text.into_bytes())),
                // The error may name values.
                Err(error) if self.definition.is_secret => {
                    Err(format!("the template fails in line {}", error.line))
                }
                Err(error) => Err(format!("the template fails: {error}")),
            },
            Maker::Mdb => Ok(Content::new(&**subject.json())),
            Maker::Outside(..) | Maker::Pair(..) => return None,
        };
        Some(made.and_then(|content| self.check(content)))
    }

    /// Returns `content` if a machine may get it.
    pub fn check(&self, content: Arc<Content>) -> Result<Arc<Content>, String> {
        match content.bytes.len() {
            0 if !self.definition.allow_empty => {
                Err("the content is empty; if that is meant, set allow_empty = true".to_owned())
            }
            length if length > CONTENT_BYTES_MAX => {
                Err(format!("the content has {length} bytes; {CONTENT_BYTES_MAX} are allowed"))
            }
            _ => Ok(content),
        }
    }
}

/// Computes the version of a generator.
pub struct VersionHasher(Hasher);

impl VersionHasher {
    /// Starts with all of `definition` that decides what is made. Files count by what is in them.
    #[must_use]
    pub fn new(definition: &Definition) -> Self {
        let mut hasher = Self(Hasher::new(Algorithm::Blake3));
        let Definition { path, kind, is_secret, allow_empty: _, line: _ } = definition;
        hasher.add(path.as_bytes());
        hasher.add(kind.name().as_bytes());
        hasher.add(&[u8::from(*is_secret)]);
        match kind {
            Kind::File { .. } | Kind::Template { .. } | Kind::Mdb => {}
            Kind::Directory { by, .. } => hasher.add(by.to_string().as_bytes()),
            Kind::Program(program) => {
                program.arguments.iter().for_each(|argument| hasher.add(argument.as_bytes()));
                hasher.add(program.user.as_deref().unwrap_or_default().as_bytes());
            }
            Kind::Certificate(settings, _) => hasher.add(settings.said().as_bytes()),
            Kind::Url(url) => {
                hasher.add(url.address.to_string().as_bytes());
                hasher.add(url.address.target.as_bytes());
            }
        }
        hasher
    }

    /// Adds a value, so that no two lists of values are equal.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    #[must_use]
    pub fn finish(&self) -> ObjectId {
        self.0.finish()
    }
}

/// All generators in force: one configuration with all of its files.
#[derive(Clone, Debug, Default)]
pub struct GeneratorSet {
    pub by_path: BTreeMap<TreePath, Arc<LoadedGenerator>>,
    /// The configuration file.
    pub file: PathBuf,
    /// How often certificates were to be made anew.
    pub renewals: u64,
}

impl GeneratorSet {
    /// Returns the same generators. Those of certificates, which were to be made anew so often,
    /// have another version than before.
    #[must_use]
    pub fn renewed(&self, renewals: u64) -> Self {
        let renewed = |generator: &Arc<LoadedGenerator>| match &generator.maker {
            Maker::Pair(issuer, part) if renewals > 0 => {
                let (definition, issuer) = (generator.definition.clone(), Arc::clone(issuer));
                let version = format!("{} {renewals}", issuer.loaded);
                let version = Algorithm::Blake3.digest(version.as_bytes());
                Arc::new(LoadedGenerator { definition, maker: Maker::Pair(issuer, *part), version })
            }
            _ => Arc::clone(generator),
        };
        let by_path = self.by_path.iter();
        let by_path = by_path.map(|(path, generator)| (path.clone(), renewed(generator))).collect();
        Self { by_path, file: self.file.clone(), renewals }
    }

    /// Returns the version of each generator.
    #[must_use]
    pub fn versions(&self) -> BTreeMap<TreePath, ObjectId> {
        let versions = self.by_path.iter();
        versions.map(|(path, generator)| (path.clone(), generator.version)).collect()
    }

    /// Returns what callers are told, sorted by path. `kept` has the revisions.
    #[must_use]
    pub fn described(&self, kept: &Kept) -> Vec<Generator> {
        let describe = |generator: &Arc<LoadedGenerator>| Generator {
            path: generator.definition.path.clone(),
            kind: generator.definition.kind.name().to_owned(),
            version: generator.version,
            is_secret: generator.definition.is_secret,
            revision: kept
                .generators
                .get(&generator.definition.path)
                .map_or(0, |(_, revision)| *revision),
            resources: match &generator.maker {
                Maker::Template(template) => template.resources(),
                _ => Vec::new(),
            },
        };
        self.by_path.values().map(describe).collect()
    }
}
