//! The passes that hash every file whatever its metadata says, one chunk at a time: the content
//! pass through the page cache, the media pass around it.
//!
//! They change no tree. If a file differs from the tree, a metadata pass reads it again. The media
//! pass checks such a file twice, the second time after that metadata pass: only a difference that
//! remains is a defect of the medium, and not a recent change of the file.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use model::path::TreePath;
use model::tree::{Child, Leaf, Tree};
use nix::errno::Errno;

use crate::root::{Directory, Root, Status};
use crate::scan::coverage::file_after;
use crate::scan::known_entries::DamagedFiles;
use crate::scan::progress::Counters;
use crate::scan::reading::{HOLE_BYTES_MAX, ReadFrom, Reading, Unfinished};

/// The result of one chunk of work.
pub enum ChunkResult {
    /// There is more to do.
    More,
    /// The file at that path differs from the tree.
    Differs(TreePath),
    /// The medium of the file at that path differs from the page cache. The status is that of the
    /// file.
    Decayed(TreePath, Status),
    End {
        took: Duration,
        /// The number of files that cannot be read in this way.
        skipped: u64,
    },
}

/// The inputs of one step of a pass.
pub struct ChunkContext<'context> {
    pub root: &'context Root,
    /// The newest tree.
    pub tree: &'context Tree,
    /// The files that every pass reads around the cache.
    pub medium: &'context DamagedFiles,
    /// The files whose content is not known yet.
    pub unfinished: &'context BTreeMap<TreePath, Unfinished>,
    /// The buffer for a chunk, aligned.
    pub buffer: &'context mut [u8],
    pub counters: &'context Counters,
}

/// A file that is being read.
struct OpenFile {
    path: TreePath,
    directory: Directory,
    reading: Reading,
    /// True if this is the second check.
    is_second: bool,
}

/// A pass that is under way.
pub struct FilePass {
    via: ReadFrom,
    started: Instant,
    /// The last file that was checked.
    last: Option<TreePath>,
    /// The file that is checked again before the next one.
    suspect: Option<TreePath>,
    current: Option<OpenFile>,
    skipped: u64,
}

impl FilePass {
    /// Starts with the first file.
    pub fn new(via: ReadFrom) -> Self {
        let started = Instant::now();
        Self { via, started, last: None, suspect: None, current: None, skipped: 0 }
    }

    /// Closes the file that is being read. It is read from its start next time.
    pub fn leave(&mut self) {
        if let Some(OpenFile { path, is_second: true, .. }) = self.current.take() {
            self.suspect = Some(path);
        }
    }

    /// Returns the file that is being read, or was read last.
    pub fn place(&self) -> Option<&TreePath> {
        self.current.as_ref().map(|current| &current.path).or(self.last.as_ref())
    }

    /// Reads one chunk, or opens or closes one file.
    pub fn step(&mut self, context: &mut ChunkContext<'_>) -> ChunkResult {
        let Some(mut current) = self.current.take() else { return self.open(context) };
        match current.reading.step(context.buffer) {
            Ok(0) => self.finish(context, current),
            Ok(length) => {
                context.counters.add_hashed(length);
                self.current = Some(current);
                ChunkResult::More
            }
            Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {
                self.skip(current.path)
            }
            // An error of the medium: the metadata pass reports it when it reads the file.
            Err(_) => {
                let status = *current.reading.status();
                self.differs(current.path, status, current.is_second)
            }
        }
    }

    fn open(&mut self, context: &ChunkContext<'_>) -> ChunkResult {
        let (path, is_second) = match self.suspect.take() {
            Some(path) => (path, true),
            None => match file_after(context.tree, self.last.as_ref()) {
                Some((path, _)) => (path, false),
                None => {
                    return ChunkResult::End {
                        took: self.started.elapsed(),
                        skipped: self.skipped,
                    };
                }
            },
        };
        let opened = context.root.parent(&path).and_then(|(directory, name)| {
            let reading = Reading::start(&directory, name, context.tree.algorithm())?;
            Ok((directory, reading))
        });
        // The metadata pass reports a file that was removed or cannot be read.
        let Ok((directory, mut reading)) = opened else {
            self.last = Some(path);
            return ChunkResult::More;
        };
        if reading.hole_bytes > HOLE_BYTES_MAX || context.unfinished.contains_key(&path) {
            self.last = Some(path);
            return ChunkResult::More;
        }
        let around = self.via == ReadFrom::Medium || context.medium.has(&path, reading.status());
        if around && reading.go_around_cache().is_err() {
            return self.skip(path);
        }
        self.current = Some(OpenFile { path, directory, reading, is_second });
        ChunkResult::More
    }

    /// Skips a file that cannot be read in this way.
    fn skip(&mut self, path: TreePath) -> ChunkResult {
        self.skipped += 1;
        self.last = Some(path);
        ChunkResult::More
    }

    fn finish(&mut self, context: &ChunkContext<'_>, current: OpenFile) -> ChunkResult {
        let OpenFile { path, directory, reading, is_second } = current;
        let result = reading.finish(&directory, path.name(), None);
        let recorded = object_at(context.tree, &path);
        match result {
            Ok(read) if read.stable && recorded.is_some_and(|recorded| recorded != read.object) => {
                self.differs(path, read.status, is_second)
            }
            // The metadata pass handles files that change.
            Ok(_) | Err(_) => {
                self.last = Some(path);
                ChunkResult::More
            }
        }
    }

    fn differs(&mut self, path: TreePath, status: Status, is_second: bool) -> ChunkResult {
        match (self.via, is_second) {
            (ReadFrom::Medium, false) => {
                self.suspect = Some(path.clone());
                ChunkResult::Differs(path)
            }
            (ReadFrom::Medium, true) => {
                self.last = Some(path.clone());
                ChunkResult::Decayed(path, status)
            }
            (ReadFrom::Cache, _) => {
                self.last = Some(path.clone());
                ChunkResult::Differs(path)
            }
        }
    }
}

fn object_at(tree: &Tree, path: &TreePath) -> Option<model::object::ObjectId> {
    match tree.get(path)? {
        Child::Leaf(Leaf::File(file)) => Some(file.object.id()),
        _ => None,
    }
}
