//! `imagetool diff`: shows the differences of two images.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use model::filter::Filter;
use model::image::{ComputedRule, Image, ImageName, ImageNameError};
use model::object::{Algorithm, ObjectId};
use model::tree::Tree;
use serde::Serialize;
use tool::Format;

use super::service_warnings::{FilesAt, Side, Subject};
use super::{Context, VerbResult, print, print_json};
use crate::compare::entries::{Change, ChangeKind, TreeChangesRecord, compare};
use crate::compare::metadata::MetadataChanges;
use crate::compare::{Ignore, IgnoredPart};
use crate::directory_cache::DirectoryCache;
use crate::image_source::{Source, SourceArgs};
use crate::input_files::computed;
use crate::output::failure::{Failure, Outcome};
use crate::output::progress::Meter;
use crate::transfer::joined;
use crate::transfer::{directories, download};
use model::display::grouped;

/// Shows the differences of two images: paths, filters, triggers, computed files, health checks,
/// packages.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool diff base/debian-12.7 base/debian-12.8
  imagetool diff --ignore mtime,packages base/debian-12.7 base/debian-12.8
  imagetool diff base/debian-12.7 file:/srv/build/root      # before it is added
  imagetool diff web/7 web/8 --format json | jq -r '.entries.changed[].path'

Exit codes: 0 the two are equal, 3 they differ, 1 the comparison failed.

Directories that differ are fetched, and those that say what services need. A path is `added` if
only B has it, `removed` if only A has it. A hard link is compared as its file. For file:PATH, a
directory or an archive as for `add`, only the tree is compared, without the paths that the other
image's filter keeps and without the content of files that are computed there. Warnings say what B,
but not A, would take from services: data that the filter does not keep, and numbers of users. Of an
archive, only owners of directories are looked at.")]
pub struct DiffArgs {
    /// Image, or file:PATH for a directory or archive.
    #[arg(value_name = "A")]
    pub before: Operand,
    /// Image, or file:PATH, to compare with.
    #[arg(value_name = "B")]
    pub after: Operand,
    /// Parts to leave out, separated by commas; may be repeated.
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',')]
    pub ignore: Vec<IgnoredPart>,
}

/// One side of a comparison, as given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operand {
    /// An image of the server.
    Image(ImageName),
    /// A directory or an archive.
    File(PathBuf),
}

impl FromStr for Operand {
    type Err = ImageNameError;

    fn from_str(text: &str) -> Result<Self, ImageNameError> {
        match text.strip_prefix("file:") {
            Some(path) => Ok(Self::File(path.into())),
            None => ImageName::new(text).map(Self::Image),
        }
    }
}

impl std::fmt::Display for Operand {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Image(name) => name.fmt(formatter),
            Self::File(path) => write!(formatter, "file:{}", path.display()),
        }
    }
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report {
    before: OperandReport,
    after: OperandReport,
    same: bool,
    entries: TreeChangesRecord,
    #[serde(flatten)]
    metadata: MetadataChanges,
}

#[derive(Debug, Serialize)]
struct OperandReport {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<ObjectId>,
    root: ObjectId,
}

/// One side of a comparison, with its tree.
struct ComparedTree {
    image: Option<Image>,
    root: ObjectId,
}

/// One side of a comparison, before files are read.
enum OpenedOperand<'args> {
    Image(Box<Image>),
    File(&'args Path),
}

impl OpenedOperand<'_> {
    fn image(&self) -> Option<&Image> {
        match self {
            Self::Image(image) => Some(image),
            Self::File(_) => None,
        }
    }
}

pub async fn run(context: &Context, args: DiffArgs) -> VerbResult {
    let ignore: Ignore = args.ignore.iter().copied().collect();
    let mut cache = DirectoryCache::default();
    let (before, after) = open_both(context, &args, &mut cache).await?;
    let changes = match ignore.contains(&IgnoredPart::Tree) {
        true => Vec::new(),
        false => tree_changes(context, &mut cache, &before, &after, &ignore).await?,
    };
    if !ignore.contains(&IgnoredPart::Tree) {
        warn_of_services(context, &mut cache, &args, &before, &after).await;
    }
    let metadata = match (&before.image, &after.image) {
        (Some(before), Some(after)) => MetadataChanges::of(before, after, &ignore),
        _ => MetadataChanges::default(),
    };
    let same = changes.is_empty() && metadata.is_empty();
    match context.format {
        Format::Json => print_json(&Report {
            before: operand_report(&args.before, &before),
            after: operand_report(&args.after, &after),
            same,
            entries: TreeChangesRecord::of(&changes),
            metadata,
        })?,
        Format::Table => {
            let lines = changes.iter().map(Change::line).chain(metadata.lines());
            print(&lines.map(|line| line + "\n").collect::<String>())?;
            eprintln!("{}", summary(&args, &changes, &metadata));
        }
    }
    Ok(if same { Outcome::Done } else { Outcome::Different })
}

/// Warns of what B would take from services and A would not. A file has the filter of the other
/// side.
async fn warn_of_services<'call>(
    context: &Context,
    cache: &mut DirectoryCache,
    args: &'call DiffArgs,
    before: &'call ComparedTree,
    after: &'call ComparedTree,
) {
    type Compared<'call> = &'call ComparedTree;
    let side = |operand: &'call Operand, tree: Compared<'call>, other: Compared<'call>| {
        let files = match operand {
            Operand::Image(_) => FilesAt::Server,
            Operand::File(path) if path.is_dir() => FilesAt::Directory(path),
            Operand::File(_) => FilesAt::Archive,
        };
        let image = tree.image.as_ref().or(other.image.as_ref());
        let filter = image.and_then(|image| image.content.filter.as_ref());
        Side { root: tree.root, filter, files }
    };
    let former = before.image.as_ref().map(|image| &image.content.name);
    let (after, before) = (side(&args.after, after, before), side(&args.before, before, after));
    if (after.root, after.filter) == (before.root, before.filter) {
        return;
    }
    let subject = Subject { after, before: Some(before), dropped: &[], former };
    subject.warn(context, cache).await;
}

async fn open_both(
    context: &Context,
    args: &DiffArgs,
    cache: &mut DirectoryCache,
) -> Result<(ComparedTree, ComparedTree), Failure> {
    let before = open_operand(context, &args.before).await?;
    let after = open_operand(context, &args.after).await?;
    let before_root = root(context, &before, after.image(), cache).await?;
    let after_root = root(context, &after, before.image(), cache).await?;
    let side =
        |operand: &OpenedOperand<'_>, root| ComparedTree { image: operand.image().cloned(), root };
    Ok((side(&before, before_root), side(&after, after_root)))
}

async fn open_operand<'args>(
    context: &Context,
    operand: &'args Operand,
) -> Result<OpenedOperand<'args>, Failure> {
    match operand {
        Operand::File(path) => Ok(OpenedOperand::File(path)),
        Operand::Image(name) => {
            let image = context.image(name).await?;
            Ok(OpenedOperand::Image(Box::new(image)))
        }
    }
}

/// Returns the digest of the tree. A file is read for it, with the digest algorithm, filter and
/// computed files of the `other` side.
async fn root(
    context: &Context,
    operand: &OpenedOperand<'_>,
    other: Option<&Image>,
    cache: &mut DirectoryCache,
) -> Result<ObjectId, Failure> {
    let path = match operand {
        OpenedOperand::Image(image) => return Ok(image.content.root),
        OpenedOperand::File(path) => path.to_path_buf(),
    };
    let algorithm = other.map(|image| image.content.algorithm()).unwrap_or_default();
    let filter = other.and_then(|image| image.content.filter.clone());
    let computed = other.map(|image| image.content.computed.clone()).unwrap_or_default();
    let meter = context.meter.clone();
    let read = move || read(&path, algorithm, filter.as_ref(), &computed, &meter);
    let tree = joined(tokio::task::spawn_blocking(read)).await?;
    cache.insert_tree(&tree);
    Ok(tree.digest())
}

/// Reads a directory or an archive as `add` does. Of the `computed` files those that are there are
/// marked.
pub(super) fn read(
    path: &Path,
    algorithm: Algorithm,
    filter: Option<&Filter>,
    computed: &[ComputedRule],
    meter: &Meter,
) -> Result<Tree, Failure> {
    let failed = |error: &dyn std::error::Error| {
        Failure::from_text(format!("{}: {}", path.display(), model::display::error_chain(error)))
    };
    let plainly = SourceArgs { platform: None, image_ref: None, plain: false };
    let source = Source::open(path, &plainly, meter)?;
    let builder = source.read(algorithm, filter, meter)?.builder;
    let without_kept = |tree: Tree| match filter {
        None => Ok(tree),
        Some(filter) => tree.without(|path| filter.keeps_below_unkept(path)),
    };
    let tree = builder.finish().and_then(without_kept);
    tree.and_then(|tree| computed::apply_to_files(computed, &tree)).map_err(|error| failed(&error))
}

async fn tree_changes(
    context: &Context,
    cache: &mut DirectoryCache,
    before: &ComparedTree,
    after: &ComparedTree,
    ignore: &Ignore,
) -> Result<Vec<Change>, Failure> {
    let (before, after) = (before.root, after.root);
    if before.algorithm() != after.algorithm() && !ignore.contains(&IgnoredPart::Content) {
        let (before, after) = (before.algorithm(), after.algorithm());
        let message = format!("one image has {before} digests, the other {after} digests");
        return Err(Failure::from_text(message).hint(
            "digests of two kinds cannot be compared: compare everything else with --ignore \
             content",
        ));
    }
    let fetch_for = |cache: &mut DirectoryCache| compare(cache, before, after, ignore);
    directories::fetch_for(&context.client, cache, &context.meter, fetch_for)
        .await
        .map_err(|error| download::failure(&error))?
        .map_err(|error| Failure::new(&error))
}

fn operand_report(operand: &Operand, side: &ComparedTree) -> OperandReport {
    OperandReport {
        name: operand.to_string(),
        digest: side.image.as_ref().map(|image| image.content.digest()),
        root: side.root,
    }
}

fn summary(args: &DiffArgs, changes: &[Change], metadata: &MetadataChanges) -> String {
    let (before, after) = (&args.before, &args.after);
    let mut counts = [0_u64; 3];
    for change in changes {
        counts[match change.kind {
            ChangeKind::Added(_) => 0,
            ChangeKind::Removed(_) => 1,
            ChangeKind::Changed { .. } => 2,
        }] += 1;
    }
    let [added, removed, changed] = counts.map(grouped);
    let sections = metadata.sections();
    if changes.is_empty() && sections.is_empty() {
        let but = if args.ignore.is_empty() { "" } else { ", as far as they were compared" };
        return format!("{before} and {after} are the same{but}.");
    }
    let mut text =
        format!("{before} to {after}: {added} added, {removed} removed, {changed} changed");
    if !sections.is_empty() {
        text += "; different: ";
        text += &sections.join(", ");
    }
    text + "."
}
