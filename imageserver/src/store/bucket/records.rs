//! The records of images in a bucket: one key for each name, which never goes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::stream::{StreamExt as _, TryStreamExt as _};
use model::image::ImageName;
use model::lock::locked;
use object_store::path::Path;

use super::keys;
use super::remote::{Entry, Meta, Remote, random};
use crate::store::contract::{Found, Look, Records, Version};
use crate::store::error::{Ending, StoreError};
use crate::store::record::RECORD_BYTES_MAX;

/// What the mark begins with that a name was used.
const GONE: &[u8] = b"dominator-gone 1\n";

/// How often all keys are listed at least, even if nobody says that something changed.
const LIST_INTERVAL: Duration = Duration::from_secs(120);

/// How many records are read at once.
const READS_MAX: usize = 16;

/// How often a change is tried again that another server comes before.
const TRIES_MAX: usize = 20;

/// The records of a bucket.
pub struct BucketRecords {
    remote: Arc<Remote>,
    seen: Mutex<Seen>,
}

/// What was seen when it was last looked.
#[derive(Default)]
struct Seen {
    etags: BTreeMap<Path, String>,
    changed: Option<String>,
    listed: Option<Instant>,
}

impl BucketRecords {
    pub fn new(remote: Arc<Remote>) -> Self {
        Self { remote, seen: Mutex::default() }
    }

    fn key(&self, name: &ImageName) -> Result<Path, StoreError> {
        let key = keys::image(name).ok_or_else(|| StoreError::LongName { name: name.clone() })?;
        Ok(self.remote.key(&key))
    }

    fn entry(&self, name: &ImageName) -> Result<Option<Entry>, StoreError> {
        self.remote.get(&self.key(name)?, RECORD_BYTES_MAX as u64)
    }

    /// Tells the others that something has changed. They look by themselves later.
    fn tell(&self) {
        let told = random()
            .and_then(|nonce| self.remote.put(&self.remote.key(keys::CHANGED), nonce.into_bytes()));
        if let Err(error) = told {
            tracing::warn!(
                "other servers hear of a change only later: {}",
                model::report::report(&error)
            );
        }
    }
}

fn found(entry: Option<Entry>) -> Found {
    match entry {
        None => Found::Absent,
        Some(entry) => match entry.bytes.strip_prefix(GONE) {
            Some(mark) => Found::Gone(Ending::of(mark)),
            None => Found::Record(entry.bytes, Version(entry.etag)),
        },
    }
}

impl Records for BucketRecords {
    fn changes(
        &self,
        look: Look,
        take: &mut dyn FnMut(ImageName, Result<Found, StoreError>),
    ) -> Result<(), StoreError> {
        let mut seen = locked(&self.seen);
        // Read first: what changes after that is found the next time.
        let changed = self.remote.head(&self.remote.key(keys::CHANGED))?.map(|meta| meta.etag);
        let is_recent = seen.listed.is_some_and(|listed| listed.elapsed() < LIST_INTERVAL);
        if look == Look::Often && is_recent && changed == seen.changed {
            return Ok(());
        }
        let begun = Instant::now();
        let mut there: BTreeMap<Path, Meta> = BTreeMap::new();
        self.remote.list(keys::IMAGES, &mut |meta| {
            there.insert(meta.key.clone(), meta);
            true
        })?;
        let name_of = |key: &Path| self.remote.below(key, keys::IMAGES).and_then(keys::image_at);
        let vanished: Vec<Path> =
            seen.etags.keys().filter(|key| !there.contains_key(*key)).cloned().collect();
        for key in vanished {
            if let Some(name) = name_of(&key) {
                tracing::error!(image = %name, "its record was removed by something else");
                take(name, Ok(Found::Absent));
            }
            seen.etags.remove(&key);
        }
        let new = there.into_values().filter(|meta| seen.etags.get(&meta.key) != Some(&meta.etag));
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
                None => tracing::warn!(%key, "not a key of the server"),
            }
            if let Some(etag) = etag {
                seen.etags.insert(key, etag);
            }
        }
        seen.changed = changed;
        seen.listed = Some(begun);
        Ok(())
    }

    fn read(&self, name: &ImageName) -> Result<Found, StoreError> {
        self.entry(name).map(found)
    }

    fn expect_new(&self, name: &ImageName) -> Result<(), StoreError> {
        match self.read(name)? {
            Found::Absent => Ok(()),
            Found::Record(..) => Err(StoreError::Exists { name: name.clone() }),
            Found::Gone(ending) => Err(StoreError::Gone { name: name.clone(), ending }),
        }
    }

    fn create(&self, name: &ImageName, bytes: &[u8]) -> Result<(), StoreError> {
        if self.remote.create(&self.key(name)?, bytes.to_vec())?.is_none() {
            self.expect_new(name)?;
            // It is neither there nor was it: keys never go, so that somebody removed it by hand.
            return Err(StoreError::Raced { name: name.clone() });
        }
        self.tell();
        Ok(())
    }

    fn replace(&self, name: &ImageName, version: &Version, bytes: &[u8]) -> Result<(), StoreError> {
        match self.remote.update(&self.key(name)?, bytes.to_vec(), &version.0)? {
            Some(_) => self.tell(),
            None => return Err(StoreError::Raced { name: name.clone() }),
        }
        Ok(())
    }

    fn bury(
        &self,
        name: &ImageName,
        version: Option<&Version>,
        mark: &str,
        gone: &mut dyn FnMut(),
    ) -> Result<(), StoreError> {
        let raced = || StoreError::Raced { name: name.clone() };
        // No two are equal, so that of several servers one hears that it was the one.
        let mark = [GONE, mark.as_bytes(), random()?.as_bytes(), b"\n"].concat();
        for _ in 0..TRIES_MAX {
            let etag = match self.read(name)? {
                Found::Absent => return Err(StoreError::NotFound { name: name.clone() }),
                Found::Gone(ending) => return Err(StoreError::Gone { name: name.clone(), ending }),
                Found::Record(_, found) if version.is_some_and(|version| *version != found) => {
                    return Err(raced());
                }
                Found::Record(_, found) => found.0,
            };
            if self.remote.update(&self.key(name)?, mark.clone(), &etag)?.is_some() {
                gone();
                self.tell();
                return Ok(());
            }
        }
        Err(raced())
    }
}
