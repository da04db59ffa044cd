//! `imagetool verify`: looks whether the image server has all that an image needs.

use std::collections::BTreeMap;

use api::object_server::{CheckObjects, CheckObjectsRequest, GetObjectsRequest, IDS_MAX};
use api::object_stream::Head;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use model::image::ImageName;
use model::object::{Hasher, ObjectId};
use model::path::TreePath;
use model::report::report;
use serde::Serialize;
use tool::Format;

use super::{Context, Ended, get_image, print, print_json};
use crate::download::{BATCH_OBJECTS_MAX, DownloadError};
use crate::failure::{Failure, Outcome};
use crate::inventory::Inventory;
use crate::listings::{Listings, fetch};
use crate::output::{plural, size};
use crate::progress::Unit;

/// How many batches are under way at a time.
const BATCHES_MAX: usize = 4;

/// Looks whether the image server has every object of an image, whole and unchanged.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  imagetool verify base/debian-12.7
  imagetool verify --quick base/debian-12.7

Every object is fetched and hashed here; nothing is kept. --quick fetches directories alone, and
asks the server whether it has the contents of files. What is missing or damaged is listed with a
path that needs it. To mend it, add an image that has the same content under a new name.

Exit codes: 0 all is there, 3 something is missing or damaged, 1 it could not be found out.")]
pub struct VerifyArgs {
    /// The name of the image.
    pub name: ImageName,
    /// Ask the server whether it has the contents, and do not fetch them.
    #[arg(long)]
    pub quick: bool,
}

/// What is printed with `--format json`.
#[derive(Debug, Serialize)]
struct Report<'call> {
    name: &'call ImageName,
    root: ObjectId,
    quick: bool,
    objects: usize,
    #[serde(with = "model::wide")]
    bytes: u64,
    problems: Vec<Problem>,
}

#[derive(Clone, Debug, Serialize)]
struct Problem {
    path: TreePath,
    object: ObjectId,
    problem: String,
}

/// Verifies an image.
///
/// # Errors
///
/// [`Failure`] if it is not there or the server cannot be asked.
pub async fn run(context: &Context, args: VerifyArgs) -> Ended {
    let name = &args.name;
    let image = get_image(&context.client, name).await;
    let root = image.map_err(|error| Failure::of_image_call(&error, name))?.content.root;
    let (inventory, lost) =
        directories(context, root).await.map_err(|error| Failure::of_download(&error))?;
    let mut problems: Vec<Problem> = Vec::new();
    for (id, problem) in lost {
        let path = inventory.directories.get(&id).cloned().unwrap_or_else(TreePath::root);
        problems.push(Problem { path, object: id, problem });
    }
    let bad = match args.quick {
        true => ask(context, &inventory).await.map_err(|error| Failure::of_call(&error))?,
        false => files(context, &inventory).await.map_err(|error| Failure::of_download(&error))?,
    };
    for (object, problem) in bad {
        if let Some((_, path)) = inventory.files.get(&object) {
            problems.push(Problem { path: path.clone(), object, problem });
        }
    }
    problems.sort_by(|left, right| left.path.cmp(&right.path));
    let objects = inventory.directories.len() + inventory.files.len();
    let bytes = inventory.bytes();
    let found = problems.len() as u64;
    if context.format == Format::Json {
        print_json(&Report { name, root, quick: args.quick, objects, bytes, problems })?;
    } else {
        let line =
            |Problem { path, object, problem }: &Problem| format!("{path} {object}: {problem}\n");
        print(&problems.iter().map(line).collect::<String>())?;
    }
    let looked = format!("{name}: {}, {}", plural(objects as u64, "object"), size(bytes));
    if found == 0 {
        let how = if args.quick { "are there" } else { "are there and unchanged" };
        eprintln!("{looked}: all {how}.");
        return Ok(Outcome::Done);
    }
    eprintln!("{looked}: {} missing or damaged.", plural(found, "object"));
    Ok(Outcome::Different)
}

/// Fetches all directories that can be had; gives the others with why.
async fn directories(
    context: &Context,
    root: ObjectId,
) -> Result<(Inventory, BTreeMap<ObjectId, String>), DownloadError> {
    let (client, meter) = (&context.client, &context.meter);
    let mut listings = Listings::default();
    let mut lost = BTreeMap::new();
    let mut total = 0;
    meter.start("Fetching directories", Unit::Items, None);
    loop {
        let inventory = Inventory::of(&mut listings, root, |id| lost.contains_key(id))?;
        let wanted = listings.wanted();
        if wanted.is_empty() {
            meter.finish();
            return Ok((inventory, lost));
        }
        let lacking = fetch::fetch(client, &mut listings, &wanted, &mut total, meter).await?;
        lost.extend(lacking.into_iter().map(|(id, lack)| match lack {
            fetch::Lack::Absent => (id, "missing".to_owned()),
            fetch::Lack::Damaged(error) => (id, format!("damaged: {}", report(&error))),
        }));
    }
}

type Bad = Vec<(ObjectId, String)>;

/// Asks the server which contents it lacks.
async fn ask(context: &Context, inventory: &Inventory) -> Result<Bad, rpc::client::CallError> {
    let ids: Vec<ObjectId> = inventory.files.keys().copied().collect();
    let mut bad = Bad::new();
    for batch in ids.chunks(IDS_MAX) {
        let request = CheckObjectsRequest { ids: batch.to_vec(), lease_seconds: 0 };
        let reply = context.client.call::<CheckObjects>(&request).await?;
        bad.extend(reply.missing.into_iter().map(|id| (id, "missing".to_owned())));
    }
    Ok(bad)
}

/// Fetches and hashes all contents.
async fn files(context: &Context, inventory: &Inventory) -> Result<Bad, DownloadError> {
    let all: Vec<(ObjectId, u64)> =
        inventory.files.iter().map(|(id, (size_bytes, _))| (*id, *size_bytes)).collect();
    context.meter.start("Verifying", Unit::Bytes, Some(inventory.bytes()));
    let bad = stream::iter(all.chunks(BATCH_OBJECTS_MAX))
        .map(|batch| hash(context, batch))
        .buffer_unordered(BATCHES_MAX)
        .try_concat()
        .await?;
    context.meter.finish();
    Ok(bad)
}

async fn hash(context: &Context, batch: &[(ObjectId, u64)]) -> Result<Bad, DownloadError> {
    let ids = batch.iter().map(|(id, _)| *id).collect();
    let mut reader = context.client.get_objects(&GetObjectsRequest { ids }).await?;
    let mut bad = Bad::new();
    for &(id, want) in batch {
        let got_bytes = match reader.head().await? {
            Head::Object { id: got, size_bytes } if got == id => size_bytes,
            Head::Absent(got) if got == id => {
                bad.push((id, "missing, or found damaged by the server".to_owned()));
                continue;
            }
            Head::Object { id: got, .. } | Head::Absent(got) => {
                return Err(DownloadError::Other { want: id, got: got.to_string() });
            }
            Head::End => {
                return Err(DownloadError::Other { want: id, got: "the end".to_owned() });
            }
        };
        let mut hasher = Hasher::new(id.algorithm());
        while let Some(chunk) = reader.chunk().await? {
            hasher.update(&chunk);
            context.meter.add(chunk.len() as u64);
        }
        let got = hasher.finish();
        if got != id {
            bad.push((id, format!("damaged: what came hashes to {got}")));
        } else if got_bytes != want {
            bad.push((id, format!("has {got_bytes} bytes, the image says {want}")));
        }
    }
    Ok(bad)
}
