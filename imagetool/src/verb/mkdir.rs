//! `imagetool mkdir`: makes a directory of images.

use api::access::Owners;
use api::fault::FaultCode;
use api::image_server::directories::{MakeDirectory, MakeDirectoryRequest};
use model::image::{ImageName, ImageNameError};
use tool::Format;

use super::{Context, Ended, print_json};
use crate::failure::{Failure, Outcome};

/// Makes a directory of images, which may have owners.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool mkdir web --owner-group web-team
  imagetool mkdir -p web/prod/debian-12
  imagetool mkdir web/test --owner-group web-team --owner-user alice

Owners of a directory may add, change and delete all that is below it, and give directories in it
away. One that is made without owners gets those of the directory that it is in. Images need no
directory to be made first, unless the image server runs with --require-directories: then theirs
belongs to the owners of the nearest one above it that was made.")]
pub struct MkdirArgs {
    /// The directory.
    #[arg(value_name = "DIR", value_parser = directory_of)]
    pub directory: ImageName,
    /// Make those above it too that are missing; do nothing if it was made before.
    #[arg(long, short)]
    pub parents: bool,
    /// Who owns it.
    #[command(flatten)]
    pub owners: OwnerArgs,
}

/// Who owns something.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct OwnerArgs {
    /// A group whose members own it; may be given several times.
    #[arg(long, value_name = "GROUP")]
    pub owner_group: Vec<String>,
    /// A user who owns it; may be given several times.
    #[arg(long, value_name = "USER")]
    pub owner_user: Vec<String>,
}

impl OwnerArgs {
    /// The owners that were given, if there are any.
    ///
    /// # Errors
    ///
    /// [`Failure`] for names that no owner has.
    pub fn owners(self) -> Result<Option<Owners>, Failure> {
        let owners = Owners::new(self.owner_group, self.owner_user);
        owners.verify().map_err(|error| Failure::new(&error).misuse())?;
        Ok((!owners.is_empty()).then_some(owners))
    }
}

/// Reads the name of a directory, which may end with a slash.
pub(super) fn directory_of(text: &str) -> Result<ImageName, ImageNameError> {
    ImageName::new(text.strip_suffix('/').unwrap_or(text))
}

/// Makes it.
///
/// # Errors
///
/// [`Failure`] if it was made before, or the caller may not.
pub async fn run(context: &Context, args: MkdirArgs) -> Ended {
    let MkdirArgs { directory: name, parents, owners } = args;
    let request = MakeDirectoryRequest { name: name.clone(), parents, owners: owners.owners()? };
    let reply = context.client.call::<MakeDirectory>(&request).await.map_err(|error| {
        let failure = Failure::new(&error);
        match error.code() {
            Some(FaultCode::Exists) => failure
                .hint("`imagetool chown` gives it to others; -p is content with one that is there"),
            Some(FaultCode::NotFound) => failure.hint("-p makes those above it too"),
            _ => Failure::of_call(&error),
        }
    })?;
    for made in &reply.made {
        eprintln!("Made {made}.");
    }
    if reply.made.is_empty() {
        eprintln!("{name} is there already; its owners stay as they are.");
    }
    eprintln!("Owned by {}.", reply.owners.in_words());
    if context.format == Format::Json {
        print_json(&reply)?;
    }
    Ok(Outcome::Done)
}
