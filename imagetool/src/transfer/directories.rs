//! Fetches the directories that a [`DirectoryCache`] wants.

use api::object_server::GetObjectsRequest;
use model::object::ObjectId;
use model::tree::TreeError;
use model::tree::encode::DIRECTORY_BYTES_MAX;
use rpc::client::Client;

use crate::directory_cache::DirectoryCache;
use crate::output::progress::{Meter, Unit};
use crate::transfer::download::{BATCH_OBJECTS_MAX, DownloadError, TREE_BYTES_MAX, next_object};

/// Why a directory cannot be fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unavailable {
    Absent,
    /// The server sent something else.
    Damaged(TreeError),
}

/// Repeats `query`, fetching the directories that it wants, until none is missing. Returns the last
/// result.
///
/// # Errors
///
/// [`DownloadError`]; also [`DownloadError::Absent`] for a directory that the server lacks.
pub async fn fetch_for<T>(
    client: &Client,
    cache: &mut DirectoryCache,
    meter: &Meter,
    mut query: impl FnMut(&mut DirectoryCache) -> T,
) -> Result<T, DownloadError> {
    meter.start("Fetching directories", Unit::Items, None);
    let mut total = 0;
    loop {
        let seen = query(cache);
        let wanted = cache.wanted();
        if wanted.is_empty() {
            meter.finish();
            return Ok(seen);
        }
        match fetch(client, cache, &wanted, &mut total, meter).await?.pop() {
            None => {}
            Some((id, Unavailable::Absent)) => return Err(DownloadError::Absent { id }),
            Some((_, Unavailable::Damaged(source))) => return Err(source.into()),
        }
    }
}

/// Fetches the directories `ids` into `cache`. Returns those that are unavailable; they are no
/// longer wanted. `total` counts bytes over several calls.
pub async fn fetch(
    client: &Client,
    cache: &mut DirectoryCache,
    ids: &[ObjectId],
    total: &mut u64,
    meter: &Meter,
) -> Result<Vec<(ObjectId, Unavailable)>, DownloadError> {
    let mut unavailable = Vec::new();
    for batch in ids.chunks(BATCH_OBJECTS_MAX) {
        let mut reader = client.get_objects(&GetObjectsRequest { ids: batch.to_vec() }).await?;
        for &id in batch {
            let size_bytes = match next_object(&mut reader, id).await {
                Ok(size_bytes) => size_bytes,
                Err(DownloadError::Absent { .. }) => {
                    unavailable.push((id, Unavailable::Absent));
                    cache.mark_unavailable(id);
                    continue;
                }
                Err(error) => return Err(error),
            };
            *total = total.saturating_add(size_bytes);
            if size_bytes > DIRECTORY_BYTES_MAX as u64 || *total > TREE_BYTES_MAX {
                return Err(DownloadError::TooLarge);
            }
            let mut encoding = Vec::new();
            while let Some(chunk) = reader.chunk().await? {
                encoding.extend_from_slice(&chunk);
            }
            if let Err(error) = cache.insert(id, &encoding) {
                unavailable.push((id, Unavailable::Damaged(error)));
                cache.mark_unavailable(id);
            }
            meter.add(1);
        }
    }
    Ok(unavailable)
}
