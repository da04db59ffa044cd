//! An operator's word that a machine is the one that is meant.

use super::{Fleet, OrderError};

impl Fleet {
    /// Trusts what answers for a record. Must not be called by a task: it waits for the disk.
    ///
    /// # Errors
    ///
    /// [`OrderError`] if there is no such machine, or it cannot be trusted.
    pub fn trust(&self, hostname: &str, who: &str, why: &str) -> Result<(), OrderError> {
        let _known = self.handle(hostname)?;
        Ok(self.shared.identities.trust(hostname, who, why)?)
    }
}
