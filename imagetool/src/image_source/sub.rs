//! Reads a running machine: its scanned tree, and the contents of its files for the upload.
//!
//! The tree is that of one scan. Contents are hashed as they arrive and must match the scan, so
//! that exactly this tree is uploaded, even if the machine changes meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use api::subd::{
    Configuration, GetConfiguration, GetFiles, GetFilesReply, GetFilesRequest, PIECE_BYTES_MAX,
    PIECES_MAX, Piece, Poll, PollReply, PollRequest, ScanNow, ScanNowRequest, ScanReport,
};
use model::display::error_chain;
use model::object::{Algorithm, Hasher, ObjectId};
use model::path::TreePath;
use model::tree::{Leaf, Node, Tree};
use rpc::client::{CallError, Client};
use rpc::trees::{TreeReadError, TreeReader};
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::output::progress::{Meter, Unit};
use crate::transfer::contents::{Contents, SendError, UploadSink};

/// Time limit of a scan.
const SCAN_TIMEOUT: Duration = Duration::from_secs(1_800);

/// Interval of polls for the end of the scan.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time limit of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// Number of attempts to read a tree that changes meanwhile.
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
        source: TreeReadError,
    },
    #[error("the machine did not scan its tree within {} s", SCAN_TIMEOUT.as_secs())]
    ScanTimeout,
}

/// Reads the tree of a machine.
#[derive(Clone)]
pub struct SubReader {
    client: Client,
    reader: Arc<TreeReader>,
}

/// The tree of a machine, as of one scan.
pub struct Snapshot {
    pub tree: Tree,
    pub scan: ScanReport,
    /// Paths that the machine's own configuration excludes from scans.
    pub exclusions: Vec<String>,
}

impl SubReader {
    pub fn new(client: Client) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { client, reader: Arc::new(TreeReader::new(processors)) }
    }

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
        let (mut reads, mut is_ordered_again) = (0, false);
        loop {
            let reply = self.poll().await?;
            if reply.counters.metadata_passes > before && !is_ordered_again {
                // An order is for one pass.
                self.client.call_within::<ScanNow>(&request, CALL_TIMEOUT).await?;
                is_ordered_again = true;
            }
            // The first pass that ends may have begun before the call, and not seen what had been
            // changed by then.
            let is_new = reply.counters.metadata_passes > before + 1 && reply.scanned;
            if let Some(scan) = reply.scan.filter(|_| is_new) {
                match self.reader.from_sub(&self.client, scan.root, None).await {
                    Err(TreeReadError::Changed) if reads < READS_MAX => reads += 1,
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

    /// Returns a source of the file contents of `tree`.
    pub fn contents(&self, tree: &Tree) -> SubContents {
        let mut files = BTreeMap::new();
        for (path, node) in tree.nodes() {
            if let Node::Leaf(Leaf::File(file)) = node {
                files.entry(file.object.id()).or_insert((path, file.size_bytes));
            }
        }
        SubContents { client: self.client.clone(), runtime: Handle::current(), files }
    }

    async fn poll(&self) -> Result<PollReply, CallError> {
        self.client.call_within::<Poll>(&PollRequest::default(), CALL_TIMEOUT).await
    }
}

/// Reads file contents from a machine.
pub struct SubContents {
    client: Client,
    runtime: Handle,
    files: BTreeMap<ObjectId, (TreePath, u64)>,
}

impl SubContents {
    fn get(&self, pieces: Vec<Piece>) -> Result<GetFilesReply, SendError> {
        let what = pieces.first().map(|piece| piece.path.to_string()).unwrap_or_default();
        let request = GetFilesRequest { pieces };
        let call = self.client.call_within::<GetFiles>(&request, CALL_TIMEOUT);
        self.runtime.block_on(call).map_err(|error| SendError::Read {
            what,
            source: io::Error::other(error_chain(&error)),
        })
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
        let mut current = None;
        let lengths = files.iter().map(|(path, size_bytes, _)| (path.clone(), *size_bytes));
        let mut remaining = FilePieces::new(lengths.collect());
        loop {
            let pieces = remaining.next_request();
            if pieces.is_empty() {
                return Ok(());
            }
            let requested: Vec<_> = pieces.iter().map(|(_, piece)| piece.clone()).collect();
            let reply = self.get(requested)?;
            if reply.pieces.is_empty() {
                let what = pieces[0].1.path.to_string();
                let source = io::Error::other("the machine sent no data");
                return Err(SendError::Read { what, source });
            }
            // The reply may be shorter than the request: the rest is requested again.
            remaining.advance(reply.pieces.len());
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
                if current != Some(index) {
                    current = Some(index);
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

/// Most content of one request, in bytes.
const REQUEST_BYTES_MAX: u64 = 8 << 20;

/// Splits files into pieces and groups pieces into requests. An empty file is one empty piece.
#[derive(Clone, Debug)]
struct FilePieces {
    files: Vec<(TreePath, u64)>,
    /// The index of the file of the next piece, and the offset in it, in bytes.
    at: (usize, u64),
}

impl FilePieces {
    /// `files` are given with the length of each in bytes.
    fn new(files: Vec<(TreePath, u64)>) -> Self {
        Self { files, at: (0, 0) }
    }

    /// Returns the pieces to request next, each with the index of its file; none at the end.
    fn next_request(&self) -> Vec<(usize, Piece)> {
        let mut pieces = Vec::new();
        let mut bytes = 0;
        let mut at = self.at;
        while let Some((path, size_bytes)) = self.files.get(at.0) {
            let length = self.length(at);
            if pieces.len() == PIECES_MAX || bytes + u64::from(length) > REQUEST_BYTES_MAX {
                break;
            }
            bytes += u64::from(length);
            pieces.push((at.0, Piece { path: path.clone(), offset: at.1, length }));
            at = after(at, length, *size_bytes);
        }
        pieces
    }

    /// Continues after the first `count` pieces of [`FilePieces::next_request`].
    fn advance(&mut self, count: usize) {
        for _ in 0..count {
            let Some((_, size_bytes)) = self.files.get(self.at.0) else { return };
            self.at = after(self.at, self.length(self.at), *size_bytes);
        }
    }

    fn length(&self, (file, offset): (usize, u64)) -> u32 {
        let rest = self.files[file].1 - offset;
        u32::try_from(rest).map_or(PIECE_BYTES_MAX, |rest| rest.min(PIECE_BYTES_MAX))
    }
}

fn after((file, offset): (usize, u64), length: u32, size_bytes: u64) -> (usize, u64) {
    let offset = offset + u64::from(length);
    if offset >= size_bytes { (file + 1, 0) } else { (file, offset) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = PIECE_BYTES_MAX as u64;

    fn all(files: &[u64], answered: usize) -> Vec<Vec<(usize, u64, u32)>> {
        let path = |index: usize| format!("/{index}").parse().unwrap();
        let files = files.iter().enumerate().map(|(index, length)| (path(index), *length));
        let mut remaining = FilePieces::new(files.collect());
        let mut all = Vec::new();
        loop {
            let pieces = remaining.next_request();
            if pieces.is_empty() {
                return all;
            }
            remaining.advance(pieces.len().min(answered));
            let pieces = pieces.into_iter().take(answered);
            all.push(pieces.map(|(file, piece)| (file, piece.offset, piece.length)).collect());
        }
    }

    #[test]
    fn files_are_cut_and_small_ones_share_a_request() {
        assert_eq!(all(&[], 9), Vec::<Vec<_>>::new());
        let one = [(0, 0, 0), (1, 0, 5), (2, 0, PIECE_BYTES_MAX), (2, PIECE, 1), (3, 0, 0)];
        assert_eq!(all(&[0, 5, PIECE + 1, 0], 9), [one]);
        // A machine that answers less is asked again for the rest.
        let rest = [one[..2].to_vec(), one[2..4].to_vec(), one[4..].to_vec()];
        assert_eq!(all(&[0, 5, PIECE + 1, 0], 2), rest);
        let large: Vec<usize> = all(&[20 * PIECE], 99).iter().map(Vec::len).collect();
        assert_eq!(large, [8, 8, 4]);
        let many: Vec<usize> = all(&vec![1; 600], 999).iter().map(Vec::len).collect();
        assert_eq!(many, [256, 256, 88]);
    }
}
