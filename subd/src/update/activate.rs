//! Executes a script, step by step, or undoes it.
//!
//! Synchronous, in one thread, without decisions. Before a step the path is checked: if something
//! else is there than the script says, the step fails. What must not be lost is checked again after
//! the kernel has swapped it, because only then no other process can change it.
//!
//! Execution can be repeated after an interruption at any point. Whether a step was done is decided
//! by its slot, which no other process can reach, and not by the path, which others may have
//! changed since. If it was interrupted between a swap and the check of the entry that was swapped
//! out, that check is made when the step is repeated: if the slot holds another entry than
//! expected, or it was written to in the meantime, it is put back and the step fails.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use model::path::TreePath;
use model::scope::Attributes;
use nix::errno::Errno;

use crate::root::{Directory, Kind, Locks, Root, RootError, Status};
use crate::update::metadata::Target;
use crate::update::stage::{at_place, slot_name};
use crate::update::step::{FormerEntry, Script, Step};
use crate::update::step_plan::SlotPath;

/// The reason why a directory cannot be removed that is not empty.
const NOT_EMPTY: &str = "it holds something that is not in the scan";

/// The reason why what was removed cannot be put back.
const MADE_AGAIN: &str = "it was made again during the update";

/// The most retries of an undo, in total, where another process has changed something: a user who
/// swaps entries back and forth must not keep the tree from being undone.
const UNDO_RETRIES_MAX: usize = 2_000;

/// The most retries of one step.
const UNDO_RETRIES_OF_STEP_MAX: usize = 200;

/// The pause before a retry.
const UNDO_RETRY_PAUSE: Duration = Duration::from_millis(1);

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    #[error("the file-system refused a step")]
    Root {
        #[from]
        source: RootError,
    },
    #[error("{path} cannot be changed")]
    Refused { path: TreePath, source: RootError },
    #[error("{path} changed since it was scanned: {what}")]
    Changed { path: TreePath, what: String },
}

impl StepError {
    /// True if another process has changed the entry or a directory above it.
    pub fn is_foreign_change(&self) -> bool {
        match self {
            Self::Root { source } | Self::Refused { source, .. } => {
                // Changed between the check and the rename.
                is_gone(source) || source.errno() == Some(Errno::EEXIST)
            }
            Self::Changed { .. } => true,
        }
    }

    fn at(self, step: &Step) -> Self {
        match self {
            Self::Root { source } => Self::Refused { path: step.path().clone(), source },
            other => other,
        }
    }
}

/// A script that could not be carried out.
#[derive(Debug)]
pub struct ActivationFailure {
    /// The number of steps that were done or tried.
    pub begun: usize,
    /// The error of the last of them.
    pub cause: StepError,
}

/// Executes scripts.
#[derive(Clone, Copy, Debug)]
pub struct Activation<'a> {
    pub root: &'a Root,
    pub slots: &'a Directory,
}

impl Activation<'_> {
    /// Links files of the tree into the slots. Nothing visible changes. May be repeated only while
    /// all entries are in the slots: a link that was moved to its path cannot be distinguished from
    /// one that was not made.
    pub fn link_all(&self, script: &Script) -> Result<(), StepError> {
        script.steps.iter().try_for_each(|step| match step {
            Step::Link { carrier, inode, place } => {
                self.link(carrier, *inode, place).map_err(|error| error.at(step))
            }
            _ => Ok(()),
        })
    }

    /// Executes all steps that were not done yet, except for links. Returns the time from the first
    /// visible change to the last step.
    pub fn activate(&self, script: &Script) -> Result<Duration, ActivationFailure> {
        let mut first = None;
        for (number, step) in script.steps.iter().enumerate() {
            if step.is_visible() {
                first.get_or_insert_with(Instant::now);
            }
            if let Err(cause) = self.step(script.managed, step).map_err(|error| error.at(step)) {
                return Err(ActivationFailure { begun: number + 1, cause });
            }
        }
        Ok(first.map_or(Duration::ZERO, |first| first.elapsed()))
    }

    /// Undoes the first `count` steps in reverse order; steps that were not done are skipped. A
    /// step that cannot be undone does not stop the rest. May be repeated. Returns the steps that
    /// were not undone because another process has changed the path or removed its directory:
    /// otherwise it could keep the machine from ever being updated again.
    pub fn undo(&self, script: &Script, count: usize) -> Result<Vec<StepError>, StepError> {
        let (mut left, mut result) = (Vec::new(), Ok(()));
        let mut retries_left = UNDO_RETRIES_MAX;
        for step in script.steps.iter().take(count).rev() {
            let mut undone = self.undo_step(script.managed, step);
            for _ in 0..UNDO_RETRIES_OF_STEP_MAX.min(retries_left) {
                if !undone.as_ref().is_err_and(StepError::is_foreign_change) {
                    break;
                }
                retries_left -= 1;
                std::thread::sleep(UNDO_RETRY_PAUSE);
                undone = self.undo_step(script.managed, step);
            }
            match undone.map_err(|error| error.at(step)) {
                Err(error) if error.is_foreign_change() => left.push(error),
                undone => result = result.and(undone),
            }
        }
        result.map(|()| left)
    }

    /// Executes one step; does nothing if it is done already.
    fn step(&self, managed: Attributes, step: &Step) -> Result<(), StepError> {
        match step {
            // It was made by `link_all`.
            Step::Link { .. } => Ok(()),
            Step::Appear { path, slot, .. } => self.appear(path, *slot),
            Step::Exchange { path, slot, inode, former, displaced } => {
                self.exchange(path, *slot, *inode, former, displaced)
            }
            Step::Vanish { path, slot, former } => self.vanish(path, *slot, former),
            Step::RemoveDirectory { path, .. } => self.remove_directory(path),
            Step::Unlock { path, inode, .. } => self.set_locks(path, *inode, Locks::NONE),
            Step::Lock { path, inode, locks } => self.set_locks(path, *inode, *locks),
            Step::Change { path, inode, wanted, .. } => Target::with(self.root, path, |target| {
                expect_inode(path, &target.status()?, *inode)?;
                Ok(target.apply(managed, wanted)?)
            }),
        }
    }

    fn link(&self, carrier: &TreePath, inode: u64, place: &SlotPath) -> Result<(), StepError> {
        let (from, name) = self.root.parent(carrier)?;
        at_place(self.slots, place, |to, new_name| {
            if status_if_present(to, new_name)?.is_some_and(|status| status.inode == inode) {
                return Ok(());
            }
            link_locked(&from, name, to, new_name)?;
            // Checked after the link was made: it cannot change any more.
            let linked = to.stat(new_name)?;
            expect_inode(carrier, &linked, inode).inspect_err(|_| {
                if let Err(error) = to.unlink(new_name) {
                    tracing::warn!(%error, "cannot remove a wrong link");
                }
            })
        })
    }

    fn appear(&self, path: &TreePath, slot: u32) -> Result<(), StepError> {
        let (parent, name) = self.root.parent(path)?;
        let slot = slot_name(slot);
        let Err(error) = self.slots.rename_noreplace(&slot, &parent, name) else { return Ok(()) };
        // It was moved if it is no longer in its slot, whatever happened to it since.
        match (status_if_present(self.slots, &slot)?, status_if_present(&parent, name)?) {
            (None, _) => Ok(()),
            (Some(_), Some(_)) => Err(changed(path, "something is there now")),
            (Some(_), None) => Err(error.into()),
        }
    }

    fn exchange(
        &self,
        path: &TreePath,
        slot: u32,
        inode: u64,
        former: &FormerEntry,
        displaced: &[TreePath],
    ) -> Result<(), StepError> {
        let (parent, name) = self.root.parent(path)?;
        let slot = slot_name(slot);
        let present = status_if_present(&parent, name)?;
        if present.is_none_or(|present| present.inode != inode) {
            let present = present.ok_or_else(|| changed(path, "it was removed"));
            let fits = present.and_then(|present| expect_former(path, &present, former));
            match fits.and_then(|()| self.expect_free(path, former)) {
                Ok(()) => self.slots.exchange(&slot, &parent, name)?,
                // It was done, and the new entry has been replaced since.
                Err(_) if self.holds(&slot, former)? => {}
                Err(error) => return Err(error),
            }
        }
        let right = self.expect_out(path, &slot, former, displaced);
        if right.is_err()
            && status_if_present(&parent, name)?.is_some_and(|present| present.inode == inode)
        {
            self.slots.exchange(&slot, &parent, name)?;
        }
        right
    }

    /// Checks that the slot holds the entry that was to be moved out of the tree.
    fn expect_out(
        &self,
        path: &TreePath,
        slot: &[u8],
        former: &FormerEntry,
        displaced: &[TreePath],
    ) -> Result<(), StepError> {
        expect_former(path, &self.slots.stat(slot)?, former)?;
        if former.directory { self.expect_displaced(path, slot, displaced) } else { Ok(()) }
    }

    /// Checks that the directory in the slot holds exactly `displaced`.
    fn expect_displaced(
        &self,
        path: &TreePath,
        slot: &[u8],
        displaced: &[TreePath],
    ) -> Result<(), StepError> {
        let at = self.slots.path().join(slot).expect("a slot has a name");
        self.expect_unoccupied(path, &at)?;
        let mut expected: BTreeSet<&TreePath> = displaced.iter().collect();
        let mut stack = vec![(path.clone(), self.slots.open_child(slot)?)];
        while let Some((at, directory)) = stack.pop() {
            for name in directory.names()? {
                let below = at.join(&name).expect("the kernel gives names");
                if !expected.remove(&below) {
                    return Err(changed(&below, "it is not in the scan"));
                }
                if directory.stat(&name)?.kind == Kind::Directory {
                    stack.push((below, directory.open_child(&name)?));
                }
            }
        }
        match expected.first() {
            None => Ok(()),
            Some(missing) => Err(changed(missing, "it was removed")),
        }
    }

    fn vanish(&self, path: &TreePath, slot: u32, former: &FormerEntry) -> Result<(), StepError> {
        let (parent, name) = self.root.parent(path)?;
        let slot = slot_name(slot);
        let present =
            status_if_present(&parent, name)?.ok_or_else(|| changed(path, "it was removed"));
        match present.and_then(|present| expect_former(path, &present, former)) {
            Ok(()) => {
                if former.directory && !parent.open_child(name)?.names()?.is_empty() {
                    return Err(changed(path, NOT_EMPTY));
                }
                parent.rename_noreplace(name, self.slots, &slot)?;
            }
            // It was done, and another process may have created something at the path since.
            Err(error) if status_if_present(self.slots, &slot)?.is_none() => return Err(error),
            Err(_) => {}
        }
        self.expect_out(path, &slot, former, &[]).or_else(|error| {
            self.slots.rename_noreplace(&slot, &parent, name)?;
            Err(error)
        })
    }

    fn remove_directory(&self, path: &TreePath) -> Result<(), StepError> {
        let (parent, name) = self.root.parent(path)?;
        match parent.remove_directory(name) {
            // It was done.
            Err(error) if error.is_absent() => Ok(()),
            Err(error) if matches!(error.errno(), Some(Errno::ENOTEMPTY | Errno::EEXIST)) => {
                Err(changed(path, NOT_EMPTY))
            }
            other => Ok(other?),
        }
    }

    /// Undoes one step; does nothing if it was not done, which the slots show.
    fn undo_step(&self, managed: Attributes, step: &Step) -> Result<(), StepError> {
        match step {
            Step::Link { place, .. } => {
                let undone = at_place(self.slots, place, |holder, name| {
                    match status_if_present(holder, name)? {
                        Some(_) => holder.unlink(name),
                        None => Ok(()),
                    }
                });
                // The directory that it was in was moved to the tree and removed by another
                // process.
                unless_gone(undone)
            }
            Step::Appear { path, slot, inode } => {
                let slot = slot_name(*slot);
                if status_if_present(self.slots, &slot)?.is_some() {
                    return Ok(());
                }
                let Some((parent, name)) = self.parent_if_there(path)? else { return Ok(()) };
                match status_if_present(&parent, name)? {
                    Some(status) if status.inode == *inode => {
                        Ok(parent.rename_noreplace(name, self.slots, &slot)?)
                    }
                    // Another process has removed the new entry.
                    _ => Ok(()),
                }
            }
            Step::Exchange { path, slot, inode, former, .. } => {
                self.undo_exchange(path, &slot_name(*slot), *inode, former)
            }
            Step::Vanish { path, slot, former } => {
                self.undo_vanish(path, &slot_name(*slot), former)
            }
            Step::RemoveDirectory { path, former } => {
                let (parent, name) = self.root.parent(path)?;
                match status_if_present(&parent, name)? {
                    None => parent.make_directory(name, 0o700)?,
                    Some(present) if present.kind == Kind::Directory => {}
                    Some(_) => return Err(changed(path, MADE_AGAIN)),
                }
                Ok(Target::OpenEntry(&parent.open_entry(name)?).apply(managed, former)?)
            }
            Step::Unlock { path, inode, locks } => self.put_locks_back(path, *inode, *locks),
            Step::Lock { path, inode, .. } => self.put_locks_back(path, *inode, Locks::NONE),
            Step::Change { path, inode, former, .. } => {
                let undone = Target::with(self.root, path, |target| {
                    match target.status()?.inode == *inode {
                        true => target.apply(managed, former),
                        // Another process has replaced it.
                        false => Ok(()),
                    }
                });
                unless_gone(undone)
            }
        }
    }

    fn undo_vanish(
        &self,
        path: &TreePath,
        slot: &[u8],
        former: &FormerEntry,
    ) -> Result<(), StepError> {
        if status_if_present(self.slots, slot)?.is_none() {
            return Ok(());
        }
        let (parent, name) = self.root.parent(path)?;
        match status_if_present(&parent, name)? {
            None => Ok(self.slots.rename_noreplace(slot, &parent, name)?),
            // The removed directory was empty.
            Some(again) if former.directory && again.kind == Kind::Directory => Ok(()),
            Some(_) => Err(changed(path, MADE_AGAIN)),
        }
    }

    fn undo_exchange(
        &self,
        path: &TreePath,
        slot: &[u8],
        inode: u64,
        former: &FormerEntry,
    ) -> Result<(), StepError> {
        let held = status_if_present(self.slots, slot)?;
        if held.is_some_and(|held| held.inode == inode) {
            return Ok(());
        }
        let (parent, name) = self.root.parent(path)?;
        match status_if_present(&parent, name)? {
            Some(status) if status.inode == former.inode => Ok(()),
            Some(status) if status.inode == inode && held.is_some() => {
                Ok(self.slots.exchange(slot, &parent, name)?)
            }
            None if held.is_some() => Ok(self.slots.rename_noreplace(slot, &parent, name)?),
            _ => Err(changed(path, "it was replaced during the update")),
        }
    }

    /// Sets the flags of `path` to `locks`. Fails if it is another inode than `inode`.
    fn set_locks(&self, path: &TreePath, inode: u64, locks: Locks) -> Result<(), StepError> {
        match self.try_set_locks(path, inode, locks)? {
            true => Ok(()),
            false => Err(changed(path, "another inode is there")),
        }
    }

    /// As [`Activation::set_locks`]; does nothing if the entry was replaced or removed.
    fn put_locks_back(&self, path: &TreePath, inode: u64, locks: Locks) -> Result<(), StepError> {
        match self.try_set_locks(path, inode, locks) {
            Err(error) if is_gone(&error) => Ok(()),
            other => Ok(other.map(|_| ())?),
        }
    }

    /// True if the inode was found.
    fn try_set_locks(&self, path: &TreePath, inode: u64, locks: Locks) -> Result<bool, RootError> {
        if !path.is_root() {
            let (parent, name) = self.root.parent(path)?;
            return parent.set_locks(name, inode, locks);
        }
        let top = self.root.directory(path)?;
        top.set_own_locks(locks).map(|()| true)
    }

    /// Opens the directory that holds `path`; `None` if it is no longer there.
    fn parent_if_there<'path>(
        &self,
        path: &'path TreePath,
    ) -> Result<Option<(Directory, &'path [u8])>, RootError> {
        match self.root.parent(path) {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// True if the slot holds the former entry of the path.
    fn holds(&self, slot: &[u8], former: &FormerEntry) -> Result<bool, RootError> {
        let held = status_if_present(self.slots, slot)?;
        Ok(held.is_some_and(|status| status.inode == former.inode))
    }
}

/// Returns `name` in `from` the further name `new_name` in `to`. The kernel refuses that for an
/// immutable file, so its flags are taken away for a moment: it stays as it is.
fn link_locked(
    from: &Directory,
    name: &[u8],
    to: &Directory,
    new_name: &[u8],
) -> Result<(), RootError> {
    let Err(refused) = from.link(name, to, new_name) else { return Ok(()) };
    let (inode, locks) = from.locks(name)?;
    if refused.errno() != Some(Errno::EPERM) || locks == Locks::NONE {
        return Err(refused);
    }
    from.set_locks(name, inode, Locks::NONE)?;
    let linked = from.link(name, to, new_name);
    from.set_locks(name, inode, locks)?;
    linked
}

/// True if the error says that there is no such path, or that it leads elsewhere now.
pub(super) fn is_gone(error: &RootError) -> bool {
    error.is_absent() || matches!(error.errno(), Some(Errno::ELOOP | Errno::ENOTDIR))
}

fn unless_gone(undone: Result<(), RootError>) -> Result<(), StepError> {
    match undone {
        Err(error) if is_gone(&error) => Ok(()),
        other => Ok(other?),
    }
}

/// Reads the status of an entry; `None` if it does not exist.
fn status_if_present(directory: &Directory, name: &[u8]) -> Result<Option<Status>, RootError> {
    match directory.stat(name) {
        Ok(status) => Ok(Some(status)),
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(error),
    }
}

pub(super) fn changed(path: &TreePath, what: &str) -> StepError {
    StepError::Changed { path: path.clone(), what: what.to_owned() }
}

fn expect_inode(path: &TreePath, present: &Status, inode: u64) -> Result<(), StepError> {
    if present.inode == inode { Ok(()) } else { Err(changed(path, "another inode is there")) }
}

fn expect_former(path: &TreePath, present: &Status, former: &FormerEntry) -> Result<(), StepError> {
    let content = |size_bytes, mtime| (!former.directory).then_some((size_bytes, mtime));
    // An overlay may give a file of its lower layer another inode when it is renamed.
    let is_same = present.inode == former.inode
        || content(present.size_bytes, present.mtime)
            .is_some_and(|present| Some(present) == content(former.size_bytes, former.mtime));
    match is_same && (present.kind == Kind::Directory) == former.directory {
        true => Ok(()),
        false => Err(changed(path, "another inode is there")),
    }
}
