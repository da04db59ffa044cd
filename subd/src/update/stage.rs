//! Stages an update: everything that is new is made ready where nobody sees it.
//!
//! Each new entry gets its final content, owner, mode, attributes and time, and is then read back
//! and compared with what the plan wants. What is in the tree is compared with what the scan saw,
//! and noted, so that the steps can tell whether it is still there. When staging is done the
//! [`Script`] is complete.

use std::borrow::Cow;
use std::collections::BTreeMap;

use api::subd::Space;
use model::object::ObjectId;
use model::path::TreePath;
use model::report::report;
use model::scope::Attributes;
use model::tree::{Child, File, Leaf, Node, Special, Times, Tree};
use serde::{Deserialize, Serialize};

use super::locking::unlock;
use super::metadata::{Target, appearance_of, visible_difference};
use super::step::{Former, Script, Step};
use crate::cache::{Cache, CacheError, Retrieved};
use crate::fetch::shortage;
use crate::root::{Directory, Kind, Locks, Root, RootError, Status};
use crate::state::directories::remove_all;
use crate::update::step_plan::{PlannedStep, SlotPath, StagedEntry, StepPlan};

/// An update that cannot be staged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The file-system refused something.
    #[error("cannot stage {path}")]
    Root {
        /// What was to be staged.
        path: TreePath,
        /// What and why.
        source: RootError,
    },
    /// An object cannot be used.
    #[error("cannot stage {path}")]
    Object {
        /// What was to be staged.
        path: TreePath,
        /// Which object and why.
        source: CacheError,
    },
    /// The staging area itself cannot be used.
    #[error("cannot use the staging area")]
    Area {
        /// What and why.
        #[source]
        source: RootError,
    },
    /// The tree is not as it was scanned.
    #[error("{path} changed since it was scanned: {what}")]
    Changed {
        /// Where.
        path: TreePath,
        /// In what it differs.
        what: &'static str,
    },
    /// The files that have the same content as others do not fit on the file-system.
    #[error(
        "{need_bytes} bytes are needed for copies of objects and for new entries; \
         {free_bytes} bytes and {free_inodes} inodes are free"
    )]
    Space {
        /// What is needed, a reserve included, in bytes.
        need_bytes: u64,
        /// What is free, in bytes.
        free_bytes: u64,
        /// Inodes that are free.
        free_inodes: u64,
    },
    /// What was staged is not what is wanted: the file-system cannot hold it.
    #[error("{path} cannot be made as it is wanted: its {what} differs")]
    Mismatch {
        /// The path that it should have had.
        path: TreePath,
        /// In what it differs.
        what: &'static str,
    },
}

/// An object that was moved into the staging area.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenObject {
    /// The object.
    pub object: ObjectId,
    /// Where it is.
    pub place: SlotPath,
}

/// All that staging works with.
#[derive(Clone, Copy, Debug)]
pub struct Stager<'a> {
    /// The tree.
    pub root: &'a Root,
    /// The objects.
    pub cache: &'a Cache,
    /// Where the slots are.
    pub slots: &'a Directory,
    /// What the scan saw.
    pub scanned: &'a Tree,
    /// Which attributes are managed.
    pub managed: Attributes,
}

/// The name of a slot's entry.
#[must_use]
pub fn slot_name(slot: u32) -> Vec<u8> {
    slot.to_string().into_bytes()
}

/// Calls `act` with the directory in which `place` is, and its name there.
///
/// # Errors
///
/// [`RootError`] if the directory cannot be opened, and what `act` gives.
pub fn at_place<T, E: From<RootError>>(
    slots: &Directory,
    place: &SlotPath,
    act: impl FnOnce(&Directory, &[u8]) -> Result<T, E>,
) -> Result<T, E> {
    let slot = slot_name(place.slot);
    let Some(parent) = place.below.parent() else {
        return act(slots, &slot);
    };
    let mut holder = slots.open_child(&slot)?;
    for component in parent.components() {
        holder = holder.open_child(component)?;
    }
    act(&holder, place.below.name())
}

impl Stager<'_> {
    /// Stages everything and gives the script. `taken` gets the objects that were moved, also if
    /// staging fails.
    ///
    /// # Errors
    ///
    /// [`StageError`] names the path.
    pub fn stage(
        &self,
        update_id: u64,
        step_plan: &StepPlan,
        taken: &mut Vec<TakenObject>,
    ) -> Result<Script, StageError> {
        self.check_space(step_plan)?;
        let mut inodes: BTreeMap<u32, u64> = BTreeMap::new();
        let mut steps: Vec<Step> = Vec::new();
        for staged in &step_plan.staged {
            let (place, path) = (&staged.place, &staged.path);
            let fail = |source| StageError::Root { path: path.clone(), source };
            let inode = match &staged.what {
                StagedEntry::Entry { node, takes_object } => {
                    self.make(place, path, node, *takes_object, taken)?
                }
                StagedEntry::LinkToStaged(carrier) => self.link(carrier, place).map_err(fail)?,
                StagedEntry::LinkToLive(carrier) => {
                    let inode = self.live(carrier)?.inode;
                    let (carrier, place) = (carrier.clone(), place.clone());
                    steps.push(Step::Link { carrier, inode, place });
                    inode
                }
            };
            if place.below.is_root() {
                inodes.insert(place.slot, inode);
            }
        }
        for outline in &step_plan.steps {
            steps.push(self.step(outline, &inodes)?);
        }
        let steps = unlock(steps, |path| self.locks(path))?;
        self.root.sync_filesystem().map_err(|source| StageError::Area { source })?;
        Ok(Script { update_id, managed: self.managed, steps })
    }

    /// Checks that what has to be made anew fits, so that the disk is not filled in vain.
    fn check_space(&self, step_plan: &StepPlan) -> Result<(), StageError> {
        let space = self.root.space().map_err(|source| StageError::Area { source })?;
        let Space { free_bytes, free_inodes } = space;
        let mut made = step_plan.made().peekable();
        if made.peek().is_none() {
            return Ok(());
        }
        match shortage(made, space) {
            None => Ok(()),
            Some(need_bytes) => Err(StageError::Space { need_bytes, free_bytes, free_inodes }),
        }
    }

    /// Makes one entry, checks it, and gives its inode.
    fn make(
        &self,
        place: &SlotPath,
        path: &TreePath,
        node: &Node,
        takes_object: bool,
        taken: &mut Vec<TakenObject>,
    ) -> Result<u64, StageError> {
        at_place(self.slots, place, |holder, name| {
            match node {
                Node::Leaf(Leaf::File(file)) if takes_object => {
                    self.cache.take(&file.object, holder, name)?;
                    taken.push(TakenObject { object: file.object, place: place.clone() });
                }
                Node::Leaf(Leaf::File(file)) => self.cache.copy(&file.object, holder, name)?,
                Node::Directory(_) => holder.make_directory(name, 0o700)?,
                Node::Leaf(Leaf::Symlink(symlink)) => {
                    holder.make_symlink(name, &symlink.target.0)?;
                }
                Node::Leaf(Leaf::Special(special)) => {
                    holder.make_special(name, special.device, 0o600)?;
                }
                Node::Leaf(Leaf::Computed(_) | Leaf::HardLink(_)) => {
                    return Err(EntryError::Mismatch("kind"));
                }
            }
            let target = Target::Entry(holder, name);
            if let Some(appearance) = appearance_of(node) {
                target.dress(self.managed, &appearance)?;
            }
            match target.difference(self.managed, &kept_by(self.root.times(), node))? {
                Some(what) => Err(EntryError::Mismatch(what)),
                None => Ok(target.status()?.inode),
            }
        })
        .map_err(|trouble| match trouble {
            EntryError::Root(source) => StageError::Root { path: path.clone(), source },
            EntryError::Cache(source) => StageError::Object { path: path.clone(), source },
            EntryError::Mismatch(what) => StageError::Mismatch { path: path.clone(), what },
        })
    }

    /// Gives the file at `carrier` the further name `place`; both are staged.
    fn link(&self, carrier: &SlotPath, place: &SlotPath) -> Result<u64, RootError> {
        at_place(self.slots, carrier, |from, name| {
            at_place(self.slots, place, |to, new_name| {
                from.link(name, to, new_name)?;
                to.stat(new_name).map(|status| status.inode)
            })
        })
    }

    fn step(&self, outline: &PlannedStep, inodes: &BTreeMap<u32, u64>) -> Result<Step, StageError> {
        let inode_in = |slot: &u32| {
            *inodes.get(slot).expect("each slot that appears was filled before the steps are made")
        };
        Ok(match outline {
            PlannedStep::Appear { path, slot } => {
                self.check_absent(path)?;
                Step::Appear { path: path.clone(), slot: *slot, inode: inode_in(slot) }
            }
            PlannedStep::Exchange { path, slot, displaced } => Step::Exchange {
                path: path.clone(),
                slot: *slot,
                inode: inode_in(slot),
                former: former_of(&self.live(path)?),
                displaced: displaced.clone(),
            },
            PlannedStep::Vanish { path, slot } => {
                let former = former_of(&self.live(path)?);
                Step::Vanish { path: path.clone(), slot: *slot, former }
            }
            PlannedStep::Change { path, node } => {
                let status = self.live(path)?;
                let wanted = appearance_of(node);
                let wanted = wanted.expect("a change to a hard link is refused before");
                if visible_difference(&status, node) == Some("kind") {
                    return Err(StageError::Changed { path: path.clone(), what: "kind" });
                }
                // No tree tells of the other names, so nobody has said that they may change.
                if matches!(status.kind, Kind::Special(_)) && status.links > 1 {
                    return Err(StageError::Changed { path: path.clone(), what: "other names" });
                }
                let former = self.appearance(path, wanted.mtime.is_some())?;
                Step::Change { path: path.clone(), inode: status.inode, former, wanted }
            }
        })
    }

    /// Looks at what is at `path` and compares it with what the scan saw.
    fn live(&self, path: &TreePath) -> Result<Status, StageError> {
        let changed = |what| StageError::Changed { path: path.clone(), what };
        let scanned = match self.scanned.get(path) {
            None => return Err(changed("the scan saw nothing there")),
            Some(Child::Leaf(Leaf::HardLink(_))) => {
                let file = self.scanned.file(path);
                file.map(|file| Node::Leaf(Leaf::File(file)))
                    .ok_or_else(|| changed("the scan saw a link to nowhere"))?
            }
            Some(child) => child.node(),
        };
        let status = Target::with(self.root, path, |target| target.status())
            .map_err(|source| StageError::Root { path: path.clone(), source })?;
        match visible_difference(&status, &scanned) {
            Some(what) => Err(changed(what)),
            None => Ok(status),
        }
    }

    fn check_absent(&self, path: &TreePath) -> Result<(), StageError> {
        match Target::with(self.root, path, |target| target.status()) {
            Err(error) if error.is_absent() => Ok(()),
            Err(source) => Err(StageError::Root { path: path.clone(), source }),
            Ok(_) => {
                let what = "something is there now";
                Err(StageError::Changed { path: path.clone(), what })
            }
        }
    }

    /// The inode at `path` and its flags; `None` if nothing is there.
    fn locks(&self, path: &TreePath) -> Result<Option<(u64, Locks)>, StageError> {
        let read = || -> Result<_, RootError> {
            if path.is_root() {
                return self.root.directory(path)?.own_locks();
            }
            let (parent, name) = self.root.parent(path)?;
            parent.locks(name)
        };
        match read() {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.is_absent() => Ok(None),
            Err(source) => Err(StageError::Root { path: path.clone(), source }),
        }
    }

    fn appearance(
        &self,
        path: &TreePath,
        timed: bool,
    ) -> Result<super::step::Appearance, StageError> {
        Target::with(self.root, path, |target| target.appearance(self.managed, timed))
            .map_err(|source| StageError::Root { path: path.clone(), source })
    }
}

/// `node` with the time that is read back when its own is set.
fn kept_by(times: Times, node: &Node) -> Cow<'_, Node> {
    let mut kept = Cow::Borrowed(node);
    if let Node::Leaf(Leaf::File(File { mtime, .. }) | Leaf::Special(Special { mtime, .. })) = node
        && times.kept(*mtime) != *mtime
        && let Node::Leaf(Leaf::File(File { mtime, .. }) | Leaf::Special(Special { mtime, .. })) =
            kept.to_mut()
    {
        *mtime = times.kept(*mtime);
    }
    kept
}

fn former_of(status: &Status) -> Former {
    let directory = status.kind == Kind::Directory;
    let Status { inode, size_bytes, mtime, .. } = *status;
    Former { inode, directory, size_bytes, mtime }
}

/// What goes wrong while an entry is made; the path is added above.
enum EntryError {
    Root(RootError),
    Cache(CacheError),
    Mismatch(&'static str),
}

impl From<RootError> for EntryError {
    fn from(error: RootError) -> Self {
        Self::Root(error)
    }
}

impl From<CacheError> for EntryError {
    fn from(error: CacheError) -> Self {
        Self::Cache(error)
    }
}

/// Gives an update up: removes its slots, the directory `name` of `parent`, and puts the objects
/// that were taken back into the cache.
pub fn give_up(cache: &Cache, parent: &Directory, name: &[u8], taken: &[TakenObject]) {
    let retrieved = parent.open_child(name).map(|slots| retrieve(cache, &slots, taken));
    // Before the objects are put back, because it may hold further names of them.
    if let Err(error) = remove_all(parent, name) {
        tracing::warn!("cannot free what an update had staged: {}", report(&error));
    }
    match retrieved {
        Ok(retrieved) => {
            for one in retrieved {
                if let Err(error) = cache.restore(one) {
                    tracing::warn!("an object of a given-up update is lost: {}", report(&error));
                }
            }
        }
        Err(error) => tracing::error!("cannot put objects back: {}", report(&error)),
    }
}

fn retrieve(cache: &Cache, slots: &Directory, taken: &[TakenObject]) -> Vec<Retrieved> {
    let mut retrieved = Vec::new();
    for TakenObject { object, place } in taken {
        match at_place(slots, place, |holder, name| cache.retrieve(object, holder, name)) {
            Ok(one) => retrieved.push(one),
            Err(error) => {
                tracing::warn!("an object of a given-up update is lost: {}", report(&error));
                let _gone = cache.forget(&[*object]);
            }
        }
    }
    retrieved
}
