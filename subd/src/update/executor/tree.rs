//! Makes the tree of an update as planned, or as it was.

use std::sync::Arc;

use model::display::error_chain;

use crate::root::{Directory, RootError};
use crate::state::directories::{Directories, directory_name};
use crate::update::activate::{Activation, StepError};
use crate::update::executor::Executor;
use crate::update::running_update::{FailedStep, RunningUpdate, Stuck, TreeState, UpdateOrigin};
use crate::update::step::Phase;

impl Executor<'_> {
    /// Makes the tree as planned, or as it was, whatever it is now.
    pub fn settle_tree(&self, update: &mut RunningUpdate) -> Result<(), Stuck> {
        if update.phase == Phase::Staged
            && let Err(error) = self.begin(update)
        {
            update.tree = TreeState::untouched(error_chain(&error));
            return Ok(());
        }
        match update.phase {
            Phase::Staged | Phase::Begun => {
                self.stop_services(update);
                self.apply_steps(update)
            }
            Phase::Back | Phase::Undoing => {
                self.stop_services(update);
                self.undo_steps(update, usize::MAX)
            }
            Phase::Live { .. } | Phase::Done => {
                update.tree = TreeState::New;
                Ok(())
            }
            Phase::RolledBack | Phase::Undone => {
                update.tree = TreeState::Old { cause: None, left: Vec::new() };
                Ok(())
            }
        }
    }

    fn begin(&self, update: &mut RunningUpdate) -> Result<(), StepError> {
        let Directories { staging, undo, .. } = self.directories;
        let name = directory_name(update.update_id());
        let slots = staging.open_child(&name)?;
        Activation { root: self.root, slots: &slots }.link_all(&update.journal.script)?;
        staging.rename_noreplace(&name, undo, &name)?;
        update.phase = Phase::Begun;
        update.slots = Some(Arc::new(slots));
        Ok(())
    }

    fn apply_steps(&self, update: &mut RunningUpdate) -> Result<(), Stuck> {
        let slots = self.slots(update)?;
        let stage = Activation { root: self.root, slots: &slots };
        let activated = stage.activate(&update.journal.script);
        let (begun, cause) = match activated {
            Err(failed) => {
                let step = update.journal.script.steps.get(failed.begun - 1);
                update.failed_step = step.and_then(|step| FailedStep::of(step, &failed.cause));
                (failed.begun, error_chain(&failed.cause))
            }
            Ok(window) => {
                update.window = window;
                let boot_id = self.boot_id.to_owned();
                let settled = self.root.sync_filesystem();
                match settled.and_then(|()| self.enter(update, Phase::Live { boot_id })) {
                    Ok(()) => {
                        update.tree = TreeState::New;
                        return Ok(());
                    }
                    Err(error) => (usize::MAX, error_chain(&error)),
                }
            }
        };
        let why = format!("{cause}; it cannot be undone");
        update.tree = TreeState::Mixed { cause: Some(cause) };
        // The direction is recorded before anything is undone. Otherwise the next start after a
        // crash would go forward from a tree that is half undone.
        if let Err(error) = self.enter_durably(update, Phase::Back) {
            return Err(Stuck { why: format!("{why}: {}", error_chain(&error)) });
        }
        let count = if update.origin == UpdateOrigin::Resumed { usize::MAX } else { begun };
        self.undo_steps(update, count)
    }

    /// Undoes the first `count` steps.
    pub(super) fn undo_steps(&self, update: &mut RunningUpdate, count: usize) -> Result<(), Stuck> {
        let slots = self.slots(update)?;
        let undone =
            Activation { root: self.root, slots: &slots }.undo(&update.journal.script, count);
        let synced = undone.map_err(|error| error_chain(&error)).and_then(|left| {
            self.root.sync_filesystem().map_err(|error| error_chain(&error))?;
            Ok(left)
        });
        match (synced, update.tree.cause()) {
            (Ok(left), cause) => {
                let left = left.iter().map(|error| error_chain(error)).collect();
                update.tree = TreeState::Old { cause: cause.cloned(), left };
                Ok(())
            }
            (Err(undo), None) => Err(Stuck { why: format!("undoing it failed: {undo}") }),
            (Err(undo), Some(cause)) => {
                Err(Stuck { why: format!("{cause}; undoing it failed: {undo}") })
            }
        }
    }

    pub(super) fn slots(&self, update: &mut RunningUpdate) -> Result<Arc<Directory>, Stuck> {
        if update.slots.is_none() {
            let name = update.phase.directory(update.update_id());
            let opened = self.directories.undo.open_child(&name);
            let slots = opened.map_err(|error| Stuck { why: error_chain(&error) })?;
            update.slots = Some(Arc::new(slots));
        }
        Ok(Arc::clone(update.slots.as_ref().expect("they are opened above")))
    }

    /// Makes `phase` the phase of the update.
    fn enter(&self, update: &mut RunningUpdate, phase: Phase) -> Result<(), RootError> {
        if update.phase != phase {
            let update_id = update.update_id();
            let undo = &self.directories.undo;
            let (old, new) = (update.phase.directory(update_id), phase.directory(update_id));
            undo.rename_noreplace(&old, undo, &new)?;
            update.phase = phase;
        }
        Ok(())
    }

    /// As [`Executor::enter`], and waits until that is on the medium.
    pub(super) fn enter_durably(
        &self,
        update: &mut RunningUpdate,
        phase: Phase,
    ) -> Result<(), RootError> {
        self.enter(update, phase)?;
        self.directories.undo.sync()
    }
}
