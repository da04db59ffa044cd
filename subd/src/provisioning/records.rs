//! What is kept of provisioning over restarts of subd and of the machine: `provisioning.json` in
//! the state directory. Only root may read it: it has outputs, secret ones too.

use model::display::error_chain;
use provisioning::machine::Machine;
use serde::{Deserialize, Serialize};
use system::durable::{Durable, DurableError, Json};

use crate::state::persisted_state::{PersistError, StateDirectory, StateFile};

const NAME: &str = "provisioning.json";
const BAD: &str = "provisioning.json.bad";

/// The largest file that is read, in bytes.
const BYTES_MAX: u64 = 256 << 20;

/// The version of the format.
const FORMAT: u32 = 1;

/// The content of `provisioning.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Records {
    /// The version of the format.
    format: u32,
    pub machine: Machine,
}

impl Default for Records {
    fn default() -> Self {
        Self { format: FORMAT, machine: Machine::default() }
    }
}

/// The records in memory and on the medium.
pub type SavedRecords = Durable<Records, StateFile, Json>;

/// Reads the records in `state`. If they are damaged they are renamed to `provisioning.json.bad`:
/// then all resources are asked for again, which is safe, and nothing is known of orphans.
pub fn load(state: &StateDirectory) -> Result<SavedRecords, PersistError> {
    let directory = state.directory();
    let file = || state.file(directory, NAME, BYTES_MAX);
    match Durable::load_or_default_as(file(), Json) {
        Err(DurableError::Damaged { source: error, .. }) => {
            tracing::error!(%error, kept = BAD, "the records of provisioning are not valid");
            if let Err(error) = directory.rename_over(NAME.as_bytes(), directory, BAD.as_bytes()) {
                tracing::error!("they cannot be kept: {}", error_chain(&error));
            }
            Ok(Durable::new(file(), Json, Records::default()))
        }
        loaded => Ok(loaded?),
    }
}
