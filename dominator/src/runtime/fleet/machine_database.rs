//! Carries out the decisions about machine databases: starts and stops drivers, and saves the
//! database in force.

use std::sync::Arc;
use std::time::Duration;

use api::dominator::MDB_REMARK;
use api::dominator::mdb::{HeldMdb, ShowMdbReply};
use model::display::error_chain;
use model::lock::locked;
use model::mdb::{Machines, MdbDiff};
use model::object::ObjectId;
use rollouts::gate::Effective;

use super::{Fleet, OrderError, stop};
use crate::core::mdb_admission::{AcceptError, AdmissionNotice, AdmissionOutcome, MdbAdmission};
use crate::core::mdb_diff::{EditLimits, MdbChange, changes_between};
use crate::core::orders::Order;
use crate::core::sub::SubOrder;
use crate::runtime::driver::peer_of;
use crate::storage::with_order;
use system::durable::DurableError;

/// The pause after a machine database could not be saved.
pub(super) const RETRY_PAUSE: Duration = Duration::from_secs(5);

impl Fleet {
    /// Takes a new machine database, or holds it if it changes too much at once. Blocks on the
    /// disk.
    pub fn take(&self, machines: Machines) {
        let now = self.shared.clock.now().wall;
        self.decide(|admission| admission.offer(machines, now));
    }

    /// Notes that the machine database has keys that nothing reads.
    pub fn note_unknown_keys(&self, unknown: Option<String>) {
        let former = std::mem::replace(&mut *locked(&self.mdb_unknown_keys), unknown.clone());
        if let Some(unknown) = unknown.filter(|unknown| former.as_ref() != Some(unknown)) {
            tracing::warn!("{MDB_REMARK}{unknown}");
        }
    }

    /// Notes why the machine database is not taken; the last good one stays in force.
    pub fn refuse(&self, why: String) {
        self.decide(|admission| admission.refuse(why));
    }

    /// Puts the machine database that is held in force, if it is the one with this digest. On an
    /// error it is held on. Blocks on the disk.
    pub fn accept(&self, digest: &ObjectId, who: &str, why: &str) -> Result<(), OrderError> {
        let order = Order::new("mdb-accept", who).about(digest).why(why).checked()?;
        let _decision = locked(&self.mdb_decisions);
        let mut admission = self.locked().admission.clone();
        let accepted = admission.accept(digest);
        accepted.map_err(|source| OrderError::Accept { source })?;
        let before = self.state().machines.get();
        let machines = Some(admission.current().machines().clone());
        self.state().machines.set_through(machines, with_order::<OrderError>(&order))?;
        self.note_departing(Option::as_ref(&before), admission.current().machines());
        *locked(&self.mdb_save_error) = None;
        tracing::warn!(who, why, %digest, "the machine database that was held is accepted");
        self.carry_out(admission);
        self.rollouts_changed.notify_one();
        self.forget_pauses();
        self.forget_rollbacks();
        self.forget_task_orders();
        Ok(())
    }

    /// Sets how much a machine database may change at once. Blocks on the disk.
    pub fn set_mdb_limits(&self, limits: EditLimits) {
        let _decision = locked(&self.mdb_decisions);
        self.locked().admission.set_limits(limits);
    }

    /// Returns the machine database in force, or the one that is held.
    pub fn mdb(&self, held: bool) -> Result<ShowMdbReply, OrderError> {
        let inner = self.locked();
        let notice = inner.admission.held().map(|(notice, _)| notice.clone());
        let machines = match (held, inner.admission.held()) {
            (true, Some((_, machines))) => machines.values().cloned().collect(),
            (true, None) => return Err(OrderError::Accept { source: AcceptError::NothingHeld }),
            (false, _) => inner.admission.in_force().into_values().collect(),
        };
        Ok(ShowMdbReply { machines, held: notice })
    }

    /// Returns the machine database that is held, and what it would change.
    pub fn held(&self) -> Option<(HeldMdb, MdbDiff)> {
        self.locked().admission.edit()
    }

    /// Makes a decision, saves the machine database that it puts in force, and carries it out.
    fn decide(&self, decide: impl FnOnce(&mut MdbAdmission) -> AdmissionOutcome) {
        let _decision = locked(&self.mdb_decisions);
        let mut admission = self.locked().admission.clone();
        let outcome = decide(&mut admission);
        log_notice(outcome.notice);
        let machines = admission.current().machines().clone();
        let (count, changed) = (machines.len(), outcome.changes.len());
        if outcome.must_save {
            self.note_departing(Option::as_ref(&self.state().machines.get()), &machines);
            // A database that cannot be saved is in force all the same, and an alarm says so. After
            // a restart before it is saved, the next one is compared with the one saved before.
            self.state().machines.set_behind(Some(machines));
            if self.save_mdb().is_err() {
                self.mdb_saver.notify();
            }
        }
        self.carry_out(admission);
        if changed > 0 {
            self.rollouts_changed.notify_one();
            let in_force = format!("machines={count} changed={changed}");
            self.shared.audit.record_decision(
                "take-mdb",
                &in_force,
                "the machine database has changed",
            );
            self.forget_pauses();
            self.forget_rollbacks();
            self.forget_task_orders();
        }
    }

    /// Saves the machine database in force, unless it is on the disk.
    fn save_mdb(&self) -> Result<(), DurableError> {
        let result = self.state().machines.save();
        *locked(&self.mdb_save_error) = result.as_ref().err().map(|error| error_chain(error));
        result
    }

    /// Tries again to save a machine database that could not be saved, until the fleet stops.
    pub async fn save_mdb_again(self: Arc<Self>) {
        let fleet = Arc::clone(&self);
        self.mdb_saver.run(move || fleet.save_mdb(), &self.stop).await;
    }

    /// Puts a decision in force: starts, updates and stops drivers.
    pub(super) fn carry_out(&self, admission: MdbAdmission) {
        let mut guard = self.locked();
        let inner = &mut *guard;
        let before = self.wanted_images(inner);
        self.gate_content(admission.current().machines());
        let Effective { records: effective, inactive } =
            self.effective(admission.current().machines());
        self.tell_inactive(inner, inactive);
        let changes = changes_between(&inner.effective, &effective);
        (inner.admission, inner.effective) = (admission, effective);
        self.shared.images.keep(self.kept_images());
        // A rollout that has begun needs images before it changes any record.
        let after = self.wanted_images(inner);
        if changes.is_empty() {
            self.shared.images.want(&after);
            return;
        }
        let machines = inner.effective.len();
        tracing::info!(machines, changes = changes.len(), "a machine database is in force");
        // Old images stay until no driver watches them.
        self.shared.images.want(&before.union(&after).cloned().collect());
        for change in changes {
            match change {
                MdbChange::Start(machine) => self.start(inner, machine),
                MdbChange::Update(machine) => {
                    let watched = inner.watched.get_mut(&machine.hostname);
                    let port = self.shared.subd_port;
                    match watched {
                        Some(watched)
                            if peer_of(&watched.machine, port) == peer_of(&machine, port) =>
                        {
                            watched.machine = Arc::clone(&machine);
                            // Its tags may have changed.
                            let limits = self.state().settings.get().limits_of(&machine);
                            watched.handle.order(SubOrder::SetLimits(limits), &self.shared);
                            watched.handle.assign(machine);
                        }
                        // Another address is another sub.
                        _ => {
                            stop(inner, &machine.hostname);
                            self.start(inner, machine);
                        }
                    }
                }
                MdbChange::Stop(hostname) => {
                    stop(inner, &hostname);
                    self.shared.identities.leave(&hostname);
                    self.shared.computed.forget(&hostname);
                    self.shared.permits.leave(&hostname);
                }
            }
        }
        self.shared.images.want(&after);
        self.shared.identities.forget_unlisted();
        let machines = &inner.effective;
        self.shared.computed.forget_others(|hostname| machines.contains_key(hostname));
        self.shared.claim_service.set_machines(inner.effective.values(), &after);
    }
}

fn log_notice(notice: Option<AdmissionNotice>) {
    match notice {
        None => {}
        Some(AdmissionNotice::Refused(why)) => {
            tracing::error!("the machine database is not taken, the last good one stays: {why}");
        }
        Some(AdmissionNotice::Held(why)) => {
            tracing::error!("the machine database is held until an operator accepts it: {why}");
        }
    }
}
