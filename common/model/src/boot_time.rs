//! Moments of the clock that counts from the boot of a machine.

use serde::{Deserialize, Serialize};

use crate::JsonSchema;

/// A moment of the clock that counts from a boot of a machine, also while the machine sleeps.
/// Nobody can set that clock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BootTime {
    /// The kernel's name of the boot.
    pub boot_id: String,
    /// Milliseconds since that boot.
    #[serde(with = "crate::json::LargeNumber")]
    pub ms: u64,
}

impl BootTime {
    /// Returns how many milliseconds after `earlier` this is; `None` if that is of another boot, or
    /// later.
    #[must_use]
    pub fn ms_since(&self, earlier: &Self) -> Option<u64> {
        let ms = self.ms.checked_sub(earlier.ms);
        ms.filter(|_| self.boot_id == earlier.boot_id)
    }

    /// Returns the moment `ms` milliseconds later.
    #[must_use]
    pub fn after_ms(&self, ms: u64) -> Self {
        Self { ms: self.ms.saturating_add(ms), ..self.clone() }
    }
}
