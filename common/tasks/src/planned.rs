//! What an update does to tasks, as far as its plan tells without the content of task files.

use std::collections::{BTreeMap, BTreeSet};

use model::JsonSchema;
use model::path::TreePath;
use model::trigger::{Kind, Trigger, Triggers};
use serde::{Deserialize, Serialize};

use crate::image::task_path;

/// What an update does to a task.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum PlannedTask {
    /// Only the new image has it.
    Start,
    /// Only the former image has it.
    Stop,
    /// Its file or a program changes: it is stopped and started again, unless its file says that
    /// changes are to be ignored.
    Restart,
}

impl PlannedTask {
    /// Returns what happens to the task `name`, for people.
    #[must_use]
    pub fn text(self, name: &str) -> String {
        match self {
            Self::Start => format!("start task {name}"),
            Self::Stop => format!("stop task {name}"),
            Self::Restart => format!("restart task {name} (unless it ignores changes)"),
        }
    }
}

/// Returns the tasks that an update touches, by name. `old` and `new` are the triggers of both
/// images, `changed` the paths that change. With `is_repair` both are the same image: then a task
/// file that changes was edited on the machine, which tasks do not follow.
#[must_use]
pub fn planned_tasks<'path>(
    old: &Triggers,
    new: &Triggers,
    changed: impl Iterator<Item = &'path TreePath> + Clone,
    is_repair: bool,
) -> BTreeMap<String, PlannedTask> {
    let (old, new) = (by_task(old), by_task(new));
    let changes = |name: &str| {
        let own_file = task_path(name);
        let mut paths =
            changed.clone().filter(|path| !is_repair || path.as_bytes() != own_file.as_bytes());
        paths.any(|path| [&old, &new].iter().any(|all| all[name].fires_on(path)))
    };
    let names: BTreeSet<&str> = old.keys().chain(new.keys()).copied().collect();
    let effect = |name: &str| match (old.contains_key(name), new.contains_key(name)) {
        (true, true) => changes(name).then_some(PlannedTask::Restart),
        (true, false) => Some(PlannedTask::Stop),
        _ => Some(PlannedTask::Start),
    };
    names.into_iter().filter_map(|name| Some((name.to_owned(), effect(name)?))).collect()
}

/// The triggers of kind task, by the name of the task.
fn by_task(triggers: &Triggers) -> BTreeMap<&str, &Trigger> {
    let tasks = triggers.0.iter().filter(|trigger| trigger.kind == Kind::Task);
    tasks.map(|trigger| (trigger.service.as_str(), trigger)).collect()
}
