//! `imagetool tree`: shows the directories of images.

use api::image_server::directories::{DirectorySummary, ListDirectories, ListDirectoriesRequest};
use comfy_table::{CellAlignment, Table, presets};
use model::image::ImageName;
use tool::Format;

use super::mkdir::directory_of;
use super::{Context, Ended, print, print_json};
use crate::failure::{Failure, Outcome};
use crate::output::{count, size, time};

/// Shows the directories of images, with their owners and what is in them.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool tree
  imagetool tree web
  imagetool tree --format json | jq -r '.[] | select(.made_on == null) | .name'

IMAGES are those in the directory and below, SIZE is the length of all their files; what images
share is stored once, but counts for each. A directory that was not MADE is there by the images in
it, and belongs to the owners of the one above.")]
pub struct TreeArgs {
    /// Only this directory and those below it.
    #[arg(value_name = "DIR", value_parser = directory_of)]
    pub directory: Option<ImageName>,
}

/// Shows them.
///
/// # Errors
///
/// [`Failure`] if the server cannot be asked, or there is no such directory.
pub async fn run(context: &Context, args: TreeArgs) -> Ended {
    let mut all: Vec<DirectorySummary> = Vec::new();
    loop {
        let after = all.last().map(|directory| directory.name.clone());
        let request = ListDirectoriesRequest { below: args.directory.clone(), after };
        let reply = context.client.call::<ListDirectories>(&request).await;
        let reply = reply.map_err(|error| Failure::of_call(&error))?;
        let progress = !reply.directories.is_empty();
        all.extend(reply.directories);
        if !reply.more || !progress {
            break;
        }
    }
    if let Some(name) = args.directory.filter(|_| all.is_empty()) {
        return Err(Failure::of_text(format!("there is no directory {name}"))
            .hint("`imagetool tree` shows the directories that there are"));
    }
    match context.format {
        Format::Json => print_json(&all)?,
        Format::Table if all.is_empty() => eprintln!("There are no directories."),
        Format::Table => print(&table(&all))?,
    }
    Ok(Outcome::Done)
}

fn table(directories: &[DirectorySummary]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["DIRECTORY", "IMAGES", "SIZE", "MADE", "OWNERS"]);
    for (branch, directory) in branches(directories).into_iter().zip(directories) {
        let DirectorySummary { made_on, owners, images_below, bytes_below, .. } = directory;
        table.add_row([
            branch,
            count(*images_below),
            size(*bytes_below),
            made_on.map_or("no".to_owned(), time),
            if owners.is_empty() { "-".to_owned() } else { owners.in_words() },
        ]);
    }
    for index in [1, 2] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    if let Some(first) = table.column_mut(0) {
        first.set_padding((0, 1));
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

/// How each directory stands in the tree: lines that lead to it, and its name. They are sorted by
/// component, and those above each are there too, but for those above the first.
fn branches(directories: &[DirectorySummary]) -> Vec<String> {
    let depth = |name: &ImageName| name.components().count();
    let top = directories.first().map_or(0, |first| depth(&first.name));
    // For each level, whether another directory comes on it. Seen from the end.
    let mut goes_on: Vec<bool> = Vec::new();
    let mut branches: Vec<String> = Vec::with_capacity(directories.len());
    for directory in directories.iter().rev() {
        let level = depth(&directory.name).saturating_sub(top);
        let is_last = !goes_on.get(level).copied().unwrap_or(false);
        goes_on.resize(level + 1, false);
        let mut branch = String::new();
        for goes_on in goes_on.iter().take(level).skip(1) {
            branch.push_str(if *goes_on { "│   " } else { "    " });
        }
        if level > 0 {
            branch.push_str(if is_last { "└── " } else { "├── " });
        }
        goes_on[level] = true;
        let last = directory.name.components().last().unwrap_or_default();
        branch.push_str(if level == 0 { directory.name.as_str() } else { last });
        branches.push(branch);
    }
    branches.reverse();
    branches
}

#[cfg(test)]
mod tests {
    use api::access::Owners;

    use super::*;

    fn directory(name: &str) -> DirectorySummary {
        DirectorySummary {
            name: ImageName::new(name).unwrap(),
            made_on: None,
            owners: Owners::default(),
            images: 0,
            images_below: 0,
            bytes_below: 0,
        }
    }

    #[test]
    fn directories_stand_in_a_tree() {
        let names = ["a", "a/b", "a/b/c", "a/b/d", "a/e", "a/e/f", "a-b", "x", "x/y"];
        let got = branches(&names.map(directory));
        let want =
            ["a", "├── b", "│   ├── c", "│   └── d", "└── e", "    └── f", "a-b", "x", "└── y"];
        assert_eq!(got, want);
        let below = branches(&["a/b", "a/b/c", "a/b/d"].map(directory));
        assert_eq!(below, ["a/b", "├── c", "└── d"]);
        assert_eq!(branches(&[]), Vec::<String>::new());
    }
}
