//! `imageserver check`: looks at all of a store that no server uses.
//!
//! Every object is read from the medium, around the page cache, and hashed; then every record is
//! read, and every directory that an image needs is looked into. Nothing is changed, but that
//! corrupt objects are moved to the quarantine if that is asked for. Memory grows with the
//! directories of all images, each counted once, and not with the objects.

pub mod command;

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use api::object_stream::Form;
use model::image::ImageName;
use model::lock::locked;
use model::object::ObjectId;
use model::report::report;
use walkdir::{DirEntry, DirEntryExt as _, WalkDir};

use crate::core::missing_objects::{Holds, Survey};
use crate::store::directories;
use crate::store::layout::{self, Placed};
use crate::store::local::directories::LocalRegister;
use crate::store::local::objects::read_size;
use crate::store::medium_reader::MediumReader;
use crate::store::packed::Reader;
use crate::store::record::{RECORD_BYTES_MAX, Record};
use crate::store::{
    error::{StoreError, failed},
    files::{lock, make_directory},
};

use crate::core::check_findings::{Finding, Findings};

/// How a store is checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// The data directory.
    pub data: PathBuf,
    /// True to move corrupt objects to the quarantine.
    pub repair: bool,
    /// How many threads read objects.
    pub threads: usize,
}

/// How far a check is. Read by whoever shows it.
#[derive(Debug, Default)]
pub struct Progress {
    /// Objects that were read.
    pub objects: AtomicU64,
    /// Their length together, in bytes.
    pub bytes: AtomicU64,
    /// Directories of objects that are done.
    pub directories: AtomicU64,
    /// Images that were looked through.
    pub images: AtomicU64,
}

/// How many directories of objects there are.
pub const DIRECTORIES: u64 = 256 * layout::ALGORITHMS.len() as u64;

/// Why a store is not checked.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// There is none.
    #[error("`{path}` is no data directory of an imageserver: it has no directory `objects`")]
    NoStore {
        /// The data directory.
        path: PathBuf,
    },
    /// A server uses it.
    #[error("an imageserver is running on `{path}`: stop it first; while it runs it checks itself")]
    Running {
        /// The data directory.
        path: PathBuf,
    },
    /// The store cannot be read.
    #[error("the check was not finished")]
    Store {
        /// Why.
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

/// Looks at all of a store.
///
/// # Errors
///
/// [`CheckError`], if not all of it could be looked at.
pub fn check(options: &Options, progress: &Progress) -> Result<Findings, CheckError> {
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
    let check = Check { options, progress, objects, findings: Mutex::default() };
    check.read_objects()?;
    let reading = start.elapsed();
    check.look_for_unknown_files()?;
    check.look_through_images()?;
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

struct Check<'check> {
    options: &'check Options,
    progress: &'check Progress,
    objects: PathBuf,
    findings: Mutex<Findings>,
}

impl Check<'_> {
    fn note(&self, finding: Finding) {
        let mut findings = locked(&self.findings);
        findings.add(finding);
    }

    /// Reads all objects, a directory at a time, by several threads.
    fn read_objects(&self) -> Result<(), StoreError> {
        let directories: Vec<PathBuf> = layout::places().collect();
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
        let entries = match entries(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed(format!("read `{}`", directory.display()))(error)),
        };
        for entry in entries {
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
        form: Form,
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
        let mut aside = None;
        if self.options.repair {
            let name = layout::aside(id, form, found.metadata.ino());
            let to = self.options.data.join(layout::QUARANTINE).join(name);
            fs_err::rename(path, &to)
                .map_err(failed(format!("put the corrupt object {id} aside")))?;
            aside = Some(to);
        }
        self.note(Finding::Corrupt { id: *id, size_bytes: found.metadata.len(), aside });
        Ok(())
    }

    /// Looks for files that no server has made, outside of the directories of objects.
    fn look_for_unknown_files(&self) -> Result<(), StoreError> {
        let data = &self.options.data;
        let list = |directory: &Path| match entries(directory) {
            Ok(entries) => Ok(entries),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(failed(format!("read `{}`", directory.display()))(error)),
        };
        for entry in list(data)? {
            if !layout::TOP.iter().any(|name| entry.file_name() == *name) {
                self.note(Finding::Unknown(entry.into_path()));
            }
        }
        if let Err(why) = directories::load(&LocalRegister::new(data)) {
            self.note(Finding::Directories(why));
        }
        for entry in list(&self.objects)? {
            let is_known = |name: &str| entry.file_name() == name;
            if !layout::ALGORITHMS.iter().any(|algorithm| is_known(algorithm.name())) {
                self.note(Finding::Unknown(entry.into_path()));
            }
        }
        for algorithm in layout::ALGORITHMS {
            for entry in list(&self.objects.join(algorithm.name()))? {
                let below = Path::new(algorithm.name()).join(entry.file_name());
                if !layout::fan_out(algorithm).any(|directory| directory == below) {
                    self.note(Finding::Unknown(entry.into_path()));
                }
            }
        }
        let unfinished = list(&data.join(layout::INCOMING))?.len();
        locked(&self.findings).unfinished = unfinished as u64;
        Ok(())
    }

    fn look_through_images(&self) -> Result<(), StoreError> {
        let root = self.options.data.join(layout::IMAGES);
        if !root.is_dir() {
            return Ok(());
        }
        let mut survey = Survey::default();
        let walk = WalkDir::new(&root).min_depth(1).sort_by_file_name();
        for entry in walk {
            let entry = entry.map_err(|error| failed("read the images")(error.into()))?;
            if entry.file_type().is_dir() {
                continue;
            }
            let below = entry.path().strip_prefix(&root).expect("the walk began at the root");
            match layout::placed(below) {
                None => self.note(Finding::Unknown(entry.into_path())),
                Some(Placed::Deleted(name)) => {
                    self.note(Finding::Deleted);
                    if root.join(layout::image_path(&name)).exists() {
                        self.note(Finding::Revived(name));
                    }
                }
                Some(Placed::Image(name)) => self.look_through(&name, entry.path(), &mut survey)?,
            }
        }
        Ok(())
    }

    fn look_through(
        &self,
        name: &ImageName,
        path: &Path,
        survey: &mut Survey,
    ) -> Result<(), StoreError> {
        self.progress.images.fetch_add(1, Ordering::Relaxed);
        self.note(Finding::Image);
        let read = read_limited(path, RECORD_BYTES_MAX as u64).map_err(|error| error.to_string());
        let record = read.and_then(|bytes| {
            let record = Record::decode(&bytes).map_err(|error| report(&error))?;
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
        let mut lacks = survey.lacks(content.root, &mut Files { check: self })?;
        lacks.extend(record.image.notes.build_log.filter(|id| !self.is_there(id)));
        if !lacks.is_empty() {
            self.note(Finding::Lacks { name: name.clone(), objects: lacks });
        }
        Ok(())
    }

    /// True if there is a file of the object that was not found to be wrong.
    fn is_there(&self, id: &ObjectId) -> bool {
        let findings = locked(&self.findings);
        !findings.is_bad(id) && self.path(id).is_some()
    }

    /// The file of the object, and its form; `None` if there is none, or it is empty.
    fn path(&self, id: &ObjectId) -> Option<(PathBuf, Form)> {
        layout::FORMS.into_iter().find_map(|form| {
            let path = self.objects.join(layout::stored_path(id, form));
            let metadata = std::fs::symlink_metadata(&path).ok()?;
            let is_object = metadata.len() > 0 || id.algorithm().digest(&[]) == *id;
            is_object.then_some((path, form))
        })
    }
}

/// The store, as its files have it.
struct Files<'check> {
    check: &'check Check<'check>,
}

impl Holds for Files<'_> {
    type Error = StoreError;

    fn directory(&mut self, id: &ObjectId) -> Result<Option<Vec<u8>>, StoreError> {
        let Some((path, form)) = self.check.path(id) else { return Ok(None) };
        let limit = model::tree::encode::DIRECTORY_BYTES_MAX as u64;
        // Whatever the reason is, it is not there for the image.
        let bytes = match form {
            Form::Plain => read_limited(&path, limit),
            Form::Packed => fs_err::File::open(&path)
                .and_then(|file| Reader::open(file, id))
                .and_then(|reader| read_all(reader, limit)),
        };
        Ok(bytes.ok().filter(|bytes| id.algorithm().digest(bytes) == *id))
    }

    fn has(&mut self, id: &ObjectId, size_bytes: u64) -> Result<bool, StoreError> {
        let Some((path, form)) = self.check.path(id).filter(|_| self.check.is_there(id)) else {
            return Ok(false);
        };
        let length = match form {
            Form::Plain => std::fs::metadata(path).ok().map(|metadata| metadata.len()),
            Form::Packed => read_size(&path, id).ok().flatten(),
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

/// What is in a directory, as it lies on the disk.
fn entries(directory: &Path) -> io::Result<Vec<DirEntry>> {
    let walk = WalkDir::new(directory).min_depth(1).max_depth(1);
    let mut entries = walk.into_iter().collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(DirEntry::ino);
    Ok(entries)
}
