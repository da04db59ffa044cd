//! `imagetool change-expiry`: lets an image stay for longer.

use std::time::Duration;

use api::image_server::expiry::{ChangeExpiry, ChangeExpiryRequest};
use model::image::ImageName;
use model::when::written;
use tool::Format;

use super::{Context, Ended, print_json};
use crate::failure::{Failure, Outcome};
use crate::output::time;

/// Lets an image stay for longer, or for ever.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool change-expiry test/today --expires-in 7d
  imagetool change-expiry base/debian-12.7 --never

An image is never made to go earlier than it was said to: somebody may rely on it. Delete it if
nobody does.")]
pub struct ChangeExpiryArgs {
    /// The name of the image.
    pub name: ImageName,
    /// It goes that long from now.
    #[arg(long, value_name = "DURATION", required_unless_present = "never",
          conflicts_with = "never", value_parser = written::duration)]
    pub expires_in: Option<Duration>,
    /// It stays until it is deleted.
    #[arg(long)]
    pub never: bool,
}

/// Changes when an image goes.
///
/// # Errors
///
/// [`Failure`] if there is no such image, or it would go earlier than before.
pub async fn run(context: &Context, args: ChangeExpiryArgs) -> Ended {
    let too_long = |_| Failure::of_text("that is longer than 100 years: use --never").misuse();
    let seconds = args.expires_in.map(|duration| u32::try_from(duration.as_secs()));
    let expires_in_seconds = seconds.transpose().map_err(too_long)?;
    let request = ChangeExpiryRequest { name: args.name.clone(), expires_in_seconds };
    let reply = context
        .client
        .call::<ChangeExpiry>(&request)
        .await
        .map_err(|error| Failure::of_image_call(&error, &args.name))?;
    match reply.expires_at {
        Some(at) => eprintln!("{} expires {}.", args.name, time(at)),
        None => eprintln!("{} never expires.", args.name),
    }
    if context.format == Format::Json {
        print_json(&reply)?;
    }
    Ok(Outcome::Done)
}
