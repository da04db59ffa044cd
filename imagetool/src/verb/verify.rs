//! `imagetool verify`: checks that the image server has all objects of an image.

use std::collections::BTreeMap;

use api::object_server::{CheckObjects, CheckObjectsRequest, GetObjectsRequest, IDS_MAX};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use model::display::error_chain;
use model::image::ImageName;
use model::object::{Hasher, ObjectId};
use model::path::TreePath;
use serde::Serialize;
use tool::Format;

use super::{Context, VerbResult, print, print_json};
use crate::directory_cache::{DirectoryCache, NeededObjects};
use crate::output::failure::{Failure, Outcome};
use crate::output::progress::Unit;
use crate::output::{plural, size};
use crate::transfer::directories::{self, Unavailable};
use crate::transfer::download::{self, BATCH_OBJECTS_MAX, DownloadError, next_object};

/// Number of concurrent requests.
const BATCHES_MAX: usize = 4;

/// Checks that the image server has every object of an image, complete and unchanged.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool verify base/debian-12.7
  imagetool verify --quick base/debian-12.7

Every object is fetched and hashed, and not stored. --quick fetches only directories, and asks the
server whether it has the contents of files. Missing and damaged objects are listed with a path
that needs them. To repair them, add an image with the same content under a new name.

Exit codes: 0 all objects are there, 3 some are missing or damaged, 1 the check failed.")]
pub struct VerifyArgs {
    /// The name of the image.
    pub name: ImageName,
    /// Ask the server whether it has the contents instead of fetching them.
    #[arg(long)]
    pub quick: bool,
}

/// The JSON output.
#[derive(Debug, Serialize)]
struct Report<'call> {
    name: &'call ImageName,
    root: ObjectId,
    quick: bool,
    objects: usize,
    #[serde(with = "model::json::LargeNumber")]
    bytes: u64,
    problems: Vec<Problem>,
}

#[derive(Clone, Debug, Serialize)]
struct Problem {
    path: TreePath,
    object: ObjectId,
    problem: String,
}

pub async fn run(context: &Context, args: VerifyArgs) -> VerbResult {
    let name = &args.name;
    let root = context.image(name).await?.content.root;
    let (needed, lost) =
        fetch_directories(context, root).await.map_err(|error| download::failure(&error))?;
    let mut problems: Vec<Problem> = Vec::new();
    for (id, problem) in lost {
        let path = needed.directories.get(&id).cloned().unwrap_or_else(TreePath::root);
        problems.push(Problem { path, object: id, problem });
    }
    let bad = match args.quick {
        true => {
            check_on_server(context, &needed).await.map_err(|error| Failure::from_call(&error))?
        }
        false => verify_files(context, &needed).await.map_err(|error| download::failure(&error))?,
    };
    for (object, problem) in bad {
        if let Some((_, path)) = needed.files.get(&object) {
            problems.push(Problem { path: path.clone(), object, problem });
        }
    }
    problems.sort_by(|left, right| left.path.cmp(&right.path));
    let objects = needed.directories.len() + needed.files.len();
    let bytes = needed.bytes();
    let found = problems.len() as u64;
    if context.format == Format::Json {
        print_json(&Report { name, root, quick: args.quick, objects, bytes, problems })?;
    } else {
        let line =
            |Problem { path, object, problem }: &Problem| format!("{path} {object}: {problem}\n");
        print(&problems.iter().map(line).collect::<String>())?;
    }
    let summary = format!("{name}: {}, {}", plural(objects as u64, "object"), size(bytes));
    if found == 0 {
        let how = if args.quick { "are there" } else { "are there and unchanged" };
        eprintln!("{summary}: all {how}.");
        return Ok(Outcome::Done);
    }
    eprintln!("{summary}: {} missing or damaged.", plural(found, "object"));
    Ok(Outcome::Different)
}

/// Fetches all directories that are available; returns the others with the reason.
async fn fetch_directories(
    context: &Context,
    root: ObjectId,
) -> Result<(NeededObjects, BTreeMap<ObjectId, String>), DownloadError> {
    let (client, meter) = (&context.client, &context.meter);
    let mut cache = DirectoryCache::default();
    let mut lost = BTreeMap::new();
    let mut total = 0;
    meter.start("Fetching directories", Unit::Items, None);
    loop {
        let needed = NeededObjects::of(&mut cache, root, |id| lost.contains_key(id))?;
        let wanted = cache.wanted();
        if wanted.is_empty() {
            meter.finish();
            return Ok((needed, lost));
        }
        let unavailable =
            directories::fetch(client, &mut cache, &wanted, &mut total, meter).await?;
        lost.extend(unavailable.into_iter().map(|(id, lack)| match lack {
            Unavailable::Absent => (id, "missing".to_owned()),
            Unavailable::Damaged(error) => (id, format!("damaged: {}", error_chain(&error))),
        }));
    }
}

type BadObjects = Vec<(ObjectId, String)>;

/// Asks the server which contents it lacks.
async fn check_on_server(
    context: &Context,
    needed: &NeededObjects,
) -> Result<BadObjects, rpc::client::CallError> {
    let ids: Vec<ObjectId> = needed.files.keys().copied().collect();
    let mut bad = BadObjects::new();
    for batch in ids.chunks(IDS_MAX) {
        let request = CheckObjectsRequest { ids: batch.to_vec(), lease_seconds: 0 };
        let reply = context.client.call::<CheckObjects>(&request).await?;
        bad.extend(reply.missing.into_iter().map(|id| (id, "missing".to_owned())));
    }
    Ok(bad)
}

/// Fetches and hashes all contents.
async fn verify_files(
    context: &Context,
    needed: &NeededObjects,
) -> Result<BadObjects, DownloadError> {
    let all: Vec<(ObjectId, u64)> =
        needed.files.iter().map(|(id, (size_bytes, _))| (*id, *size_bytes)).collect();
    context.meter.start("Verifying", Unit::Bytes, Some(needed.bytes()));
    let bad = stream::iter(all.chunks(BATCH_OBJECTS_MAX))
        .map(|batch| hash(context, batch))
        .buffer_unordered(BATCHES_MAX)
        .try_concat()
        .await?;
    context.meter.finish();
    Ok(bad)
}

async fn hash(context: &Context, batch: &[(ObjectId, u64)]) -> Result<BadObjects, DownloadError> {
    let ids = batch.iter().map(|(id, _)| *id).collect();
    let mut reader = context.client.get_objects(&GetObjectsRequest { ids }).await?;
    let mut bad = BadObjects::new();
    for &(id, want) in batch {
        let got_bytes = match next_object(&mut reader, id).await {
            Ok(size_bytes) => size_bytes,
            Err(DownloadError::Absent { .. }) => {
                bad.push((id, "missing, or found damaged by the server".to_owned()));
                continue;
            }
            Err(error) => return Err(error),
        };
        let mut hasher = Hasher::new(id.algorithm());
        while let Some(chunk) = reader.chunk().await? {
            hasher.update(&chunk);
            context.meter.add(chunk.len() as u64);
        }
        let got = hasher.finish();
        if got != id {
            bad.push((id, format!("damaged: its content has the digest {got}")));
        } else if got_bytes != want {
            bad.push((id, format!("has {got_bytes} bytes, the image says {want}")));
        }
    }
    Ok(bad)
}
