//! The records of images in a bucket, one key for each name, which is never deleted; and the key of
//! directories. Both are changed by conditional writes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::stream::{StreamExt as _, TryStreamExt as _};
use model::image::ImageName;
use model::lock::locked;
use object_store::path::Path;

use super::keys;
use super::remote::{Entry, Meta, Remote, nonce};
use crate::store::contract::{DirectoriesStorage, FoundRecord, RecordVersion, Records, Refresh};
use crate::store::error::{Ending, StoreError};
use crate::store::record::RECORD_BYTES_MAX;

/// The beginning of a tombstone.
const GONE: &[u8] = b"dominator-gone 1\n";

/// How often all keys are listed even if no server reports a change.
const LIST_INTERVAL: Duration = Duration::from_secs(120);

/// How many records are read at once.
const READS_MAX: usize = 16;

/// How often a change is retried when another server changes the record first.
const TRIES_MAX: usize = 20;

/// The records of a bucket.
pub struct BucketRecords {
    remote: Arc<Remote>,
    known: Mutex<KnownRecords>,
}

/// The records as they were last read.
#[derive(Default)]
struct KnownRecords {
    etags: BTreeMap<Path, String>,
    changed: Option<String>,
    listed: Option<Instant>,
}

impl BucketRecords {
    pub fn new(remote: Arc<Remote>) -> Self {
        Self { remote, known: Mutex::default() }
    }

    fn key(&self, name: &ImageName) -> Result<Path, StoreError> {
        let key = keys::image(name).ok_or_else(|| StoreError::LongName { name: name.clone() })?;
        Ok(self.remote.key(&key))
    }

    fn entry(&self, name: &ImageName) -> Result<Option<Entry>, StoreError> {
        self.remote.get(&self.key(name)?, RECORD_BYTES_MAX as u64)
    }

    /// Notifies the other servers of a change. Without it they find the change later.
    fn publish(&self) {
        let key = self.remote.key(keys::CHANGED);
        if let Err(error) = self.remote.put(&key, nonce().into_bytes()) {
            tracing::warn!(
                "other servers learn of a change late: {}",
                model::display::error_chain(&error)
            );
        }
    }
}

fn found(entry: Option<Entry>) -> FoundRecord {
    match entry {
        None => FoundRecord::Absent,
        Some(entry) => match entry.bytes.strip_prefix(GONE) {
            Some(mark) => FoundRecord::Gone(Ending::read(mark)),
            None => FoundRecord::Record(entry.bytes, RecordVersion(entry.etag)),
        },
    }
}

impl Records for BucketRecords {
    fn changes(
        &self,
        look: Refresh,
        take: &mut dyn FnMut(ImageName, Result<FoundRecord, StoreError>),
    ) -> Result<(), StoreError> {
        let mut known = locked(&self.known);
        // Read first: what changes after that is found the next time.
        let changed = self.remote.head(&self.remote.key(keys::CHANGED))?.map(|meta| meta.etag);
        let is_recent = known.listed.is_some_and(|listed| listed.elapsed() < LIST_INTERVAL);
        if look == Refresh::Periodic && is_recent && changed == known.changed {
            return Ok(());
        }
        let started = Instant::now();
        let mut there: BTreeMap<Path, Meta> = BTreeMap::new();
        self.remote.list(keys::IMAGES, &mut |meta| {
            there.insert(meta.key.clone(), meta);
            true
        })?;
        let name_of = |key: &Path| self.remote.below(key, keys::IMAGES).and_then(keys::image_at);
        let vanished: Vec<Path> =
            known.etags.keys().filter(|key| !there.contains_key(*key)).cloned().collect();
        for key in vanished {
            if let Some(name) = name_of(&key) {
                tracing::error!(image = %name, "another program removed its record");
                take(name, Ok(FoundRecord::Absent));
            }
            known.etags.remove(&key);
        }
        let new = there.into_values().filter(|meta| known.etags.get(&meta.key) != Some(&meta.etag));
        let reads: Vec<_> = new
            .map(|meta| async move {
                let entry = self.remote.get_async(&meta.key, RECORD_BYTES_MAX as u64).await?;
                Ok::<_, StoreError>((meta.key, entry))
            })
            .collect();
        let mut reads = futures_util::stream::iter(reads).buffered(READS_MAX);
        while let Some((key, entry)) = self.remote.wait(reads.try_next())? {
            let etag = entry.as_ref().map(|entry| entry.etag.clone());
            match name_of(&key) {
                Some(name) => take(name, Ok(found(entry))),
                None => tracing::warn!(%key, "ignoring an unknown key in the bucket"),
            }
            if let Some(etag) = etag {
                known.etags.insert(key, etag);
            }
        }
        known.changed = changed;
        known.listed = Some(started);
        Ok(())
    }

    fn read(&self, name: &ImageName) -> Result<FoundRecord, StoreError> {
        self.entry(name).map(found)
    }

    fn expect_new(&self, name: &ImageName) -> Result<(), StoreError> {
        match self.read(name)? {
            FoundRecord::Absent => Ok(()),
            FoundRecord::Record(..) => Err(StoreError::Exists { name: name.clone() }),
            FoundRecord::Gone(ending) => Err(StoreError::Gone { name: name.clone(), ending }),
        }
    }

    fn create(&self, name: &ImageName, bytes: &[u8]) -> Result<(), StoreError> {
        if self.remote.create(&self.key(name)?, bytes.to_vec())?.is_none() {
            self.expect_new(name)?;
            // Keys are never removed by a server, so somebody removed this one by hand.
            return Err(StoreError::Raced { name: name.clone() });
        }
        self.publish();
        Ok(())
    }

    fn replace(
        &self,
        name: &ImageName,
        version: &RecordVersion,
        bytes: &[u8],
    ) -> Result<(), StoreError> {
        match self.remote.update(&self.key(name)?, bytes.to_vec(), &version.0)? {
            Some(_) => self.publish(),
            None => return Err(StoreError::Raced { name: name.clone() }),
        }
        Ok(())
    }

    fn end(
        &self,
        name: &ImageName,
        version: Option<&RecordVersion>,
        mark: &str,
        gone: &mut dyn FnMut(),
    ) -> Result<(), StoreError> {
        let raced = || StoreError::Raced { name: name.clone() };
        // No two tombstones are equal, so that only one of several servers succeeds.
        let mark = [GONE, mark.as_bytes(), nonce().as_bytes(), b"\n"].concat();
        for _ in 0..TRIES_MAX {
            let etag = match self.read(name)? {
                FoundRecord::Absent => return Err(StoreError::NotFound { name: name.clone() }),
                FoundRecord::Gone(ending) => {
                    return Err(StoreError::Gone { name: name.clone(), ending });
                }
                FoundRecord::Record(_, found)
                    if version.is_some_and(|version| *version != found) =>
                {
                    return Err(raced());
                }
                FoundRecord::Record(_, found) => found.0,
            };
            if self.remote.update(&self.key(name)?, mark.clone(), &etag)?.is_some() {
                gone();
                self.publish();
                return Ok(());
            }
        }
        Err(raced())
    }
}

/// The register of a bucket.
pub struct BucketDirectories(Arc<Remote>);

impl BucketDirectories {
    pub fn new(remote: Arc<Remote>) -> Self {
        Self(remote)
    }
}

impl DirectoriesStorage for BucketDirectories {
    fn read(&self, bytes_max: usize) -> Result<Option<(Vec<u8>, RecordVersion)>, StoreError> {
        let entry = self.0.get(&self.0.key(keys::DIRECTORIES), bytes_max as u64)?;
        Ok(entry.map(|entry| (entry.bytes, RecordVersion(entry.etag))))
    }

    fn replace(&self, version: &RecordVersion, bytes: &[u8]) -> Result<RecordVersion, StoreError> {
        let key = self.0.key(keys::DIRECTORIES);
        let done = match version.0.as_str() {
            "" => self.0.create(&key, bytes.to_vec())?,
            etag => self.0.update(&key, bytes.to_vec(), etag)?,
        };
        done.map(RecordVersion).ok_or(StoreError::RacedDirectories)
    }

    fn has_changed(&self, version: &RecordVersion) -> Result<bool, StoreError> {
        let found = self.0.head(&self.0.key(keys::DIRECTORIES))?;
        Ok(found.map(|meta| meta.etag).unwrap_or_default() != version.0)
    }

    fn location(&self) -> PathBuf {
        PathBuf::from(self.0.key(keys::DIRECTORIES).as_ref())
    }
}
