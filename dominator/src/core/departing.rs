//! Machines that have left the machine database: when their tasks are stopped, and when they are
//! forgotten.
//!
//! # Invariants
//!
//! * If more machines than [`at_once_max`] are undecided, all of them wait for an operator, also
//!   when others of them are decided or come back.
//! * A machine of the machine database is not among them.
// tidy: core

use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::Arc;

use api::dominator::departing::{DepartingMachine, DepartingOrder, DepartingState};
use api::subd::{ResourceReport, TaskReport, TaskState};
use model::mdb::Machine;
use model::time_parse::later;
use model::tree::Time;
use serde::{Deserialize, Serialize};

use crate::core::alarms::{AlarmSet, DEPARTING};

/// How long a machine is tried that is not reached, and listed after its end if it has no resource.
pub const KEPT: Duration = Duration::from_secs(7 * 86_400);

/// How many machines may leave at once, at least, without a question to an operator.
const AT_ONCE_MIN: usize = 3;

/// A machine that has left the machine database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Departed {
    pub machine: Arc<Machine>,
    /// When it left.
    pub since: Time,
    pub state: DepartingState,
    /// Since when it has this state.
    pub state_since: Time,
    /// How many tasks it has; `None` if that is not known.
    pub tasks: Option<u32>,
    /// What it has told after it left; `None` before it was asked.
    pub resources: Option<Vec<ResourceReport>>,
    /// Who decided, if an operator did.
    pub who: String,
    /// Why it is so.
    pub why: String,
}

impl Departed {
    /// True if its tasks run, and nobody has decided about them.
    fn is_undecided(&self) -> bool {
        matches!(self.state, DepartingState::Waiting | DepartingState::Undecided)
    }

    fn has_resources(&self) -> bool {
        self.resources.as_ref().is_some_and(|resources| !resources.is_empty())
    }

    /// Sets what becomes of it.
    pub fn set(&mut self, state: DepartingState, why: String, now: Time) {
        (self.state, self.state_since, self.why) = (state, now, why);
    }

    /// Decides about it, if something is to be done. `are_many` if too many are undecided.
    fn decide(
        &self,
        now: Time,
        after: Duration,
        are_many: bool,
        may_stop: bool,
    ) -> Option<Decision> {
        let is_old = now >= later(self.state_since, KEPT);
        let is_empty = self.tasks == Some(0) && self.resources.is_some();
        match self.state {
            DepartingState::Waiting if are_many => Some(Decision::Ask),
            DepartingState::Waiting => {
                (may_stop && now >= later(self.since, after)).then_some(Decision::Stop)
            }
            DepartingState::Undecided => None,
            DepartingState::Stopping => is_old.then_some(Decision::GiveUp),
            DepartingState::Stopped | DepartingState::Left | DepartingState::Elsewhere => {
                (!self.has_resources() && (is_old || is_empty)).then_some(Decision::Forget)
            }
        }
    }

    /// Takes down what was decided. Returns false if it is to be forgotten.
    fn take(&mut self, decision: Decision, now: Time) -> bool {
        match decision {
            Decision::Stop => self.set(DepartingState::Stopping, String::new(), now),
            Decision::Ask => self.set(DepartingState::Undecided, String::new(), now),
            Decision::GiveUp if self.has_resources() => {
                self.set(DepartingState::Left, "it was not reached for a week".to_owned(), now);
            }
            Decision::GiveUp | Decision::Forget => return false,
        }
        true
    }
}

/// The machines that have left, by host name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Departing(pub BTreeMap<String, Departed>);

/// What is decided about a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Its tasks are to be stopped.
    Stop,
    /// It waits for an operator.
    Ask,
    /// It was tried for too long.
    GiveUp,
    Forget,
}

impl Decision {
    /// Says it to operators.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Stop => "its tasks are stopped: it has left the machine database",
            Self::Ask => "too many machines have left the machine database: an operator decides",
            Self::GiveUp => {
                "it has left the machine database and was not reached for a week: its \
                             tasks are left as they are"
            }
            Self::Forget => "it has left the machine database, and is forgotten",
        }
    }
}

/// Returns how many machines of a fleet of so many may leave at once without a question.
#[must_use]
pub fn at_once_max(fleet: usize) -> usize {
    AT_ONCE_MIN.max(fleet / 100)
}

impl Departing {
    /// Takes that a machine has left. `tasks` is how many it has.
    pub fn leave(&mut self, machine: Arc<Machine>, tasks: Option<u32>, now: Time) {
        let (who, why) = Default::default();
        let state = match tasks {
            Some(0) => DepartingState::Stopped,
            _ => DepartingState::Waiting,
        };
        self.0.entry(machine.hostname.clone()).or_insert(Departed {
            machine,
            since: now,
            state,
            state_since: now,
            tasks,
            resources: None,
            who,
            why,
        });
    }

    /// Decides, and takes down what was decided, of which it returns what is of interest. `listed`
    /// is how many machines the machine database has, and `may_stop` whether tasks may be stopped
    /// now.
    pub fn decide(
        &mut self,
        now: Time,
        listed: usize,
        after: Duration,
        may_stop: bool,
    ) -> Vec<(String, Decision)> {
        let undecided = self.0.values().filter(|departed| departed.is_undecided()).count();
        let are_many = undecided > at_once_max(listed + undecided);
        let mut decisions = Vec::new();
        self.0.retain(|hostname, departed| {
            let decision = departed.decide(now, after, are_many, may_stop);
            let Some(decision) = decision else { return true };
            // One that had no tasks was of no interest.
            if decision != Decision::Forget || departed.tasks != Some(0) {
                decisions.push((hostname.clone(), decision));
            }
            departed.take(decision, now)
        });
        decisions
    }

    /// Takes an order of an operator about a machine.
    pub fn order(
        &mut self,
        hostname: &str,
        order: DepartingOrder,
        (who, why): (&str, &str),
        now: Time,
    ) {
        if order == DepartingOrder::Forget {
            self.0.remove(hostname);
            return;
        }
        let Some(departed) = self.0.get_mut(hostname) else { return };
        let state = match order {
            DepartingOrder::Stop => DepartingState::Stopping,
            _ => DepartingState::Left,
        };
        departed.set(state, why.to_owned(), now);
        who.clone_into(&mut departed.who);
    }

    /// Returns what operators are shown. The tasks of a machine are stopped `after` it left.
    #[must_use]
    pub fn report(&self, after: Duration) -> Vec<DepartingMachine> {
        let machine = |(hostname, departed): (&String, &Departed)| {
            let waits = departed.state == DepartingState::Waiting;
            let resources = departed.resources.as_ref().map_or(0, Vec::len);
            DepartingMachine {
                hostname: hostname.clone(),
                since: departed.since,
                state: departed.state,
                due: waits.then(|| later(departed.since, after)),
                tasks: departed.tasks,
                resources: u32::try_from(resources).unwrap_or(u32::MAX),
                who: departed.who.clone(),
                why: departed.why.clone(),
            }
        };
        self.0.iter().map(machine).collect()
    }

    /// Raises the alarm that machines wait for an operator.
    pub fn raise_alarm(&self, raised: &mut AlarmSet) {
        let undecided = self.0.values().filter(|one| one.state == DepartingState::Undecided);
        let Some(first) = undecided.clone().map(|one| one.state_since).min() else { return };
        let count = undecided.count();
        let text = format!(
            "{count} of the machines that have left the machine database keep their tasks until \
             an operator decides, because they were too many at once: domtool departing list"
        );
        raised.add(DEPARTING, "", Some(first), text);
    }
}

/// Returns true if nothing of a task of a machine that is to stop all tasks runs any more.
#[must_use]
pub fn has_stopped(report: &TaskReport) -> bool {
    report.state != TaskState::Stopping && !must_suspend(report)
}

/// Returns true if a task of a machine that is to stop all tasks has to be suspended.
#[must_use]
pub fn must_suspend(report: &TaskReport) -> bool {
    match report.state {
        TaskState::NotRun | TaskState::Refused | TaskState::Suspended => false,
        // Suspended, it would forget that it has run, or is held.
        TaskState::Idle
        | TaskState::Held
        | TaskState::NotRestarted
        | TaskState::Succeeded
        | TaskState::Failed => report.next_at.is_some(),
        TaskState::Stopping => !report.detail.starts_with("suspended: "),
        TaskState::Starting | TaskState::Running | TaskState::Unhealthy | TaskState::Waiting => {
            true
        }
    }
}

#[cfg(test)]
mod tests;
