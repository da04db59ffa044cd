//! Objects in a bucket, with a cache on the server's own disk.
//!
//! An object is hashed while it is fetched into the cache and is served from there: corrupt content
//! is never sent, and a large object takes no memory. A corrupt object is copied to the quarantine
//! and replaced by an empty one, unless a good one was stored meanwhile.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::stream::{StreamExt as _, TryStreamExt as _};
use model::display::error_chain;
use model::lock::locked;
use model::object::{Hasher, ObjectId};
use object_store::{Error, ObjectStoreExt as _};
use tokio::sync::Semaphore;

use super::keys;
use super::leases::BucketLeasing;
use super::remote::{Meta, REQUESTS_MAX, Remote, nonce};
use crate::core::collection::disk_pressure::Space;
use crate::store::bucket::receiving::{BucketReceiving, Stored, UNITS_MAX};
use crate::store::content::Content;
use crate::store::contract::{Objects, PendingStore, Pin, Receiving};
use crate::store::damaged_objects::{Damage, DamagedObjects};
use crate::store::error::StoreError;
use crate::store::layout;
use crate::store::local::object_files::is_empty_object;
use crate::store::local::objects::{LocalObjects, WHOLE_BYTES_MAX};
use crate::store::medium_reader::{MediumReader, OnMedium};
use crate::store::object_counts::ObjectCounts;

/// The most objects that are fetched ahead at once.
const AHEAD_MAX: usize = 16;

/// How long the objects of an image are held while it is added, in seconds.
const PIN_SECONDS: u32 = 2 * 3_600;

/// From this number of ids on, objects are found by listing, unless the bucket holds more than so
/// many objects for each id.
const LISTED_MIN: usize = 2_000;
const LISTED_PER_ID: u64 = 100;

/// How many lists are asked for at once.
const LISTS_MAX: usize = 32;

/// The fraction of the cache that is freed when it is full.
const EVICT_PART: u64 = 10;

/// Objects whose digests have the same first byte modulo this are fetched one at a time.
const FETCHES: usize = 64;

/// The objects of a bucket.
pub struct BucketObjects {
    pub(super) remote: Arc<Remote>,
    pub(super) cache: LocalObjects,
    pub(super) leasing: Arc<BucketLeasing>,
    cache_bytes_max: u64,
    /// Limits what is sent at once.
    pub(super) units: Arc<Semaphore>,
    fetches: [Mutex<()>; FETCHES],
    evicting: Mutex<()>,
    pub(super) stored: Arc<Stored>,
    corrupt: AtomicU64,
}

/// The result of fetching an object.
enum Fetched {
    /// A small object, whole.
    Whole(Bytes),
    /// The object is in the cache.
    Cached,
    Absent,
    /// The object is larger than the limit.
    Large,
}

impl BucketObjects {
    pub fn new(
        remote: Arc<Remote>,
        cache: LocalObjects,
        leasing: Arc<BucketLeasing>,
        cache_bytes_max: u64,
    ) -> Self {
        cache.count(&|| false);
        let stored = Arc::new(Stored::new(Arc::clone(&leasing)));
        Self {
            remote,
            cache,
            leasing,
            cache_bytes_max,
            units: Arc::new(Semaphore::new(UNITS_MAX)),
            fetches: [const { Mutex::new(()) }; FETCHES],
            evicting: Mutex::default(),
            stored,
            corrupt: AtomicU64::default(),
        }
    }

    /// Removes the oldest objects from the cache if it is too full for `more_bytes`.
    pub(super) fn evict(&self, more_bytes: u64) {
        let held = self.cache.object_counts().bytes;
        if held.saturating_add(more_bytes) <= self.cache_bytes_max {
            return;
        }
        let Ok(_evicting) = self.evicting.try_lock() else { return };
        let goal = self.cache_bytes_max - self.cache_bytes_max / EVICT_PART;
        let mut all = BTreeMap::new();
        let visited = self.cache.visit(
            || true,
            |_| true,
            |one| {
                all.insert((one.stored, one.id), one.bytes);
            },
        );
        if let Err(error) = visited {
            return tracing::error!("cannot trim the cache: {}", error_chain(&error));
        }
        for (_, id) in all.into_keys() {
            if self.cache.object_counts().bytes.saturating_add(more_bytes) <= goal {
                break;
            }
            let removed = self.cache.take_out(&id).and_then(|taken| match taken {
                Some(taken) => taken.remove(),
                None => Ok(()),
            });
            if let Err(error) = removed {
                return tracing::error!("cannot trim the cache: {}", error_chain(&error));
            }
        }
    }

    /// Returns an object from the cache. A cache that fails counts as empty.
    fn cached(&self, id: &ObjectId) -> Option<Content> {
        self.cache.open_verified(id).unwrap_or_else(|error| {
            tracing::error!("the cache fails: {}", error_chain(&error));
            None
        })
    }

    /// Fetches an object, if it is no longer than `bytes_max`.
    fn fetch(&self, id: &ObjectId, bytes_max: u64) -> Result<Fetched, StoreError> {
        let what = || format!("read object {id}");
        let key = self.remote.key(&keys::object(id));
        let found = match self.remote.wait(self.remote.store().get(&key)) {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(Fetched::Absent),
            Err(error) => return Err(self.remote.failed(what())(error)),
        };
        let size_bytes = found.meta.size;
        let etag = found.meta.e_tag.clone().unwrap_or_default();
        if size_bytes == 0 && !is_empty_object(id) {
            return Ok(Fetched::Absent);
        }
        if size_bytes > bytes_max {
            return Ok(Fetched::Large);
        }
        if size_bytes <= WHOLE_BYTES_MAX {
            let bytes = self.remote.wait(found.bytes()).map_err(self.remote.failed(what()))?;
            if id.algorithm().digest(&bytes) != *id {
                self.quarantine(id, &etag, size_bytes)?;
                return Ok(Fetched::Absent);
            }
            // The object is served even if it cannot be cached.
            if let Err(error) = self.store_in_cache(id, &bytes) {
                tracing::warn!("cannot store an object in the cache: {}", error_chain(&error));
            }
            return Ok(Fetched::Whole(bytes));
        }
        self.evict(size_bytes);
        let mut receiving = self.cache.receive(*id, size_bytes)?;
        let mut stream = found.into_stream();
        while let Some(chunk) = self.remote.wait(stream.next()) {
            receiving.write(&chunk.map_err(self.remote.failed(what()))?)?;
        }
        match receiving.finish().and_then(PendingStore::wait) {
            Ok(()) => Ok(Fetched::Cached),
            Err(StoreError::Content { .. }) => {
                self.quarantine(id, &etag, size_bytes)?;
                Ok(Fetched::Absent)
            }
            Err(error) => Err(error),
        }
    }

    fn store_in_cache(&self, id: &ObjectId, bytes: &Bytes) -> Result<(), StoreError> {
        self.evict(bytes.len() as u64);
        let mut receiving = self.cache.receive(*id, bytes.len() as u64)?;
        receiving.write(bytes)?;
        receiving.finish()?.wait()
    }

    /// Quarantines a corrupt object, unless another was stored meanwhile.
    fn quarantine(&self, id: &ObjectId, etag: &str, size_bytes: u64) -> Result<(), StoreError> {
        self.corrupt.fetch_add(1, Ordering::Relaxed);
        let from = self.remote.key(&keys::object(id));
        let target = self.remote.key(&keys::quarantine(id, &nonce()));
        let copied = self.remote.wait(self.remote.store().copy(&from, &target));
        copied.map_err(self.remote.failed(format!("quarantine the corrupt object {id}")))?;
        if self.remote.update(&from, Vec::new(), etag)?.is_some() {
            tracing::error!(
                object = %id, size_bytes, quarantine = %target,
                "a corrupt object was moved to the quarantine: upload it again"
            );
            self.leasing.forget(id);
            self.stored.damaged_objects.add(*id, Damage::Corrupt);
        }
        Ok(())
    }

    fn length(id: &ObjectId, meta: &Meta) -> Option<u64> {
        (meta.size_bytes > 0 || is_empty_object(id)).then_some(meta.size_bytes)
    }

    /// Returns the lengths of many objects.
    fn sizes(&self, ids: &[ObjectId]) -> Result<Vec<Option<u64>>, StoreError> {
        let held = self.stored.counts().objects;
        if ids.len() >= LISTED_MIN && held / LISTED_PER_ID <= ids.len() as u64 {
            return self.find_in_lists(ids);
        }
        let looks = ids.iter().map(|id| async move {
            let key = self.remote.key(&keys::object(id));
            let found = self.remote.head_async(&key).await?;
            Ok::<_, StoreError>(found.and_then(|meta| Self::length(id, &meta)))
        });
        let looks: Vec<_> = looks.collect();
        self.remote.wait(futures_util::stream::iter(looks).buffered(REQUESTS_MAX).try_collect())
    }

    /// Returns the lengths of many objects from lists of their directories, with fewer requests.
    fn find_in_lists(&self, ids: &[ObjectId]) -> Result<Vec<Option<u64>>, StoreError> {
        let wanted: HashSet<&ObjectId> = ids.iter().collect();
        let places: BTreeSet<PathBuf> = ids
            .iter()
            .filter_map(|id| layout::object_path(id).parent().map(Path::to_owned))
            .collect();
        let lists = places.into_iter().map(|place| {
            let wanted = &wanted;
            async move {
                let prefix = format!("{}/{}", keys::OBJECTS, place.display());
                let mut found = Vec::new();
                let mut stream = self.remote.list_async(&prefix);
                while let Some(meta) = stream.try_next().await? {
                    let id = self.remote.below(&meta.key, keys::OBJECTS).and_then(keys::object_at);
                    if let Some(id) = id.filter(|id| wanted.contains(id)) {
                        found.push((id, Self::length(&id, &meta)));
                    }
                }
                Ok::<_, StoreError>(found)
            }
        });
        let lists: Vec<_> = lists.collect();
        let lists = futures_util::stream::iter(lists).buffer_unordered(LISTS_MAX).try_concat();
        let found: HashMap<ObjectId, Option<u64>> = self.remote.wait(lists)?.into_iter().collect();
        Ok(ids.iter().map(|id| found.get(id).copied().flatten()).collect())
    }

    /// Returns the dates of objects in the bucket; `None` for missing ones.
    pub(super) fn dates(&self, ids: &[ObjectId]) -> Result<Vec<Option<i64>>, StoreError> {
        let looks = ids.iter().map(|id| async move {
            let found = self.remote.head_async(&self.remote.key(&keys::object(id))).await?;
            Ok::<_, StoreError>(found.map(|meta| meta.modified))
        });
        let looks: Vec<_> = looks.collect();
        self.remote.wait(futures_util::stream::iter(looks).buffered(REQUESTS_MAX).try_collect())
    }

    /// Calls `take` with all objects, as the bucket lists them, until it returns false.
    pub(super) fn visit(
        &self,
        take: &mut dyn FnMut(ObjectId, Meta) -> bool,
    ) -> Result<(), StoreError> {
        self.remote.list(keys::OBJECTS, &mut |meta| {
            let id = self.remote.below(&meta.key, keys::OBJECTS).and_then(keys::object_at);
            id.is_none_or(|id| take(id, meta))
        })
    }
}

impl Objects for BucketObjects {
    fn size_bytes(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        Ok(self.sizes(&[*id])?[0])
    }

    fn held(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        Ok(self.all_held(&[*id])?[0])
    }

    fn all_held(&self, ids: &[ObjectId]) -> Result<Vec<Option<u64>>, StoreError> {
        let known: Vec<Option<u64>> = ids.iter().map(|id| self.leasing.known(id)).collect();
        let asked: Vec<ObjectId> = ids
            .iter()
            .zip(&known)
            .filter(|(_, known)| known.is_none())
            .map(|(id, _)| *id)
            .collect();
        let mut found = self.sizes(&asked)?.into_iter();
        let all: Vec<Option<u64>> =
            known.into_iter().map(|known| known.or_else(|| found.next().flatten())).collect();
        for (id, size_bytes) in ids.iter().zip(&all) {
            match size_bytes {
                Some(size_bytes) => self.leasing.note(id, *size_bytes),
                None => self.leasing.forget(id),
            }
        }
        Ok(all)
    }

    fn known(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        Ok(self.leasing.known(id))
    }

    fn pin(&self, ids: &[ObjectId]) -> Result<Option<Box<dyn Pin>>, StoreError> {
        Ok(Some(Box::new(self.leasing.pin(ids, PIN_SECONDS)?)))
    }

    fn ahead(&self, ids: &[ObjectId]) {
        let wanted: Vec<&ObjectId> =
            ids.iter().filter(|id| matches!(self.cache.size_bytes(id), Ok(None))).collect();
        if wanted.len() < 2 {
            return;
        }
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..wanted.len().min(AHEAD_MAX) {
                scope.spawn(|| {
                    while let Some(id) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                        // The caller that needs the object gets the error.
                        if self.fetch(id, WHOLE_BYTES_MAX).is_err() {
                            return;
                        }
                    }
                });
            }
        });
    }

    fn receive(
        &self,
        id: ObjectId,
        size_bytes: u64,
    ) -> Result<Box<dyn Receiving + '_>, StoreError> {
        self.evict(size_bytes);
        Ok(Box::new(BucketReceiving {
            remote: &self.remote,
            cache: &self.cache,
            units: &self.units,
            stored: &self.stored,
            in_cache: self.cache.receive(id, size_bytes)?,
            id,
            size_bytes,
        }))
    }

    fn open_verified(&self, id: &ObjectId) -> Result<Option<Content>, StoreError> {
        if let Some(content) = self.cached(id) {
            return Ok(Some(content));
        }
        let fetch = &self.fetches[usize::from(id.digest()[0]) % FETCHES];
        let _fetch = locked(fetch);
        if let Some(content) = self.cached(id) {
            return Ok(Some(content));
        }
        match self.fetch(id, u64::MAX)? {
            Fetched::Whole(bytes) => Ok(Some(Content::Whole(bytes))),
            Fetched::Cached => self.cache.open_verified(id),
            Fetched::Absent | Fetched::Large => Ok(None),
        }
    }

    fn sync(&self) -> Result<(), StoreError> {
        // Objects in the bucket are durable, and the cache need not be.
        Ok(())
    }

    fn space(&self) -> Result<Option<Space>, StoreError> {
        Ok(None)
    }

    fn count(&self, stop: &dyn Fn() -> bool) {
        let (mut objects, mut bytes) = (0, 0);
        let listed = self.visit(&mut |id, meta| {
            if let Some(size_bytes) = Self::length(&id, &meta) {
                (objects, bytes) = (objects + 1, bytes + size_bytes);
            }
            !stop()
        });
        match listed {
            Ok(()) if !stop() => self.stored.counted(objects, bytes),
            Ok(()) => {}
            Err(error) => tracing::error!("cannot count the objects: {}", error_chain(&error)),
        }
    }

    fn object_counts(&self) -> ObjectCounts {
        self.stored.counts()
    }

    fn corrupt(&self) -> u64 {
        self.corrupt.load(Ordering::Relaxed)
    }

    fn damaged_objects(&self) -> &DamagedObjects {
        &self.stored.damaged_objects
    }

    fn list(&self, below: &Path) -> Result<Vec<ObjectId>, StoreError> {
        let mut found = Vec::new();
        let prefix = format!("{}/{}", keys::OBJECTS, below.display());
        self.remote.list(&prefix, &mut |meta| {
            let id = self.remote.below(&meta.key, keys::OBJECTS).and_then(keys::object_at);
            found.extend(id);
            true
        })?;
        Ok(found)
    }

    fn read_medium(
        &self,
        id: &ObjectId,
        _: &mut MediumReader,
        pace: &mut dyn FnMut(u64) -> bool,
    ) -> Result<OnMedium, StoreError> {
        let what = || format!("read object {id}");
        let key = self.remote.key(&keys::object(id));
        let found = match self.remote.wait(self.remote.store().get(&key)) {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(OnMedium::Absent),
            Err(error) => return Err(self.remote.failed(what())(error)),
        };
        let size_bytes = found.meta.size;
        let etag = found.meta.e_tag.clone().unwrap_or_default();
        if size_bytes == 0 && !is_empty_object(id) {
            return Ok(OnMedium::Absent);
        }
        let mut hasher = Hasher::new(id.algorithm());
        let mut stream = found.into_stream();
        while let Some(chunk) = self.remote.wait(stream.next()) {
            let chunk = chunk.map_err(self.remote.failed(what()))?;
            hasher.update(&chunk);
            if !pace(chunk.len() as u64) {
                return Ok(OnMedium::Stopped);
            }
        }
        if hasher.finish() != *id {
            self.quarantine(id, &etag, size_bytes)?;
            return Ok(OnMedium::Corrupt);
        }
        self.stored.damaged_objects.mark_repaired(id);
        Ok(OnMedium::Whole(size_bytes))
    }

    fn is_doubtful(&self) -> bool {
        false
    }

    fn all_read(&self) {}
}
