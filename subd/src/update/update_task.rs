//! Runs the executor in the daemon: pauses the scanner, reports progress, has the changed paths
//! scanned again, reboots, and retries stuck updates.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::tasks::image::ImageTasks;
use api::fault::{Fault, FaultCode};
use api::subd::{CheckHealthReply, Health, LastUpdate, TriggerFailure, UpdateOutcome, UpdatePhase};
use model::display::error_chain;
use model::image::HealthCheck;
use model::lock::locked;
use model::path::TreePath;
use model::plan::RefusedChange;
use model::trigger::Triggers;
use model::trigger::services::ServiceCall;
use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::machine::services::ServiceDriver;
use crate::scan::{Pause, Stopped};
use crate::state::persisted_state::{PersistError, PersistedState};
use crate::state::refusals::{FailedChange, FailedIn};
use crate::state::{Snapshot, State, note_reboot, note_update};
use crate::tasks::runner::Tasks;
use crate::tasks::supervisor::Supervisor;
use crate::trust::accepted_image;
use crate::update::Updater;
use crate::update::executor::{Executor, JournalState, Machine, Services, UpdateEnd};
use crate::update::journal::JournalHead;
use crate::update::own_certificates::OwnCertificates;
use crate::update::prepared::{forget_taken, free};
use crate::update::reboot::note_stopped;
use crate::update::recovery::Resumed;
use crate::update::running_update::{FailedStep, FinalTree, RunningUpdate};

/// Why a health check is not run.
const HEALTH_NOT_CHECKED: &str = "health checks are not run here, because the root is not /: the \
                                  check of the image is run when subd starts with this root as /";

/// The longest delay between two retries, as a multiple of the first.
const RETRY_GROWTH_MAX: u32 = 20;

type Scanning = Pin<Box<dyn Future<Output = Result<Arc<Snapshot>, Stopped>> + Send>>;

/// What stops and runs daemon tasks.
#[derive(Clone, Copy, Debug)]
pub enum TaskControl<'a> {
    /// When subd starts: nothing is started before it is known which tasks the machine has.
    AtStart(&'a Supervisor),
    Running(&'a Tasks),
}

/// The services of this machine.
#[derive(Clone, Copy, Debug)]
pub struct TimedServices<'a> {
    /// What stops and starts them.
    pub driver: &'a ServiceDriver,
    pub tasks: Option<TaskControl<'a>>,
    /// How long one may take.
    pub time_max: Duration,
}

impl Services for TimedServices<'_> {
    fn drive(&self, calls: &[ServiceCall]) -> Vec<TriggerFailure> {
        self.driver.run_all(calls, self.time_max)
    }

    fn pause_tasks(&self, tasks: &BTreeSet<String>) -> Vec<TriggerFailure> {
        match self.tasks {
            None => Vec::new(),
            Some(TaskControl::AtStart(supervisor)) => supervisor.pause(tasks),
            Some(TaskControl::Running(running)) => running.pause(tasks),
        }
    }

    fn run_tasks(&self, tasks: &ImageTasks) {
        if let Some(TaskControl::Running(running)) = self.tasks {
            running.define(tasks);
        }
    }
}

/// The machine of the executor in the daemon.
pub(super) struct DaemonMachine<'a> {
    updater: &'a Updater,
    /// The update.
    head: JournalHead,
    /// The pause of the scanner, and the paths to scan when it ends.
    pause: Mutex<Option<(Pause, BTreeSet<TreePath>)>>,
    scanning: Mutex<Option<Scanning>>,
}

impl Machine for DaemonMachine<'_> {
    fn checks_health(&self) -> bool {
        self.updater.health_checker.is_some()
    }

    fn check_health(&self, check: &HealthCheck) -> Health {
        let began = Instant::now();
        let interrupted = || Health::Failed("it was interrupted".to_owned());
        match self.updater.run_check(check) {
            Some(Health::Passed) => {}
            health => return health.unwrap_or_else(interrupted),
        }
        let Some(running) = &self.updater.daemon_tasks else { return Health::Passed };
        let within = Duration::from_secs(check.within_seconds.into());
        let deadline = began.checked_add(within).unwrap_or(began);
        let is_stopping = || self.updater.stop.is_cancelled();
        running
            .await_health(&self.head.tasks.new, deadline, is_stopping)
            .unwrap_or_else(interrupted)
    }

    fn is_stopping(&self) -> bool {
        self.updater.stop.is_cancelled()
    }

    fn tree_settled(&self, is_new: bool) {
        if let Some(provisioner) = &self.updater.provisioner {
            provisioner.tree_settled(is_new.then_some(&self.head.resources));
        }
        let pause = locked(&self.pause).take();
        if let Some((pause, touched)) = pause {
            let scanning: Scanning = Box::pin(pause.scan_touched(touched));
            *locked(&self.scanning) = Some(scanning);
        }
    }

    fn note(&self, last: &LastUpdate, done: Option<&Triggers>) -> Result<(), PersistError> {
        let head = &self.head;
        if let (Some(_), Some(running)) = (done, &self.updater.daemon_tasks)
            && !last.awaits_boot
        {
            running.define(&head.tasks.new);
        }
        if let Some(provisioner) = &self.updater.provisioner {
            match (done, &last.outcome) {
                (Some(_), _) => provisioner.activated(head.image_digest, &head.resources)?,
                (None, UpdateOutcome::Undone(_)) => provisioner.undone(head.image_digest)?,
                _ => {}
            }
        }
        // First, so that no update is recorded as done before its image is recorded as accepted.
        if let (Some(_), Some(accepted)) = (done, &head.accepted) {
            accepted_image::store(&self.updater.state, accepted)?;
        }
        self.updater.report_state.persist_always(|persisted| {
            note_update(persisted, last, done);
            note_reboot(persisted, self.updater.identity.boot_id());
            note_stopped(persisted, head, last);
            if done.is_some() {
                persisted.tasks.clone_from(&head.tasks.new);
                persisted.health_check.clone_from(&head.health_check);
                persisted.health_unchecked = head.health_check.is_some() && !self.checks_health();
            }
        })
    }
}

/// A journal that is not closed.
enum OpenJournal {
    Update(Box<RunningUpdate>),
    /// The journal or the phase cannot be read.
    Lost,
}

impl Updater {
    /// Runs `work` in a thread of its own while the scanner is paused, and concludes the update.
    /// `touched` is scanned as soon as the tree is final.
    pub(super) async fn run_update(
        self: &Arc<Self>,
        touched: BTreeSet<TreePath>,
        head: &JournalHead,
        work: impl FnOnce(&Executor<'_>, &DaemonMachine<'_>) -> (RunningUpdate, UpdateEnd)
        + Send
        + 'static,
    ) {
        match self.run(touched, head, work).await {
            Ok((update, ended, scanning)) => self.conclude(update, ended, scanning).await,
            Err(error) => self.retry_until_closed(OpenJournal::Lost, error),
        }
    }

    async fn run(
        self: &Arc<Self>,
        touched: BTreeSet<TreePath>,
        head: &JournalHead,
        work: impl FnOnce(&Executor<'_>, &DaemonMachine<'_>) -> (RunningUpdate, UpdateEnd)
        + Send
        + 'static,
    ) -> Result<(RunningUpdate, UpdateEnd, Option<Scanning>), String> {
        let pause = match self.scanner.pause().await {
            Ok(pause) => Some((pause, touched)),
            Err(error) => {
                tracing::warn!(
                    "the update continues although the scanner cannot be paused: {error}"
                );
                None
            }
        };
        let updater = Arc::clone(self);
        let head = head.clone();
        let running = tokio::task::spawn_blocking(move || {
            let services = updater.services();
            let (pause, scanning) = (Mutex::new(pause), Mutex::new(None));
            let host = DaemonMachine { updater: &updater, head, pause, scanning };
            let (update, ended) = work(&updater.executor(&services), &host);
            let scanning = host.scanning.into_inner().unwrap_or_else(PoisonError::into_inner);
            (update, ended, scanning)
        });
        let ended = running.await.map_err(|error| error.to_string());
        let reboots = matches!(&ended, Ok((_, UpdateEnd { reboot: true, .. }, _)));
        if let Some(tasks) = self.daemon_tasks.as_ref().filter(|_| !reboots) {
            tasks.release();
        }
        ended
    }

    /// Runs the health check; `None` if checks are not run here, or if subd is stopped in the
    /// meantime. Blocks.
    pub(super) fn run_check(&self, check: &HealthCheck) -> Option<Health> {
        let health_checker = self.health_checker.as_ref()?;
        let runtime = Handle::current();
        let stopped = |time: Duration| {
            let stopping = async { timeout(time, self.stop.cancelled()).await.is_ok() };
            self.stop.is_cancelled() || runtime.block_on(stopping)
        };
        health_checker.check(check, stopped)
    }

    /// Runs the health check of the last image. Nothing is undone. One check at a time.
    ///
    /// # Errors
    ///
    /// `Unavailable` if checks are not run here, or if subd is stopped in the meantime.
    pub async fn check_health(self: &Arc<Self>) -> Result<CheckHealthReply, Fault> {
        let _turn = self.checking.lock().await;
        let Some(check) = self.report_state.read(|state| state.persisted.health_check.clone())
        else {
            return Ok(CheckHealthReply { health: None });
        };
        if self.health_checker.is_none() {
            return Err(Fault::new(FaultCode::Unavailable, HEALTH_NOT_CHECKED));
        }
        let updater = Arc::clone(self);
        let checking = tokio::task::spawn_blocking(move || updater.run_check(&check));
        match checking.await {
            Ok(Some(health)) => Ok(CheckHealthReply { health: Some(health) }),
            Ok(None) => Err(Fault::new(FaultCode::Unavailable, "subd is stopping")),
            Err(error) => Err(Fault::new(FaultCode::Internal, error.to_string())),
        }
    }

    /// Runs the health check that could not be run when the last image was installed, because the
    /// root was not `/` then. Nothing is undone.
    fn check_health_after_installation(self: &Arc<Self>) {
        let unchecked = |state: &State| state.persisted.health_unchecked;
        if self.health_checker.is_none() || !self.report_state.read(unchecked) {
            return;
        }
        let updater = Arc::clone(self);
        self.tasks.spawn(async move {
            // `Unavailable` because subd is stopping: the next start repeats the check.
            let Ok(CheckHealthReply { health: Some(health) }) = updater.check_health().await else {
                return;
            };
            let noted = updater.report_state.persist_always(|persisted| {
                // Another update may have been made meanwhile.
                let PersistedState { last_update, last_image, .. } = persisted;
                if let Some(last) = last_update
                    && last.outcome == UpdateOutcome::Done
                    && last_image.as_ref() == Some(&last.image)
                    && persisted.health_unchecked
                {
                    last.health = Some(health);
                }
                persisted.health_unchecked = false;
            });
            if let Err(error) = noted {
                tracing::error!("{}", error_chain(&error));
            }
        });
    }

    fn services(&self) -> TimedServices<'_> {
        let tasks = self.daemon_tasks.as_deref().map(TaskControl::Running);
        TimedServices { driver: &self.driver, tasks, time_max: self.service_time_max }
    }

    fn executor<'a>(&'a self, services: &'a dyn Services) -> Executor<'a> {
        Executor {
            root: &self.root,
            directories: &self.directories,
            services: Some(services),
            boot_id: self.identity.boot_id(),
        }
    }

    /// Continues what was under way when subd was stopped. Called when subd starts.
    pub async fn start(self: &Arc<Self>, resumed: Resumed) {
        self.note_boot().await;
        // Nothing else may begin before they are there.
        let own = self.own_certificates.as_ref();
        if let Some(update_id) = own.and_then(OwnCertificates::is_putting_back) {
            self.report_state.change(|state| state.update = UpdatePhase::Preparing(update_id));
        }
        self.resume(resumed);
        self.tasks.spawn(Arc::clone(self).watch_own_certificates());
        self.check_health_after_installation();
        self.tasks.spawn(Arc::clone(self).watch_reboots());
    }

    /// Continues an update that was interrupted before this start.
    fn resume(self: &Arc<Self>, resumed: Resumed) {
        let (mut update, settled_tree) = match resumed {
            Resumed::Nothing => return,
            Resumed::Lost(why) => return self.retry_until_closed(OpenJournal::Lost, why),
            Resumed::Update(update, settled_tree) => (*update, settled_tree),
        };
        let update_id = update.update_id();
        let noted = self.report_state.read(|state| state.persisted.last_update.clone());
        update.known = noted.filter(|noted| noted.update_id == update_id);
        self.report_state.change(|state| state.update = UpdatePhase::Updating(update_id));
        let updater = Arc::clone(self);
        self.tasks.spawn(async move {
            let touched = update.paths().cloned().collect();
            let head = update.journal.head.clone();
            let work = move |executor: &Executor<'_>, host: &DaemonMachine<'_>| {
                let ended = executor.finish(host, &mut update, settled_tree);
                (update, ended)
            };
            updater.run_update(touched, &head, work).await;
        });
    }

    /// Reports the result, frees the slots, reboots, and restarts subd if the update asks for it.
    async fn conclude(
        self: &Arc<Self>,
        mut update: RunningUpdate,
        ended: UpdateEnd,
        scanning: Option<Scanning>,
    ) {
        let UpdateEnd { mut last, settled, journal, reboot } = ended;
        let (update_id, outcome) = (last.update_id, last.outcome.to_string());
        let window_us = last.window_ns / 1_000;
        tracing::info!(update_id, image = %last.image, outcome, window_us, "the update has ended");
        if settled != Some(FinalTree::Old) {
            // The objects are, or may be, part of the tree now.
            forget_taken(&update, &self.cache);
        } else if journal == JournalState::Closed {
            update = self.free(update).await;
        }
        self.report_state.set_cache(|| self.cache.ids());
        if let Some(failed) = update.failed_step.take() {
            self.note_failed_step(failed);
        }
        last.verified_generation = self.verify(&update, &last.outcome, scanning).await;
        if reboot && let Some(failure) = self.reboot().await {
            last.trigger_failures.push(failure);
            last.trigger_failures.extend(self.start_instead().await);
        }
        let restarts_subd = update.journal.head.calls.own
            && matches!(last.outcome, UpdateOutcome::Done | UpdateOutcome::Undone(_));
        let done = settled == Some(FinalTree::New);
        let complete = done && journal != JournalState::AwaitsBoot;
        let triggers = complete.then(|| update.journal.head.triggers.clone());
        match journal {
            JournalState::Closed => {
                self.report_state.change(|state| state.stuck = None);
                self.note(last, triggers, UpdatePhase::Idle).await;
                if done {
                    let updater = Arc::clone(self);
                    self.tasks.spawn(async move { updater.free(update).await });
                }
                if restarts_subd {
                    self.restart_own().await;
                }
            }
            // The next start continues it.
            JournalState::Interrupted => {}
            JournalState::AwaitsBoot if last.trigger_failures.is_empty() => {
                self.note(last, None, UpdatePhase::Updating(update_id)).await;
            }
            JournalState::AwaitsBoot => {
                update.fail(last.trigger_failures);
                let unfinished = OpenJournal::Update(Box::new(update));
                self.retry_until_closed(
                    unfinished,
                    "the reboot that it waits for failed".to_owned(),
                );
            }
            JournalState::Stuck(why) => {
                self.note(last, triggers, UpdatePhase::Updating(update_id)).await;
                self.retry_until_closed(OpenJournal::Update(Box::new(update)), why);
            }
        }
    }

    /// Reports the scan after an update, and returns its generation.
    async fn verify(
        &self,
        update: &RunningUpdate,
        outcome: &UpdateOutcome,
        scanning: Option<Scanning>,
    ) -> Option<u64> {
        // The first scan by other settings verifies the update.
        self.report_state.read(|state| state.persisted.unusable_settings.is_none()).then_some(())?;
        let scanned = match outcome {
            // The tree has changed again since it was scanned.
            UpdateOutcome::Undone(_) => {
                self.scanner.scan_touched(update.paths().cloned().collect()).await
            }
            _ => scanning?.await,
        };
        let identity = self.identity.read(&self.root);
        scanned.ok().map(|snapshot| self.report_state.take_snapshot(snapshot, identity))
    }

    /// Records that a step failed after services were stopped.
    fn note_failed_step(&self, failed: FailedStep) {
        let snapshot = self.report_state.read(|state| state.snapshot.clone());
        let Some(tree) = snapshot.as_ref().and_then(|snapshot| snapshot.tree.as_ref()) else {
            return;
        };
        self.note_failed_changes(vec![failed.change(tree)], FailedIn::Commit);
    }

    /// Records changes that failed, which plans then leave out.
    pub(super) fn note_failed_changes(&self, changes: Vec<FailedChange>, failed_in: FailedIn) {
        self.report_state.change_refusals(|refusals, now| {
            for change in changes {
                let RefusedChange { path, why, .. } = change.refused.clone();
                tracing::warn!(%path, "cannot be changed: {why}");
                if !refusals.add(change, failed_in, now) {
                    tracing::warn!(%path, "is not remembered: too many paths cannot be changed");
                }
            }
        });
    }

    /// Frees the slots in a blocking thread.
    async fn free(self: &Arc<Self>, update: RunningUpdate) -> RunningUpdate {
        let updater = Arc::clone(self);
        let freeing = tokio::task::spawn_blocking(move || {
            free(&update, &updater.directories, &updater.cache);
            update
        });
        freeing.await.expect("what is freed was checked when it was made")
    }

    /// Reports that a journal cannot be closed, and retries until it can.
    fn retry_until_closed(self: &Arc<Self>, unfinished: OpenJournal, why: String) {
        self.report_state.change(|state| {
            state.update = UpdatePhase::Idle;
            state.stuck = Some(why);
        });
        let updater = Arc::clone(self);
        self.tasks.spawn(async move { updater.retry_loop(unfinished).await });
    }

    async fn retry_loop(self: Arc<Self>, mut unfinished: OpenJournal) {
        let mut pause = self.retry_after;
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            pause = (pause * 2).min(self.retry_after * RETRY_GROWTH_MAX);
            unfinished = match unfinished {
                OpenJournal::Update(update) => match self.retry(*update).await {
                    Some(update) => OpenJournal::Update(update),
                    None => return,
                },
                OpenJournal::Lost => match self.find_again().await {
                    Resumed::Nothing => {
                        self.report_state.change(|state| state.stuck = None);
                        return;
                    }
                    Resumed::Lost(why) => {
                        self.report_stuck(why);
                        OpenJournal::Lost
                    }
                    found @ Resumed::Update(..) => return self.resume(found),
                },
            };
        }
    }

    /// Retries an update; returns it if it is still stuck.
    async fn retry(self: &Arc<Self>, mut update: RunningUpdate) -> Option<Box<RunningUpdate>> {
        let touched = update.paths().cloned().collect();
        let head = update.journal.head.clone();
        let work = move |executor: &Executor<'_>, host: &DaemonMachine<'_>| {
            let ended = executor.retry(host, &mut update);
            (update, ended)
        };
        match self.run(touched, &head, work).await {
            Ok((update, UpdateEnd { journal: JournalState::Stuck(why), .. }, _)) => {
                self.report_stuck(why);
                Some(Box::new(update))
            }
            Ok((update, ended, scanning)) => {
                self.conclude(update, ended, scanning).await;
                None
            }
            Err(error) => {
                self.retry_until_closed(OpenJournal::Lost, error);
                None
            }
        }
    }

    /// Tries again to read the journal that could not be read.
    async fn find_again(self: &Arc<Self>) -> Resumed {
        let pause = self.scanner.pause().await;
        let updater = Arc::clone(self);
        let looking = tokio::task::spawn_blocking(move || {
            let services = updater.services();
            Resumed::at_start(&updater.executor(&services))
        });
        let found = looking.await.unwrap_or_else(|error| Resumed::Lost(error.to_string()));
        drop(pause);
        found
    }

    fn report_stuck(&self, why: String) {
        if self.report_state.read(|state| state.stuck.as_ref() != Some(&why)) {
            tracing::error!("the update is still stuck: {why}");
            self.report_state.change(|state| state.stuck = Some(why));
        }
    }
}
