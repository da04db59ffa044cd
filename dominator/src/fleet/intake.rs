//! Takes machine databases, or holds them until an operator accepts them.
//!
//! What is in force is kept in the state directory, so that a restart neither forgets what a new
//! database has to be compared with, nor looks after less because the file is damaged.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};

use common::api::dominator::machine_database::{HeldMdb, ShowMdbReply};
use common::image::ImageName;
use common::mdb::{Edit, Machine, Machines};
use common::object::{Algorithm, ObjectId};
use common::report::report;

use super::{Fleet, Inner, OrderError, stop};
use crate::chance::wall;
use crate::core::herd::Change;
use crate::driver::peer_of;

/// A machine database that waits for an operator.
#[derive(Debug)]
pub(super) struct Held {
    machines: Machines,
    notice: HeldMdb,
}

impl Held {
    /// What operators are told of it.
    pub(super) fn notice(&self) -> &HeldMdb {
        &self.notice
    }
}

impl Fleet {
    /// Takes a new machine database, or holds it if it would change too much at once. Must not be
    /// called by a task: it waits for the disk.
    pub fn take(&self, machines: Machines) {
        let _intake = self.intake.lock().unwrap_or_else(PoisonError::into_inner);
        let is_taken = {
            let mut inner = self.inner.lock().expect("no holder panics");
            let mut known = inner.herd.clone();
            if let Some(kept) = &inner.kept {
                known.take(kept.clone());
            }
            inner.mdb_error = None;
            inner.mdb_read = Some(wall());
            match known.doubt(&machines, self.shared.mdb_limits) {
                None => {
                    (inner.kept, inner.held) = (None, None);
                    self.put_in_force(&mut inner, machines.clone())
                }
                Some(doubt) => {
                    self.stay(&mut inner);
                    hold(&mut inner, machines.clone(), doubt.to_string());
                    false
                }
            }
        };
        if is_taken {
            self.keep_machines(&machines);
        }
    }

    /// Notes why the machine database is not taken; the last good one stays in force.
    pub fn refuse(&self, why: String) {
        let mut inner = self.inner.lock().expect("no holder panics");
        self.stay(&mut inner);
        inner.held = None;
        if inner.mdb_error.as_ref() != Some(&why) {
            tracing::error!("the machine database is not taken, the last good one stays: {why}");
            inner.mdb_error = Some(why);
        }
    }

    /// Puts the machine database that is held in force, if it is the one with this digest. Must not
    /// be called by a task: it waits for the disk.
    ///
    /// # Errors
    ///
    /// [`OrderError::NothingHeld`], [`OrderError::OtherHeld`].
    pub fn accept(&self, digest: &ObjectId, who: &str) -> Result<(), OrderError> {
        let _intake = self.intake.lock().unwrap_or_else(PoisonError::into_inner);
        let machines = {
            let mut inner = self.inner.lock().expect("no holder panics");
            match &inner.held {
                None => return Err(OrderError::NothingHeld),
                Some(held) if held.notice.digest != *digest => return Err(OrderError::OtherHeld),
                Some(held) => {
                    tracing::warn!(who, why = %held.notice.why, "the machine database is accepted");
                }
            }
            let held = inner.held.take().expect("was looked at under the same lock");
            self.put_in_force(&mut inner, held.machines.clone());
            held.machines
        };
        self.keep_machines(&machines);
        Ok(())
    }

    /// The machine database in force, or the one that is held.
    ///
    /// # Errors
    ///
    /// [`OrderError::NothingHeld`].
    pub fn mdb(&self, held: bool) -> Result<ShowMdbReply, OrderError> {
        let inner = self.inner.lock().expect("no holder panics");
        let notice = inner.held.as_ref().map(|held| held.notice.clone());
        let machines = match (held, &inner.held) {
            (true, Some(held)) => held.machines.values().cloned().collect(),
            (true, None) => return Err(OrderError::NothingHeld),
            (false, _) => {
                let machines = inner.herd.machines().values();
                machines.map(|machine| Machine::clone(machine)).collect()
            }
        };
        Ok(ShowMdbReply { machines, held: notice })
    }

    /// The machine database that is held, and what it would change.
    #[must_use]
    pub fn held(&self) -> Option<(HeldMdb, Edit)> {
        let inner = self.inner.lock().expect("no holder panics");
        let held = inner.held.as_ref()?;
        let in_force = inner.herd.machines().iter();
        let in_force =
            in_force.map(|(hostname, machine)| (hostname.clone(), Machine::clone(machine)));
        let edit = Edit::between(&in_force.collect(), &held.machines);
        Some((held.notice.clone(), edit))
    }

    /// Goes on with what was in force before the restart, if nothing else is yet.
    fn stay(&self, inner: &mut Inner) {
        if let Some(kept) = inner.kept.take() {
            tracing::warn!(
                machines = kept.len(),
                "goes on with the machine database that was in force before the restart"
            );
            self.put_in_force(inner, kept);
        }
    }

    /// Looks after these machines, and no others; false if they are what they were.
    fn put_in_force(&self, inner: &mut Inner, machines: Machines) -> bool {
        let before: BTreeSet<ImageName> = inner.herd.images();
        let changes = inner.herd.take(machines);
        let after = inner.herd.images();
        let is_new = !changes.is_empty();
        // Old images stay until nobody looks at them.
        self.shared.images.want(&before.union(&after).cloned().collect());
        if is_new {
            tracing::info!(
                machines = inner.herd.machines().len(),
                changes = changes.len(),
                "a machine database is in force"
            );
        }
        for change in changes {
            match change {
                Change::Start(machine) => self.start(inner, machine),
                Change::Update(machine) => {
                    let watched = inner.watched.get_mut(&machine.hostname);
                    let port = self.shared.subd_port;
                    match watched {
                        Some(watched)
                            if peer_of(&watched.machine, port) == peer_of(&machine, port) =>
                        {
                            watched.machine = Arc::clone(&machine);
                            watched.handle.assign(machine);
                        }
                        // Another address is another sub.
                        _ => {
                            stop(inner, &machine.hostname);
                            self.start(inner, machine);
                        }
                    }
                }
                Change::Stop(hostname) => stop(inner, &hostname),
            }
        }
        self.shared.images.want(&after);
        is_new
    }

    /// A database that cannot be kept is in force all the same: after a restart the next one is
    /// compared with the one before it.
    fn keep_machines(&self, machines: &Machines) {
        if let Err(error) = self.state.set_machines(machines) {
            tracing::error!("the machine database in force is not kept: {}", report(&error));
        }
    }
}

fn hold(inner: &mut Inner, machines: Machines, why: String) {
    let text = serde_json::to_vec(&machines).expect("machines are plain structures");
    let digest = Algorithm::Blake3.digest(&text);
    if inner.held.as_ref().is_some_and(|held| held.notice.digest == digest) {
        return;
    }
    tracing::error!("the machine database is held until an operator accepts it: {why}");
    let notice = HeldMdb { digest, why, since: wall() };
    inner.held = Some(Held { machines, notice });
}
