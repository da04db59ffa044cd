//! `imagetool tag`, `copy`, `change-expiry` and `delete`: changes of existing images.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use api::fault::FaultCode;
use api::image_server::expiry::{ChangeExpiry, ChangeExpiryRequest};
use api::image_server::notes::{ChangeTags, ChangeTagsRequest, CopyImage, CopyImageRequest};
use api::image_server::replication::{DropCopy, DropCopyRequest};
use api::image_server::{DeleteImage, DeleteImageRequest};
use model::image::ImageName;
use model::image::tags::Tags;
use model::time_parse;

use super::{Context, VerbResult, get_image, print};
use crate::output::failure::{Failure, Outcome};
use crate::output::time;

/// Sets, removes and shows tags of an image.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool tag web/8 tested=yes release=2024-05
  imagetool tag web/7 deprecated='use web/8'
  imagetool tag web/7 --remove deprecated
  imagetool tag web/8                        # show them

The tag `deprecated` has a meaning: dominators tell operators which machines must have an image with
it.")]
pub struct TagArgs {
    /// The name of the image.
    pub name: ImageName,
    /// Tags to set.
    #[arg(value_name = "KEY=VALUE", value_parser = tag_of)]
    pub set: Vec<(String, String)>,
    /// Tag to remove; may be repeated.
    #[arg(long, value_name = "KEY")]
    pub remove: Vec<String>,
}

/// Parses `KEY=VALUE`.
pub(super) fn tag_of(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not a tag: expected KEY=VALUE")),
    }
}

/// Formats one line for each tag.
pub(super) fn lines(tags: &Tags) -> String {
    tags.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

pub async fn tag(context: &Context, args: TagArgs) -> VerbResult {
    let TagArgs { name, set, remove } = args;
    let failed = |error| Failure::from_image_call(&error, &name);
    let tags = if set.is_empty() && remove.is_empty() {
        get_image(&context.client, &name).await.map_err(failed)?.notes.tags
    } else {
        let request = ChangeTagsRequest {
            name: name.clone(),
            set: set.into_iter().collect(),
            remove: remove.into_iter().collect(),
        };
        context.client.call::<ChangeTags>(&request).await.map_err(failed)?.tags
    };
    print(&context.format.render(&tags, |_| lines(&tags)))?;
    Ok(Outcome::Done)
}

/// Time limit for the server, which checks all objects of the image.
const COPY_LIMIT: Duration = Duration::from_secs(600);

/// Makes a new image from an existing one, such as to promote it. Nothing is uploaded.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool copy test/debian-12.7 base/debian-12.7

The new image has the tree, the filter, the triggers and the notes of the other, but not its expiry,
and it is not deprecated. Signatures cover the name: sign the copy with `imagetool sign`.
`imagetool show` tells of which image it was made.")]
pub struct CopyArgs {
    /// The existing image.
    pub from: ImageName,
    /// Name of the new image.
    pub to: ImageName,
    /// The new image expires after this time.
    #[arg(long, value_name = "DURATION", value_parser = time_parse::duration)]
    pub expires_in: Option<Duration>,
}

pub async fn copy(context: &Context, args: CopyArgs) -> VerbResult {
    let CopyArgs { from, to, expires_in } = args;
    let too_long = |_| Failure::from_text("that is longer than 100 years: leave it out").misuse();
    let seconds = expires_in.map(|duration| u32::try_from(duration.as_secs()));
    let expires_in_seconds = seconds.transpose().map_err(too_long)?;
    let request = CopyImageRequest { from: from.clone(), to: to.clone(), expires_in_seconds };
    let reply = context.client.call_within::<CopyImage>(&request, COPY_LIMIT).await;
    let reply = reply.map_err(|error| match error.code() {
        Some(FaultCode::Exists) => Failure::from_image_call(&error, &to),
        // The message names the image.
        Some(FaultCode::NotFound | FaultCode::Gone) => Failure::new(&error),
        _ => Failure::from_call(&error),
    })?;
    eprintln!("Copied {from} to {to}.");
    context.print_if_json(&reply)?;
    Ok(Outcome::Done)
}

/// Lets an image expire later, or never.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool change-expiry test/today --expires-in 7d
  imagetool change-expiry base/debian-12.7 --never

An image never expires earlier than announced, because somebody may rely on it. Delete it if nobody
does.")]
pub struct ChangeExpiryArgs {
    /// The name of the image.
    pub name: ImageName,
    /// It expires after this time.
    #[arg(long, value_name = "DURATION", required_unless_present = "never",
          conflicts_with = "never", value_parser = time_parse::duration)]
    pub expires_in: Option<Duration>,
    /// The image never expires.
    #[arg(long)]
    pub never: bool,
}

pub async fn change_expiry(context: &Context, args: ChangeExpiryArgs) -> VerbResult {
    let too_long = |_| Failure::from_text("that is longer than 100 years: use --never").misuse();
    let seconds = args.expires_in.map(|duration| u32::try_from(duration.as_secs()));
    let expires_in_seconds = seconds.transpose().map_err(too_long)?;
    let request = ChangeExpiryRequest { name: args.name.clone(), expires_in_seconds };
    let reply = context
        .client
        .call::<ChangeExpiry>(&request)
        .await
        .map_err(|error| Failure::from_image_call(&error, &args.name))?;
    match reply.expires_at {
        Some(at) => eprintln!("{} expires {}.", args.name, time(at)),
        None => eprintln!("{} never expires.", args.name),
    }
    context.print_if_json(&reply)?;
    Ok(Outcome::Done)
}

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
    /// Do not ask for confirmation.
    #[arg(long)]
    pub yes: bool,
    /// Delete it even if machines require or plan it.
    #[arg(long)]
    pub force: bool,
    /// Delete only the copy on this server, which is a replica: an image that conflicts with its
    /// master's, that it does not follow, or that the master does not have.
    #[arg(long)]
    pub local: bool,
}

pub async fn delete(context: &Context, args: DeleteArgs) -> VerbResult {
    let name = &args.name;
    if !args.yes {
        if !std::io::stdin().is_terminal() {
            let message = format!("will not delete {name} without a confirmation");
            return Err(Failure::from_text(message).hint("give --yes to confirm").misuse());
        }
        let image = context.image(name).await?;
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
            return Err(Failure::from_text(format!("{name} was not deleted")));
        }
    }
    if args.local {
        let request = DropCopyRequest { name: name.clone(), force: args.force };
        let dropped = context.client.call::<DropCopy>(&request).await;
        dropped.map_err(|error| Failure::from_image_call(&error, name))?;
        eprintln!("Deleted this server's copy of {name}.");
        return Ok(Outcome::Done);
    }
    context
        .client
        .call::<DeleteImage>(&DeleteImageRequest { name: name.clone(), force: args.force })
        .await
        .map_err(|error| match error.code() {
            Some(FaultCode::Held) => {
                Failure::new(&error).hint("give the machines another image first, or use --force")
            }
            _ => Failure::from_image_call(&error, name),
        })?;
    eprintln!("Deleted {name}.");
    Ok(Outcome::Done)
}
