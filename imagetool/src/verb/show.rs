//! `imagetool show`: describes an image, its tree, its build log and its packages.

use std::borrow::Cow;
use std::fmt::Write as _;

use api::access::Owners;
use api::object_server::GetObjectsRequest;
use api::object_stream::ObjectHead;
use model::display::safe_text;
use model::image::{Content, Image, ImageName, Notes};
use model::object::ObjectId;
use model::tree::{Totals, Tree, text};
use rpc::server::StreamError;
use serde::Serialize;
use tool::Format;

use super::{Context, VerbResult, print, print_bytes, print_json, signatures};
use crate::input_files::{health_check_text, signer_text, triggers};
use crate::output::failure::{Failure, Outcome};
use crate::output::{size, time};
use crate::packages::printable;
use crate::transfer::download;
use model::display::grouped;

/// Describes an image: digests, filter, triggers and totals, and with --tree all entries.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool show base/debian-12.7
  imagetool show base/debian-12.7 --tree | grep ' /etc/ssh/'
  imagetool show base/debian-12.7 --packages
  diff <(imagetool show A --tree) <(imagetool show B --tree)

With --tree the lines of the description start with `#`; the other lines are the text form of the
tree, one entry each.")]
pub struct ShowArgs {
    /// The name of the image.
    pub name: ImageName,
    /// Print the tree too: one line for each entry.
    #[arg(long)]
    pub tree: bool,
    /// Print only the log of the build.
    #[arg(long, conflicts_with = "tree")]
    pub build_log: bool,
    /// Print only the installed packages.
    #[arg(long, conflicts_with_all = ["tree", "build_log"])]
    pub packages: bool,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report<'call> {
    name: &'call ImageName,
    digest: ObjectId,
    totals: Totals,
    content: &'call Content,
    notes: &'call Notes,
    #[serde(skip_serializing_if = "Option::is_none")]
    tree: Option<Vec<String>>,
}

/// The JSON output of --build-log.
#[derive(Debug, Serialize)]
struct BuildLog<'call> {
    name: &'call ImageName,
    digest: ObjectId,
    build_log: Cow<'call, str>,
}

pub async fn run(context: &Context, args: ShowArgs) -> VerbResult {
    let image = context.image(&args.name).await?;
    if args.build_log {
        return print_build_log(context, &image).await;
    }
    if args.packages {
        return print_packages(context, &image);
    }
    let tree = download::tree(&context.client, image.content.root, &context.meter)
        .await
        .map_err(|error| Failure::new(&error))?;
    match context.format {
        Format::Json => {
            let lines = || tree.nodes().map(|(path, node)| text::line_of(&path, &node)).collect();
            print_json(&Report {
                name: &image.content.name,
                digest: image.content.digest(),
                totals: tree.root().totals(),
                content: &image.content,
                notes: &image.notes,
                tree: args.tree.then(lines),
            })?;
        }
        Format::Table if args.tree => {
            let about = describe(&image, &tree);
            let mut all: String = about.lines().map(|line| format!("# {line}\n")).collect();
            all.push_str(&text::to_text(&tree));
            print(&all)?;
        }
        Format::Table => print(&describe(&image, &tree))?,
    }
    Ok(Outcome::Done)
}

/// Prints the log after its digest was verified.
async fn print_build_log(context: &Context, image: &Image) -> VerbResult {
    let name = &image.content.name;
    let Some(id) = image.notes.build_log else {
        return Err(Failure::from_text(format!("{name} has no build log")));
    };
    let request = GetObjectsRequest { ids: vec![id] };
    let cut = |error: StreamError| Failure::new(&error);
    let mut reader = context
        .client
        .get_objects(&request)
        .await
        .map_err(|error| Failure::from_image_call(&error, name))?;
    let mut log = Vec::new();
    if let ObjectHead::Object { .. } = reader.head().await.map_err(cut)? {
        while let Some(chunk) = reader.chunk().await.map_err(cut)? {
            log.extend_from_slice(&chunk);
        }
    }
    if id.algorithm().digest(&log) != id {
        let message = format!("the image server does not have the build log of {name}");
        return Err(Failure::from_text(message));
    }
    match context.format {
        Format::Json => {
            // JSON has no bytes that are no text.
            let build_log = String::from_utf8_lossy(&log);
            print_json(&BuildLog { name, digest: id, build_log })?;
        }
        Format::Table => print_bytes(&log)?,
    }
    Ok(Outcome::Done)
}

fn print_packages(context: &Context, image: &Image) -> VerbResult {
    let packages = &image.notes.packages;
    match context.format {
        Format::Json => print_json(packages)?,
        Format::Table if packages.is_empty() => {
            eprintln!("No packages are recorded for {}.", image.content.name);
        }
        Format::Table => {
            let rows: Vec<[String; 3]> = packages
                .iter()
                .map(|one| [printable(&one.name), printable(&one.version), size(one.size_bytes)])
                .collect();
            let head = ["PACKAGE", "VERSION", "INSTALLED"];
            let widths = [0, 1].map(|column| {
                let lengths = rows.iter().map(|row| row[column].chars().count());
                lengths.max().unwrap_or(0).max(head[column].len())
            });
            let line = |[name, version, size]: [&str; 3]| {
                format!("{name:<0$}  {version:<1$}  {size:>10}\n", widths[0], widths[1])
            };
            let mut text = line(head);
            for [name, version, size] in &rows {
                text.push_str(&line([name, version, size]));
            }
            print(&text)?;
        }
    }
    Ok(Outcome::Done)
}

/// Lines with a label each.
#[derive(Default)]
struct Labelled(String);

impl Labelled {
    fn line(&mut self, label: &str, value: &str) {
        // Values may come from whoever uploaded the image.
        let value = safe_text(value, value.len());
        writeln!(self.0, "{label:<10} {value}").expect("writing to a String succeeds");
    }

    /// Adds a line for each value, the first with the label.
    fn list(&mut self, label: &str, values: impl IntoIterator<Item = String>) {
        for (index, value) in values.into_iter().enumerate() {
            self.line(if index == 0 { label } else { "" }, &value);
        }
    }
}

fn describe(image: &Image, tree: &Tree) -> String {
    let Image { content, notes } = image;
    let totals = tree.root().totals();
    let mut text = Labelled::default();
    text.line("Name:", content.name.as_str());
    text.line("Digest:", &content.digest().to_string());
    text.line("Tree:", &content.root.to_string());
    let entries = format!(
        "{} ({} directories, {} hard links, {} computed files)",
        grouped(totals.entries),
        grouped(totals.directories),
        grouped(totals.hard_links),
        grouped(totals.computed)
    );
    text.line("Entries:", &entries);
    text.line("Size:", &size(totals.bytes));
    describe_notes(&mut text, notes, content);
    match &content.filter {
        None => text.line("Filter:", "none: a sparse image, which touches only its paths"),
        Some(filter) if filter.lines().is_empty() => {
            text.line("Filter:", "empty: the image covers everything");
        }
        Some(filter) => {
            text.line("Filter:", "machines keep");
            filter.lines().iter().for_each(|line| text.line("", line));
        }
    }
    if content.triggers.0.is_empty() {
        text.line("Triggers:", "none");
    }
    text.list("Triggers:", content.triggers.0.iter().map(triggers::trigger_text));
    let check = content.health_check.as_ref().map_or_else(|| "none".to_owned(), health_check_text);
    text.line("Health:", &check);
    let rules = content.computed.iter().map(|rule| format!("{} by {}", rule.path, rule.source));
    text.list("Computed:", rules);
    text.list("Signers:", content.signers.iter().map(signer_text));
    text.0
}

fn describe_notes(text: &mut Labelled, notes: &Notes, content: &Content) {
    let created_by = if notes.created_by.is_empty() { "?" } else { &notes.created_by };
    text.line("Created:", &format!("{} by {created_by}", time(notes.created_on)));
    text.list("Expires:", notes.expires_at.map(time));
    text.list("Made from:", notes.source_image.as_ref().map(ToString::to_string));
    if !notes.owner_groups.is_empty() || !notes.owner_users.is_empty() {
        let owners = Owners::new(notes.owner_groups.clone(), notes.owner_users.clone());
        text.line("Owners:", &owners.in_words());
    }
    text.list("Tags:", notes.tags.iter().map(|(name, value)| format!("{name}={value}")));
    let release_notes = notes.release_notes.iter().flat_map(|text| text.lines());
    text.list("Notes:", release_notes.map(str::to_owned));
    if !notes.packages.is_empty() {
        let sizes = notes.packages.iter().map(|package| package.size_bytes);
        let installed = size(sizes.fold(0, u64::saturating_add));
        let packages = grouped(notes.packages.len() as u64);
        text.line("Packages:", &format!("{packages}, {installed} installed"));
    }
    let signatures = notes.signatures.iter();
    text.list("Signed by:", signatures.map(|one| signatures::describe(one, content)));
    text.list("Build log:", notes.build_log.map(|log| log.to_string()));
}
