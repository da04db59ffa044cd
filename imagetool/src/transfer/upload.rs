//! Uploads the objects of a tree: asks the image server which are missing, then sends those, each
//! once, in one stream.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use api::object_server::{AddObjects, AddObjectsReply, CheckObjects, CheckObjectsRequest, IDS_MAX};
use api::object_stream::ObjectHead;
use bytes::Bytes;
use futures_util::stream::{self, Stream};
use model::object::{Algorithm, ObjectId};
use rpc::client::{CallError, Client, Remedy};
use tokio::sync::{Mutex, mpsc};

use crate::output::progress::{Meter, Unit};
use crate::transfer::contents::{
    Contents, PIECES_MAX, SendError, TreeObjects, UploadPiece, UploadSink,
};
use crate::transfer::joined;

/// Lease that is requested for the objects of an upload, in seconds.
const LEASE_SECONDS: u32 = 24 * 3_600;

/// If the source needs longer than this for the next object, the stream is ended and a new one is
/// started for that object, so that the server does not time out.
const IDLE_MAX: Duration = Duration::from_secs(15);

/// Number of attempts if the connection is lost.
const ATTEMPTS_MAX: u32 = 5;

/// The pause before the second attempt is twice this, and twice as long before each further one.
const RETRY_DELAY: Duration = Duration::from_millis(250);

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UploadError {
    #[error("cannot upload")]
    Call { source: CallError },
    #[error("cannot upload")]
    Send { source: SendError },
}

/// The counts of an upload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UploadSummary {
    /// Distinct objects of the tree, including directories.
    pub objects: u64,
    /// Objects that were sent.
    pub sent: u64,
    /// Total length of the sent objects, in bytes.
    pub sent_bytes: u64,
}

/// Selects the objects to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UploadScope {
    /// Objects that the server lacks.
    Missing,
    /// All objects, so that the server compares them with its own.
    All,
}

/// Sends the objects that the server lacks, or all. When the connection is lost, starts again with
/// the objects that are still missing.
pub async fn upload(
    client: &Client,
    algorithm: Algorithm,
    objects: TreeObjects,
    mut contents: Box<dyn Contents>,
    scope: UploadScope,
    meter: &Meter,
) -> Result<UploadSummary, UploadError> {
    let ids = objects.ids();
    let objects = Arc::new(objects);
    let mut total = UploadSummary { objects: ids.len() as u64, ..UploadSummary::default() };
    let mut attempt = 0;
    let mut scope = scope;
    loop {
        let missing = check(client, &ids).await.map(|missing| match scope {
            UploadScope::Missing => missing,
            UploadScope::All => ids.clone(),
        });
        let result = match missing {
            Ok(missing) if missing.is_empty() => return Ok(total),
            Ok(missing) => {
                let sent;
                (contents, sent) =
                    send(client, algorithm, &objects, contents, missing, &mut total, meter).await;
                if sent.is_ok() {
                    scope = UploadScope::Missing;
                }
                sent
            }
            Err(source) => Err(UploadError::Call { source }),
        };
        attempt += 1;
        match result {
            // The next check finds nothing missing, or objects that the server removed meanwhile.
            Ok(()) if attempt < ATTEMPTS_MAX => {}
            Err(UploadError::Call { source })
                if source.remedy() == Remedy::Wait && attempt < ATTEMPTS_MAX =>
            {
                tokio::time::sleep(RETRY_DELAY * (1 << attempt)).await;
            }
            Ok(()) => return Ok(total),
            Err(error) => return Err(error),
        }
    }
}

async fn check(client: &Client, ids: &BTreeSet<ObjectId>) -> Result<BTreeSet<ObjectId>, CallError> {
    let ids: Vec<ObjectId> = ids.iter().copied().collect();
    let mut missing = BTreeSet::new();
    for batch in ids.chunks(IDS_MAX) {
        let request = CheckObjectsRequest { ids: batch.to_vec(), lease_seconds: LEASE_SECONDS };
        missing.extend(client.call::<CheckObjects>(&request).await?.missing);
    }
    Ok(missing)
}

async fn send(
    client: &Client,
    algorithm: Algorithm,
    objects: &Arc<TreeObjects>,
    mut contents: Box<dyn Contents>,
    missing: BTreeSet<ObjectId>,
    total: &mut UploadSummary,
    meter: &Meter,
) -> (Box<dyn Contents>, Result<(), UploadError>) {
    let directories: u64 = objects
        .directories
        .iter()
        .filter(|(id, _)| missing.contains(id))
        .map(|(_, directory)| directory.encode().len() as u64)
        .sum();
    let files: u64 =
        objects.files.iter().filter(|(id, _)| missing.contains(id)).map(|(_, size)| size).sum();
    meter.start("Uploading", Unit::Bytes, Some(files + directories));
    let (sender, pieces) = mpsc::channel(PIECES_MAX);
    let mut sink = UploadSink::new(sender, client.may_pack(), meter.clone());
    let objects = Arc::clone(objects);
    let reading = tokio::task::spawn_blocking(move || {
        let mut read = || {
            contents.send(algorithm, &missing, &mut sink)?;
            for (id, directory) in &objects.directories {
                if missing.contains(id) {
                    let encoding = directory.encode();
                    sink.object(*id, encoding.len() as u64);
                    sink.content(&encoding)?;
                    sink.end()?;
                }
            }
            Ok(())
        };
        let read = read();
        let result = read.and_then(|()| sink.finish());
        (contents, result)
    });
    let pieces = Arc::new(Mutex::new(Some(pieces)));
    let uploaded = stream_pieces(client, &pieces, total).await;
    // Otherwise the reader would wait forever for space in the queue.
    pieces.lock().await.take();
    let (contents, read) = joined(reading).await;
    meter.finish();
    let result = match (read, uploaded) {
        (Err(source), _) if !matches!(source, SendError::Closed) => {
            Err(UploadError::Send { source })
        }
        (_, Err(source)) => Err(UploadError::Call { source }),
        (Err(source), Ok(())) => Err(UploadError::Send { source }),
        (Ok(()), Ok(())) => Ok(()),
    };
    (contents, result)
}

type Pieces = Arc<Mutex<Option<mpsc::Receiver<UploadPiece>>>>;

async fn stream_pieces(
    client: &Client,
    pieces: &Pieces,
    total: &mut UploadSummary,
) -> Result<(), CallError> {
    loop {
        let first = match &mut *pieces.lock().await {
            Some(pieces) => pieces.recv().await,
            None => None,
        };
        let Some(first) = first else { return Ok(()) };
        let body = body(first, Arc::clone(pieces));
        let reply: AddObjectsReply = client.upload::<AddObjects>(body).await?;
        total.sent += reply.added;
        total.sent_bytes += reply.added_bytes;
    }
}

enum BodyState {
    First(UploadPiece),
    Next { complete: bool },
    VerbResult,
}

/// Returns the body of one upload: pieces up to the end of the queue, or up to a long pause.
fn body(
    first: UploadPiece,
    pieces: Pieces,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    stream::unfold((BodyState::First(first), pieces), |(stage, pieces)| async move {
        let complete = match stage {
            BodyState::VerbResult => return None,
            BodyState::First(UploadPiece { bytes, complete }) => {
                return Some((Ok(bytes), (BodyState::Next { complete }, pieces)));
            }
            BodyState::Next { complete } => complete,
        };
        let next = {
            let mut pieces = pieces.lock().await;
            match pieces.as_mut() {
                None => None,
                Some(pieces) if complete => {
                    tokio::time::timeout(IDLE_MAX, pieces.recv()).await.unwrap_or(None)
                }
                Some(pieces) => pieces.recv().await,
            }
        };
        Some(match next {
            Some(UploadPiece { bytes, complete }) => {
                (Ok(bytes), (BodyState::Next { complete }, pieces))
            }
            None if complete => {
                let mut end = Vec::new();
                ObjectHead::End.encode(&mut end);
                (Ok(end.into()), (BodyState::VerbResult, pieces))
            }
            None => {
                let cut = io::Error::other("an object could not be read to its end");
                (Err(cut), (BodyState::VerbResult, pieces))
            }
        })
    })
}
