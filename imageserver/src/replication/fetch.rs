//! Fetches the objects of an image that the store lacks.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::pin::pin;
use std::sync::{Arc, Mutex};

use api::object_server::{GetObjectsRequest, IDS_MAX};
use daemon::memory::FreedMemory;
use model::display::error_chain;
use model::image::Image;
use model::lock::locked;
use model::object::ObjectId;
use model::tree::encode::references;
use rpc::client::Client;
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use crate::store::error::StoreError;
use crate::store::image_trees::{TREE_BYTES_MAX, read_directory};
use crate::store::upload::{AbsentObjects, store_objects};
use crate::store::{Counters, Store};

/// The length of leases for the objects of an image that is being fetched, in seconds. They are
/// renewed by each attempt.
const LEASE_SECONDS: u32 = 3_600;

/// The most objects of one request.
const BATCH_OBJECTS_MAX: usize = 4_096;

/// The most bytes of one request, unless one object has more.
const BATCH_BYTES_MAX: u64 = 256 << 20;

/// Fetches objects from one server. An object that several images need is fetched once.
pub struct Fetcher {
    pub client: Client,
    pub store: Arc<Store>,
    pub counters: Arc<Counters>,
    pub tasks: TaskTracker,
    /// The objects that are being fetched.
    coming: Mutex<BTreeSet<ObjectId>>,
    came: Notify,
}

/// Objects that are being fetched, until this is dropped.
struct Claim<'fetcher> {
    fetcher: &'fetcher Fetcher,
    ids: Vec<ObjectId>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut coming = locked(&self.fetcher.coming);
        for id in &self.ids {
            coming.remove(id);
        }
        drop(coming);
        self.fetcher.came.notify_waiters();
    }
}

/// Subdirectories, and files by id with their lengths.
type Below = (Vec<ObjectId>, BTreeMap<ObjectId, u64>);

impl Fetcher {
    /// Fetches objects from the server of `client` into `store`.
    #[must_use]
    pub fn new(
        client: Client,
        store: Arc<Store>,
        counters: Arc<Counters>,
        tasks: TaskTracker,
    ) -> Self {
        let (coming, came) = (Mutex::default(), Notify::new());
        Self { client, store, counters, tasks, coming, came }
    }

    /// Fetches all objects that `image` needs and that are missing here. Calls `left` with the
    /// number of bytes that are still to be fetched. Objects that were fetched before a failure
    /// stay.
    ///
    /// # Errors
    ///
    /// Why not all objects were fetched. The fetched ones are stored, and not fetched again.
    pub async fn bring(&self, image: &Image, left: impl Fn(u64)) -> Result<(), String> {
        let root = image.content.root;
        let mut seen = BTreeSet::from([root]);
        let mut level = vec![root];
        let mut files: BTreeMap<ObjectId, u64> = BTreeMap::new();
        let mut bytes = 0;
        while !level.is_empty() {
            let missing = self.missing(level.clone()).await?;
            self.fetch(missing.into_iter().map(|id| (id, 0)).collect(), &|_| ()).await?;
            let (below, named) = self.read(level, &mut bytes).await?;
            files.extend(named);
            level = below.into_iter().filter(|id| seen.insert(*id)).collect();
        }
        // Its length is not known.
        files.extend(image.notes.build_log.map(|log| (log, 0)));
        let missing = self.missing(files.keys().copied().collect()).await?;
        let missing = missing.into_iter().map(|id| (id, files.get(&id).copied().unwrap_or(0)));
        self.fetch(missing.collect(), &left).await
    }

    /// Leases `ids`, and returns those that are missing here.
    async fn missing(&self, ids: Vec<ObjectId>) -> Result<Vec<ObjectId>, String> {
        self.blocking::<_, StoreError>(move |store| {
            // Leased before the lookup, so that objects that are found stay.
            store.leasing.give(&ids, LEASE_SECONDS)?;
            store.objects.missing(&ids)
        })
        .await
    }

    /// Runs work on the store on a thread that may block.
    pub async fn blocking<T: Send + 'static, E: Error + Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, E> + Send + 'static,
    ) -> Result<T, String> {
        let store = Arc::clone(&self.store);
        let done = self.tasks.spawn_blocking(move || work(&store)).await;
        done.map_err(|lost| lost.to_string())?.map_err(|error| error_chain(&error))
    }

    /// Reads local directories. `bytes` counts their encodings.
    async fn read(&self, directories: Vec<ObjectId>, bytes: &mut u64) -> Result<Below, String> {
        let store = Arc::clone(&self.store);
        let before = *bytes;
        let work = move || {
            let (mut below, mut files) = (Vec::new(), BTreeMap::new());
            let mut bytes = before;
            for id in directories {
                let encoding =
                    read_directory(&*store.objects, id).map_err(|error| error_chain(&error))?;
                bytes += encoding.len() as u64;
                if bytes > TREE_BYTES_MAX {
                    return Err("its tree is larger than a server takes".to_owned());
                }
                let named = references(id.algorithm(), &encoding).map_err(|error| {
                    format!("object {id} is no directory: {}", error_chain(&error))
                })?;
                files.extend(named.files);
                below.extend(named.directories);
            }
            Ok((below, files, bytes))
        };
        let done = self.tasks.spawn_blocking(work).await.map_err(|lost| lost.to_string())?;
        let (below, files, sum) = done?;
        *bytes = sum;
        Ok((below, files))
    }

    /// Fetches objects of these lengths, in batches.
    async fn fetch(&self, wanted: Vec<(ObjectId, u64)>, left: &impl Fn(u64)) -> Result<(), String> {
        let mut rest: BTreeMap<ObjectId, u64> = wanted.into_iter().collect();
        let _memory = FreedMemory::keep();
        loop {
            left(rest.values().sum());
            if rest.is_empty() {
                return Ok(());
            }
            let mut came = pin!(self.came.notified());
            // From here on no notification is missed.
            came.as_mut().enable();
            let claim = self.claim(&rest);
            if claim.ids.is_empty() {
                // Other images fetch all of these.
                came.await;
                let still = self.missing(rest.keys().copied().collect()).await?;
                let still: BTreeSet<ObjectId> = still.into_iter().collect();
                rest.retain(|id, _| still.contains(id));
                continue;
            }
            self.fetch_batch(&claim.ids).await?;
            for id in &claim.ids {
                rest.remove(id);
            }
        }
    }

    /// Claims a batch of objects that no other image is fetching.
    fn claim(&self, wanted: &BTreeMap<ObjectId, u64>) -> Claim<'_> {
        let mut coming = locked(&self.coming);
        let free = wanted.iter().filter(|(id, _)| !coming.contains(id));
        let ids = batch(free.map(|(id, bytes)| (*id, *bytes)));
        coming.extend(&ids);
        Claim { fetcher: self, ids }
    }

    async fn fetch_batch(&self, ids: &[ObjectId]) -> Result<(), String> {
        let request = GetObjectsRequest { ids: ids.to_vec() };
        let reader =
            self.client.get_objects(&request).await.map_err(|error| error_chain(&error))?;
        let (store, counters) = (Arc::clone(&self.store), Arc::clone(&self.counters));
        let reply = store_objects(store, counters, &self.tasks, reader, AbsentObjects::Skipped)
            .await
            .map_err(|fault| fault.message)?;
        if reply.added + reply.known >= ids.len() as u64 {
            return Ok(());
        }
        let absent = self.missing(ids.to_vec()).await?;
        match absent.first() {
            None => Ok(()),
            Some(first) => Err(format!(
                "the master has lost object {first} ({} more are missing there)",
                absent.len() - 1
            )),
        }
    }
}

/// Returns the first of `wanted`, which are requested at once.
fn batch(wanted: impl Iterator<Item = (ObjectId, u64)>) -> Vec<ObjectId> {
    let mut ids = Vec::new();
    let mut bytes: u64 = 0;
    for (id, length) in wanted.take(BATCH_OBJECTS_MAX.min(IDS_MAX)) {
        bytes = bytes.saturating_add(length);
        if !ids.is_empty() && bytes > BATCH_BYTES_MAX {
            break;
        }
        ids.push(id);
    }
    ids
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn batches_are_neither_too_many_nor_too_long() {
        let id = Algorithm::Blake3.digest(b"");
        let of = |lengths: &[u64]| batch(lengths.iter().map(|length| (id, *length))).len();
        let large = BATCH_BYTES_MAX;
        assert_eq!(of(&[]), 0);
        assert_eq!(of(&[1, 2, 3]), 3);
        assert_eq!(of(&[large * 2, 1]), 1);
        assert_eq!(of(&[1, large, 1]), 1);
        assert_eq!(of(&[1, large - 1, 1]), 2);
        assert_eq!(of(&[0; 5_000]), BATCH_OBJECTS_MAX);
    }
}
