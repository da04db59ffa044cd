//! An update that has a journal: how far its tree and the services have come.

use std::sync::Arc;
use std::time::Duration;

use api::subd::{Health, LastUpdate, TriggerFailure, UpdateOutcome};
use model::display::error_chain;
use model::path::TreePath;
use model::plan::RefusedKind;
use model::tree::Tree;
use nix::errno::Errno;
use system::clock::wall;

use crate::root::Directory;
use crate::state::refusals::FailedChange;
use crate::update::activate::StepError;
use crate::update::journal::Journal;
use crate::update::step::{Phase, Step};

/// The reported reason for an update that was undone after a crash.
const INTERRUPTED: &str = "subd was interrupted while the update was undone";

/// How the tree ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinalTree {
    New,
    /// It is as it was.
    Old,
}

/// An update that has a journal.
#[derive(Debug)]
pub struct RunningUpdate {
    pub journal: Journal,
    /// How far it has come, by the name of the directory with its slots.
    pub phase: Phase,
    /// The result that was recorded before the update was interrupted.
    pub known: Option<LastUpdate>,
    pub(super) origin: UpdateOrigin,
    pub(super) tree: TreeState,
    pub(super) services: ServiceState,
    /// Opened on first use.
    pub(super) slots: Option<Arc<Directory>>,
    /// The time from the first visible change to the last.
    pub(super) window: Duration,
    pub(super) failures: Vec<TriggerFailure>,
    /// The step for which all were undone, if one failed.
    pub(super) failed_step: Option<FailedStep>,
    pub(super) health: Option<Health>,
}

/// How this process got an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UpdateOrigin {
    /// It was committed here: only this process has executed steps.
    Committed,
    /// Its journal was found: any number of its steps may have been executed.
    Resumed,
    /// It was refused, because there is a journal of another update.
    JournalOccupied,
}

/// The tree of a running update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TreeState {
    /// Any number of steps may have been executed. `cause` is why they are undone, if this process
    /// knows.
    Mixed {
        cause: Option<String>,
    },
    New,
    /// As it was. `left` names what was not undone, because another process has changed it since.
    Old {
        cause: Option<String>,
        left: Vec<String>,
    },
}

impl TreeState {
    /// The tree is as it was: no step was executed.
    pub(super) fn untouched(cause: String) -> Self {
        Self::Old { cause: Some(cause), left: Vec::new() }
    }

    pub(super) fn cause(&self) -> Option<&String> {
        match self {
            Self::Mixed { cause } | Self::Old { cause, .. } => cause.as_ref(),
            Self::New => None,
        }
    }
}

/// A step that failed because of what is at its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FailedStep {
    path: TreePath,
    kind: RefusedKind,
    why: String,
    is_race: bool,
}

impl FailedStep {
    /// Returns the step that failed with `error`; `None` if the error is not about its path.
    pub(super) fn of(step: &Step, error: &StepError) -> Option<Self> {
        let is_race = error.is_foreign_change();
        let (is_about_entry, why, leaves) = match error {
            StepError::Changed { what, .. } => {
                (true, format!("it changed since it was scanned: {what}"), false)
            }
            StepError::Root { source } | StepError::Refused { source, .. } => {
                let leaves = source.errno() == Some(Errno::EXDEV);
                (source.is_about_entry(), error_chain(source), leaves)
            }
        };
        let (path, kind) = match step {
            Step::Vanish { path, .. } | Step::RemoveDirectory { path, .. } => {
                (path.clone(), RefusedKind::Removal)
            }
            // The directory takes nothing from the staging area.
            Step::Appear { path, .. } if leaves => (path.parent()?, RefusedKind::Below),
            Step::Appear { path, .. } | Step::Exchange { path, .. } | Step::Change { path, .. } => {
                (path.clone(), RefusedKind::Any)
            }
            Step::Link { .. } | Step::Unlock { .. } | Step::Lock { .. } => return None,
        };
        is_about_entry.then_some(Self { path, kind, why, is_race })
    }

    /// Returns it as a change that failed on a machine with the tree `scanned`.
    pub(super) fn change(self, scanned: &Tree) -> FailedChange {
        let Self { path, kind, why, is_race } = self;
        match is_race {
            true => FailedChange::race(&path, kind, why, scanned),
            false => FailedChange::lasting(&path, kind, why),
        }
    }
}

/// The services of a running update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServiceState {
    /// Not changed, as far as this process knows.
    Untouched,
    Stopped,
    Started,
    /// They are started and the health is checked: only the journal must be closed.
    Complete,
}

/// Why the tree is neither as planned nor as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Stuck {
    pub why: String,
}

impl RunningUpdate {
    pub(super) fn new(journal: Journal, phase: Phase) -> Self {
        Self {
            journal,
            phase,
            known: None,
            origin: UpdateOrigin::Committed,
            tree: TreeState::Mixed { cause: None },
            services: ServiceState::Untouched,
            slots: None,
            window: Duration::ZERO,
            failures: Vec::new(),
            failed_step: None,
            health: None,
        }
    }

    /// The id of the update.
    pub fn update_id(&self) -> u64 {
        self.journal.head.update_id
    }

    /// Returns how the tree ended; `None` as long as it is mixed.
    pub fn settled(&self) -> Option<FinalTree> {
        match self.tree {
            TreeState::Mixed { .. } => None,
            TreeState::New => Some(FinalTree::New),
            TreeState::Old { .. } => Some(FinalTree::Old),
        }
    }

    /// Returns the paths of its steps.
    pub fn paths(&self) -> impl Iterator<Item = &TreePath> {
        self.journal.script.steps.iter().map(Step::path)
    }

    /// Replaces the trigger failures that are reported.
    pub fn fail(&mut self, failures: Vec<TriggerFailure>) {
        self.failures = failures;
    }

    /// Returns why the tree is as it was, and where it is not.
    pub(super) fn rollback_reason(&self) -> String {
        let mut why = self.tree.cause().cloned().unwrap_or_else(|| INTERRUPTED.to_owned());
        if let TreeState::Old { left, .. } = &self.tree
            && let [first, others @ ..] = &**left
        {
            why.push_str(&format!("; not undone because it was changed in the meantime: {first}"));
            if !others.is_empty() {
                why.push_str(&format!(" ({} such paths)", left.len()));
            }
        }
        why
    }

    pub(super) fn last(&self, outcome: UpdateOutcome) -> LastUpdate {
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
