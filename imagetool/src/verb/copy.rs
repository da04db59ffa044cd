//! `imagetool copy`: gives an image another name.

use std::time::Duration;

use api::fault::FaultCode;
use api::image_server::notes::{CopyImage, CopyImageRequest};
use model::image::ImageName;
use model::when::written;
use tool::Format;

use super::{Context, Ended, print_json};
use crate::failure::{Failure, Outcome};

/// How long the server may take to look through the image.
const COPY_LIMIT: Duration = Duration::from_secs(600);

/// Makes an image of one that is there, such as to promote it. Nothing is uploaded.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool copy test/debian-12.7 base/debian-12.7

The new image has the tree, the filter, the triggers and the notes of the other, but never expires
and is not deprecated. Signatures are about the name, too: sign the copy with `imagetool sign`.
`imagetool show` tells of which image it was made.")]
pub struct CopyArgs {
    /// The image that is there.
    pub from: ImageName,
    /// The name of the new one.
    pub to: ImageName,
    /// The new image goes away by itself that long from now.
    #[arg(long, value_name = "DURATION", value_parser = written::duration)]
    pub expires_in: Option<Duration>,
}

/// Copies an image.
///
/// # Errors
///
/// [`Failure`] if there is no such image, or the new name was used before.
pub async fn run(context: &Context, args: CopyArgs) -> Ended {
    let CopyArgs { from, to, expires_in } = args;
    let too_long = |_| Failure::of_text("that is longer than 100 years: leave it out").misuse();
    let seconds = expires_in.map(|duration| u32::try_from(duration.as_secs()));
    let expires_in_seconds = seconds.transpose().map_err(too_long)?;
    let request = CopyImageRequest { from: from.clone(), to: to.clone(), expires_in_seconds };
    let reply = context.client.call_within::<CopyImage>(&request, COPY_LIMIT).await;
    let reply = reply.map_err(|error| match error.code() {
        Some(FaultCode::Exists) => Failure::of_image_call(&error, &to),
        // The text says which of the two names it is.
        Some(FaultCode::NotFound | FaultCode::Gone) => Failure::new(&error),
        _ => Failure::of_call(&error),
    })?;
    eprintln!("Copied {from} to {to}.");
    if context.format == Format::Json {
        print_json(&reply)?;
    }
    Ok(Outcome::Done)
}
