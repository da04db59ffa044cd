//! Carries an update out from its journal to its end, or finishes one that was interrupted.
//!
//! Synchronous, in one thread: the same code runs in a daemon, at its start, in early boot with
//! `--recover`, and in tests that cut it off at each of its system calls.
//!
//! The order of things, and what a crash after each of them leads to:
//!
//! 1. The journal is written and synced. *Before: the update was not begun. After: it is finished
//!    by whoever starts next.*
//! 2. Files that stay get their further names in the slots, `staging/ID` becomes `undo/ID`,
//!    services are stopped, the steps are taken: nothing else is done between the first and the
//!    last of them. *Each step is looked at again and done if it was not.*
//! 3. The file-system is synced, and the phase becomes [`Phase::Live`]. *The tree is not touched
//!    again.*
//! 4. Services are started, the health of the machine is checked. *Both are done again.*
//! 5. The phase becomes [`Phase::Done`], the result is noted durably, the journal is removed. *What
//!    is left of that is done.*
//! 6. What the slots hold is freed by the caller.
//!
//! If a step or the sync fails, all steps are undone, in reverse order, but for paths that somebody
//! else has changed since; the file-system is synced, services are started again. The direction is
//! in the name of the directory ([`Phase::Back`]), and does not change any more. If undoing fails
//! the journal stays, and [`Executor::retry`] tries again.
//!
//! # Invariants
//!
//! * While the tree may be mixed there is a journal on the medium.
//! * Services that were stopped are started again, whatever happens.
//! * An update is noted as done only when its tree has been synced.

use std::sync::Arc;
use std::time::Duration;

use api::subd::{Health, LastUpdate, Outcome, TriggerFailure};
use model::image::HealthCheck;
use model::path::TreePath;
use model::report::report;
use model::trigger::Triggers;
use model::trigger::services::ServiceCall;

use super::activate::{Activation, StepError};
use super::journal::{self, Journal, JournalError};
use super::phase::Phase;
use crate::root::{Directory, Root, RootError};
use crate::state::directories::{Directories, directory_name, empty};
use crate::state::persisted_state::PersistError;
use system::clock::wall;

/// What drives the services of a machine.
pub trait Services {
    /// Carries out `calls` in order; gives those that failed. A failure does not keep the others
    /// from being carried out.
    fn drive(&self, calls: &[ServiceCall]) -> Vec<TriggerFailure>;
}

/// What comes after an update.
pub trait Machine {
    /// Runs the health check of the image.
    fn check_health(&self, check: &HealthCheck) -> Health;

    /// True if the machine or subd is about to stop: then a check that fails says nothing, and the
    /// next start makes it again.
    fn is_stopping(&self) -> bool {
        false
    }

    /// Hears that the tree is as planned or as it was, or will not be touched for a while.
    fn tree_settled(&self) {}

    /// Notes how an update ended, durably; `done` has the triggers of the image if the tree is now
    /// as planned.
    ///
    /// # Errors
    ///
    /// [`PersistError`] if it may be forgotten.
    fn note(&self, last: &LastUpdate, done: Option<&Triggers>) -> Result<(), PersistError>;
}

/// Carries updates out. One at a time for each root.
#[derive(Clone, Copy)]
pub struct Executor<'a> {
    /// The tree.
    pub root: &'a Root,
    /// Where the slots and the journal are.
    pub directories: &'a Directories,
    /// The services; `None` where none runs yet and whoever comes later starts them.
    pub services: Option<&'a dyn Services>,
    /// This boot.
    pub boot_id: &'a str,
}

/// What has become of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinalTree {
    /// It is as planned.
    New,
    /// It is as it was.
    Old,
}

/// An update that has a journal.
#[derive(Debug)]
pub struct RunningUpdate {
    /// What it is.
    pub journal: Journal,
    /// How far it has come, by the name of the directory with its slots.
    pub phase: Phase,
    /// What is known of its end, if that was noted before it was interrupted.
    pub known: Option<LastUpdate>,
    origin: Origin,
    tree: TreeState,
    services: ServiceState,
    /// Opened when they are needed first.
    slots: Option<Arc<Directory>>,
    /// From the first visible change to the last.
    window: Duration,
    failures: Vec<TriggerFailure>,
    health: Option<Health>,
}

/// How this process came by an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// It was committed here: no step was taken that this process did not take.
    Committed,
    /// Its journal was found: any number of its steps may have been taken.
    Resumed,
    /// It was refused, because the journal of another update is in its place.
    JournalOccupied,
}

/// The tree of a running update.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TreeState {
    /// Any number of steps may have been taken. `cause` is why they are to be undone, if this
    /// process knows.
    Mixed { cause: Option<String> },
    /// As planned.
    New,
    /// As it was. `left` names what was not put back, because somebody else has changed it since.
    Old { cause: Option<String>, left: Vec<String> },
}

impl TreeState {
    /// The tree is as it was: not a step was taken.
    fn untouched(cause: String) -> Self {
        Self::Old { cause: Some(cause), left: Vec::new() }
    }

    fn cause(&self) -> Option<&String> {
        match self {
            Self::Mixed { cause } | Self::Old { cause, .. } => cause.as_ref(),
            Self::New => None,
        }
    }
}

/// The services of a running update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServiceState {
    /// Nothing was done to them, as far as this process knows.
    Untouched,
    Stopped,
    Started,
    /// They are started and the health is checked: only the journal is to be closed.
    Complete,
}

/// Why the tree is neither as planned nor as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Stuck {
    /// Why, for people.
    pub why: String,
}

/// What is there of an update is not enough to finish or to undo it: nothing must be guessed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LostError {
    /// The journal is there and cannot be used.
    #[error("an update was interrupted and its journal cannot be used")]
    Journal {
        /// Why.
        source: JournalError,
    },
    /// The journal is not there, or is damaged.
    #[error(
        "an update was interrupted and has no journal; what it displaced is in \
         /.subd/undo/{name}: repair the tree, then remove that directory"
    )]
    NoJournal {
        /// The directory with what it displaced.
        name: String,
    },
    /// The directories cannot be read.
    #[error("cannot find out whether an update was interrupted")]
    Directories {
        /// What and why.
        #[from]
        source: RootError,
    },
}

/// What has become of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalState {
    /// It is closed. What the slots hold may be freed.
    Closed,
    /// It is open until the machine has been rebooted.
    AwaitsBoot,
    /// It is open until subd starts again, because subd was stopped while the health was checked.
    Interrupted,
    /// It cannot be closed: why. [`Executor::retry`] tries again.
    Stuck(String),
}

/// How far an update has come when the executor is through with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateEnd {
    /// What is reported of it.
    pub last: LastUpdate,
    /// The tree; `None` if it is stuck between the two.
    pub settled: Option<FinalTree>,
    /// What has become of the journal.
    pub journal: JournalState,
    /// True if the machine is to be rebooted now.
    pub reboot: bool,
}

impl RunningUpdate {
    fn new(journal: Journal, phase: Phase) -> Self {
        Self {
            journal,
            phase,
            known: None,
            origin: Origin::Committed,
            tree: TreeState::Mixed { cause: None },
            services: ServiceState::Untouched,
            slots: None,
            window: Duration::ZERO,
            failures: Vec::new(),
            health: None,
        }
    }

    /// Which update.
    #[must_use]
    pub fn update_id(&self) -> u64 {
        self.journal.head.update_id
    }

    /// What has become of the tree, as far as it is known.
    #[must_use]
    pub fn settled(&self) -> Option<FinalTree> {
        match self.tree {
            TreeState::Mixed { .. } => None,
            TreeState::New => Some(FinalTree::New),
            TreeState::Old { .. } => Some(FinalTree::Old),
        }
    }

    /// The paths that its steps are for.
    pub fn paths(&self) -> impl Iterator<Item = &TreePath> {
        self.journal.script.steps.iter().map(super::step::Step::path)
    }

    /// Notes what failed besides.
    pub fn fail(&mut self, failures: Vec<TriggerFailure>) {
        self.failures = failures;
    }

    /// Why the tree is as it was, and where it is not.
    fn why_old(&self) -> String {
        let mut why = self.tree.cause().cloned().unwrap_or_else(|| INTERRUPTED.to_owned());
        if let TreeState::Old { left, .. } = &self.tree
            && let [first, others @ ..] = &**left
        {
            why.push_str(&format!("; left to who changed it meanwhile: {first}"));
            if !others.is_empty() {
                why.push_str(&format!(" ({} such paths)", left.len()));
            }
        }
        why
    }

    fn last(&self, outcome: Outcome) -> LastUpdate {
        let head = &self.journal.head;
        LastUpdate {
            update_id: head.update_id,
            image: head.image.clone(),
            outcome,
            verified_generation: None,
            operations: head.operations,
            window_ns: u64::try_from(self.window.as_nanos()).unwrap_or(u64::MAX),
            trigger_failures: self.failures.clone(),
            health: self.health.clone(),
            awaits_boot: false,
            unlocked: self.journal.script.unlocked(),
            ended: wall(),
        }
    }
}

impl Executor<'_> {
    /// Carries out an update that is staged, from its first step to its last.
    pub fn commit(&self, machine: &dyn Machine, journal: Journal) -> (RunningUpdate, UpdateEnd) {
        let mut update = RunningUpdate::new(journal, Phase::Staged);
        let carried = match journal::write(&self.directories.journal, &update.journal) {
            Ok(()) => self.carry(&mut update),
            Err(error) => {
                if matches!(error, JournalError::Occupied) {
                    update.origin = Origin::JournalOccupied;
                }
                update.tree = TreeState::untouched(report(&error));
                Ok(())
            }
        };
        let ended = self.finish(machine, &mut update, carried);
        (update, ended)
    }

    /// Looks for an update that was interrupted.
    ///
    /// # Errors
    ///
    /// [`LostError`] if there is one that can be neither finished nor undone. Nothing was changed.
    pub fn find(&self) -> Result<Option<RunningUpdate>, LostError> {
        let lost = |source| LostError::Journal { source };
        let journal = match journal::read(&self.directories.journal) {
            Ok(journal) => journal,
            Err(error @ JournalError::Damaged { .. }) => {
                self.expect_nothing_begun()?;
                tracing::error!("setting it aside, nothing was begun: {}", report(&error));
                journal::set_aside(&self.directories.journal)?;
                None
            }
            Err(error) => return Err(lost(error)),
        };
        let Some(journal) = journal else {
            self.expect_nothing_begun()?;
            // One may have been cut short while it was written.
            if let Err(error) = journal::remove(&self.directories.journal) {
                tracing::warn!("{}", report(&error));
            }
            return Ok(None);
        };
        match self.phase_of(journal.head.update_id)? {
            Some(phase) => {
                let mut update = RunningUpdate::new(journal, phase);
                update.origin = Origin::Resumed;
                if update.phase.is_over() {
                    update.services = ServiceState::Complete;
                }
                Ok(Some(update))
            }
            None => {
                let update_id = journal.head.update_id;
                tracing::warn!(update_id, "the journal of an update that was never begun");
                journal::remove(&self.directories.journal)?;
                Ok(None)
            }
        }
    }

    fn expect_nothing_begun(&self) -> Result<(), LostError> {
        for name in self.directories.undo.names()? {
            if !Phase::of_directory(&name).is_some_and(|(_, phase)| phase.is_over()) {
                let name = model::escape::escape(&name);
                return Err(LostError::NoJournal { name });
            }
        }
        Ok(())
    }

    fn phase_of(&self, update_id: u64) -> Result<Option<Phase>, LostError> {
        let names = self.directories.undo.names()?;
        let phases = names.iter().filter_map(|name| Phase::of_directory(name));
        let mut phases: Vec<Phase> =
            phases.filter(|(id, _)| *id == update_id).map(|(_, phase)| phase).collect();
        // What an earlier update of the same number left to be freed says nothing.
        phases.sort_by_key(Phase::is_over);
        let staged = self.directories.staging.names()?;
        let is_staged = staged.iter().any(|name| **name == *directory_name(update_id));
        Ok(match phases.into_iter().next() {
            Some(phase) if !is_staged || !phase.is_over() => Some(phase),
            _ => is_staged.then_some(Phase::Staged),
        })
    }

    /// Makes the tree as planned, or as it was, whatever it is now.
    ///
    /// # Errors
    ///
    /// [`Stuck`] if it can be made neither.
    pub fn carry(&self, update: &mut RunningUpdate) -> Result<(), Stuck> {
        if update.phase == Phase::Staged
            && let Err(error) = self.begin(update)
        {
            update.tree = TreeState::untouched(report(&error));
            return Ok(());
        }
        match update.phase {
            Phase::Staged | Phase::Begun => {
                self.stop_services(update);
                self.forward(update)
            }
            Phase::Back | Phase::Undoing => {
                self.stop_services(update);
                self.put_back(update, usize::MAX)
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

    fn drive(&self, calls: &[ServiceCall]) -> Vec<TriggerFailure> {
        self.services.map_or_else(Vec::new, |services| services.drive(calls))
    }

    fn stop_services(&self, update: &mut RunningUpdate) {
        update.services = ServiceState::Stopped;
        let calls = &update.journal.head.calls;
        let failures = match update.phase {
            Phase::Undoing => self.drive(&calls.undo().before),
            _ => self.drive(&calls.before),
        };
        update.failures.extend(failures);
    }

    fn forward(&self, update: &mut RunningUpdate) -> Result<(), Stuck> {
        let slots = self.slots(update)?;
        let stage = Activation { root: self.root, slots: &slots };
        let activated = stage.activate(&update.journal.script);
        let (begun, cause) = match activated {
            Err(failed) => (failed.begun, report(&failed.cause)),
            Ok(window) => {
                update.window = window;
                let boot_id = self.boot_id.to_owned();
                let settled = self.root.sync_filesystem();
                match settled.and_then(|()| self.enter(update, Phase::Live { boot_id })) {
                    Ok(()) => {
                        update.tree = TreeState::New;
                        return Ok(());
                    }
                    Err(error) => (usize::MAX, report(&error)),
                }
            }
        };
        let why = format!("{cause}; it cannot be undone");
        update.tree = TreeState::Mixed { cause: Some(cause) };
        // Nothing is undone before that is on record: whoever comes after a crash would go forward
        // from a tree that is half undone.
        if let Err(error) = self.enter_durably(update, Phase::Back) {
            return Err(Stuck { why: format!("{why}: {}", report(&error)) });
        }
        let count = if update.origin == Origin::Resumed { usize::MAX } else { begun };
        self.put_back(update, count)
    }

    /// Undoes the first `count` steps.
    fn put_back(&self, update: &mut RunningUpdate, count: usize) -> Result<(), Stuck> {
        let slots = self.slots(update)?;
        let undone =
            Activation { root: self.root, slots: &slots }.undo(&update.journal.script, count);
        let synced = undone.map_err(|error| report(&error)).and_then(|left| {
            self.root.sync_filesystem().map_err(|error| report(&error))?;
            Ok(left)
        });
        match (synced, update.tree.cause()) {
            (Ok(left), cause) => {
                let left = left.iter().map(|error| report(error)).collect();
                update.tree = TreeState::Old { cause: cause.cloned(), left };
                Ok(())
            }
            (Err(undo), None) => Err(Stuck { why: format!("undoing it failed: {undo}") }),
            (Err(undo), Some(cause)) => {
                Err(Stuck { why: format!("{cause}; undoing it failed: {undo}") })
            }
        }
    }

    fn slots(&self, update: &mut RunningUpdate) -> Result<Arc<Directory>, Stuck> {
        if update.slots.is_none() {
            let name = update.phase.directory(update.update_id());
            let opened = self.directories.undo.open_child(&name);
            let slots = opened.map_err(|error| Stuck { why: report(&error) })?;
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
    fn enter_durably(&self, update: &mut RunningUpdate, phase: Phase) -> Result<(), RootError> {
        self.enter(update, phase)?;
        self.directories.undo.sync()
    }

    /// Does what comes after the tree: services, the health check, notes; and closes the journal.
    pub fn finish(
        &self,
        machine: &dyn Machine,
        update: &mut RunningUpdate,
        carried: Result<(), Stuck>,
    ) -> UpdateEnd {
        machine.tree_settled();
        if let Err(stuck) = carried {
            return self.stay(machine, update, stuck);
        }
        if update.services != ServiceState::Complete {
            match update.tree {
                TreeState::New => self.start_new(update),
                TreeState::Old { .. } | TreeState::Mixed { .. } => self.start_again(update),
            }
            if self.awaits_boot(update) {
                return self.await_boot(machine, update);
            }
            match self.check_health(machine, update) {
                Ok(true) => {}
                Ok(false) => {
                    let (last, settled) = (update.last(Outcome::Done), update.settled());
                    let journal = JournalState::Interrupted;
                    return UpdateEnd { last, settled, journal, reboot: false };
                }
                Err(stuck) => return self.stay(machine, update, stuck),
            }
            update.services = ServiceState::Complete;
        }
        self.close(machine, update)
    }

    /// Tries again what could not be put back, or closed.
    pub fn retry(&self, machine: &dyn Machine, update: &mut RunningUpdate) -> UpdateEnd {
        if update.settled().is_none() {
            let direction = match &update.phase {
                Phase::Undoing => Phase::Undoing,
                _ => Phase::Back,
            };
            let entered = self.enter_durably(update, direction);
            let entered = entered.map_err(|error| Stuck { why: report(&error) });
            if let Err(stuck) = entered.and_then(|()| self.put_back(update, usize::MAX)) {
                return self.stuck(update, stuck);
            }
            // They have been running upon a mixed tree.
            self.stop_services(update);
        }
        self.finish(machine, update, Ok(()))
    }

    fn start_new(&self, update: &mut RunningUpdate) {
        update.services = ServiceState::Started;
        // The reboot that was due has started everything.
        if !(update.journal.head.calls.reboot && self.was_booted(update)) {
            update.failures.extend(self.drive(&update.journal.head.calls.after));
        }
    }

    /// True if the machine was booted since the tree is as planned.
    fn was_booted(&self, update: &RunningUpdate) -> bool {
        match &update.phase {
            Phase::Live { boot_id } => boot_id != self.boot_id,
            Phase::Done => update.journal.head.boot_id != self.boot_id,
            _ => false,
        }
    }

    /// True if the health can be checked only after a reboot.
    fn awaits_boot(&self, update: &RunningUpdate) -> bool {
        let head = &update.journal.head;
        let due = head.calls.reboot && head.health_check.is_some() && update.failures.is_empty();
        due && update.tree == TreeState::New && !self.was_booted(update)
    }

    /// Leaves the journal for whoever starts after the reboot.
    fn await_boot(&self, machine: &dyn Machine, update: &RunningUpdate) -> UpdateEnd {
        let last = LastUpdate { awaits_boot: true, ..update.last(Outcome::Done) };
        // The image is that of the machine only when the check has passed.
        if let Err(error) = machine.note(&last, None) {
            // It is noted again after the reboot.
            tracing::error!("{}", report(&error));
        }
        UpdateEnd {
            last,
            settled: update.settled(),
            journal: JournalState::AwaitsBoot,
            reboot: true,
        }
    }

    fn start_again(&self, update: &mut RunningUpdate) {
        // An update that was never begun has stopped nothing; of one that was undone without them
        // somebody else may have.
        if update.phase != Phase::Staged {
            update.services = ServiceState::Started;
            let calls = &update.journal.head.calls;
            let failures = match update.phase {
                Phase::Undoing | Phase::Undone => self.drive(&calls.undo().after),
                _ => self.drive(&calls.restart()),
            };
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
        if update.tree != TreeState::New {
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
    ///
    /// # Errors
    ///
    /// [`Stuck`] if the tree can't be made as it was.
    pub fn undo(&self, update: &mut RunningUpdate, why: String) -> Result<(), Stuck> {
        if let Err(error) = self.enter_durably(update, Phase::Undoing) {
            // Nothing was undone: a tree that is as planned is better than a mixed one.
            tracing::error!("the update cannot be undone: {}", report(&error));
            return Ok(());
        }
        update.tree = TreeState::Mixed { cause: Some(why) };
        self.stop_services(update);
        self.put_back(update, usize::MAX)?;
        self.start_again(update);
        Ok(())
    }

    /// Leaves the tree as it is for now.
    fn stay(&self, machine: &dyn Machine, update: &mut RunningUpdate, stuck: Stuck) -> UpdateEnd {
        if update.services == ServiceState::Stopped {
            self.start_again(update);
        }
        let ended = self.stuck(update, stuck);
        if let Err(error) = machine.note(&ended.last, None) {
            tracing::error!("{}", report(&error));
        }
        ended
    }

    /// Notes how the update ended and removes the journal.
    fn close(&self, machine: &dyn Machine, update: &mut RunningUpdate) -> UpdateEnd {
        let why = || update.why_old();
        let (phase, outcome) = match (&update.tree, &update.phase) {
            (TreeState::New, _) => (Phase::Done, Outcome::Done),
            (_, Phase::Undoing | Phase::Undone) => (Phase::Undone, Outcome::Undone(why())),
            _ => (Phase::RolledBack, Outcome::RolledBack(why())),
        };
        let known = update.known.clone().filter(|known| {
            update.phase.is_over()
                && std::mem::discriminant(&known.outcome) == std::mem::discriminant(&outcome)
        });
        let mut last = known.unwrap_or_else(|| update.last(outcome));
        let reboot = self.reboots(update, &last.outcome);
        last.awaits_boot = reboot;
        let closed = self.close_journal(machine, update, phase, &last);
        update.known = Some(last.clone());
        let journal = closed.map_or_else(JournalState::Stuck, |()| JournalState::Closed);
        UpdateEnd { last, settled: update.settled(), journal, reboot }
    }

    /// True if the machine has to be rebooted for the tree that it has in the end: never when
    /// something failed.
    fn reboots(&self, update: &RunningUpdate, outcome: &Outcome) -> bool {
        let head = &update.journal.head;
        let due = match outcome {
            Outcome::Done => !self.was_booted(update),
            // It was booted with the tree that was not wanted.
            Outcome::Undone(_) => head.boot_id != self.boot_id && !update.phase.is_over(),
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
            self.enter_durably(update, phase).map_err(|error| report(&error))?;
        }
        let done = (update.tree == TreeState::New).then_some(&update.journal.head.triggers);
        if let Err(error) = machine.note(last, done) {
            if done.is_none() {
                return Err(report(&error));
            }
            // What the slots hold may be what fills the disk, and nobody needs it any more.
            let slots = self.slots(update).map_err(|stuck| stuck.why)?;
            empty(&slots).map_err(|error| report(&error))?;
            self.root.sync_filesystem().map_err(|error| report(&error))?;
            let done = Some(&update.journal.head.triggers);
            machine.note(last, done).map_err(|error| report(&error))?;
        }
        match update.origin {
            Origin::JournalOccupied => Ok(()),
            Origin::Committed | Origin::Resumed => {
                journal::remove(&self.directories.journal).map_err(|error| report(&error))
            }
        }
    }

    fn stuck(&self, update: &RunningUpdate, stuck: Stuck) -> UpdateEnd {
        let last = update.last(Outcome::Stuck(stuck.why.clone()));
        UpdateEnd { last, settled: None, journal: JournalState::Stuck(stuck.why), reboot: false }
    }
}

/// What is reported of an update that was put back after a crash.
const INTERRUPTED: &str = "subd was interrupted while the update was put back";
