//! The records of tasks, which survive a restart of subd and of the machine: `tasks.json` in the
//! state directory.

use std::collections::BTreeMap;

use ::tasks::supervise::TaskRecord;
use model::display::error_chain;
use serde::{Deserialize, Serialize};
use system::durable::{Durable, DurableError, PrettyJson};

use crate::state::persisted_state::{PersistError, StateDirectory, StateFile};

const NAME: &str = "tasks.json";
const BAD: &str = "tasks.json.bad";

/// The largest file that is read, in bytes.
const BYTES_MAX: u64 = 64 << 20;

/// The version of the format.
const FORMAT: u32 = 1;

/// The content of `tasks.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRecords {
    /// The version of the format.
    format: u32,
    pub tasks: BTreeMap<String, TaskRecord>,
}

impl Default for TaskRecords {
    fn default() -> Self {
        Self { format: FORMAT, tasks: BTreeMap::new() }
    }
}

/// The records in memory and on the medium.
pub type SavedRecords = Durable<TaskRecords, StateFile, PrettyJson>;

/// Reads the records in `state`. If they are damaged they are renamed to `tasks.json.bad`, and all
/// tasks begin anew: a machine without records of its tasks is better than one without subd.
pub fn load(state: &StateDirectory) -> Result<SavedRecords, PersistError> {
    let directory = state.directory();
    let file = || state.file(directory, NAME, BYTES_MAX);
    match Durable::load_or_default_as(file(), PrettyJson) {
        Err(DurableError::Damaged { source: error, .. }) => {
            tracing::error!(%error, kept = BAD, "the records of tasks are not valid");
            if let Err(error) = directory.rename_over(NAME.as_bytes(), directory, BAD.as_bytes()) {
                tracing::error!("they cannot be kept: {}", error_chain(&error));
            }
            Ok(Durable::new(file(), PrettyJson, TaskRecords::default()))
        }
        loaded => Ok(loaded?),
    }
}
