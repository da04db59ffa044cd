//! The metadata pass: walks the whole tree by directory descriptors and hashes changed files.
//!
//! The walk is in component order and keeps its own stack, so that a deep tree costs memory and not
//! the stack of the thread; only the deepest `OPEN_MAX` descriptors are kept open. No concurrent
//! change of the tree is fatal: an entry that cannot be recorded is left out, and its directory is
//! listed as one with content outside the scan, so that it never counts as empty.
//!
//! Through the handle of the root nothing is mounted upon its paths: what lies under the mount
//! points of the machine is walked. Where the handle cannot see under them, the kernel refuses to
//! cross them (`EXDEV`). Another file-system is also detected by its number, as of btrfs
//! subvolumes, and is not entered. The paths that the machine uses as mount points or swap files
//! are read at the beginning of the pass.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::subd::UNREADABLE_MAX;
use model::path::TreePath;
use model::plan::{Occupant, RefusedChange, RefusedKind};
use model::tree::{Child, Metadata, Name, Tree, TreeError, Xattrs};
use nix::errno::Errno;
use system::clock::wall;

use crate::limits::cpu_time;
use crate::root::{Directory, Root, RootError, Status};
use crate::scan::coverage::{PathAction, PathCoverage};
use crate::scan::known_entries::{
    DamagedFiles, KnownDirectory, KnownEntries, LinkGroups, Mark, Stamp,
};
use crate::scan::pass::directory_walk::{DirectoryWalk, Listing, collapse};
use crate::scan::pass::entry::EntryRead;
use crate::scan::progress::{Counters, Progress};
use crate::scan::reading::{HOLE_BYTES_MAX, Unfinished};

mod directory_walk;
mod entry;

/// How many directories are held open at once; the ones above are opened again when needed.
const OPEN_MAX: usize = 64;

/// The pass is throttled after so many entries of a directory.
const THROTTLE_ENTRIES: usize = 256;

/// The most files whose reading is continued by the next pass.
pub const UNFINISHED_MAX: usize = 64;

/// How often a changing entry is read in one pass.
const TRIES: usize = 3;

/// What a complete pass found.
#[derive(Debug)]
pub struct PassResult {
    /// What could be recorded.
    pub tree: Tree,
    /// Directories with content that was not recorded, sorted.
    pub kept_directories: Vec<TreePath>,
    /// Files that have names outside the tree, sorted.
    pub externally_linked: Vec<TreePath>,
    /// Paths of the tree that the kernel uses, sorted.
    pub occupied: Vec<(TreePath, Occupant)>,
    /// What could not be read, sorted by path.
    pub unreadable: Vec<(TreePath, String)>,
    /// Directories of the tree with too many entries, which are left alone, sorted by path.
    pub left_alone: Vec<RefusedChange>,
    /// Processor time that was not spent on hashing.
    pub cpu: Duration,
}

/// A pass has no result. What it has read is kept in its memory.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    #[error("the pass was interrupted")]
    Interrupted,
    #[error("the scan needs more open files or memory than it gets")]
    Shortage { source: RootError },
    #[error("the root cannot be scanned")]
    Root { source: RootError },
    #[error("the root is not a valid directory")]
    Tree { source: TreeError },
}

/// The inputs of a pass.
pub struct PassContext<'task> {
    pub root: &'task Root,
    /// Which paths are scanned.
    pub coverage: &'task PathCoverage,
    /// Paths that are read even if their metadata is unchanged.
    pub reread_paths: &'task BTreeSet<TreePath>,
    /// Files that are read around the page cache.
    pub medium: &'task DamagedFiles,
    /// How long files may be read altogether, and each of them in any case.
    pub reading_max: Duration,
    pub reading_min: Duration,
    /// A directory that has more entries in the scope is left alone.
    pub directory_entries_max: usize,
    /// Set by others to end the pass early.
    pub interrupt: &'task AtomicBool,
    pub counters: &'task Counters,
    /// Records the progress of the pass.
    pub progress: &'task Progress,
    /// Called after each piece of work; sleeps to stay within the budgets.
    pub throttle: &'task dyn Fn(),
}

/// What a pass leaves for the next one.
#[derive(Default)]
pub struct PassMemory {
    root: Option<KnownDirectory>,
    /// Files whose reading was left, at most [`UNFINISHED_MAX`]: others start again.
    pub unfinished: BTreeMap<TreePath, Unfinished>,
}

impl PassMemory {
    /// Returns a memory with what this one has read to its end.
    pub fn copy(&self) -> Self {
        Self { root: self.root.clone(), unfinished: BTreeMap::new() }
    }
}

/// Walks the tree once. `memory` is what the last pass left, and then what this pass leaves.
///
/// # Errors
///
/// [`PassError`]; `memory` then still holds all that was read before.
pub fn run(
    task: &PassContext<'_>,
    memory: &mut PassMemory,
    buffer: &mut [u8],
) -> Result<PassResult, PassError> {
    let start = cpu_time();
    let directory =
        task.root.directory(&TreePath::root()).map_err(|source| PassError::Root { source })?;
    let status = directory.status().map_err(|source| PassError::Root { source })?;
    let occupied = task.root.used_paths().map_err(|source| PassError::Root { source })?;
    let mut walk = Walk {
        task,
        buffer,
        filesystem: status.filesystem,
        links: LinkGroups::default(),
        kept: Vec::new(),
        unreadable: Vec::new(),
        left_alone: Vec::new(),
        hashing: Duration::ZERO,
        hole_bytes_left: HOLE_BYTES_MAX,
        reading_left: task.reading_max,
        unfinished: &mut memory.unfinished,
        shortage: None,
    };
    let former = memory.root.take();
    let root = match walk.start_directory(directory, status, None, 0, former) {
        Ok(directory_walk) => directory_walk,
        Err((source, former)) => {
            memory.root = former;
            return Err(PassError::Root { source });
        }
    };
    let (result, left) = walk.walk(root);
    memory.root = left;
    let tree = match (result, walk.shortage.take()) {
        (Err(_), Some(source)) => return Err(PassError::Shortage { source }),
        (result, _) => result?,
    };
    walk.kept.sort_unstable();
    walk.unreadable.sort_unstable();
    walk.left_alone.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    let links = walk.links;
    let is_there = |path: &TreePath| tree.get(path).is_some();
    walk.unfinished.retain(|path, _| is_there(path));
    let occupied = occupied.into_iter().filter(|(path, _)| is_there(path)).collect();
    Ok(PassResult {
        tree,
        occupied,
        kept_directories: walk.kept,
        externally_linked: links.externally_linked(),
        unreadable: walk.unreadable,
        left_alone: walk.left_alone,
        cpu: cpu_time().saturating_sub(start).saturating_sub(walk.hashing),
    })
}

/// The pass ends early: interrupted, or without resources.
struct Interrupted;

struct Walk<'walk> {
    task: &'walk PassContext<'walk>,
    buffer: &'walk mut [u8],
    filesystem: u64,
    links: LinkGroups,
    kept: Vec<TreePath>,
    unreadable: Vec<(TreePath, String)>,
    left_alone: Vec<RefusedChange>,
    hashing: Duration,
    /// How many more bytes of holes are hashed.
    hole_bytes_left: u64,
    /// How much longer files may be read.
    reading_left: Duration,
    unfinished: &'walk mut BTreeMap<TreePath, Unfinished>,
    shortage: Option<RootError>,
}

impl Walk<'_> {
    /// Walks all below `root`. Returns the tree, and what is left for the next pass even without a
    /// tree.
    fn walk(&mut self, root: DirectoryWalk) -> (Result<Tree, PassError>, Option<KnownDirectory>) {
        let mut stack = vec![root];
        while let Some(mut directory_walk) = stack.pop() {
            if let Err(why) = directory_walk.reopen(self.task.root) {
                self.give_up(&directory_walk.path, why);
                match stack.last_mut() {
                    Some(parent) => parent.kept = true,
                    None => return (Err(PassError::Interrupted), None),
                }
                continue;
            }
            match self.entries(&mut directory_walk) {
                Ok(Some(below)) => {
                    stack.push(directory_walk);
                    stack.push(below);
                    if let Some(far) = stack.len().checked_sub(OPEN_MAX + 1) {
                        stack[far].directory = None;
                    }
                }
                Ok(None) => match self.close(directory_walk, stack.last_mut()) {
                    Ok(None) => {}
                    Ok(Some((tree, memory))) => return (Ok(tree), Some(memory)),
                    Err(source) => return (Err(PassError::Tree { source }), None),
                },
                Err(Interrupted) => {
                    stack.push(directory_walk);
                    return (Err(PassError::Interrupted), collapse(stack));
                }
            }
        }
        // Not reached: the root is closed last.
        (Err(PassError::Interrupted), None)
    }

    /// Reads the entries of `directory_walk` up to the next directory, which is returned, or the
    /// end.
    fn entries(
        &mut self,
        directory_walk: &mut DirectoryWalk,
    ) -> Result<Option<DirectoryWalk>, Interrupted> {
        self.task.progress.at(&directory_walk.path);
        while !self.interrupted() {
            if directory_walk.names.len().is_multiple_of(THROTTLE_ENTRIES) {
                (self.task.throttle)();
            }
            let Some(name) = directory_walk.names.next() else { return Ok(None) };
            if let Some(below) = self.entry(directory_walk, name)? {
                return Ok(Some(below));
            }
        }
        Err(Interrupted)
    }

    fn interrupted(&self) -> bool {
        self.task.interrupt.load(Ordering::Acquire)
    }

    fn give_up(&mut self, path: &TreePath, why: String) {
        if self.unreadable.len() < UNREADABLE_MAX {
            self.unreadable.push((path.clone(), why));
        }
    }

    fn leave_alone(&mut self, path: &TreePath) {
        let max = self.task.directory_entries_max;
        let why = format!("it has more than {max} entries, and is left as it is");
        self.give_up(path, why.clone());
        let (path, kind) = (path.clone(), RefusedKind::LeftAlone);
        self.left_alone.push(RefusedChange { path, kind, why });
    }

    /// Builds the directory whose entries are all read, and adds it to its parent. Returns the tree
    /// if it is the root.
    fn close(
        &mut self,
        directory_walk: DirectoryWalk,
        parent: Option<&mut DirectoryWalk>,
    ) -> Result<Option<(Tree, KnownDirectory)>, TreeError> {
        if directory_walk.kept {
            self.kept.push(directory_walk.path.clone());
        }
        if directory_walk.is_left_alone {
            self.leave_alone(&directory_walk.path);
        }
        let metadata = Metadata {
            mode: directory_walk.status.mode,
            uid: directory_walk.status.uid,
            gid: directory_walk.status.gid,
            xattrs: directory_walk.xattrs.clone(),
        };
        let algorithm = self.task.coverage.settings().algorithm;
        let made = directory_walk.entries.finish(algorithm, metadata);
        let memory = |built| KnownDirectory {
            stamp: directory_walk.stamp,
            xattrs: directory_walk.xattrs,
            built: Some(built),
            entries: KnownEntries::OfBuilt(directory_walk.marks.into_boxed_slice()),
        };
        let (Some(parent), Some(name)) = (parent, directory_walk.name) else {
            let directory = made?;
            return Ok(Some((Tree::new(Arc::clone(&directory)), memory(directory))));
        };
        match made {
            Ok(directory) => {
                let memory = Box::new(memory(Arc::clone(&directory)));
                parent.record(name, Child::Directory(directory), Mark::Directory(memory));
            }
            Err(error) => {
                parent.kept = true;
                self.give_up(&directory_walk.path, error.to_string());
            }
        }
        Ok(None)
    }

    /// Reads the entry `name` of `directory_walk`. Returns the walk of it if it is a directory.
    fn entry(
        &mut self,
        directory_walk: &mut DirectoryWalk,
        name: Box<[u8]>,
    ) -> Result<Option<DirectoryWalk>, Interrupted> {
        let (Ok(path), Ok(name)) = (directory_walk.path.join(&name), Name::try_from(name)) else {
            directory_walk.kept = true;
            self.give_up(&directory_walk.path, "it holds a name that no image can hold".to_owned());
            return Ok(None);
        };
        let mut former = directory_walk.recall(&name);
        let mut why = "it changes all the time".to_owned();
        for left in (0..TRIES).rev() {
            match self.read_entry(directory_walk, &path, &name, &mut former, left)? {
                None => return Ok(None),
                Some(EntryRead::Leaf(leaf, mark)) => {
                    directory_walk.record(name, Child::Leaf(leaf), mark);
                    return Ok(None);
                }
                Some(EntryRead::Directory(below)) => return Ok(Some(below)),
                Some(EntryRead::Changed) => {}
                Some(EntryRead::Foreign) => {
                    directory_walk.kept = true;
                    return Ok(None);
                }
                Some(EntryRead::Unreadable(text)) => {
                    why = text;
                    break;
                }
                Some(EntryRead::Shortage(error)) => {
                    self.shortage = Some(error);
                    return Err(Interrupted);
                }
            }
        }
        directory_walk.kept = true;
        self.give_up(&path, why);
        Ok(None)
    }

    /// Starts the walk of an open directory. Returns `former` with the error if it cannot be read.
    fn start_directory(
        &self,
        directory: Directory,
        status: Status,
        name: Option<Name>,
        depth: usize,
        former: Option<KnownDirectory>,
    ) -> Result<DirectoryWalk, (RootError, Option<KnownDirectory>)> {
        let attributes = self.task.coverage.settings().attributes;
        let known = former.as_ref().filter(|former| {
            former.stamp.holds_attributes(&status, attributes)
                && !self.task.reread_paths.contains(directory.path())
        });
        let stamp = match known {
            Some(former) => former.stamp,
            None => Stamp::new(&status, wall(), attributes, self.task.root.times()),
        };
        let read = || -> Result<_, RootError> {
            let xattrs = match known {
                Some(former) => former.xattrs.clone(),
                None => Xattrs::from_iter(directory.own_xattrs(attributes)?),
            };
            Ok((xattrs, self.list(&directory)?))
        };
        match read() {
            Ok((xattrs, listing)) => Ok(DirectoryWalk::new(
                directory,
                status,
                stamp,
                name,
                depth,
                (xattrs, listing),
                former,
            )),
            Err(error) => Err((error, former)),
        }
    }

    /// Lists the entries that are recorded.
    fn list(&self, directory: &Directory) -> Result<Listing, RootError> {
        let (mut is_kept, mut seen) = (false, 0_usize);
        let names = directory.names_that(self.task.directory_entries_max, |name| {
            seen += 1;
            if seen.is_multiple_of(THROTTLE_ENTRIES) {
                self.task.progress.at(directory.path());
                (self.task.throttle)();
            }
            // Nothing of a pass that is interrupted counts.
            if self.interrupted() {
                return false;
            }
            let action = directory.path().join(name).map(|path| self.task.coverage.action(&path));
            is_kept |= action == Ok(PathAction::Keep);
            // A name that no image can hold is named later.
            action.unwrap_or(PathAction::Record) == PathAction::Record
        });
        match names {
            Ok(names) => Ok(Listing { names, is_kept, is_left_alone: false }),
            Err(error) if error.errno() == Some(Errno::EOVERFLOW) => {
                Ok(Listing { names: Vec::new(), is_kept: true, is_left_alone: true })
            }
            Err(error) => Err(error),
        }
    }
}
