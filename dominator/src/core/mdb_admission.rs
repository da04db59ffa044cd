//! Accepts new machine databases, or holds them until an operator accepts them.
//!
//! # Invariants
//!
//! * A database stays in force, also over restarts, until a valid one replaces it that changes
//!   little or was accepted by an operator.
//! * Only the last offered database can be held.
// tidy: core

use api::dominator::mdb::HeldMdb;
use model::mdb::{Machine, Machines, MdbDiff};
use model::object::{Algorithm, ObjectId};
use model::tree::Time;

use crate::core::mdb_diff::{CurrentMdb, EditLimits, HoldReason, MdbChange};

/// A machine database that waits for an operator.
#[derive(Clone, Debug)]
struct HeldDatabase {
    machines: Machines,
    notice: HeldMdb,
}

/// Why a machine database is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    #[error("no machine database is held")]
    NothingHeld,
    /// The held database is not the one that the operator has seen.
    #[error("another machine database is held by now: look at it first, with domtool mdb diff")]
    OtherHeld,
}

/// The effects of an offered machine database.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdmissionOutcome {
    pub changes: Vec<MdbChange>,
    /// True if the database in force differs from the saved one.
    pub must_save: bool,
    pub notice: Option<AdmissionNotice>,
}

/// What is reported to operators about an offered machine database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmissionNotice {
    /// It is invalid, for this reason.
    Refused(String),
    /// It is held, for this reason.
    Held(String),
}

#[derive(Clone, Debug)]
pub struct MdbAdmission {
    current: CurrentMdb,
    limits: EditLimits,
    /// The database that was in force before the restart, until one is in force now.
    saved: Option<Machines>,
    held: Option<HeldDatabase>,
    error: Option<String>,
    read: Option<Time>,
}

impl MdbAdmission {
    /// Starts with no database in force. Before the restart it was `saved`.
    #[must_use]
    pub fn new(limits: EditLimits, saved: Option<Machines>) -> Self {
        Self { current: CurrentMdb::default(), limits, saved, held: None, error: None, read: None }
    }

    /// Sets the limits for the next databases. A held database stays held.
    pub fn set_limits(&mut self, limits: EditLimits) {
        self.limits = limits;
    }

    /// Takes a new machine database, or holds it.
    pub fn offer(&mut self, machines: Machines, now: Time) -> AdmissionOutcome {
        self.error = None;
        self.read = Some(now);
        let Some(hold_reason) = self.hold_reason(&machines) else {
            (self.saved, self.held) = (None, None);
            let changes = self.current.take(machines);
            return AdmissionOutcome { must_save: !changes.is_empty(), changes, notice: None };
        };
        let changes = self.restore_saved();
        let digest = digest(&machines);
        let is_same = self.held.as_ref().is_some_and(|held| held.notice.digest == digest);
        let notice = (!is_same).then(|| AdmissionNotice::Held(hold_reason.to_string()));
        if !is_same {
            let notice = HeldMdb { digest, why: hold_reason.to_string(), since: now };
            self.held = Some(HeldDatabase { machines, notice });
        }
        AdmissionOutcome { changes, must_save: false, notice }
    }

    /// Records why the input failed to parse.
    pub fn refuse(&mut self, why: String) -> AdmissionOutcome {
        let changes = self.restore_saved();
        self.held = None;
        let is_same = self.error.as_ref() == Some(&why);
        let notice = (!is_same).then(|| AdmissionNotice::Refused(why.clone()));
        self.error = Some(why);
        AdmissionOutcome { changes, must_save: false, notice }
    }

    /// Puts the held machine database in force if it has this digest.
    pub fn accept(&mut self, digest: &ObjectId) -> Result<AdmissionOutcome, AcceptError> {
        let held = self.held.take_if(|held| held.notice.digest == *digest);
        let Some(held) = held else {
            let is_held = self.held.is_some();
            return Err(if is_held { AcceptError::OtherHeld } else { AcceptError::NothingHeld });
        };
        Ok(AdmissionOutcome {
            changes: self.current.take(held.machines),
            must_save: true,
            notice: None,
        })
    }

    /// Returns why `machines` would be held, if they would.
    #[must_use]
    pub fn hold_reason(&self, machines: &Machines) -> Option<HoldReason> {
        match &self.saved {
            None => self.current.hold_reason(machines, self.limits),
            Some(saved) => {
                let mut known = self.current.clone();
                known.take(saved.clone());
                known.hold_reason(machines, self.limits)
            }
        }
    }

    /// Puts the database from before the restart in force, if none is in force yet.
    fn restore_saved(&mut self) -> Vec<MdbChange> {
        self.saved.take().map_or_else(Vec::new, |saved| self.current.take(saved))
    }

    #[must_use]
    pub fn current(&self) -> &CurrentMdb {
        &self.current
    }

    /// True once a machine database is in force, be it an empty one.
    #[must_use]
    pub fn is_in_force(&self) -> bool {
        self.saved.is_none() && (self.read.is_some() || !self.current.machines().is_empty())
    }

    /// Returns the machines of the database in force.
    #[must_use]
    pub fn in_force(&self) -> Machines {
        let machines = self.current.machines().iter();
        machines.map(|(name, machine)| (name.clone(), Machine::clone(machine))).collect()
    }

    /// Returns the held database.
    #[must_use]
    pub fn held(&self) -> Option<(&HeldMdb, &Machines)> {
        self.held.as_ref().map(|held| (&held.notice, &held.machines))
    }

    /// Returns what the held database would change.
    #[must_use]
    pub fn edit(&self) -> Option<(HeldMdb, MdbDiff)> {
        let held = self.held.as_ref()?;
        Some((held.notice.clone(), MdbDiff::between(&self.in_force(), &held.machines)))
    }

    /// Returns why the last offered database is invalid, if it is.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Returns when a valid database was last offered.
    #[must_use]
    pub fn read(&self) -> Option<Time> {
        self.read
    }
}

/// Returns a digest that identifies the content of a database.
fn digest(machines: &Machines) -> ObjectId {
    let text = serde_json::to_vec(machines).expect("machines are plain structures");
    Algorithm::Blake3.digest(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: EditLimits = EditLimits { drop_percent: 50, reimage_percent: None };

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn machines(count: usize) -> Machines {
        let machine = |number| Machine { hostname: format!("m{number:02}"), ..Machine::default() };
        (0..count).map(machine).map(|machine| (machine.hostname.clone(), machine)).collect()
    }

    fn taken(changes: usize) -> (usize, bool, Option<AdmissionNotice>) {
        (changes, true, None)
    }

    fn brief(outcome: AdmissionOutcome) -> (usize, bool, Option<AdmissionNotice>) {
        (outcome.changes.len(), outcome.must_save, outcome.notice)
    }

    fn lacks(dropped: usize) -> Option<AdmissionNotice> {
        let why = format!("it lacks {dropped} of the 12 machines that are known, more than 50 %");
        Some(AdmissionNotice::Held(why))
    }

    #[test]
    fn what_changes_too_much_is_held_until_it_is_accepted_or_something_else_is_offered() {
        let mut admission = MdbAdmission::new(LIMITS, None);
        assert_eq!(brief(admission.offer(machines(12), at(1))), taken(12));
        assert_eq!(brief(admission.offer(machines(12), at(2))), (0, false, None));
        assert_eq!(brief(admission.offer(machines(3), at(3))), (0, false, lacks(9)));
        // The same database again causes no second notice.
        assert_eq!(brief(admission.offer(machines(3), at(4))), (0, false, None));
        let notice = admission.held().unwrap().0.clone();
        assert_eq!((notice.since, admission.read()), (at(3), Some(at(4))));
        assert_eq!(admission.edit().unwrap().1.removed.len(), 9);

        assert_eq!(brief(admission.offer(machines(2), at(5))), (0, false, lacks(10)));
        assert_eq!(admission.accept(&notice.digest), Err(AcceptError::OtherHeld));
        assert_eq!(brief(admission.offer(machines(11), at(6))), taken(1));
        assert_eq!(admission.accept(&notice.digest), Err(AcceptError::NothingHeld));
        admission.offer(machines(3), at(7));
        assert_eq!(admission.in_force().len(), 11);
        assert_eq!(brief(admission.accept(&notice.digest).unwrap()), taken(8));
        assert_eq!((admission.in_force().len(), admission.held().is_none()), (3, true));
        admission.offer(machines(0), at(8));
        let digest = admission.held().unwrap().0.digest;
        admission.accept(&digest).unwrap();
        assert!(admission.in_force().is_empty() && admission.is_in_force());
    }

    #[test]
    fn what_is_no_database_takes_nothing_away_and_is_told_once() {
        let mut admission = MdbAdmission::new(LIMITS, None);
        admission.offer(machines(12), at(1));
        admission.offer(machines(3), at(2));
        let refused = Some(AdmissionNotice::Refused("line 3".to_owned()));
        assert_eq!(brief(admission.refuse("line 3".to_owned())), (0, false, refused));
        assert_eq!(brief(admission.refuse("line 3".to_owned())), (0, false, None));
        assert_eq!((admission.error(), admission.held().is_none()), (Some("line 3"), true));
        assert_eq!(admission.in_force().len(), 12);
        admission.offer(machines(12), at(3));
        assert_eq!(admission.error(), None);
    }

    #[test]
    fn a_restart_makes_no_difference() {
        let restarted = || MdbAdmission::new(LIMITS, Some(machines(12)));
        // A small change during that time is accepted.
        let mut admission = restarted();
        assert_eq!(brief(admission.offer(machines(11), at(1))), taken(11));
        // A large change is held, and the saved database is put in force.
        let mut admission = restarted();
        assert_eq!(brief(admission.offer(machines(3), at(1))), (12, false, lacks(9)));
        // The same if the file is invalid.
        let mut admission = restarted();
        assert!(!admission.is_in_force());
        let refused = Some(AdmissionNotice::Refused("cut".to_owned()));
        assert_eq!(brief(admission.refuse("cut".to_owned())), (12, false, refused));
        assert!(admission.is_in_force());
        assert_eq!(brief(admission.offer(machines(12), at(1))), (0, false, None));
    }
}
