//! Carries out the decisions about machine databases: starts and stops drivers, and saves the
//! database in force.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use api::dominator::machine_database::{HeldMdb, ShowMdbReply};
use model::image::ImageName;
use model::mdb::{Edit, Machines};
use model::object::ObjectId;
use model::report::report;

use super::{Fleet, Inner, OrderError, stop};
use crate::core::mdb_admission::{AcceptError, AdmissionNotice, AdmissionOutcome, MdbAdmission};
use crate::core::mdb_diff::MdbChange;
use crate::core::order::Order;
use crate::core::sub::SubOrder;
use crate::runtime::driver::peer_of;
use system::clock::wall;

/// How long after a machine database could not be kept it is tried again.
const KEEP_AGAIN: Duration = Duration::from_secs(5);

impl Fleet {
    /// Takes a new machine database, or holds it if it changes too much at once. Blocks on the
    /// disk.
    pub fn take(&self, machines: Machines) {
        self.decide(|intake| intake.offer(machines, wall()));
    }

    /// Notes why the machine database is not taken; the last good one stays in force.
    pub fn refuse(&self, why: String) {
        self.decide(|intake| intake.refuse(why));
    }

    /// Puts the machine database that is held in force, if it is the one with this digest. Must not
    /// be called by a task: it waits for the disk.
    ///
    /// # Errors
    ///
    /// [`OrderError::Accept`], or that the order cannot be recorded; the database is held on then.
    pub fn accept(&self, digest: &ObjectId, who: &str, why: &str) -> Result<(), OrderError> {
        let order = Order::of("mdb-accept", who).about(digest).why(why).checked()?;
        let accept = |intake: &mut MdbAdmission| {
            intake.accept(digest).map_err(|source| OrderError::Accept { source })
        };
        let _intake = self.intake.lock().unwrap_or_else(PoisonError::into_inner);
        let mut accepted = self.inner.lock().expect("no holder panics").intake.clone();
        accept(&mut accepted)?;
        self.state
            .set_machines(&accepted.in_force(), Some(&order))
            .map_err(|source| OrderError::State { source })?;
        self.unkept.send_replace(None);
        tracing::warn!(who, why, %digest, "the machine database that was held is accepted");
        {
            let mut inner = self.inner.lock().expect("no holder panics");
            let before = inner.wanted();
            let outcome = accept(&mut inner.intake)?;
            self.carry_out(&mut inner, outcome.changes, before);
        }
        self.forget_pauses();
        Ok(())
    }

    /// The machine database in force, or the one that is held.
    ///
    /// # Errors
    ///
    /// [`OrderError::Accept`] if none is held.
    pub fn mdb(&self, held: bool) -> Result<ShowMdbReply, OrderError> {
        let inner = self.inner.lock().expect("no holder panics");
        let notice = inner.intake.held().map(|(notice, _)| notice.clone());
        let machines = match (held, inner.intake.held()) {
            (true, Some((_, machines))) => machines.values().cloned().collect(),
            (true, None) => return Err(OrderError::Accept { source: AcceptError::NothingHeld }),
            (false, _) => inner.intake.in_force().into_values().collect(),
        };
        Ok(ShowMdbReply { machines, held: notice })
    }

    /// The machine database that is held, and what it would change.
    #[must_use]
    pub fn held(&self) -> Option<(HeldMdb, Edit)> {
        self.inner.lock().expect("no holder panics").intake.edit()
    }

    /// Has something decided, and carries it out.
    fn decide(&self, decide: impl FnOnce(&mut MdbAdmission) -> AdmissionOutcome) {
        // One at a time, so that the disk and memory say the same.
        let _intake = self.intake.lock().unwrap_or_else(PoisonError::into_inner);
        let (has_changed, in_force);
        let is_new = {
            let mut inner = self.inner.lock().expect("no holder panics");
            let before = inner.wanted();
            let outcome = decide(&mut inner.intake);
            tell(outcome.notice);
            has_changed = !outcome.changes.is_empty();
            let (changes, machines) =
                (outcome.changes.len(), inner.intake.current().machines().len());
            in_force = format!("machines={machines} changed={changes}");
            self.carry_out(&mut inner, outcome.changes, before);
            outcome.keep
        };
        // Before all else: what is in force must survive a crash.
        if is_new {
            self.keep_in_force();
        }
        if has_changed {
            self.shared.audit.decided("take-mdb", &in_force, "the machine database has changed");
            self.forget_pauses();
        }
    }

    /// Saves the machine database in force. Memory is ahead of the disk here: a database that
    /// cannot
    /// be saved is in force, an alarm says so, and the write is retried. After a restart before
    /// that, the next database is compared with the one saved before.
    fn keep_in_force(&self) {
        let machines = self.inner.lock().expect("no holder panics").intake.in_force();
        let error = self.state.set_machines(&machines, None).err().map(|error| report(&error));
        self.unkept.send_if_modified(|unkept| {
            match (&error, &unkept) {
                (Some(error), None) => {
                    tracing::error!("cannot save the machine database in force: {error}");
                }
                (None, Some(_)) => tracing::info!("the machine database in force is saved"),
                _ => {}
            }
            let is_other = *unkept != error;
            *unkept = error;
            is_other
        });
    }

    /// Tries again to keep what could not be kept, for ever.
    pub async fn keep_mdb(self: Arc<Self>) {
        let mut unkept = self.unkept.subscribe();
        while unkept.wait_for(Option::is_some).await.is_ok() {
            tokio::time::sleep(KEEP_AGAIN).await;
            let fleet = Arc::clone(&self);
            let keep = move || {
                let _intake = fleet.intake.lock().unwrap_or_else(PoisonError::into_inner);
                // Another one may have been kept meanwhile.
                if fleet.unkept.borrow().is_some() {
                    fleet.keep_in_force();
                }
            };
            if tokio::task::spawn_blocking(keep).await.is_err() {
                return;
            }
        }
    }

    /// Starts, updates and stops drivers. `before` are the images that were wanted before.
    fn carry_out(&self, inner: &mut Inner, changes: Vec<MdbChange>, before: BTreeSet<ImageName>) {
        if changes.is_empty() {
            return;
        }
        let machines = inner.intake.current().machines().len();
        tracing::info!(machines, changes = changes.len(), "a machine database is in force");
        let after = inner.wanted();
        // Old images stay until nobody looks at them.
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
                            // Its tags may be others now.
                            let limits = inner.settings.limits_of(&machine);
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
                }
            }
        }
        self.shared.images.want(&after);
        self.shared.identities.forget_the_others();
        self.shared.claim_service.set_machines(inner.intake.current().machines().values(), &after);
    }
}

fn tell(news: Option<AdmissionNotice>) {
    match news {
        None => {}
        Some(AdmissionNotice::Refused(why)) => {
            tracing::error!("the machine database is not taken, the last good one stays: {why}");
        }
        Some(AdmissionNotice::Held(why)) => {
            tracing::error!("the machine database is held until an operator accepts it: {why}");
        }
    }
}
