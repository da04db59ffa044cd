//! Updates: Prepare stages one, Commit carries it out.
//!
//! | module | what |
//! |---|---|
//! | `admission` | decides what is accepted (core) |
//! | [`arrange`] | decides how a plan is staged and in which steps it becomes visible (core) |
//! | [`triggers`] | decides what is done to which services (core) |
//! | [`step`] | the steps as data (core) |
//! | [`metadata`] | sets and compares owner, mode, attributes and time |
//! | [`stage`] | makes everything ready in `/.subd/staging/<id>` |
//! | [`activate`] | carries the steps out, or undoes them |
//!
//! At the start of a Commit the whole staging directory becomes `/.subd/undo/<id>` by one rename.
//! A slot that is exchanged with the tree then holds what was there before, at the place where it
//! is wanted for undoing, and nothing more need be moved while the tree is mixed.
//!
//! # Invariants
//!
//! * At most one update is staged or under way.
//! * Nothing visible changes before Commit.
//! * After Commit the tree is as planned, or as it was; else the outcome is `stuck`.
//! * Services that were stopped are started again, whatever happens.

pub mod activate;
mod admission;
pub mod arrange;
pub mod metadata;
pub mod stage;
pub mod step;
pub mod triggers;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use common::api::subd::{LastUpdate, Outcome, PrepareRequest, TriggerFailure};
use common::image::ImageName;
use common::object::ObjectId;
use common::path::TreePath;
use common::plan::{Action, Plan};
use common::report::report;
use common::scope::Scope;
use common::tree::Time;
use common::trigger::Triggers;
use common::wire::{Fault, FaultCode};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::activate::{ActivateError, Stage};
use self::admission::{admit, check_plan, was_carried};
use self::arrange::Arrangement;
use self::stage::{StageError, Taken, Workshop};
use self::step::Script;
use self::triggers::{ServiceCall, ServiceCalls, service_calls};
use crate::board::{Board, UpdatePhase, note_update};
use crate::cache::Cache;
use crate::home::{Home, directory_name, remove_all};
use crate::identity::IdentitySource;
use crate::root::{Directory, Root, RootError};
use crate::saved::{StateDirectory, Underway};
use crate::scan::{Pause, Scanner, Snapshot};
use crate::service::ServiceDriver;

/// The longest that a staged update may wait for its Commit.
const EXPIRES_MAX: Duration = Duration::from_secs(24 * 3_600);

/// Carries updates out. One for each root.
pub struct Updater {
    /// The tree.
    pub root: Arc<Root>,
    /// Where updates are staged.
    pub home: Arc<Home>,
    /// Where their objects are.
    pub cache: Arc<Cache>,
    /// Who is told.
    pub board: Arc<Board>,
    /// Who verifies.
    pub scanner: Arc<Scanner>,
    /// What stops and starts services.
    pub driver: ServiceDriver,
    /// How long one service may take to stop or start.
    pub service_time_max: Duration,
    /// What is remembered.
    pub state: Arc<StateDirectory>,
    /// Who the machine is.
    pub identity: IdentitySource,
    /// What runs.
    pub tasks: TaskTracker,
    /// When staged updates are given up.
    pub stop: CancellationToken,
    /// The update that is staged.
    pub prepared: Mutex<Option<Prepared>>,
}

/// What is known of an update besides its steps.
#[derive(Clone, Debug)]
struct Order {
    update_id: u64,
    image: ImageName,
    triggers: Triggers,
    operations: u32,
    /// The paths that may fire triggers.
    changed: Vec<TreePath>,
    /// All paths that the update touches.
    touched: BTreeSet<TreePath>,
}

/// An update that is staged.
#[derive(Debug)]
pub struct Prepared {
    order: Order,
    scope: Scope,
    script: Script,
    taken: Vec<Taken>,
}

/// How carrying out ended, before services and scan.
enum Carried {
    Done {
        window: Duration,
        /// What may be freed below `undo`.
        left: Vec<Box<[u8]>>,
    },
    RolledBack(String),
    Stuck(String),
}

impl Updater {
    /// Accepts an update and starts to stage it.
    ///
    /// # Errors
    ///
    /// `Stale` if the machine is not as the plan expects, `Busy` during another update,
    /// `BadRequest` for a plan that must not be carried out.
    pub async fn prepare(self: &Arc<Self>, request: PrepareRequest) -> Result<(), Fault> {
        if self.board.read(|state| admit(state, &request))?.is_none() {
            return Ok(());
        }
        let exclusions = self.board.exclusions().clone();
        let settings = self.board.read(|state| state.saved.configuration.scan.clone());
        let checking = tokio::task::spawn_blocking(move || {
            let arrangement = check_plan(&request, &settings, &exclusions)?;
            Ok::<_, Fault>((request, arrangement))
        });
        let (request, arrangement) = checking.await.map_err(|error| internal(&error))??;
        self.check_objects(&arrangement)?;
        let snapshot = self.board.try_change(|state| {
            let snapshot = admit(state, &request)?;
            if snapshot.is_some() {
                state.update = UpdatePhase::Preparing(request.update_id);
            }
            Ok::<_, Fault>(snapshot)
        })?;
        if let Some(snapshot) = snapshot {
            let updater = Arc::clone(self);
            self.tasks.spawn(async move {
                updater.run_prepare(request, arrangement, snapshot).await;
            });
        }
        Ok(())
    }

    fn check_objects(&self, arrangement: &Arrangement) -> Result<(), Fault> {
        for (id, size_bytes) in arrangement.objects() {
            match self.cache.size_of(&id) {
                Some(size) if size == size_bytes => {}
                Some(size) => {
                    let text = format!("object {id} has {size} bytes, the plan says {size_bytes}");
                    return Err(Fault::new(FaultCode::BadRequest, text));
                }
                None => {
                    let text = format!("object {id} is not in the cache: fetch it first");
                    return Err(Fault::new(FaultCode::Stale, text));
                }
            }
        }
        Ok(())
    }

    async fn run_prepare(
        self: Arc<Self>,
        request: PrepareRequest,
        arrangement: Arrangement,
        snapshot: Arc<Snapshot>,
    ) {
        let update_id = request.update_id;
        let expires = Duration::from_secs(request.expires_seconds.into()).min(EXPIRES_MAX);
        let order = Order::new(request);
        let (updater, kept) = (Arc::clone(&self), order.clone());
        let staging = tokio::task::spawn_blocking(move || {
            updater.give_up(None);
            updater.stage(order, &arrangement, &snapshot)
        });
        let result = match staging.await {
            Ok(result) => result.map_err(|error| report(&error)),
            Err(error) => Err(error.to_string()),
        };
        self.board.set_cache(|| self.cache.ids());
        match result {
            Ok(prepared) => {
                *self.lock_prepared() = Some(prepared);
                self.board.change(|state| state.update = UpdatePhase::Prepared(update_id));
                let updater = Arc::clone(&self);
                self.tasks.spawn(async move { updater.expire(update_id, expires).await });
            }
            Err(text) => {
                tracing::warn!(update_id, error = text, "the update cannot be staged");
                let last = kept.outcome(Outcome::NotPrepared(text), Duration::ZERO, Vec::new());
                self.note(last, None, UpdatePhase::Idle).await;
            }
        }
    }

    fn stage(
        &self,
        order: Order,
        arrangement: &Arrangement,
        snapshot: &Snapshot,
    ) -> Result<Prepared, StageError> {
        let area = |source| StageError::Area { source };
        let name = directory_name(order.update_id);
        let staging = &self.home.staging;
        remove_all(staging, &name).map_err(area)?;
        staging.make_directory(&name, 0o700).map_err(area)?;
        let slots = staging.open_child(&name).map_err(area)?;
        let scanned = snapshot.tree.as_ref().expect("an update is admitted only with a scan");
        let workshop = Workshop {
            root: &self.root,
            cache: &self.cache,
            slots: &slots,
            scanned,
            managed: snapshot.settings.attributes,
        };
        let mut taken = Vec::new();
        match workshop.stage(order.update_id, arrangement, &mut taken) {
            Ok(script) => Ok(Prepared { order, scope: snapshot.scope, script, taken }),
            Err(error) => {
                stage::give_up(&self.cache, staging, &name, &taken);
                Err(error)
            }
        }
    }

    fn lock_prepared(&self) -> std::sync::MutexGuard<'_, Option<Prepared>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives up the update that is staged, if there is one, or only the one called `update_id`.
    fn give_up(&self, update_id: Option<u64>) {
        let prepared = {
            let mut slot = self.lock_prepared();
            let wanted = |prepared: &mut Prepared| {
                update_id.is_none_or(|update_id| prepared.order.update_id == update_id)
            };
            slot.take_if(wanted)
        };
        if let Some(prepared) = prepared {
            let update_id = prepared.order.update_id;
            tracing::info!(update_id, "giving up the staged update");
            let name = directory_name(update_id);
            stage::give_up(&self.cache, &self.home.staging, &name, &prepared.taken);
        }
    }

    /// Gives the update up when nobody has committed it in time.
    async fn expire(self: Arc<Self>, update_id: u64, expires: Duration) {
        let mut versions = self.board.watch();
        let waiting = async {
            while self.board.read(|state| state.update == UpdatePhase::Prepared(update_id))
                && versions.changed().await.is_ok()
            {}
        };
        tokio::select! {
            // It is committed, or another one has taken its place.
            () = waiting => return,
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(expires) => {}
        }
        let begun = self.board.try_change(|state| {
            if state.update != UpdatePhase::Prepared(update_id) {
                return Err(());
            }
            state.update = UpdatePhase::Preparing(update_id);
            Ok(Some(()))
        });
        if begun.is_err() {
            return;
        }
        let updater = Arc::clone(&self);
        let cleared = tokio::task::spawn_blocking(move || updater.give_up(Some(update_id))).await;
        if let Err(error) = cleared {
            tracing::error!(update_id, %error, "cannot give the update up");
        }
        self.board.set_cache(|| self.cache.ids());
        self.board.change(|state| state.update = UpdatePhase::Idle);
    }

    /// Accepts the Commit of the update that is staged, and starts to carry it out.
    ///
    /// # Errors
    ///
    /// `NotFound` if it is not staged, `Busy` during another update, `Stale` if the scan settings
    /// have changed since it was staged.
    pub fn commit(self: &Arc<Self>, update_id: u64) -> Result<(), Fault> {
        let scope = self.lock_prepared().as_ref().map(|prepared| prepared.scope);
        let begun = self.board.try_change(|state| {
            let last = state.saved.last_update.as_ref();
            match state.update {
                UpdatePhase::Updating(current) if current == update_id => Ok(None),
                UpdatePhase::Prepared(current) if current == update_id => {
                    if scope != Some(state.scope) {
                        let text = "the scan settings changed since the update was staged";
                        return Err(Fault::new(FaultCode::Stale, text));
                    }
                    state.update = UpdatePhase::Updating(update_id);
                    Ok(Some(()))
                }
                _ if last.is_some_and(|last| last.update_id == update_id && was_carried(last)) => {
                    Ok(None)
                }
                UpdatePhase::Updating(current) | UpdatePhase::Preparing(current) => {
                    let text = format!("update {current} is under way");
                    Err(Fault::new(FaultCode::Busy, text))
                }
                UpdatePhase::Idle | UpdatePhase::Prepared(_) => {
                    let text = format!("update {update_id} is not staged: prepare it again");
                    Err(Fault::new(FaultCode::NotFound, text))
                }
            }
        })?;
        if begun.is_some() {
            let updater = Arc::clone(self);
            self.tasks.spawn(async move { updater.run_commit(update_id).await });
        }
        Ok(())
    }

    async fn run_commit(self: Arc<Self>, update_id: u64) {
        let Some(prepared) = self.lock_prepared().take() else {
            tracing::error!(update_id, "the staged update is gone");
            self.board.change(|state| state.update = UpdatePhase::Idle);
            return;
        };
        let prepared = Arc::new(prepared);
        let order = &prepared.order;
        let calls = self.announce(order).await;
        let pause = match self.scanner.pause().await {
            Ok(pause) => Some(pause),
            Err(error) => {
                tracing::warn!(update_id, "the update goes on without scanner: {error}");
                None
            }
        };
        let mut failures = self.driver.run_all(&calls.before, self.service_time_max).await;
        let (updater, work) = (Arc::clone(&self), Arc::clone(&prepared));
        let carrying = tokio::task::spawn_blocking(move || updater.carry_out(&work));
        let carried = carrying.await.unwrap_or_else(|error| Carried::Stuck(error.to_string()));
        let scanning = pause.map(|pause| Pause::scan_touched(pause, order.touched.clone()));
        let done = matches!(carried, Carried::Done { .. });
        let after = if done { calls.after.clone() } else { calls.restart() };
        // The scanner, the disk and the services need not wait for each other.
        let root = Arc::clone(&self.root);
        let syncing = tokio::task::spawn_blocking(move || root.sync_filesystem());
        failures.extend(self.driver.run_all(&after, self.service_time_max).await);
        if let Ok(Err(error)) = syncing.await {
            tracing::error!(update_id, "it may not outlast a crash: {}", report(&error));
        }
        let (outcome, window, left) = match carried {
            Carried::Done { window, left } => (Outcome::Done, window, left),
            Carried::RolledBack(text) => (Outcome::RolledBack(text), Duration::ZERO, Vec::new()),
            Carried::Stuck(text) => (Outcome::Stuck(text), Duration::ZERO, Vec::new()),
        };
        tracing::info!(update_id, image = %order.image, ?outcome, ?window, "the update has ended");
        let reboot = done && calls.reboot && failures.is_empty();
        let mut last = order.outcome(outcome, window, failures);
        let triggers = done.then(|| order.triggers.clone());
        self.board.set_cache(|| self.cache.ids());
        self.note(last.clone(), triggers.clone(), UpdatePhase::Updating(update_id)).await;
        if let Some(scanning) = scanning
            && let Ok(snapshot) = scanning.await
        {
            let generation = self.board.take_snapshot(snapshot, self.identity.read(&self.root));
            last.verified_generation = Some(generation);
        }
        if reboot {
            let failure = self.driver.reboot(self.service_time_max).await;
            last.trigger_failures.extend(failure);
        }
        self.note(last, triggers, UpdatePhase::Idle).await;
        self.free(left);
    }

    /// Decides what is done to which services, and notes it durably before anything is done.
    async fn announce(&self, order: &Order) -> ServiceCalls {
        let old_triggers = self.board.read(|state| state.saved.triggers.clone());
        let calls = service_calls(&old_triggers, &order.triggers, order.changed.iter());
        let Order { update_id, image, operations, .. } = order;
        let (update_id, image, operations) = (*update_id, image.clone(), *operations);
        let underway = Underway { update_id, image, operations, calls: calls.clone() };
        self.board.change(|state| state.saved.underway = Some(underway));
        self.store().await;
        calls
    }

    /// Takes care of the services of an update that was under way when subd was cut short, and
    /// reports it. What the tree lacks the next update brings.
    pub fn resume(self: &Arc<Self>) {
        let Some(underway) = self.board.read(|state| state.saved.underway.clone()) else { return };
        let update_id = underway.update_id;
        tracing::error!(update_id, image = %underway.image, "subd was cut short in this update");
        self.board.change(|state| state.update = UpdatePhase::Updating(update_id));
        let updater = Arc::clone(self);
        self.tasks.spawn(async move {
            let Underway { image, operations, calls, .. } = underway;
            let services = calls.resume();
            let trigger_failures =
                updater.driver.run_all(&services, updater.service_time_max).await;
            let outcome = Outcome::Stuck(cut_short(&services, calls.reboot));
            let last = LastUpdate {
                update_id,
                image,
                outcome,
                verified_generation: None,
                operations,
                window_ns: 0,
                trigger_failures,
                ended: now(),
            };
            updater.note(last, None, UpdatePhase::Idle).await;
        });
    }

    /// Carries the steps out: in one thread, without waiting for anything but the disk.
    fn carry_out(&self, prepared: &Prepared) -> Carried {
        let name = directory_name(prepared.order.update_id);
        let Home { staging, undo, .. } = &*self.home;
        let open = || -> Result<Directory, RootError> {
            staging.rename_noreplace(&name, undo, &name)?;
            undo.open_child(&name)
        };
        let slots = match open() {
            Ok(slots) => slots,
            Err(error) => {
                stage::give_up(&self.cache, staging, &name, &prepared.taken);
                return Carried::RolledBack(report(&error));
            }
        };
        let stage = Stage { root: &self.root, slots: &slots };
        let activated = stage.activate(&prepared.script);
        let taken: Vec<ObjectId> = prepared.taken.iter().map(|taken| taken.object).collect();
        match activated {
            Ok(window) => {
                // What was taken is part of the tree now; the board learns it from the cache.
                let _gone = self.cache.forget(&taken);
                // With what a stuck update before it left. Looked for here, while no other update
                // can have anything there.
                let left = undo.names().unwrap_or_else(|error| {
                    tracing::warn!("{}", report(&error));
                    vec![name.into()]
                });
                Carried::Done { window, left }
            }
            Err(ActivateError::RolledBack(cause)) => {
                stage::give_up(&self.cache, undo, &name, &prepared.taken);
                Carried::RolledBack(report(&cause))
            }
            Err(ActivateError::Stuck { cause, undo }) => {
                let _gone = self.cache.forget(&taken);
                let (cause, undo) = (report(&cause), report(&undo));
                Carried::Stuck(format!("{cause}; undoing it failed: {undo}"))
            }
        }
    }

    /// Notes how an update ended, durably, and what comes next.
    async fn note(&self, last: LastUpdate, triggers: Option<Triggers>, phase: UpdatePhase) {
        self.board.change(|state| {
            note_update(&mut state.saved, &last, triggers.as_ref());
            state.update = phase;
        });
        self.store().await;
    }

    /// Writes what is remembered.
    async fn store(&self) {
        let (state, board) = (Arc::clone(&self.state), Arc::clone(&self.board));
        let saved = move || board.read(|state| state.saved.clone());
        let stored = tokio::task::spawn_blocking(move || state.store(saved)).await;
        match stored {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!("{}", report(&error)),
            Err(error) => tracing::error!(%error, "cannot write the state"),
        }
    }

    /// Frees what an update took away, in the background.
    fn free(self: &Arc<Self>, left: Vec<Box<[u8]>>) {
        let updater = Arc::clone(self);
        self.tasks.spawn_blocking(move || {
            for name in left {
                if let Err(error) = remove_all(&updater.home.undo, &name) {
                    tracing::warn!("cannot free what an update took away: {}", report(&error));
                }
            }
        });
    }
}

/// What is said of an update in which subd was cut short.
fn cut_short(services: &[ServiceCall], reboots: bool) -> String {
    let mut text = "subd was cut short: the tree may be mixed until the next update".to_owned();
    if !services.is_empty() {
        let names: Vec<&str> = services.iter().map(|call| call.service.as_str()).collect();
        text.push_str("; services started again: ");
        text.push_str(&names.join(", "));
    }
    if reboots {
        text.push_str("; the reboot that was due is not done");
    }
    text
}

impl Order {
    fn new(request: PrepareRequest) -> Self {
        let PrepareRequest { update_id, image, triggers, plan, .. } = request;
        Self {
            update_id,
            image,
            triggers,
            operations: u32::try_from(plan.operations.len()).unwrap_or(u32::MAX),
            changed: plan.changed_paths().cloned().collect(),
            touched: touched_paths(&plan),
        }
    }

    fn outcome(
        &self,
        outcome: Outcome,
        window: Duration,
        trigger_failures: Vec<TriggerFailure>,
    ) -> LastUpdate {
        LastUpdate {
            update_id: self.update_id,
            image: self.image.clone(),
            outcome,
            verified_generation: None,
            operations: self.operations,
            window_ns: u64::try_from(window.as_nanos()).unwrap_or(u64::MAX),
            trigger_failures,
            ended: now(),
        }
    }
}

fn touched_paths(plan: &Plan) -> BTreeSet<TreePath> {
    let mut touched = BTreeSet::new();
    for operation in &plan.operations {
        touched.insert(operation.path.clone());
        if let Action::Replace { displaced, .. } = &operation.action {
            touched.extend(displaced.iter().cloned());
        }
    }
    touched
}

fn internal(error: &dyn std::error::Error) -> Fault {
    Fault::new(FaultCode::Internal, report(error))
}

/// The machine's clock.
#[must_use]
pub fn now() -> Time {
    match SystemTime::now().duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => Time {
            seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: since.subsec_nanos(),
        },
        // A clock before 1970 is a clock that was not set.
        Err(_) => Time::default(),
    }
}
