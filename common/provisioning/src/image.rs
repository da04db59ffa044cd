//! What an image says of provisioning: its triggers of kind provision, its resource files, its
//! bindings, and the plugins that it brings.

use std::collections::{BTreeMap, BTreeSet};

use model::JsonSchema;
use model::json::KeyError;
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::{Child, Leaf, Tree};
use model::trigger::{Kind, Triggers};
use serde::{Deserialize, Serialize};

use crate::binding::{BINDINGS_BYTES_MAX, Bindings, PLUGIN_PREFIX};
use crate::plan::{Problem, plan};
use crate::resource::{FILE_BYTES_MAX, Per, RESOURCES_MAX, Resources};
use crate::state::State;

/// Where resource files are.
pub const DIRECTORY: &str = "/etc/dominator/resources.d";

/// What the names of resource files end in.
const SUFFIX: &str = ".json";

/// The file that binds kinds to provisioners.
pub const BINDINGS: &str = "/etc/dominator/provisioners.toml";

/// Where plugins are looked up, in an image and on a machine.
pub const PLUGIN_DIRECTORIES: [&str; 4] =
    ["/usr/local/lib/dominator", "/usr/lib/dominator", "/usr/local/bin", "/usr/bin"];

/// The largest plugin that an image may bring, in bytes.
pub const PLUGIN_BYTES_MAX: u64 = 64 << 20;

/// The longest resource file and the longest file of bindings, in bytes.
const TEXT_BYTES_MAX: u64 = FILE_BYTES_MAX as u64;
const _: () = assert!(FILE_BYTES_MAX == BINDINGS_BYTES_MAX);

/// Why an image cannot have its resources.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    #[error("trigger {number} is of kind provision, and matches no file of {DIRECTORY}")]
    NoFile {
        /// Of the trigger, from 1.
        number: usize,
    },
    #[error("trigger {number} (`{name}`) is of kind provision: it can neither reload nor reboot")]
    Acts { number: usize, name: String },
    #[error("{path} has no trigger: one of kind provision that matches it would provision it")]
    NoTrigger { path: TreePath },
    #[error("the image has resources, and no {BINDINGS}")]
    NoBindings,
    #[error("{path} is used to provision, and its content must be the same on all machines")]
    Computed { path: TreePath },
    #[error("{path} is used to provision, and is no regular file")]
    NotRegular { path: TreePath },
    #[error("{path} has more than {limit} bytes")]
    TooLarge { path: TreePath, limit: u64 },
    #[error("the image has more than {RESOURCES_MAX} resources")]
    TooMany,
    #[error("{path} is not text")]
    NotText { path: TreePath },
    #[error("{path}")]
    File {
        path: String,
        #[source]
        source: KeyError,
    },
    #[error("{DIRECTORY}/{file} has the id `{id}`: that of a resource is the name of its file")]
    Id { file: String, id: String },
    #[error("{at}: {error}")]
    Problem { at: String, error: String },
    #[error("{file}: needs: `{id}` is of the fleet, and each machine has a `{need}` of its own")]
    NeedsOfMachine { file: String, id: String, need: String },
    #[error("{path} is a plugin, and {why}")]
    Plugin { path: TreePath, why: &'static str },
}

/// A file of an image that provisioning uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFile {
    pub path: TreePath,
    pub object: ObjectId,
    pub size_bytes: u64,
    pub is_plugin: bool,
}

impl ImageFile {
    /// Returns the most bytes that it may have.
    #[must_use]
    pub fn bytes_max(&self) -> u64 {
        if self.is_plugin { PLUGIN_BYTES_MAX } else { TEXT_BYTES_MAX }
    }
}

/// What an image says of provisioning, as a machine keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// The text of [`BINDINGS`].
    bindings: String,
    /// The texts of resource files, by name.
    files: BTreeMap<String, String>,
    /// The plugins that the image brings, by provisioner.
    pub plugins: BTreeMap<String, ObjectId>,
}

/// Checks the triggers and files of an image, without their content. Returns its resource files.
///
/// # Errors
///
/// [`ImageError`]
pub fn files(triggers: &Triggers, tree: &Tree) -> Result<Vec<ImageFile>, ImageError> {
    let found = resource_files(tree);
    if found.len() > RESOURCES_MAX {
        return Err(ImageError::TooMany);
    }
    let mut matched = BTreeSet::new();
    let all = triggers.0.iter().enumerate();
    for (index, trigger) in all.filter(|(_, one)| one.kind == Kind::Provision) {
        let number = index + 1;
        if trigger.do_reload || trigger.do_reboot {
            return Err(ImageError::Acts { number, name: trigger.service.clone() });
        }
        let own: Vec<&TreePath> = found.iter().filter(|path| trigger.fires_on(path)).collect();
        if own.is_empty() {
            return Err(ImageError::NoFile { number });
        }
        matched.extend(own);
    }
    if let Some(path) = found.iter().find(|path| !matched.contains(path)) {
        return Err(ImageError::NoTrigger { path: path.clone() });
    }
    let resource = |path| regular(tree, path, false).transpose();
    found.into_iter().filter_map(resource).collect()
}

/// Returns the files that say what an image asks for: its resource files, and its bindings if it
/// has any. Empty if it has no resources.
///
/// # Errors
///
/// [`ImageError`]
pub fn texts(triggers: &Triggers, tree: &Tree) -> Result<Vec<ImageFile>, ImageError> {
    let mut files = files(triggers, tree)?;
    if !files.is_empty() {
        files.extend(regular(tree, constant(BINDINGS), false)?);
    }
    Ok(files)
}

/// Checks what an image says of provisioning. `read` reads a file of it. Returns `None` if the
/// image has no resources.
///
/// # Errors
///
/// [`ImageError`], and those of `read`.
pub fn definition<E: From<ImageError>>(
    triggers: &Triggers,
    tree: &Tree,
    mut read: impl FnMut(&ImageFile) -> Result<Vec<u8>, E>,
) -> Result<Option<Definition>, E> {
    let Some(definition) = unchecked_definition(triggers, tree, &mut read)? else {
        return Ok(None);
    };
    let (resources, bindings) = definition.read()?;
    // So two parts of an image that have a resource with the same id have a path in common.
    let named = |id: &str| resources.file(id) == format!("{id}{SUFFIX}");
    if let Some(one) = resources.iter().find(|one| !named(&one.id)) {
        let (file, id) = (resources.file(&one.id).to_owned(), one.id.clone());
        return Err(ImageError::Id { file, id }.into());
    }
    if definition.bindings.is_empty() {
        return Err(ImageError::NoBindings.into());
    }
    check(&resources, &bindings)?;
    for name in definition.plugins.keys() {
        if let Some(file) = plugin(tree, name)? {
            check_program(&file.path, &read(&file)?)?;
        }
    }
    Ok(Some(definition))
}

/// As [`definition`], of an image that was checked when it was added: only [`texts`] are read.
///
/// # Errors
///
/// [`ImageError`], and those of `read`.
pub fn unchecked_definition<E: From<ImageError>>(
    triggers: &Triggers,
    tree: &Tree,
    mut read: impl FnMut(&ImageFile) -> Result<Vec<u8>, E>,
) -> Result<Option<Definition>, E> {
    let mut definition = Definition::default();
    for file in texts(triggers, tree)? {
        let not_text = |_| ImageError::NotText { path: file.path.clone() };
        let text = String::from_utf8(read(&file)?).map_err(not_text)?;
        if file.path == constant(BINDINGS) {
            definition.bindings = text;
        } else {
            let name = String::from_utf8_lossy(file.path.name()).into_owned();
            definition.files.insert(name, text);
        }
    }
    if definition.is_empty() {
        return Ok(None);
    }
    let (resources, bindings) = definition.read()?;
    for name in provisioners(&resources, &bindings) {
        let file = plugin(tree, name)?;
        definition.plugins.extend(file.map(|file| (name.to_owned(), file.object)));
    }
    Ok(Some(definition))
}

impl Definition {
    /// Reads the resources and the bindings.
    ///
    /// # Errors
    ///
    /// [`ImageError`] names the file, the key and the line.
    pub fn read(&self) -> Result<(Resources, Bindings), ImageError> {
        let failed = |path: String| move |source| ImageError::File { path, source };
        let bindings = match self.bindings.is_empty() {
            true => Bindings::default(),
            false => Bindings::parse(&self.bindings).map_err(failed(BINDINGS.to_owned()))?,
        };
        let files = self.files.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let resources = Resources::parse(files)
            .map_err(|error| failed(format!("{DIRECTORY}/{}", error.file))(error.source))?;
        Ok((resources, bindings))
    }

    /// Returns the ids of the resources that one machine makes for all.
    #[must_use]
    pub fn of_fleet(&self) -> BTreeSet<String> {
        let Ok((resources, _)) = self.read() else { return BTreeSet::new() };
        let of_fleet = resources.iter().filter(|one| one.per == Per::Fleet);
        of_fleet.map(|one| one.id.clone()).collect()
    }

    /// True if it asks for nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }
}

/// Returns the provisioners of resources, each once.
#[must_use]
pub fn provisioners<'a>(resources: &Resources, bindings: &'a Bindings) -> BTreeSet<&'a str> {
    let bound = resources.iter().filter_map(|resource| bindings.of_kind(&resource.kind));
    bound.map(|binding| binding.name.as_str()).collect()
}

/// Refuses what no machine could provision, whatever it has made before.
fn check(resources: &Resources, bindings: &Bindings) -> Result<(), ImageError> {
    let is_of_machine = |id: &&String| resources.get(id).is_some_and(|one| one.per == Per::Machine);
    for one in resources.iter().filter(|one| one.per == Per::Fleet) {
        if let Some(need) = one.needs.iter().find(is_of_machine) {
            let file = format!("{DIRECTORY}/{}", resources.file(&one.id));
            let (id, need) = (one.id.clone(), need.clone());
            return Err(ImageError::NeedsOfMachine { file, id, need });
        }
    }
    match plan(resources, bindings, &State::new("")).problems.into_iter().next() {
        Some(Problem { at, error }) => Err(ImageError::Problem { at, error }),
        None => Ok(()),
    }
}

fn resource_files(tree: &Tree) -> Vec<TreePath> {
    let directory = constant(DIRECTORY);
    let Some(Child::Directory(entries)) = tree.get(&directory) else { return Vec::new() };
    let is_resource =
        |name: &[u8]| std::str::from_utf8(name).is_ok_and(|name| name.ends_with(SUFFIX));
    let names = entries.entries().iter().map(|entry| entry.name.as_bytes());
    names.filter(|name| is_resource(name)).filter_map(|name| directory.join(name).ok()).collect()
}

/// True if an image has the file that binds kinds to provisioners.
#[must_use]
pub fn has_bindings(tree: &Tree) -> bool {
    tree.get(&constant(BINDINGS)).is_some()
}

/// Finds the plugin of a provisioner in an image.
fn plugin(tree: &Tree, provisioner: &str) -> Result<Option<ImageFile>, ImageError> {
    for directory in PLUGIN_DIRECTORIES {
        let name = format!("{PLUGIN_PREFIX}{provisioner}");
        let Ok(path) = constant(directory).join(name.as_bytes()) else { continue };
        if let Some(file) = regular(tree, path, true)? {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

fn constant(path: &str) -> TreePath {
    TreePath::new(path).expect("the constant is a path")
}

/// Returns the file at `path`; `None` if nothing is there.
fn regular(tree: &Tree, path: TreePath, is_plugin: bool) -> Result<Option<ImageFile>, ImageError> {
    match tree.get(&path) {
        None => Ok(None),
        Some(Child::Leaf(Leaf::File(file))) => {
            let size_bytes = file.size_bytes;
            let found = ImageFile { path, object: file.object.id(), size_bytes, is_plugin };
            match (size_bytes, found.bytes_max()) {
                (size, limit) if size > limit => {
                    Err(ImageError::TooLarge { path: found.path, limit })
                }
                _ => Ok(Some(found)),
            }
        }
        Some(Child::Leaf(Leaf::Computed(_))) => Err(ImageError::Computed { path }),
        Some(_) => Err(ImageError::NotRegular { path }),
    }
}

/// Refuses a plugin that needs more of its image than the kernel does: it runs before the image is
/// there.
fn check_program(path: &TreePath, bytes: &[u8]) -> Result<(), ImageError> {
    let refused = |why| Err(ImageError::Plugin { path: path.clone(), why });
    if interpreter(bytes).is_some() {
        return Ok(());
    }
    match needs_loader(bytes) {
        Some(false) => Ok(()),
        Some(true) => {
            refused("needs libraries of its image, which is not there yet: link it statically")
        }
        None => refused("is neither a static executable nor a script"),
    }
}

/// Returns the interpreter of a script.
#[must_use]
pub fn interpreter(bytes: &[u8]) -> Option<String> {
    let line = bytes.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let line = String::from_utf8_lossy(&line[..line.len().min(256)]).into_owned();
    line.split_whitespace().next().map(str::to_owned)
}

/// True if an ELF executable asks for a loader; `None` if `bytes` are no ELF executable.
fn needs_loader(bytes: &[u8]) -> Option<bool> {
    const PROGRAM_HEADER_OF_LOADER: u64 = 3;
    if !bytes.starts_with(b"\x7fELF") {
        return None;
    }
    let is_big = *bytes.get(5)? == 2;
    let number = |at: u64, length: u64| {
        let (from, to) =
            (usize::try_from(at).ok()?, usize::try_from(at.checked_add(length)?).ok()?);
        let field = bytes.get(from..to)?.iter();
        let add = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
        Some(if is_big { field.fold(0, add) } else { field.rev().fold(0, add) })
    };
    let (table, length, count) = match bytes.get(4)? {
        1 => (number(28, 4)?, number(42, 2)?, number(44, 2)?),
        2 => (number(32, 8)?, number(54, 2)?, number(56, 2)?),
        _ => return None,
    };
    let mut needs = false;
    for index in 0..count {
        let at = table.checked_add(index.checked_mul(length)?)?;
        needs |= number(at, 4)? == PROGRAM_HEADER_OF_LOADER;
    }
    Some(needs)
}
