//! Carries a script out, step by step, or undoes it.
//!
//! Synchronous and single-threaded; makes no choices. Before a step the path is looked at: if the
//! step was done already, nothing is done; if something else is there than the script says, the
//! step fails. What must not be lost is looked at again after the kernel has swapped it, because
//! only then nobody can slip in between.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use common::path::TreePath;
use common::scope::Attributes;
use nix::errno::Errno;

use super::arrange::Place;
use super::metadata::Target;
use super::stage::{at_place, slot_name};
use super::step::{Former, Script, Step};
use crate::root::{Directory, Kind, Root, RootError, Status};

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
    fn of(self, step: &Step) -> Self {
        match self {
            Self::Root { source } => Self::Refused { path: step.path().clone(), source },
            other => other,
        }
    }
}

/// A script that could not be carried out.
#[derive(Debug)]
pub enum ActivateError {
    /// All that was done was undone.
    RolledBack(StepError),
    /// Undoing failed too.
    Stuck {
        /// Why the script failed.
        cause: StepError,
        /// Why undoing failed.
        undo: StepError,
    },
}

/// Where a script is carried out.
#[derive(Clone, Copy, Debug)]
pub struct Stage<'a> {
    /// The tree.
    pub root: &'a Root,
    /// Where the slots are.
    pub slots: &'a Directory,
}

impl Stage<'_> {
    /// Carries out all steps, or none; gives the time from the first visible change to the last.
    ///
    /// # Errors
    ///
    /// [`ActivateError`] says whether the tree is as it was.
    pub fn activate(&self, script: &Script) -> Result<Duration, ActivateError> {
        let mut first = None;
        for (number, step) in script.steps.iter().enumerate() {
            if step.is_visible() && first.is_none() {
                first = Some(Instant::now());
            }
            if let Err(cause) = self.step(script.managed, step).map_err(|error| error.of(step)) {
                return Err(match self.undo(script, number) {
                    Ok(()) => ActivateError::RolledBack(cause),
                    Err(undo) => ActivateError::Stuck { cause, undo },
                });
            }
        }
        Ok(first.map_or(Duration::ZERO, |first| first.elapsed()))
    }

    /// Undoes the first `count` steps and what may have been done of the next one, last first.
    /// What cannot be undone does not keep the rest from it; the first such error is given.
    fn undo(&self, script: &Script, count: usize) -> Result<(), StepError> {
        let mut result = Ok(());
        for (number, step) in script.steps.iter().enumerate().take(count + 1).rev() {
            let undone = match number == count {
                true => self.undo_failed(script.managed, step),
                false => self.undo_step(script.managed, step),
            };
            result = result.and(undone.map_err(|error| error.of(step)));
        }
        result
    }

    /// Undoes what may have been done of a step that failed. Mostly that is nothing, for the same
    /// reason for which it failed; what counts is that no slot holds what belongs to the tree.
    fn undo_failed(&self, managed: Attributes, step: &Step) -> Result<(), StepError> {
        let undone = self.undo_step(managed, step);
        let in_slot = |slot: u32| look(self.slots, &slot_name(slot));
        let (path, safe) = match step {
            Step::Exchange { path, slot, inode, .. } => {
                (path, in_slot(*slot)?.is_some_and(|status| status.inode == *inode))
            }
            Step::Vanish { path, slot, .. } => (path, in_slot(*slot)?.is_none()),
            Step::Change { .. } => return undone,
            Step::Link { .. } | Step::Appear { .. } | Step::RemoveDirectory { .. } => return Ok(()),
        };
        match safe {
            true => Ok(()),
            false => Err(undone.err().unwrap_or_else(|| changed(path, "it is not in its place"))),
        }
    }

    /// Does one step; does nothing if it is done already.
    fn step(&self, managed: Attributes, step: &Step) -> Result<(), StepError> {
        match step {
            Step::Link { carrier, inode, place } => self.link(carrier, *inode, place),
            Step::Appear { path, slot, inode } => self.appear(path, *slot, *inode),
            Step::Exchange { path, slot, inode, former, displaced } => {
                self.exchange(path, *slot, *inode, former, displaced)
            }
            Step::Vanish { path, slot, former } => self.vanish(path, *slot, former),
            Step::RemoveDirectory { path, inode, .. } => self.remove_directory(path, *inode),
            Step::Change { path, inode, wanted, .. } => Target::with(self.root, path, |target| {
                expect_inode(path, &target.status()?, *inode)?;
                Ok(target.dress(managed, wanted)?)
            }),
        }
    }

    fn link(&self, carrier: &TreePath, inode: u64, place: &Place) -> Result<(), StepError> {
        let (from, name) = self.root.parent(carrier)?;
        at_place(self.slots, place, |to, new_name| {
            if look(to, new_name)?.is_some_and(|status| status.inode == inode) {
                return Ok(());
            }
            from.link(name, to, new_name)?;
            // The name is looked at after it was taken: it cannot change any more.
            let linked = to.stat(new_name)?;
            expect_inode(carrier, &linked, inode).inspect_err(|_| {
                if let Err(error) = to.unlink(new_name) {
                    tracing::warn!(%error, "cannot take a wrong link away");
                }
            })
        })
    }

    fn appear(&self, path: &TreePath, slot: u32, inode: u64) -> Result<(), StepError> {
        let (parent, name) = self.root.parent(path)?;
        match self.slots.rename_noreplace(&slot_name(slot), &parent, name) {
            Ok(()) => Ok(()),
            Err(error) => match look(&parent, name)? {
                Some(status) if status.inode == inode => Ok(()),
                Some(_) => Err(changed(path, "something is there now")),
                None => Err(error.into()),
            },
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
        let present = look(&parent, name)?.ok_or_else(|| changed(path, "it is gone"))?;
        if present.inode != inode {
            expect_former(path, &present, former)?;
            self.slots.exchange(&slot, &parent, name)?;
        }
        let out = self.slots.stat(&slot)?;
        let right = expect_former(path, &out, former).and_then(|()| {
            if former.directory { self.expect_displaced(path, &slot, displaced) } else { Ok(()) }
        });
        if right.is_err() {
            self.slots.exchange(&slot, &parent, name)?;
        }
        right
    }

    /// Checks that the directory in the slot holds exactly `displaced`.
    fn expect_displaced(
        &self,
        path: &TreePath,
        slot: &[u8],
        displaced: &[TreePath],
    ) -> Result<(), StepError> {
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
        match look(&parent, name)? {
            None => {
                let kept = look(self.slots, &slot)?;
                return if kept.is_some() { Ok(()) } else { Err(changed(path, "it is gone")) };
            }
            Some(present) => expect_former(path, &present, former)?,
        }
        parent.rename_noreplace(name, self.slots, &slot)?;
        expect_former(path, &self.slots.stat(&slot)?, former).or_else(|error| {
            self.slots.rename_noreplace(&slot, &parent, name)?;
            Err(error)
        })
    }

    fn remove_directory(&self, path: &TreePath, inode: u64) -> Result<(), StepError> {
        let (parent, name) = self.root.parent(path)?;
        let Some(present) = look(&parent, name)? else { return Ok(()) };
        expect_inode(path, &present, inode)?;
        parent.remove_directory(name).map_err(|error| match error.errno() {
            Some(Errno::ENOTEMPTY) => changed(path, "it holds something that is not in the scan"),
            _ => error.into(),
        })
    }

    /// Undoes one step; does nothing if it was not done.
    fn undo_step(&self, managed: Attributes, step: &Step) -> Result<(), StepError> {
        match step {
            Step::Link { place, .. } => {
                at_place(self.slots, place, |holder, name| match look(holder, name)? {
                    Some(_) => Ok(holder.unlink(name)?),
                    None => Ok(()),
                })
            }
            Step::Appear { path, slot, inode } => {
                let Some((parent, name)) = self.parent_if_there(path)? else { return Ok(()) };
                match look(&parent, name)? {
                    Some(status) if status.inode == *inode => {
                        Ok(parent.rename_noreplace(name, self.slots, &slot_name(*slot))?)
                    }
                    // It was not done, or somebody else has taken away what had appeared.
                    _ => Ok(()),
                }
            }
            Step::Exchange { path, slot, inode, former, .. } => {
                let (parent, name) = self.root.parent(path)?;
                match look(&parent, name)? {
                    Some(status) if status.inode == former.inode => Ok(()),
                    Some(status) if status.inode == *inode => {
                        Ok(self.slots.exchange(&slot_name(*slot), &parent, name)?)
                    }
                    None if self.holds_former(*slot, former)? => {
                        Ok(self.slots.rename_noreplace(&slot_name(*slot), &parent, name)?)
                    }
                    _ => Err(changed(path, "it was replaced during the update")),
                }
            }
            Step::Vanish { path, slot, former } => {
                if !self.holds_former(*slot, former)? {
                    return Ok(());
                }
                let (parent, name) = self.root.parent(path)?;
                match look(&parent, name)? {
                    None => Ok(self.slots.rename_noreplace(&slot_name(*slot), &parent, name)?),
                    Some(_) => Err(changed(path, "it was made again during the update")),
                }
            }
            Step::RemoveDirectory { path, former, .. } => {
                let (parent, name) = self.root.parent(path)?;
                if look(&parent, name)?.is_none() {
                    parent.make_directory(name, 0o700)?;
                    Target::Entry(&parent, name).dress(managed, former)?;
                }
                Ok(())
            }
            Step::Change { path, inode, former, .. } => {
                let undone = Target::with(self.root, path, |target| {
                    match target.status()?.inode == *inode {
                        true => Ok(target.dress(managed, former)?),
                        // Somebody else has replaced it.
                        false => Ok(()),
                    }
                });
                match undone {
                    Err(StepError::Root { source }) if is_gone(&source) => Ok(()),
                    other => other,
                }
            }
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
    fn holds_former(&self, slot: u32, former: &Former) -> Result<bool, RootError> {
        let held = look(self.slots, &slot_name(slot))?;
        Ok(held.is_some_and(|status| status.inode == former.inode))
    }
}

/// True if the error says that there is no such path, or that it leads elsewhere by now.
fn is_gone(error: &RootError) -> bool {
    error.is_absent() || matches!(error.errno(), Some(Errno::ELOOP | Errno::ENOTDIR))
}

/// Looks at an entry; `None` if there is none.
fn look(directory: &Directory, name: &[u8]) -> Result<Option<Status>, RootError> {
    match directory.stat(name) {
        Ok(status) => Ok(Some(status)),
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(error),
    }
}

fn changed(path: &TreePath, what: &str) -> StepError {
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
