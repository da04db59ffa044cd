//! Reads the databases of packages from the image server.

use model::image::Package;
use model::tree::Tree;
use rpc::client::Client;

use super::{database_files, packages};
use crate::output::progress::Meter;
use crate::transfer::download::DownloadError;
use crate::transfer::small_files::contents;

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
    let files: Vec<_> = database_files.iter().map(|file| (file.object, file.size_bytes)).collect();
    let contents = contents(client, "Reading packages", &files, meter).await?;
    match packages(database_files.iter().zip(contents.iter().map(Vec::as_slice))) {
        Ok(packages) => Ok(packages),
        Err(error) => {
            eprintln!("warning: the packages of the image are not listed: {error}");
            Ok(Vec::new())
        }
    }
}
