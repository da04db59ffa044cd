//! `imagetool accept-clock`: says that the image server's clock is right although it jumped.

use api::Done;
use api::image_server::expiry::AcceptClock;
use tool::Format;

use super::{Context, Ended, print_json};
use crate::failure::{Failure, Outcome};
use crate::output::{plural, time};

/// Says that the image server's clock is right although it jumped.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool accept-clock

When the clock of the image server's machine jumps, no image expires: a clock that is wrong by a
year would expire them all. It goes on when the clock is back for a while, or when you have looked
at it and say so. See `date` on that machine first.")]
pub struct AcceptClockArgs {}

/// Accepts the clock.
///
/// # Errors
///
/// [`Failure`] if the server cannot be asked.
pub async fn run(context: &Context, _args: AcceptClockArgs) -> Ended {
    let reply = context.client.call::<AcceptClock>(&Done {}).await;
    let reply = reply.map_err(|error| Failure::of_call(&error))?;
    let jumped = match reply.jumped_seconds {
        0 => "it had not jumped".to_owned(),
        seconds @ 1.. => format!("it had jumped by {}", plural(seconds.unsigned_abs(), "second")),
        seconds => {
            format!("it had been set back by {}", plural(seconds.unsigned_abs(), "second"))
        }
    };
    eprintln!("The image server's clock shows {}; {jumped}. Images expire.", time(reply.now));
    if context.format == Format::Json {
        print_json(&reply)?;
    }
    Ok(Outcome::Done)
}
