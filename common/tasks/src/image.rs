//! What an image says of tasks: its triggers of kind task and its task files, in pairs; and which
//! tasks must stop before an update.

use std::collections::{BTreeMap, BTreeSet};

use jiff::tz::TimeZoneDatabase;
use model::json::KeyError;
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::{Child, File, Leaf, Node, Tree};
use model::trigger::{Kind, Trigger, Triggers};
use serde::{Deserialize, Serialize};

use crate::file::{FILE_BYTES_MAX, OnTemplateChange, Task, Template};

/// Where task files are.
pub const DIRECTORY: &str = "/etc/dominator/tasks.d";

/// What the names of task files end in.
const SUFFIX: &str = ".json";

/// The most tasks of an image.
const TASKS_MAX: usize = 500;

/// A task that an image has as a trigger and a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    pub name: String,
    pub path: TreePath,
    pub file: ObjectId,
    /// The contents of the other files that the trigger matches, each once.
    pub programs: Vec<ObjectId>,
}

/// Why an image cannot have its tasks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImageTaskError {
    #[error("trigger {number} is of kind task, and the image has no {path}")]
    NoFile {
        /// Of the trigger, from 1.
        number: usize,
        path: String,
    },
    #[error("trigger {number} does not match its task file {path}: add it to MatchLines")]
    Unmatched { number: usize, path: String },
    #[error("trigger {number} is the second of task `{name}`: give all MatchLines to one of them")]
    Second { number: usize, name: String },
    #[error(
        "trigger {number} (`{name}`) is of kind task: it restarts its task, and can neither \
         reload nor reboot"
    )]
    Acts { number: usize, name: String },
    #[error("{path} has no trigger: one of kind task with the Service `{name}` would run it")]
    NoTrigger { path: TreePath, name: String },
    #[error("{path} is a task file, and its content must be the same on all machines")]
    Computed { path: TreePath },
    #[error("{path} is a task file, and no regular file")]
    NotRegular { path: TreePath },
    #[error("{path} has more than {FILE_BYTES_MAX} bytes")]
    TooLarge { path: TreePath },
    #[error("the image has more than {TASKS_MAX} tasks")]
    TooMany,
    #[error("{path} is not text")]
    NotText { path: TreePath },
    #[error("{path}")]
    File {
        path: TreePath,
        #[source]
        source: KeyError,
    },
    #[error("{path} has the name `{name}`: that of a task is the name of its file")]
    OtherName { path: TreePath, name: String },
}

/// Returns the path of the task file of `name`.
#[must_use]
pub fn task_path(name: &str) -> String {
    format!("{DIRECTORY}/{name}{SUFFIX}")
}

/// Finds the tasks of an image. Returns those that are complete, and what is wrong with others.
#[must_use]
pub fn pairs(triggers: &Triggers, tree: &Tree) -> (Vec<Pair>, Vec<ImageTaskError>) {
    let mut errors = Vec::new();
    let mut found: BTreeMap<&str, (Pair, &Trigger)> = BTreeMap::new();
    let mut named = BTreeSet::new();
    let of_tasks = triggers.0.iter().enumerate().filter(|(_, one)| one.kind == Kind::Task);
    for (index, trigger) in of_tasks {
        let (number, name) = (index + 1, trigger.service.as_str());
        if !named.insert(name) {
            errors.push(ImageTaskError::Second { number, name: name.to_owned() });
        } else if trigger.do_reload || trigger.do_reboot {
            errors.push(ImageTaskError::Acts { number, name: name.to_owned() });
        } else {
            match file_of(trigger, number, tree) {
                Ok((path, file)) => {
                    let (name_of_pair, file) = (name.to_owned(), file.object.id());
                    let pair = Pair { name: name_of_pair, path, file, programs: Vec::new() };
                    found.insert(name, (pair, trigger));
                }
                Err(error) => errors.push(error),
            }
        }
    }
    if found.len() > TASKS_MAX {
        errors.push(ImageTaskError::TooMany);
    }
    for (path, name) in task_files(tree) {
        if !named.contains(name.as_str()) {
            errors.push(ImageTaskError::NoTrigger { path, name });
        }
    }
    if !found.is_empty() {
        for (path, node) in tree.nodes() {
            let Node::Leaf(Leaf::File(file)) = node else { continue };
            for (pair, trigger) in found.values_mut() {
                if pair.path != path && trigger.fires_on(&path) {
                    pair.programs.push(file.object.id());
                }
            }
        }
    }
    let mut pairs: Vec<Pair> = found.into_values().map(|(pair, _)| pair).collect();
    for pair in &mut pairs {
        pair.programs.sort_unstable();
        pair.programs.dedup();
    }
    (pairs, errors)
}

/// The paths in the directory of task files that are named as such, and the names of their tasks.
fn task_files(tree: &Tree) -> Vec<(TreePath, String)> {
    let directory = TreePath::new(DIRECTORY).expect("the constant is a path");
    let Some(Child::Directory(entries)) = tree.get(&directory) else { return Vec::new() };
    let file = |name: &[u8]| {
        let task = std::str::from_utf8(name).ok()?.strip_suffix(SUFFIX)?;
        Some((directory.join(name).ok()?, task.to_owned()))
    };
    entries.entries().iter().filter_map(|entry| file(entry.name.as_bytes())).collect()
}

fn file_of(
    trigger: &Trigger,
    number: usize,
    tree: &Tree,
) -> Result<(TreePath, File), ImageTaskError> {
    let path = task_path(&trigger.service);
    let no_file = || ImageTaskError::NoFile { number, path: path.clone() };
    let tree_path = TreePath::new(&path).map_err(|_| no_file())?;
    let file = match tree.get(&tree_path) {
        None => return Err(no_file()),
        Some(Child::Leaf(Leaf::File(file))) => file,
        Some(Child::Leaf(Leaf::Computed(_))) => {
            return Err(ImageTaskError::Computed { path: tree_path });
        }
        Some(_) => return Err(ImageTaskError::NotRegular { path: tree_path }),
    };
    if !trigger.fires_on(&tree_path) {
        return Err(ImageTaskError::Unmatched { number, path });
    }
    if file.size_bytes > FILE_BYTES_MAX as u64 {
        return Err(ImageTaskError::TooLarge { path: tree_path });
    }
    Ok((tree_path, file))
}

impl Pair {
    /// Reads the task file, whose content is `bytes`.
    ///
    /// # Errors
    ///
    /// [`ImageTaskError`] names the key and the line.
    pub fn task(&self, bytes: &[u8], zones: &TimeZoneDatabase) -> Result<Task, ImageTaskError> {
        let path = || self.path.clone();
        let text =
            std::str::from_utf8(bytes).map_err(|_| ImageTaskError::NotText { path: path() })?;
        let task = Task::parse(text, zones)
            .map_err(|source| ImageTaskError::File { path: path(), source })?;
        if task.name != self.name {
            return Err(ImageTaskError::OtherName { path: path(), name: task.name });
        }
        Ok(task)
    }
}

/// A task as a machine keeps it: the text of its file, and its programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    pub text: String,
    pub programs: Vec<ObjectId>,
}

impl Definition {
    /// Reads the task, and its version.
    ///
    /// # Errors
    ///
    /// [`KeyError`]: an earlier or later release has written it.
    pub fn read(&self, zones: &TimeZoneDatabase) -> Result<(Task, Template), KeyError> {
        let task = Task::parse(&self.text, zones)?;
        let template = task.template(&self.programs);
        Ok((task, template))
    }
}

/// The tasks of an image as a machine keeps them, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ImageTasks(pub BTreeMap<String, Definition>);

/// Returns the tasks that are stopped before the files of an update change: those that are no more,
/// and those of another version or with a changed program, unless their file says `ignore`.
/// `changed` are the paths that change, `triggers` those of both images.
#[must_use]
pub fn stopped_by_update(
    old: &ImageTasks,
    new: &ImageTasks,
    triggers: [&Triggers; 2],
    changed: &[TreePath],
    zones: &TimeZoneDatabase,
) -> BTreeSet<String> {
    let program_changes = |name: &str| {
        let own_file = task_path(name);
        let mut all = triggers.iter().flat_map(|triggers| &triggers.0);
        all.any(|trigger| {
            let mut paths = changed.iter().filter(|path| path.as_bytes() != own_file.as_bytes());
            trigger.kind == Kind::Task
                && trigger.service == name
                && paths.any(|path| trigger.fires_on(path))
        })
    };
    let must_stop = |(name, before): &(&String, &Definition)| {
        let Some(after) = new.0.get(*name) else { return true };
        let (Ok((_, before)), Ok((task, after))) = (before.read(zones), after.read(zones)) else {
            return true;
        };
        task.on_template_change() == OnTemplateChange::Recreate
            && (before != after || program_changes(name))
    };
    old.0.iter().filter(must_stop).map(|(name, _)| name.clone()).collect()
}
