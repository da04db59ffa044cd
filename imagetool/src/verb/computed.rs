//! `imagetool show-computed-files`: the computed files of an image.

use model::display::safe_text;
use model::image::ImageName;
use tool::Format;

use super::{Context, VerbResult, print, print_json};
use crate::output::failure::Outcome;

/// Shows the computed files of an image, and the filegen-server that makes the content of each.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool show-computed-files base/debian-12.7
  imagetool show-computed-files base/debian-12.7 --format json | jq -r '.[].source' | sort -u

`show-file` shows the mode, owner and attributes of one.")]
pub struct ShowComputedFilesArgs {
    /// The name of the image.
    pub name: ImageName,
}

pub async fn run(context: &Context, args: ShowComputedFilesArgs) -> VerbResult {
    let rules = context.image(&args.name).await?.content.computed;
    match context.format {
        Format::Json => print_json(&rules)?,
        Format::Table if rules.is_empty() => eprintln!("{} has no computed files.", args.name),
        Format::Table => {
            let mut rows = vec![["PATH".to_owned(), "SOURCE".to_owned()]];
            // The source may come from whoever uploaded the image.
            let source = |text: &str| safe_text(text, text.len());
            rows.extend(rules.iter().map(|rule| [rule.path.to_string(), source(&rule.source)]));
            let width = rows.iter().map(|[path, _]| path.chars().count()).max().unwrap_or(0);
            let lines = rows.iter().map(|[path, source]| format!("{path:<width$}  {source}\n"));
            print(&lines.collect::<String>())?;
        }
    }
    Ok(Outcome::Done)
}
