//! Decides which certificate a machine gets after its own has ended, so that it takes orders again.
//!
//! It is the content of a computed file like any other: made, tried and renewed by the same rules.
// tidy: core

use core::time::Duration;

use api::subd::OWN_CERTIFICATE;
use model::object::ObjectId;

use super::{BEING_ASKED, ComputedTable, KnownContent, is_current};
use crate::core::timing::Now;

/// The shortest time between two certificates for one machine.
const OFFER_INTERVAL: Duration = Duration::from_secs(10);

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
    /// Returns the certificate for a machine that has shown `key` with one that has ended. A key
    /// counts if the machine has shown it last, or if none is known.
    ///
    /// # Errors
    ///
    /// [`NoCertificate`] says why there is none now.
    pub fn replacement(
        &mut self,
        hostname: &str,
        key: &[u8],
        now: Now,
    ) -> Result<ObjectId, NoCertificate> {
        let files = self.machines.get(hostname).ok_or(NoCertificate::NotComputed)?;
        let is_own = |path: &[u8]| path == OWN_CERTIFICATE.as_bytes();
        let index = files.files.iter().position(|file| is_own(file.rule.path.as_bytes()));
        let index = index.ok_or(NoCertificate::NotComputed)?;
        if self.key(hostname).is_some_and(|known| *known.0 != *key) {
            return Err(NoCertificate::OtherKey);
        }
        self.take_key(hostname, key, now);
        let files = self.machines.get_mut(hostname).ok_or(NoCertificate::NotComputed)?;
        let file = &files.files[index];
        let versions = self.generators.get(&file.rule.source);
        let is_of_now =
            |known: &&KnownContent| is_current(versions, &file.rule, known, files.record);
        let Some(used) = file.contents.used.as_ref().filter(is_of_now) else {
            let why = file.why.as_deref().unwrap_or(BEING_ASKED).to_owned();
            return Err(NoCertificate::NotKnown(why));
        };
        let id = used.object.id();
        if files.offered.is_some_and(|offered| now.elapsed < offered + OFFER_INTERVAL) {
            return Err(NoCertificate::JustNow);
        }
        files.offered = Some(now.elapsed);
        Ok(id)
    }
}
