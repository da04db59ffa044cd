//! `imagetool delete`: deletes an image for good.

use std::io::{IsTerminal as _, Write as _};

use api::fault::FaultCode;
use api::image_server::replication::{DropCopy, DropCopyRequest};
use api::image_server::{DeleteImage, DeleteImageRequest};
use model::image::ImageName;

use super::{Context, Ended, get_image};
use crate::failure::{Failure, Outcome};
use crate::output::time;

/// Deletes an image. Its name is never used again.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool delete base/debian-12.6
  imagetool delete --yes base/debian-12.6
  imagetool --imageserver images2 delete --local base/debian-12.6

An image that machines must have, or will get next, is deleted only with --force. Machines whose
required image is deleted are left as they are.")]
pub struct DeleteArgs {
    /// The name of the image.
    pub name: ImageName,
    /// Do not ask.
    #[arg(long)]
    pub yes: bool,
    /// Even if machines must have it or will get it next.
    #[arg(long)]
    pub force: bool,
    /// Only the copy that this server has, which is a replica: one that conflicts with its
    /// master's, that it does not follow, or that the master has not got.
    #[arg(long)]
    pub local: bool,
}

/// Deletes an image.
///
/// # Errors
///
/// [`Failure`] if there is no such image, or nobody can be asked.
pub async fn run(context: &Context, args: DeleteArgs) -> Ended {
    let name = &args.name;
    if !args.yes {
        if !std::io::stdin().is_terminal() {
            let message = format!("will not delete {name} without being sure");
            return Err(Failure::of_text(message).hint("add --yes to mean it").misuse());
        }
        let image = get_image(&context.client, name)
            .await
            .map_err(|error| Failure::of_image_call(&error, name))?;
        let created = time(image.notes.created_on);
        match args.local {
            false => eprint!(
                "Delete {name}, created {created}? Its name can never be used again. [y/N] "
            ),
            true => eprint!("Delete this server's copy of {name}, created {created}? [y/N] "),
        }
        let answer = tokio::task::spawn_blocking(|| {
            std::io::stderr().flush()?;
            let mut answer = String::new();
            std::io::stdin().read_line(&mut answer)?;
            Ok::<_, std::io::Error>(answer)
        });
        let answer = answer.await.ok().and_then(Result::ok).unwrap_or_default();
        if !matches!(answer.trim().to_lowercase().as_str(), "y" | "yes") {
            return Err(Failure::of_text(format!("{name} was not deleted")));
        }
    }
    if args.local {
        let request = DropCopyRequest { name: name.clone(), force: args.force };
        let dropped = context.client.call::<DropCopy>(&request).await;
        dropped.map_err(|error| Failure::of_image_call(&error, name))?;
        eprintln!("Deleted this server's copy of {name}.");
        return Ok(Outcome::Done);
    }
    context
        .client
        .call::<DeleteImage>(&DeleteImageRequest { name: name.clone(), force: args.force })
        .await
        .map_err(|error| match error.code() {
            Some(FaultCode::Held) => Failure::new(&error)
                .hint("let the machines have another image first, or mean it with --force"),
            _ => Failure::of_image_call(&error, name),
        })?;
    eprintln!("Deleted {name}.");
    Ok(Outcome::Done)
}
