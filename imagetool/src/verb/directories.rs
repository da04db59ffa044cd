//! `imagetool mkdir`, `rmdir`, `chown` and `tree`: directories of images and their owners.

use api::access::Owners;
use api::fault::FaultCode;
use api::image_server::directories::{
    ChangeOwner, ChangeOwnerRequest, DirectorySummary, ListDirectories, ListDirectoriesRequest,
    MakeDirectory, MakeDirectoryRequest, RemoveDirectory, RemoveDirectoryRequest,
};
use comfy_table::{CellAlignment, Table, presets};
use model::display::safe_lines;
use model::image::{ImageName, ImageNameError};
use tool::Format;

use super::{Context, VerbResult, print, print_json};
use crate::output::failure::{Failure, Outcome};
use crate::output::{size, time};
use model::display::grouped;

/// Makes a directory of images, which may have owners.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool mkdir web --owner-group web-team
  imagetool mkdir -p web/prod/debian-12
  imagetool mkdir web/test --owner-group web-team --owner-user alice

Owners of a directory may add, change and delete all that is below it, and give directories in it
away. One that is made without owners gets those of the directory that it is in. Images need no
directory to be made first, unless the image server runs with --require-directories: then theirs
belongs to the owners of the nearest one above it that was made.")]
pub struct MkdirArgs {
    /// The directory.
    #[arg(value_name = "DIR", value_parser = directory_of)]
    pub directory: ImageName,
    /// Make missing parents too; do nothing if the directory exists.
    #[arg(long, short)]
    pub parents: bool,
    /// Owners of the directory.
    #[command(flatten)]
    pub owners: OwnerArgs,
}

/// Owners on the command line.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct OwnerArgs {
    /// Group whose members own it; may be repeated.
    #[arg(long, value_name = "GROUP")]
    pub owner_group: Vec<String>,
    /// User who owns it; may be repeated.
    #[arg(long, value_name = "USER")]
    pub owner_user: Vec<String>,
}

impl OwnerArgs {
    /// Returns the given owners, if any.
    pub fn owners(self) -> Result<Option<Owners>, Failure> {
        let owners = Owners::new(self.owner_group, self.owner_user);
        owners.verify().map_err(|error| Failure::new(&error).misuse())?;
        Ok((!owners.is_empty()).then_some(owners))
    }
}

/// Reads the name of a directory, which may end with a slash.
pub(super) fn directory_of(text: &str) -> Result<ImageName, ImageNameError> {
    ImageName::new(text.strip_suffix('/').unwrap_or(text))
}

pub async fn mkdir(context: &Context, args: MkdirArgs) -> VerbResult {
    let MkdirArgs { directory: name, parents, owners } = args;
    let request = MakeDirectoryRequest { name: name.clone(), parents, owners: owners.owners()? };
    let reply = context.client.call::<MakeDirectory>(&request).await.map_err(|error| {
        let failure = Failure::new(&error);
        match error.code() {
            Some(FaultCode::Exists) => failure.hint(
                "`imagetool chown` changes its owners; with -p an existing directory is no error",
            ),
            Some(FaultCode::NotFound) => failure.hint("-p makes missing parents too"),
            _ => Failure::from_call(&error),
        }
    })?;
    for made in &reply.made {
        eprintln!("Made {made}.");
    }
    if reply.made.is_empty() {
        eprintln!("{name} already exists; its owners were not changed.");
    }
    eprintln!("Owned by {}.", reply.owners.in_words());
    context.print_if_json(&reply)?;
    Ok(Outcome::Done)
}

/// Removes a directory in which there are neither images nor directories.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool rmdir web/test

Names of images that were deleted are not in the way, and are never used again even if the
directory is made once more.")]
pub struct RmdirArgs {
    /// The directory.
    #[arg(value_name = "DIR", value_parser = directory_of)]
    pub directory: ImageName,
}

pub async fn rmdir(context: &Context, args: RmdirArgs) -> VerbResult {
    let name = args.directory;
    let request = RemoveDirectoryRequest { name: name.clone() };
    context.client.call::<RemoveDirectory>(&request).await.map_err(|error| {
        let failure = Failure::new(&error);
        match error.code() {
            Some(FaultCode::Held) => failure.hint(format!(
                "`imagetool tree {name}` and `imagetool list {name}` show what is in it"
            )),
            Some(FaultCode::NotFound) => failure.hint("`imagetool tree` lists all directories"),
            _ => Failure::from_call(&error),
        }
    })?;
    eprintln!("Removed {name}.");
    Ok(Outcome::Done)
}

/// Gives a directory of images to other owners, who replace those that it had.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool chown web --owner-group web-team --owner-group infra
  imagetool chown web/test --nobody

Who owns a directory above it, or has the power ImageServer.ChangeOwner, may give it to anyone;
its own owners to groups that they are in. With --nobody it has no owners of its own; those of the
directories above it own it all the same.")]
pub struct ChownArgs {
    /// The directory.
    #[arg(value_name = "DIR", value_parser = directory_of)]
    pub directory: ImageName,
    /// Who owns it from now on.
    #[command(flatten)]
    pub owners: OwnerArgs,
    /// Remove its own owners.
    #[arg(long, conflicts_with_all = ["owner_group", "owner_user"])]
    pub nobody: bool,
}

pub async fn chown(context: &Context, args: ChownArgs) -> VerbResult {
    let ChownArgs { directory: name, owners, nobody } = args;
    let owners = match owners.owners()? {
        Some(owners) => owners,
        None if nobody => api::access::Owners::default(),
        None => {
            return Err(Failure::from_text("no owner is given")
                .hint("give --owner-group or --owner-user, or --nobody")
                .misuse());
        }
    };
    let words = owners.in_words();
    let request = ChangeOwnerRequest { name: name.clone(), owners };
    context.client.call::<ChangeOwner>(&request).await.map_err(|error| match error.code() {
        Some(FaultCode::NotFound) => {
            Failure::new(&error).hint("`imagetool tree` lists all directories")
        }
        _ => Failure::from_call(&error),
    })?;
    eprintln!("{name} is owned by {words}.");
    Ok(Outcome::Done)
}

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
    /// Only this directory and directories below it.
    #[arg(value_name = "DIR", value_parser = directory_of)]
    pub directory: Option<ImageName>,
}

pub async fn tree(context: &Context, args: TreeArgs) -> VerbResult {
    let mut all: Vec<DirectorySummary> = Vec::new();
    loop {
        let after = all.last().map(|directory| directory.name.clone());
        let request = ListDirectoriesRequest { below: args.directory.clone(), after };
        let reply = context.client.call::<ListDirectories>(&request).await;
        let reply = reply.map_err(|error| Failure::from_call(&error))?;
        let progress = !reply.directories.is_empty();
        all.extend(reply.directories);
        if !reply.more || !progress {
            break;
        }
    }
    if let Some(name) = args.directory.filter(|_| all.is_empty()) {
        return Err(Failure::from_text(format!("there is no directory {name}"))
            .hint("`imagetool tree` lists all directories"));
    }
    match context.format {
        Format::Json => print_json(&all)?,
        Format::Table if all.is_empty() => eprintln!("There are no directories."),
        Format::Table => print(&safe_lines(&tree_table(&all)))?,
    }
    Ok(Outcome::Done)
}

fn tree_table(directories: &[DirectorySummary]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["DIRECTORY", "IMAGES", "SIZE", "MADE", "OWNERS"]);
    for (branch, directory) in branches(directories).into_iter().zip(directories) {
        let DirectorySummary { made_on, owners, images_below, bytes_below, .. } = directory;
        table.add_row([
            branch,
            grouped(*images_below),
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

/// Returns the branches and the name of each directory in the tree. The directories must be sorted
/// by component, with all their parents except those above the first.
fn branches(directories: &[DirectorySummary]) -> Vec<String> {
    let depth = |name: &ImageName| name.components().count();
    let top = directories.first().map_or(0, |first| depth(&first.name));
    // For each level, whether another directory follows; computed from the end.
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
