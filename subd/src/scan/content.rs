//! The passes that hash every file whatever its metadata says, one chunk at a time: the content
//! pass through the page cache, the media pass around it.
//!
//! They change nothing. Where a file holds something else than the tree says, a metadata pass is to
//! read that file again. What the media pass finds it looks at twice, the second time after such a
//! metadata pass: only what then still differs is a matter of the medium, and not of somebody who
//! has just changed the file.

use std::time::{Duration, Instant};

use model::path::TreePath;
use model::tree::{Child, Leaf, Tree};
use nix::errno::Errno;

use super::counters::Counters;
use super::medium::OnMedium;
use super::reading::{Reading, Via};
use crate::root::{Directory, Root, Status};
use crate::scan::file_order::file_after;

/// What came of one chunk of work.
pub enum Step {
    /// There is more to do.
    More,
    /// The file at that path does not hold what the tree says.
    Differs(TreePath),
    /// The medium of the file at that path does not hold what the cache does; who it was.
    Decayed(TreePath, Status),
    /// All files were read.
    End {
        /// How long it took.
        took: Duration,
        /// How many files cannot be read in this way.
        skipped: u64,
    },
}

/// What a pass is given for one step.
pub struct Means<'means> {
    /// The files.
    pub root: &'means Root,
    /// What they are said to hold: the newest tree.
    pub tree: &'means Tree,
    /// Those that are read around the cache in any case.
    pub medium: &'means OnMedium,
    /// Where to read to: a chunk, aligned.
    pub buffer: &'means mut [u8],
    /// Where to count.
    pub counters: &'means Counters,
}

/// A file in the middle of being read.
struct Current {
    path: TreePath,
    directory: Directory,
    reading: Reading,
    /// True if it was looked at already.
    again: bool,
}

/// A pass that is under way.
pub struct FilePass {
    via: Via,
    started: Instant,
    /// The last file that is done.
    last: Option<TreePath>,
    /// The file to be looked at once more before the next one.
    doubted: Option<TreePath>,
    current: Option<Current>,
    skipped: u64,
}

impl FilePass {
    /// Begins with the first file.
    #[must_use]
    pub fn new(via: Via) -> Self {
        let started = Instant::now();
        Self { via, started, last: None, doubted: None, current: None, skipped: 0 }
    }

    /// Closes the file that is being read; it is read from its start next time.
    pub fn leave(&mut self) {
        if let Some(Current { path, again: true, .. }) = self.current.take() {
            self.doubted = Some(path);
        }
    }

    /// The file that is being read, or was last.
    #[must_use]
    pub fn place(&self) -> Option<&TreePath> {
        self.current.as_ref().map(|current| &current.path).or(self.last.as_ref())
    }

    /// Reads one chunk, or opens or ends one file.
    pub fn step(&mut self, means: &mut Means<'_>) -> Step {
        let Some(mut current) = self.current.take() else { return self.open(means) };
        match current.reading.step(means.buffer) {
            Ok(0) => self.finish(means, current),
            Ok(length) => {
                means.counters.add_hashed(length);
                self.current = Some(current);
                Step::More
            }
            Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {
                self.skip(current.path)
            }
            // An error of the medium: the metadata pass reports it when it reads the file.
            Err(_) => {
                let status = *current.reading.status();
                self.differs(current.path, status, current.again)
            }
        }
    }

    fn open(&mut self, means: &Means<'_>) -> Step {
        let (path, again) = match self.doubted.take() {
            Some(path) => (path, true),
            None => match file_after(means.tree, self.last.as_ref()) {
                Some((path, _)) => (path, false),
                None => {
                    return Step::End { took: self.started.elapsed(), skipped: self.skipped };
                }
            },
        };
        let opened = means.root.parent(&path).and_then(|(directory, name)| {
            let reading = Reading::start(&directory, name, means.tree.algorithm())?;
            Ok((directory, reading))
        });
        // If it went, or cannot be read, the metadata pass reports that.
        let Ok((directory, mut reading)) = opened else {
            self.last = Some(path);
            return Step::More;
        };
        let around = self.via == Via::Medium || means.medium.has(&path, reading.status());
        if around && reading.go_around_cache().is_err() {
            return self.skip(path);
        }
        self.current = Some(Current { path, directory, reading, again });
        Step::More
    }

    /// Passes over a file that cannot be read in this way.
    fn skip(&mut self, path: TreePath) -> Step {
        self.skipped += 1;
        self.last = Some(path);
        Step::More
    }

    fn finish(&mut self, means: &Means<'_>, current: Current) -> Step {
        let Current { path, directory, reading, again } = current;
        let was = reading.finish(&directory, path.name(), None);
        let said = object_at(means.tree, &path);
        match was {
            Ok(was) if was.stable && said.is_some_and(|said| said != was.object) => {
                self.differs(path, was.status, again)
            }
            // A file that changes is the business of the metadata pass.
            Ok(_) | Err(_) => {
                self.last = Some(path);
                Step::More
            }
        }
    }

    fn differs(&mut self, path: TreePath, status: Status, again: bool) -> Step {
        match (self.via, again) {
            (Via::Medium, false) => {
                self.doubted = Some(path.clone());
                Step::Differs(path)
            }
            (Via::Medium, true) => {
                self.last = Some(path.clone());
                Step::Decayed(path, status)
            }
            (Via::Cache, _) => {
                self.last = Some(path.clone());
                Step::Differs(path)
            }
        }
    }
}

fn object_at(tree: &Tree, path: &TreePath) -> Option<model::object::ObjectId> {
    match tree.get(path)? {
        Child::Leaf(Leaf::File(file)) => Some(file.object),
        _ => None,
    }
}
