//! `imagetool estimate`: shows the space that an image needs.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Duration;

use api::image_server::estimate::{EstimateImage, EstimateImageReply, EstimateImageRequest, Sum};
use api::object_server::{CheckObjects, CheckObjectsRequest, IDS_MAX};
use model::image::{Image, ImageName};
use model::object::ObjectId;
use model::tree::Tree;
use serde::Serialize;
use tool::Format;

use super::diff::{Operand, read};
use super::{Context, VerbResult, get_image, print, print_json};
use crate::compare::disk_usage::{Usage, to_fetch, usage};
use crate::output::failure::{Failure, Outcome};
use crate::output::{count, plural, size};
use crate::transfer::contents::TreeObjects;
use crate::transfer::download;

/// How long the server may take to look through all images.
const ESTIMATE_LIMIT: Duration = Duration::from_secs(600);

/// How long nothing is said of what takes long.
const NOTE_AFTER: Duration = Duration::from_secs(1);

/// Shows the space that an image needs on a machine and on the server, and what a machine fetches.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool estimate base/debian-12.7
  imagetool estimate base/debian-12.8 --against base/debian-12.7
  imagetool estimate file:/srv/build/root --against base/debian-12.7

On a disk a file takes whole blocks of 4 KiB, a directory one of them. Only what no other image
needs is freed by a collection (`gc`) after an image was deleted. A machine fetches each content
once that it does not have. Of file:PATH, a directory or an archive as for `add`, all is told that
can be before it is added; without a filter, so all of it.")]
pub struct EstimateArgs {
    /// An image, or file:PATH for a directory or archive.
    #[arg(value_name = "NAME")]
    pub image: Operand,
    /// Tell what a machine that has this image would fetch.
    #[arg(long, value_name = "IMAGE")]
    pub against: Option<ImageName>,
}

/// What is printed with `--format json`.
#[derive(Debug, Serialize)]
struct Report {
    name: String,
    root: ObjectId,
    machine: Usage,
    /// Of an image.
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<EstimateImageReply>,
    /// Of what is not added yet: what the server lacks of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<Sum>,
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Against>,
}

#[derive(Debug, Serialize)]
struct Against {
    name: ImageName,
    to_fetch: Sum,
}

/// Tells what it takes.
pub async fn run(context: &Context, args: EstimateArgs) -> VerbResult {
    let against = match &args.against {
        None => None,
        Some(name) => Some((name.clone(), image(context, name).await?)),
    };
    let (tree, server, missing) = match &args.image {
        Operand::Image(name) => {
            let image = image(context, name).await?;
            let reply = server_estimate(context, name).await?;
            (tree(context, &image).await?, Some(reply), None)
        }
        Operand::File(path) => {
            let like = against.as_ref().map(|(_, image)| image.content.algorithm());
            let tree = read_file(context, path.clone(), like.unwrap_or_default()).await?;
            let missing = missing(context, &tree).await?;
            (tree, None, Some(missing))
        }
    };
    let against = match against {
        None => None,
        Some((name, image)) => {
            let have = self::tree(context, &image).await?;
            check_same_algorithm(&have, &tree)?;
            Some(Against { name, to_fetch: to_fetch(&have, &tree) })
        }
    };
    let (name, root, machine) = (args.image.to_string(), tree.digest(), usage(&tree));
    let report = Report { name, root, machine, server, missing, against };
    match context.format {
        Format::Json => print_json(&report)?,
        Format::Table => print(&describe(&report))?,
    }
    Ok(Outcome::Done)
}

/// Asks the server for its estimate; prints a note if that takes long.
async fn server_estimate(
    context: &Context,
    name: &ImageName,
) -> Result<EstimateImageReply, Failure> {
    let request = EstimateImageRequest { name: name.clone() };
    let call = context.client.call_within::<EstimateImage>(&request, ESTIMATE_LIMIT);
    let mut call = std::pin::pin!(call);
    let reply = match tokio::time::timeout(NOTE_AFTER, &mut call).await {
        Ok(reply) => reply,
        Err(_) => {
            if std::io::stderr().is_terminal() {
                eprintln!("note: the image server looks through all images for this");
            }
            call.await
        }
    };
    reply.map_err(|error| Failure::of_image_call(&error, name))
}

async fn image(context: &Context, name: &ImageName) -> Result<Image, Failure> {
    let image = get_image(&context.client, name).await;
    image.map_err(|error| Failure::of_image_call(&error, name))
}

async fn tree(context: &Context, image: &Image) -> Result<Tree, Failure> {
    let tree = download::tree(&context.client, image.content.root, &context.meter).await;
    tree.map_err(|error| download::failure(&error))
}

async fn read_file(
    context: &Context,
    path: PathBuf,
    algorithm: model::object::Algorithm,
) -> Result<Tree, Failure> {
    let meter = context.meter.clone();
    let reading = tokio::task::spawn_blocking(move || read(&path, algorithm, None, &meter));
    match reading.await {
        Ok(tree) => tree,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// What the server lacks of `tree`. Nothing is held for it.
async fn missing(context: &Context, tree: &Tree) -> Result<Sum, Failure> {
    let objects = TreeObjects::of(tree);
    let ids: Vec<ObjectId> = objects.ids().into_iter().collect();
    let mut sum = Sum::default();
    for batch in ids.chunks(IDS_MAX) {
        let request = CheckObjectsRequest { ids: batch.to_vec(), lease_seconds: 0 };
        let reply = context.client.call::<CheckObjects>(&request).await;
        for id in reply.map_err(|error| Failure::of_call(&error))?.missing {
            let file = objects.files.get(&id).copied();
            let directory = || objects.directories.get(&id).map(|one| one.encode().len() as u64);
            sum.count(file.or_else(directory).unwrap_or(0));
        }
    }
    Ok(sum)
}

fn check_same_algorithm(have: &Tree, want: &Tree) -> Result<(), Failure> {
    let (have, want) = (have.algorithm(), want.algorithm());
    if have == want {
        return Ok(());
    }
    let message = format!("one image has {have} digests, the other {want} digests");
    Err(Failure::of_text(message).hint("a machine would fetch all of it"))
}

fn describe(report: &Report) -> String {
    let Report { machine: Usage { bytes, inodes, computed }, .. } = report;
    let mut lines = vec![("On a machine:", format!("{}, {} inodes", size(*bytes), count(*inodes)))];
    if *computed > 0 {
        lines.push(("", format!("and {}, of unknown size", plural(*computed, "computed file"))));
    }
    let of = |sum: &Sum| format!("{}, {}", plural(sum.objects, "object"), size(sum.bytes));
    if let Some(EstimateImageReply { own, shared }) = &report.server {
        lines.push(("On the server:", format!("{} that only this image needs", of(own))));
        lines.push(("", format!("{} that others need too", of(shared))));
    }
    if let Some(missing) = &report.missing {
        lines.push(("To be added:", format!("{} that the server lacks", of(missing))));
    }
    if let Some(Against { name, to_fetch }) = &report.against {
        lines.push(("To be fetched:", format!("{} by a machine that has {name}", of(to_fetch))));
    }
    lines.into_iter().map(|(label, text)| format!("{label:<14} {text}\n")).collect()
}
