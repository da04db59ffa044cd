//! Copies objects from files of the machine that have the same content.
//!
//! The last scan says which file should have an object's content, and may be outdated: nothing is
//! trusted, and nothing is linked. The content is shared by the file-system where it can (then it
//! is read once, to hash it) and copied elsewhere, and it is the object only if it hashes to its
//! id. Otherwise the object is fetched.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use api::subd::FetchObject;
use model::display::error_chain;
use model::object::ObjectId;
use model::path::TreePath;
use model::tree::{Child, Leaf, Tree};
use tokio_util::sync::CancellationToken;

use crate::cache::{Cache, CacheError};
use crate::fetch::record::FetchRecord;
use crate::limits::Budgets;
use crate::root::{Root, RootError, Status};

/// How many files are tried for one object.
const CANDIDATES_MAX: usize = 3;

/// How much is copied at once, in bytes.
const BUFFER_BYTES: usize = 128 << 10;

/// Why a file gave no object.
#[derive(Debug, thiserror::Error)]
enum ReuseError {
    #[error("cannot read it")]
    Root(#[from] RootError),
    #[error("cannot take it")]
    Cache(#[from] CacheError),
    #[error("cannot copy it")]
    Read(#[from] std::io::Error),
    #[error("there is no space to copy it")]
    NoSpace,
    #[error("it has changed since it was scanned")]
    Changed,
    #[error("subd is stopping")]
    Stopping,
}

/// Copies objects from files of the tree.
pub(super) struct Reuse {
    pub cache: Arc<Cache>,
    pub root: Arc<Root>,
    pub budgets: Arc<Budgets>,
    pub record: Arc<FetchRecord>,
    pub stop: CancellationToken,
    /// True if content may be copied where it cannot be shared, because there is space for all.
    pub may_copy: bool,
}

impl Reuse {
    /// Copies those of `missing` that files of `tree` have.
    pub fn run(&self, tree: &Tree, missing: &[FetchObject]) {
        let candidates = candidates(tree, missing);
        for object in missing {
            // A partial is not discarded.
            if self.cache.partial_bytes(&object.id) > 0 {
                continue;
            }
            for path in candidates.get(&object.id).into_iter().flatten() {
                match self.take(object, path) {
                    Ok(()) => {
                        self.record.reused.fetch_add(1, Ordering::Relaxed);
                        self.record.arrive(object.id);
                        break;
                    }
                    Err(ReuseError::Stopping) => return,
                    Err(error) => {
                        let (error, id) = (error_chain(&error), &object.id);
                        tracing::debug!(%path, %id, error, "a file cannot be reused");
                    }
                }
            }
        }
    }

    fn take(&self, object: &FetchObject, path: &TreePath) -> Result<(), ReuseError> {
        let (directory, name) = self.root.parent(path)?;
        let mut file = directory.open_file(name)?;
        let status = Status::of(&file)
            .map_err(|errno| directory.error("read the status of", name, errno))?;
        if status.size_bytes != object.size_bytes {
            return Err(ReuseError::Changed);
        }
        let mut receiving = self.cache.receive(object.id, object.size_bytes)?;
        if receiving.share(&file, &mut |bytes| self.pace(bytes))? {
            return Ok(receiving.finish()?);
        }
        if !self.may_copy {
            return Err(ReuseError::NoSpace);
        }
        self.copy(&mut file, &mut receiving)?;
        Ok(receiving.finish()?)
    }

    fn copy(
        &self,
        file: &mut File,
        receiving: &mut crate::cache::receive::Receiving<'_>,
    ) -> Result<(), ReuseError> {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            if self.stop.is_cancelled() {
                return Err(ReuseError::Stopping);
            }
            match file.read(&mut buffer)? {
                0 => return Ok(()),
                length => {
                    receiving.write(&buffer[..length])?;
                    self.pace(length as u64);
                }
            }
        }
    }

    /// Limits reading and copying to the rate of writing: copying uses no more of the device than
    /// fetching.
    fn pace(&self, bytes: u64) {
        let mut wait = self.budgets.write.charge(bytes);
        while let Some(time) = wait.filter(|_| !self.stop.is_cancelled()) {
            std::thread::sleep(time);
            wait = self.budgets.write.charge(0);
        }
    }
}

/// Returns the files of `tree` that had the content of `missing` when they were scanned.
fn candidates(tree: &Tree, missing: &[FetchObject]) -> BTreeMap<ObjectId, Vec<TreePath>> {
    let mut candidates: BTreeMap<ObjectId, Vec<TreePath>> =
        missing.iter().map(|object| (object.id, Vec::new())).collect();
    // Paths are built only for directories and for matching files.
    let mut stack = vec![(TreePath::root(), Arc::clone(tree.root()))];
    while let Some((path, directory)) = stack.pop() {
        for entry in directory.entries() {
            let at = || path.join(entry.name.as_bytes()).ok();
            match &entry.child {
                Child::Directory(below) => {
                    stack.extend(at().map(|path| (path, Arc::clone(below))));
                }
                Child::Leaf(Leaf::File(file)) => {
                    if let Some(paths) = candidates.get_mut(&file.object.id())
                        && paths.len() < CANDIDATES_MAX
                    {
                        paths.extend(at());
                    }
                }
                Child::Leaf(_) => {}
            }
        }
    }
    candidates.retain(|_, paths| !paths.is_empty());
    candidates
}
