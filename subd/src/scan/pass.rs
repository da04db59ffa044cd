//! The metadata pass: walks the whole tree by directory descriptors and hashes what has moved.
//!
//! The walk is in component order and keeps its own stack, so that a deep tree costs memory and
//! not the stack of the thread; of the descriptors only the deepest `OPEN_MAX` are kept open.
//! Nothing that happens to the tree meanwhile is fatal: what cannot be recorded is left out, and
//! its directory is listed as one that holds content outside the scan, so that it is never taken
//! for empty.
//!
//! Through the handle of the root nothing is mounted upon its paths: what lies under the mount
//! points of the machine is walked. Where the handle cannot see under them, the kernel refuses to
//! cross them (`EXDEV`). Another file-system is also told by its number, as btrfs subvolumes show
//! one, and is not entered. Which paths the machine uses as mount points or swap files is asked at
//! the beginning of the pass.

mod frame;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use model::escape::ByteText;
use model::path::{DEPTH_MAX, TreePath};
use model::plan::Occupant;
use model::tree::{Child, Entry, Leaf, Metadata, Name, Tree, TreeError, Xattrs};
use nix::errno::Errno;

use self::frame::Frame;
use super::counters::Counters;
use super::links::LinkGroups;
use super::medium::OnMedium;
use super::memory::{Content, DirectoryMemory, LeafMemory, Memory, Stamp, assemble, leaf_of};
use super::reading::Reading;
use crate::limits::usage::cpu_time;
use crate::root::{Directory, Kind, Root, RootError, Status};
use crate::scan::coverage::{PathAction, PathCoverage};
use crate::scan::progress::Progress;
use system::clock::wall;

/// How many directories are held open at once; the ones above are opened again when needed.
const OPEN_MAX: usize = 64;

/// After how many entries of a directory it is asked whether to rest.
const BRAKE_ENTRIES: usize = 256;

/// How often an entry that changes while it is read is read in one pass.
const TRIES: usize = 3;

/// The most unreadable paths that are reported.
const UNREADABLE_MAX: usize = 100;

/// What a complete pass found.
#[derive(Debug)]
pub struct Found {
    /// All that could be recorded.
    pub tree: Tree,
    /// Directories that hold what was not recorded, sorted.
    pub kept_directories: Vec<TreePath>,
    /// Files that have names outside the tree, sorted.
    pub externally_linked: Vec<TreePath>,
    /// Paths of the tree that the kernel uses, sorted.
    pub occupied: Vec<(TreePath, Occupant)>,
    /// What could not be read, sorted by path.
    pub unreadable: Vec<(TreePath, String)>,
    /// Processor time that was not spent on hashing.
    pub cpu: Duration,
}

/// Why a pass has no result. What it had read is in the memory all the same.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// It was told to get out of the tree.
    #[error("the pass was interrupted")]
    Interrupted,
    /// The system is short of something, so that what is there could not be told from what is not.
    #[error("the scan lacks means")]
    Shortage {
        /// Of what.
        source: RootError,
    },
    /// The root itself could not be read.
    #[error("the root cannot be scanned")]
    Root {
        /// Why.
        source: RootError,
    },
    /// The root directory breaks a rule of trees.
    #[error("the root is no directory of a tree")]
    Tree {
        /// Which rule.
        source: TreeError,
    },
}

/// What a pass is given.
pub struct Task<'task> {
    /// The tree.
    pub root: &'task Root,
    /// Which paths to look at.
    pub coverage: &'task PathCoverage,
    /// Paths to be read whatever their metadata says.
    pub distrusted: &'task BTreeSet<TreePath>,
    /// Files to be read around the page cache.
    pub medium: &'task OnMedium,
    /// Set by others to end the pass early.
    pub interrupt: &'task AtomicBool,
    /// Where to count.
    pub counters: &'task Counters,
    /// Where to say what the pass is at.
    pub progress: &'task Progress,
    /// Called after each piece of work; rests when it was too much.
    pub brake: &'task dyn Fn(),
}

/// Walks the tree once; `memory` is what the last pass left, and then what this one leaves.
///
/// # Errors
///
/// [`PassError`]; `memory` then still holds all that was read before.
pub fn run(
    task: &Task<'_>,
    memory: &mut Option<DirectoryMemory>,
    buffer: &mut [u8],
) -> Result<Found, PassError> {
    let start = cpu_time();
    let directory =
        task.root.directory(&TreePath::root()).map_err(|source| PassError::Root { source })?;
    let status = directory.status().map_err(|source| PassError::Root { source })?;
    let occupied = task.root.occupied().map_err(|source| PassError::Root { source })?;
    let mut walk = Walk {
        task,
        buffer,
        filesystem: status.filesystem,
        links: LinkGroups::default(),
        kept: Vec::new(),
        unreadable: Vec::new(),
        hashing: Duration::ZERO,
        shortage: None,
    };
    let root = match walk.frame(directory, status, Box::default(), 0, memory.take()) {
        Ok(frame) => frame,
        Err((source, former)) => {
            *memory = former;
            return Err(PassError::Root { source });
        }
    };
    let (result, left) = walk.walk(root);
    *memory = left;
    let tree = match (result, walk.shortage.take()) {
        (Err(_), Some(source)) => return Err(PassError::Shortage { source }),
        (result, _) => result?,
    };
    walk.kept.sort_unstable();
    walk.unreadable.sort_unstable();
    let links = walk.links;
    let is_there = |path: &TreePath| tree.get(path).is_some();
    let occupied = occupied.into_iter().filter(|(path, _)| is_there(path)).collect();
    Ok(Found {
        tree,
        occupied,
        kept_directories: walk.kept,
        externally_linked: links.externally_linked(),
        unreadable: walk.unreadable,
        cpu: cpu_time().saturating_sub(start).saturating_sub(walk.hashing),
    })
}

/// What one look at an entry gave.
#[expect(clippy::large_enum_variant, reason = "one at a time; a box is an allocation an entry")]
enum Seen {
    Leaf(Leaf, Option<LeafMemory>),
    Directory(Frame),
    /// It went, or became something else: look again.
    Changed,
    /// Something is mounted there.
    Foreign,
    Unreadable(String),
    /// Not a matter of the entry: the pass has to end.
    Shortage(RootError),
}

/// The pass ends early: interrupted, or short of means.
struct Interrupted;

struct Walk<'walk> {
    task: &'walk Task<'walk>,
    buffer: &'walk mut [u8],
    filesystem: u64,
    links: LinkGroups,
    kept: Vec<TreePath>,
    unreadable: Vec<(TreePath, String)>,
    hashing: Duration,
    shortage: Option<RootError>,
}

impl Walk<'_> {
    /// Walks all below `root`; gives the tree and what to remember, even without a tree.
    fn walk(&mut self, root: Frame) -> (Result<Tree, PassError>, Option<DirectoryMemory>) {
        let mut stack = vec![root];
        while let Some(mut frame) = stack.pop() {
            if let Err(why) = frame.reopen(self.task.root) {
                self.give_up(&frame.path, why);
                match stack.last_mut() {
                    Some(parent) => parent.kept = true,
                    None => return (Err(PassError::Interrupted), None),
                }
                continue;
            }
            match self.entries(&mut frame) {
                Ok(Some(below)) => {
                    stack.push(frame);
                    stack.push(below);
                    if let Some(far) = stack.len().checked_sub(OPEN_MAX + 1) {
                        stack[far].directory = None;
                    }
                }
                Ok(None) => match self.close(frame, stack.last_mut()) {
                    Ok(None) => {}
                    Ok(Some((tree, memory))) => return (Ok(tree), Some(memory)),
                    Err(source) => return (Err(PassError::Tree { source }), None),
                },
                Err(Interrupted) => {
                    stack.push(frame);
                    return (Err(PassError::Interrupted), frame::collapse(stack));
                }
            }
        }
        // Not reached: the root is closed last.
        (Err(PassError::Interrupted), None)
    }

    /// Looks at the entries of `frame` up to the next directory, which is given, or the end.
    fn entries(&mut self, frame: &mut Frame) -> Result<Option<Frame>, Interrupted> {
        self.task.progress.at(&frame.path);
        while !self.interrupted() {
            if frame.names.len().is_multiple_of(BRAKE_ENTRIES) {
                (self.task.brake)();
            }
            let Some(name) = frame.names.next() else { return Ok(None) };
            if let Some(below) = self.entry(frame, name)? {
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

    /// Makes the directory of a frame whose entries are all read, and hands it to its parent; the
    /// root gives the tree.
    fn close(
        &mut self,
        frame: Frame,
        parent: Option<&mut Frame>,
    ) -> Result<Option<(Tree, DirectoryMemory)>, TreeError> {
        if frame.kept {
            self.kept.push(frame.path.clone());
        }
        let metadata = Metadata {
            mode: frame.status.mode,
            uid: frame.status.uid,
            gid: frame.status.gid,
            xattrs: frame.xattrs.clone(),
        };
        let algorithm = self.task.coverage.settings().algorithm;
        let made = assemble(algorithm, metadata, frame.entries, frame.built);
        let mut entries = frame.after;
        entries.shrink_to_fit();
        let memory =
            |built| DirectoryMemory { stamp: frame.stamp, xattrs: frame.xattrs, built, entries };
        let Some(parent) = parent else {
            let directory = made?;
            return Ok(Some((Tree::new(Arc::clone(&directory)), memory(Some(directory)))));
        };
        match made.and_then(|directory| Ok((Name::new(&frame.name)?, directory))) {
            Ok((name, directory)) => {
                let memory = memory(Some(Arc::clone(&directory)));
                parent.entries.push(Entry { name, child: Child::Directory(directory) });
                parent.after.push((frame.name, Memory::Directory(Box::new(memory))));
            }
            Err(error) => {
                parent.kept = true;
                self.give_up(&frame.path, error.to_string());
            }
        }
        Ok(None)
    }

    /// Looks at the entry `name` of `frame`; gives the frame of a directory to be walked.
    fn entry(&mut self, frame: &mut Frame, name: Box<[u8]>) -> Result<Option<Frame>, Interrupted> {
        let mut former = frame.recall(&name);
        let (Ok(path), Ok(entry_name)) = (frame.path.join(&name), Name::new(&name)) else {
            frame.kept = true;
            self.give_up(&frame.path, "it holds a name that no image can hold".to_owned());
            return Ok(None);
        };
        match self.task.coverage.look(&path) {
            PathAction::Record => {}
            PathAction::Ignore => return Ok(None),
            PathAction::Keep => {
                frame.kept = true;
                return Ok(None);
            }
        }
        let mut why = "it changes all the time".to_owned();
        for left in (0..TRIES).rev() {
            match self.look(frame, &path, &name, &mut former, left)? {
                None => return Ok(None),
                Some(Seen::Leaf(leaf, memory)) => {
                    frame.entries.push(Entry { name: entry_name, child: Child::Leaf(leaf) });
                    if let Some(memory) = memory {
                        frame.after.push((name, Memory::Leaf(memory)));
                    }
                    return Ok(None);
                }
                Some(Seen::Directory(below)) => return Ok(Some(below)),
                Some(Seen::Changed) => {}
                Some(Seen::Foreign) => {
                    frame.kept = true;
                    return Ok(None);
                }
                Some(Seen::Unreadable(text)) => {
                    why = text;
                    break;
                }
                Some(Seen::Shortage(error)) => {
                    self.shortage = Some(error);
                    return Err(Interrupted);
                }
            }
        }
        frame.kept = true;
        self.give_up(&path, why);
        Ok(None)
    }

    /// Looks at an entry once; `None` if it is not there. `left` more looks may follow.
    fn look(
        &mut self,
        frame: &Frame,
        path: &TreePath,
        name: &[u8],
        former: &mut Option<Memory>,
        left: usize,
    ) -> Result<Option<Seen>, Interrupted> {
        let Some(directory) = &frame.directory else { return Ok(Some(Seen::Changed)) };
        let status = match directory.stat(name) {
            Ok(status) => status,
            Err(error) if error.is_absent() => return Ok(None),
            Err(error) => return Ok(Some(failure(&error))),
        };
        let seen = match status.kind {
            Kind::File => {
                let former = former.take().and_then(Memory::into_leaf);
                self.file(directory, path, name, status, former, left)?
            }
            Kind::Symlink | Kind::Special(_) => {
                if matches!(status.kind, Kind::Special(_)) {
                    self.links.special(&status, path);
                }
                let former = former.take().and_then(Memory::into_leaf);
                self.small(directory, path, name, status, former)
            }
            Kind::Directory => self.enter(frame, directory, name, former.take()),
            Kind::Other => Seen::Unreadable("a socket cannot be part of an image".to_owned()),
        };
        Ok(Some(seen))
    }

    fn file(
        &mut self,
        directory: &Directory,
        path: &TreePath,
        name: &[u8],
        status: Status,
        former: Option<LeafMemory>,
        left: usize,
    ) -> Result<Seen, Interrupted> {
        if status.links > 1
            && let Some(carrier) = self.links.meet(&status)
        {
            return Ok(Seen::Leaf(Leaf::HardLink(carrier.clone()), None));
        }
        let settings = self.task.coverage.settings();
        let attributes = settings.attributes;
        let distrusted = self.task.distrusted.contains(path);
        let known = former.filter(|memory| {
            !distrusted && memory.content_of(&status, settings.algorithm).is_some()
        });
        let (memory, status) = match known {
            Some(memory) if memory.stamp.holds_attributes(&status, attributes) => (memory, status),
            Some(memory) => {
                let stamp = Stamp::new(&status, wall(), attributes, self.task.root.times());
                match directory.xattrs(name, attributes) {
                    Ok(xattrs) => {
                        let xattrs = Xattrs::from_iter(xattrs);
                        (LeafMemory { stamp, xattrs, ..memory }, status)
                    }
                    Err(error) => return Ok(failure(&error)),
                }
            }
            None => match self.read(directory, path, name, &status, left)? {
                Ok(read) => read,
                Err(seen) => return Ok(seen),
            },
        };
        self.links.carry(&status, path);
        Ok(Seen::Leaf(leaf_of(&status, &memory), Some(memory)))
    }

    /// Reads a file; gives what to remember, and its status with the size that was read.
    fn read(
        &mut self,
        directory: &Directory,
        path: &TreePath,
        name: &[u8],
        expected: &Status,
        left: usize,
    ) -> Result<Result<(LeafMemory, Status), Seen>, Interrupted> {
        let settings = self.task.coverage.settings();
        let start = cpu_time();
        self.task.progress.at(path);
        let mut reading = match Reading::start(directory, name, settings.algorithm) {
            Ok(reading) => reading,
            Err(error) => return Ok(Err(failure(&error))),
        };
        if self.task.medium.has(path, reading.status())
            && let Err(errno) = reading.go_around_cache()
        {
            return Ok(Err(Seen::Unreadable(errno.desc().to_owned())));
        }
        loop {
            if self.interrupted() {
                return Err(Interrupted);
            }
            match reading.step(self.buffer) {
                Ok(0) => break,
                Ok(length) => {
                    self.task.counters.add_hashed(length);
                    (self.task.brake)();
                }
                Err(error) => return Ok(Err(Seen::Unreadable(error.to_string()))),
            }
        }
        self.hashing += cpu_time().saturating_sub(start);
        let was = match reading.finish(directory, name, Some(settings.attributes)) {
            Ok(was) => was,
            Err(error) => return Ok(Err(failure(&error))),
        };
        if was.status.inode != expected.inode || (!was.stable && left > 0) {
            return Ok(Err(Seen::Changed));
        }
        let stamp = if was.stable {
            Stamp::new(&was.status, was.started, settings.attributes, self.task.root.times())
        } else {
            Stamp::unsettled(&was.status, settings.attributes)
        };
        let content = Content::File(was.object);
        let memory = LeafMemory { stamp, content, xattrs: was.xattrs };
        Ok(Ok((memory, was.status)))
    }

    /// Looks at a symlink, device or fifo.
    fn small(
        &self,
        directory: &Directory,
        path: &TreePath,
        name: &[u8],
        status: Status,
        former: Option<LeafMemory>,
    ) -> Seen {
        let settings = self.task.coverage.settings();
        if let Some(memory) = former
            && !self.task.distrusted.contains(path)
            && memory.content_of(&status, settings.algorithm).is_some()
            && memory.stamp.holds_attributes(&status, settings.attributes)
        {
            return Seen::Leaf(leaf_of(&status, &memory), Some(memory));
        }
        let stamp = Stamp::new(&status, wall(), settings.attributes, self.task.root.times());
        let content = match status.kind {
            Kind::Special(device) => match directory.is_mount_point(name) {
                Ok(false) => Content::Special(device),
                Ok(true) => return Seen::Foreign,
                Err(error) => return failure(&error),
            },
            _ => match directory.read_link(name) {
                Ok(target) => Content::Symlink(ByteText(target)),
                Err(error) => return failure(&error),
            },
        };
        match directory.xattrs(name, settings.attributes) {
            Ok(xattrs) => {
                let memory = LeafMemory { stamp, content, xattrs: Xattrs::from_iter(xattrs) };
                Seen::Leaf(leaf_of(&status, &memory), Some(memory))
            }
            Err(error) => failure(&error),
        }
    }

    /// Opens a directory below `frame`.
    fn enter(
        &self,
        frame: &Frame,
        directory: &Directory,
        name: &[u8],
        former: Option<Memory>,
    ) -> Seen {
        let depth = frame.depth + 1;
        if depth >= DEPTH_MAX {
            return Seen::Unreadable(format!("it is deeper than {DEPTH_MAX} directories"));
        }
        let opened = directory.open_child(name).and_then(|below| {
            let status = below.status()?;
            Ok((below, status))
        });
        let (below, status) = match opened {
            Ok(opened) => opened,
            Err(error) => return failure(&error),
        };
        if status.filesystem != self.filesystem {
            return Seen::Foreign;
        }
        let former = former.and_then(Memory::into_directory);
        match self.frame(below, status, Box::from(name), depth, former) {
            Ok(frame) => Seen::Directory(frame),
            Err((error, _)) => failure(&error),
        }
    }

    /// Starts on an open directory; gives `former` back if it cannot be read.
    fn frame(
        &self,
        directory: Directory,
        status: Status,
        name: Box<[u8]>,
        depth: usize,
        former: Option<DirectoryMemory>,
    ) -> Result<Frame, (RootError, Option<DirectoryMemory>)> {
        let attributes = self.task.coverage.settings().attributes;
        let known = former.as_ref().filter(|former| {
            former.stamp.holds_attributes(&status, attributes)
                && !self.task.distrusted.contains(directory.path())
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
            Ok((xattrs, directory.names()?))
        };
        match read() {
            Ok((xattrs, names)) => {
                Ok(Frame::new(directory, status, stamp, name, depth, (xattrs, names), former))
            }
            Err(error) => Err((error, former)),
        }
    }
}

/// What an error in the middle of looking at an entry means for the entry.
fn failure(error: &RootError) -> Seen {
    match error.errno() {
        Some(Errno::EXDEV) => Seen::Foreign,
        Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => Seen::Shortage(error.clone()),
        // It was there a moment ago, or was of another kind.
        Some(
            Errno::ENOENT
            | Errno::ELOOP
            | Errno::ENOTDIR
            | Errno::EINVAL
            | Errno::ESTALE
            | Errno::ENXIO,
        ) => Seen::Changed,
        Some(errno) => Seen::Unreadable(errno.desc().to_owned()),
        None if matches!(error, RootError::NotRegular { .. }) => Seen::Changed,
        None => Seen::Unreadable(error.to_string()),
    }
}
