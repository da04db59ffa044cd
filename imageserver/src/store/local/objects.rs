//! Content by digest: files that are written once and never changed.
//!
//! An object is written to a temporary file while it is hashed, and renamed to its name when length
//! and digest match. Its directory is not synced for each object: [`LocalObjects::sync`] syncs all
//! at once before an image that needs them becomes visible. After a power failure an object that no
//! image needs yet may therefore be empty or damaged. An empty file does not count as the object.
//! After an unclean stop with unsynced objects, each object is read before it counts as present,
//! until all were read ([`LocalObjects::held`]).
//!
//! Large objects may be packed ([`crate::store::packed`]), so a store may have both kinds. A crash
//! can leave an object in both forms. Then the plain form is used, and the packed one is removed
//! once the plain one was read from the medium.

use std::collections::BTreeSet;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use api::object_stream::ContentForm;
use model::lock::locked;
use model::object::{Hasher, ObjectId};
use rpc::packing::CHUNK_HEAD_BYTES;
use walkdir::{DirEntryExt as _, WalkDir};

use crate::core::collection::disk_pressure::Space;
use crate::store::content::{Content, Opened, PackedContent, append_from};
use crate::store::contract::{Objects, Receiving};
use crate::store::damaged_objects::{Damage, DamagedObjects, is_unreadable};
use crate::store::error::{StoreError, failed};
use crate::store::layout;
use crate::store::local::object_files::{ObjectFiles, VerifiedFiles, content_bytes};
use crate::store::local::receiving::{IdlePackers, LocalReceiving};
use crate::store::medium_reader::{HashedFile, MediumReader, OnMedium};
use crate::store::object_counts::{Change, ObjectCounts};
use crate::store::packed::{PackedReader, head_bytes, is_damage};

/// The longest object that is read, hashed and sent in one piece, in bytes.
pub const WHOLE_BYTES_MAX: u64 = 64 << 10;

/// How much of a larger object is read at once, in bytes.
const CHUNK_BYTES: usize = 64 << 10;

/// The most large objects that are checked at one time, each by one thread. Other callers for the
/// same object wait for the first.
const CHECKS_MAX: usize = 64;

/// The objects of a data directory.
pub struct LocalObjects {
    pub(super) files: ObjectFiles,
    sync_failed: AtomicBool,
    /// Large objects whose files were hashed, or received, since the start.
    pub(super) verified: VerifiedFiles,
    checks: [Mutex<()>; CHECKS_MAX],
    corrupt: AtomicU64,
    // Reads doubtful objects one at a time, so that there is one buffer.
    medium: Mutex<MediumReader>,
    packers: IdlePackers,
}

impl LocalObjects {
    /// Packs received objects with zstd at `pack_level`; level 0 packs nothing.
    pub(in crate::store) fn open(data: &Path, pack_level: i32) -> Result<Self, StoreError> {
        let files = ObjectFiles::open(data)?;
        let objects = Self {
            files,
            sync_failed: AtomicBool::new(false),
            verified: VerifiedFiles::default(),
            checks: [const { Mutex::new(()) }; CHECKS_MAX],
            corrupt: AtomicU64::new(0),
            medium: Mutex::default(),
            packers: IdlePackers::new(pack_level),
        };
        objects.note_quarantined()?;
        Ok(objects)
    }

    /// Records quarantined objects that were not stored again as damaged.
    fn note_quarantined(&self) -> Result<(), StoreError> {
        let why = || failed("read the quarantine");
        for entry in fs_err::read_dir(&self.files.quarantine).map_err(why())? {
            let entry = entry.map_err(why())?;
            let Some(id) = entry.file_name().to_str().and_then(layout::quarantined_object) else {
                continue;
            };
            if self.size_bytes(&id)?.is_none() {
                self.files.damaged_objects.add(id, Damage::Corrupt);
            }
        }
        Ok(())
    }

    /// Removes an object in another form than `form`, in which it was just read from the medium.
    fn remove_packed_duplicate(&self, id: &ObjectId, form: ContentForm) -> Result<(), StoreError> {
        if form == ContentForm::Packed || self.files.locate_as(id, ContentForm::Packed)?.is_none() {
            return Ok(());
        }
        self.files.counter.note(id, || {
            let length = self.files.locate_as(id, form)?.and_then(|located| located.length(id));
            if length.is_some() {
                self.files.remove_others(id, form);
            }
            Ok(Change { before: length, after: length })
        })
    }

    /// Records that `id` is unreadable if the medium failed. `error` must be that of the kernel: an
    /// error of `fs_err` has no number.
    fn unread(&self, id: &ObjectId, error: io::Error) -> StoreError {
        if is_unreadable(&error) {
            self.files.damaged_objects.add(*id, Damage::Unreadable);
        }
        failed(format!("read object {id}"))(error)
    }

    /// Appends all of a file. Returns false if it is not the object that it should be.
    fn append_whole(
        &self,
        id: &ObjectId,
        file: &fs_err::File,
        length: usize,
        buffer: &mut Vec<u8>,
    ) -> io::Result<bool> {
        let start = buffer.len();
        let appended = append_from(file.file(), length, buffer);
        let is_intact = appended.is_ok() && id.algorithm().digest(&buffer[start..]) == *id;
        match is_intact {
            true => self.files.damaged_objects.mark_repaired(id),
            false => buffer.truncate(start),
        }
        appended.map(|_| is_intact)
    }

    /// Opens a file, or appends it to `buffer` if it is small and has at most `limit` bytes. `None`
    /// if the content is not what it should be.
    fn open_plain(
        &self,
        id: &ObjectId,
        mut file: fs_err::File,
        metadata: &std::fs::Metadata,
        limit: usize,
        buffer: &mut Vec<u8>,
    ) -> io::Result<Option<Opened>> {
        match whole_length(metadata.len()) {
            Some(length) if length <= limit => {
                let is_intact = self.append_whole(id, &file, length, buffer)?;
                return Ok(is_intact.then_some(Opened::Appended));
            }
            Some(length) => {
                let mut content = Vec::new();
                let is_intact = self.append_whole(id, &file, length, &mut content)?;
                return Ok(is_intact.then(|| Opened::Content(Content::Whole(content.into()))));
            }
            None => {}
        }
        let hash = |file: &mut fs_err::File| {
            let mut hasher = Hasher::new(id.algorithm());
            let mut chunk = vec![0; CHUNK_BYTES];
            loop {
                match file.file_mut().read(&mut chunk)? {
                    0 => return Ok(hasher.finish()),
                    length => hasher.update(&chunk[..length]),
                }
            }
        };
        if !self.is_intact(id, &mut file, metadata, hash)? {
            return Ok(None);
        }
        io::Seek::rewind(&mut file)?;
        Ok(Some(Opened::Content(Content::File(file, metadata.len()))))
    }

    /// The content of a packed file; `None` if that is not what it should be.
    fn open_packed(
        &self,
        id: &ObjectId,
        mut file: fs_err::File,
        metadata: &std::fs::Metadata,
    ) -> io::Result<Option<Content>> {
        let damaged = |error: io::Error| if is_damage(&error) { Ok(None) } else { Err(error) };
        let head_bytes = head_bytes(id);
        let chunks_bytes = metadata.len().saturating_sub(head_bytes);
        let size_bytes = match PackedReader::open(file.file_mut(), id) {
            Ok(reader) => reader.size_bytes(),
            Err(error) => return damaged(error),
        };
        if let Some(length) = whole_length(size_bytes) {
            let mut chunks = Vec::new();
            // A longer file is found to be damaged.
            append_from(file.file(), length + CHUNK_HEAD_BYTES + 1, &mut chunks)?;
            match PackedReader::behind_head(&chunks[..], size_bytes).hash(id) {
                Ok(got) if got == *id => {}
                Ok(_) => return Ok(None),
                Err(error) => return damaged(error),
            }
            self.files.damaged_objects.mark_repaired(id);
            let content = PackedContent::in_memory(size_bytes, chunks.into());
            return Ok(Some(Content::Packed(content)));
        }
        let hash = |file: &mut fs_err::File| {
            PackedReader::behind_head(file.file_mut(), size_bytes).hash(id)
        };
        match self.is_intact(id, &mut file, metadata, hash) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => return damaged(error),
        }
        io::Seek::seek(&mut file, io::SeekFrom::Start(head_bytes))?;
        Ok(Some(Content::Packed(PackedContent::in_file(size_bytes, file, chunks_bytes))))
    }

    /// Hashes a large object, unless its file was hashed since it was last changed.
    fn is_intact(
        &self,
        id: &ObjectId,
        file: &mut fs_err::File,
        metadata: &std::fs::Metadata,
        hash: impl FnOnce(&mut fs_err::File) -> io::Result<ObjectId>,
    ) -> io::Result<bool> {
        if self.verified.knows(id, metadata) {
            return Ok(true);
        }
        let check = &self.checks[usize::from(id.digest()[0]) % CHECKS_MAX];
        let _check = locked(check);
        if self.verified.knows(id, metadata) {
            return Ok(true);
        }
        let intact = hash(file)? == *id;
        if intact {
            self.files.damaged_objects.mark_repaired(id);
            self.verified.remember(id, metadata);
        }
        Ok(intact)
    }

    /// Quarantines a corrupt object, unless another was stored meanwhile.
    fn quarantine(
        &self,
        id: &ObjectId,
        form: ContentForm,
        bad: &std::fs::Metadata,
    ) -> Result<(), StoreError> {
        let path = self.files.path(id, form);
        let target = self.files.quarantine.join(layout::quarantine_name(id, form, bad.ino()));
        let held = || Ok(self.files.locate(id)?.and_then(|located| located.length(id)));
        self.files.counter.note(id, || {
            let before = held()?;
            match fs_err::symlink_metadata(&path) {
                Ok(now) if now.ino() == bad.ino() => (),
                Ok(_) => return Ok(Change { before, after: before }),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(Change { before, after: before });
                }
                Err(error) => return Err(failed(format!("read object {id}"))(error)),
            }
            tracing::error!(
                object = %id, size_bytes = bad.len(), quarantine = %target.display(),
                "a corrupt object was moved to the quarantine: upload it again and check the disk"
            );
            fs_err::rename(&path, &target)
                .map_err(failed(format!("quarantine the corrupt object {id}")))?;
            // Two readers may find the same corrupt object; only one quarantines it.
            self.corrupt.fetch_add(1, Ordering::Relaxed);
            let after = held()?;
            if after.is_none() {
                self.files.damaged_objects.add(*id, Damage::Corrupt);
            }
            Ok(Change { before, after })
        })
    }
}

/// Returns the length of an object that is read and sent in one piece.
fn whole_length(size_bytes: u64) -> Option<usize> {
    usize::try_from(size_bytes).ok().filter(|_| size_bytes <= WHOLE_BYTES_MAX)
}

impl Objects for LocalObjects {
    fn size_bytes(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        self.files.size_bytes(id)
    }

    fn held(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        if self.files.damaged_objects.damage(id) == Some(Damage::Unreadable) {
            return Ok(None);
        }
        if !self.is_doubtful() {
            return self.size_bytes(id);
        }
        if let Ok(Some(located)) = self.files.locate(id)
            && self.files.on_medium.knows(id, &located.metadata)
        {
            return content_bytes(id, &located);
        }
        let mut reader = locked(&self.medium);
        match self.read_medium(id, &mut reader, &mut |_| true) {
            Ok(OnMedium::Whole(size_bytes)) => Ok(Some(size_bytes)),
            Ok(_) => Ok(None),
            Err(_) if self.files.damaged_objects.damage(id) == Some(Damage::Unreadable) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn receive(
        &self,
        id: ObjectId,
        size_bytes: u64,
    ) -> Result<Box<dyn Receiving + '_>, StoreError> {
        Ok(Box::new(LocalReceiving::new(
            &self.files,
            &self.packers,
            &self.verified,
            id,
            size_bytes,
        )?))
    }

    fn open_verified(&self, id: &ObjectId) -> Result<Option<Content>, StoreError> {
        let mut small = Vec::new();
        let opened = self.open_into(id, usize::MAX, &mut small)?;
        Ok(opened.map(|opened| match opened {
            Opened::Appended => Content::Whole(small.into()),
            Opened::Content(content) => content,
        }))
    }

    fn open_into(
        &self,
        id: &ObjectId,
        limit: usize,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Opened>, StoreError> {
        for form in layout::FORMS {
            let (file, metadata) = match self.files.open_file(id, form) {
                Ok((file, metadata)) => {
                    (fs_err::File::from_parts(file, self.files.path(id, form)), metadata)
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(self.unread(id, error)),
            };
            let opened = match form {
                ContentForm::Plain => self.open_plain(id, file, &metadata, limit, buffer),
                ContentForm::Packed => {
                    let content = self.open_packed(id, file, &metadata);
                    content.map(|content| content.map(Opened::Content))
                }
            };
            match opened.map_err(|error| self.unread(id, error))? {
                Some(opened) => return Ok(Some(opened)),
                None => self.quarantine(id, form, &metadata)?,
            }
        }
        Ok(None)
    }

    fn sync(&self) -> Result<(), StoreError> {
        if self.sync_failed.load(Ordering::Acquire) {
            return Err(StoreError::Unsynced);
        }
        let before = self.files.unsynced.placed();
        nix::unistd::syncfs(self.files.handle.file()).map_err(|errno| {
            self.sync_failed.store(true, Ordering::Release);
            failed("make the objects durable")(errno.into())
        })?;
        self.files.unsynced.synced(before);
        Ok(())
    }

    fn space(&self) -> Result<Option<Space>, StoreError> {
        self.files.space().map(Some)
    }

    fn count(&self, stop: &dyn Fn() -> bool) {
        self.files.counter.count(&self.files.root, stop);
    }

    fn object_counts(&self) -> ObjectCounts {
        self.files.counter.object_counts()
    }

    fn corrupt(&self) -> u64 {
        self.corrupt.load(Ordering::Relaxed)
    }

    fn damaged_objects(&self) -> &DamagedObjects {
        &self.files.damaged_objects
    }

    fn list(&self, below: &Path) -> Result<Vec<ObjectId>, StoreError> {
        let mut found = Vec::new();
        for entry in WalkDir::new(self.files.root.join(below)).min_depth(1).max_depth(1) {
            let entry = entry.map_err(|error| failed("list objects")(error.into()))?;
            let stored = layout::stored_at(&below.join(entry.file_name()));
            found.extend(stored.map(|(id, _)| (entry.ino(), id)));
        }
        found.sort_unstable();
        let mut seen = BTreeSet::new();
        Ok(found.into_iter().map(|(_, id)| id).filter(|id| seen.insert(*id)).collect())
    }

    fn read_medium(
        &self,
        id: &ObjectId,
        reader: &mut MediumReader,
        pace: &mut dyn FnMut(u64) -> bool,
    ) -> Result<OnMedium, StoreError> {
        let Some(located) = self.files.locate(id)?.filter(|located| located.length(id).is_some())
        else {
            return Ok(OnMedium::Absent);
        };
        let form = located.form;
        let HashedFile { is_whole, size_bytes, metadata } =
            match reader.hash(&located.path, form, id, pace) {
                Ok(Some(found)) => found,
                Ok(None) => return Ok(OnMedium::Stopped),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(OnMedium::Absent);
                }
                Err(error) => return Err(self.unread(id, error)),
            };
        if !is_whole {
            self.quarantine(id, form, &metadata)?;
            // The object may be there in another form.
            return match self.files.locate(id)? {
                Some(other) if other.form != form => self.read_medium(id, reader, pace),
                _ => Ok(OnMedium::Corrupt),
            };
        }
        if size_bytes > WHOLE_BYTES_MAX {
            self.verified.remember(id, &metadata);
        }
        if self.is_doubtful() {
            self.files.on_medium.remember(id, &metadata);
        } else {
            self.remove_packed_duplicate(id, form)?;
        }
        self.files.damaged_objects.mark_repaired(id);
        Ok(OnMedium::Whole(size_bytes))
    }

    fn is_doubtful(&self) -> bool {
        self.files.unsynced.is_doubtful()
    }

    fn all_read(&self) {
        self.files.unsynced.all_read();
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn what_is_put_aside_is_counted_no_more_and_empty_files_never_were() {
        let data = tempfile::tempdir().unwrap();
        fs_err::create_dir(data.path().join(layout::INCOMING)).unwrap();
        let objects = LocalObjects::open(data.path(), 0).unwrap();
        let [good, cut, bad, empty] = [&b"good"[..], b"cut", b"bad", b""].map(|content| {
            let id = Algorithm::Blake3.digest(content);
            fs_err::write(objects.files.path(&id, ContentForm::Plain), content).unwrap();
            id
        });
        // As after a power cut, and a fault of the disk.
        fs_err::write(objects.files.path(&cut, ContentForm::Plain), b"").unwrap();
        fs_err::write(objects.files.path(&bad, ContentForm::Plain), b"BAD").unwrap();
        objects.count(&|| false);
        let held = |objects, bytes| ObjectCounts { objects, bytes, complete: true };
        assert_eq!(objects.object_counts(), held(3, 7));
        for (id, is_there, after) in [
            (cut, false, held(3, 7)),
            (bad, false, held(2, 4)),
            (good, true, held(2, 4)),
            (empty, true, held(2, 4)),
        ] {
            assert_eq!(objects.open_verified(&id).unwrap().is_some(), is_there);
            assert_eq!(objects.object_counts(), after);
        }
        assert_eq!(objects.corrupt(), 2);
    }

    #[test]
    fn what_two_readers_find_corrupt_is_one_object() {
        let data = tempfile::tempdir().unwrap();
        fs_err::create_dir(data.path().join(layout::INCOMING)).unwrap();
        let objects = LocalObjects::open(data.path(), 0).unwrap();
        let id = Algorithm::Blake3.digest(b"bad");
        let path = objects.files.path(&id, ContentForm::Plain);
        fs_err::write(&path, b"BAD").unwrap();
        let found = fs_err::metadata(&path).unwrap();
        for _reader in 0..2 {
            objects.quarantine(&id, ContentForm::Plain, &found).unwrap();
        }
        assert_eq!((objects.corrupt(), path.exists()), (1, false));
    }
}
