//! Reads a running machine: its scanned tree, and the contents of its files for the upload.
//!
//! The tree is that of one scan. Contents are hashed as they arrive and must match the scan, so
//! that exactly this tree is uploaded, even if the machine changes meanwhile.

pub mod pieces;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use api::subd::{
    Configuration, GetConfiguration, GetFiles, GetFilesReply, GetFilesRequest, Poll, PollReply,
    PollRequest, ScanNow, ScanNowRequest, ScanReport,
};
use model::object::{Algorithm, Hasher, ObjectId};
use model::path::TreePath;
use model::report::report;
use model::tree::{Leaf, Node, Tree};
use rpc::client::{CallError, Client};
use rpc::trees::{ReadError, Reader};
use tokio::runtime::Handle;
use tokio::time::Instant;

use self::pieces::FilePieces;
use crate::output::progress::{Meter, Unit};
use crate::transfer::contents::{Contents, SendError, UploadSink};

/// How long a scan may take.
const SCAN_TIMEOUT: Duration = Duration::from_secs(1_800);

/// How often the machine is polled for the end of the scan.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The timeout of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// How often a tree is read again if it changes meanwhile.
const READS_MAX: usize = 10;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubError {
    #[error("cannot read the machine")]
    Call {
        #[from]
        source: CallError,
    },
    #[error("cannot read the tree of the machine")]
    Tree {
        #[from]
        source: ReadError,
    },
    #[error("the machine did not scan its tree within {} s", SCAN_TIMEOUT.as_secs())]
    ScanTimeout,
}

/// A machine.
#[derive(Clone)]
pub struct SubReader {
    client: Client,
    reader: Arc<Reader>,
}

/// What a machine has, as of one scan.
pub struct Snapshot {
    pub tree: Tree,
    /// What the scan said.
    pub scan: ScanReport,
    /// What the machine's own configuration hides from scans.
    pub exclusions: Vec<String>,
}

impl SubReader {
    /// The machine behind `client`.
    pub fn new(client: Client) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { client, reader: Arc::new(Reader::new(processors)) }
    }

    /// How it scans.
    pub async fn configuration(&self) -> Result<Configuration, SubError> {
        Ok(self.client.call_within::<GetConfiguration>(&(), CALL_TIMEOUT).await?)
    }

    /// Makes the machine scan its tree again, and reads the result.
    pub async fn snapshot(&self, meter: &Meter) -> Result<Snapshot, SubError> {
        let before = self.poll().await?.counters.metadata_passes;
        let request = ScanNowRequest { content: false, media: false };
        self.client.call_within::<ScanNow>(&request, CALL_TIMEOUT).await?;
        let deadline = Instant::now() + SCAN_TIMEOUT;
        meter.start("Scanning", Unit::Items, None);
        let mut reads = 0;
        loop {
            let reply = self.poll().await?;
            let is_new = reply.counters.metadata_passes > before && reply.scanned;
            if let Some(scan) = reply.scan.filter(|_| is_new) {
                match self.reader.from_sub(&self.client, scan.root).await {
                    Err(ReadError::Changed) if reads < READS_MAX => reads += 1,
                    tree => {
                        meter.finish();
                        let (tree, exclusions) = (tree?, reply.exclusions);
                        return Ok(Snapshot { tree, scan, exclusions });
                    }
                }
            }
            if Instant::now() > deadline {
                return Err(SubError::ScanTimeout);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Where the contents of the files of `tree` are.
    pub fn contents(&self, tree: &Tree) -> SubContents {
        let mut files = BTreeMap::new();
        for (path, node) in tree.nodes() {
            if let Node::Leaf(Leaf::File(file)) = node {
                files.entry(file.object).or_insert((path, file.size_bytes));
            }
        }
        SubContents { client: self.client.clone(), runtime: Handle::current(), files }
    }

    async fn poll(&self) -> Result<PollReply, CallError> {
        self.client.call_within::<Poll>(&PollRequest::default(), CALL_TIMEOUT).await
    }
}

/// Where the contents of the files of a machine are.
pub struct SubContents {
    client: Client,
    runtime: Handle,
    files: BTreeMap<ObjectId, (TreePath, u64)>,
}

impl SubContents {
    fn get(&self, pieces: Vec<api::subd::Piece>) -> Result<GetFilesReply, SendError> {
        let what = pieces.first().map(|piece| piece.path.to_string()).unwrap_or_default();
        let request = GetFilesRequest { pieces };
        let call = self.client.call_within::<GetFiles>(&request, CALL_TIMEOUT);
        self.runtime
            .block_on(call)
            .map_err(|error| SendError::Read { what, source: io::Error::other(report(&error)) })
    }
}

impl Contents for SubContents {
    fn send(
        &mut self,
        algorithm: Algorithm,
        missing: &BTreeSet<ObjectId>,
        sink: &mut UploadSink,
    ) -> Result<(), SendError> {
        let files = self.files.iter().filter(|(id, _)| missing.contains(id));
        let mut files: Vec<(TreePath, u64, ObjectId)> =
            files.map(|(id, (path, size_bytes))| (path.clone(), *size_bytes, *id)).collect();
        files.sort();
        let mut hasher = Hasher::new(algorithm);
        let mut begun = None;
        let lengths = files.iter().map(|(path, size_bytes, _)| (path.clone(), *size_bytes));
        let mut pieces_to_ask = FilePieces::new(lengths.collect());
        loop {
            let pieces = pieces_to_ask.ask();
            if pieces.is_empty() {
                return Ok(());
            }
            let asked: Vec<_> = pieces.iter().map(|(_, piece)| piece.clone()).collect();
            let reply = self.get(asked)?;
            if reply.pieces.is_empty() {
                let what = pieces[0].1.path.to_string();
                let source = io::Error::other("the machine sent no data");
                return Err(SendError::Read { what, source });
            }
            // The reply may be shorter than the request: the rest is requested again.
            pieces_to_ask.taken(reply.pieces.len());
            for ((index, piece), content) in pieces.into_iter().zip(reply.pieces) {
                let (path, size_bytes, id) = &files[index];
                let what = || path.to_string();
                let content = content.map_err(|text| SendError::Read {
                    what: what(),
                    source: io::Error::other(text),
                })?;
                let bytes = content.bytes.0;
                if content.size_bytes != *size_bytes || bytes.len() != piece.length as usize {
                    return Err(SendError::Changed { what: what() });
                }
                if begun != Some(index) {
                    begun = Some(index);
                    hasher = Hasher::new(algorithm);
                    sink.object(*id, *size_bytes);
                }
                hasher.update(&bytes);
                sink.content(&bytes)?;
                if piece.offset + u64::from(piece.length) == *size_bytes {
                    let hasher = std::mem::replace(&mut hasher, Hasher::new(algorithm));
                    if hasher.finish() != *id {
                        return Err(SendError::Changed { what: what() });
                    }
                    sink.end()?;
                }
            }
        }
    }
}
