//! `imagetool show-file`: shows one entry of an image.

use model::image::ImageName;
use model::path::TreePath;
use model::tree::{Leaf, Node};
use serde::Serialize;
use tool::Format;

use super::{Context, Ended, find, path_argument, print, print_json};
use crate::entry::EntryRecord;
use crate::failure::Outcome;
use crate::listings::Sight;
use crate::output::count;

/// Shows what an image has at a path: kind, mode, owner, times, digest, attributes.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool show-file base/debian-12.7 /etc/passwd
  imagetool show-file base/debian-12.7 /usr/bin/ping --format json | jq .xattrs

Symlinks are not followed. A hard link is shown with the file that it is a name of.")]
pub struct ShowFileArgs {
    /// The name of the image.
    pub name: ImageName,
    /// The path in the image; `\\xHH` stands for a byte.
    #[arg(value_parser = path_argument())]
    pub path: TreePath,
}

/// What is printed with `--format json`.
#[derive(Debug, Serialize)]
struct Report<'call> {
    image: &'call ImageName,
    path: &'call TreePath,
    #[serde(flatten)]
    entry: EntryRecord,
    /// How many entries a directory has.
    #[serde(skip_serializing_if = "Option::is_none")]
    entries: Option<usize>,
}

/// Shows an entry.
///
/// # Errors
///
/// [`crate::failure::Failure`] if the image or the path is not there.
pub async fn run(context: &Context, args: ShowFileArgs) -> Ended {
    let mut found = find(context, &args.name, &args.path).await?;
    let mut entries = None;
    let node = match found.sight.clone() {
        Sight::Leaf(leaf) => Node::Leaf(leaf),
        Sight::Directory(id) => {
            let listing = found.listing(context, id).await?;
            entries = Some(listing.entries.len());
            Node::Directory(listing.metadata.clone())
        }
        Sight::Nothing | Sight::Unknown => return Err(found.not_there()),
    };
    let entry = match &node {
        Node::Leaf(Leaf::HardLink(first)) => {
            let file = found.look_at(context, first).await?;
            let entry = match file {
                Sight::Leaf(leaf) => EntryRecord::of(&Node::Leaf(leaf)),
                _ => EntryRecord::of(&node),
            };
            EntryRecord { link_to: Some(first.clone()), ..entry }
        }
        node => EntryRecord::of(node),
    };
    match context.format {
        Format::Json => {
            print_json(&Report { image: &args.name, path: &args.path, entry, entries })?;
        }
        Format::Table => {
            let mut lines = vec![("Path:", args.path.to_string())];
            lines.extend(entry.lines());
            lines.extend(entries.map(|entries| ("Entries:", count(entries as u64))));
            let lines = lines.iter().map(|(label, value)| format!("{label:<10} {value}\n"));
            print(&lines.collect::<String>())?;
        }
    }
    Ok(Outcome::Done)
}
