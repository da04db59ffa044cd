//! All machines of the machine database. A driver task of its own runs each of them.

mod intake;
mod orders;
mod plan;
mod records;
mod settings;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use api::access::Owned;
use api::dominator::orders::DefaultImage;
use api::dominator::plan::{Gap, MACHINES_MAX};
use api::dominator::{Brake, DominatorStatus, Status, SubDetail, SubSummary};
use api::subd::Alarm;
use model::image::ImageName;
use model::mdb::{Machine, Machines};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::alarms::Raised;
use crate::core::default_image::DefaultImageError;
use crate::core::event_filter::FilterError;
use crate::core::mdb_admission::{AcceptError, MdbAdmission};
use crate::core::mdb_diff::{EditLimits, count, images_of};
use crate::core::order::{Order, OrderTextError};
use crate::core::pauses::PauseError;
use crate::core::selectors::{HostsError, Selection, hosts_of};
use crate::core::settings::{Settings, SettingsError};
use crate::core::sub::{Sub, SubOrder};
use crate::core::warnings::sentence;
use crate::runtime::driver::{Handle, Shared, drive};
use crate::runtime::identities::TrustOrderError;
use crate::storage::{State, StateError};
use system::clock::wall;

pub use settings::SETTINGS;

/// An order that cannot be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    #[error("there is no machine {hostname} in the machine database")]
    Unknown { hostname: String },
    #[error("no unsafe update of {hostname} is pending: it is {status}: {detail}")]
    NothingToClear { hostname: String, status: Status, detail: String },
    #[error("nothing that failed is held back on {hostname}: it is {status}: {detail}")]
    NothingToRetry { hostname: String, status: Status, detail: String },
    #[error(transparent)]
    Trust(#[from] TrustOrderError),
    #[error(transparent)]
    Accept { source: AcceptError },
    #[error(transparent)]
    Pause { source: PauseError },
    #[error("no update of {hostname} is pending that could be forced: it is {status}: {detail}")]
    NothingToForce { hostname: String, status: Status, detail: String },
    #[error(transparent)]
    DefaultImage { source: DefaultImageError },
    #[error("the configuration is not changed")]
    Settings {
        #[source]
        source: SettingsError,
    },
    #[error("there is no plan for {hostname}: {}: {why}", gap.name())]
    NoPlan { hostname: String, gap: Gap, why: String },
    #[error("at most {MACHINES_MAX} machines are planned for in one call")]
    TooManyMachines,
    #[error("updates to {image} have not stopped; domtool list-stopped tells which have")]
    NotStopped { image: ImageName },
    #[error(transparent)]
    Text(#[from] OrderTextError),
    #[error(transparent)]
    Hosts(#[from] HostsError),
    #[error("the order was not carried out, because it cannot be kept")]
    State {
        #[source]
        source: StateError,
    },
    #[error("what is on record cannot be read")]
    Read {
        #[source]
        source: StateError,
    },
    #[error(
        "updates are disabled, but only until the dominator restarts, because that cannot be kept"
    )]
    Unkept {
        #[source]
        source: StateError,
    },
    #[error("bad question for events")]
    Filter {
        #[source]
        source: FilterError,
    },
    #[error("the dominator has forgotten this copy, or never had it: start again")]
    NoCopy,
    #[error("the copy cannot be read")]
    ReadCopy {
        #[source]
        source: std::io::Error,
    },
    #[error("the dominator is stopping")]
    Stopping,
}

#[derive(Debug)]
struct Watched {
    handle: Arc<Handle>,
    machine: Arc<Machine>,
    cancel: CancellationToken,
}

#[derive(Debug)]
struct Inner {
    intake: MdbAdmission,
    settings: Settings,
    watched: BTreeMap<String, Watched>,
    /// The image of machines whose record names none.
    default: Option<Arc<DefaultImage>>,
}

impl Inner {
    fn watched(&self, hostname: &str) -> Result<&Watched, OrderError> {
        let unknown = || OrderError::Unknown { hostname: hostname.to_owned() };
        self.watched.get(hostname).ok_or_else(unknown)
    }

    fn image_remarks(&self, remarks: &[(ImageName, String)]) -> Vec<String> {
        let mut machines: BTreeMap<&ImageName, usize> =
            remarks.iter().map(|(name, _)| (name, 0)).collect();
        if !machines.is_empty() {
            for name in
                self.intake.current().machines().values().flat_map(|machine| images_of(machine))
            {
                if let Some(count) = machines.get_mut(&name) {
                    *count += 1;
                }
            }
            if let Some(default) = &self.default
                && let Some(count) = machines.get_mut(&default.image)
            {
                let machines = self.intake.current().machines().values();
                *count += machines.filter(|machine| machine.required().is_none()).count();
            }
        }
        remarks.iter().map(|(name, remark)| sentence(name, machines[name], remark)).collect()
    }
}

#[derive(Debug)]
pub struct Fleet {
    shared: Arc<Shared>,
    state: Arc<State>,
    inner: Mutex<Inner>,
    /// Held while the brake changes, so that disk and memory say the same.
    ordering: tokio::sync::Mutex<()>,
    /// Held while pauses or the default image change, for the same reason. Taken before `inner`.
    orders: tokio::sync::Mutex<()>,
    /// Held while a machine database is taken, for the same reason. Taken before `orders`.
    intake: Mutex<()>,
    /// Why the machine database in force is not on the disk, if it is not.
    unkept: watch::Sender<Option<String>>,
    /// The copy of the database that is being read.
    copy: tokio::sync::Mutex<Option<records::KeptCopy>>,
    /// Held while the configuration of subs changes, for the same reason.
    configuring: tokio::sync::Mutex<()>,
    /// Held while somebody is told what would be done: one at a time is enough beside the work.
    planning: tokio::sync::Mutex<()>,
    tracker: TaskTracker,
    stop: CancellationToken,
    /// Why nobody could be told of alarms the last time.
    alarm_error: Mutex<Option<String>>,
}

impl Fleet {
    /// A fleet without machines, which had `kept` and `settings` before it was restarted; its tasks
    /// are in `tracker` and end when `stop` is cancelled.
    #[must_use]
    pub fn new(
        shared: Arc<Shared>,
        state: Arc<State>,
        mdb_limits: EditLimits,
        kept: Option<Machines>,
        settings: Settings,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let inner = Inner {
            intake: MdbAdmission::new(mdb_limits, kept),
            settings,
            watched: BTreeMap::new(),
            default: shared.default_image.borrow().clone(),
        };
        Self {
            shared,
            state,
            inner: Mutex::new(inner),
            ordering: tokio::sync::Mutex::default(),
            orders: tokio::sync::Mutex::default(),
            intake: Mutex::default(),
            unkept: watch::Sender::new(None),
            copy: tokio::sync::Mutex::default(),
            configuring: tokio::sync::Mutex::default(),
            planning: tokio::sync::Mutex::default(),
            tracker,
            stop,
            alarm_error: Mutex::default(),
        }
    }

    /// What the drivers share.
    #[must_use]
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    fn start(&self, inner: &mut Inner, machine: Arc<Machine>) {
        let cancel = self.stop.child_token();
        let handle = Handle::new(Arc::clone(&machine), &self.shared);
        handle.order(SubOrder::SetLimits(inner.settings.limits_of(&machine)), &self.shared);
        let hostname = machine.hostname.clone();
        handle.order(SubOrder::Pause(self.shared.gate.pause_of(&hostname)), &self.shared);
        let watched = Watched { handle: Arc::clone(&handle), machine, cancel: cancel.clone() };
        inner.watched.insert(hostname, watched);
        let shared = Arc::clone(&self.shared);
        // Boxed, because each layer of a task has a place for it.
        let driven = Box::pin(drive(handle, shared));
        self.tracker.spawn(async move { cancel.run_until_cancelled(driven).await.map(drop) });
    }

    /// The machines of `selection`, sorted by host name.
    #[must_use]
    pub fn list(&self, selection: &Selection) -> Vec<SubSummary> {
        let inner = self.inner.lock().expect("no holder panics");
        let port = self.shared.subd_port;
        inner
            .watched
            .values()
            .filter_map(|watched| {
                let address = watched.handle.address(port);
                watched.handle.look(|sub| {
                    let default = sub.default_image().map(|default| default.image.as_str());
                    selection
                        .wants(&watched.machine, default, sub.status())
                        .then(|| sub.summary(address))
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
        let now = wall();
        Ok(handle.look(|sub| sub.detailed(address, now)))
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

    /// The alarms that there are: the dominator's own, and those of all machines.
    #[must_use]
    pub fn raised(&self) -> Raised {
        let mut raised = Raised::of(&self.status());
        let inner = self.inner.lock().expect("no holder panics");
        for (hostname, watched) in &inner.watched {
            watched.handle.look(|sub| {
                for alarm in sub.view().into_iter().flat_map(|view| &view.report.alarms) {
                    raised.add(alarm.kind(), hostname, None, alarm.to_string());
                }
            });
        }
        raised
    }

    /// How much a machine database may change at once, from now on.
    pub fn set_mdb_limits(&self, limits: EditLimits) {
        self.inner.lock().expect("no holder panics").intake.set_limits(limits);
    }

    /// Notes why nobody could be told of alarms, or that somebody was.
    pub fn note_alarm_error(&self, error: Option<String>) {
        *self.alarm_error.lock().unwrap_or_else(PoisonError::into_inner) = error;
    }

    /// How the dominator is doing.
    #[must_use]
    pub fn status(&self) -> DominatorStatus {
        let counts = self.counts();
        let inner = self.inner.lock().expect("no holder panics");
        DominatorStatus {
            brake: self.shared.gate.brake().map(|brake| (*brake).clone()),
            counts,
            mdb_error: inner.intake.error().map(str::to_owned),
            mdb_held: inner.intake.held().map(|(notice, _)| notice.clone()),
            mdb_read: inner.intake.read(),
            mdb_unkept: self.unkept.borrow().clone(),
            image_remarks: inner.image_remarks(&self.shared.images.remarks()),
            image_server_error: self.shared.images.trouble(),
            alarm_error: self.alarm_error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            history_error: self.shared.history.trouble(),
            budgets: self.shared.claim_service.report(),
            directories: self.shared.reader.store.alive(),
            paused: self.shared.gate.paused_count(wall()),
            default_image: inner.default.as_deref().cloned(),
        }
    }

    /// Pulls the brake: when this has returned, no Commit is sent, after a restart neither.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; the brake is not on then, but with [`OrderError::Unkept`]: whoever pulls it
    /// is in need of it, even if the disk is full.
    pub async fn disable_updates(&self, reason: String, who: String) -> Result<(), OrderError> {
        let order = Order::of("disable-updates", &who).why(&reason);
        let order = order.reasoned("updates are to be disabled")?;
        let brake = Brake { reason, who, since: wall() };
        let _ordering = self.ordering.lock().await;
        tracing::warn!(who = %brake.who, reason = %brake.reason, "updates are disabled");
        self.shared.gate.pull_brake(brake.clone()).await;
        self.keep(Some(brake), order).await.map_err(|error| match error {
            OrderError::State { source } => OrderError::Unkept { source },
            error => error,
        })
    }

    /// Releases the brake.
    ///
    /// # Errors
    ///
    /// [`OrderError`]; the brake stays on then.
    pub async fn enable_updates(&self, who: String, why: String) -> Result<(), OrderError> {
        let order = Order::of("enable-updates", &who).why(&why).checked()?;
        let _ordering = self.ordering.lock().await;
        self.keep(None, order).await?;
        tracing::warn!(%who, %why, "updates are enabled");
        self.shared.gate.release_brake();
        Ok(())
    }

    async fn keep(&self, brake: Option<Brake>, order: Order) -> Result<(), OrderError> {
        self.write(move |state| state.set_brake(brake.as_ref(), &order)).await
    }

    /// Records an order that has no durable state of its own. To be called before anything is done
    /// about it; one that has state is recorded with it, by [`Fleet::write`].
    ///
    /// # Errors
    ///
    /// [`OrderError`]; the order must not be carried out then.
    pub async fn audit(&self, order: Order) -> Result<(), OrderError> {
        let order = order.checked()?;
        self.write(move |state| state.record(&order)).await
    }

    /// Writes to the state, on a thread that may wait for the disk.
    ///
    /// # Errors
    ///
    /// [`OrderError::State`]; the order must not be carried out then.
    pub async fn write<T: Send + 'static>(
        &self,
        write: impl FnOnce(&State) -> Result<T, StateError> + Send + 'static,
    ) -> Result<T, OrderError> {
        self.with_state(write).await?.map_err(|source| OrderError::State { source })
    }

    /// Reads from the state, on a thread that may wait for the disk.
    ///
    /// # Errors
    ///
    /// [`OrderError::Read`].
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&State) -> Result<T, StateError> + Send + 'static,
    ) -> Result<T, OrderError> {
        self.with_state(read).await?.map_err(|source| OrderError::Read { source })
    }

    async fn with_state<T: Send + 'static>(
        &self,
        work: impl FnOnce(&State) -> T + Send + 'static,
    ) -> Result<T, OrderError> {
        let state = Arc::clone(&self.state);
        tokio::task::spawn_blocking(move || work(&state)).await.map_err(|_| OrderError::Stopping)
    }

    /// Lets the pending unsafe update of one machine pass.
    ///
    /// # Errors
    ///
    /// [`OrderError`] if there is no such machine or update, or the order cannot be recorded.
    pub async fn clear_safety(
        &self,
        hostname: &str,
        who: &str,
        why: &str,
    ) -> Result<(), OrderError> {
        let order = Order::of("clear-safety-shutoff", who).about(hostname).why(why).checked()?;
        if self.order_if(hostname, order, Sub::has_pending_danger, SubOrder::ClearSafety).await? {
            return Ok(());
        }
        let (hostname, status, detail) = self.state_of(hostname)?;
        Err(OrderError::NothingToClear { hostname, status, detail })
    }

    /// Has one machine do what is ordered, if that `is_of_use`: it is recorded before it is carried
    /// out. False if there is nothing to do, or nothing any more.
    async fn order_if(
        &self,
        hostname: &str,
        order: Order,
        is_of_use: fn(&Sub) -> bool,
        sub_order: SubOrder,
    ) -> Result<bool, OrderError> {
        let handle = self.handle(hostname)?;
        if !handle.look(is_of_use) {
            return Ok(false);
        }
        self.audit(order.clone()).await?;
        let is_done = handle.order(sub_order, &self.shared);
        if is_done {
            let Order { verb, who, why, .. } = &order;
            tracing::warn!(who, why, host = hostname, "{verb} is carried out");
        }
        Ok(is_done)
    }

    /// A machine, and its status also in words: for those whose order was of no use.
    fn state_of(&self, hostname: &str) -> Result<(String, Status, String), OrderError> {
        let handle = self.handle(hostname)?;
        let (status, detail) = handle.look(|sub| (sub.status(), sub.detail().to_owned()));
        Ok((hostname.to_owned(), status, detail))
    }

    /// Tries again now what is held back on one machine because it failed.
    ///
    /// # Errors
    ///
    /// [`OrderError`] if there is no such machine, nothing is held back, or the order cannot be
    /// recorded.
    pub async fn retry(&self, hostname: &str, who: &str, why: &str) -> Result<(), OrderError> {
        let order = Order::of("retry", who).about(hostname).why(why).checked()?;
        if self.order_if(hostname, order, Sub::can_retry, SubOrder::Retry).await? {
            return Ok(());
        }
        let (hostname, status, detail) = self.state_of(hostname)?;
        Err(OrderError::NothingToRetry { hostname, status, detail })
    }

    /// Who owns the machine `hostname`, if it is in the machine database.
    #[must_use]
    pub fn owned_machine(&self, hostname: &str) -> Option<Owned> {
        self.handle(hostname).ok().map(|handle| handle.owned())
    }

    /// The machines that `hosts` mean, names or patterns, with who owns each.
    ///
    /// # Errors
    ///
    /// [`OrderError::Hosts`] if one of them means no machine.
    pub fn owned_machines(&self, hosts: &[String]) -> Result<Vec<(String, Owned)>, OrderError> {
        let inner = self.inner.lock().expect("no holder panics");
        let hostnames = hosts_of(hosts, &inner.watched)?;
        let of = |name: String| {
            let owned = inner.watched(&name)?.handle.owned();
            Ok((name, owned))
        };
        hostnames.into_iter().map(of).collect()
    }

    fn handle(&self, hostname: &str) -> Result<Arc<Handle>, OrderError> {
        let inner = self.inner.lock().expect("no holder panics");
        Ok(Arc::clone(&inner.watched(hostname)?.handle))
    }
}

fn stop(inner: &mut Inner, hostname: &str) {
    if let Some(watched) = inner.watched.remove(hostname) {
        watched.cancel.cancel();
    }
}
