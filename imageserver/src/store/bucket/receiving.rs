//! An object on its way into the bucket: first into the cache, where it is hashed, then out.
//!
//! Nothing is sent before it is known to be what was announced. Small ones go in one request each,
//! many at once; a large one goes in parts, and is seen when all of them are there.

use std::io::Read as _;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use model::object::ObjectId;
use object_store::{ObjectStore as _, ObjectStoreExt as _, PutMultipartOptions};
use tokio::sync::oneshot;

use super::keys;
use super::objects::BucketObjects;
use crate::store::content::ContentReader;
use crate::store::contract::{Landing, Receiving};
use crate::store::error::{StoreError, failed};
use crate::store::local::receiving::LocalReceiving;

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

/// An object that is being stored.
pub struct BucketReceiving<'store> {
    objects: &'store BucketObjects,
    inner: LocalReceiving<'store>,
    id: ObjectId,
    size_bytes: u64,
}

impl<'store> BucketReceiving<'store> {
    pub fn new(
        objects: &'store BucketObjects,
        id: ObjectId,
        size_bytes: u64,
    ) -> Result<Self, StoreError> {
        let inner = objects.cache.receive(id, size_bytes)?;
        Ok(Self { objects, inner, id, size_bytes })
    }
}

impl Receiving for BucketReceiving<'_> {
    fn write(&mut self, content: &[u8]) -> Result<(), StoreError> {
        self.inner.write(content)
    }

    fn finish(self: Box<Self>) -> Result<Landing, StoreError> {
        let Self { objects, inner, id, size_bytes } = *self;
        inner.finish()?;
        let sending = Sending { objects, id, size_bytes };
        match objects.cache.open_verified(&id)? {
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
    objects: &'store BucketObjects,
    id: ObjectId,
    size_bytes: u64,
}

impl Sending<'_> {
    fn lost(&self) -> StoreError {
        let source = std::io::Error::other("it is no longer in the cache");
        StoreError::Io { what: format!("store object {}", self.id), source }
    }

    /// Sends it in one request, while others are sent.
    fn whole(self, bytes: Bytes) -> Result<Landing, StoreError> {
        let Self { objects, id, size_bytes } = self;
        let units = u32::try_from(size_bytes.div_ceil(UNIT_BYTES).max(1)).unwrap_or(1);
        let places = Arc::clone(&objects.units).acquire_many_owned(units);
        let place = objects.remote.wait(places).expect("the semaphore is never closed");
        let remote = Arc::clone(&objects.remote);
        let (sender, receiver) = oneshot::channel();
        objects.remote.runtime().spawn(async move {
            let key = remote.key(&keys::object(&id));
            let done = remote.store().put(&key, bytes.into()).await;
            let done = done.map(drop).map_err(remote.failed(format!("store object {id}")));
            drop(place);
            // Who does not listen has failed itself.
            let _heard = sender.send(done);
        });
        let stored = Arc::clone(&objects.stored);
        Ok(Landing::later(move || {
            receiver.blocking_recv().unwrap_or_else(|_| {
                let source = std::io::Error::other("the server stops");
                Err(StoreError::Io { what: format!("store object {id}"), source })
            })?;
            stored.note(&id, size_bytes);
            Ok(())
        }))
    }

    /// Sends it in parts, and waits until all are there.
    fn in_parts(self, mut content: ContentReader) -> Result<Landing, StoreError> {
        let Self { objects, id, size_bytes } = self;
        let remote = &objects.remote;
        let why = || remote.failed(format!("store object {id}"));
        let units = u32::try_from(UNITS_MAX / 2).unwrap_or(1);
        let places = Arc::clone(&objects.units).acquire_many_owned(units);
        let _place = remote.wait(places).expect("the semaphore is never closed");
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
                    return Err(Sending { objects, id, size_bytes }.lost());
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
            // What is left of it is for the rule of the bucket that ends uploads.
            let _aborted = remote.wait(upload.abort());
        }
        sent?;
        objects.stored.note(&id, size_bytes);
        Ok(Landing::done())
    }
}
