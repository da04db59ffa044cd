//! Which directories were made, and who owns them: one key, which is changed by conditional writes.

use std::path::PathBuf;
use std::sync::Arc;

use super::keys;
use super::remote::Remote;
use crate::store::contract::{Register, Version};
use crate::store::error::StoreError;

/// The register of a bucket.
pub struct BucketRegister(Arc<Remote>);

impl BucketRegister {
    pub fn new(remote: Arc<Remote>) -> Self {
        Self(remote)
    }
}

impl Register for BucketRegister {
    fn read(&self, bytes_max: usize) -> Result<Option<(Vec<u8>, Version)>, StoreError> {
        let entry = self.0.get(&self.0.key(keys::DIRECTORIES), bytes_max as u64)?;
        Ok(entry.map(|entry| (entry.bytes, Version(entry.etag))))
    }

    fn replace(&self, version: &Version, bytes: &[u8]) -> Result<Version, StoreError> {
        let key = self.0.key(keys::DIRECTORIES);
        let done = match version.0.as_str() {
            "" => self.0.create(&key, bytes.to_vec())?,
            etag => self.0.update(&key, bytes.to_vec(), etag)?,
        };
        done.map(Version).ok_or(StoreError::RacedDirectories)
    }

    fn has_changed(&self, version: &Version) -> Result<bool, StoreError> {
        let found = self.0.head(&self.0.key(keys::DIRECTORIES))?;
        Ok(found.map(|meta| meta.etag).unwrap_or_default() != version.0)
    }

    fn place(&self) -> PathBuf {
        PathBuf::from(self.0.key(keys::DIRECTORIES).as_ref())
    }
}
