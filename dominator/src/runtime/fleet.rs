//! The machines of the machine database, each run by a driver task, and the orders for them.

mod departing;
mod kept_files;
mod machine_database;
mod orders;
mod plan;
mod records;
mod resources;
mod rollback;
mod rollouts;
mod settings;
mod tasks;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use ::rollouts::gate::InactiveParts;
use ::rollouts::state::SharedMachines;
use ::rollouts::steps::Said;
use api::access::OwnedItem;
use api::dominator::kept_files::COUNTING_MAX;
use api::dominator::orders::DefaultImage;
use api::dominator::permits::TaskPermits;
use api::dominator::plan::{MACHINES_MAX, NoPlanReason};
use api::dominator::resources::PLANNING_MAX;
use api::dominator::{Brake, DominatorStatus, MDB_REMARK, Status, SubDetail, SubSummary};
use api::image_server::expiry::AcceptClockReply;
use api::subd::{Alarm, ResourceOrder};
use model::image::ImageName;
use model::lock::locked;
use model::mdb::{Machine, Machines};
use rpc::client::CallError;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::alarms::{
    AlarmSet, COMPUTED_FILES, CONTENT_STOPPED, IMAGE_CHANGED, OTHER_DOMINATOR, PERMIT_CONFLICT,
    PROVISION_FAILED, RESOURCE_DRIFT, ROLLOUT_COMMAND,
};
use crate::core::computed::rollout::ContentOrderError;
use crate::core::event_filter::FilterError;
use crate::core::mdb_admission::{AcceptError, MdbAdmission};
use crate::core::mdb_diff::{EditLimits, count_statuses};
use crate::core::orders::PauseError;
use crate::core::orders::{Order, OrderTextError};
use crate::core::permits::conflict_text;
use crate::core::required_image::DefaultImageError;
use crate::core::required_image::warning_text;
use crate::core::rollback::{RollbackError, Rollbacks};
use crate::core::rollouts::raise_alarms;
use crate::core::selectors::{HostsError, Selection, select_hosts};
use crate::core::settings::SettingsError;
use crate::core::sub::SubOrder;
use crate::runtime::driver::{Handle, drive};
pub use crate::runtime::fleet::rollouts::RolloutCounts;
use crate::runtime::fleet::rollouts::{AnalysisService, Progress, RolloutsChanged};
use crate::runtime::identities::TrustOrderError;
use crate::runtime::saver::Saver;
use crate::runtime::shared::Shared;
use crate::storage::{Storage, StorageError, with_order};
use system::durable::DurableError;

/// An order that cannot be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    #[error("there is no machine {hostname} in the machine database")]
    Unknown { hostname: String },
    #[error("{why}: it is {status}: {detail}")]
    NoEffect { why: String, status: Status, detail: String },
    #[error(transparent)]
    Trust(#[from] TrustOrderError),
    #[error(transparent)]
    Accept { source: AcceptError },
    #[error(transparent)]
    Pause { source: PauseError },
    #[error(transparent)]
    Rollback {
        #[from]
        source: RollbackError,
    },
    #[error(transparent)]
    DefaultImage { source: DefaultImageError },
    #[error("the configuration is not changed")]
    Settings {
        #[source]
        source: SettingsError,
    },
    #[error("the limits of {hostname} are not known: {why}")]
    NoLimits { hostname: String, why: String },
    #[error("the tasks of {hostname} are not known: {why}")]
    NoTasks { hostname: String, why: String },
    #[error("no machine that has left the machine database is called {pattern}")]
    NotDeparting { pattern: String },
    #[error("no task of the machines that are meant is called {task}")]
    NoTask { task: String },
    #[error("{hostname} does not {} the resource", .order.name())]
    Resource {
        hostname: String,
        order: ResourceOrder,
        #[source]
        source: CallError,
    },
    #[error("{hostname} takes no orders from this dominator: {why}")]
    Away { hostname: String, why: String },
    #[error("the log is not known: {hostname}: {why}")]
    NoTaskLog { hostname: String, why: String },
    #[error("invalid pattern of machines or tasks")]
    TaskPattern {
        #[source]
        source: globset::Error,
    },
    #[error("name machines and tasks; `*` stands for all")]
    NoSelection,
    #[error("there is no plan for {hostname}: {}: {why}", gap.name())]
    NoPlan {
        hostname: String,
        gap: NoPlanReason,
        why: String,
        /// True if the machine scans for the plan now.
        is_scanning: bool,
    },
    #[error("at most {MACHINES_MAX} machines are planned for in one call")]
    TooManyMachines,
    #[error("at most {COUNTING_MAX} machines count their files in one call")]
    TooManyCounting,
    #[error("at most {PLANNING_MAX} machines are asked for plans of their resources in one call")]
    TooManyPlanning,
    #[error("updates to {image} have not stopped; domtool list-stopped tells which have")]
    NotStopped { image: ImageName },
    #[error(transparent)]
    Content(#[from] ContentOrderError),
    /// About an environment or a rollout.
    #[error("{}", said.message)]
    Rollout { said: Said },
    #[error("{hostname} is not fenced; domtool list-permits tells which machines are")]
    NotFenced { hostname: String },
    #[error("{image} has not changed; domtool status tells which images have")]
    NotChanged { image: ImageName },
    #[error(transparent)]
    Text(#[from] OrderTextError),
    #[error(transparent)]
    Hosts(#[from] HostsError),
    #[error("the order was not carried out, because it cannot be saved")]
    Storage {
        #[from]
        source: StorageError,
    },
    #[error("the history cannot be read")]
    Read {
        #[source]
        source: StorageError,
    },
    #[error(
        "updates are disabled, but only until the dominator restarts, because that cannot be saved"
    )]
    Unsaved {
        #[source]
        source: StorageError,
    },
    #[error("invalid filter of events")]
    Filter {
        #[source]
        source: FilterError,
    },
    #[error("this backup does not exist or has expired: start again")]
    NoCopy,
    #[error("the copy cannot be read")]
    ReadCopy {
        #[source]
        source: std::io::Error,
    },
    #[error("the dominator is stopping")]
    Stopping,
}

impl From<Said> for OrderError {
    fn from(said: Said) -> Self {
        Self::Rollout { said }
    }
}

impl From<DurableError> for OrderError {
    fn from(error: DurableError) -> Self {
        Self::Storage { source: error.into() }
    }
}

#[derive(Debug)]
struct DrivenMachine {
    handle: Arc<Handle>,
    machine: Arc<Machine>,
    cancel: CancellationToken,
}

#[derive(Debug)]
struct FleetState {
    admission: MdbAdmission,
    /// The records that machines have: those of the machine database, with the images that
    /// environments give.
    effective: SharedMachines,
    watched: BTreeMap<String, DrivenMachine>,
    /// Of machines that have parts of environments which are not active.
    inactive: BTreeMap<String, InactiveParts>,
}

impl FleetState {
    fn watched(&self, hostname: &str) -> Result<&DrivenMachine, OrderError> {
        let unknown = || OrderError::Unknown { hostname: hostname.to_owned() };
        self.watched.get(hostname).ok_or_else(unknown)
    }

    fn image_remarks(
        &self,
        remarks: &[(ImageName, String)],
        rollbacks: &Rollbacks,
        default: Option<&DefaultImage>,
    ) -> Vec<String> {
        let mut machines: BTreeMap<&ImageName, usize> =
            remarks.iter().map(|(name, _)| (name, 0)).collect();
        if !machines.is_empty() {
            let records = self.effective.values();
            for record in records {
                // Parts have remarks of their own.
                let images = rollbacks.images_of(record, default);
                let names =
                    images.flat_map(|name| Vec::from_iter(name.parts().chain([name.clone()])));
                for name in names.collect::<BTreeSet<ImageName>>() {
                    if let Some(count) = machines.get_mut(&name) {
                        *count += 1;
                    }
                }
            }
        }
        remarks.iter().map(|(name, remark)| warning_text(name, machines[name], remark)).collect()
    }
}

#[derive(Debug)]
pub struct Fleet {
    shared: Arc<Shared>,
    /// Taken after the lock of a value that is being written.
    inner: Mutex<FleetState>,
    /// Held while the brake is pulled or released: the order that is acknowledged last must win.
    brake_orders: tokio::sync::Mutex<()>,
    /// Held from the decision on a machine database until it is in force. Taken before `inner`, and
    /// before the lock of a value.
    mdb_decisions: Mutex<()>,
    rollouts_changed: RolloutsChanged,
    rollout_progress: Mutex<Progress>,
    analysis: AnalysisService,
    mdb_saver: Saver,
    departing_attempts: Mutex<departing::Attempts>,
    /// Why the machine database in force is not on the disk, if it is not.
    mdb_save_error: Mutex<Option<String>>,
    /// Describes the keys of the machine database that nothing reads.
    mdb_unknown_keys: Mutex<Option<String>>,
    /// The copy of the database that is being read.
    copy: tokio::sync::Mutex<Option<records::OpenBackup>>,
    /// Held while plans are made for a caller: one caller at a time is enough beside the work.
    planning: tokio::sync::Mutex<()>,
    /// The same, of those who count kept files.
    counting: tokio::sync::Mutex<()>,
    /// Held while machines ask their plugins for a caller.
    planning_resources: tokio::sync::Mutex<()>,
    tracker: TaskTracker,
    stop: CancellationToken,
    /// Why the alarm command failed the last time.
    alarm_error: Mutex<Option<String>>,
}

impl Fleet {
    /// Creates a fleet without machines. Its tasks are in `tracker` and end when `stop` is
    /// cancelled.
    pub fn new(
        shared: Arc<Shared>,
        mdb_limits: EditLimits,
        tracker: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let saved = shared.state.machines.get();
        let machine =
            |(name, machine): (&String, &Arc<Machine>)| (name.clone(), (**machine).clone());
        let saved: Option<Machines> =
            Option::as_ref(&saved).map(|machines| machines.iter().map(machine).collect());
        let inner = FleetState {
            admission: MdbAdmission::new(mdb_limits, saved),
            effective: SharedMachines::new(),
            watched: BTreeMap::new(),
            inactive: BTreeMap::new(),
        };
        let retry = machine_database::RETRY_PAUSE;
        Self {
            shared,
            inner: Mutex::new(inner),
            brake_orders: tokio::sync::Mutex::default(),
            mdb_decisions: Mutex::default(),
            rollouts_changed: RolloutsChanged::default(),
            rollout_progress: Mutex::default(),
            analysis: AnalysisService::new(tracker.clone(), stop.clone()),
            mdb_saver: Saver::new("the machine database in force", retry, retry),
            departing_attempts: Mutex::default(),
            mdb_save_error: Mutex::default(),
            mdb_unknown_keys: Mutex::default(),
            copy: tokio::sync::Mutex::default(),
            planning: tokio::sync::Mutex::default(),
            counting: tokio::sync::Mutex::default(),
            planning_resources: tokio::sync::Mutex::default(),
            tracker,
            stop,
            alarm_error: Mutex::default(),
        }
    }

    /// Returns what the drivers share.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    fn state(&self) -> &Storage {
        &self.shared.state
    }

    fn locked(&self) -> MutexGuard<'_, FleetState> {
        locked(&self.inner)
    }

    fn start(&self, inner: &mut FleetState, machine: Arc<Machine>) {
        let cancel = self.stop.child_token();
        let handle = Handle::new(Arc::clone(&machine), &self.shared);
        handle.order(
            SubOrder::SetLimits(self.state().settings.get().limits_of(&machine)),
            &self.shared,
        );
        let hostname = machine.hostname.clone();
        handle.order(SubOrder::Pause(self.shared.gate.pause_of(&hostname)), &self.shared);
        let orders = self.shared.task_orders.of(&hostname);
        handle.order(SubOrder::WantTaskOrders(orders), &self.shared);
        if let Some(parts) = inner.inactive.get(&hostname) {
            handle.order(SubOrder::SetInactive(parts.clone()), &self.shared);
        }
        let watched =
            DrivenMachine { handle: Arc::clone(&handle), machine, cancel: cancel.clone() };
        inner.watched.insert(hostname, watched);
        let shared = Arc::clone(&self.shared);
        // Boxed, because each layer of a task stores the future.
        let driven = Box::pin(drive(handle, shared));
        self.tracker.spawn(async move { cancel.run_until_cancelled(driven).await.map(drop) });
    }

    /// Lists the machines of `selection`, sorted by host name.
    pub fn list(&self, selection: &Selection) -> Vec<SubSummary> {
        let inner = self.locked();
        let port = self.shared.subd_port;
        inner
            .watched
            .values()
            .filter_map(|watched| {
                let address = watched.handle.address(port);
                watched.handle.with_sub(|sub| {
                    let required = sub.required();
                    let required = required.as_ref().map(ImageName::as_str);
                    selection
                        .wants(&watched.machine, required, sub.status())
                        .then(|| sub.summary(address))
                })
            })
            .collect()
    }

    /// Returns the details of one machine.
    pub fn show(&self, hostname: &str) -> Result<SubDetail, OrderError> {
        let handle = self.handle(hostname)?;
        let address = handle.address(self.shared.subd_port);
        let now = self.shared.clock.now().wall;
        Ok(handle.with_sub(|sub| sub.full_report(address, now)))
    }

    /// Counts the machines with each status.
    pub fn counts(&self) -> Vec<(Status, u32)> {
        let inner = self.locked();
        count_statuses(
            inner.watched.values().map(|watched| watched.handle.with_sub(|sub| sub.status())),
        )
    }

    /// Counts the machines that raise each kind of alarm, and those that are paused on the machine
    /// itself.
    pub fn alarms(&self) -> (BTreeMap<&'static str, u32>, u32) {
        let inner = self.locked();
        let (mut alarms, mut paused) = (BTreeMap::new(), 0);
        for watched in inner.watched.values() {
            watched.handle.with_sub(|sub| {
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

    /// Returns the name by which subs know this dominator.
    pub fn name(&self) -> &str {
        &self.shared.holder.dominator
    }

    /// Returns all alarms: those of the dominator and those of the machines.
    pub fn raised(&self) -> AlarmSet {
        let mut raised = AlarmSet::of(&self.status());
        if let Some(seconds) = self.shared.history.clock_jumped() {
            raised.add_clock_jump(seconds);
        }
        for changed in self.shared.images.changed() {
            raised.add(IMAGE_CHANGED, changed.name.as_str(), None, changed.to_string());
        }
        for (source, trouble) in self.shared.computed.troubles() {
            raised.add(COMPUTED_FILES, &source, None, trouble);
        }
        for change in self.shared.computed.changes("") {
            if let Some(text) = change.stopped_text().filter(|_| change.waiting > 0) {
                raised.add(CONTENT_STOPPED, &change.id.to_string(), Some(change.since), text);
            }
        }
        raise_alarms(&self.state().rollouts.get(), &mut raised);
        if let Some(error) = self.rollout_command_error() {
            raised.add(ROLLOUT_COMMAND, "", None, error);
        }
        self.state().departing.get().raise_alarm(&mut raised);
        for TaskPermits { task, holders } in self.shared.permits.report().tasks {
            if let Some(text) = conflict_text(&task, &holders) {
                raised.add(PERMIT_CONFLICT, &task, None, text);
            }
        }
        let inner = self.locked();
        for (hostname, watched) in &inner.watched {
            watched.handle.with_sub(|sub| {
                if let Some(why) = sub.held_by_other() {
                    raised.add(OTHER_DOMINATOR, hostname, None, why.to_owned());
                }
                if let Some(why) = sub.provision_failure() {
                    raised.add(PROVISION_FAILED, hostname, None, why.to_owned());
                }
                for (id, text) in sub.drifted() {
                    raised.add(RESOURCE_DRIFT, &format!("{hostname}/{id}"), None, text);
                }
                for trouble in sub.task_troubles() {
                    let (about, text) = (trouble.about(hostname), trouble.text.to_string());
                    raised.add(trouble.kind.name(), &about, Some(trouble.since), text);
                }
                for alarm in sub.view().into_iter().flat_map(|view| &view.report.alarms) {
                    raised.add(alarm.kind(), hostname, None, alarm.to_string());
                }
            });
        }
        raised
    }

    /// Sets or clears the error of the alarm command.
    pub fn note_alarm_error(&self, error: Option<String>) {
        *locked(&self.alarm_error) = error;
    }

    /// Returns the status of the dominator.
    pub fn status(&self) -> DominatorStatus {
        let counts = self.counts();
        let default_image = self.shared.default_image();
        let unknown_keys = locked(&self.mdb_unknown_keys).clone().into_iter();
        let unknown_keys = unknown_keys.map(|keys| format!("{MDB_REMARK}{keys}"));
        let inner = self.locked();
        let (remarks, rollbacks) = (self.shared.images.remarks(), self.state().rollbacks.get());
        let image_remarks = inner.image_remarks(&remarks, &rollbacks, default_image.as_deref());
        DominatorStatus {
            brake: self.shared.gate.brake().map(|brake| (*brake).clone()),
            counts,
            mdb_error: inner.admission.error().map(str::to_owned),
            mdb_held: inner.admission.held().map(|(notice, _)| notice.clone()),
            mdb_read: inner.admission.read(),
            mdb_unkept: locked(&self.mdb_save_error).clone(),
            image_remarks: unknown_keys.chain(image_remarks).collect(),
            image_server_error: self.shared.images.trouble(),
            alarm_error: locked(&self.alarm_error).clone(),
            history_error: self.shared.history.trouble(),
            budgets: self.shared.claim_service.report(),
            directories: self.shared.reader.store.alive(),
            paused: self.shared.gate.paused_count(self.shared.clock.now().wall),
            default_image: default_image.as_deref().cloned(),
        }
    }

    /// Pulls the brake: when this has returned, no Commit is sent, after a restart neither. On an
    /// error the brake is not on, except with [`OrderError::Unsaved`].
    pub async fn disable_updates(
        self: &Arc<Self>,
        reason: String,
        who: String,
    ) -> Result<(), OrderError> {
        let order = Order::new("disable-updates", &who).why(&reason);
        let order = order.reasoned("updates are to be disabled")?;
        let brake = Brake { reason, who, since: self.shared.clock.now().wall };
        let _ordering = self.brake_orders.lock().await;
        tracing::warn!(who = %brake.who, reason = %brake.reason, "updates are disabled");
        self.shared.gate.pull_brake(brake).await;
        let save = move |fleet: &Self| {
            let saved = fleet.state().brake.save_through(with_order(&order));
            saved.map_err(|source| OrderError::Unsaved { source })
        };
        self.on_thread(save).await
    }

    /// Releases the brake. On an error it stays on.
    pub async fn enable_updates(
        self: &Arc<Self>,
        who: String,
        why: String,
    ) -> Result<(), OrderError> {
        let order = Order::new("enable-updates", &who).why(&why).checked()?;
        let _ordering = self.brake_orders.lock().await;
        self.on_thread(move |fleet| fleet.state().brake.set_through(None, with_order(&order)))
            .await?;
        tracing::warn!(%who, %why, "updates are enabled");
        self.shared.gate.brake_released();
        Ok(())
    }

    /// Trusts the clock of this machine although it jumped.
    pub async fn accept_clock(
        self: &Arc<Self>,
        who: &str,
        why: &str,
    ) -> Result<AcceptClockReply, OrderError> {
        self.audit(Order::new("accept-clock", who).why(why)).await?;
        let jumped_seconds = self.shared.history.accept_clock();
        tracing::warn!(who, why, jumped_seconds, "the clock is accepted");
        Ok(AcceptClockReply { now: self.shared.clock.now().wall, jumped_seconds })
    }

    /// Records an order that has no durable state of its own, before anything is done about it. On
    /// an error the order must not be carried out. An order that changes durable state is recorded
    /// with it ([`with_order`]).
    pub async fn audit(self: &Arc<Self>, order: Order) -> Result<(), OrderError> {
        let order = order.checked()?;
        self.on_thread(move |fleet| Ok(fleet.state().record(&order)?)).await
    }

    /// Does `work` on a thread that may wait for the disk.
    async fn on_thread<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, OrderError> + Send + 'static,
    ) -> Result<T, OrderError> {
        let fleet = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || work(&fleet)).await;
        done.unwrap_or(Err(OrderError::Stopping))
    }

    /// Returns who owns the machine `hostname`, if it is in the machine database.
    pub fn owned_machine(&self, hostname: &str) -> Option<OwnedItem> {
        self.handle(hostname).ok().map(|handle| handle.owned())
    }

    /// Returns the machines that `hosts`, names or patterns, mean, with the owners of each. Fails
    /// if one of them means no machine.
    pub fn owned_machines(&self, hosts: &[String]) -> Result<Vec<(String, OwnedItem)>, OrderError> {
        let inner = self.locked();
        let hostnames = select_hosts(hosts, &inner.watched)?;
        let with_owners = |name: String| {
            let owned = inner.watched(&name)?.handle.owned();
            Ok((name, owned))
        };
        hostnames.into_iter().map(with_owners).collect()
    }

    fn handle(&self, hostname: &str) -> Result<Arc<Handle>, OrderError> {
        let inner = self.locked();
        Ok(Arc::clone(&inner.watched(hostname)?.handle))
    }
}

fn stop(inner: &mut FleetState, hostname: &str) {
    if let Some(watched) = inner.watched.remove(hostname) {
        watched.cancel.cancel();
    }
}
