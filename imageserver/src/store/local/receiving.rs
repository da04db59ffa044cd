//! Stores an object: writes a temporary file that is hashed as it grows.
//!
//! The file is packed if that is configured and the first chunk shows that it saves enough.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Mutex;

use api::object_stream::ContentForm;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use model::lock::locked;
use model::object::{Hasher, ObjectId};
use rpc::packing::{self, CHUNK_BYTES_MAX, CHUNK_HEAD_BYTES, Packer};

use super::object_files::{ObjectFiles, VerifiedFiles};
use super::objects::WHOLE_BYTES_MAX;
use crate::store::contract::{PendingStore, Receiving};
use crate::store::error::{StoreError, failed};
use crate::store::object_counts::Change;
use crate::store::packed::{self, PLAIN_BYTES_MAX, is_worth};

/// From this length on, an object is compared with the free space before it is received.
const SPACE_CHECKED_BYTES: u64 = 1 << 20;

/// The most packers that wait: each takes about a megabyte.
const IDLE_MAX: usize = 8;

/// An object that is being stored. Dropped before [`LocalReceiving::finish`], it leaves nothing.
pub struct LocalReceiving<'store> {
    files: &'store ObjectFiles,
    packers: &'store IdlePackers,
    verified: &'store VerifiedFiles,
    id: ObjectId,
    size_bytes: u64,
    hasher: Hasher,
    file: fs_err::File,
    content_bytes: u64,
    file_bytes: u64,
    form: ContentForm,
    packing: Option<Packing>,
    temporary: Option<PathBuf>,
}

/// Packs an object that is being stored.
struct Packing {
    packer: Packer,
    /// Content that was not packed yet.
    chunk: Vec<u8>,
}

/// Idle packers, to be used again.
pub(super) struct IdlePackers {
    level: i32,
    idle: Mutex<Vec<Packer>>,
}

impl IdlePackers {
    /// Packs with this level of zstd; level 0 packs nothing.
    pub fn new(level: i32) -> Self {
        Self { level, idle: Mutex::default() }
    }

    fn take(&self) -> std::io::Result<Packer> {
        locked(&self.idle).pop().map_or_else(|| Packer::new(self.level), Ok)
    }

    fn give_back(&self, packer: Packer) {
        let mut idle = locked(&self.idle);
        if idle.len() < IDLE_MAX {
            idle.push(packer);
        }
    }
}

impl<'store> LocalReceiving<'store> {
    pub(super) fn new(
        files: &'store ObjectFiles,
        packers: &'store IdlePackers,
        verified: &'store VerifiedFiles,
        id: ObjectId,
        size_bytes: u64,
    ) -> Result<Self, StoreError> {
        let what = || format!("store object {id}");
        if size_bytes >= SPACE_CHECKED_BYTES {
            let free_bytes = files.free_bytes()?;
            if size_bytes > free_bytes {
                let what = what();
                return Err(StoreError::TooLittle { what, need_bytes: size_bytes, free_bytes });
            }
        }
        let temporary = files.temporary();
        let file = fs_err::OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(0o400)
            .open(&temporary)
            .map_err(failed(what()))?;
        let hasher = Hasher::new(id.algorithm());
        let mut receiving = Self {
            files,
            packers,
            verified,
            id,
            size_bytes,
            hasher,
            file,
            content_bytes: 0,
            file_bytes: 0,
            form: ContentForm::Plain,
            packing: None,
            temporary: Some(temporary),
        };
        if packers.level > 0 && size_bytes > PLAIN_BYTES_MAX {
            let packer = packers.take().map_err(failed(what()))?;
            receiving.packing = Some(Packing { packer, chunk: Vec::new() });
        }
        Ok(receiving)
    }

    /// Packs the first `length` bytes that were not packed yet. If the first chunk gains too
    /// little, the whole object is stored plain.
    fn pack(&mut self, length: usize) -> Result<(), StoreError> {
        let Some(mut packing) = self.packing.take() else { return Ok(()) };
        let content = &packing.chunk[..length];
        let packed = packing.packer.pack(content);
        let mut bytes = Vec::new();
        if self.file_bytes == 0 {
            bytes = packed::head(self.id, self.size_bytes);
            let head_bytes = bytes.len() + CHUNK_HEAD_BYTES;
            let file_bytes = packed.map_or(u64::MAX, |packed| (head_bytes + packed.len()) as u64);
            if !is_worth(length as u64, file_bytes) {
                self.packers.give_back(packing.packer);
                return self.append(&packing.chunk);
            }
            self.form = ContentForm::Packed;
        }
        packing::append(&mut bytes, content, packed);
        packing.chunk.drain(..length);
        self.packing = Some(packing);
        self.append(&bytes)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.file_bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(failed(format!("store object {}", self.id)))
    }
}

impl Receiving for LocalReceiving<'_> {
    fn write(&mut self, content: &[u8]) -> Result<(), StoreError> {
        self.hasher.update(content);
        self.content_bytes += content.len() as u64;
        let Some(packing) = &mut self.packing else { return self.append(content) };
        packing.chunk.extend_from_slice(content);
        while self.packing.as_ref().is_some_and(|packing| packing.chunk.len() >= CHUNK_BYTES_MAX) {
            self.pack(CHUNK_BYTES_MAX)?;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<PendingStore, StoreError> {
        let receiving = &mut *self;
        let got = receiving.hasher.finish();
        if got != receiving.id {
            return Err(StoreError::Content { want: receiving.id, got });
        }
        if let Some(packing) = &receiving.packing
            && !packing.chunk.is_empty()
        {
            receiving.pack(packing.chunk.len())?;
        }
        let (id, form) = (receiving.id, receiving.form);
        if form == ContentForm::Packed && receiving.content_bytes != receiving.size_bytes {
            let text =
                format!("{} bytes came of {}", receiving.content_bytes, receiving.size_bytes);
            let source = std::io::Error::other(text);
            return Err(StoreError::Io { what: format!("store object {id}"), source });
        }
        // Two uploads of one object may end here, one after the other; it does not matter which
        // file stays.
        receiving.files.counter.note(&id, || {
            let former = receiving.files.locate(&id)?;
            let before = former.as_ref().and_then(|located| located.length(&id));
            let is_other = former.is_some_and(|former| former.form != form);
            if is_other
                && receiving.files.size_bytes(&id)? == Some(receiving.size_bytes)
                && receiving.files.damaged_objects.damage(&id).is_none()
            {
                // The object is stored in another form already, and on the medium earlier.
                return Ok(Change { before, after: before });
            }
            let temporary = receiving.temporary.as_ref().expect("it is taken only here");
            let put = receiving.files.put(temporary, &id, form);
            put.map_err(failed(format!("store object {id}")))?;
            receiving.temporary = None;
            if is_other {
                receiving.files.remove_others(&id, form);
            }
            receiving.files.received(&id);
            if receiving.content_bytes > WHOLE_BYTES_MAX
                && let Ok(metadata) = receiving.file.metadata()
            {
                // What was hashed was written; it need not be hashed again before it is sent.
                receiving.verified.remember(&id, &metadata);
            }
            Ok(Change { before, after: Some(receiving.file_bytes) })
        })?;
        Ok(PendingStore::done())
    }
}

impl Drop for LocalReceiving<'_> {
    fn drop(&mut self) {
        if let Some(packing) = self.packing.take() {
            self.packers.give_back(packing.packer);
        }
        let Some(temporary) = self.temporary.take() else { return };
        if let Err(error) = fs_err::remove_file(temporary) {
            tracing::warn!(%error, "a temporary file stays until the next start");
        }
    }
}
