//! Objects in a bucket, behind a cache on the server's own disk.
//!
//! What is fetched is hashed while it goes into the cache and is served from there, so that nothing
//! corrupt is ever sent, and a large object takes no memory. A corrupt object is copied to the
//! quarantine, and an empty one is written in its place if it is still the same: one that is good
//! and came meanwhile stays.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::stream::{StreamExt as _, TryStreamExt as _};
use model::lock::locked;
use model::object::{Hasher, ObjectId};
use model::report::report;
use object_store::{Error, ObjectStoreExt as _};
use tokio::sync::Semaphore;

use super::leases::BucketLeasing;
use super::remote::{Meta, REQUESTS_MAX, Remote, random};
use super::{keys, layout};
use crate::core::collection::disk_pressure::Space;
use crate::store::bucket::receiving::{BucketReceiving, UNITS_MAX};
use crate::store::content::Content;
use crate::store::contract::{Objects, Pin, Receiving};
use crate::store::damaged_objects::{Wound, Wounds};
use crate::store::error::StoreError;
use crate::store::local::objects::{LocalObjects, WHOLE_BYTES_MAX, is_empty_object};
use crate::store::medium_reader::MediumReader;
use crate::store::medium_reader::OnMedium;
use crate::store::object_counts::Holdings;

/// How many objects are fetched ahead at once.
const AHEAD_MAX: usize = 16;

/// For how long what an image needs is held while the image is added, in seconds.
const PIN_SECONDS: u32 = 2 * 3_600;

/// From how many objects on it is looked for them in lists; unless there are so many others for
/// each that lists are longer.
const LISTED_MIN: usize = 2_000;
const LISTED_PER_ID: u64 = 100;

/// How many lists are asked for at once.
const LISTS_MAX: usize = 32;

/// By which part the cache is emptied when it is full.
const EVICT_PART: u64 = 10;

/// How many objects may be fetched at once of those whose digests begin alike: one.
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

/// What is known of all that is in the bucket.
pub struct Stored {
    leasing: Arc<BucketLeasing>,
    wounds: Wounds,
    objects: AtomicU64,
    bytes: AtomicU64,
    counted: AtomicBool,
}

impl Stored {
    /// Takes note that `id` was stored in the bucket.
    pub fn note(&self, id: &ObjectId, size_bytes: u64) {
        if self.leasing.known(id).is_none() {
            self.objects.fetch_add(1, Ordering::Relaxed);
            self.bytes.fetch_add(size_bytes, Ordering::Relaxed);
        }
        self.leasing.note(id, size_bytes);
        self.wounds.heal(id);
    }

    /// Takes note of what a list of all objects has shown.
    pub fn counted(&self, objects: u64, bytes: u64) {
        self.objects.store(objects, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.counted.store(true, Ordering::Release);
    }
}

/// What came of fetching an object.
enum Fetched {
    /// Small: all of it.
    Whole(Bytes),
    /// It is in the cache.
    Cached,
    /// There is none.
    Absent,
    /// It is larger than was asked for.
    Large,
}

impl BucketObjects {
    pub fn new(
        remote: Arc<Remote>,
        cache: LocalObjects,
        leasing: Arc<BucketLeasing>,
        cache_bytes_max: u64,
    ) -> Self {
        cache.count(|| false);
        let stored = Arc::new(Stored {
            leasing: Arc::clone(&leasing),
            wounds: Wounds::default(),
            objects: AtomicU64::default(),
            bytes: AtomicU64::default(),
            counted: AtomicBool::default(),
        });
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

    /// Frees the oldest of what the cache holds, if it holds too much or `now` needs it.
    pub(super) fn evict(&self, more_bytes: u64) {
        let held = self.cache.holdings().bytes;
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
            return tracing::error!("the cache is not emptied: {}", report(&error));
        }
        for (_, id) in all.into_keys() {
            if self.cache.holdings().bytes.saturating_add(more_bytes) <= goal {
                break;
            }
            let removed = self.cache.take_away(&id).and_then(|taken| match taken {
                Some(taken) => taken.remove(),
                None => Ok(()),
            });
            if let Err(error) = removed {
                return tracing::error!("the cache is not emptied: {}", report(&error));
            }
        }
    }

    /// What the cache has. One that fails is as good as empty.
    fn cached(&self, id: &ObjectId) -> Option<Content> {
        self.cache.open_verified(id).unwrap_or_else(|error| {
            tracing::error!("the cache fails: {}", report(&error));
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
                self.put_aside(id, &etag, size_bytes)?;
                return Ok(Fetched::Absent);
            }
            // It is served all the same.
            if let Err(error) = self.keep(id, &bytes) {
                tracing::warn!("an object does not get into the cache: {}", report(&error));
            }
            return Ok(Fetched::Whole(bytes));
        }
        self.evict(size_bytes);
        let mut receiving = self.cache.receive(*id, size_bytes)?;
        let mut stream = found.into_stream();
        while let Some(chunk) = self.remote.wait(stream.next()) {
            receiving.write(&chunk.map_err(self.remote.failed(what()))?)?;
        }
        match receiving.finish() {
            Ok(()) => Ok(Fetched::Cached),
            Err(StoreError::Content { .. }) => {
                self.put_aside(id, &etag, size_bytes)?;
                Ok(Fetched::Absent)
            }
            Err(error) => Err(error),
        }
    }

    fn keep(&self, id: &ObjectId, bytes: &Bytes) -> Result<(), StoreError> {
        self.evict(bytes.len() as u64);
        let mut receiving = self.cache.receive(*id, bytes.len() as u64)?;
        receiving.write(bytes)?;
        receiving.finish()
    }

    /// Moves a corrupt object out of the way, unless another has taken its place by now.
    fn put_aside(&self, id: &ObjectId, etag: &str, size_bytes: u64) -> Result<(), StoreError> {
        self.corrupt.fetch_add(1, Ordering::Relaxed);
        let from = self.remote.key(&keys::object(id));
        let aside = self.remote.key(&keys::aside(id, &random()?));
        let copied = self.remote.wait(self.remote.store().copy(&from, &aside));
        copied.map_err(self.remote.failed(format!("put the corrupt object {id} aside")))?;
        if self.remote.update(&from, Vec::new(), etag)?.is_some() {
            tracing::error!(
                object = %id, size_bytes, %aside,
                "an object is corrupt: put aside, not served; upload it again"
            );
            self.leasing.forget(id);
            self.stored.wounds.add(*id, Wound::Corrupt);
        }
        Ok(())
    }

    fn length(id: &ObjectId, meta: &Meta) -> Option<u64> {
        (meta.size_bytes > 0 || is_empty_object(id)).then_some(meta.size_bytes)
    }

    /// Asks the bucket for many at once.
    fn look(&self, ids: &[ObjectId]) -> Result<Vec<Option<u64>>, StoreError> {
        let held = self.stored.objects.load(Ordering::Relaxed);
        if ids.len() >= LISTED_MIN && held / LISTED_PER_ID <= ids.len() as u64 {
            return self.look_in_lists(ids);
        }
        let looks = ids.iter().map(|id| async move {
            let key = self.remote.key(&keys::object(id));
            let found = self.remote.head_async(&key).await?;
            Ok::<_, StoreError>(found.and_then(|meta| Self::length(id, &meta)))
        });
        let looks: Vec<_> = looks.collect();
        self.remote.wait(futures_util::stream::iter(looks).buffered(REQUESTS_MAX).try_collect())
    }

    /// The same by lists of all that begins like one of them: far fewer requests if they are many.
    fn look_in_lists(&self, ids: &[ObjectId]) -> Result<Vec<Option<u64>>, StoreError> {
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

    /// When the bucket dates objects; `None` for those that are not there.
    pub(super) fn dates(&self, ids: &[ObjectId]) -> Result<Vec<Option<i64>>, StoreError> {
        let looks = ids.iter().map(|id| async move {
            let found = self.remote.head_async(&self.remote.key(&keys::object(id))).await?;
            Ok::<_, StoreError>(found.map(|meta| meta.modified))
        });
        let looks: Vec<_> = looks.collect();
        self.remote.wait(futures_util::stream::iter(looks).buffered(REQUESTS_MAX).try_collect())
    }

    /// Gives all objects to `take`, as the bucket lists them, until it says `false`.
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
        Ok(self.look(&[*id])?[0])
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
        let mut found = self.look(&asked)?.into_iter();
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
                        // Whoever needs it hears of what is wrong.
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
        Ok(Box::new(BucketReceiving::new(self, id, size_bytes)?))
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
        // What the bucket has taken is durable, and the cache need not be.
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
            Err(error) => tracing::error!("the objects are not counted: {}", report(&error)),
        }
    }

    fn holdings(&self) -> Holdings {
        Holdings {
            objects: self.stored.objects.load(Ordering::Relaxed),
            bytes: self.stored.bytes.load(Ordering::Relaxed),
            complete: self.stored.counted.load(Ordering::Acquire),
        }
    }

    fn corrupt(&self) -> u64 {
        self.corrupt.load(Ordering::Relaxed)
    }

    fn wounds(&self) -> &Wounds {
        &self.stored.wounds
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
            self.put_aside(id, &etag, size_bytes)?;
            return Ok(OnMedium::Corrupt);
        }
        self.stored.wounds.heal(id);
        Ok(OnMedium::Whole(size_bytes))
    }

    fn is_doubtful(&self) -> bool {
        false
    }

    fn all_read(&self) {}
}
