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
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use api::object_stream::Form;
use model::lock::locked;
use model::object::{Hasher, ObjectId};
use rpc::packing::CHUNK_HEAD_BYTES;
use walkdir::{DirEntryExt as _, WalkDir};

use crate::core::collection::disk_pressure::Space;
use crate::store::content::{Content, PackedContent};
use crate::store::contract::{Objects, Receiving};
use crate::store::damaged_objects::{Damage, DamagedObjects, is_unreadable};
use crate::store::local::receiving::{LocalReceiving, Packers};
use crate::store::local::unsynced_objects::UnsyncedObjects;
use crate::store::local::verified_files::VerifiedFiles;
use crate::store::medium_reader::{Found, MediumReader, OnMedium};
use crate::store::object_counts::{Change, ObjectCounter, ObjectCounts};
use crate::store::packed::{Reader, head_bytes, is_damage};
use crate::store::{
    error::{StoreError, failed},
    files::make_directory,
    layout,
};

/// The longest object that is read, hashed and sent in one piece, in bytes.
pub const WHOLE_BYTES_MAX: u64 = 64 << 10;

/// How much of a larger object is read at once, in bytes.
pub const CHUNK_BYTES: usize = 64 << 10;

/// How many large objects may be checked at one time, each by one thread. Of those that ask for
/// the same one, the others wait for the first.
const CHECKS_MAX: usize = 64;

/// The objects of a data directory.
pub struct LocalObjects {
    pub(super) root: PathBuf,
    pub(super) incoming: PathBuf,
    quarantine: PathBuf,
    // Opened at start, so that a failed write-back of any object written since is reported to it.
    handle: fs_err::File,
    failed: AtomicBool,
    pub(super) unsynced: UnsyncedObjects,
    next: AtomicU64,
    pub(super) verified: VerifiedFiles,
    checks: [Mutex<()>; CHECKS_MAX],
    pub(super) counter: ObjectCounter,
    corrupt: AtomicU64,
    damaged_objects: DamagedObjects,
    /// What was read from the medium, or came, since the start; only while objects are doubtful.
    on_medium: VerifiedFiles,
    // For the objects that are doubtful: one at a time, so that there is one buffer.
    medium: Mutex<MediumReader>,
    pub(super) packers: Packers,
}

/// The file that holds an object.
pub(super) struct Located {
    pub path: PathBuf,
    pub form: Form,
    pub metadata: std::fs::Metadata,
}

impl Located {
    /// The length of the file in bytes. `None` if the object is not in it: a crash of the machine
    /// leaves files that were just made empty.
    pub fn length(&self, id: &ObjectId) -> Option<u64> {
        let length = self.metadata.len();
        let is_object = length > 0 || (self.form == Form::Plain && is_empty_object(id));
        is_object.then_some(length)
    }
}

impl LocalObjects {
    pub(in crate::store) fn open(data: &Path) -> Result<Self, StoreError> {
        Self::open_packing(data, 0)
    }

    /// Packs what comes with this level of zstd; level 0 never does.
    pub(in crate::store) fn open_packing(data: &Path, level: i32) -> Result<Self, StoreError> {
        let root = data.join(layout::OBJECTS);
        for algorithm in layout::ALGORITHMS {
            for directory in layout::fan_out(algorithm) {
                make_directory(&root.join(directory))?;
            }
        }
        let incoming = data.join(layout::INCOMING);
        let quarantine = data.join(layout::QUARANTINE);
        make_directory(&quarantine)?;
        let handle = fs_err::File::open(&root).map_err(failed("open the objects"))?;
        let device = handle.metadata().map_err(failed("open the objects"))?.dev();
        for path in [&incoming, &quarantine] {
            if fs_err::metadata(path).map_err(failed("open the objects"))?.dev() != device {
                return Err(StoreError::TwoFileSystems { path: path.clone() });
            }
        }
        let objects = Self {
            root,
            incoming,
            quarantine,
            handle,
            failed: AtomicBool::new(false),
            unsynced: UnsyncedObjects::open(data)?,
            next: AtomicU64::new(0),
            verified: VerifiedFiles::default(),
            checks: [const { Mutex::new(()) }; CHECKS_MAX],
            counter: ObjectCounter::new(),
            corrupt: AtomicU64::new(0),
            damaged_objects: DamagedObjects::default(),
            on_medium: VerifiedFiles::default(),
            medium: Mutex::default(),
            packers: Packers::new(level),
        };
        objects.remember_quarantine()?;
        Ok(objects)
    }

    /// What was put aside and has not come again is still to be repaired.
    fn remember_quarantine(&self) -> Result<(), StoreError> {
        let why = || failed("read the quarantine");
        for entry in fs_err::read_dir(&self.quarantine).map_err(why())? {
            let entry = entry.map_err(why())?;
            let Some(id) = entry.file_name().to_str().and_then(layout::put_aside) else {
                continue;
            };
            if self.size_bytes(&id)?.is_none() {
                self.damaged_objects.add(id, Damage::Corrupt);
            }
        }
        Ok(())
    }

    pub(super) fn path(&self, id: &ObjectId, form: Form) -> PathBuf {
        self.root.join(layout::stored_path(id, form))
    }

    pub(super) fn locate_as(
        &self,
        id: &ObjectId,
        form: Form,
    ) -> Result<Option<Located>, StoreError> {
        let path = self.path(id, form);
        match fs_err::symlink_metadata(&path) {
            Ok(metadata) => Ok(Some(Located { path, form, metadata })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(format!("look for object {id}"))(error)),
        }
    }

    /// The file that holds the object; if none does, an empty one that is in its place.
    pub(super) fn locate(&self, id: &ObjectId) -> Result<Option<Located>, StoreError> {
        let mut empty = None;
        for form in layout::FORMS {
            match self.locate_as(id, form)? {
                Some(located) if located.length(id).is_some() => return Ok(Some(located)),
                located => empty = empty.or(located),
            }
        }
        Ok(empty)
    }

    /// Removes files of the object in other forms than `form`, in which it is there.
    pub(super) fn remove_others(&self, id: &ObjectId, form: Form) {
        for other in layout::FORMS.into_iter().filter(|other| *other != form) {
            match fs_err::remove_file(self.path(id, other)) {
                Ok(()) => tracing::info!(object = %id, "removed the second file of an object"),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    tracing::warn!(object = %id, %error, "cannot remove the other file");
                }
            }
        }
    }

    /// A path in the directory of what is being written that no one else uses.
    pub(super) fn temporary(&self) -> PathBuf {
        self.incoming.join(format!("object-{}", self.next.fetch_add(1, Ordering::Relaxed)))
    }

    /// Removes an object in another form than `form`, in which it was just read from the medium.
    fn drop_twin(&self, id: &ObjectId, form: Form) -> Result<(), StoreError> {
        if form == Form::Packed || self.locate_as(id, Form::Packed)?.is_none() {
            return Ok(());
        }
        self.counter.note(id, || {
            let length = self.locate_as(id, form)?.and_then(|located| located.length(id));
            if length.is_some() {
                self.remove_others(id, form);
            }
            Ok(Change { before: length, after: length })
        })
    }

    /// Takes note that `id` was put in place by this server, which would hear of it if it did not
    /// get to the medium.
    pub(super) fn received(&self, id: &ObjectId) {
        self.damaged_objects.mark_repaired(id);
        if self.is_doubtful()
            && let Ok(Some(located)) = self.locate(id)
        {
            self.on_medium.remember(id, &located.metadata);
        }
    }

    /// Takes note that `id` could not be read, if it is the medium that fails. `error` must be that
    /// of the kernel: what `fs_err` makes of it does not tell its number.
    fn unread(&self, id: &ObjectId, error: io::Error) -> StoreError {
        if is_unreadable(&error) {
            self.damaged_objects.add(*id, Damage::Unreadable);
        }
        failed(format!("read object {id}"))(error)
    }

    /// Starts to store an object of `size_bytes`, of which nothing is seen until it is complete.
    ///
    /// # Errors
    ///
    /// [`StoreError::TooLittle`] if it cannot fit.
    pub fn receive(&self, id: ObjectId, size_bytes: u64) -> Result<LocalReceiving<'_>, StoreError> {
        LocalReceiving::new(self, id, size_bytes)
    }

    /// The content of a file; `None` if that is not what it should be.
    fn open_plain(
        &self,
        id: &ObjectId,
        mut file: fs_err::File,
        metadata: &std::fs::Metadata,
    ) -> io::Result<Option<Content>> {
        if metadata.len() <= WHOLE_BYTES_MAX {
            let mut content = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0) + 1);
            // One byte more than a whole object may have: the file may have grown.
            let limit = WHOLE_BYTES_MAX + 1;
            file.file_mut().take(limit).read_to_end(&mut content)?;
            if id.algorithm().digest(&content) != *id {
                return Ok(None);
            }
            self.damaged_objects.mark_repaired(id);
            return Ok(Some(Content::Whole(content.into())));
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
        Ok(Some(Content::File(file, metadata.len())))
    }

    /// As [`Self::open_plain`], of a file that is packed.
    fn open_packed(
        &self,
        id: &ObjectId,
        mut file: fs_err::File,
        metadata: &std::fs::Metadata,
    ) -> io::Result<Option<Content>> {
        let damaged = |error: io::Error| if is_damage(&error) { Ok(None) } else { Err(error) };
        let head_bytes = head_bytes(id);
        let chunks_bytes = metadata.len().saturating_sub(head_bytes);
        let size_bytes = match Reader::open(file.file_mut(), id) {
            Ok(reader) => reader.size_bytes(),
            Err(error) => return damaged(error),
        };
        if size_bytes <= WHOLE_BYTES_MAX {
            let mut chunks = Vec::new();
            // What has more is no chunk of so much content, and found to go on.
            let limit = WHOLE_BYTES_MAX + CHUNK_HEAD_BYTES as u64 + 1;
            file.file_mut().take(limit).read_to_end(&mut chunks)?;
            match Reader::behind_head(&chunks[..], size_bytes).hash(id) {
                Ok(got) if got == *id => {}
                Ok(_) => return Ok(None),
                Err(error) => return damaged(error),
            }
            self.damaged_objects.mark_repaired(id);
            let content = PackedContent::in_memory(size_bytes, chunks.into());
            return Ok(Some(Content::Packed(content)));
        }
        let hash =
            |file: &mut fs_err::File| Reader::behind_head(file.file_mut(), size_bytes).hash(id);
        match self.is_intact(id, &mut file, metadata, hash) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => return damaged(error),
        }
        io::Seek::seek(&mut file, io::SeekFrom::Start(head_bytes))?;
        Ok(Some(Content::Packed(PackedContent::in_file(size_bytes, file, chunks_bytes))))
    }

    /// Hashes a large object, unless that was done since its file was last changed.
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
            self.damaged_objects.mark_repaired(id);
            self.verified.remember(id, metadata);
        }
        Ok(intact)
    }

    /// Moves a corrupt object out of the way, unless a good one has taken its place by now.
    fn put_aside(
        &self,
        id: &ObjectId,
        form: Form,
        bad: &std::fs::Metadata,
    ) -> Result<(), StoreError> {
        let path = self.path(id, form);
        let aside = self.quarantine.join(layout::aside(id, form, bad.ino()));
        let held = || Ok(self.locate(id)?.and_then(|located| located.length(id)));
        self.counter.note(id, || {
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
                object = %id, size_bytes = bad.len(), aside = %aside.display(),
                "a corrupt object was moved to the quarantine: upload it again and check the disk"
            );
            fs_err::rename(&path, &aside)
                .map_err(failed(format!("put the corrupt object {id} aside")))?;
            // Two readers may find the same at one time; one of them puts it aside.
            self.corrupt.fetch_add(1, Ordering::Relaxed);
            let after = held()?;
            if after.is_none() {
                self.damaged_objects.add(*id, Damage::Corrupt);
            }
            Ok(Change { before, after })
        })
    }

    /// How much a writer without privileges could store now, in bytes.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let status = self.status()?;
        Ok(status.blocks_available().saturating_mul(status.fragment_size()))
    }

    pub(super) fn status(&self) -> Result<nix::sys::statvfs::Statvfs, StoreError> {
        nix::sys::statvfs::fstatvfs(self.handle.file())
            .map_err(|errno| failed("ask how much space is free")(errno.into()))
    }

    /// Counts the objects of former runs, one after the other, until `stop` says so. The others
    /// are counted as they come.
    pub fn count(&self, stop: impl Fn() -> bool) {
        self.counter.count(&self.root, stop);
    }
}

impl Objects for LocalObjects {
    fn size_bytes(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        match self.locate(id)? {
            Some(located) if located.length(id).is_some() => content_bytes(id, &located),
            _ => Ok(None),
        }
    }

    fn held(&self, id: &ObjectId) -> Result<Option<u64>, StoreError> {
        if self.damaged_objects.of(id) == Some(Damage::Unreadable) {
            return Ok(None);
        }
        if !self.is_doubtful() {
            return self.size_bytes(id);
        }
        if let Ok(Some(located)) = self.locate(id)
            && self.on_medium.knows(id, &located.metadata)
        {
            return content_bytes(id, &located);
        }
        let mut reader = locked(&self.medium);
        match self.read_medium(id, &mut reader, &mut |_| true) {
            Ok(OnMedium::Whole(size_bytes)) => Ok(Some(size_bytes)),
            Ok(_) => Ok(None),
            Err(_) if self.damaged_objects.of(id) == Some(Damage::Unreadable) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn receive(
        &self,
        id: ObjectId,
        size_bytes: u64,
    ) -> Result<Box<dyn Receiving + '_>, StoreError> {
        Ok(Box::new(self.receive(id, size_bytes)?))
    }

    fn open_verified(&self, id: &ObjectId) -> Result<Option<Content>, StoreError> {
        for form in layout::FORMS {
            let path = self.path(id, form);
            let file = match std::fs::File::open(&path) {
                Ok(file) => fs_err::File::from_parts(file, &path),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(self.unread(id, error)),
            };
            let metadata = file.metadata().map_err(|error| self.unread(id, error))?;
            let content = match form {
                Form::Plain => self.open_plain(id, file, &metadata),
                Form::Packed => self.open_packed(id, file, &metadata),
            };
            match content.map_err(|error| self.unread(id, error))? {
                Some(content) => return Ok(Some(content)),
                None => self.put_aside(id, form, &metadata)?,
            }
        }
        Ok(None)
    }

    fn sync(&self) -> Result<(), StoreError> {
        if self.failed.load(Ordering::Acquire) {
            return Err(StoreError::Unsynced);
        }
        let before = self.unsynced.placed();
        nix::unistd::syncfs(self.handle.file()).map_err(|errno| {
            self.failed.store(true, Ordering::Release);
            failed("make the objects durable")(errno.into())
        })?;
        self.unsynced.synced(before);
        Ok(())
    }

    fn space(&self) -> Result<Option<Space>, StoreError> {
        self.space().map(Some)
    }

    fn count(&self, stop: &dyn Fn() -> bool) {
        self.count(stop);
    }

    fn object_counts(&self) -> ObjectCounts {
        self.counter.object_counts()
    }

    fn corrupt(&self) -> u64 {
        self.corrupt.load(Ordering::Relaxed)
    }

    fn damaged_objects(&self) -> &DamagedObjects {
        &self.damaged_objects
    }

    fn list(&self, below: &Path) -> Result<Vec<ObjectId>, StoreError> {
        let mut found = Vec::new();
        for entry in WalkDir::new(self.root.join(below)).min_depth(1).max_depth(1) {
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
        let Some(located) = self.locate(id)?.filter(|located| located.length(id).is_some()) else {
            return Ok(OnMedium::Absent);
        };
        let form = located.form;
        let Found { is_whole, size_bytes, metadata } =
            match reader.hash(&located.path, form, id, pace) {
                Ok(Some(found)) => found,
                Ok(None) => return Ok(OnMedium::Stopped),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(OnMedium::Absent);
                }
                Err(error) => return Err(self.unread(id, error)),
            };
        if !is_whole {
            self.put_aside(id, form, &metadata)?;
            // It may be there in another form.
            return match self.locate(id)? {
                Some(other) if other.form != form => self.read_medium(id, reader, pace),
                _ => Ok(OnMedium::Corrupt),
            };
        }
        if size_bytes > WHOLE_BYTES_MAX {
            self.verified.remember(id, &metadata);
        }
        if self.is_doubtful() {
            self.on_medium.remember(id, &metadata);
        } else {
            self.drop_twin(id, form)?;
        }
        self.damaged_objects.mark_repaired(id);
        Ok(OnMedium::Whole(size_bytes))
    }

    fn is_doubtful(&self) -> bool {
        self.unsynced.is_doubtful()
    }

    fn all_read(&self) {
        self.unsynced.all_read();
    }
}

/// The length of the object that lies in such a file, in bytes. `None` if the file is damaged so
/// that this cannot be told.
fn content_bytes(id: &ObjectId, located: &Located) -> Result<Option<u64>, StoreError> {
    match located.form {
        Form::Plain => Ok(Some(located.metadata.len())),
        Form::Packed => {
            read_size(&located.path, id).map_err(failed(format!("look for object {id}")))
        }
    }
}

/// The length of the content that the packed file of `id` says to have.
pub(crate) fn read_size(path: &Path, id: &ObjectId) -> io::Result<Option<u64>> {
    match std::fs::File::open(path).and_then(|file| Reader::open(file, id)) {
        Ok(reader) => Ok(Some(reader.size_bytes())),
        Err(error) if is_damage(&error) || error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn is_empty_object(id: &ObjectId) -> bool {
    id.algorithm().digest(&[]) == *id
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::object::Algorithm;

    #[test]
    fn what_is_put_aside_is_counted_no_more_and_empty_files_never_were() {
        let data = tempfile::tempdir().unwrap();
        fs_err::create_dir(data.path().join(layout::INCOMING)).unwrap();
        let objects = LocalObjects::open(data.path()).unwrap();
        let [good, cut, bad, empty] = [&b"good"[..], b"cut", b"bad", b""].map(|content| {
            let id = Algorithm::Blake3.digest(content);
            fs_err::write(objects.path(&id, Form::Plain), content).unwrap();
            id
        });
        // As after a power cut, and a fault of the disk.
        fs_err::write(objects.path(&cut, Form::Plain), b"").unwrap();
        fs_err::write(objects.path(&bad, Form::Plain), b"BAD").unwrap();
        objects.count(|| false);
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
        let objects = LocalObjects::open(data.path()).unwrap();
        let id = Algorithm::Blake3.digest(b"bad");
        let path = objects.path(&id, Form::Plain);
        fs_err::write(&path, b"BAD").unwrap();
        let found = fs_err::metadata(&path).unwrap();
        for _reader in 0..2 {
            objects.put_aside(&id, Form::Plain, &found).unwrap();
        }
        assert_eq!((objects.corrupt(), path.exists()), (1, false));
    }
}
