//! Fetches the directories that are wanted of [`Listings`].

use api::object_server::GetObjectsRequest;
use api::object_stream::Head;
use model::object::ObjectId;
use model::tree::TreeError;
use model::tree::encode::DIRECTORY_BYTES_MAX;
use rpc::client::Client;

use super::Listings;
use crate::download::{BATCH_OBJECTS_MAX, DownloadError, TREE_BYTES_MAX};
use crate::progress::{Meter, Unit};

/// Why a directory cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lack {
    /// The server does not have it.
    Absent,
    /// What the server sends is not it.
    Damaged(TreeError),
}

/// Takes looks until nothing more is wanted for one, and gives what the last has seen.
///
/// # Errors
///
/// [`DownloadError`]; also [`DownloadError::Absent`] for a directory that the server lacks.
pub async fn look<T>(
    client: &Client,
    listings: &mut Listings,
    meter: &Meter,
    mut take: impl FnMut(&mut Listings) -> T,
) -> Result<T, DownloadError> {
    meter.start("Fetching directories", Unit::Items, None);
    let mut total = 0;
    loop {
        let seen = take(listings);
        let wanted = listings.wanted();
        if wanted.is_empty() {
            meter.finish();
            return Ok(seen);
        }
        match fetch(client, listings, &wanted, &mut total, meter).await?.pop() {
            None => {}
            Some((id, Lack::Absent)) => return Err(DownloadError::Absent { id }),
            Some((_, Lack::Damaged(source))) => return Err(source.into()),
        }
    }
}

/// Fetches the directories `ids` into `listings`, and gives those that cannot be had; they are
/// wanted no longer. `total` counts bytes over several calls.
///
/// # Errors
///
/// [`DownloadError`].
pub async fn fetch(
    client: &Client,
    listings: &mut Listings,
    ids: &[ObjectId],
    total: &mut u64,
    meter: &Meter,
) -> Result<Vec<(ObjectId, Lack)>, DownloadError> {
    let mut lacking = Vec::new();
    for batch in ids.chunks(BATCH_OBJECTS_MAX) {
        let mut reader = client.get_objects(&GetObjectsRequest { ids: batch.to_vec() }).await?;
        for &id in batch {
            let size_bytes = match reader.head().await? {
                Head::Object { id: got, size_bytes } if got == id => size_bytes,
                Head::Absent(got) if got == id => {
                    lacking.push((id, Lack::Absent));
                    listings.give_up(id);
                    continue;
                }
                Head::Object { id: got, .. } | Head::Absent(got) => {
                    return Err(DownloadError::Other { want: id, got: got.to_string() });
                }
                Head::End => return Err(DownloadError::Other { want: id, got: "the end".into() }),
            };
            *total = total.saturating_add(size_bytes);
            if size_bytes > DIRECTORY_BYTES_MAX as u64 || *total > TREE_BYTES_MAX {
                return Err(DownloadError::TooLarge);
            }
            let mut encoding = Vec::new();
            while let Some(chunk) = reader.chunk().await? {
                encoding.extend_from_slice(&chunk);
            }
            if let Err(error) = listings.insert(id, &encoding) {
                lacking.push((id, Lack::Damaged(error)));
                listings.give_up(id);
            }
            meter.add(1);
        }
    }
    Ok(lacking)
}
