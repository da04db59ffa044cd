//! `imagetool check` and `find-latest`: whether images exist, and which one is the latest.

use api::fault::FaultCode;
use api::image_server::notes::{FindLatestImage, FindLatestImageRequest};
use model::image::ImageName;
use serde::Serialize;
use tool::Format;

use super::change::tag_of;
use super::{Context, VerbResult, get_image, print, print_json};
use crate::output::failure::{Failure, Outcome};

/// Checks whether images exist, also by the exit code.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool check base/debian-12.7
  imagetool check web/8 && echo 'the image is there'

Exit codes: 0 all are there, 3 at least one is not, 1 the server could not be asked.")]
pub struct CheckArgs {
    /// The names of the images.
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<ImageName>,
}

/// State of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum State {
    There,
    Missing,
    Gone,
}

#[derive(Debug, Serialize)]
struct Line<'call> {
    name: &'call ImageName,
    state: State,
}

pub async fn check(context: &Context, args: CheckArgs) -> VerbResult {
    let mut lines = Vec::new();
    for name in &args.names {
        let state = match get_image(&context.client, name).await {
            Ok(_) => State::There,
            Err(error) => match error.code() {
                Some(FaultCode::NotFound) => State::Missing,
                Some(FaultCode::Gone) => State::Gone,
                _ => return Err(Failure::from_call(&error)),
            },
        };
        lines.push(Line { name, state });
    }
    match context.format {
        Format::Json => print_json(&lines)?,
        Format::Table => {
            let line = |Line { name, state }: &Line<'_>| {
                let state = match state {
                    State::There => "is there",
                    State::Missing => "is not there",
                    State::Gone => "was deleted or has expired",
                };
                format!("{name} {state}\n")
            };
            print(&lines.iter().map(line).collect::<String>())?;
        }
    }
    let all = lines.iter().all(|line| line.state == State::There);
    Ok(if all { Outcome::Done } else { Outcome::Different })
}

/// Prints the name of the newest image in a directory.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool find-latest base
  imagetool copy \"$(imagetool find-latest test --tag tested=yes)\" base/12.7

Images in subdirectories are not searched. If no image is found, nothing is printed and the
exit code is 1.")]
pub struct FindLatestArgs {
    /// The directory.
    pub directory: ImageName,
    /// Only images with this tag; may be repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = tag_of)]
    pub tag: Vec<(String, String)>,
}

pub async fn find_latest(context: &Context, args: FindLatestArgs) -> VerbResult {
    let FindLatestArgs { directory, tag } = args;
    let request =
        FindLatestImageRequest { directory: directory.clone(), tags: tag.into_iter().collect() };
    let reply = context.client.call::<FindLatestImage>(&request).await;
    let reply = reply.map_err(|error| Failure::from_call(&error))?;
    let Some(name) = &reply.name else {
        let with = if request.tags.is_empty() { "" } else { " with these tags" };
        let message = format!("there is no image{with} in {directory}");
        return Err(Failure::from_text(message).hint("subdirectories are not searched"));
    };
    print(&context.format.render(&reply, |_| format!("{name}\n")))?;
    Ok(Outcome::Done)
}
