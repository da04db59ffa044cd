//! Implements `imageserver check`: verifies a store that no server uses.
//!
//! Reads every object from the medium, around the page cache, and hashes it. Then reads every image
//! record and looks for every object that an image needs. Changes nothing, except that it moves
//! corrupt objects to the quarantine with `--repair`. Memory grows with the directories of all
//! images, each counted once, and not with the number of objects.

pub mod command;

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use api::object_stream::ContentForm;
use model::display::error_chain;
use model::image::ImageName;
use model::lock::locked;
use model::object::ObjectId;
use walkdir::{DirEntry, DirEntryExt as _, WalkDir};

use crate::core::check_findings::{Finding, Findings};
use crate::core::missing_objects::{MissingObjects, ObjectLookup};
use crate::store::directories;
use crate::store::error::{StoreError, failed};
use crate::store::files::{if_found, lock, make_directory};
use crate::store::layout::{self, ImageFile};
use crate::store::local::object_files::read_size;
use crate::store::local::records::LocalDirectories;
use crate::store::medium_reader::MediumReader;
use crate::store::packed::PackedReader;
use crate::store::record::{RECORD_BYTES_MAX, Record};

/// The options of a check.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    pub data: PathBuf,
    /// True to move corrupt objects to the quarantine.
    pub repair: bool,
    /// How many threads read objects.
    pub threads: usize,
}

/// The progress of a check.
#[derive(Debug, Default)]
pub struct CheckProgress {
    /// Objects that were read.
    pub objects: AtomicU64,
    /// Their length together, in bytes.
    pub bytes: AtomicU64,
    /// Directories of objects that are done.
    pub directories: AtomicU64,
    /// Images that were looked through.
    pub images: AtomicU64,
}

/// The number of directories of objects.
pub const DIRECTORIES: u64 = 256 * layout::ALGORITHMS.len() as u64;

/// Why a check failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error("`{path}` is no data directory of an imageserver: it has no directory `objects`")]
    NoStore { path: PathBuf },
    #[error("an imageserver is running on `{path}`: stop it first; while it runs it checks itself")]
    Running { path: PathBuf },
    #[error("the check was not finished")]
    Store {
        #[source]
        source: StoreError,
    },
}

impl From<StoreError> for CheckError {
    fn from(source: StoreError) -> Self {
        match source {
            StoreError::Locked { path } => Self::Running { path },
            source => Self::Store { source },
        }
    }
}

/// Checks a store.
pub fn check(options: &CheckOptions, progress: &CheckProgress) -> Result<Findings, CheckError> {
    let data = &options.data;
    let objects = data.join(layout::OBJECTS);
    if !objects.is_dir() {
        return Err(CheckError::NoStore { path: data.clone() });
    }
    let _lock = lock_if_possible(data)?;
    if options.repair {
        make_directory(&data.join(layout::QUARANTINE))?;
    }
    let start = Instant::now();
    let check = Checker { options, progress, objects, findings: Mutex::default() };
    check.read_objects()?;
    let reading = start.elapsed();
    check.find_unknown_files()?;
    check.check_images()?;
    let mut findings = check.findings.into_inner().unwrap_or_else(PoisonError::into_inner);
    findings.objects = progress.objects.load(Ordering::Relaxed);
    findings.object_bytes = progress.bytes.load(Ordering::Relaxed);
    findings.reading_seconds = reading.as_secs_f64();
    findings.sort();
    Ok(findings)
}

/// Holds the lock of the data directory. On a disk that cannot be written no server can start, so
/// that the lock is not needed if it is not there.
fn lock_if_possible(data: &Path) -> Result<Option<impl Drop>, StoreError> {
    match lock(data) {
        Ok(lock) => Ok(Some(lock)),
        Err(StoreError::Io { source, .. })
            if source.kind() == io::ErrorKind::ReadOnlyFilesystem =>
        {
            tracing::debug!("the file-system is read-only");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

struct Checker<'check> {
    options: &'check CheckOptions,
    progress: &'check CheckProgress,
    objects: PathBuf,
    findings: Mutex<Findings>,
}

impl Checker<'_> {
    fn note(&self, finding: Finding) {
        let mut findings = locked(&self.findings);
        findings.add(finding);
    }

    /// Reads all objects, a directory at a time, by several threads.
    fn read_objects(&self) -> Result<(), StoreError> {
        let directories: Vec<PathBuf> = layout::object_directories().collect();
        let next = AtomicUsize::new(0);
        let failure = Mutex::new(None);
        let work = || {
            let mut reader = MediumReader::default();
            while let Some(directory) = directories.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = self.read_directory(directory, &mut reader) {
                    *locked(&failure) = Some(error);
                    // The others end too.
                    next.store(directories.len(), Ordering::Relaxed);
                }
                self.progress.directories.fetch_add(1, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..self.options.threads.max(1) {
                scope.spawn(work);
            }
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    fn read_directory(&self, below: &Path, reader: &mut MediumReader) -> Result<(), StoreError> {
        let directory = self.objects.join(below);
        for entry in entries(&directory)? {
            let stored = layout::stored_at(&below.join(entry.file_name()));
            match stored.filter(|_| entry.file_type().is_file()) {
                Some((id, form)) => self.read_object(&id, form, entry.path(), reader)?,
                None => self.note(Finding::Unknown(entry.into_path())),
            }
        }
        Ok(())
    }

    fn read_object(
        &self,
        id: &ObjectId,
        form: ContentForm,
        path: &Path,
        reader: &mut MediumReader,
    ) -> Result<(), StoreError> {
        let mut pace = |bytes| {
            self.progress.bytes.fetch_add(bytes, Ordering::Relaxed);
            true
        };
        let found = match reader.hash(path, form, id, &mut pace) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(()),
            Err(error) => {
                self.note(Finding::Unreadable { id: *id, error: error.to_string() });
                return Ok(());
            }
        };
        self.progress.objects.fetch_add(1, Ordering::Relaxed);
        if found.is_whole {
            return Ok(());
        }
        use std::os::unix::fs::MetadataExt as _;
        if found.metadata.len() == 0 {
            self.note(Finding::Empty);
            return Ok(());
        }
        let mut quarantined = None;
        if self.options.repair {
            let name = layout::quarantine_name(id, form, found.metadata.ino());
            let to = self.options.data.join(layout::QUARANTINE).join(name);
            fs_err::rename(path, &to)
                .map_err(failed(format!("quarantine the corrupt object {id}")))?;
            quarantined = Some(to);
        }
        self.note(Finding::Corrupt { id: *id, size_bytes: found.metadata.len(), quarantined });
        Ok(())
    }

    /// Finds files outside of the directories of objects that no server has made.
    fn find_unknown_files(&self) -> Result<(), StoreError> {
        let data = &self.options.data;
        for entry in entries(data)? {
            if !layout::TOP.iter().any(|name| entry.file_name() == *name) {
                self.note(Finding::Unknown(entry.into_path()));
            }
        }
        if let Err(why) = directories::load(&LocalDirectories::new(data)) {
            self.note(Finding::Directories(why));
        }
        for entry in entries(&self.objects)? {
            let is_known = |name: &str| entry.file_name() == name;
            if !layout::ALGORITHMS.iter().any(|algorithm| is_known(algorithm.name())) {
                self.note(Finding::Unknown(entry.into_path()));
            }
        }
        for algorithm in layout::ALGORITHMS {
            for entry in entries(&self.objects.join(algorithm.name()))? {
                let below = Path::new(algorithm.name()).join(entry.file_name());
                if !layout::fan_out(algorithm).any(|directory| directory == below) {
                    self.note(Finding::Unknown(entry.into_path()));
                }
            }
        }
        let unfinished = entries(&data.join(layout::INCOMING))?.len();
        locked(&self.findings).unfinished = unfinished as u64;
        Ok(())
    }

    fn check_images(&self) -> Result<(), StoreError> {
        let root = self.options.data.join(layout::IMAGES);
        if !root.is_dir() {
            return Ok(());
        }
        let mut missing_objects = MissingObjects::default();
        let walk = WalkDir::new(&root).min_depth(1).sort_by_file_name();
        for entry in walk {
            let entry = entry.map_err(|error| failed("read the images")(error.into()))?;
            if entry.file_type().is_dir() {
                continue;
            }
            let below = entry.path().strip_prefix(&root).expect("the walk began at the root");
            match layout::image_file(below) {
                None => self.note(Finding::Unknown(entry.into_path())),
                Some(ImageFile::Deleted(name)) => {
                    self.note(Finding::Deleted);
                    if root.join(layout::image_path(&name)).exists() {
                        self.note(Finding::DeletedWithRecord(name));
                    }
                }
                Some(ImageFile::Image(name)) => {
                    self.check_image(&name, entry.path(), &mut missing_objects)?;
                }
            }
        }
        Ok(())
    }

    fn check_image(
        &self,
        name: &ImageName,
        path: &Path,
        missing_objects: &mut MissingObjects,
    ) -> Result<(), StoreError> {
        self.progress.images.fetch_add(1, Ordering::Relaxed);
        self.note(Finding::Image);
        let read = read_limited(path, RECORD_BYTES_MAX as u64).map_err(|error| error.to_string());
        let record = read.and_then(|bytes| {
            let record = Record::decode(&bytes).map_err(|error| error_chain(&error))?;
            let of = &record.image.content.name;
            if of == name { Ok(record) } else { Err(format!("it is the record of image {of}")) }
        });
        let record = match record {
            Ok(record) => record,
            Err(why) => {
                self.note(Finding::Record { name: name.clone(), why });
                return Ok(());
            }
        };
        let content = &record.image.content;
        let mut missing = missing_objects.of_tree(content.root, &mut StoreFiles { check: self })?;
        missing.extend(record.image.notes.build_log.filter(|id| !self.is_there(id)));
        if !missing.is_empty() {
            self.note(Finding::Incomplete { name: name.clone(), objects: missing });
        }
        Ok(())
    }

    /// Returns true if there is a file of the object that was not found to be wrong.
    fn is_there(&self, id: &ObjectId) -> bool {
        let findings = locked(&self.findings);
        !findings.is_bad(id) && self.path(id).is_some()
    }

    /// Returns the file of the object and its form; `None` if it is missing or empty.
    fn path(&self, id: &ObjectId) -> Option<(PathBuf, ContentForm)> {
        layout::FORMS.into_iter().find_map(|form| {
            let path = self.objects.join(layout::stored_path(id, form));
            let metadata = std::fs::symlink_metadata(&path).ok()?;
            let is_object = metadata.len() > 0 || id.algorithm().digest(&[]) == *id;
            is_object.then_some((path, form))
        })
    }
}

/// The store, as its files have it.
struct StoreFiles<'check> {
    check: &'check Checker<'check>,
}

impl ObjectLookup for StoreFiles<'_> {
    type Error = StoreError;

    fn directory(&mut self, id: &ObjectId) -> Result<Option<Vec<u8>>, StoreError> {
        let Some((path, form)) = self.check.path(id) else { return Ok(None) };
        let limit = model::tree::encode::DIRECTORY_BYTES_MAX as u64;
        // Whatever the reason is, it is not there for the image.
        let bytes = match form {
            ContentForm::Plain => read_limited(&path, limit),
            ContentForm::Packed => fs_err::File::open(&path)
                .and_then(|file| PackedReader::open(file, id))
                .and_then(|reader| read_all(reader, limit)),
        };
        Ok(bytes.ok().filter(|bytes| id.algorithm().digest(bytes) == *id))
    }

    fn has(&mut self, id: &ObjectId, size_bytes: u64) -> Result<bool, StoreError> {
        let Some((path, form)) = self.check.path(id).filter(|_| self.check.is_there(id)) else {
            return Ok(false);
        };
        let length = match form {
            ContentForm::Plain => std::fs::metadata(path).ok().map(|metadata| metadata.len()),
            ContentForm::Packed => read_size(&path, id).ok().flatten(),
        };
        Ok(length == Some(size_bytes))
    }
}

fn read_limited(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_all(fs_err::File::open(path)?, limit)
}

fn read_all(file: impl io::Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let length = file.take(limit + 1).read_to_end(&mut bytes)? as u64;
    if length > limit { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(bytes) }
}

/// Lists a directory in the order of the inodes. A missing one is empty.
fn entries(directory: &Path) -> Result<Vec<DirEntry>, StoreError> {
    let walk = WalkDir::new(directory).min_depth(1).max_depth(1);
    let listed = walk.into_iter().collect::<Result<Vec<_>, _>>().map_err(io::Error::from);
    let why = failed(format!("read `{}`", directory.display()));
    let mut entries = if_found(listed).map_err(why)?.unwrap_or_default();
    entries.sort_by_key(DirEntry::ino);
    Ok(entries)
}
