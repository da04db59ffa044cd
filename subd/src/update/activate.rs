//! Carries a script out, step by step, or undoes it.
//!
//! Synchronous and single-threaded; makes no choices. Before a step the path is looked at: if
//! something else is there than the script says, the step fails. What must not be lost is looked at
//! again after the kernel has swapped it, because only then nobody can slip in between.
//!
//! All of it can be repeated after it was interrupted anywhere. Whether a step was done is told by
//! its slot, which nobody else can reach, and not by the path, where anybody may have put something
//! since. If it was interrupted between a swap and the look at what came out, that look is made
//! when the step is repeated: if something else is in the slot than was to come out, or somebody
//! has written to it meanwhile, it is put back and the step fails.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use model::path::TreePath;
use model::scope::Attributes;
use nix::errno::Errno;

use super::metadata::Target;
use super::stage::{at_place, slot_name};
use super::step::{Former, Script, Step};
use crate::root::{Directory, Kind, Locks, Root, RootError, Status};
use crate::update::step_plan::SlotPath;

/// What is said of a directory that was to be removed and is not empty.
const NOT_EMPTY: &str = "it holds something that is not in the scan";

/// How often undoing looks again, in all, where somebody else has changed something: a user who
/// swaps things back and forth shall not keep the tree from being put back.
const LOOKS_AGAIN_MAX: usize = 2_000;

/// How often it looks again for one step.
const LOOKS_AGAIN_FOR_ONE_MAX: usize = 200;

/// How long it waits before.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The file-system refused something.
    #[error("the file-system refused a step")]
    Root {
        /// What and why.
        #[from]
        source: RootError,
    },
    /// As [`StepError::Root`], with the path that the step was for: what failed may have been
    /// done in a slot.
    #[error("{path} cannot be changed")]
    Refused {
        /// Where.
        path: TreePath,
        /// What and why.
        source: RootError,
    },
    /// Something else is at the path than when the update was prepared.
    #[error("{path} changed since it was scanned: {what}")]
    Changed {
        /// Where.
        path: TreePath,
        /// What is different.
        what: String,
    },
}

impl StepError {
    /// True if somebody else has changed what is at the path, or on the way to it.
    fn is_of_others(&self) -> bool {
        match self {
            Self::Root { source } | Self::Refused { source, .. } => {
                // Something came between a look and a rename.
                is_gone(source) || source.errno() == Some(Errno::EEXIST)
            }
            Self::Changed { .. } => true,
        }
    }

    fn of(self, step: &Step) -> Self {
        match self {
            Self::Root { source } => Self::Refused { path: step.path().clone(), source },
            other => other,
        }
    }
}

/// A script that could not be carried out.
#[derive(Debug)]
pub struct Failed {
    /// How many steps were done or tried.
    pub begun: usize,
    /// Why the last of them failed.
    pub cause: StepError,
}

/// Where a script is carried out.
#[derive(Clone, Copy, Debug)]
pub struct Activation<'a> {
    /// The tree.
    pub root: &'a Root,
    /// Where the slots are.
    pub slots: &'a Directory,
}

impl Activation<'_> {
    /// Gives files of the tree their further names in the slots. Nothing visible changes. May be
    /// repeated only while nothing has left the slots: a link that has gone from its slot to its
    /// place cannot be told from one that was not made.
    ///
    /// # Errors
    ///
    /// [`StepError`] for the first link that cannot be made. Those before it stay.
    pub fn link_all(&self, script: &Script) -> Result<(), StepError> {
        script.steps.iter().try_for_each(|step| match step {
            Step::Link { carrier, inode, place } => {
                self.link(carrier, *inode, place).map_err(|error| error.of(step))
            }
            _ => Ok(()),
        })
    }

    /// Carries out all steps but the links that were not done yet; gives the time from the first
    /// visible change to the last step.
    ///
    /// # Errors
    ///
    /// [`Failed`] for the first step that cannot be done. What was done stays done.
    pub fn activate(&self, script: &Script) -> Result<Duration, Failed> {
        let mut first = None;
        for (number, step) in script.steps.iter().enumerate() {
            if step.is_visible() {
                first.get_or_insert_with(Instant::now);
            }
            if let Err(cause) = self.step(script.managed, step).map_err(|error| error.of(step)) {
                return Err(Failed { begun: number + 1, cause });
            }
        }
        Ok(first.map_or(Duration::ZERO, |first| first.elapsed()))
    }

    /// Undoes the first `count` steps, last first; one that was not done is left alone. What cannot
    /// be undone does not keep the rest from it. May be repeated. Gives what is left to others,
    /// because they have put something else there, or have taken the directory away: they could
    /// keep a machine from being updated ever again if that had to be mended first.
    ///
    /// # Errors
    ///
    /// [`StepError`] for the last step that the file-system refuses to undo.
    pub fn undo(&self, script: &Script, count: usize) -> Result<Vec<StepError>, StepError> {
        let (mut left, mut result) = (Vec::new(), Ok(()));
        let mut looks_left = LOOKS_AGAIN_MAX;
        for step in script.steps.iter().take(count).rev() {
            let mut undone = self.undo_step(script.managed, step);
            for _ in 0..LOOKS_AGAIN_FOR_ONE_MAX.min(looks_left) {
                if !undone.as_ref().is_err_and(StepError::is_of_others) {
                    break;
                }
                looks_left -= 1;
                std::thread::sleep(LOOK_AGAIN_AFTER);
                undone = self.undo_step(script.managed, step);
            }
            match undone.map_err(|error| error.of(step)) {
                Err(error) if error.is_of_others() => left.push(error),
                undone => result = result.and(undone),
            }
        }
        result.map(|()| left)
    }

    /// Does one step; does nothing if it is done already.
    fn step(&self, managed: Attributes, step: &Step) -> Result<(), StepError> {
        match step {
            // It was made by `link_all`.
            Step::Link { .. } => Ok(()),
            Step::Appear { path, slot, .. } => self.appear(path, *slot),
            Step::Exchange { path, slot, inode, former, displaced } => {
                self.exchange(path, *slot, *inode, former, displaced)
            }
            Step::Vanish { path, slot, former } => self.vanish(path, *slot, former),
            Step::Unlock { path, inode, .. } => self.set_locks(path, *inode, Locks::NONE),
            Step::Lock { path, inode, locks } => self.set_locks(path, *inode, *locks),
            Step::Change { path, inode, wanted, .. } => Target::with(self.root, path, |target| {
                expect_inode(path, &target.status()?, *inode)?;
                Ok(target.dress(managed, wanted)?)
            }),
        }
    }

    fn link(&self, carrier: &TreePath, inode: u64, place: &SlotPath) -> Result<(), StepError> {
        let (from, name) = self.root.parent(carrier)?;
        at_place(self.slots, place, |to, new_name| {
            if look(to, new_name)?.is_some_and(|status| status.inode == inode) {
                return Ok(());
            }
            link_locked(&from, name, to, new_name)?;
            // The name is looked at after it was taken: it cannot change any more.
            let linked = to.stat(new_name)?;
            expect_inode(carrier, &linked, inode).inspect_err(|_| {
                if let Err(error) = to.unlink(new_name) {
                    tracing::warn!(%error, "cannot take a wrong link away");
                }
            })
        })
    }

    fn appear(&self, path: &TreePath, slot: u32) -> Result<(), StepError> {
        let (parent, name) = self.root.parent(path)?;
        let slot = slot_name(slot);
        let Err(error) = self.slots.rename_noreplace(&slot, &parent, name) else { return Ok(()) };
        // Whatever has become of it since, it has appeared if it is not in its slot any more.
        match (look(self.slots, &slot)?, look(&parent, name)?) {
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
        former: &Former,
        displaced: &[TreePath],
    ) -> Result<(), StepError> {
        let (parent, name) = self.root.parent(path)?;
        let slot = slot_name(slot);
        let present = look(&parent, name)?;
        if present.is_none_or(|present| present.inode != inode) {
            let present = present.ok_or_else(|| changed(path, "it is gone"));
            let fits = present.and_then(|present| expect_former(path, &present, former));
            match fits.and_then(|()| self.expect_free(path, former)) {
                Ok(()) => self.slots.exchange(&slot, &parent, name)?,
                // It was done, and what had come to the path has been replaced since.
                Err(_) if self.holds(&slot, former)? => {}
                Err(error) => return Err(error),
            }
        }
        let right = self.expect_out(path, &slot, former, displaced);
        if right.is_err() && look(&parent, name)?.is_some_and(|present| present.inode == inode) {
            self.slots.exchange(&slot, &parent, name)?;
        }
        right
    }

    /// Checks that what came out of the tree into the slot is what was to come out.
    fn expect_out(
        &self,
        path: &TreePath,
        slot: &[u8],
        former: &Former,
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
            Some(missing) => Err(changed(missing, "it is gone")),
        }
    }

    fn vanish(&self, path: &TreePath, slot: u32, former: &Former) -> Result<(), StepError> {
        let (parent, name) = self.root.parent(path)?;
        let slot = slot_name(slot);
        let present = look(&parent, name)?.ok_or_else(|| changed(path, "it is gone"));
        match present.and_then(|present| expect_former(path, &present, former)) {
            Ok(()) => {
                if former.directory && !parent.open_child(name)?.names()?.is_empty() {
                    return Err(changed(path, NOT_EMPTY));
                }
                parent.rename_noreplace(name, self.slots, &slot)?;
            }
            // It was done, and something may have come to the path since.
            Err(error) if look(self.slots, &slot)?.is_none() => return Err(error),
            Err(_) => {}
        }
        self.expect_out(path, &slot, former, &[]).or_else(|error| {
            self.slots.rename_noreplace(&slot, &parent, name)?;
            Err(error)
        })
    }

    /// Undoes one step; does nothing if it was not done. The slots, which nobody else can reach,
    /// tell whether it was.
    fn undo_step(&self, managed: Attributes, step: &Step) -> Result<(), StepError> {
        match step {
            Step::Link { place, .. } => {
                let undone =
                    at_place(self.slots, place, |holder, name| match look(holder, name)? {
                        Some(_) => holder.unlink(name),
                        None => Ok(()),
                    });
                // What it was in has appeared, and somebody else has taken it away.
                unless_gone(undone)
            }
            Step::Appear { path, slot, inode } => {
                let slot = slot_name(*slot);
                if look(self.slots, &slot)?.is_some() {
                    return Ok(());
                }
                let Some((parent, name)) = self.parent_if_there(path)? else { return Ok(()) };
                match look(&parent, name)? {
                    Some(status) if status.inode == *inode => {
                        Ok(parent.rename_noreplace(name, self.slots, &slot)?)
                    }
                    // Somebody else has taken away what had appeared.
                    _ => Ok(()),
                }
            }
            Step::Exchange { path, slot, inode, former, .. } => {
                self.undo_exchange(path, &slot_name(*slot), *inode, former)
            }
            Step::Vanish { path, slot, former } => {
                let slot = slot_name(*slot);
                if look(self.slots, &slot)?.is_none() {
                    return Ok(());
                }
                let (parent, name) = self.root.parent(path)?;
                match look(&parent, name)? {
                    None => Ok(self.slots.rename_noreplace(&slot, &parent, name)?),
                    // The one that went was empty.
                    Some(again) if former.directory && again.kind == Kind::Directory => Ok(()),
                    Some(_) => Err(changed(path, "it was made again during the update")),
                }
            }
            Step::Unlock { path, inode, locks } => self.put_locks_back(path, *inode, *locks),
            Step::Lock { path, inode, .. } => self.put_locks_back(path, *inode, Locks::NONE),
            Step::Change { path, inode, former, .. } => {
                let undone = Target::with(self.root, path, |target| {
                    match target.status()?.inode == *inode {
                        true => target.dress(managed, former),
                        // Somebody else has replaced it.
                        false => Ok(()),
                    }
                });
                unless_gone(undone)
            }
        }
    }

    fn undo_exchange(
        &self,
        path: &TreePath,
        slot: &[u8],
        inode: u64,
        former: &Former,
    ) -> Result<(), StepError> {
        let held = look(self.slots, slot)?;
        if held.is_some_and(|held| held.inode == inode) {
            return Ok(());
        }
        let (parent, name) = self.root.parent(path)?;
        match look(&parent, name)? {
            Some(status) if status.inode == former.inode => Ok(()),
            Some(status) if status.inode == inode && held.is_some() => {
                Ok(self.slots.exchange(slot, &parent, name)?)
            }
            None if held.is_some() => Ok(self.slots.rename_noreplace(slot, &parent, name)?),
            _ => Err(changed(path, "it was replaced during the update")),
        }
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

    /// True if the slot has what was at the path before.
    fn holds(&self, slot: &[u8], former: &Former) -> Result<bool, RootError> {
        let held = look(self.slots, slot)?;
        Ok(held.is_some_and(|status| status.inode == former.inode))
    }
}

/// Gives `name` in `from` the further name `new_name` in `to`. The kernel refuses that for an
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

/// True if the error says that there is no such path, or that it leads elsewhere by now.
pub(super) fn is_gone(error: &RootError) -> bool {
    error.is_absent() || matches!(error.errno(), Some(Errno::ELOOP | Errno::ENOTDIR))
}

fn unless_gone(undone: Result<(), RootError>) -> Result<(), StepError> {
    match undone {
        Err(error) if is_gone(&error) => Ok(()),
        other => Ok(other?),
    }
}

/// Looks at an entry; `None` if there is none.
fn look(directory: &Directory, name: &[u8]) -> Result<Option<Status>, RootError> {
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

fn expect_former(path: &TreePath, present: &Status, former: &Former) -> Result<(), StepError> {
    expect_inode(path, present, former.inode)?;
    let directory = present.kind == Kind::Directory;
    let same_content = present.size_bytes == former.size_bytes && present.mtime == former.mtime;
    match directory == former.directory && (directory || same_content) {
        true => Ok(()),
        false => Err(changed(path, "its content was modified")),
    }
}
