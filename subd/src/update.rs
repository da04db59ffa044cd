//! Updates: Prepare stages an update, Commit carries it out.
//!
//! | module | what |
//! |---|---|
//! | [`admission`] | decides what is accepted, and when a pause is in force (core) |
//! | [`step_plan`] | decides how a plan is staged and in which steps it becomes visible (core) |
//! | [`step`] | the steps, the phases and the file flags that are cleared, as data (core) |
//! | `used_paths` | refuses what a read-only root or the kernel would refuse |
//! | [`metadata`] | sets and compares owner, mode, attributes and time |
//! | `probe` | finds out what the file-system would refuse, before services are stopped |
//! | [`stage`], [`prepared`] | creates everything that is new in `/.subd/staging/<id>` |
//! | [`activate`] | executes the steps, or undoes them |
//! | [`journal`] | the record of an update that survives a crash |
//! | [`running_update`] | how far an update with a journal has come |
//! | [`executor`] | everything that is done after a Commit, in order, in one thread |
//! | `reboot` | reboots the machine, and detects that it was rebooted |
//! | [`recovery`] | finds, finishes or undoes an interrupted update when subd starts |
//! | [`own_certificates`] | TLS files of subd itself: refuses, puts back or replaces them |
//! | `retry_triggers` | runs triggers again that failed |
//! | `update_task` | runs the executor in the daemon: scanner, reports, reboot, retries |
//!
//! At the start of a Commit one rename makes the staging directory `/.subd/undo/<id>`. A slot that
//! is exchanged with an entry of the tree then holds the former entry, where undoing needs it, so
//! that nothing else is moved while the tree is mixed.
//!
//! # Invariants
//!
//! * At most one update is staged or under way.
//! * Nothing visible changes before Commit.
//! * After Commit, or after a crash and a restart, the tree is as planned or as it was; else the
//!   outcome is `stuck`, the journal stays, and no other update is accepted.
//! * Services that were stopped are started again, whatever happens.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::{LastUpdate, PrepareRequest, UpdatePhase};
use model::display::error_chain;
use model::lock::locked;
use model::object::ObjectId;
use model::plan::Plan;
use model::scope::Scope;
use model::trigger::Triggers;
use rpc::server::Caller;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cache::Cache;
use crate::machine::IdentitySource;
use crate::machine::disruption::DisruptionGate;
use crate::machine::health::HealthChecker;
use crate::machine::services::ServiceDriver;
use crate::provisioning::provisioner::{NOT_HERE, Provisioner};
use crate::provisioning::staged::resources_after;
use crate::root::Root;
use crate::scan::Scanner;
use crate::state::directories::Directories;
use crate::state::persisted_state::{PersistedState, StateDirectory};
use crate::state::refusals::{FailedChange, FailedIn};
use crate::state::{ReportState, Snapshot, State, note_reboot, note_update};
use crate::tasks::runner::Tasks;
use crate::tasks::staged::tasks_after;
use crate::trust::Trust;
use crate::trust::verification::VerifiedUpdate;
use crate::update::admission::{admit, check_plan, refuse_if_paused, was_committed};
use crate::update::own_certificates::{ChangedCertificates, OwnCertificates};
use crate::update::prepared::{Prepared, StageContext, UpdateSpec};
use crate::update::stage::StageError;
use crate::update::step_plan::StepPlan;

pub mod activate;
pub mod admission;
pub mod executor;
mod health_watch;
pub mod journal;
pub mod metadata;
pub mod own_certificates;
pub mod prepared;
mod probe;
mod reboot;
pub mod recovery;
mod retry_triggers;
pub mod running_update;
pub mod stage;
pub mod step;
pub mod step_plan;
pub mod update_task;
mod used_paths;

/// The longest that a staged update may wait for its Commit.
const EXPIRES_MAX: Duration = Duration::from_secs(24 * 3_600);

/// Stages updates and carries them out. One for each root.
pub struct Updater {
    pub root: Arc<Root>,
    pub directories: Arc<Directories>,
    pub cache: Arc<Cache>,
    pub report_state: Arc<ReportState>,
    pub scanner: Arc<Scanner>,
    /// What stops and starts services.
    pub driver: ServiceDriver,
    /// The name of subd's own service.
    pub own_service: String,
    /// Runs health checks; `None` if they are not run here.
    pub health_checker: Option<HealthChecker>,
    /// Which signed images are accepted; `None` accepts every image.
    pub trust: Option<Arc<Trust>>,
    /// Asked before work of high impact; `None` permits it always.
    pub gate: Option<Arc<DisruptionGate>>,
    /// How long the machine may take to shut down for a reboot.
    pub down_time_max: Duration,
    /// Held during a health check that an operator requested.
    pub checking: tokio::sync::Mutex<()>,
    /// How long one service may take to stop or start.
    pub service_time_max: Duration,
    /// How long to wait before a stuck update is retried; doubles each time.
    pub retry_after: Duration,
    /// Where the accepted image is recorded.
    pub state: Arc<StateDirectory>,
    pub identity: IdentitySource,
    /// The TLS files of this process, if they are below the root.
    pub own_certificates: Option<OwnCertificates>,
    /// Runs the daemon tasks of the image; `None` if they are not run here.
    pub daemon_tasks: Option<Arc<Tasks>>,
    /// Makes what images need; `None` if that is not done here.
    pub provisioner: Option<Arc<Provisioner>>,
    pub tasks: TaskTracker,
    /// When staged updates are discarded.
    pub stop: CancellationToken,
    /// The update that is staged.
    pub prepared: Mutex<Option<StagedUpdate>>,
    /// Held while it is decided that the resources of an update are there, or are given up.
    pub deciding: Mutex<()>,
}

/// A staged update, and the scope of the scan that it was planned for.
#[derive(Debug)]
pub struct StagedUpdate {
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
    pub async fn prepare(
        self: &Arc<Self>,
        request: PrepareRequest,
        caller: &Caller,
    ) -> Result<(), Fault> {
        let Some(snapshot_before) = self.report_state.read(|state| admit(state, &request))? else {
            return Ok(());
        };
        let exclusions = self.report_state.exclusions().clone();
        let settings = self.report_state.read(|state| state.persisted.configuration.scan.clone());
        let root = Arc::clone(&self.root);
        let reported = self.report_state.read(|state| {
            state.scan_report().map(|report| report.occupied.clone()).unwrap_or_default()
        });
        let refused = self.report_state.read(|state| state.known_refused_changes());
        let trust = self.trust.clone();
        let checking = tokio::task::spawn_blocking(move || {
            used_paths::admit(&root, &reported, &request.plan)?;
            let step_plan = check_plan(&request, &settings, &exclusions)?;
            // `admit` below compares the digest of the tree again.
            let verify =
                |trust: &Trust| trust.verify(&request, &snapshot_before, &refused, &exclusions);
            let verified = trust.as_deref().map(verify).transpose()?;
            Ok::<_, Fault>((request, step_plan, verified))
        });
        let (request, step_plan, verified) = checking.await.map_err(|error| internal(&error))??;
        self.check_objects(&step_plan)?;
        let snapshot = self.report_state.try_change(|state| {
            let snapshot = admit(state, &request)?;
            refuse_if_paused(state.pause_in_force())?;
            if snapshot.is_some() {
                state.update = UpdatePhase::Preparing(request.update_id);
            }
            Ok::<_, Fault>(snapshot)
        })?;
        if let Some(snapshot) = snapshot {
            let own = self.own_certificates.as_ref();
            let certificates = own.and_then(|own| own.changed_by(&request.plan, caller));
            let updater = Arc::clone(self);
            self.tasks.spawn(async move {
                updater.run_prepare(request, step_plan, verified, certificates, snapshot).await;
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
        certificates: Option<ChangedCertificates>,
        snapshot: Arc<Snapshot>,
    ) {
        let update_id = request.update_id;
        let expires = Duration::from_secs(request.expires_seconds.into()).min(EXPIRES_MAX);
        let plan = Arc::clone(&request.plan);
        let spec = UpdateSpec { own_service: self.own_service.clone(), ..UpdateSpec::new(request) };
        let spec = match verified {
            Some(verified) => spec.verified(verified),
            None => spec,
        };
        let (updater, staged_spec) = (Arc::clone(&self), spec.clone());
        let staging = tokio::task::spawn_blocking(move || {
            updater.discard(None);
            if let (Some(certificates), Some(own)) = (certificates, &updater.own_certificates) {
                let checked = certificates.check(&updater.cache);
                let ordered = checked.map_err(|source| StageError::LockedOut { source })?;
                if let Some(ordered) = ordered {
                    certificates.keep_former(own, &updater.root, update_id, ordered)?;
                }
            }
            updater.stage(spec, &plan, &step_plan, &snapshot)
        });
        let result = match staging.await {
            Ok(Ok(prepared)) => Ok(prepared),
            Ok(Err(error)) => {
                let text = error_chain(&error);
                if let StageError::Refused { changes } = error {
                    self.take_failed_changes(changes).await;
                }
                Err(text)
            }
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
            // Nothing is wrong with the update.
            Err(_) if self.stop.is_cancelled() => {}
            Err(text) => {
                tracing::warn!(update_id, error = text, "cannot stage the update");
                self.note(staged_spec.not_prepared(text), None, UpdatePhase::Idle).await;
            }
        }
    }

    /// Records what staging found, and has the paths scanned again that have changed since.
    async fn take_failed_changes(&self, changes: Vec<FailedChange>) {
        let changed = changes.iter().filter(|change| change.is_race);
        let changed: BTreeSet<_> = changed.map(|change| change.refused.path.clone()).collect();
        self.note_failed_changes(changes, FailedIn::Staging);
        if !changed.is_empty()
            && let Ok(snapshot) = self.scanner.scan_touched(changed).await
        {
            self.report_state.take_snapshot(snapshot, self.identity.read(&self.root));
        }
    }

    fn stage(
        &self,
        spec: UpdateSpec,
        plan: &Plan,
        step_plan: &StepPlan,
        snapshot: &Snapshot,
    ) -> Result<StagedUpdate, StageError> {
        let scanned = snapshot.tree.as_ref().expect("an update is admitted only with a scan");
        let tasks = tasks_after(&spec.triggers, plan, scanned, &self.root, &self.cache)
            .map_err(|source| StageError::Tasks { source })?;
        let plugins = self.provisioner.as_ref().map(|provisioner| &provisioner.plugins);
        let (root, cache) = (&*self.root, &*self.cache);
        let resources = resources_after(&spec.triggers, plan, scanned, (root, cache), plugins)
            .map_err(|source| StageError::Resources { source })?;
        let spec = UpdateSpec { tasks, resources, ..spec };
        let context = StageContext {
            root: &self.root,
            directories: &self.directories,
            cache: &self.cache,
            scanned,
            managed: snapshot.settings.attributes,
            stop: &self.stop,
        };
        let prepared = Prepared::stage(&context, spec, step_plan)?;
        Ok(StagedUpdate { prepared, scope: snapshot.scope })
    }

    fn lock_prepared(&self) -> std::sync::MutexGuard<'_, Option<StagedUpdate>> {
        locked(&self.prepared)
    }

    /// Discards the staged update, or does so only if it is `update_id`.
    fn discard(&self, update_id: Option<u64>) {
        let staged = {
            let mut slot = self.lock_prepared();
            let wanted = |staged: &mut StagedUpdate| {
                update_id.is_none_or(|update_id| staged.prepared.spec.update_id == update_id)
            };
            slot.take_if(wanted)
        };
        if let Some(StagedUpdate { prepared, .. }) = staged {
            let update_id = prepared.spec.update_id;
            tracing::info!(update_id, "discarding the staged update");
            prepared.discard(&self.directories, &self.cache);
        }
    }

    /// Discards the update if it is not committed in time.
    async fn expire(self: Arc<Self>, update_id: u64, expires: Duration) {
        let mut versions = self.report_state.watch();
        let waiting = async {
            while self.report_state.read(|state| state.update == UpdatePhase::Prepared(update_id))
                && versions.changed().await.is_ok()
            {}
        };
        tokio::select! {
            // It was committed, or another update replaced it.
            () = waiting => return,
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(expires) => {}
        }
        let started = self.report_state.try_change(|state| {
            if state.update != UpdatePhase::Prepared(update_id) {
                return Err(());
            }
            state.update = UpdatePhase::Preparing(update_id);
            Ok(Some(()))
        });
        if started.is_err() {
            return;
        }
        let updater = Arc::clone(&self);
        let cleared = tokio::task::spawn_blocking(move || updater.discard(Some(update_id))).await;
        if let Err(error) = cleared {
            tracing::error!(update_id, %error, "cannot discard the staged update");
        }
        self.report_state.set_cache(|| self.cache.ids());
        self.report_state.change(|state| state.update = UpdatePhase::Idle);
    }

    /// Starts to provision what the staged update needs. Blocks.
    ///
    /// # Errors
    ///
    /// `NotFound` if it is not staged, `Unavailable` if the machine does not provision.
    pub fn provision(&self, update_id: u64) -> Result<(), Fault> {
        let staged = self.staged(update_id, |spec| {
            (spec.image.clone(), spec.image_digest, spec.resources.clone())
        });
        let (image, digest, resources) = staged.ok_or_else(|| not_staged(update_id))?;
        match &self.provisioner {
            Some(provisioner) => provisioner.provision(&image, digest, &resources),
            None if resources.is_empty() => Ok(()),
            None => Err(not_provisioned()),
        }
    }

    /// Gives up the resources of an image that is not to come any more.
    ///
    /// # Errors
    ///
    /// `Busy` while an update is carried out or its reboot is awaited: it may be to that image.
    /// `Unavailable` if the machine does not provision.
    pub fn give_up_resources(&self, image_digest: ObjectId) -> Result<(), Fault> {
        let provisioner = self.provisioner.as_ref().ok_or_else(not_provisioned)?;
        let _deciding = locked(&self.deciding);
        let is_free = self.report_state.read(|state| {
            let last = state.persisted.last_update.as_ref();
            state.last_update_done().is_some()
                && state.stuck.is_none()
                && !last.is_some_and(|last| last.awaits_boot)
        });
        match is_free {
            true => provisioner.give_up(image_digest),
            false => Err(Fault::new(FaultCode::Busy, "an update is carried out")),
        }
    }

    /// Looks at the update that is staged, if it is `update_id`.
    fn staged<T>(&self, update_id: u64, look: impl FnOnce(&UpdateSpec) -> T) -> Option<T> {
        let slot = self.lock_prepared();
        let spec = slot.as_ref().map(|staged| &staged.prepared.spec);
        spec.filter(|spec| spec.update_id == update_id).map(look)
    }

    /// Refuses a Commit before the resources of the update are there.
    fn check_resources(&self, update_id: u64) -> Result<(), Fault> {
        let staged = self.staged(update_id, |spec| (spec.image_digest, spec.resources.clone()));
        match (staged, &self.provisioner) {
            (Some((digest, resources)), Some(provisioner)) => {
                provisioner.check_commit(digest, &resources)
            }
            (Some((_, resources)), None) if !resources.is_empty() => Err(not_provisioned()),
            _ => Ok(()),
        }
    }

    /// Accepts the Commit of the staged update, and starts to carry it out.
    ///
    /// # Errors
    ///
    /// `NotFound` if it is not staged, `Busy` during another update, `Stale` if the scan settings
    /// have changed since it was staged, `Held` during a pause, `Unavailable` if its resources are
    /// not provisioned.
    pub fn commit(self: &Arc<Self>, update_id: u64) -> Result<(), Fault> {
        let _deciding = locked(&self.deciding);
        self.check_resources(update_id)?;
        let scope = self.lock_prepared().as_ref().map(|prepared| prepared.scope);
        let started = self.report_state.try_change(|state| {
            let last = state.persisted.last_update.as_ref();
            match state.update {
                UpdatePhase::Updating(current) if current == update_id => Ok(None),
                UpdatePhase::Prepared(current) if current == update_id => {
                    if scope != Some(state.scope) {
                        let text = "the scan settings changed since the update was staged";
                        return Err(Fault::new(FaultCode::Stale, text));
                    }
                    // The caller may have waited for a permission since it checked the pause. Here
                    // the state is locked: no update begins after `Pause` has answered.
                    refuse_if_paused(state.pause_in_force())?;
                    state.update = UpdatePhase::Updating(update_id);
                    Ok(Some(()))
                }
                _ if last
                    .is_some_and(|last| last.update_id == update_id && was_committed(last)) =>
                {
                    Ok(None)
                }
                UpdatePhase::Updating(current) | UpdatePhase::Preparing(current) => {
                    let text = format!("update {current} is under way");
                    Err(Fault::new(FaultCode::Busy, text))
                }
                UpdatePhase::Idle | UpdatePhase::Prepared(_) => Err(not_staged(update_id)),
            }
        })?;
        if started.is_some() {
            let updater = Arc::clone(self);
            self.tasks.spawn(async move { updater.run_commit(update_id).await });
        }
        Ok(())
    }

    async fn run_commit(self: Arc<Self>, update_id: u64) {
        let Some(prepared) = self.lock_prepared().take() else {
            tracing::error!(update_id, "the staged update was lost");
            self.report_state.change(|state| state.update = UpdatePhase::Idle);
            return;
        };
        let persisted = self.report_state.read(|state| Arc::clone(&state.persisted));
        let touched = prepared.prepared.spec.touched.clone();
        let (triggers, tasks) = (&persisted.triggers, &persisted.tasks);
        let journal = prepared.prepared.journal(triggers, tasks, self.identity.boot_id());
        let head = journal.head.clone();
        self.run_update(touched, &head, |executor, host| executor.commit(host, journal)).await;
    }

    /// Asks for permission if the staged update would disturb the machine. Succeeds if `update_id`
    /// is not staged: [`Updater::commit`] refuses that.
    ///
    /// # Errors
    ///
    /// `Held` if the machine may not be disturbed now; the update stays staged.
    pub async fn permit(&self, update_id: u64) -> Result<(), Fault> {
        let Some(gate) = &self.gate else { return Ok(()) };
        let triggers = self.report_state.read(|state| state.persisted.triggers.clone());
        let disturbs = {
            let slot = self.lock_prepared();
            let staged = slot.as_ref().map(|staged| &staged.prepared);
            staged.is_some_and(|prepared| {
                prepared.spec.update_id == update_id
                    && !prepared.spec.force_disruption
                    && prepared.calls(&triggers).high_impact
            })
        };
        if disturbs { gate.permit(update_id).await } else { Ok(()) }
    }

    /// Reports how an update ended, and sets the next phase.
    async fn note(&self, last: LastUpdate, triggers: Option<Triggers>, phase: UpdatePhase) {
        // Write-behind: the executor has written the result of a committed update before it closed
        // the journal. One that could not be staged is ordered again after a crash.
        let change = move |state: &mut State, persisted: &mut PersistedState| {
            note_update(persisted, &last, triggers.as_ref());
            note_reboot(persisted, &state.identity.boot_id);
            state.update = phase;
        };
        self.report_state.persist_behind(change).await;
    }
}

/// Lets refused changes be tried again when their time is over, until `stop` is cancelled.
pub async fn end_refusals(report_state: Arc<ReportState>, stop: CancellationToken) {
    let mut versions = report_state.watch();
    loop {
        versions.borrow_and_update();
        let end = report_state.read(|state| state.refusals.next_end());
        let wait = async {
            match end {
                Some(end) => tokio::time::sleep_until(report_state.end_of(end).into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            news = versions.changed() => if news.is_err() { return },
            () = wait => {
                report_state.change_refusals(|refusals, now| refusals.expire(now));
            }
            () = stop.cancelled() => return,
        }
    }
}

fn not_staged(update_id: u64) -> Fault {
    let text = format!("update {update_id} is not staged: prepare it again");
    Fault::new(FaultCode::NotFound, text)
}

/// Why an image with resources does not come to a machine whose root is another one.
fn not_provisioned() -> Fault {
    Fault::new(FaultCode::Unavailable, format!("this machine does not provision: {NOT_HERE}"))
}

fn internal(error: &dyn std::error::Error) -> Fault {
    Fault::new(FaultCode::Internal, error_chain(error))
}
