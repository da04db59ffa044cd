//! Fetches a tree and its contents from the image server, and verifies all of it by digest.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::sync::Arc;

use api::object_server::{GetObjectsRequest, IDS_MAX};
use api::object_stream::ObjectHead;
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

use crate::output::failure::Failure;
use crate::output::progress::{Meter, Unit};
use crate::transfer::joined;
use crate::transfer::restore::{RestoreError, RestoreTarget};

/// The most that the directories of one tree may take, in bytes of their encoding.
pub(crate) const TREE_BYTES_MAX: u64 = 4 << 30;

/// How many objects are asked for at once.
pub(crate) const BATCH_OBJECTS_MAX: usize = 1_024;

/// How many bytes of content are asked for at once, unless one object alone has more.
pub(crate) const BATCH_BYTES_MAX: u64 = 32 << 20;

/// How many batches are under way at a time.
const BATCHES_MAX: usize = 4;

/// How much content is passed to the writer at once, in bytes, so that it does not wake up for each
/// small object.
const HANDED_BYTES: usize = 256 << 10;

/// How many such portions may wait to be written.
const HANDED_MAX: usize = 8;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DownloadError {
    #[error("cannot fetch objects")]
    Call {
        #[from]
        source: CallError,
    },
    #[error("cannot fetch objects")]
    Stream {
        #[from]
        source: StreamError,
    },
    #[error("the image server does not have {id}")]
    Absent { id: ObjectId },
    #[error("requested {want}, but the image server sent {got}")]
    UnexpectedObject { want: ObjectId, got: String },
    #[error("{id} should have {want} bytes, the image server sends {got}")]
    Size { id: ObjectId, want: u64, got: u64 },
    #[error("requested {want}, but the received content has the digest {got}")]
    Digest { want: ObjectId, got: ObjectId },
    #[error("cannot fetch {path}")]
    File { path: TreePath, source: Box<DownloadError> },
    #[error("the directories of the image exceed the size limit")]
    TooLarge,
    #[error("the directories of the image do not form a valid tree")]
    Tree {
        #[from]
        source: TreeError,
    },
    #[error("cannot write {path}")]
    Write { path: TreePath, source: io::Error },
    #[error("cannot make the tree")]
    Restore {
        #[from]
        source: RestoreError,
    },
}

impl DownloadError {
    pub(crate) fn of_file(self, path: &TreePath) -> Self {
        Self::File { path: path.clone(), source: Box::new(self) }
    }
}

const ABSENT_HINT: &str =
    "the image cannot be restored from this server; look at its log and its disk";

/// Turns `error` into a failure with hints for the user.
pub fn failure(error: &DownloadError) -> Failure {
    match error {
        DownloadError::Call { source } => Failure::from_call(source),
        DownloadError::File { source, .. } if matches!(**source, DownloadError::Absent { .. }) => {
            Failure::new(error).hint(ABSENT_HINT)
        }
        DownloadError::Absent { .. } => Failure::new(error).hint(ABSENT_HINT),
        DownloadError::Restore { source } => restore_failure(source),
        _ => Failure::new(error),
    }
}

pub fn restore_failure(error: &RestoreError) -> Failure {
    let failure = Failure::new(error);
    match error {
        RestoreError::NotEmpty { .. } => failure.hint("give a directory that is not there yet"),
        RestoreError::Leftover { path } => {
            failure.hint(format!("remove it with `rm -r {}`, and try again", path.display()))
        }
        _ => failure,
    }
}

/// Fetches the tree with that root, without the contents of its files.
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

/// Reads the head of the object `want`, and returns its length in bytes.
pub(crate) async fn next_object(
    reader: &mut ObjectReader,
    want: ObjectId,
) -> Result<u64, DownloadError> {
    match reader.head().await? {
        ObjectHead::Object { id, size_bytes } if id == want => Ok(size_bytes),
        ObjectHead::Absent(id) if id == want => Err(DownloadError::Absent { id }),
        ObjectHead::Object { id, .. } | ObjectHead::Absent(id) => {
            Err(DownloadError::UnexpectedObject { want, got: id.to_string() })
        }
        ObjectHead::End => Err(DownloadError::UnexpectedObject { want, got: "the end".to_owned() }),
    }
}

/// An object and the files that have it as content.
struct ObjectFiles {
    id: ObjectId,
    files: Vec<(TreePath, File)>,
}

/// Fetches the contents of all files of `tree` and creates the files in `target`. Blocking work
/// runs in tasks of `tracker`.
pub async fn files(
    client: &Client,
    tree: &Tree,
    target: &Arc<RestoreTarget>,
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

/// Returns the objects of a tree in the order of the first path of each, cut into batches.
fn batches_of(tree: &Tree) -> Result<Vec<Vec<ObjectFiles>>, DownloadError> {
    let mut places: BTreeMap<ObjectId, usize> = BTreeMap::new();
    let mut objects: Vec<ObjectFiles> = Vec::new();
    for (path, node) in tree.nodes() {
        let Node::Leaf(Leaf::File(file)) = node else { continue };
        let (id, want) = (file.object.id(), file.size_bytes);
        let place = *places.entry(id).or_insert(objects.len());
        match objects.get_mut(place) {
            None => objects.push(ObjectFiles { id, files: vec![(path, file)] }),
            Some(wanted) if wanted.files[0].1.size_bytes == want => {
                wanted.files.push((path, file));
            }
            Some(wanted) => {
                let got = wanted.files[0].1.size_bytes;
                return Err(DownloadError::Size { id, want, got });
            }
        }
    }
    let mut batches: Vec<Vec<ObjectFiles>> = Vec::new();
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
    batch: Vec<ObjectFiles>,
    target: &Arc<RestoreTarget>,
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
                        // The writer failed and returns the error.
                        return Ok(());
                    }
                }
            }
        }
        // If the writer failed, it returns the error.
        let _sent = sender.send(gathered).await;
        Ok(())
    };
    let transferred = transfer().await;
    drop(sender);
    let written = joined(writing).await;
    transferred.and(written)
}

/// Writes the objects of `batch`, whose contents come one after the other, cut into chunks.
fn write(
    batch: Vec<ObjectFiles>,
    mut handed: mpsc::Receiver<Vec<Bytes>>,
    target: &RestoreTarget,
    meter: &Meter,
) -> Result<(), DownloadError> {
    let mut chunks = std::iter::from_fn(|| handed.blocking_recv()).flatten();
    let mut new_files = target.files();
    for ObjectFiles { id, files } in batch {
        let mut files = files.into_iter();
        let Some((path, first)) = files.next() else { continue };
        let failed = |source| DownloadError::Write { path: path.clone(), source };
        let mut file = new_files.create(&path)?;
        let mut hasher = Hasher::new(id.algorithm());
        let mut left = first.size_bytes;
        while left > 0 {
            // A chunk never spans two objects. The sender reports an early end.
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

/// Fetches objects one after the other, in the order in which they are needed. Only the objects of
/// one request are in flight, so that a slow consumer does not leave further streams unread.
pub struct ObjectSequence<'call> {
    client: &'call Client,
    objects: std::vec::IntoIter<(ObjectId, u64)>,
    reader: Option<ObjectReader>,
    /// How many objects of the current batch are still to be read.
    left: usize,
}

/// The content of one object, as it arrives.
pub struct ObjectContent<'sequence> {
    reader: &'sequence mut ObjectReader,
    id: ObjectId,
    hasher: Option<Hasher>,
}

impl<'call> ObjectSequence<'call> {
    /// Starts with the first of `objects`, which may contain duplicates.
    pub fn new(client: &'call Client, objects: Vec<(ObjectId, u64)>) -> Self {
        Self { client, objects: objects.into_iter(), reader: None, left: 0 }
    }

    /// Returns the next object, or `None` after the last. The content of the previous one must have
    /// been read to its end.
    pub async fn next(&mut self) -> Result<Option<ObjectContent<'_>>, DownloadError> {
        if self.left == 0 {
            let ids = batch_of(self.objects.as_slice());
            self.left = ids.len();
            self.reader = match ids.is_empty() {
                true => None,
                false => Some(self.client.get_objects(&GetObjectsRequest { ids }).await?),
            };
        }
        let (Some(reader), Some((id, want))) = (&mut self.reader, self.objects.next()) else {
            return Ok(None);
        };
        self.left -= 1;
        let got = next_object(reader, id).await?;
        if got != want {
            return Err(DownloadError::Size { id, want, got });
        }
        let hasher = Some(Hasher::new(id.algorithm()));
        Ok(Some(ObjectContent { reader, id, hasher }))
    }
}

/// Returns the first of `objects` that one request asks for, without duplicates.
fn batch_of(objects: &[(ObjectId, u64)]) -> Vec<ObjectId> {
    let mut bytes = 0_u64;
    let mut known = BTreeSet::new();
    let fits = |&(id, size_bytes): &(ObjectId, u64)| {
        bytes = bytes.saturating_add(size_bytes);
        let first = known.is_empty();
        known.insert(id) && (first || known.len() <= BATCH_OBJECTS_MAX && bytes <= BATCH_BYTES_MAX)
    };
    objects.iter().copied().take_while(fits).map(|(id, _)| id).collect()
}

impl ObjectContent<'_> {
    /// Returns the next chunk, or `None` at the end, after the digest was verified.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, DownloadError> {
        if let Some(chunk) = self.reader.chunk().await? {
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&chunk);
            }
            return Ok(Some(chunk));
        }
        match self.hasher.take().map(|hasher| hasher.finish()) {
            Some(got) if got != self.id => Err(DownloadError::Digest { want: self.id, got }),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn a_batch_ends_at_its_limits_and_before_what_it_has() {
        let id = |text: &str| Algorithm::Blake3.digest(text.as_bytes());
        let names = ["a", "b", "c", "a", "d"];
        let all = |size: u64| names.map(|name| (id(name), size));
        assert_eq!(batch_of(&all(1)), [id("a"), id("b"), id("c")]);
        assert_eq!(batch_of(&all(BATCH_BYTES_MAX / 2)), [id("a"), id("b")]);
        assert_eq!(batch_of(&all(u64::MAX)), [id("a")]);
        assert_eq!(batch_of(&[]), []);
        let many: Vec<_> = (0..3_000).map(|number| (id(&number.to_string()), 1)).collect();
        assert_eq!(batch_of(&many).len(), BATCH_OBJECTS_MAX);
    }
}
