//! Reads the databases of packages from the image server.

use api::object_server::GetObjectsRequest;
use model::image::Package;
use model::tree::Tree;
use rpc::client::Client;

use super::{DatabaseFile, database_files, packages};
use crate::output::progress::{Meter, Unit};
use crate::transfer::download::{BATCH_OBJECTS_MAX, DownloadError, next_object};

/// Reads the packages of `tree`, whose objects are on the server. If they cannot be listed, prints
/// a warning and returns none: the list is only information for people.
pub async fn packages_of_tree(
    client: &Client,
    tree: &Tree,
    meter: &Meter,
) -> Result<Vec<Package>, DownloadError> {
    let database_files = match database_files(tree) {
        Ok(database_files) => database_files,
        Err(error) => {
            eprintln!("warning: the packages of the image are not listed: {error}");
            return Ok(Vec::new());
        }
    };
    if database_files.is_empty() {
        return Ok(Vec::new());
    }
    let contents = fetch(client, &database_files, meter).await?;
    match packages(database_files.iter().zip(contents.iter().map(Vec::as_slice))) {
        Ok(packages) => Ok(packages),
        Err(error) => {
            eprintln!("warning: the packages of the image are not listed: {error}");
            Ok(Vec::new())
        }
    }
}

/// Fetches the content of each file.
async fn fetch(
    client: &Client,
    database_files: &[DatabaseFile],
    meter: &Meter,
) -> Result<Vec<Vec<u8>>, DownloadError> {
    meter.start("Reading packages", Unit::Items, Some(database_files.len() as u64));
    let mut contents = Vec::with_capacity(database_files.len());
    for batch in database_files.chunks(BATCH_OBJECTS_MAX) {
        let ids = batch.iter().map(|file| file.object).collect();
        let mut reader = client.get_objects(&GetObjectsRequest { ids }).await?;
        for DatabaseFile { object: want, size_bytes, .. } in batch {
            let id = *want;
            let length = next_object(&mut reader, id).await?;
            // The size limit was checked with this length.
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
