//! Opens a store: the one place that puts the parts of each kind together.

use std::path::Path;
use std::sync::{Arc, RwLock};

use nix::fcntl::Flock;
use tokio::runtime::Handle;

use super::bucket::collecting::BucketCollecting;
use super::bucket::image_holds::BucketHolding;
use super::bucket::leases::BucketLeasing;
use super::bucket::objects::BucketObjects;
use super::bucket::records::{BucketDirectories, BucketRecords};
use super::bucket::remote::Remote;
use super::bucket::settings::BucketSettings;
use super::bucket::{expect_conditional_writes, expect_format, own_id};
use super::directories::StoredDirectories;
use super::error::StoreError;
use super::files::{empty, lock, make_directory};
use super::images::Images;
use super::local::collecting::LocalCollecting;
use super::local::leasing::{LocalHolding, LocalLeasing};
use super::local::objects::LocalObjects;
use super::local::records::{LocalDirectories, LocalRecords};
use super::{Store, layout};

impl Store {
    /// Opens the data directory, creates missing parts, and removes unfinished files of a former
    /// server. Reads the record of each image, but no object.
    pub fn open(data: &Path) -> Result<Self, StoreError> {
        Self::open_packing(data, 0)
    }

    /// Opens the data directory like [`Store::open`], and packs new objects with this level of
    /// zstd if that saves enough. Objects that are already stored stay as they are.
    pub fn open_packing(data: &Path, level: i32) -> Result<Self, StoreError> {
        let what = "is what a server with a --bucket keeps on its own disk";
        let lock = take_directory(data, layout::SERVER, what)?;
        empty_incoming(data)?;
        let is_new = !data.join(layout::OBJECTS).exists();
        let objects = Arc::new(LocalObjects::open(data, level)?);
        let leasing = Arc::new(LocalLeasing::open(data, is_new));
        let images = Arc::new(Images::open(Box::new(LocalRecords::open(data)?))?);
        let adding = Arc::<RwLock<()>>::default();
        let collecting = LocalCollecting {
            objects: Arc::clone(&objects),
            leasing: Arc::clone(&leasing),
            images: Arc::clone(&images),
            adding: Arc::clone(&adding),
        };
        Ok(Self {
            objects,
            images,
            private: None,
            directories: StoredDirectories::open(Box::new(LocalDirectories::new(data))),
            holding: Box::new(LocalHolding::open(data)),
            leasing,
            collecting: Box::new(collecting),
            adding,
            data: data.to_owned(),
            _lock: lock,
        })
    }

    /// Opens the store in a bucket, which this server may share with others. `data` is for the
    /// server's own files. Requests to the bucket run on `runtime`; the threads that make them
    /// block.
    pub fn open_bucket(
        data: &Path,
        settings: &BucketSettings,
        runtime: Handle,
    ) -> Result<Self, StoreError> {
        let lock =
            take_directory(data, layout::IMAGES, "holds the images of a server without a bucket")?;
        let server = own_id(data)?;
        empty_incoming(data)?;
        let remote = Arc::new(Remote::new(settings, server, runtime)?);
        expect_conditional_writes(&remote)?;
        expect_format(&remote)?;
        remote.tell_time()?;
        let cache = LocalObjects::open(data, 0)?;
        let leasing = Arc::new(BucketLeasing::new(Arc::clone(&remote)));
        let objects = Arc::new(BucketObjects::new(
            Arc::clone(&remote),
            cache,
            Arc::clone(&leasing),
            settings.cache_bytes_max,
        ));
        let images = Arc::new(Images::open(Box::new(BucketRecords::new(Arc::clone(&remote))))?);
        let collecting = BucketCollecting::new(
            Arc::clone(&remote),
            Arc::clone(&objects),
            Arc::clone(&images),
            i64::try_from(settings.unneeded_for.as_secs()).unwrap_or(i64::MAX),
        );
        Ok(Self {
            objects,
            images,
            private: None,
            directories: StoredDirectories::open(Box::new(BucketDirectories::new(Arc::clone(
                &remote,
            )))),
            holding: Box::new(BucketHolding::new(remote)),
            leasing,
            collecting: Box::new(collecting),
            adding: Arc::default(),
            data: data.to_owned(),
            _lock: lock,
        })
    }
}

/// Creates the data directory and locks it. Refuses one that contains `foreign`, because then
/// it `is_what` belongs to the other kind of store.
fn take_directory(
    data: &Path,
    foreign: &str,
    is_what: &'static str,
) -> Result<Flock<std::fs::File>, StoreError> {
    make_directory(data)?;
    let lock = lock(data)?;
    if data.join(foreign).exists() {
        return Err(StoreError::OfTheOtherKind { path: data.to_owned(), what: is_what });
    }
    Ok(lock)
}

/// Removes the temporary files that a former server left.
fn empty_incoming(data: &Path) -> Result<(), StoreError> {
    let incoming = data.join(layout::INCOMING);
    make_directory(&incoming)?;
    empty(&incoming)
}
