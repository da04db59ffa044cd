//! `imagetool tag`: sets, removes and shows tags of an image.

use api::image_server::notes::{ChangeTags, ChangeTagsRequest};
use model::image::ImageName;
use model::image::tags::Tags;
use tool::Format;

use super::{Context, Ended, get_image, print, print_json};
use crate::failure::{Failure, Outcome};

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
    /// A tag to remove; may be given several times.
    #[arg(long, value_name = "KEY")]
    pub remove: Vec<String>,
}

/// Reads `KEY=VALUE`.
pub(super) fn tag_of(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is no tag: expected KEY=VALUE")),
    }
}

/// One line for each tag.
pub(super) fn lines(tags: &Tags) -> String {
    tags.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

/// Changes or shows tags.
///
/// # Errors
///
/// [`Failure`] if there is no such image, or a tag is not allowed.
pub async fn run(context: &Context, args: TagArgs) -> Ended {
    let TagArgs { name, set, remove } = args;
    let failed = |error| Failure::of_image_call(&error, &name);
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
    match context.format {
        Format::Json => print_json(&tags)?,
        Format::Table => print(&lines(&tags))?,
    }
    Ok(Outcome::Done)
}
