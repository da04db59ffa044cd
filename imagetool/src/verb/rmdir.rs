//! `imagetool rmdir`: removes an empty directory of images.

use api::fault::FaultCode;
use api::image_server::directories::{RemoveDirectory, RemoveDirectoryRequest};
use model::image::ImageName;

use super::mkdir::directory_of;
use super::{Context, Ended};
use crate::failure::{Failure, Outcome};

/// Removes a directory in which there are neither images nor directories.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool rmdir web/test

Names of images that were deleted are not in the way, and are never used again even if the
directory is made once more.")]
pub struct RmdirArgs {
    /// The directory.
    #[arg(value_name = "DIR", value_parser = directory_of)]
    pub directory: ImageName,
}

/// Removes it.
///
/// # Errors
///
/// [`Failure`] if it is not there or not empty, or the caller may not.
pub async fn run(context: &Context, args: RmdirArgs) -> Ended {
    let name = args.directory;
    let request = RemoveDirectoryRequest { name: name.clone() };
    context.client.call::<RemoveDirectory>(&request).await.map_err(|error| {
        let failure = Failure::new(&error);
        match error.code() {
            Some(FaultCode::Held) => failure.hint(format!(
                "`imagetool tree {name}` and `imagetool list {name}` show what is in it"
            )),
            Some(FaultCode::NotFound) => {
                failure.hint("`imagetool tree` shows the directories that there are")
            }
            _ => Failure::of_call(&error),
        }
    })?;
    eprintln!("Removed {name}.");
    Ok(Outcome::Done)
}
