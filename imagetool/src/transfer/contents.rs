//! The objects of an image on their way to the server: which there are, and how they are sent.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use api::object_stream::{ContentForm, ObjectHead};
use bytes::{Bytes, BytesMut};
use model::object::{Algorithm, ObjectId};
use model::tree::{Child, Directory, Leaf, Tree};
use rpc::packing::{self, CHUNK_BYTES_MAX, CONTENT_BYTES_MIN, Packer};
use tokio::sync::mpsc;

use crate::output::progress::Meter;

/// The size of a piece of an upload, in bytes.
const PIECE_BYTES: usize = 256 << 10;

/// How many pieces may wait to be sent.
pub const PIECES_MAX: usize = 8;

/// The zstd level for objects: about as fast as reading and hashing files.
const PACK_LEVEL: i32 = 1;

/// The contents of the files of a tree, which can be read again for an upload.
pub trait Contents: Send {
    /// Passes the file contents of `missing` to `sink`, each once, and hashes them again.
    fn send(
        &mut self,
        algorithm: Algorithm,
        missing: &BTreeSet<ObjectId>,
        sink: &mut UploadSink,
    ) -> Result<(), SendError>;
}

/// An error while sending file contents.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    #[error("{what} was changed while it was uploaded")]
    Changed { what: String },
    #[error("cannot read {what} again")]
    Read { what: String, source: io::Error },
    #[error("the archive cannot be read again")]
    Archive { source: Box<dyn std::error::Error + Send + Sync> },
    #[error("the upload has ended")]
    Closed,
}

/// The objects of a tree, each once: file contents with their sizes in bytes, and directories.
#[derive(Debug, Default)]
pub struct TreeObjects {
    /// Contents of regular files.
    pub files: BTreeMap<ObjectId, u64>,
    pub directories: BTreeMap<ObjectId, Arc<Directory>>,
}

impl TreeObjects {
    /// Collects the objects of `tree`. Equal directories are visited once.
    pub fn of(tree: &Tree) -> Self {
        let mut objects = Self::default();
        let mut stack = vec![Arc::clone(tree.root())];
        while let Some(directory) = stack.pop() {
            if objects.directories.insert(directory.digest(), Arc::clone(&directory)).is_some() {
                continue;
            }
            for entry in directory.entries() {
                match &entry.child {
                    Child::Directory(below) => stack.push(Arc::clone(below)),
                    Child::Leaf(Leaf::File(file)) => {
                        objects.files.insert(file.object.id(), file.size_bytes);
                    }
                    Child::Leaf(_) => {}
                }
            }
        }
        objects
    }

    /// Returns all ids, each once.
    pub fn ids(&self) -> BTreeSet<ObjectId> {
        self.files.keys().chain(self.directories.keys()).copied().collect()
    }
}

/// A part of an upload.
#[derive(Debug)]
pub struct UploadPiece {
    /// Bytes of an object stream.
    pub bytes: Bytes,
    /// True if the last object in it is complete.
    pub complete: bool,
}

/// Splits a sequence of objects into the pieces of an upload. Blocks while [`PIECES_MAX`] pieces
/// wait: then the network is slower than the disk, and objects are compressed if the server accepts
/// that.
pub struct UploadSink {
    pieces: mpsc::Sender<UploadPiece>,
    buffer: BytesMut,
    packer: Option<Packer>,
    /// The part of the current object that is not compressed yet, if the object is compressed.
    unpacked: Option<Vec<u8>>,
    /// True if a part of the current object was sent.
    partial: bool,
    meter: Meter,
}

impl UploadSink {
    /// Starts an upload into `pieces`; `may_pack` says whether the server accepts compressed
    /// objects.
    pub fn new(pieces: mpsc::Sender<UploadPiece>, may_pack: bool, meter: Meter) -> Self {
        // If there is no memory for it, objects are sent uncompressed.
        let packer = if may_pack { Packer::new(PACK_LEVEL).ok() } else { None };
        Self { pieces, buffer: BytesMut::new(), packer, unpacked: None, partial: false, meter }
    }

    /// Starts an object.
    pub fn object(&mut self, id: ObjectId, size_bytes: u64) {
        let is_packed = self.packer.is_some()
            && self.pieces.capacity() == 0
            && size_bytes >= CONTENT_BYTES_MIN as u64;
        self.unpacked = is_packed.then(Vec::new);
        let form = if is_packed { ContentForm::Packed } else { ContentForm::Plain };
        let mut head = Vec::new();
        ObjectHead::Object { id, size_bytes }.encode_as(form, &mut head);
        self.buffer.extend_from_slice(&head);
    }

    /// Adds to the content of the current object.
    pub fn content(&mut self, chunk: &[u8]) -> Result<(), SendError> {
        self.meter.add(chunk.len() as u64);
        match &mut self.unpacked {
            None => self.buffer.extend_from_slice(chunk),
            Some(unpacked) => {
                unpacked.extend_from_slice(chunk);
                self.pack(CHUNK_BYTES_MAX);
            }
        }
        if self.buffer.len() >= PIECE_BYTES {
            self.partial = true;
            self.flush(false)?;
        }
        Ok(())
    }

    /// Ends the current object. A large object is sent at once, so that the data sent so far ends
    /// with a whole object if the source needs long to find the next one.
    pub fn end(&mut self) -> Result<(), SendError> {
        self.pack(1);
        if std::mem::take(&mut self.partial) || self.buffer.len() >= PIECE_BYTES / 2 {
            self.flush(true)?;
        }
        Ok(())
    }

    /// Sends the rest.
    pub fn finish(mut self) -> Result<(), SendError> {
        self.flush(true)
    }

    /// Compresses the pending part of the current object in chunks, while at least `least` bytes
    /// are pending.
    fn pack(&mut self, least: usize) {
        let (Some(unpacked), Some(packer)) = (&mut self.unpacked, &mut self.packer) else { return };
        let mut rest = &unpacked[..];
        while rest.len() >= least {
            let (chunk, after) = rest.split_at(rest.len().min(CHUNK_BYTES_MAX));
            packing::append(&mut self.buffer, chunk, packer.pack(chunk));
            rest = after;
        }
        let done = unpacked.len() - rest.len();
        unpacked.drain(..done);
    }

    fn flush(&mut self, complete: bool) -> Result<(), SendError> {
        let bytes = self.buffer.split().freeze();
        // An empty piece still says that the object before it is complete.
        self.pieces.blocking_send(UploadPiece { bytes, complete }).map_err(|_| SendError::Closed)
    }
}

#[cfg(test)]
mod tests {
    use rpc::client::ObjectReader;

    use super::*;

    #[tokio::test]
    async fn objects_are_packed_while_the_network_is_slow() {
        let (sender, mut receiver) = mpsc::channel(1);
        let mut sink = UploadSink::new(sender, true, Meter::hidden());
        let large: Vec<u8> = (0..700_000_u32).flat_map(|n| (n / 100).to_le_bytes()).collect();
        let contents = [b"at first there is room".to_vec(), large, vec![b'x'; 300], Vec::new()];
        let ids = contents.each_ref().map(|content| Algorithm::Blake3.digest(content));
        let sent = contents.clone();
        let (full, mut is_full) = mpsc::channel(1);
        let sending = std::thread::spawn(move || {
            for (index, (id, content)) in ids.iter().zip(&sent).enumerate() {
                sink.object(*id, content.len() as u64);
                if index == 1 {
                    full.blocking_send(()).unwrap();
                }
                for chunk in content.chunks(100_000) {
                    sink.content(chunk).unwrap();
                }
                sink.end().unwrap();
                if index == 0 {
                    // Nobody reads yet: now the queue is full.
                    sink.flush(true).unwrap();
                }
            }
            sink.finish().unwrap();
        });
        is_full.recv().await.unwrap();
        let mut wire: Vec<u8> = Vec::new();
        while let Some(piece) = receiver.recv().await {
            wire.extend_from_slice(&piece.bytes);
        }
        sending.join().unwrap();
        ObjectHead::End.encode(&mut wire);
        assert!(wire.len() < 100_000, "{}", wire.len());
        let stream = futures_util::stream::iter([Ok(Bytes::from(wire))]);
        let mut reader = ObjectReader::of_stream(stream);
        for (id, content) in ids.into_iter().zip(contents) {
            let size_bytes = content.len() as u64;
            assert_eq!(reader.head().await.unwrap(), ObjectHead::Object { id, size_bytes });
            let mut got = Vec::new();
            while let Some(chunk) = reader.chunk().await.unwrap() {
                got.extend_from_slice(&chunk);
            }
            assert!(got == content);
        }
        assert_eq!(reader.head().await.unwrap(), ObjectHead::End);
    }
}
