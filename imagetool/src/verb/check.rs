//! `imagetool check`: says whether images are there.

use api::fault::FaultCode;
use model::image::ImageName;
use serde::Serialize;
use tool::Format;

use super::{Context, Ended, get_image, print, print_json};
use crate::failure::{Failure, Outcome};

/// Says whether images are there. The exit code says it too.
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

/// What is known of an image.
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

/// Looks for images.
///
/// # Errors
///
/// [`Failure`] if the server cannot be asked.
pub async fn run(context: &Context, args: CheckArgs) -> Ended {
    let mut lines = Vec::new();
    for name in &args.names {
        let state = match get_image(&context.client, name).await {
            Ok(_) => State::There,
            Err(error) => match error.code() {
                Some(FaultCode::NotFound) => State::Missing,
                Some(FaultCode::Gone) => State::Gone,
                _ => return Err(Failure::of_call(&error)),
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
