//! Reads the databases of packages from the image server.

use api::object_server::GetObjectsRequest;
use api::object_stream::Head;
use model::image::Package;
use model::tree::Tree;
use rpc::client::Client;

use super::{Part, packages, parts};
use crate::download::{BATCH_OBJECTS_MAX, DownloadError};
use crate::progress::{Meter, Unit};

/// The packages of `tree`, whose objects are on the server. Why they are not listed is told, and is
/// no failure: they are only told to people.
///
/// # Errors
///
/// [`DownloadError`].
pub async fn of_tree(
    client: &Client,
    tree: &Tree,
    meter: &Meter,
) -> Result<Vec<Package>, DownloadError> {
    let parts = match parts(tree) {
        Ok(parts) => parts,
        Err(error) => {
            eprintln!("warning: the packages of the image are not listed: {error}");
            return Ok(Vec::new());
        }
    };
    if parts.is_empty() {
        return Ok(Vec::new());
    }
    let contents = fetch(client, &parts, meter).await?;
    match packages(parts.iter().zip(contents.iter().map(Vec::as_slice))) {
        Ok(packages) => Ok(packages),
        Err(error) => {
            eprintln!("warning: the packages of the image are not listed: {error}");
            Ok(Vec::new())
        }
    }
}

/// The content of each part.
async fn fetch(
    client: &Client,
    parts: &[Part],
    meter: &Meter,
) -> Result<Vec<Vec<u8>>, DownloadError> {
    meter.start("Reading packages", Unit::Items, Some(parts.len() as u64));
    let mut contents = Vec::with_capacity(parts.len());
    for batch in parts.chunks(BATCH_OBJECTS_MAX) {
        let ids = batch.iter().map(|part| part.object).collect();
        let mut reader = client.get_objects(&GetObjectsRequest { ids }).await?;
        for Part { object: want, size_bytes, .. } in batch {
            let (id, length) = match reader.head().await? {
                Head::Object { id, size_bytes } => (id, size_bytes),
                Head::Absent(id) if id == *want => return Err(DownloadError::Absent { id }),
                Head::Absent(id) => return Err(other(*want, id.to_string())),
                Head::End => return Err(other(*want, "the end".to_owned())),
            };
            if id != *want {
                return Err(other(*want, id.to_string()));
            }
            // What is held in memory was limited by this length.
            if length != *size_bytes {
                return Err(DownloadError::Size { id, want: *size_bytes, got: length });
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

fn other(want: model::object::ObjectId, got: String) -> DownloadError {
    DownloadError::Other { want, got }
}
