//! Which machine database is in force: takes new ones, or holds them until an operator accepts
//! them.
//!
//! # Invariants
//!
//! * What is in force stays until a database that is in order, and that changes little or was
//!   accepted, takes its place; a restart makes no difference.
//! * Nothing is held but what was offered last.
// tidy: core

use api::dominator::machine_database::HeldMdb;
use model::mdb::{Edit, Machine, Machines};
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
    /// None is held.
    #[error("no machine database is held")]
    NothingHeld,
    /// Another one is held than the one that was looked at.
    #[error("another machine database is held by now: look at it first, with domtool mdb diff")]
    OtherHeld,
}

/// What follows from an offer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdmissionOutcome {
    /// What is different for which machine.
    pub changes: Vec<MdbChange>,
    /// True if another database is in force than was kept for a restart: it is to be kept.
    pub keep: bool,
    /// What operators are to be told.
    pub notice: Option<AdmissionNotice>,
}

/// What operators are told of an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmissionNotice {
    /// It is not taken, and why.
    Refused(String),
    /// It is held, and why.
    Held(String),
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct MdbAdmission {
    current: CurrentMdb,
    limits: EditLimits,
    /// What was in force before the restart, until it is known what is now.
    kept: Option<Machines>,
    held: Option<HeldDatabase>,
    error: Option<String>,
    read: Option<Time>,
}

impl MdbAdmission {
    /// Nothing is in force yet; before a restart `kept` was.
    #[must_use]
    pub fn new(limits: EditLimits, kept: Option<Machines>) -> Self {
        Self { current: CurrentMdb::default(), limits, kept, held: None, error: None, read: None }
    }

    /// Has other limits from the next machine database on; one that is held stays so.
    pub fn set_limits(&mut self, limits: EditLimits) {
        self.limits = limits;
    }

    /// Is offered a machine database.
    pub fn offer(&mut self, machines: Machines, now: Time) -> AdmissionOutcome {
        self.error = None;
        self.read = Some(now);
        let Some(hold_reason) = self.hold_reason(&machines) else {
            (self.kept, self.held) = (None, None);
            let changes = self.current.take(machines);
            return AdmissionOutcome { keep: !changes.is_empty(), changes, notice: None };
        };
        let changes = self.restore_kept();
        let digest = digest(&machines);
        let is_same = self.held.as_ref().is_some_and(|held| held.notice.digest == digest);
        let notice = (!is_same).then(|| AdmissionNotice::Held(hold_reason.to_string()));
        if !is_same {
            let notice = HeldMdb { digest, why: hold_reason.to_string(), since: now };
            self.held = Some(HeldDatabase { machines, notice });
        }
        AdmissionOutcome { changes, keep: false, notice }
    }

    /// Is offered something that is no machine database, and why.
    pub fn refuse(&mut self, why: String) -> AdmissionOutcome {
        let changes = self.restore_kept();
        self.held = None;
        let is_same = self.error.as_ref() == Some(&why);
        let notice = (!is_same).then(|| AdmissionNotice::Refused(why.clone()));
        self.error = Some(why);
        AdmissionOutcome { changes, keep: false, notice }
    }

    /// Puts the machine database that is held in force, if it is the one with this digest.
    ///
    /// # Errors
    ///
    /// [`AcceptError`]; nothing is changed then.
    pub fn accept(&mut self, digest: &ObjectId) -> Result<AdmissionOutcome, AcceptError> {
        let held = self.held.take_if(|held| held.notice.digest == *digest);
        let Some(held) = held else {
            let is_held = self.held.is_some();
            return Err(if is_held { AcceptError::OtherHeld } else { AcceptError::NothingHeld });
        };
        Ok(AdmissionOutcome { changes: self.current.take(held.machines), keep: true, notice: None })
    }

    /// Why `machines` would be held, if they would.
    #[must_use]
    pub fn hold_reason(&self, machines: &Machines) -> Option<HoldReason> {
        match &self.kept {
            None => self.current.hold_reason(machines, self.limits),
            Some(kept) => {
                let mut known = self.current.clone();
                known.take(kept.clone());
                known.hold_reason(machines, self.limits)
            }
        }
    }

    /// Goes on with what was in force before the restart, if nothing else is in force yet.
    fn restore_kept(&mut self) -> Vec<MdbChange> {
        self.kept.take().map_or_else(Vec::new, |kept| self.current.take(kept))
    }

    /// The machines of the database in force.
    #[must_use]
    pub fn current(&self) -> &CurrentMdb {
        &self.current
    }

    /// The database in force.
    #[must_use]
    pub fn in_force(&self) -> Machines {
        let machines = self.current.machines().iter();
        machines.map(|(name, machine)| (name.clone(), Machine::clone(machine))).collect()
    }

    /// The database that is held.
    #[must_use]
    pub fn held(&self) -> Option<(&HeldMdb, &Machines)> {
        self.held.as_ref().map(|held| (&held.notice, &held.machines))
    }

    /// What the database that is held would change.
    #[must_use]
    pub fn edit(&self) -> Option<(HeldMdb, Edit)> {
        let held = self.held.as_ref()?;
        Some((held.notice.clone(), Edit::between(&self.in_force(), &held.machines)))
    }

    /// Why what was offered last is no machine database.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// When one was last offered that is in order.
    #[must_use]
    pub fn read(&self) -> Option<Time> {
        self.read
    }
}

/// What tells a database from others.
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
        (outcome.changes.len(), outcome.keep, outcome.notice)
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
        // The same again is no notice, and is held since then.
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
        // An edit of that time is taken without a look at what was before.
        let mut admission = restarted();
        assert_eq!(brief(admission.offer(machines(11), at(1))), taken(11));
        // One that changes too much is held, and what was in force is looked after.
        let mut admission = restarted();
        assert_eq!(brief(admission.offer(machines(3), at(1))), (12, false, lacks(9)));
        // So it is beside a file that is none.
        let mut admission = restarted();
        let refused = Some(AdmissionNotice::Refused("cut".to_owned()));
        assert_eq!(brief(admission.refuse("cut".to_owned())), (12, false, refused));
        assert_eq!(brief(admission.offer(machines(12), at(1))), (0, false, None));
    }
}
