//! Updates: Prepare stages one, Commit carries it out.
//!
//! | module | what |
//! |---|---|
//! | `admission` | decides what is accepted (core) |
//! | [`step_plan`] | decides how a plan is staged and in which steps it becomes visible (core) |
//! | [`step`] | the steps as data (core) |
//! | [`locking`] | decides which flags are taken away for them (core) |
//! | `guard` | refuses what a read-only root or the kernel would, and sets flags |
//! | [`metadata`] | sets and compares owner, mode, attributes and time |
//! | [`stage`], [`prepared`] | makes everything ready in `/.subd/staging/<id>` |
//! | [`activate`] | carries the steps out, or undoes them |
//! | [`journal`], [`phase`] | what must outlast a crash, and how far an update has come |
//! | [`executor`] | all that is done after a Commit, in its order, in one thread |
//! | `reboot` | sees to it that the machine goes down, and knows when it has come up |
//! | [`recovery`] | what is done at the start about an update that was interrupted |
//! | `update_task` | runs the executor in the daemon: scanner, board, reboot, retries |
//!
//! At the start of a Commit the whole staging directory becomes `/.subd/undo/<id>` by one rename.
//! A slot that is exchanged with the tree then holds what was there before, at the place where it
//! is wanted for undoing, and nothing more need be moved while the tree is mixed.
//!
//! # Invariants
//!
//! * At most one update is staged or under way.
//! * Nothing visible changes before Commit.
//! * After Commit, or after a crash and a restart, the tree is as planned or as it was; else the
//!   outcome is `stuck`, the journal stays, and no other update is accepted.
//! * Services that were stopped are started again, whatever happens.

pub mod activate;
mod admission;
pub mod executor;
mod guard;
pub mod journal;
pub mod locking;
pub mod metadata;
pub mod pause;
pub mod phase;
pub mod prepared;
mod reboot;
pub mod recovery;
pub mod stage;
pub mod step;
pub mod step_plan;
pub mod update_task;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::{LastUpdate, PrepareRequest};
use model::report::report;
use model::scope::Scope;
use model::trigger::Triggers;
use system::clock::wall;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::admission::{admit, check_plan, was_carried};
use self::prepared::{Prepared, StageContext, UpdateSpec};
use self::stage::StageError;
use crate::cache::Cache;
use crate::machine::command_runner::CommandRunner;
use crate::machine::disruption::DisruptionGate;
use crate::machine::identity::IdentitySource;
use crate::machine::services::ServiceDriver;
use crate::root::Root;
use crate::state::directories::Directories;
use crate::state::persisted_state::StateDirectory;
use crate::state::report_state::{ReportState, UpdatePhase, note_reboot, note_update};
use crate::trust::Trust;
use crate::trust::verification::VerifiedUpdate;
use crate::update::pause::refuse_if_paused;
use crate::update::step_plan::StepPlan;
use crate::{scan::Scanner, state::snapshot::Snapshot};

/// The longest that a staged update may wait for its Commit.
const EXPIRES_MAX: Duration = Duration::from_secs(24 * 3_600);

/// Carries updates out. One for each root.
pub struct Updater {
    /// The tree.
    pub root: Arc<Root>,
    /// Where updates are staged.
    pub directories: Arc<Directories>,
    /// Where their objects are.
    pub cache: Arc<Cache>,
    /// Who is told.
    pub report_state: Arc<ReportState>,
    /// Who verifies.
    pub scanner: Arc<Scanner>,
    /// What stops and starts services.
    pub driver: ServiceDriver,
    /// The name of subd's own service.
    pub own_service: String,
    /// How health checks are run.
    pub command_runner: CommandRunner,
    /// Whose images are taken; everybody's if there is none.
    pub trust: Option<Arc<Trust>>,
    /// What is asked before work of high impact; nobody if there is none.
    pub gate: Option<Arc<DisruptionGate>>,
    /// How long the machine may take to go down when it is to be rebooted.
    pub down_time_max: Duration,
    /// Lets one health check be made at a time by hand.
    pub checking: tokio::sync::Mutex<()>,
    /// How long one service may take to stop or start.
    pub service_time_max: Duration,
    /// How long to wait before an update that is stuck is tried again; longer each time.
    pub retry_after: Duration,
    /// What is remembered.
    pub state: Arc<StateDirectory>,
    /// Who the machine is.
    pub identity: IdentitySource,
    /// What runs.
    pub tasks: TaskTracker,
    /// When staged updates are given up.
    pub stop: CancellationToken,
    /// The update that is staged.
    pub prepared: Mutex<Option<Staged>>,
}

/// An update that is staged, and for which scan.
#[derive(Debug)]
pub struct Staged {
    prepared: Prepared,
    scope: Scope,
}

impl Updater {
    /// Accepts an update and starts to stage it.
    ///
    /// # Errors
    ///
    /// `Stale` if the machine is not as the plan expects, `Busy` during another update,
    /// `BadRequest` for a plan that must not be carried out.
    pub async fn prepare(self: &Arc<Self>, request: PrepareRequest) -> Result<(), Fault> {
        let Some(snapshot_before) = self.report_state.read(|state| admit(state, &request))? else {
            return Ok(());
        };
        let exclusions = self.report_state.exclusions().clone();
        let settings = self.report_state.read(|state| state.persisted.configuration.scan.clone());
        let root = Arc::clone(&self.root);
        let reported = self.report_state.read(|state| {
            state.scan_report().map(|report| report.occupied.clone()).unwrap_or_default()
        });
        let trust = self.trust.clone();
        let checking = tokio::task::spawn_blocking(move || {
            guard::admit(&root, &reported, &request.plan)?;
            let step_plan = check_plan(&request, &settings, &exclusions)?;
            // That the scan is still the same when it is staged is seen by the digest of its tree.
            let verify = |trust: &Trust| trust.verify(&request, &snapshot_before, &exclusions);
            let verified = trust.as_deref().map(verify).transpose()?;
            Ok::<_, Fault>((request, step_plan, verified))
        });
        let (request, step_plan, verified) = checking.await.map_err(|error| internal(&error))??;
        self.check_objects(&step_plan)?;
        let snapshot = self.report_state.try_change(|state| {
            let snapshot = admit(state, &request)?;
            refuse_if_paused(state.persisted.paused.as_ref(), wall())?;
            if snapshot.is_some() {
                state.update = UpdatePhase::Preparing(request.update_id);
            }
            Ok::<_, Fault>(snapshot)
        })?;
        if let Some(snapshot) = snapshot {
            let updater = Arc::clone(self);
            self.tasks.spawn(async move {
                updater.run_prepare(request, step_plan, verified, snapshot).await;
            });
        }
        Ok(())
    }

    fn check_objects(&self, step_plan: &StepPlan) -> Result<(), Fault> {
        for (id, size_bytes) in step_plan.objects() {
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
        step_plan: StepPlan,
        verified: Option<VerifiedUpdate>,
        snapshot: Arc<Snapshot>,
    ) {
        let update_id = request.update_id;
        let expires = Duration::from_secs(request.expires_seconds.into()).min(EXPIRES_MAX);
        let order =
            UpdateSpec { own_service: self.own_service.clone(), ..UpdateSpec::new(request) };
        let order = match verified {
            Some(verified) => order.verified(verified),
            None => order,
        };
        let (updater, kept) = (Arc::clone(&self), order.clone());
        let staging = tokio::task::spawn_blocking(move || {
            updater.give_up(None);
            updater.stage(order, &step_plan, &snapshot)
        });
        let result = match staging.await {
            Ok(result) => result.map_err(|error| report(&error)),
            Err(error) => Err(error.to_string()),
        };
        self.report_state.set_cache(|| self.cache.ids());
        match result {
            Ok(prepared) => {
                *self.lock_prepared() = Some(prepared);
                self.report_state.change(|state| state.update = UpdatePhase::Prepared(update_id));
                let updater = Arc::clone(&self);
                self.tasks.spawn(async move { updater.expire(update_id, expires).await });
            }
            Err(text) => {
                tracing::warn!(update_id, error = text, "the update cannot be staged");
                self.note(kept.not_prepared(text), None, UpdatePhase::Idle).await;
            }
        }
    }

    fn stage(
        &self,
        order: UpdateSpec,
        step_plan: &StepPlan,
        snapshot: &Snapshot,
    ) -> Result<Staged, StageError> {
        let scanned = snapshot.tree.as_ref().expect("an update is admitted only with a scan");
        let context = StageContext {
            root: &self.root,
            directories: &self.directories,
            cache: &self.cache,
            scanned,
            managed: snapshot.settings.attributes,
        };
        let prepared = Prepared::stage(&context, order, step_plan)?;
        Ok(Staged { prepared, scope: snapshot.scope })
    }

    fn lock_prepared(&self) -> std::sync::MutexGuard<'_, Option<Staged>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives up the update that is staged, if there is one, or only the one called `update_id`.
    fn give_up(&self, update_id: Option<u64>) {
        let staged = {
            let mut slot = self.lock_prepared();
            let wanted = |staged: &mut Staged| {
                update_id.is_none_or(|update_id| staged.prepared.order.update_id == update_id)
            };
            slot.take_if(wanted)
        };
        if let Some(Staged { prepared, .. }) = staged {
            let update_id = prepared.order.update_id;
            tracing::info!(update_id, "giving up the staged update");
            prepared.give_up(&self.directories, &self.cache);
        }
    }

    /// Gives the update up when nobody has committed it in time.
    async fn expire(self: Arc<Self>, update_id: u64, expires: Duration) {
        let mut versions = self.report_state.watch();
        let waiting = async {
            while self.report_state.read(|state| state.update == UpdatePhase::Prepared(update_id))
                && versions.changed().await.is_ok()
            {}
        };
        tokio::select! {
            // It is committed, or another one has taken its place.
            () = waiting => return,
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(expires) => {}
        }
        let begun = self.report_state.try_change(|state| {
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
        self.report_state.set_cache(|| self.cache.ids());
        self.report_state.change(|state| state.update = UpdatePhase::Idle);
    }

    /// Accepts the Commit of the update that is staged, and starts to carry it out.
    ///
    /// # Errors
    ///
    /// `NotFound` if it is not staged, `Busy` during another update, `Stale` if the scan settings
    /// have changed since it was staged, `Held` during a pause.
    pub fn commit(self: &Arc<Self>, update_id: u64) -> Result<(), Fault> {
        let scope = self.lock_prepared().as_ref().map(|prepared| prepared.scope);
        let begun = self.report_state.try_change(|state| {
            let last = state.persisted.last_update.as_ref();
            match state.update {
                UpdatePhase::Updating(current) if current == update_id => Ok(None),
                UpdatePhase::Prepared(current) if current == update_id => {
                    if scope != Some(state.scope) {
                        let text = "the scan settings changed since the update was staged";
                        return Err(Fault::new(FaultCode::Stale, text));
                    }
                    // The caller may have waited for a permission since it looked at the pause.
                    // Here the state is locked: no update begins after `Pause` has answered.
                    refuse_if_paused(state.persisted.paused.as_ref(), wall())?;
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
            self.report_state.change(|state| state.update = UpdatePhase::Idle);
            return;
        };
        let triggers = self.report_state.read(|state| state.persisted.triggers.clone());
        let touched = prepared.prepared.order.touched.clone();
        let journal = prepared.prepared.journal(&triggers, self.identity.boot_id());
        let head = journal.head.clone();
        self.conduct(touched, &head, |executor, host| executor.commit(host, journal)).await;
    }

    /// Asks whether the work of the update that is staged may disturb the machine, if it would.
    /// That it is not staged at all is for [`Updater::commit`] to say.
    ///
    /// # Errors
    ///
    /// `Held` if it may not now: it stays staged, and may later.
    pub async fn permit(&self, update_id: u64) -> Result<(), Fault> {
        let Some(gate) = &self.gate else { return Ok(()) };
        let triggers = self.report_state.read(|state| state.persisted.triggers.clone());
        let disturbs = {
            let slot = self.lock_prepared();
            let staged = slot.as_ref().map(|staged| &staged.prepared);
            staged.is_some_and(|prepared| {
                prepared.order.update_id == update_id
                    && !prepared.order.force_disruption
                    && prepared.calls(&triggers).high_impact
            })
        };
        if disturbs { gate.permit(update_id).await } else { Ok(()) }
    }

    /// Notes how an update ended, durably, and what comes next.
    async fn note(&self, last: LastUpdate, triggers: Option<Triggers>, phase: UpdatePhase) {
        self.report_state.change(|state| {
            note_update(&mut state.persisted, &last, triggers.as_ref());
            note_reboot(state);
            state.update = phase;
        });
        self.store().await;
    }

    /// Writes what is remembered.
    async fn store(&self) {
        if let Err(error) = self.report_state.save(&self.state).await {
            tracing::error!("{}", report(&error));
        }
    }
}

fn internal(error: &dyn std::error::Error) -> Fault {
    Fault::new(FaultCode::Internal, report(error))
}
