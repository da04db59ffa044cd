//! Decides which certificate a machine gets after its own has ended, so that it takes orders again.
//!
//! It is the content of a computed file like any other: made, tried and renewed by the same rules.
// tidy: core

use core::time::Duration;

use api::subd::OWN_CERTIFICATE;
use model::object::ObjectId;

use super::{BEING_ASKED, ComputedTable, FileState};
use crate::core::timing::Now;

/// The shortest time between two certificates for one machine.
const REPLACE_INTERVAL: Duration = Duration::from_secs(10);

/// Why there is no certificate for a machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoCertificate {
    #[error("its image has no computed file {OWN_CERTIFICATE}")]
    NotComputed,
    #[error(
        "the certificate that has ended is for another key than the machine has shown last: give \
         it a new one by hand"
    )]
    OtherKey,
    #[error("the new one is not known yet: {0}")]
    NotKnown(String),
    #[error("it was given one just now")]
    JustNow,
}

impl ComputedTable {
    /// Returns whether a machine may get a certificate now, whatever its key.
    ///
    /// # Errors
    ///
    /// [`NoCertificate`] says why not.
    pub fn may_replace(&self, hostname: &str, now: Now) -> Result<(), NoCertificate> {
        let files = self.machines.get(hostname).ok_or(NoCertificate::NotComputed)?;
        files.files.iter().find(is_own).ok_or(NoCertificate::NotComputed)?;
        match files.replaced_at {
            Some(at) if now.elapsed < at + REPLACE_INTERVAL => Err(NoCertificate::JustNow),
            _ => Ok(()),
        }
    }

    /// Returns the certificate for a machine that has shown `key` with one that has ended: the one
    /// that it is to have. A key counts if the machine has shown it last, or if none is known.
    ///
    /// # Errors
    ///
    /// [`NoCertificate`] says why the machine cannot get another certificate now.
    pub fn replacement(
        &mut self,
        hostname: &str,
        key: &[u8],
        now: Now,
    ) -> Result<ObjectId, NoCertificate> {
        self.may_replace(hostname, now)?;
        if self.key(hostname).is_some_and(|known| *known.0 != *key) {
            return Err(NoCertificate::OtherKey);
        }
        self.take_key(hostname, key, now);
        let files = self.machines.get_mut(hostname).ok_or(NoCertificate::NotComputed)?;
        let file = files.files.iter().find(is_own).ok_or(NoCertificate::NotComputed)?;
        let Some(used) = &file.contents.used else {
            let why = file.why().unwrap_or(BEING_ASKED).to_owned();
            return Err(NoCertificate::NotKnown(why));
        };
        let id = used.object.id();
        files.replaced_at = Some(now.elapsed);
        Ok(id)
    }
}

/// True for the certificate of subd itself.
fn is_own(file: &&FileState) -> bool {
    file.rule.path.as_bytes() == OWN_CERTIFICATE.as_bytes()
}
