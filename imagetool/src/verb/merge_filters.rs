//! `imagetool merge-filters`: makes one filter of several. Needs no server.

use std::path::PathBuf;

use tool::Format;

use super::add::{parse_filter, text_of};
use super::{Ended, print, print_json};
use crate::failure::{Failure, Outcome};
use crate::filters::{merge, to_text};

/// Makes one filter of several: it keeps a path if one of them does.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Example:
  imagetool merge-filters filters/debian filters/web > filter

Lines are sorted, each is there once, and comments are left out: equal sets of lines give equal
files. JSON is an array of the lines. The server is not asked.")]
pub struct MergeFiltersArgs {
    /// Filter files.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

/// Merges filters.
///
/// # Errors
///
/// [`Failure`] names the file.
pub fn run(format: Format, args: &MergeFiltersArgs) -> Ended {
    let read = |path: &PathBuf| parse_filter(path, &text_of(path, "filter")?);
    let filters = args.files.iter().map(read).collect::<Result<Vec<_>, Failure>>()?;
    let merged = merge(&filters).map_err(|error| Failure::new(&error))?;
    match format {
        Format::Json => print_json(&merged.lines())?,
        Format::Table => print(&to_text(&merged))?,
    }
    Ok(Outcome::Done)
}
