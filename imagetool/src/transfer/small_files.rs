//! Fetches whole contents of small files into memory.

use api::object_server::GetObjectsRequest;
use model::object::ObjectId;
use rpc::client::Client;

use crate::output::progress::{Meter, Unit};
use crate::transfer::download::{BATCH_OBJECTS_MAX, DownloadError, next_object};

/// Fetches the content of each of `files`, given with their sizes in bytes, whose sum the caller
/// limits. `title` says what is done.
pub async fn contents(
    client: &Client,
    title: &'static str,
    files: &[(ObjectId, u64)],
    meter: &Meter,
) -> Result<Vec<Vec<u8>>, DownloadError> {
    meter.start(title, Unit::Items, Some(files.len() as u64));
    let mut contents = Vec::with_capacity(files.len());
    for batch in files.chunks(BATCH_OBJECTS_MAX) {
        let ids = batch.iter().map(|(id, _)| *id).collect();
        let mut reader = client.get_objects(&GetObjectsRequest { ids }).await?;
        for &(id, size_bytes) in batch {
            let length = next_object(&mut reader, id).await?;
            if length != size_bytes {
                return Err(DownloadError::Size { id, want: size_bytes, got: length });
            }
            let mut content = Vec::new();
            while let Some(chunk) = reader.chunk().await? {
                content.extend_from_slice(&chunk);
            }
            let got = id.algorithm().digest(&content);
            if got != id {
                return Err(DownloadError::Digest { want: id, got });
            }
            contents.push(content);
            meter.add(1);
        }
    }
    meter.finish();
    Ok(contents)
}
