//! Fetches a tree and its contents from the image server, every byte of it checked by digest.

pub mod sequence;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Arc;

use api::object_server::{GetObjectsRequest, IDS_MAX};
use api::object_stream::Head;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use model::object::{Hasher, ObjectId};
use model::path::TreePath;
use model::tree::assembly::Assembly;
use model::tree::encode::DIRECTORY_BYTES_MAX;
use model::tree::{File, Leaf, Node, Tree, TreeError};
use rpc::client::{CallError, Client, ObjectReader, StreamError};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use crate::progress::{Meter, Unit};
use crate::restore::{RestoreError, Target};

/// The most that the directories of one tree may take, in bytes of their encoding.
pub(crate) const TREE_BYTES_MAX: u64 = 4 << 30;

/// How many objects are asked for at once.
pub(crate) const BATCH_OBJECTS_MAX: usize = 1_024;

/// How many bytes of content are asked for at once, unless one object alone has more.
const BATCH_BYTES_MAX: u64 = 32 << 20;

/// How many batches are under way at a time.
const BATCHES_MAX: usize = 4;

/// How much content is handed to the writer at once, in bytes: it is not woken for each of
/// thousands of small objects.
const HANDED_BYTES: usize = 256 << 10;

/// How many times that may wait to be written.
const HANDED_MAX: usize = 8;

/// Why a tree could not be fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DownloadError {
    /// The server cannot be asked, or refuses.
    #[error("cannot fetch objects")]
    Call {
        /// Why.
        #[from]
        source: CallError,
    },
    /// The stream of objects broke.
    #[error("cannot fetch objects")]
    Stream {
        /// How.
        #[from]
        source: StreamError,
    },
    /// The server lacks an object of the image.
    #[error("the image server does not have {id}")]
    Absent {
        /// The object.
        id: ObjectId,
    },
    /// The server sent another object than the next one that was asked for.
    #[error("{want} was asked for, the image server sent {got}")]
    Other {
        /// What was asked for.
        want: ObjectId,
        /// What came.
        got: String,
    },
    /// An object has another length than the tree says.
    #[error("{id} should have {want} bytes, the image server sends {got}")]
    Size {
        /// The object.
        id: ObjectId,
        /// Its length, in bytes.
        want: u64,
        /// What the server says, in bytes.
        got: u64,
    },
    /// What came does not hash to what it was asked for by.
    #[error("{want} was asked for, what came hashes to {got}")]
    Digest {
        /// What was asked for.
        want: ObjectId,
        /// What came.
        got: ObjectId,
    },
    /// The content of a file cannot be fetched.
    #[error("cannot fetch {path}")]
    File {
        /// The first file of the tree that has the content.
        path: TreePath,
        /// Why.
        source: Box<DownloadError>,
    },
    /// The directories are larger than any tree that people make.
    #[error("the directories of the image are larger than is accepted")]
    TooLarge,
    /// The directories make no tree.
    #[error("the directories of the image make no tree")]
    Tree {
        /// Why.
        #[from]
        source: TreeError,
    },
    /// What came cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file, in the tree.
        path: TreePath,
        /// What the kernel said.
        source: io::Error,
    },
    /// The tree cannot be made.
    #[error("cannot make the tree")]
    Restore {
        /// Why.
        #[from]
        source: RestoreError,
    },
}

impl DownloadError {
    pub(crate) fn of_file(self, path: &TreePath) -> Self {
        Self::File { path: path.clone(), source: Box::new(self) }
    }
}

/// Fetches the tree with that root, without the contents of its files.
///
/// # Errors
///
/// [`DownloadError`].
pub async fn tree(client: &Client, root: ObjectId, meter: &Meter) -> Result<Tree, DownloadError> {
    let mut assembly = Assembly::new(root, |_| None);
    let mut total = 0_u64;
    meter.start("Fetching directories", Unit::Items, None);
    loop {
        let wanted = assembly.wanted();
        if wanted.is_empty() {
            meter.finish();
            return Ok(assembly.finish()?);
        }
        for ids in wanted.chunks(BATCH_OBJECTS_MAX.min(IDS_MAX)) {
            let mut reader = client.get_objects(&GetObjectsRequest { ids: ids.to_vec() }).await?;
            for id in ids {
                let size_bytes = next_object(&mut reader, *id).await?;
                total = total.saturating_add(size_bytes);
                if size_bytes > DIRECTORY_BYTES_MAX as u64 || total > TREE_BYTES_MAX {
                    return Err(DownloadError::TooLarge);
                }
                let mut encoding = Vec::new();
                while let Some(chunk) = reader.chunk().await? {
                    encoding.extend_from_slice(&chunk);
                }
                assembly.insert(encoding, |_| None)?;
                meter.add(1);
            }
        }
    }
}

/// Reads the head of the object `want`, and gives its length in bytes.
async fn next_object(reader: &mut ObjectReader, want: ObjectId) -> Result<u64, DownloadError> {
    match reader.head().await? {
        Head::Object { id, size_bytes } if id == want => Ok(size_bytes),
        Head::Absent(id) if id == want => Err(DownloadError::Absent { id }),
        Head::Object { id, .. } | Head::Absent(id) => {
            Err(DownloadError::Other { want, got: id.to_string() })
        }
        Head::End => Err(DownloadError::Other { want, got: "the end".to_owned() }),
    }
}

/// An object and the files that hold it.
struct Wanted {
    id: ObjectId,
    files: Vec<(TreePath, File)>,
}

/// Fetches the contents of all files of `tree` and makes them in `target`. Blocking work is done
/// by tasks of `tracker`.
///
/// # Errors
///
/// [`DownloadError`].
pub async fn files(
    client: &Client,
    tree: &Tree,
    target: &Arc<Target>,
    tracker: &TaskTracker,
    meter: &Meter,
) -> Result<(), DownloadError> {
    let batches = batches_of(tree)?;
    let total = batches.iter().flatten().map(|wanted| wanted.files[0].1.size_bytes).sum();
    meter.start("Fetching files", Unit::Bytes, Some(total));
    stream::iter(batches)
        .map(|batch| fetch(client, batch, target, tracker, meter))
        .buffer_unordered(BATCHES_MAX)
        .try_collect::<()>()
        .await?;
    meter.finish();
    Ok(())
}

/// The objects of a tree in the order of the first path of each, cut into batches.
fn batches_of(tree: &Tree) -> Result<Vec<Vec<Wanted>>, DownloadError> {
    let mut places: BTreeMap<ObjectId, usize> = BTreeMap::new();
    let mut objects: Vec<Wanted> = Vec::new();
    for (path, node) in tree.nodes() {
        let Node::Leaf(Leaf::File(file)) = node else { continue };
        let (id, want) = (file.object, file.size_bytes);
        let place = *places.entry(id).or_insert(objects.len());
        match objects.get_mut(place) {
            None => objects.push(Wanted { id, files: vec![(path, file)] }),
            Some(wanted) if wanted.files[0].1.size_bytes == want => {
                wanted.files.push((path, file));
            }
            Some(wanted) => {
                let got = wanted.files[0].1.size_bytes;
                return Err(DownloadError::Size { id, want, got });
            }
        }
    }
    let mut batches: Vec<Vec<Wanted>> = Vec::new();
    let mut room = 0;
    for wanted in objects {
        let size_bytes = wanted.files[0].1.size_bytes;
        match batches.last_mut() {
            Some(batch) if size_bytes <= room && batch.len() < BATCH_OBJECTS_MAX => {
                room -= size_bytes;
                batch.push(wanted);
            }
            _ => {
                room = BATCH_BYTES_MAX.saturating_sub(size_bytes);
                batches.push(vec![wanted]);
            }
        }
    }
    Ok(batches)
}

async fn fetch(
    client: &Client,
    batch: Vec<Wanted>,
    target: &Arc<Target>,
    tracker: &TaskTracker,
    meter: &Meter,
) -> Result<(), DownloadError> {
    let expected: Vec<(ObjectId, u64, TreePath)> = batch
        .iter()
        .map(|wanted| (wanted.id, wanted.files[0].1.size_bytes, wanted.files[0].0.clone()))
        .collect();
    let ids = expected.iter().map(|(id, ..)| *id).collect();
    let mut reader = client.get_objects(&GetObjectsRequest { ids }).await?;
    let (sender, chunks) = mpsc::channel(HANDED_MAX);
    let (target, meter) = (Arc::clone(target), meter.clone());
    let writing = tracker.spawn_blocking(move || write(batch, chunks, &target, &meter));
    let transfer = async || -> Result<(), DownloadError> {
        let (mut gathered, mut gathered_bytes) = (Vec::new(), 0);
        for (id, want, path) in expected {
            let in_file = |error: DownloadError| error.of_file(&path);
            let got = next_object(&mut reader, id).await.map_err(in_file)?;
            if got != want {
                return Err(in_file(DownloadError::Size { id, want, got }));
            }
            while let Some(chunk) = reader.chunk().await? {
                gathered_bytes += chunk.len();
                gathered.push(chunk);
                if gathered_bytes >= HANDED_BYTES {
                    gathered_bytes = 0;
                    if sender.send(std::mem::take(&mut gathered)).await.is_err() {
                        // The writer has failed, and says why.
                        return Ok(());
                    }
                }
            }
        }
        // If it has failed, it says why.
        let _sent = sender.send(gathered).await;
        Ok(())
    };
    let transferred = transfer().await;
    drop(sender);
    let written = match writing.await {
        Ok(written) => written,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    };
    transferred.and(written)
}

/// Writes the objects of `batch`, whose contents come one after the other, cut into chunks.
fn write(
    batch: Vec<Wanted>,
    mut handed: mpsc::Receiver<Vec<Bytes>>,
    target: &Target,
    meter: &Meter,
) -> Result<(), DownloadError> {
    let mut chunks = std::iter::from_fn(|| handed.blocking_recv()).flatten();
    let mut new_files = target.files();
    for Wanted { id, files } in batch {
        let mut files = files.into_iter();
        let Some((path, first)) = files.next() else { continue };
        let failed = |source| DownloadError::Write { path: path.clone(), source };
        let mut file = new_files.create(&path)?;
        let mut hasher = Hasher::new(id.algorithm());
        let mut left = first.size_bytes;
        while left > 0 {
            // A chunk never spans two objects. An early end is reported by the other side.
            let Some(chunk) = chunks.next() else { return Ok(()) };
            hasher.update(&chunk);
            file.write_all(&chunk).map_err(failed)?;
            meter.add(chunk.len() as u64);
            left = left.saturating_sub(chunk.len() as u64);
        }
        let got = hasher.finish();
        if got != id {
            return Err(DownloadError::Digest { want: id, got }.of_file(&path));
        }
        for (path, same) in files {
            let mut copy = new_files.create(&path)?;
            let failed = |source| DownloadError::Write { path: path.clone(), source };
            io::Seek::rewind(&mut file).map_err(failed)?;
            io::copy(&mut file, &mut copy).map_err(failed)?;
            target.finish_file(&copy, &path, &same.metadata, same.mtime)?;
        }
        target.finish_file(&file, &path, &first.metadata, first.mtime)?;
    }
    Ok(())
}
