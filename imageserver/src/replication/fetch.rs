//! Fetches what an image needs and is not here, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::api::object_server::{GetObjectsRequest, IDS_MAX};
use common::image::Image;
use common::object::ObjectId;
use common::report::report;
use common::tree::encode::references;
use common::wire::client::Client;
use tokio_util::task::TaskTracker;

use crate::admission::{TREE_BYTES_MAX, read_directory};
use crate::metrics::Metrics;
use crate::service::store_objects;
use crate::store::{Store, StoreError};

/// For how long objects are held that an image needs which is not visible yet, in seconds. They
/// are held anew each time that it is tried.
const LEASE_SECONDS: u32 = 3_600;

/// The most objects that are asked for at once.
const BATCH_OBJECTS_MAX: usize = 4_096;

/// The most bytes that are asked for at once, unless one object has more.
const BATCH_BYTES_MAX: u64 = 256 << 20;

/// Gets objects from one server.
#[derive(Clone)]
pub struct Fetcher {
    /// The server.
    pub client: Client,
    /// Where to.
    pub store: Arc<Store>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Tracks threads.
    pub tasks: TaskTracker,
}

/// The directories below those that were asked for, and files by id with their lengths.
type Below = (Vec<ObjectId>, BTreeMap<ObjectId, u64>);

impl Fetcher {
    /// Fetches all objects that `image` needs and that are missing here. `left` is told how many
    /// bytes are to come.
    ///
    /// # Errors
    ///
    /// Why not all came. What came is kept, and not fetched again.
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

    /// Those of `ids` that are not here; all of them are held for a while.
    async fn missing(&self, ids: Vec<ObjectId>) -> Result<Vec<ObjectId>, String> {
        self.blocking(move |store| {
            // Before they are looked for, so that what is found to be there stays.
            store.leasing.give(&ids, LEASE_SECONDS)?;
            store.objects.missing(&ids)
        })
        .await
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, String> {
        let store = Arc::clone(&self.store);
        let done = self.tasks.spawn_blocking(move || work(&store)).await;
        done.map_err(|lost| lost.to_string())?.map_err(|error| report(&error))
    }

    /// What is in directories that are here. `bytes` counts their encodings.
    async fn read(&self, directories: Vec<ObjectId>, bytes: &mut u64) -> Result<Below, String> {
        let store = Arc::clone(&self.store);
        let before = *bytes;
        let work = move || {
            let (mut below, mut files) = (Vec::new(), BTreeMap::new());
            let mut bytes = before;
            for id in directories {
                let encoding =
                    read_directory(&store.objects, id).map_err(|error| report(&error))?;
                bytes += encoding.len() as u64;
                if bytes > TREE_BYTES_MAX {
                    return Err("its tree is larger than a server takes".to_owned());
                }
                let named = references(id.algorithm(), &encoding)
                    .map_err(|error| format!("object {id} is no directory: {}", report(&error)))?;
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
        let mut rest_bytes: u64 = wanted.iter().map(|(_, bytes)| *bytes).sum();
        left(rest_bytes);
        let mut rest = &wanted[..];
        while !rest.is_empty() {
            let (batch, bytes) = batch(rest);
            let ids: Vec<ObjectId> = rest[..batch].iter().map(|(id, _)| *id).collect();
            self.fetch_batch(&ids).await?;
            rest = &rest[batch..];
            rest_bytes -= bytes;
            left(rest_bytes);
        }
        Ok(())
    }

    async fn fetch_batch(&self, ids: &[ObjectId]) -> Result<(), String> {
        let request = GetObjectsRequest { ids: ids.to_vec() };
        let reader = self.client.get_objects(&request).await.map_err(|error| report(&error))?;
        let (store, metrics) = (Arc::clone(&self.store), Arc::clone(&self.metrics));
        let reply = store_objects(store, metrics, &self.tasks, reader, ids)
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

/// How many of `wanted` are asked for at once, and how long these are.
fn batch(wanted: &[(ObjectId, u64)]) -> (usize, u64) {
    let most = BATCH_OBJECTS_MAX.min(IDS_MAX);
    let mut bytes = 0;
    for (index, (_, length)) in wanted.iter().take(most).enumerate() {
        if index > 0 && bytes + length > BATCH_BYTES_MAX {
            return (index, bytes);
        }
        bytes += length;
    }
    (wanted.len().min(most), bytes)
}

#[cfg(test)]
mod tests {
    use common::object::Algorithm;

    use super::*;

    #[test]
    fn batches_are_neither_too_many_nor_too_long() {
        let id = Algorithm::Blake3.digest(b"");
        let of = |lengths: &[u64]| {
            batch(&lengths.iter().map(|length| (id, *length)).collect::<Vec<_>>())
        };
        let large = BATCH_BYTES_MAX;
        assert_eq!(of(&[]), (0, 0));
        assert_eq!(of(&[1, 2, 3]), (3, 6));
        assert_eq!(of(&[large * 2, 1]), (1, large * 2));
        assert_eq!(of(&[1, large, 1]), (1, 1));
        assert_eq!(of(&[1, large - 1, 1]), (2, large));
        assert_eq!(of(&[0; 5_000]), (BATCH_OBJECTS_MAX, 0));
    }
}
