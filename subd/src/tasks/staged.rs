//! Which tasks an update brings, and which it stops.
//!
//! The definitions are made of what the update plans and of objects that are known by their digest,
//! not of what lies in the directory of task files.

use std::collections::BTreeSet;
use std::io::Read;

use ::tasks::file::FILE_BYTES_MAX;
use ::tasks::image::{Definition, ImageTasks, pairs, stopped_by_update};
use jiff::tz;
use model::display::error_chain;
use model::object::{Hasher, ObjectId};
use model::path::TreePath;
use model::plan::{Plan, apply};
use model::tree::Tree;
use model::trigger::Triggers;
use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::root::Root;

/// What an update does to tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskChange {
    /// The tasks before it.
    pub old: ImageTasks,
    /// The tasks after it.
    pub new: ImageTasks,
    /// The tasks that stop before the tree changes.
    pub stop: BTreeSet<String>,
    /// The tasks that stop before the tree is brought back.
    pub stop_to_undo: BTreeSet<String>,
}

impl TaskChange {
    /// Returns what an update does that turns `old` into `new`. `changed` are the paths that it
    /// changes, `triggers` those of both images.
    #[must_use]
    pub fn new(
        old: &ImageTasks,
        new: ImageTasks,
        triggers: [&Triggers; 2],
        changed: &[TreePath],
    ) -> Self {
        let zones = tz::db();
        let stop = stopped_by_update(old, &new, triggers, changed, zones);
        let stop_to_undo = stopped_by_update(&new, old, triggers, changed, zones);
        Self { old: old.clone(), new, stop, stop_to_undo }
    }

    /// True if there are no tasks.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// Why the tasks of an update cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the tasks of the image: {why}")]
pub struct TasksError {
    why: String,
}

/// Returns the tasks of an image with `triggers`, when `plan` has been carried out on `scanned`.
/// What no image server would have taken is logged, and is no task.
pub fn tasks_after(
    triggers: &Triggers,
    plan: &Plan,
    scanned: &Tree,
    root: &Root,
    cache: &Cache,
) -> Result<ImageTasks, TasksError> {
    if !triggers.have_tasks() {
        return Ok(ImageTasks::default());
    }
    let fail = |why: String| TasksError { why };
    let after =
        apply(scanned, &plan.without_blocked()).map_err(|error| fail(error_chain(&error)))?;
    let (pairs, errors) = pairs(triggers, &after);
    for error in errors {
        tracing::warn!("a task of the image is not run: {}", error_chain(&error));
    }
    let mut tasks = ImageTasks::default();
    for pair in pairs {
        let bytes_max = FILE_BYTES_MAX as u64;
        let bytes = read(&pair.path, &pair.file, bytes_max, root, cache).map_err(fail)?;
        let text =
            String::from_utf8(bytes).map_err(|_| fail(format!("{} is no text", pair.path)))?;
        tasks.0.insert(pair.name, Definition { text, programs: pair.programs });
    }
    Ok(tasks)
}

/// Reads the object that is to be at `path`, of at most `bytes_max` bytes: from the cache, or from
/// the file that has it already.
pub fn read(
    path: &TreePath,
    id: &ObjectId,
    bytes_max: u64,
    root: &Root,
    cache: &Cache,
) -> Result<Vec<u8>, String> {
    let bytes = if cache.size_of(id).is_some() {
        cache.read(id, bytes_max).map_err(|error| error_chain(&error))?
    } else {
        let (directory, name) = root.parent(path).map_err(|error| error_chain(&error))?;
        let file = directory.open_file(name).map_err(|error| error_chain(&error))?;
        let mut bytes = Vec::new();
        let read = file.take(bytes_max + 1).read_to_end(&mut bytes);
        read.map_err(|error| format!("cannot read {path}: {error}"))?;
        bytes
    };
    let mut hasher = Hasher::new(id.algorithm());
    hasher.update(&bytes);
    if hasher.finish() == *id { Ok(bytes) } else { Err(format!("{path} has changed meanwhile")) }
}
