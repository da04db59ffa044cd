//! An object that is being stored: a temporary file that is hashed as it grows.

use std::io::Write as _;
use std::path::PathBuf;

use common::object::{Hasher, ObjectId};
use fs_err::os::unix::fs::OpenOptionsExt as _;

use super::contract::{Landing, Receiving};
use super::holdings::Change;
use super::objects::LocalObjects;
use super::{StoreError, failed};

/// From this length on, an object is held against the free space before any of it is taken.
const SPACE_CHECKED_BYTES: u64 = 1 << 20;

/// An object that is being stored. Dropped before [`LocalReceiving::finish`], it leaves nothing.
pub struct LocalReceiving<'store> {
    objects: &'store LocalObjects,
    id: ObjectId,
    size_bytes: u64,
    hasher: Hasher,
    file: fs_err::File,
    temporary: Option<PathBuf>,
}

impl<'store> LocalReceiving<'store> {
    pub(super) fn new(
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
        Ok(Self { objects, id, size_bytes, hasher, file, temporary: Some(temporary) })
    }

    /// Adds `content` to the end.
    ///
    /// # Errors
    ///
    /// [`StoreError::Full`], or what else the file-system says.
    pub fn write(&mut self, content: &[u8]) -> Result<(), StoreError> {
        self.hasher.update(content);
        self.file.write_all(content).map_err(failed(format!("store object {}", self.id)))
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
        let path = self.objects.path(&self.id);
        // Two uploads of one object may end here, one after the other: either file is the object,
        // so that it does not matter which of them stays.
        self.objects.tally.note(&self.id, || {
            let before = self.objects.size_bytes(&self.id)?;
            let temporary = self.temporary.as_ref().expect("it is taken only here");
            let put = || fs_err::rename(temporary, path);
            self.objects
                .unsynced
                .place(put)
                .map_err(failed(format!("store object {}", self.id)))?;
            self.temporary = None;
            self.objects.received(&self.id);
            Ok(Change { before, after: Some(self.size_bytes) })
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
        let Some(temporary) = self.temporary.take() else { return };
        if let Err(error) = fs_err::remove_file(temporary) {
            tracing::warn!(%error, "a temporary file stays until the next start");
        }
    }
}
