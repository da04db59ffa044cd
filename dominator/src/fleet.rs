//! All machines that are looked after, each by a task of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use common::api::dominator::{Brake, DominatorStatus, Status, SubDetail, SubSummary};
use common::api::subd::Alarm;
use common::image::ImageName;
use common::mdb::{Machine, Machines};
use common::tree::Time;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::chance::wall;
use crate::core::herd::{Change, Herd, HerdError, count};
use crate::driver::{Handle, Shared, drive, peer_of};
use crate::state::{State, StateError};

/// An order that cannot be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// The machine is not in the database.
    #[error("there is no machine {hostname} in the machine database")]
    Unknown {
        /// What was asked for.
        hostname: String,
    },
    /// No unsafe update is pending.
    #[error("no unsafe update of {hostname} is pending: it is {status}: {detail}")]
    NothingToClear {
        /// The machine.
        hostname: String,
        /// Its status.
        status: Status,
        /// The same in words.
        detail: String,
    },
    /// Nothing is held back because it failed.
    #[error("nothing that failed is held back on {hostname}: it is {status}: {detail}")]
    NothingToRetry {
        /// The machine.
        hostname: String,
        /// Its status.
        status: Status,
        /// The same in words.
        detail: String,
    },
    /// The brake was pulled without saying why.
    #[error("say why updates are to be disabled")]
    NoReason,
    /// The reason is too long.
    #[error("a reason has at most {REASON_BYTES_MAX} bytes")]
    LongReason,
    /// The order cannot be kept over a restart.
    #[error("the order was not carried out, because it cannot be kept")]
    State {
        /// Why.
        #[source]
        source: StateError,
    },
    /// The brake is on, and cannot be kept over a restart.
    #[error(
        "updates are disabled, but only until the dominator restarts, because that cannot be kept"
    )]
    Unkept {
        /// Why.
        #[source]
        source: StateError,
    },
    /// The dominator is stopping.
    #[error("the dominator is stopping")]
    Stopping,
}

/// The longest reason for disabling updates, in bytes.
pub const REASON_BYTES_MAX: usize = 4_096;

#[derive(Debug)]
struct Watched {
    handle: Arc<Handle>,
    machine: Arc<Machine>,
    cancel: CancellationToken,
}

#[derive(Debug)]
struct Inner {
    herd: Herd,
    watched: BTreeMap<String, Watched>,
    mdb_error: Option<String>,
    mdb_read: Option<Time>,
}

/// See the module's text.
#[derive(Debug)]
pub struct Fleet {
    shared: Arc<Shared>,
    state: Arc<State>,
    inner: Mutex<Inner>,
    /// Held while the brake changes, so that disk and memory say the same.
    ordering: tokio::sync::Mutex<()>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl Fleet {
    /// A fleet without machines; its tasks are in `tracker` and end when `stop` is cancelled.
    #[must_use]
    pub fn new(
        shared: Arc<Shared>,
        state: Arc<State>,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let inner = Inner {
            herd: Herd::new(shared.mdb_drop_max),
            watched: BTreeMap::new(),
            mdb_error: None,
            mdb_read: None,
        };
        Self {
            shared,
            state,
            inner: Mutex::new(inner),
            ordering: tokio::sync::Mutex::default(),
            tracker,
            stop,
        }
    }

    /// What the drivers share.
    #[must_use]
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Takes a new machine database.
    ///
    /// # Errors
    ///
    /// [`HerdError`] if it is not one to take; nothing is changed then.
    pub fn take(&self, machines: Machines) -> Result<(), HerdError> {
        let mut inner = self.inner.lock().expect("no holder panics");
        let before: BTreeSet<ImageName> = inner.herd.images();
        let changes = inner.herd.take(machines)?;
        let after = inner.herd.images();
        inner.mdb_error = None;
        inner.mdb_read = Some(wall());
        // Old images stay until nobody looks at them.
        self.shared.images.want(&before.union(&after).cloned().collect());
        if !changes.is_empty() {
            tracing::info!(
                machines = inner.herd.machines().len(),
                changes = changes.len(),
                "the machine database was read"
            );
        }
        for change in changes {
            match change {
                Change::Start(machine) => self.start(&mut inner, machine),
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
                            stop(&mut inner, &machine.hostname);
                            self.start(&mut inner, machine);
                        }
                    }
                }
                Change::Stop(hostname) => stop(&mut inner, &hostname),
            }
        }
        self.shared.images.want(&after);
        Ok(())
    }

    fn start(&self, inner: &mut Inner, machine: Arc<Machine>) {
        let cancel = self.stop.child_token();
        let handle = Handle::new(Arc::clone(&machine), &self.shared);
        let hostname = machine.hostname.clone();
        let watched = Watched { handle: Arc::clone(&handle), machine, cancel: cancel.clone() };
        inner.watched.insert(hostname, watched);
        let shared = Arc::clone(&self.shared);
        self.tracker.spawn(async move {
            cancel.run_until_cancelled(drive(handle, shared)).await;
        });
    }

    /// Notes why the machine database is not taken; the last good one stays in force.
    pub fn refuse(&self, why: String) {
        let mut inner = self.inner.lock().expect("no holder panics");
        if inner.mdb_error.as_ref() != Some(&why) {
            tracing::error!("the machine database is not taken, the last good one stays: {why}");
            inner.mdb_error = Some(why);
        }
    }

    /// The machines with one of `statuses`, or all if there are none, sorted by host name.
    #[must_use]
    pub fn list(&self, statuses: &[Status]) -> Vec<SubSummary> {
        let inner = self.inner.lock().expect("no holder panics");
        let port = self.shared.subd_port;
        inner
            .watched
            .values()
            .filter_map(|watched| {
                let address = watched.handle.address(port);
                watched.handle.look(|sub| {
                    let is_wanted = statuses.is_empty() || statuses.contains(&sub.status());
                    is_wanted.then(|| sub.summary(address))
                })
            })
            .collect()
    }

    /// All there is to tell of one machine.
    ///
    /// # Errors
    ///
    /// [`OrderError::Unknown`].
    pub fn show(&self, hostname: &str) -> Result<SubDetail, OrderError> {
        let handle = self.handle(hostname)?;
        let address = handle.address(self.shared.subd_port);
        Ok(handle.look(|sub| sub.detailed(address)))
    }

    /// How many machines have each status.
    #[must_use]
    pub fn counts(&self) -> Vec<(Status, u32)> {
        let inner = self.inner.lock().expect("no holder panics");
        count(inner.watched.values().map(|watched| watched.handle.look(|sub| sub.status())))
    }

    /// How many machines raise each kind of alarm, and how many are paused on the machine itself.
    #[must_use]
    pub fn alarms(&self) -> (BTreeMap<&'static str, u32>, u32) {
        let inner = self.inner.lock().expect("no holder panics");
        let (mut alarms, mut paused) = (BTreeMap::new(), 0);
        for watched in inner.watched.values() {
            watched.handle.look(|sub| {
                let Some(view) = sub.view() else { return };
                let kinds: BTreeSet<&str> = view.report.alarms.iter().map(Alarm::kind).collect();
                for kind in kinds {
                    *alarms.entry(kind).or_default() += 1;
                }
                paused += u32::from(view.report.paused.is_some());
            });
        }
        (alarms, paused)
    }

    /// How the dominator is doing.
    #[must_use]
    pub fn status(&self) -> DominatorStatus {
        let counts = self.counts();
        let inner = self.inner.lock().expect("no holder panics");
        DominatorStatus {
            brake: self.shared.gate.brake().map(|brake| (*brake).clone()),
            counts,
            mdb_error: inner.mdb_error.clone(),
            mdb_read: inner.mdb_read,
            image_server_error: self.shared.images.trouble(),
            directories: self.shared.reader.store.alive(),
        }
    }

    /// Pulls the brake: when this has returned, no Commit is sent, after a restart neither.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; the brake is not on then, but with [`OrderError::Unkept`]: whoever pulls it
    /// is in need of it, even if the disk is full.
    pub async fn disable_updates(&self, reason: String, who: String) -> Result<(), OrderError> {
        if reason.trim().is_empty() {
            return Err(OrderError::NoReason);
        }
        if reason.len() > REASON_BYTES_MAX || who.len() > REASON_BYTES_MAX {
            return Err(OrderError::LongReason);
        }
        let brake = Brake { reason, who, since: wall() };
        let _ordering = self.ordering.lock().await;
        tracing::warn!(who = %brake.who, reason = %brake.reason, "updates are disabled");
        self.shared.gate.pull(brake.clone()).await;
        self.keep(Some(brake)).await.map_err(|error| match error {
            OrderError::State { source } => OrderError::Unkept { source },
            error => error,
        })
    }

    /// Releases the brake.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; the brake stays on then.
    pub async fn enable_updates(&self, who: String) -> Result<(), OrderError> {
        let _ordering = self.ordering.lock().await;
        self.keep(None).await?;
        tracing::warn!(%who, "updates are enabled");
        self.shared.gate.release();
        Ok(())
    }

    async fn keep(&self, brake: Option<Brake>) -> Result<(), OrderError> {
        let state = Arc::clone(&self.state);
        tokio::task::spawn_blocking(move || state.set_brake(brake.as_ref()))
            .await
            .map_err(|_| OrderError::Stopping)?
            .map_err(|source| OrderError::State { source })
    }

    /// Lets the pending unsafe update of one machine pass.
    ///
    /// # Errors
    ///
    /// [`OrderError`] if there is no such machine or update.
    pub fn clear_safety(&self, hostname: &str) -> Result<(), OrderError> {
        let handle = self.handle(hostname)?;
        if handle.clear_safety() {
            tracing::warn!(host = hostname, "the pending unsafe update may pass");
            return Ok(());
        }
        let (status, detail) = handle.look(|sub| (sub.status(), sub.detail().to_owned()));
        Err(OrderError::NothingToClear { hostname: hostname.to_owned(), status, detail })
    }

    /// Tries again now what is held back on one machine because it failed.
    ///
    /// # Errors
    ///
    /// [`OrderError`] if there is no such machine, or nothing is held back.
    pub fn retry(&self, hostname: &str) -> Result<(), OrderError> {
        let handle = self.handle(hostname)?;
        if handle.retry() {
            tracing::warn!(host = hostname, "what failed is tried again, as an operator asks for");
            return Ok(());
        }
        let (status, detail) = handle.look(|sub| (sub.status(), sub.detail().to_owned()));
        Err(OrderError::NothingToRetry { hostname: hostname.to_owned(), status, detail })
    }

    fn handle(&self, hostname: &str) -> Result<Arc<Handle>, OrderError> {
        let inner = self.inner.lock().expect("no holder panics");
        let watched = inner.watched.get(hostname);
        let unknown = || OrderError::Unknown { hostname: hostname.to_owned() };
        Ok(Arc::clone(&watched.ok_or_else(unknown)?.handle))
    }
}

fn stop(inner: &mut Inner, hostname: &str) {
    if let Some(watched) = inner.watched.remove(hostname) {
        watched.cancel.cancel();
    }
}
