//! Moves the regular files of a tree into the object cache.
//!
//! Files are taken in batches, through a directory that only root can enter: the intake. A file is
//! moved there by a rename if only root could have written to it: it belongs to root, has one name
//! and no other writers. All others are copied, so that no open descriptor leads to an object of
//! the cache. A file in the intake is hashed and becomes an object.
//!
//! # Invariants
//!
//! * At any time each content is in the tree, in the intake or in the cache. The next run takes
//!   what a killed run left in the intake.
//! * A copied file leaves the tree only after its copy is on the medium.
//! * A file that a process is writing stays in the tree.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};

use model::display::error_chain;
use model::filter::Patterns;
use model::object::Algorithm;
use model::path::TreePath;
use model::scope::Attributes;
use nix::errno::Errno;
use serde::Serialize;

use super::writers;
use subd::cache::{Cache, CacheError};
use subd::root::{Directory, Kind, Root, RootError, Status, errno_of, subd_directory};

/// How many files are taken at once.
const BATCH: usize = 1_024;

/// How many bytes are taken at once, unless one file has more: copies need space until then.
const BATCH_BYTES: u64 = 1 << 30;

/// The start of the names of files that were moved into the intake.
const MOVED: &str = "move.";

/// The start of the names of files that are copied into it, whose originals are in the tree.
const COPIED: &str = "copy.";

/// How many of the paths that stay are reported.
const LEFT_MAX: usize = 100;

/// How much is copied at once, in bytes.
const BUFFER_BYTES: usize = 128 << 10;

/// The import stopped. What was taken until then is safe.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    #[error("the import failed")]
    Import {
        #[from]
        source: RootError,
    },
    #[error(transparent)]
    Cache {
        #[from]
        source: CacheError,
    },
    #[error("cannot see which files are open for writing")]
    Writers { source: io::Error },
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    pub moved: u64,
    /// Files that were copied, because other users could have written to them.
    pub copied: u64,
    /// How many of both were equal to another.
    pub duplicates: u64,
    /// Bytes of all that was taken.
    pub bytes: u64,
    /// Files that stay in the tree.
    pub left: u64,
    /// Some of them, and why.
    pub left_paths: Vec<(TreePath, String)>,
    pub objects: u64,
}

impl Sums {
    fn leave(&mut self, path: TreePath, why: String) {
        self.left += 1;
        if self.left_paths.len() < LEFT_MAX {
            self.left_paths.push((path, why));
        }
    }
}

/// A file of the tree with its status.
struct Found {
    path: TreePath,
    status: Status,
}

/// A file that is in the intake.
struct Taken {
    found: Found,
    name: Vec<u8>,
    is_copy: bool,
}

/// Imports the files of a tree.
pub struct Import<'a> {
    pub root: &'a Root,
    /// The root of the intake and the cache.
    pub home: &'a Root,
    pub intake: &'a Directory,
    pub cache: &'a Cache,
    /// The digest of the objects.
    pub algorithm: Algorithm,
    pub exclusions: &'a Patterns,
    /// Called with how many files and bytes were taken.
    pub progress: &'a mut dyn FnMut(u64, u64),
    /// What was done so far.
    pub sums: Sums,
    /// The number of the next file in the intake.
    next: u64,
}

impl<'a> Import<'a> {
    /// Prepares the import of `root`.
    pub fn new(
        root: &'a Root,
        home: &'a Root,
        intake: &'a Directory,
        cache: &'a Cache,
        algorithm: Algorithm,
        exclusions: &'a Patterns,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Self {
        let sums = Sums::default();
        Self { root, home, intake, cache, algorithm, exclusions, progress, sums, next: 0 }
    }

    /// Takes what a killed run left, and then the whole tree.
    ///
    /// # Errors
    ///
    /// [`ImportError`]. A file that cannot be taken is no error: it stays and is counted.
    pub fn run(mut self) -> Result<Sums, ImportError> {
        self.drain()?;
        let own = subd_directory();
        let mut directories = vec![TreePath::root()];
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while let Some(path) = directories.pop() {
            let seen = self.root.directory(&path).and_then(|open| Ok((open.names()?, open)));
            let (names, directory) = match seen {
                Ok(seen) => seen,
                Err(error) => {
                    // Mounted file-systems are no part of the tree.
                    if error.errno() != Some(Errno::EXDEV) {
                        self.sums.leave(path, error_chain(&error));
                    }
                    continue;
                }
            };
            for name in names {
                let Ok(below) = path.join(&name) else { continue };
                if below == own || self.exclusions.matches(&below) {
                    continue;
                }
                match directory.stat(&name) {
                    Ok(status) if status.kind == Kind::Directory => directories.push(below),
                    Ok(status) if status.kind == Kind::File => {
                        bytes += status.size_bytes;
                        batch.push(Found { path: below, status });
                    }
                    Ok(_) => {}
                    Err(error) if error.is_absent() => {}
                    Err(error) => self.sums.leave(below, error_chain(&error)),
                }
                if batch.len() == BATCH || bytes >= BATCH_BYTES {
                    self.take(std::mem::take(&mut batch))?;
                    bytes = 0;
                }
            }
        }
        self.take(batch)?;
        self.home.sync_filesystem()?;
        self.sums.objects = self.cache.ids().len() as u64;
        Ok(self.sums)
    }

    /// Takes what a killed run left in the intake. It is copied, because it is not known who could
    /// write to it.
    fn drain(&mut self) -> Result<(), ImportError> {
        for old in self.intake.names()? {
            if !old.starts_with(MOVED.as_bytes()) {
                subd::state::directories::remove_all(self.intake, &old)?;
                continue;
            }
            let name = self.name(COPIED);
            copy(self.intake, &old, self.intake, &name)?;
            let adopted = self.cache.adopt(self.intake, &name, self.algorithm)?;
            self.home.sync_filesystem()?;
            self.intake.unlink(&old)?;
            self.sums.copied += 1;
            self.sums.duplicates += u64::from(adopted.duplicate);
            self.sums.bytes += adopted.size_bytes;
        }
        Ok(())
    }

    /// Returns an unused name in the intake. Leftovers of a former run have numbers too, but they
    /// are removed before the first file of the tree is taken.
    fn name(&mut self, start: &str) -> Vec<u8> {
        let name = format!("{start}{}", self.next).into_bytes();
        self.next += 1;
        name
    }

    /// Takes the files of `batch`.
    fn take(&mut self, batch: Vec<Found>) -> Result<(), ImportError> {
        if batch.is_empty() {
            return Ok(());
        }
        let writers = written()?;
        let mut taken = Vec::new();
        for found in batch {
            if writers.contains(&found.status.inode) {
                self.sums.leave(found.path, "a process is writing it".to_owned());
                continue;
            }
            match self.bring(&found) {
                Ok((name, is_copy)) => taken.push(Taken { found, name, is_copy }),
                Err(error) => self.sums.leave(found.path, error_chain(&error)),
            }
        }
        // Finds the processes that have opened one since the first check. From here on none can.
        let writers = written()?;
        let (written, quiet): (Vec<Taken>, Vec<Taken>) = taken
            .into_iter()
            .partition(|taken| !taken.is_copy && writers.contains(&taken.found.status.inode));
        for taken in written {
            self.put_back(taken)?;
        }
        let mut copies = Vec::new();
        for taken in quiet {
            let adopted = self.cache.adopt(self.intake, &taken.name, self.algorithm)?;
            self.sums.bytes += adopted.size_bytes;
            self.sums.duplicates += u64::from(adopted.duplicate);
            match taken.is_copy {
                true => copies.push(taken.found),
                false => self.sums.moved += 1,
            }
            let files = self.sums.moved + self.sums.copied;
            (self.progress)(files, self.sums.bytes);
        }
        if !copies.is_empty() {
            self.home.sync_filesystem()?;
        }
        for found in copies {
            self.remove_copied(found);
        }
        Ok(())
    }

    /// Moves or copies a file into the intake. Returns its name there, and true if it is a copy.
    fn bring(&mut self, found: &Found) -> Result<(Vec<u8>, bool), RootError> {
        let (directory, old) = self.root.parent(&found.path)?;
        if is_roots_alone(&directory, old, &found.status)? {
            let name = self.name(MOVED);
            match directory.rename_noreplace(old, self.intake, &name) {
                Ok(()) => return Ok((name, false)),
                // The cache is on another file-system.
                Err(error) if error.errno() == Some(Errno::EXDEV) => {}
                Err(error) => return Err(error),
            }
        }
        let name = self.name(COPIED);
        if let Err(error) = copy(&directory, old, self.intake, &name) {
            subd::state::directories::remove_all(self.intake, &name)?;
            return Err(error);
        }
        Ok((name, true))
    }

    /// Puts a file back that a process has begun to write in the meantime.
    fn put_back(&mut self, taken: Taken) -> Result<(), ImportError> {
        let Taken { found, name, .. } = taken;
        let (directory, old) = self.root.parent(&found.path)?;
        self.intake.rename_noreplace(&name, &directory, old)?;
        self.sums.leave(found.path, "a process is writing it".to_owned());
        Ok(())
    }

    /// Takes a file out of the tree whose copy is an object.
    fn remove_copied(&mut self, found: Found) {
        let removed = self.root.parent(&found.path).and_then(|(directory, name)| {
            let now = directory.stat(name)?;
            // Removing its other names has changed the time of change.
            let same = |status: &Status| (status.inode, status.size_bytes, status.mtime);
            if same(&now) != same(&found.status) {
                return Ok(false);
            }
            directory.unlink(name).map(|()| true)
        });
        match removed {
            Ok(true) => self.sums.copied += 1,
            Ok(false) => {
                let why = "it was changed while it was copied".to_owned();
                self.sums.leave(found.path, why);
            }
            Err(error) => self.sums.leave(found.path, error_chain(&error)),
        }
    }
}

fn written() -> Result<BTreeSet<u64>, ImportError> {
    writers::inodes().map_err(|source| ImportError::Writers { source })
}

/// True if only root can have opened the file for writing, and it has no other name.
fn is_roots_alone(directory: &Directory, name: &[u8], status: &Status) -> Result<bool, RootError> {
    if status.uid != 0 || status.links != 1 || status.mode & 0o022 != 0 {
        return Ok(false);
    }
    let attributes = directory.xattrs(name, Attributes::Basic)?;
    Ok(!attributes.iter().any(|(key, _)| key.starts_with(b"system.posix_acl")))
}

/// Copies the file `old` to the new file `name`.
fn copy(from: &Directory, old: &[u8], to: &Directory, name: &[u8]) -> Result<(), RootError> {
    let unread = |error: io::Error| from.error("copy", old, errno_of(error));
    let mut source = from.open_file(old)?;
    let mut target = to.create_file(name, 0o600)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match source.read(&mut buffer).map_err(unread)? {
            0 => return Ok(()),
            length => target
                .write_all(&buffer[..length])
                .map_err(|error| to.error("write", name, errno_of(error)))?,
        }
    }
}
