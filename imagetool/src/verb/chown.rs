//! `imagetool chown`: gives a directory of images to others.

use api::fault::FaultCode;
use api::image_server::directories::{ChangeOwner, ChangeOwnerRequest};
use model::image::ImageName;

use super::mkdir::{OwnerArgs, directory_of};
use super::{Context, Ended};
use crate::failure::{Failure, Outcome};

/// Gives a directory of images to other owners, who replace those that it had.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool chown web --owner-group web-team --owner-group infra
  imagetool chown web/test --nobody

Who owns a directory above it, or has the power ImageServer.ChangeOwner, may give it to anyone;
its own owners to groups that they are in. With --nobody it has no owners of its own; those of the
directories above it own it all the same.")]
pub struct ChownArgs {
    /// The directory.
    #[arg(value_name = "DIR", value_parser = directory_of)]
    pub directory: ImageName,
    /// Who owns it from now on.
    #[command(flatten)]
    pub owners: OwnerArgs,
    /// It has no owners of its own from now on.
    #[arg(long, conflicts_with_all = ["owner_group", "owner_user"])]
    pub nobody: bool,
}

/// Gives it away.
///
/// # Errors
///
/// [`Failure`] if it is not there, or the caller may not.
pub async fn run(context: &Context, args: ChownArgs) -> Ended {
    let ChownArgs { directory: name, owners, nobody } = args;
    let owners = match owners.owners()? {
        Some(owners) => owners,
        None if nobody => api::access::Owners::default(),
        None => {
            return Err(Failure::of_text("who shall own it?")
                .hint("give --owner-group or --owner-user, or say --nobody")
                .misuse());
        }
    };
    let words = owners.in_words();
    let request = ChangeOwnerRequest { name: name.clone(), owners };
    context.client.call::<ChangeOwner>(&request).await.map_err(|error| match error.code() {
        Some(FaultCode::NotFound) => {
            Failure::new(&error).hint("`imagetool tree` shows the directories that there are")
        }
        _ => Failure::of_call(&error),
    })?;
    eprintln!("{name} is owned by {words}.");
    Ok(Outcome::Done)
}
