//! `imagetool estimate`: shows the space that an image needs.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::time::Duration;

use api::image_server::collection::{
    EstimateImage, EstimateImageReply, EstimateImageRequest, ObjectTotals,
};
use api::object_server::{CheckObjects, CheckObjectsRequest, IDS_MAX};
use model::image::{Image, ImageName};
use model::object::ObjectId;
use model::tree::{Leaf, Node, Tree};
use serde::Serialize;

use super::diff::{Operand, read};
use super::{Context, VerbResult, print};
use crate::output::failure::{Failure, Outcome};
use crate::output::{plural, size};
use crate::transfer::contents::TreeObjects;
use crate::transfer::download;
use crate::transfer::joined;
use model::display::grouped;

/// Time limit for the server, which searches all images.
const ESTIMATE_LIMIT: Duration = Duration::from_secs(600);

/// A note is printed after this time.
const NOTE_AFTER: Duration = Duration::from_secs(1);

/// Shows the space that an image needs on a machine and on the server, and what a machine fetches.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool estimate base/debian-12.7
  imagetool estimate base/debian-12.8 --against base/debian-12.7
  imagetool estimate file:/srv/build/root --against base/debian-12.7

On a disk a file takes whole blocks of 4 KiB, and a directory one block. After an image was deleted,
a collection (`gc`) frees only objects that no other image needs. A machine fetches each content
that it lacks once. For file:PATH, a directory or an archive as for `add`, the estimate is for the
whole tree, without a filter.")]
pub struct EstimateArgs {
    /// An image, or file:PATH for a directory or archive.
    #[arg(value_name = "NAME")]
    pub image: Operand,
    /// Show what a machine with this image would fetch.
    #[arg(long, value_name = "IMAGE")]
    pub against: Option<ImageName>,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report {
    name: String,
    root: ObjectId,
    machine: Usage,
    /// For an image on the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<EstimateImageReply>,
    /// For a file: objects that the server lacks.
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<ObjectTotals>,
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Against>,
}

#[derive(Debug, Serialize)]
struct Against {
    name: ImageName,
    to_fetch: ObjectTotals,
}

pub async fn run(context: &Context, args: EstimateArgs) -> VerbResult {
    let against = match &args.against {
        None => None,
        Some(name) => Some((name.clone(), context.image(name).await?)),
    };
    let (tree, server, missing) = match &args.image {
        Operand::Image(name) => {
            let image = context.image(name).await?;
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
    print(&context.format.render(&report, |_| describe(&report)))?;
    Ok(Outcome::Done)
}

/// Requests the server's estimate; prints a note if that takes long.
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
    reply.map_err(|error| Failure::from_image_call(&error, name))
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
    let reading = tokio::task::spawn_blocking(move || read(&path, algorithm, None, &[], &meter));
    joined(reading).await
}

/// Counts the objects of `tree` that the server lacks, without a lease on the others.
async fn missing(context: &Context, tree: &Tree) -> Result<ObjectTotals, Failure> {
    let objects = TreeObjects::of(tree);
    let ids: Vec<ObjectId> = objects.ids().into_iter().collect();
    let mut sum = ObjectTotals::default();
    for batch in ids.chunks(IDS_MAX) {
        let request = CheckObjectsRequest { ids: batch.to_vec(), lease_seconds: 0 };
        let reply = context.client.call::<CheckObjects>(&request).await;
        for id in reply.map_err(|error| Failure::from_call(&error))?.missing {
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
    Err(Failure::from_text(message).hint("a machine would fetch all of it"))
}

fn describe(report: &Report) -> String {
    let Report { machine: Usage { bytes, inodes, computed }, .. } = report;
    let mut lines =
        vec![("On a machine:", format!("{}, {} inodes", size(*bytes), grouped(*inodes)))];
    if *computed > 0 {
        lines.push(("", format!("and {}, of unknown size", plural(*computed, "computed file"))));
    }
    let of = |sum: &ObjectTotals| format!("{}, {}", plural(sum.objects, "object"), size(sum.bytes));
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

/// Size of a block of a file-system, in bytes.
const BLOCK_BYTES: u64 = 4_096;

/// Longest target of a symlink that fits into its inode, in bytes.
const SHORT_TARGET_BYTES: usize = 59;

/// Disk space of a tree on a file-system with blocks of 4 KiB, without its journal, its inodes, and
/// attributes that do not fit into inodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Usage {
    /// Space for contents and directories, in bytes.
    #[serde(with = "model::json::LargeNumber")]
    bytes: u64,
    /// Inodes: a file with several names has one.
    #[serde(with = "model::json::LargeNumber")]
    inodes: u64,
    /// Computed files, whose length is not known yet.
    #[serde(with = "model::json::LargeNumber")]
    computed: u64,
}

/// Computes the disk space of `tree`.
fn usage(tree: &Tree) -> Usage {
    let mut usage = Usage::default();
    let blocks = |bytes: u64| bytes.div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES);
    for (_, node) in tree.nodes() {
        let bytes = match &node {
            Node::Leaf(Leaf::HardLink(_)) => continue,
            Node::Directory(_) => BLOCK_BYTES,
            Node::Leaf(Leaf::File(file)) => blocks(file.size_bytes),
            Node::Leaf(Leaf::Symlink(symlink)) => {
                let length = symlink.target.0.len();
                if length > SHORT_TARGET_BYTES { BLOCK_BYTES } else { 0 }
            }
            Node::Leaf(Leaf::Computed(_)) => {
                usage.computed += 1;
                BLOCK_BYTES
            }
            Node::Leaf(Leaf::Special(_)) => 0,
        };
        usage.inodes += 1;
        usage.bytes = usage.bytes.saturating_add(bytes);
    }
    usage
}

/// Returns the lengths in bytes of the file contents of `tree`, by digest.
fn contents(tree: &Tree) -> BTreeMap<ObjectId, u64> {
    let files = tree.nodes().filter_map(|(_, node)| match node {
        Node::Leaf(Leaf::File(file)) => Some((file.object.id(), file.size_bytes)),
        _ => None,
    });
    files.collect()
}

/// Counts what a machine with the tree `have` fetches to get `want`.
fn to_fetch(have: &Tree, want: &Tree) -> ObjectTotals {
    let have = contents(have);
    let mut sum = ObjectTotals::default();
    for (_, size_bytes) in contents(want).iter().filter(|(id, _)| !have.contains_key(id)) {
        sum.count(*size_bytes);
    }
    sum
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;
    use model::tree::text::from_text;

    use super::*;

    fn tree(text: &str) -> Tree {
        let id = |byte: &[u8]| Algorithm::Blake3.digest(byte).to_string();
        let text = text.replace("ONE", &id(b"1")).replace("TWO", &id(b"2"));
        from_text(Algorithm::Blake3, &text).unwrap()
    }

    #[test]
    fn a_tree_takes_whole_blocks_and_each_content_is_fetched_once() {
        let long = "x".repeat(60);
        let some = tree(&format!(
            "d 755 0:0 /a\n\
             f 644 0:0 1.000000000 1 ONE /a/one\n\
             f 644 0:0 1.000000000 0 {} /a/zero\n\
             h /b -> /a/one\n\
             f 644 0:0 1.000000000 4097 TWO /c\n\
             f 644 0:0 1.000000000 4097 TWO /d\n\
             l 0:0 /e -> short\n\
             l 0:0 /f -> {long}\n\
             p 600 0:0 1.000000000 /g\n",
            Algorithm::Blake3.digest(b"")
        ));
        // The root, /a, /a/one, twice two blocks, and /f.
        let want = Usage { bytes: 8 * 4_096, inodes: 9, computed: 0 };
        assert_eq!(usage(&some), want);
        let other = tree("f 644 0:0 1.000000000 1 ONE /elsewhere\n");
        assert_eq!(to_fetch(&other, &some), ObjectTotals { objects: 2, bytes: 4_097 });
        assert_eq!(to_fetch(&some, &other), ObjectTotals::default());
        let none = Tree::empty(Algorithm::Blake3);
        assert_eq!(usage(&none), Usage { bytes: 4_096, inodes: 1, computed: 0 });
        assert_eq!(to_fetch(&none, &some), ObjectTotals { objects: 3, bytes: 4_098 });
    }
}
