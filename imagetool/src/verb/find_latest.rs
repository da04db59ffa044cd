//! `imagetool find-latest`: names the image of a directory that was added last.

use api::image_server::notes::{FindLatestImage, FindLatestImageRequest};
use model::image::ImageName;
use tool::Format;

use super::tag::tag_of;
use super::{Context, Ended, print, print_json};
use crate::failure::{Failure, Outcome};

/// Prints the name of the image in a directory that was added last.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool find-latest base
  imagetool copy \"$(imagetool find-latest test --tag tested=yes)\" base/12.7

Images in directories below are not looked at. If there is none, nothing is printed and the exit
code is 1.")]
pub struct FindLatestArgs {
    /// The directory.
    pub directory: ImageName,
    /// Only images with this tag; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = tag_of)]
    pub tag: Vec<(String, String)>,
}

/// Finds the latest image.
///
/// # Errors
///
/// [`Failure`] if there is none.
pub async fn run(context: &Context, args: FindLatestArgs) -> Ended {
    let FindLatestArgs { directory, tag } = args;
    let request =
        FindLatestImageRequest { directory: directory.clone(), tags: tag.into_iter().collect() };
    let reply = context.client.call::<FindLatestImage>(&request).await;
    let reply = reply.map_err(|error| Failure::of_call(&error))?;
    let Some(name) = &reply.name else {
        let with = if request.tags.is_empty() { "" } else { " with these tags" };
        let message = format!("there is no image{with} in {directory}");
        return Err(Failure::of_text(message).hint("directories below are not looked at"));
    };
    match context.format {
        Format::Json => print_json(&reply)?,
        Format::Table => print(&format!("{name}\n"))?,
    }
    Ok(Outcome::Done)
}
