//! Stores an object in the bucket: first in the cache, where it is hashed, then in the bucket.
//!
//! Nothing is uploaded before its digest was verified. Small objects take one request each, many in
//! parallel. A large object is uploaded in parts and becomes visible when it is complete.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use model::object::ObjectId;
use object_store::{ObjectStore as _, ObjectStoreExt as _, PutMultipartOptions};
use tokio::sync::{Semaphore, oneshot};

use super::keys;
use super::leases::BucketLeasing;
use super::remote::Remote;
use crate::store::content::ContentReader;
use crate::store::contract::{Objects as _, PendingStore, Receiving};
use crate::store::damaged_objects::DamagedObjects;
use crate::store::error::{StoreError, failed};
use crate::store::local::objects::LocalObjects;
use crate::store::object_counts::ObjectCounts;

/// How much is sent at once, in units.
pub const UNITS_MAX: usize = 64;

/// A unit, in bytes: no object counts less.
const UNIT_BYTES: u64 = 1 << 20;

/// The longest object that is sent in one request, and the length of a part, in bytes.
const PART_BYTES: u64 = 8 << 20;

/// How many parts of one object are sent at once.
const PARTS_AT_ONCE: usize = 4;

/// The most parts of one object that any bucket takes, less some.
const PARTS_MAX: u64 = 9_000;

/// How many objects the bucket holds, and which of them are damaged.
pub struct Stored {
    leasing: Arc<BucketLeasing>,
    pub(super) damaged_objects: DamagedObjects,
    objects: AtomicU64,
    bytes: AtomicU64,
    counted: AtomicBool,
}

impl Stored {
    pub fn new(leasing: Arc<BucketLeasing>) -> Self {
        Self {
            leasing,
            damaged_objects: DamagedObjects::default(),
            objects: AtomicU64::default(),
            bytes: AtomicU64::default(),
            counted: AtomicBool::default(),
        }
    }

    pub fn counts(&self) -> ObjectCounts {
        ObjectCounts {
            objects: self.objects.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            complete: self.counted.load(Ordering::Acquire),
        }
    }

    /// Records that `id` was stored in the bucket.
    pub fn note(&self, id: &ObjectId, size_bytes: u64) {
        if self.leasing.known(id).is_none() {
            self.objects.fetch_add(1, Ordering::Relaxed);
            self.bytes.fetch_add(size_bytes, Ordering::Relaxed);
        }
        self.leasing.note(id, size_bytes);
        self.damaged_objects.mark_repaired(id);
    }

    /// Records what a list of all objects has shown.
    pub fn counted(&self, objects: u64, bytes: u64) {
        self.objects.store(objects, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.counted.store(true, Ordering::Release);
    }
}

/// An object that is being stored.
pub struct BucketReceiving<'store> {
    pub(super) remote: &'store Arc<Remote>,
    pub(super) cache: &'store LocalObjects,
    /// Limits what is sent at once.
    pub(super) units: &'store Arc<Semaphore>,
    pub(super) stored: &'store Arc<Stored>,
    pub(super) in_cache: Box<dyn Receiving + 'store>,
    pub(super) id: ObjectId,
    pub(super) size_bytes: u64,
}

impl Receiving for BucketReceiving<'_> {
    fn write(&mut self, content: &[u8]) -> Result<(), StoreError> {
        self.in_cache.write(content)
    }

    fn finish(self: Box<Self>) -> Result<PendingStore, StoreError> {
        let Self { remote, cache, units, stored, in_cache, id, size_bytes } = *self;
        in_cache.finish()?.wait()?;
        let sending = Sending { remote, units, stored, id, size_bytes };
        match cache.open_verified(&id)? {
            None => Err(sending.lost()),
            Some(content) if size_bytes <= PART_BYTES => {
                let bytes = content.into_bytes().map_err(failed(format!("store object {id}")))?;
                sending.whole(bytes)
            }
            Some(content) => sending.in_parts(content.into_reader()),
        }
    }
}

/// An object that is in the cache, and goes to the bucket.
struct Sending<'store> {
    remote: &'store Arc<Remote>,
    units: &'store Arc<Semaphore>,
    stored: &'store Arc<Stored>,
    id: ObjectId,
    size_bytes: u64,
}

impl Sending<'_> {
    fn lost(&self) -> StoreError {
        let source = std::io::Error::other("it is no longer in the cache");
        StoreError::Io { what: format!("store object {}", self.id), source }
    }

    /// Sends the object in one request, in parallel with others.
    fn whole(self, bytes: Bytes) -> Result<PendingStore, StoreError> {
        let Self { remote, units: semaphore, stored, id, size_bytes } = self;
        let units = u32::try_from(size_bytes.div_ceil(UNIT_BYTES).max(1)).unwrap_or(1);
        let permits = Arc::clone(semaphore).acquire_many_owned(units);
        let permit = remote.wait(permits).expect("the semaphore is never closed");
        let sending = Arc::clone(remote);
        let (sender, receiver) = oneshot::channel();
        remote.runtime().spawn(async move {
            let key = sending.key(&keys::object(&id));
            let done = sending.store().put(&key, bytes.into()).await;
            let done = done.map(drop).map_err(sending.failed(format!("store object {id}")));
            drop(permit);
            // Nobody listens if the upload has failed meanwhile.
            let _sent = sender.send(done);
        });
        let stored = Arc::clone(stored);
        Ok(PendingStore::later(move || {
            receiver.blocking_recv().unwrap_or_else(|_| {
                let source = std::io::Error::other("the server stops");
                Err(StoreError::Io { what: format!("store object {id}"), source })
            })?;
            stored.note(&id, size_bytes);
            Ok(())
        }))
    }

    /// Sends the object in parts, and waits for all of them.
    fn in_parts(self, mut content: ContentReader) -> Result<PendingStore, StoreError> {
        let Self { remote, units: semaphore, stored, id, size_bytes } = self;
        let why = || remote.failed(format!("store object {id}"));
        let units = u32::try_from(UNITS_MAX / 2).unwrap_or(1);
        let permits = Arc::clone(semaphore).acquire_many_owned(units);
        let _permit = remote.wait(permits).expect("the semaphore is never closed");
        let key = remote.key(&keys::object(&id));
        let options = PutMultipartOptions::default();
        let mut upload =
            remote.wait(remote.store().put_multipart_opts(&key, options)).map_err(why())?;
        let part_bytes = PART_BYTES.max(size_bytes.div_ceil(PARTS_MAX));
        let mut parts = FuturesUnordered::new();
        let mut send = || -> Result<(), StoreError> {
            let mut rest = size_bytes;
            while rest > 0 {
                let length = rest.min(part_bytes);
                let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
                let read = content.by_ref().take(length).read_to_end(&mut bytes);
                if read.map_err(failed(format!("store object {id}")))? as u64 != length {
                    return Err(Sending { remote, units: semaphore, stored, id, size_bytes }.lost());
                }
                rest -= length;
                parts.push(upload.put_part(bytes.into()));
                while parts.len() >= PARTS_AT_ONCE {
                    remote.wait(parts.next()).expect("there are some").map_err(why())?;
                }
            }
            while let Some(sent) = remote.wait(parts.next()) {
                sent.map_err(why())?;
            }
            Ok(())
        };
        let sent = send();
        drop(parts);
        let sent = sent.and_then(|()| remote.wait(upload.complete()).map_err(why()));
        if sent.is_err() {
            // The bucket's rule for incomplete uploads removes the rest.
            let _aborted = remote.wait(upload.abort());
        }
        sent?;
        stored.note(&id, size_bytes);
        Ok(PendingStore::done())
    }
}
