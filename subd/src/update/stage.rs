//! Stages an update: creates all new entries where no other program sees them.
//!
//! Each new entry gets its final content, owner, mode, attributes and time, and is then read back
//! and compared with the plan. The entries of the tree that the steps replace or change are
//! compared with the scan and recorded, so that the steps can detect later changes. After staging
//! the [`Script`] is complete.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use api::subd::FreeSpace;
use model::display::error_chain;
use model::object::ObjectId;
use model::path::TreePath;
use model::plan::RefusedKind;
use model::scope::Attributes;
use model::tree::{Child, File, Leaf, Node, Special, TimePrecision, Tree};
use nix::errno::Errno;
use rpc::tls::SuccessorError;
use serde::{Deserialize, Serialize};

use tokio_util::sync::CancellationToken;

use crate::cache::{Cache, CacheError, Retrieved, Visible};
use crate::fetch::policy::shortage;
use crate::provisioning::staged::ResourcesError;
use crate::root::{Directory, Kind, Locks, Root, RootError, Status};
use crate::state::directories::remove_all;
use crate::state::persisted_state::PersistError;
use crate::state::refusals::FailedChange;
use crate::tasks::staged::TasksError;
use crate::update::activate::is_gone;
use crate::update::metadata::{Target, metadata_of, visible_difference};
use crate::update::probe::Probe;
use crate::update::step::unlock;
use crate::update::step::{EntryMetadata, FormerEntry, Script, Step};
use crate::update::step_plan::{PlannedStep, SlotPath, StagedEntry, StagedItem, StepPlan};

/// A file-system with so much free space is not full.
const ROOM_BYTES: u64 = 16 << 20;

/// An update that cannot be staged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    #[error("cannot stage {path}")]
    Root {
        /// What was to be staged.
        path: TreePath,
        source: RootError,
    },
    #[error("cannot stage {path}")]
    Object {
        /// What was to be staged.
        path: TreePath,
        source: CacheError,
    },
    #[error("cannot use the staging area")]
    Area {
        #[source]
        source: RootError,
    },
    #[error("the daemon tasks of the image cannot be read")]
    Tasks {
        #[source]
        source: TasksError,
    },
    #[error("the resources of the image cannot be read")]
    Resources {
        #[source]
        source: ResourcesError,
    },
    #[error("{path} changed since it was scanned: {what}")]
    Changed { path: TreePath, what: &'static str },
    #[error("{path} is the root of another file-system")]
    OtherFileSystem { path: TreePath },
    #[error("{path} cannot be replaced: {why}")]
    Closed { path: TreePath, why: &'static str },
    #[error(
        "{need_bytes} bytes are needed for copies of objects and for new entries; \
         {free_bytes} bytes and {free_inodes} inodes are free"
    )]
    Space {
        /// Needed bytes with a reserve.
        need_bytes: u64,
        /// Free bytes.
        free_bytes: u64,
        free_inodes: u64,
    },
    #[error("{path} cannot be made as it is wanted: its {what} differs")]
    Mismatch {
        /// The path that it should have had.
        path: TreePath,
        what: &'static str,
    },
    #[error("with the new TLS files of subd nobody could give it orders any more")]
    LockedOut {
        #[source]
        source: SuccessorError,
    },
    #[error(
        "these TLS files of subd are not tried again before {until}: {why}. Find out why no \
         dominator connected, and order others, or let these be tried at once with `subtool \
         scan-now`"
    )]
    PutBack {
        /// Why others were put back.
        why: String,
        until: String,
    },
    #[error("cannot keep the present TLS files of subd, which it may need again")]
    FormerFiles {
        #[source]
        source: PersistError,
    },
    #[error("subd is stopping")]
    Stopping,
    /// Some changes of single paths would fail; never empty.
    #[error("{} cannot be changed: {}", changes[0].refused.path, first_of(changes))]
    Refused { changes: Vec<FailedChange> },
}

fn first_of(changes: &[FailedChange]) -> String {
    let why = &changes[0].refused.why;
    match changes.len() - 1 {
        0 => why.clone(),
        others => format!("{why} (and {others} other paths)"),
    }
}

/// An object that was moved into the staging area.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakenObject {
    pub object: ObjectId,
    pub place: SlotPath,
}

/// What of an entry must be as it was scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compared {
    /// Only its kind: it is replaced or removed, whatever its content is by then.
    Kind,
    /// Its kind, owner and mode: it gets other metadata.
    Rights,
    /// Also its content: it gets another name.
    All,
}

/// Stages the entries of one update.
#[derive(Clone, Copy, Debug)]
pub struct Stager<'a> {
    pub root: &'a Root,
    pub cache: &'a Cache,
    pub slots: &'a Directory,
    pub scanned: &'a Tree,
    pub managed: Attributes,
    pub stop: &'a CancellationToken,
}

/// Returns the name of a slot's entry.
pub fn slot_name(slot: u32) -> Vec<u8> {
    slot.to_string().into_bytes()
}

/// Calls `act` with the directory of `place`, and its name there.
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

/// The directory in a slot that was opened last: entries of one directory follow each other.
#[derive(Debug, Default)]
struct LastDirectory(Option<(SlotPath, Directory)>);

impl LastDirectory {
    /// Calls `act` with the directory of `place`, and its name there.
    fn at_place<T, E: From<RootError>>(
        &mut self,
        slots: &Directory,
        place: &SlotPath,
        act: impl FnOnce(&Directory, &[u8]) -> Result<T, E>,
    ) -> Result<T, E> {
        let Some(parent) = place.below.parent() else { return at_place(slots, place, act) };
        let parent = SlotPath { slot: place.slot, below: parent };
        let directory = match self.0.take() {
            Some((at, directory)) if at == parent => directory,
            _ => at_place(slots, &parent, |directory, name| directory.open_child(name))?,
        };
        let (_, directory) = self.0.insert((parent, directory));
        act(directory, place.below.name())
    }
}

impl Stager<'_> {
    /// Stages everything and returns the script. Adds the objects that were moved to `taken`, also
    /// if staging fails.
    pub fn stage(
        &self,
        update_id: u64,
        step_plan: &StepPlan,
        taken: &mut Vec<TakenObject>,
    ) -> Result<Script, StageError> {
        self.check_space(step_plan)?;
        let mut inodes: BTreeMap<u32, u64> = BTreeMap::new();
        let mut steps: Vec<Step> = Vec::new();
        let (mut failed, mut failed_slots) = (Vec::new(), BTreeSet::new());
        let mut last = LastDirectory::default();
        for staged in &step_plan.staged {
            self.check_not_stopping()?;
            let place = &staged.place;
            let needs_failed = match &staged.what {
                StagedEntry::LinkToStaged(carrier) => failed_slots.contains(&carrier.slot),
                _ => failed_slots.contains(&place.slot),
            };
            if needs_failed {
                failed_slots.insert(place.slot);
                continue;
            }
            match self.entry(staged, &mut last, taken, &mut steps) {
                Ok(inode) if place.below.is_root() => {
                    inodes.insert(place.slot, inode);
                }
                Ok(_) => {}
                Err(error) => {
                    failed_slots.insert(place.slot);
                    let kind = match &staged.what {
                        StagedEntry::Entry { node, .. } => {
                            RefusedKind::Become(Box::new(node.clone()))
                        }
                        _ => RefusedKind::Any,
                    };
                    failed.push(self.failed_change(error, kind)?);
                }
            }
        }
        let mut probe = Probe::new(self.root, self.slots);
        let mut spare_slot = step_plan.first_spare_slot();
        for planned in &step_plan.steps {
            self.check_not_stopping()?;
            let kind = match planned {
                PlannedStep::Appear { slot, .. } | PlannedStep::Exchange { slot, .. }
                    if failed_slots.contains(slot) =>
                {
                    continue;
                }
                PlannedStep::Vanish { .. } => RefusedKind::Removal,
                PlannedStep::Change { node, .. } => RefusedKind::Become(Box::new(node.clone())),
                PlannedStep::Appear { .. } | PlannedStep::Exchange { .. } => RefusedKind::Any,
            };
            match self.steps(planned, &inodes, &mut probe, &mut spare_slot) {
                Ok(tried) => steps.extend(tried),
                Err(error) => failed.push(self.failed_change(error, kind)?),
            }
        }
        drop(probe);
        if !failed.is_empty() {
            return Err(StageError::Refused { changes: failed });
        }
        let steps = unlock(steps, |path| self.locks(path))?;
        self.root.sync_filesystem().map_err(|source| StageError::Area { source })?;
        Ok(Script { update_id, managed: self.managed, steps })
    }

    fn check_not_stopping(&self) -> Result<(), StageError> {
        if self.stop.is_cancelled() { Err(StageError::Stopping) } else { Ok(()) }
    }

    /// Stages one entry, and returns its inode.
    fn entry(
        &self,
        staged: &StagedItem,
        last: &mut LastDirectory,
        taken: &mut Vec<TakenObject>,
        steps: &mut Vec<Step>,
    ) -> Result<u64, StageError> {
        let (place, path) = (&staged.place, &staged.path);
        match &staged.what {
            StagedEntry::Entry { node, takes_object } => last
                .at_place(self.slots, place, |directory, name| {
                    if *takes_object && let Node::Leaf(Leaf::File(file)) = node {
                        self.cache.take(&file.object.id(), directory, name)?;
                        taken.push(TakenObject { object: file.object.id(), place: place.clone() });
                    } else {
                        self.make(directory, name, node)?;
                    }
                    self.set_metadata(&Target::Entry(directory, name), node)
                })
                .map_err(|error| error.into_stage_error(path)),
            StagedEntry::LinkToStaged(carrier) => self
                .link(carrier, place)
                .map_err(|source| StageError::Root { path: path.clone(), source }),
            StagedEntry::LinkToLive(carrier) => {
                let inode = self.live(carrier, Compared::All)?.inode;
                let (carrier, place) = (carrier.clone(), place.clone());
                steps.push(Step::Link { carrier, inode, place });
                Ok(inode)
            }
        }
    }

    /// Returns the steps for a planned one: more than one if a directory must be replaced that
    /// cannot be moved.
    fn steps(
        &self,
        planned: &PlannedStep,
        inodes: &BTreeMap<u32, u64>,
        probe: &mut Probe<'_>,
        spare_slot: &mut u32,
    ) -> Result<Vec<Step>, StageError> {
        let step = self.step(planned, inodes)?;
        let area = |source| StageError::Area { source };
        if matches!(step, Step::Exchange { .. }) && !probe.exchanges().map_err(area)? {
            return self.entry_by_entry(step, spare_slot);
        }
        match self.try_out(&step, probe) {
            Ok(()) => Ok(vec![step]),
            // Such as a directory in the lower layer of an overlay.
            Err(StageError::Root { source, .. }) if source.errno() == Some(Errno::EXDEV) => {
                self.entry_by_entry(step, spare_slot)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the steps that do the same as `step` without moving a directory, and without an
    /// exchange.
    fn entry_by_entry(&self, step: Step, spare_slot: &mut u32) -> Result<Vec<Step>, StageError> {
        let (path, displaced, appears) = match step {
            Step::Exchange { path, slot, inode, displaced, .. } => {
                let appears = Step::Appear { path: path.clone(), slot, inode };
                (path, displaced, Some(appears))
            }
            other => (other.path().clone(), Vec::new(), None),
        };
        let mut steps = Vec::new();
        // The deepest first.
        for path in displaced.into_iter().rev().chain([path]) {
            let former = former_of(&self.live(&path, Compared::Kind)?);
            if former.directory {
                let former = self.entry_metadata(&path, false)?;
                steps.push(Step::RemoveDirectory { path, former });
            } else {
                steps.push(Step::Vanish { path, slot: *spare_slot, former });
                *spare_slot += 1;
            }
        }
        steps.extend(appears);
        Ok(steps)
    }

    /// Finds out whether the file-system would refuse a step.
    fn try_out(&self, step: &Step, probe: &mut Probe<'_>) -> Result<(), StageError> {
        let fail = |source| StageError::Root { path: step.path().clone(), source };
        let is_directory = |former: &FormerEntry| former.directory;
        match step {
            Step::Exchange { path, former, .. } | Step::Vanish { path, former, .. }
                if is_directory(former) =>
            {
                probe.directory_moves(path).map_err(fail)?;
            }
            Step::Change { former, wanted, .. }
                if former.metadata.xattrs != wanted.metadata.xattrs
                    || (former.metadata.uid, former.metadata.gid)
                        != (wanted.metadata.uid, wanted.metadata.gid) =>
            {
                let is_directory =
                    matches!(self.scanned.get(step.path()), Some(Child::Directory(_)));
                probe.takes_metadata(is_directory, self.managed, wanted).map_err(fail)?;
            }
            _ => {}
        }
        if let Step::Appear { path, .. } | Step::Exchange { path, .. } = step
            && let Some(why) = probe.refuses_entries(path).map_err(fail)?
        {
            return Err(StageError::Closed { path: path.clone(), why });
        }
        Ok(())
    }

    /// Returns the change that failed with `error`; other changes can be made without it.
    ///
    /// # Errors
    ///
    /// `error` if it is not about one path.
    fn failed_change(
        &self,
        error: StageError,
        kind: RefusedKind,
    ) -> Result<FailedChange, StageError> {
        match error {
            StageError::Changed { path, what } => {
                let why = format!("it changed since it was scanned: {what}");
                Ok(FailedChange::race(&path, kind, why, self.scanned))
            }
            StageError::Root { path, source } if self.is_about_entry(&source) => {
                let why = error_chain(&source);
                Ok(match is_gone(&source) {
                    true => FailedChange::race(&path, kind, why, self.scanned),
                    false => FailedChange::lasting(&path, kind, why),
                })
            }
            StageError::Mismatch { path, what } => {
                let why = format!("it cannot be made as it is wanted: its {what} differs");
                Ok(FailedChange::lasting(&path, kind, why))
            }
            StageError::Closed { path, why } => {
                let directory = path.parent().unwrap_or(path);
                Ok(FailedChange::lasting(&directory, RefusedKind::Below, why.to_owned()))
            }
            StageError::OtherFileSystem { path } => {
                let why = "the root of another file-system is there".to_owned();
                Ok(FailedChange::lasting(&path, RefusedKind::Boundary, why))
            }
            other => Err(other),
        }
    }

    /// True if the error is about the entry, and not about the file-system as a whole. A
    /// file-system also says that it is full if an attribute is larger than it can store.
    fn is_about_entry(&self, error: &RootError) -> bool {
        let is_roomy = || self.root.space().is_ok_and(|space| space.free_bytes >= ROOM_BYTES);
        error.is_about_entry() || (error.is_full() && error.is_of_attribute() && is_roomy())
    }

    /// Checks that the new entries fit on the file-system.
    fn check_space(&self, step_plan: &StepPlan) -> Result<(), StageError> {
        let space = self.root.space().map_err(|source| StageError::Area { source })?;
        let FreeSpace { free_bytes, free_inodes } = space;
        let mut made = step_plan.made().peekable();
        if made.peek().is_none() {
            return Ok(());
        }
        match shortage(made, space) {
            None => Ok(()),
            Some(need_bytes) => Err(StageError::Space { need_bytes, free_bytes, free_inodes }),
        }
    }

    /// Creates an entry without its metadata.
    fn make(&self, directory: &Directory, name: &[u8], node: &Node) -> Result<(), EntryError> {
        match node {
            Node::Leaf(Leaf::File(file)) => {
                self.cache.copy(&file.object.id(), directory, name, self.stop)?;
            }
            Node::Directory(_) => directory.make_directory(name, 0o700)?,
            Node::Leaf(Leaf::Symlink(symlink)) => {
                directory.make_symlink(name, &symlink.target.0)?;
            }
            Node::Leaf(Leaf::Special(special)) => {
                directory.make_special(name, special.device, 0o600)?;
            }
            Node::Leaf(Leaf::Computed(_) | Leaf::HardLink(_)) => {
                return Err(EntryError::Mismatch("kind"));
            }
        }
        Ok(())
    }

    /// Gives an entry its metadata, checks it, and returns its inode.
    fn set_metadata(&self, target: &Target<'_>, node: &Node) -> Result<u64, EntryError> {
        if let Some(entry_metadata) = metadata_of(node) {
            target.apply(self.managed, &entry_metadata)?;
        }
        let status = target.status()?;
        let want = with_kept_time(self.root.times(), node);
        match target.difference(&status, self.managed, &want)? {
            Some(what) => Err(EntryError::Mismatch(what)),
            None => Ok(status.inode),
        }
    }

    /// Links the staged file `carrier` to `place`.
    fn link(&self, carrier: &SlotPath, place: &SlotPath) -> Result<u64, RootError> {
        at_place(self.slots, carrier, |from, name| {
            at_place(self.slots, place, |to, new_name| {
                from.link(name, to, new_name)?;
                to.stat(new_name).map(|status| status.inode)
            })
        })
    }

    fn step(&self, planned: &PlannedStep, inodes: &BTreeMap<u32, u64>) -> Result<Step, StageError> {
        let inode_in = |slot: &u32| {
            *inodes.get(slot).expect("each slot that appears was filled before the steps are made")
        };
        Ok(match planned {
            PlannedStep::Appear { path, slot } => {
                self.check_absent(path)?;
                Step::Appear { path: path.clone(), slot: *slot, inode: inode_in(slot) }
            }
            PlannedStep::Exchange { path, slot, displaced } => Step::Exchange {
                path: path.clone(),
                slot: *slot,
                inode: inode_in(slot),
                former: former_of(&self.live(path, Compared::Kind)?),
                displaced: displaced.clone(),
            },
            PlannedStep::Vanish { path, slot } => {
                let former = former_of(&self.live(path, Compared::Kind)?);
                Step::Vanish { path: path.clone(), slot: *slot, former }
            }
            PlannedStep::Change { path, node } => {
                let status = self.live(path, Compared::Rights)?;
                let wanted = metadata_of(node);
                let wanted = wanted.expect("a change to a hard link is refused before");
                if visible_difference(&status, node) == Some("kind") {
                    return Err(StageError::Changed { path: path.clone(), what: "kind" });
                }
                // A tree does not record the other names, so it is not known whether they may
                // change.
                if matches!(status.kind, Kind::Special(_)) && status.links > 1 {
                    return Err(StageError::Changed { path: path.clone(), what: "other names" });
                }
                let former = self.entry_metadata(path, wanted.mtime.is_some())?;
                Step::Change { path: path.clone(), inode: status.inode, former, wanted }
            }
        })
    }

    /// Reads the status of `path`, which must still be as it was scanned.
    fn live(&self, path: &TreePath, compared: Compared) -> Result<Status, StageError> {
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
        let matters = |what: &&str| match compared {
            Compared::Kind => *what == "kind",
            Compared::Rights => !matches!(*what, "size" | "mtime"),
            Compared::All => true,
        };
        match visible_difference(&status, &scanned).filter(matters) {
            Some(what) => Err(changed(what)),
            None => Ok(status),
        }
    }

    fn check_absent(&self, path: &TreePath) -> Result<(), StageError> {
        match Target::with(self.root, path, |target| target.status()) {
            Err(error) if error.is_absent() => Ok(()),
            Err(source) => Err(StageError::Root { path: path.clone(), source }),
            Ok(status) if self.is_boundary(&status)? => {
                Err(StageError::OtherFileSystem { path: path.clone() })
            }
            Ok(_) => {
                let what = "something is there now";
                Err(StageError::Changed { path: path.clone(), what })
            }
        }
    }

    fn is_boundary(&self, status: &Status) -> Result<bool, StageError> {
        let slots = self.slots.status().map_err(|source| StageError::Area { source })?;
        Ok(status.kind == Kind::Directory && status.filesystem != slots.filesystem)
    }

    /// Reads the inode number and the flags of `path`; `None` if nothing is there.
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

    fn entry_metadata(&self, path: &TreePath, timed: bool) -> Result<EntryMetadata, StageError> {
        Target::with(self.root, path, |target| target.entry_metadata(self.managed, timed))
            .map_err(|source| StageError::Root { path: path.clone(), source })
    }
}

/// Returns `node` with the time that is read back after its own is set.
fn with_kept_time(times: TimePrecision, node: &Node) -> Cow<'_, Node> {
    let mut with_time = Cow::Borrowed(node);
    if let Node::Leaf(Leaf::File(File { mtime, .. }) | Leaf::Special(Special { mtime, .. })) = node
        && times.rounded(*mtime) != *mtime
        && let Node::Leaf(Leaf::File(File { mtime, .. }) | Leaf::Special(Special { mtime, .. })) =
            with_time.to_mut()
    {
        *mtime = times.rounded(*mtime);
    }
    with_time
}

fn former_of(status: &Status) -> FormerEntry {
    let directory = status.kind == Kind::Directory;
    let Status { inode, size_bytes, mtime, .. } = *status;
    FormerEntry { inode, directory, size_bytes, mtime }
}

/// The error of creating an entry; the caller adds the path.
enum EntryError {
    Root(RootError),
    Cache(CacheError),
    Mismatch(&'static str),
}

impl EntryError {
    fn into_stage_error(self, path: &TreePath) -> StageError {
        let path = path.clone();
        match self {
            Self::Root(source) => StageError::Root { path, source },
            Self::Cache(source) => StageError::Object { path, source },
            Self::Mismatch(what) => StageError::Mismatch { path, what },
        }
    }
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

/// Discards an update: removes its slots, the directory `name` of `parent`, and puts the objects
/// that were taken back into the cache.
pub fn discard(
    cache: &Cache,
    parent: &Directory,
    name: &[u8],
    taken: &[TakenObject],
    visible: Visible,
) {
    let retrieved = parent.open_child(name).map(|slots| retrieve(cache, &slots, taken, visible));
    // Before the objects are put back, because the slots may hold further names of them.
    if let Err(error) = remove_all(parent, name) {
        tracing::warn!("cannot free the slots of a staged update: {}", error_chain(&error));
    }
    match retrieved {
        Ok(retrieved) => {
            for one in retrieved {
                if let Err(error) = cache.restore(one) {
                    tracing::warn!(
                        "an object of a discarded update is lost: {}",
                        error_chain(&error)
                    );
                }
            }
        }
        Err(error) => tracing::error!("cannot put objects back: {}", error_chain(&error)),
    }
}

fn retrieve(
    cache: &Cache,
    slots: &Directory,
    taken: &[TakenObject],
    visible: Visible,
) -> Vec<Retrieved> {
    let mut retrieved = Vec::new();
    for TakenObject { object, place } in taken {
        let retrieved_one =
            at_place(slots, place, |holder, name| cache.retrieve(object, holder, name, visible));
        match retrieved_one {
            Ok(one) => retrieved.push(one),
            Err(error) => {
                tracing::warn!("an object of a discarded update is lost: {}", error_chain(&error));
                let _gone = cache.forget(&[*object]);
            }
        }
    }
    retrieved
}
