//! What is read for an image: a tree, and where the contents of its files can be read again.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use common::object::{Algorithm, ObjectId};
use common::tree::{Child, Directory, Leaf, Tree};
use common::wire::object_stream::Head;
use tokio::sync::mpsc;

use crate::archive::{Archive, ArchiveError};
use crate::directory::DirectoryContents;
use crate::progress::Meter;
use crate::sub::SubContents;

/// How much content goes into one piece of an upload, in bytes.
const PIECE_BYTES: usize = 256 << 10;

/// How many pieces may wait to be sent.
pub const PIECES_MAX: usize = 8;

/// Where the contents of the files of a tree are.
pub enum Contents {
    /// In a directory.
    Directory(DirectoryContents),
    /// In an archive.
    Archive(Archive),
    /// On a machine.
    Sub(SubContents),
}

/// Why contents could not be sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// A file is not what it was when it was hashed.
    #[error("{what} was changed while it was uploaded")]
    Changed {
        /// The file.
        what: String,
    },
    /// A file cannot be read again.
    #[error("cannot read {what} again")]
    Read {
        /// The file.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The archive cannot be read again.
    #[error("the archive cannot be read again")]
    Archive {
        /// Why.
        #[from]
        source: ArchiveError,
    },
    /// The upload has ended, and says why.
    #[error("the upload has ended")]
    Closed,
}

impl Contents {
    /// Hands the objects of `missing` that files have to `sink`, each once, hashed again.
    ///
    /// # Errors
    ///
    /// [`SendError`].
    pub fn send(
        &mut self,
        algorithm: Algorithm,
        missing: &BTreeSet<ObjectId>,
        sink: &mut Sink,
    ) -> Result<(), SendError> {
        match self {
            Self::Directory(contents) => contents.send(algorithm, missing, sink),
            Self::Archive(archive) => archive.send(algorithm, missing, sink),
            Self::Sub(contents) => contents.send(algorithm, missing, sink),
        }
    }
}

/// The objects of a tree, each once: file contents with their sizes in bytes, and directories.
#[derive(Debug, Default)]
pub struct Objects {
    /// Contents of regular files.
    pub files: BTreeMap<ObjectId, u64>,
    /// Directories.
    pub directories: BTreeMap<ObjectId, Arc<Directory>>,
}

impl Objects {
    /// Collects the objects of `tree`. Equal directories are visited once.
    #[must_use]
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
                        objects.files.insert(file.object, file.size_bytes);
                    }
                    Child::Leaf(_) => {}
                }
            }
        }
        objects
    }

    /// All ids, each once.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<ObjectId> {
        self.files.keys().chain(self.directories.keys()).copied().collect()
    }
}

/// A part of an upload.
#[derive(Debug)]
pub struct Piece {
    /// Bytes of an object stream.
    pub bytes: Bytes,
    /// True if the last object in it is complete.
    pub complete: bool,
}

/// Takes objects one after the other and puts them into the pieces of an upload. Blocks while
/// [`PIECES_MAX`] pieces wait.
pub struct Sink {
    pieces: mpsc::Sender<Piece>,
    buffer: BytesMut,
    /// True if a part of the current object has gone out.
    partial: bool,
    meter: Meter,
}

impl Sink {
    /// Starts an upload into `pieces`.
    #[must_use]
    pub fn new(pieces: mpsc::Sender<Piece>, meter: Meter) -> Self {
        Self { pieces, buffer: BytesMut::new(), partial: false, meter }
    }

    /// Starts an object.
    pub fn object(&mut self, id: ObjectId, size_bytes: u64) {
        let mut head = Vec::new();
        Head::Object { id, size_bytes }.encode(&mut head);
        self.buffer.extend_from_slice(&head);
    }

    /// Adds to the content of the current object.
    ///
    /// # Errors
    ///
    /// [`SendError::Closed`].
    pub fn content(&mut self, chunk: &[u8]) -> Result<(), SendError> {
        self.meter.add(chunk.len() as u64);
        self.buffer.extend_from_slice(chunk);
        if self.buffer.len() >= PIECE_BYTES {
            self.partial = true;
            self.flush(false)?;
        }
        Ok(())
    }

    /// Ends the current object. A large one goes out at once, so that what is sent ends with a
    /// whole object whenever the source takes long to find the next one.
    ///
    /// # Errors
    ///
    /// [`SendError::Closed`].
    pub fn end(&mut self) -> Result<(), SendError> {
        if std::mem::take(&mut self.partial) || self.buffer.len() >= PIECE_BYTES / 2 {
            self.flush(true)?;
        }
        Ok(())
    }

    /// Sends what is left.
    ///
    /// # Errors
    ///
    /// [`SendError::Closed`].
    pub fn finish(mut self) -> Result<(), SendError> {
        self.flush(true)
    }

    fn flush(&mut self, complete: bool) -> Result<(), SendError> {
        let bytes = self.buffer.split().freeze();
        // An empty piece still tells that the object before it is complete.
        self.pieces.blocking_send(Piece { bytes, complete }).map_err(|_| SendError::Closed)
    }
}
