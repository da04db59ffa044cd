//! An object that is being stored: a temporary file that is hashed as it grows, and packed if that
//! is wanted and gains enough: its first chunk tells.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Mutex;

use api::object_stream::Form;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use model::lock::locked;
use model::object::{Hasher, ObjectId};
use rpc::packing::{self, CHUNK_BYTES_MAX, CHUNK_HEAD_BYTES, Packer};

use super::objects::LocalObjects;
use crate::store::contract::{Landing, Receiving};
use crate::store::error::{StoreError, failed};
use crate::store::object_counts::Change;
use crate::store::packed::{self, PLAIN_BYTES_MAX, is_worth};

/// From this length on, an object is held against the free space before any of it is taken.
const SPACE_CHECKED_BYTES: u64 = 1 << 20;

/// The most packers that wait: each takes about a megabyte.
const IDLE_MAX: usize = 8;

/// An object that is being stored. Dropped before [`LocalReceiving::finish`], it leaves nothing.
pub struct LocalReceiving<'store> {
    objects: &'store LocalObjects,
    id: ObjectId,
    size_bytes: u64,
    hasher: Hasher,
    file: fs_err::File,
    content_bytes: u64,
    file_bytes: u64,
    form: Form,
    packing: Option<Packing>,
    temporary: Option<PathBuf>,
}

/// What packs an object that is being stored.
struct Packing {
    packer: Packer,
    /// What is still to be packed.
    chunk: Vec<u8>,
}

/// Packers that wait for objects to be packed.
pub(super) struct Packers {
    level: i32,
    idle: Mutex<Vec<Packer>>,
}

impl Packers {
    /// Packs with this level of zstd; level 0 never does.
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
    pub(in crate::store) fn new(
        objects: &'store LocalObjects,
        id: ObjectId,
        size_bytes: u64,
    ) -> Result<Self, StoreError> {
        let what = || format!("store object {id}");
        if size_bytes >= SPACE_CHECKED_BYTES {
            let free_bytes = objects.free_bytes()?;
            if size_bytes > free_bytes {
                let what = what();
                return Err(StoreError::TooLittle { what, need_bytes: size_bytes, free_bytes });
            }
        }
        let temporary = objects.temporary();
        let file = fs_err::OpenOptions::new()
            .create_new(true)
            .write(true)
            .mode(0o400)
            .open(&temporary)
            .map_err(failed(what()))?;
        let hasher = Hasher::new(id.algorithm());
        let mut receiving = Self {
            objects,
            id,
            size_bytes,
            hasher,
            file,
            content_bytes: 0,
            file_bytes: 0,
            form: Form::Plain,
            packing: None,
            temporary: Some(temporary),
        };
        if objects.packers.level > 0 && size_bytes > PLAIN_BYTES_MAX {
            let packer = objects.packers.take().map_err(failed(what()))?;
            receiving.packing = Some(Packing { packer, chunk: Vec::new() });
        }
        Ok(receiving)
    }

    /// Adds `content` to the end.
    ///
    /// # Errors
    ///
    /// [`StoreError::Full`], or what else the file-system says.
    pub fn write(&mut self, content: &[u8]) -> Result<(), StoreError> {
        self.hasher.update(content);
        self.content_bytes += content.len() as u64;
        let Some(packing) = &mut self.packing else { return self.append(content) };
        packing.chunk.extend_from_slice(content);
        while self.packing.as_ref().is_some_and(|packing| packing.chunk.len() >= CHUNK_BYTES_MAX) {
            self.pack(CHUNK_BYTES_MAX)?;
        }
        Ok(())
    }

    /// Packs the first `length` bytes of what waits for that; all of it goes as it is if the first
    /// chunk of the object gains too little.
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
                self.objects.packers.give_back(packing.packer);
                return self.append(&packing.chunk);
            }
            self.form = Form::Packed;
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

    /// Puts the object in place if its content is what was announced.
    ///
    /// # Errors
    ///
    /// [`StoreError::Content`] if it is not; otherwise what the file-system says.
    pub fn finish(mut self) -> Result<(), StoreError> {
        let got = self.hasher.finish();
        if got != self.id {
            return Err(StoreError::Content { want: self.id, got });
        }
        if let Some(packing) = &self.packing
            && !packing.chunk.is_empty()
        {
            self.pack(packing.chunk.len())?;
        }
        let (id, form) = (self.id, self.form);
        if form == Form::Packed && self.content_bytes != self.size_bytes {
            let text = format!("{} bytes came of {}", self.content_bytes, self.size_bytes);
            let source = std::io::Error::other(text);
            return Err(StoreError::Io { what: format!("store object {id}"), source });
        }
        let path = self.objects.path(&id, form);
        // Two uploads of one object may end here, one after the other: either file is the object,
        // so that it does not matter which of them stays.
        self.objects.tally.note(&id, || {
            let former = self.objects.locate(&id)?;
            let before = former.as_ref().and_then(|located| located.length(&id));
            let is_other = former.is_some_and(|former| former.form != form);
            if is_other
                && self.objects.size_bytes(&id)? == Some(self.size_bytes)
                && self.objects.wounds().of(&id).is_none()
            {
                // It is there in another form, and on the medium before this one would be.
                return Ok(Change { before, after: before });
            }
            let temporary = self.temporary.as_ref().expect("it is taken only here");
            let put = || fs_err::rename(temporary, path);
            self.objects.unsynced.place(put).map_err(failed(format!("store object {id}")))?;
            self.temporary = None;
            if is_other {
                self.objects.remove_others(&id, form);
            }
            self.objects.received(&id);
            Ok(Change { before, after: Some(self.file_bytes) })
        })
    }
}

impl Receiving for LocalReceiving<'_> {
    fn write(&mut self, content: &[u8]) -> Result<(), StoreError> {
        self.write(content)
    }

    fn finish(self: Box<Self>) -> Result<Landing, StoreError> {
        (*self).finish().map(|()| Landing::done())
    }
}

impl Drop for LocalReceiving<'_> {
    fn drop(&mut self) {
        if let Some(packing) = self.packing.take() {
            self.objects.packers.give_back(packing.packer);
        }
        let Some(temporary) = self.temporary.take() else { return };
        if let Err(error) = fs_err::remove_file(temporary) {
            tracing::warn!(%error, "a temporary file stays until the next start");
        }
    }
}
