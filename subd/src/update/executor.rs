//! Carries out a committed update, or finishes an interrupted one.
//!
//! Synchronous, in one thread: the same code runs in the daemon, when it starts, in early boot with
//! `--recover`, and in tests that interrupt it at each of its system calls.
//!
//! The order of the work, and what a crash after each part leads to:
//!
//! 1. The journal is written and synced. *Before: the update was not begun. After: the next
//!    start finishes it.*
//! 2. Files that stay are linked into the slots, `staging/ID` becomes `undo/ID`, services are
//!    stopped, the steps are executed: nothing else is done between the first and the last of them.
//!    *Each step is checked again, and executed if it was not.*
//! 3. The file-system is synced, and the phase becomes [`Phase::Live`]. *The tree is not touched
//!    again.*
//! 4. Services are started, the health of the machine is checked. *Both are repeated.*
//! 5. The phase becomes [`Phase::Done`], the result is recorded durably, the journal is removed.
//!    *The rest of that is done.*
//! 6. What the slots hold is freed by the caller.
//!
//! If a step or the sync fails, all steps are undone in reverse order, except for paths that
//! another process has changed since; then the file-system is synced and services are started
//! again. The name of the directory records the direction ([`Phase::Back`]), which never changes
//! back. If undoing fails, the journal stays and [`Executor::retry`] retries.
//!
//! # Invariants
//!
//! * While the tree may be mixed there is a journal on the medium.
//! * Services that were stopped are started again, whatever happens.
//! * An update is recorded as done only when its tree has been synced.

mod tree;

use std::collections::BTreeSet;

use ::tasks::image::ImageTasks;
use api::subd::{Health, LastUpdate, TriggerFailure, UpdateOutcome};
use model::display::error_chain;
use model::image::HealthCheck;
use model::trigger::Triggers;
use model::trigger::services::ServiceCall;

use crate::root::Root;
use crate::state::directories::{Directories, empty};
use crate::state::persisted_state::PersistError;
use crate::update::journal::{self, Journal, JournalError, JournalHead};
use crate::update::running_update::{
    FinalTree, RunningUpdate, ServiceState, Stuck, TreeState, UpdateOrigin,
};
use crate::update::step::Phase;

/// Stops and starts the services of a machine.
pub trait Services {
    /// Carries out all `calls` in order; returns those that failed.
    fn drive(&self, calls: &[ServiceCall]) -> Vec<TriggerFailure>;

    /// Stops these daemon tasks and keeps them from being started; returns those that do not stop.
    fn pause_tasks(&self, _tasks: &BTreeSet<String>) -> Vec<TriggerFailure> {
        Vec::new()
    }

    /// Runs these daemon tasks and no others. Does not wait for them.
    fn run_tasks(&self, _tasks: &ImageTasks) {}
}

/// What the executor needs of the machine besides the tree and the services.
pub trait Machine {
    /// False if health checks are not run here: then an update ends without one.
    fn checks_health(&self) -> bool {
        true
    }

    /// Runs the health check of the image.
    fn check_health(&self, check: &HealthCheck) -> Health;

    /// True if the machine or subd is about to stop. A health check that fails then means nothing;
    /// the next start repeats it.
    fn is_stopping(&self) -> bool {
        false
    }

    /// Called when the tree is as planned (`is_new`) or as it was, or will not be changed for a
    /// while.
    fn tree_settled(&self, _is_new: bool) {}

    /// Records how an update ended, durably. `done` has the triggers of the image if the tree is
    /// now as planned.
    fn note(&self, last: &LastUpdate, done: Option<&Triggers>) -> Result<(), PersistError>;
}

/// Carries updates out, one at a time for each root.
#[derive(Clone, Copy)]
pub struct Executor<'a> {
    pub root: &'a Root,
    /// Where the slots and the journal are.
    pub directories: &'a Directories,
    /// `None` in early boot, when no service runs yet.
    pub services: Option<&'a dyn Services>,
    pub boot_id: &'a str,
}

/// The state of a journal when the executor returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalState {
    /// Closed; the slots may be freed.
    Closed,
    /// Open until the machine was rebooted.
    AwaitsBoot,
    /// Open until subd starts again, because subd was stopped during the health check.
    Interrupted,
    /// Cannot be closed, with the reason. [`Executor::retry`] retries.
    Stuck(String),
}

/// The state of an update when the executor returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateEnd {
    /// The reported result.
    pub last: LastUpdate,
    /// The tree; `None` if it is mixed.
    pub settled: Option<FinalTree>,
    /// The state of the journal.
    pub journal: JournalState,
    /// True if the machine must be rebooted now.
    pub reboot: bool,
}

impl Executor<'_> {
    /// Carries out an update that is staged, from its first step to its last.
    pub fn commit(&self, machine: &dyn Machine, journal: Journal) -> (RunningUpdate, UpdateEnd) {
        let mut update = RunningUpdate::new(journal, Phase::Staged);
        let Directories { journal, reserve, .. } = self.directories;
        let settled_tree = match journal::write(journal, reserve, &update.journal) {
            Ok(()) => self.settle_tree(&mut update),
            Err(error) => {
                if matches!(error, JournalError::Occupied) {
                    update.origin = UpdateOrigin::JournalOccupied;
                }
                update.tree = TreeState::untouched(error_chain(&error));
                Ok(())
            }
        };
        let ended = self.finish(machine, &mut update, settled_tree);
        (update, ended)
    }

    fn drive(&self, calls: &[ServiceCall]) -> Vec<TriggerFailure> {
        self.services.map_or_else(Vec::new, |services| services.drive(calls))
    }

    /// Stops tasks and then services: a task may need a service until its end.
    fn stop_services(&self, update: &mut RunningUpdate) {
        update.services = ServiceState::Stopped;
        let JournalHead { calls, tasks, .. } = &update.journal.head;
        let (tasks, before) = match update.phase {
            Phase::Undoing => (&tasks.stop_to_undo, &calls.undo().before),
            _ => (&tasks.stop, &calls.before),
        };
        let mut failed = self.services.map_or_else(Vec::new, |all| all.pause_tasks(tasks));
        failed.extend(self.drive(before));
        update.failures.extend(failed);
    }

    fn run_tasks(&self, tasks: &ImageTasks) {
        if let Some(services) = self.services {
            services.run_tasks(tasks);
        }
    }

    /// Does the work after the tree: services, the health check, the record of the result; and
    /// closes the journal.
    pub fn finish(
        &self,
        machine: &dyn Machine,
        update: &mut RunningUpdate,
        settled_tree: Result<(), Stuck>,
    ) -> UpdateEnd {
        machine.tree_settled(update.tree == TreeState::New);
        if let Err(stuck) = settled_tree {
            return self.end_stuck(machine, update, stuck);
        }
        if update.services != ServiceState::Complete {
            match update.tree {
                TreeState::New => self.start_services(update),
                TreeState::Old { .. } | TreeState::Mixed { .. } => self.restart_services(update),
            }
            if self.awaits_boot(machine, update) {
                return self.await_boot(machine, update);
            }
            match self.check_health(machine, update) {
                Ok(true) => {}
                Ok(false) => {
                    let (last, settled) = (update.last(UpdateOutcome::Done), update.settled());
                    let journal = JournalState::Interrupted;
                    return UpdateEnd { last, settled, journal, reboot: false };
                }
                Err(stuck) => return self.end_stuck(machine, update, stuck),
            }
            update.services = ServiceState::Complete;
        }
        self.close(machine, update)
    }

    /// Retries to undo the tree, or to close the journal.
    pub fn retry(&self, machine: &dyn Machine, update: &mut RunningUpdate) -> UpdateEnd {
        if update.settled().is_none() {
            let direction = match &update.phase {
                Phase::Undoing => Phase::Undoing,
                _ => Phase::Back,
            };
            let entered = self.enter_durably(update, direction);
            let entered = entered.map_err(|error| Stuck { why: error_chain(&error) });
            if let Err(stuck) = entered.and_then(|()| self.undo_steps(update, usize::MAX)) {
                return self.stuck_end(update, stuck);
            }
            // The services were started although the tree was mixed.
            self.stop_services(update);
        }
        self.finish(machine, update, Ok(()))
    }

    fn start_services(&self, update: &mut RunningUpdate) {
        update.services = ServiceState::Started;
        let mut failures = std::mem::take(&mut update.failures);
        let JournalHead { calls, triggers, tasks, .. } = &update.journal.head;
        // A reboot has started everything.
        if !(calls.reboot && self.was_booted(update)) {
            failures.extend(self.drive(&calls.after));
            // After a failure there is no reboot.
            if calls.reboot && !failures.is_empty() {
                failures.extend(self.drive(&calls.instead_of_reboot(triggers)));
            }
        }
        // A task that runs once must not begin right before a reboot.
        if !calls.reboot || self.was_booted(update) || !failures.is_empty() {
            self.run_tasks(&tasks.new);
        }
        update.failures = failures;
    }

    /// True if the machine was booted since the tree became as planned.
    fn was_booted(&self, update: &RunningUpdate) -> bool {
        match &update.phase {
            Phase::Live { boot_id } => boot_id != self.boot_id,
            Phase::Done => update.journal.head.boot_id != self.boot_id,
            _ => false,
        }
    }

    /// True if the health can be checked only after a reboot.
    fn awaits_boot(&self, machine: &dyn Machine, update: &RunningUpdate) -> bool {
        let head = &update.journal.head;
        let due = head.calls.reboot && head.health_check.is_some() && update.failures.is_empty();
        due && machine.checks_health() && update.tree == TreeState::New && !self.was_booted(update)
    }

    /// Leaves the journal for the start after the reboot.
    fn await_boot(&self, machine: &dyn Machine, update: &RunningUpdate) -> UpdateEnd {
        let last = LastUpdate { awaits_boot: true, ..update.last(UpdateOutcome::Done) };
        // The machine has the image only once the health check has passed.
        if let Err(error) = machine.note(&last, None) {
            // It is recorded again after the reboot.
            tracing::error!("{}", error_chain(&error));
        }
        UpdateEnd {
            last,
            settled: update.settled(),
            journal: JournalState::AwaitsBoot,
            reboot: true,
        }
    }

    fn restart_services(&self, update: &mut RunningUpdate) {
        // An update that was never begun has stopped no service.
        if update.phase != Phase::Staged {
            update.services = ServiceState::Started;
            let undone = UpdateOutcome::Undone(String::new());
            if update.phase == Phase::Undoing && self.reboots(update, &undone) {
                return;
            }
            let JournalHead { calls, tasks, .. } = &update.journal.head;
            let failures = match update.phase {
                Phase::Undoing | Phase::Undone => self.drive(&calls.undo().after),
                _ => self.drive(&calls.restart()),
            };
            self.run_tasks(&tasks.old);
            update.failures.extend(failures);
        }
    }

    /// Checks the health of the machine, if the image says how, and undoes the update if it fails.
    /// False if that was interrupted.
    fn check_health(
        &self,
        machine: &dyn Machine,
        update: &mut RunningUpdate,
    ) -> Result<bool, Stuck> {
        let Some(check) = update.journal.head.health_check.clone() else { return Ok(true) };
        if update.tree != TreeState::New || !machine.checks_health() {
            return Ok(true);
        }
        let health = machine.check_health(&check);
        if health != Health::Passed && machine.is_stopping() {
            return Ok(false);
        }
        update.health = Some(health.clone());
        match health {
            Health::Failed(why) if check.undo => self.undo(update, why).map(|()| true),
            _ => Ok(true),
        }
    }

    /// Brings the previous tree back after the update was finished; `why` is what is reported.
    pub fn undo(&self, update: &mut RunningUpdate, why: String) -> Result<(), Stuck> {
        if let Err(error) = self.enter_durably(update, Phase::Undoing) {
            // Nothing was undone: a tree that is as planned is better than a mixed one.
            tracing::error!("the update cannot be undone: {}", error_chain(&error));
            return Ok(());
        }
        update.tree = TreeState::Mixed { cause: Some(why) };
        self.stop_services(update);
        self.undo_steps(update, usize::MAX)?;
        self.restart_services(update);
        Ok(())
    }

    /// Starts the services although the tree is mixed, and reports why.
    fn end_stuck(
        &self,
        machine: &dyn Machine,
        update: &mut RunningUpdate,
        stuck: Stuck,
    ) -> UpdateEnd {
        if update.services == ServiceState::Stopped {
            self.restart_services(update);
        }
        let ended = self.stuck_end(update, stuck);
        if let Err(error) = machine.note(&ended.last, None) {
            tracing::error!("{}", error_chain(&error));
        }
        ended
    }

    /// Records how the update ended and removes the journal.
    fn close(&self, machine: &dyn Machine, update: &mut RunningUpdate) -> UpdateEnd {
        let why = || update.rollback_reason();
        let (phase, outcome) = match (&update.tree, &update.phase) {
            (TreeState::New, _) => (Phase::Done, UpdateOutcome::Done),
            (_, Phase::Undoing | Phase::Undone) => (Phase::Undone, UpdateOutcome::Undone(why())),
            _ => (Phase::RolledBack, UpdateOutcome::RolledBack(why())),
        };
        let known = update.known.clone().filter(|known| {
            update.phase.is_over()
                && std::mem::discriminant(&known.outcome) == std::mem::discriminant(&outcome)
        });
        let mut last = known.unwrap_or_else(|| update.last(outcome));
        let reboot = self.reboots(update, &last.outcome);
        last.awaits_boot = reboot;
        let closed = self.close_journal(machine, update, phase, &last).map_err(|why| {
            let tree = match update.tree {
                TreeState::New => "all changes were made",
                TreeState::Old { .. } | TreeState::Mixed { .. } => "all changes were undone",
            };
            format!("{tree}, but that cannot be recorded: {why}")
        });
        update.known = Some(last.clone());
        let journal = closed.map_or_else(JournalState::Stuck, |()| JournalState::Closed);
        UpdateEnd { last, settled: update.settled(), journal, reboot }
    }

    /// True if the machine must be rebooted for its final tree: never if something failed.
    fn reboots(&self, update: &RunningUpdate, outcome: &UpdateOutcome) -> bool {
        let head = &update.journal.head;
        let due = match outcome {
            UpdateOutcome::Done => !self.was_booted(update),
            // The machine was booted with the tree that was undone.
            UpdateOutcome::Undone(_) => head.boot_id != self.boot_id && !update.phase.is_over(),
            _ => false,
        };
        due && head.calls.reboot && update.failures.is_empty()
    }

    fn close_journal(
        &self,
        machine: &dyn Machine,
        update: &mut RunningUpdate,
        phase: Phase,
        last: &LastUpdate,
    ) -> Result<(), String> {
        if update.phase != Phase::Staged {
            self.enter_durably(update, phase).map_err(|error| error_chain(&error))?;
        }
        let done = (update.tree == TreeState::New).then_some(&update.journal.head.triggers);
        if let Err(error) = machine.note(last, done) {
            if done.is_none() {
                return Err(error_chain(&error));
            }
            // The disk may be full because of the slots, which are no longer needed.
            let slots = self.slots(update).map_err(|stuck| stuck.why)?;
            empty(&slots).map_err(|error| error_chain(&error))?;
            self.root.sync_filesystem().map_err(|error| error_chain(&error))?;
            let done = Some(&update.journal.head.triggers);
            machine.note(last, done).map_err(|error| error_chain(&error))?;
        }
        match update.origin {
            UpdateOrigin::JournalOccupied => Ok(()),
            UpdateOrigin::Committed | UpdateOrigin::Resumed => {
                journal::remove(&self.directories.journal).map_err(|error| error_chain(&error))
            }
        }
    }

    fn stuck_end(&self, update: &RunningUpdate, stuck: Stuck) -> UpdateEnd {
        let last = update.last(UpdateOutcome::Stuck(stuck.why.clone()));
        UpdateEnd { last, settled: None, journal: JournalState::Stuck(stuck.why), reboot: false }
    }
}
