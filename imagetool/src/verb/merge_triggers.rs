//! `imagetool merge-triggers`: makes one trigger file of several. Needs no server.

use std::path::PathBuf;

use super::add::{parse_triggers, text_of};
use super::{Ended, print};
use crate::failure::{Failure, Outcome};
use crate::triggers::{merge, to_text};

/// Makes one trigger file of several: what one of them does for a path, it does.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Example:
  imagetool merge-triggers triggers/debian.json triggers/web.json > triggers.json

Triggers that agree in all but MatchLines become one, with the lines of all. Those that differ in
anything else stay apart: a reload for one path is no restart for another. Services and lines are
sorted, and comments are left out: equal sets of triggers give equal files. The server is not
asked.")]
pub struct MergeTriggersArgs {
    /// Trigger files.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

/// Merges triggers. The output is JSON in each format.
///
/// # Errors
///
/// [`Failure`] names the file.
pub fn run(args: &MergeTriggersArgs) -> Ended {
    let read = |path: &PathBuf| parse_triggers(path, &text_of(path, "triggers")?);
    let lists = args.files.iter().map(read).collect::<Result<Vec<_>, Failure>>()?;
    let merged = merge(&lists).map_err(|error| Failure::new(&error))?;
    print(&to_text(&merged))?;
    Ok(Outcome::Done)
}
