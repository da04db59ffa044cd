//! `imagetool show`: shows what an image is, and its tree.

use std::fmt::Write as _;

use api::access::Owners;
use api::object_server::GetObjectsRequest;
use api::object_stream::Head;
use model::image::{Content, Image, ImageName, Notes};
use model::object::ObjectId;
use model::tree::{Totals, Tree, text};
use model::words::plain;
use rpc::server::StreamError;
use serde::Serialize;
use tool::Format;

use super::{Context, VerbResult, get_image, print, print_bytes, print_json, signatures};
use crate::input_files::health_check;
use crate::input_files::triggers;
use crate::output::failure::{Failure, Outcome};
use crate::output::{count, size, time};
use crate::packages::printable;
use crate::transfer::download;

/// Shows an image: its digests, filter, triggers and sums, and with --tree all its entries.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool show base/debian-12.7
  imagetool show base/debian-12.7 --tree | grep ' /etc/ssh/'
  imagetool show base/debian-12.7 --packages
  diff <(imagetool show A --tree) <(imagetool show B --tree)

With --tree what is said of the image stands in lines that start with `#`; the other lines
are the text form of the tree, one entry each.")]
pub struct ShowArgs {
    /// The name of the image.
    pub name: ImageName,
    /// Add the tree: one line for each entry.
    #[arg(long)]
    pub tree: bool,
    /// Print the log of the build, and nothing else.
    #[arg(long, conflicts_with = "tree")]
    pub build_log: bool,
    /// Print the packages that are installed in it, and nothing else.
    #[arg(long, conflicts_with_all = ["tree", "build_log"])]
    pub packages: bool,
}

/// What is printed with `--format json`.
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

/// Shows an image.
pub async fn run(context: &Context, args: ShowArgs) -> VerbResult {
    let image = get_image(&context.client, &args.name)
        .await
        .map_err(|error| Failure::of_image_call(&error, &args.name))?;
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

/// Prints the log as it is, once it is known to be what it should be.
async fn print_build_log(context: &Context, image: &Image) -> VerbResult {
    let name = &image.content.name;
    let Some(id) = image.notes.build_log else {
        return Err(Failure::of_text(format!("{name} has no build log")));
    };
    let request = GetObjectsRequest { ids: vec![id] };
    let cut = |error: StreamError| Failure::new(&error);
    let mut reader = context
        .client
        .get_objects(&request)
        .await
        .map_err(|error| Failure::of_image_call(&error, name))?;
    let mut log = Vec::new();
    if let Head::Object { .. } = reader.head().await.map_err(cut)? {
        while let Some(chunk) = reader.chunk().await.map_err(cut)? {
            log.extend_from_slice(&chunk);
        }
    }
    if id.algorithm().digest(&log) != id {
        let message = format!("the image server does not have the build log of {name}");
        return Err(Failure::of_text(message));
    }
    print_bytes(&log)?;
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

fn describe(image: &Image, tree: &Tree) -> String {
    let Image { content, notes } = image;
    let totals = tree.root().totals();
    let mut text = String::new();
    let mut line = |label: &str, value: String| {
        // Much of it is what somebody has uploaded.
        let value = plain(&value, value.len());
        writeln!(text, "{label:<10} {value}").expect("writing to a String cannot fail");
    };
    line("Name:", content.name.to_string());
    line("Digest:", content.digest().to_string());
    line("Tree:", content.root.to_string());
    line(
        "Entries:",
        format!(
            "{} ({} directories, {} hard links, {} computed files)",
            count(totals.entries),
            count(totals.directories),
            count(totals.hard_links),
            count(totals.computed)
        ),
    );
    line("Size:", size(totals.bytes));
    line("Created:", format!("{} by {}", time(notes.created_on), or(&notes.created_by, "?")));
    if let Some(expires_at) = notes.expires_at {
        line("Expires:", time(expires_at));
    }
    if let Some(source) = &notes.source_image {
        line("Made from:", source.to_string());
    }
    if !notes.owner_groups.is_empty() || !notes.owner_users.is_empty() {
        let owners = Owners::new(notes.owner_groups.clone(), notes.owner_users.clone());
        line("Owners:", owners.in_words());
    }
    for (index, (name, value)) in notes.tags.iter().enumerate() {
        line(if index == 0 { "Tags:" } else { "" }, format!("{name}={value}"));
    }
    for (index, text) in notes.release_notes.iter().flat_map(|text| text.lines()).enumerate() {
        line(if index == 0 { "Notes:" } else { "" }, text.to_owned());
    }
    if !notes.packages.is_empty() {
        let installed = notes.packages.iter().map(|one| one.size_bytes);
        let installed = installed.fold(0, u64::saturating_add);
        let packages = count(notes.packages.len() as u64);
        line("Packages:", format!("{packages}, {} installed", size(installed)));
    }
    for (index, signature) in notes.signatures.iter().enumerate() {
        let label = if index == 0 { "Signed by:" } else { "" };
        line(label, signatures::describe(signature, content));
    }
    if let Some(log) = &notes.build_log {
        line("Build log:", log.to_string());
    }
    match &content.filter {
        None => line("Filter:", "none: a sparse image, which touches only its paths".to_owned()),
        Some(filter) if filter.lines().is_empty() => {
            line("Filter:", "empty: the image covers everything".to_owned());
        }
        Some(filter) => {
            line("Filter:", "machines keep".to_owned());
            filter.lines().iter().for_each(|one| line("", one.clone()));
        }
    }
    if content.triggers.0.is_empty() {
        line("Triggers:", "none".to_owned());
    }
    for (index, trigger) in content.triggers.0.iter().enumerate() {
        let label = if index == 0 { "Triggers:" } else { "" };
        line(label, triggers::in_words(trigger));
    }
    let check =
        content.health_check.as_ref().map_or_else(|| "none".to_owned(), health_check::in_words);
    line("Health:", check);
    for (index, rule) in content.computed.iter().enumerate() {
        let label = if index == 0 { "Computed:" } else { "" };
        line(label, format!("{} by {}", rule.path, rule.source));
    }
    text
}

fn or<'text>(text: &'text str, default: &'text str) -> &'text str {
    if text.is_empty() { default } else { text }
}
