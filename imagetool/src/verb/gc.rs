//! `imagetool gc`: removes objects from the image server that nothing needs.

use std::pin::pin;
use std::time::Duration;

use api::image_server::collection::{Amount, Collect, CollectReply, CollectRequest};
use model::when::lasting;
use tool::Format;

use super::{Context, Ended, print_json};
use crate::failure::{Failure, Outcome};
use crate::output::{plural, size};
use crate::progress::Unit;

/// How long the server may take: it walks all images and removes many files.
const COLLECT_LIMIT: Duration = Duration::from_secs(6 * 3_600);

/// Removes objects from the image server that no image needs.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool gc --dry-run          # what could be removed?
  imagetool gc                    # all of it
  imagetool gc --bytes 50000000000

The oldest objects go first. What somebody uploads, or was told to be on the server so that it
need not be uploaded, is held for a day, because it may be on its way into an image. The server
does the same by itself when its disk is nearly full (imageserver --collect-above).")]
pub struct GcArgs {
    /// Only say what would be removed.
    #[arg(long)]
    pub dry_run: bool,
    /// Stop when this much space has become free.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub bytes: Option<u64>,
}

/// Removes objects.
///
/// # Errors
///
/// [`Failure`] if the server does not collect now.
pub async fn run(context: &Context, args: GcArgs) -> Ended {
    let request = CollectRequest { dry_run: args.dry_run, bytes: args.bytes.unwrap_or(0) };
    context.meter.start("Seconds that the server looks through images", Unit::Items, None);
    let mut call = pin!(context.client.call_within::<Collect>(&request, COLLECT_LIMIT));
    let reply = loop {
        match tokio::time::timeout(Duration::from_secs(1), &mut call).await {
            Ok(reply) => break reply,
            Err(_) => context.meter.add(1),
        }
    };
    context.meter.finish();
    let reply = reply.map_err(|error| Failure::of_call(&error))?;
    eprint!("{}", told(&reply, args.dry_run));
    if context.format == Format::Json {
        print_json(&reply)?;
    }
    let is_short = args.bytes.is_some_and(|bytes| reply.removed.bytes < bytes);
    Ok(if is_short { Outcome::Partly } else { Outcome::Done })
}

fn amount(amount: Amount) -> String {
    format!("{} ({})", plural(amount.objects, "object"), size(amount.bytes))
}

fn told(reply: &CollectReply, dry_run: bool) -> String {
    let CollectReply { images, unneeded, leased, removed, held_seconds } = *reply;
    let mut text =
        format!("Needed by none of {}: {}.\n", plural(images, "image"), amount(unneeded));
    if leased.objects > 0 {
        let held = "may be on their way into an image and are held for a while";
        text.push_str(&format!("{} of these {held}.\n", amount(leased)));
    }
    let verb = if dry_run { "Would remove" } else { "Removed" };
    text.push_str(&format!("{verb} {}.\n", amount(removed)));
    if held_seconds > 0 {
        let left = lasting(held_seconds);
        text.push_str(&format!(
            "The server was restarted and removes nothing for another {left}: what was uploaded \
             before may be on its way into an image.\n"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_removed_and_what_is_held_is_told() {
        let of = |objects, bytes| Amount { objects, bytes };
        let reply = CollectReply {
            images: 1,
            unneeded: of(12, 5_000_000),
            leased: of(2, 4_096),
            removed: of(10, 4_995_904),
            held_seconds: 0,
        };
        assert_eq!(
            told(&reply, false),
            "Needed by none of 1 image: 12 objects (5.0 MB).\n\
             2 objects (4.1 kB) of these may be on their way into an image and are held for a \
             while.\n\
             Removed 10 objects (5.0 MB).\n"
        );
        let reply = CollectReply { held_seconds: 7_300, leased: of(0, 0), ..reply };
        assert_eq!(
            told(&reply, true),
            "Needed by none of 1 image: 12 objects (5.0 MB).\n\
             Would remove 10 objects (5.0 MB).\n\
             The server was restarted and removes nothing for another 2 h: what was uploaded \
             before may be on its way into an image.\n"
        );
    }
}
