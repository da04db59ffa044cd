//! Runs the executor in the daemon: keeps the scanner out of the tree meanwhile, tells the board,
//! has what was touched scanned again, reboots, and tries again what is stuck.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::{CheckHealthReply, Health, LastUpdate, Outcome, TriggerFailure};
use model::image::HealthCheck;
use model::path::TreePath;
use model::trigger::Triggers;
use model::trigger::services::ServiceCall;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::Updater;
use super::executor::{
    Executor, FinalTree, JournalState, Machine, RunningUpdate, Services, UpdateEnd,
};
use super::journal::Head;
use super::prepared::{forget_taken, free};
use super::recovery::Resumed;
use crate::machine::health;
use crate::machine::services::ServiceDriver;
use crate::state::accepted_image::AcceptedImage;
use crate::state::persisted_state::PersistError;
use crate::state::report_state::{UpdatePhase, note_reboot, note_update};
use crate::{
    scan::{Pause, Stopped},
    state::snapshot::Snapshot,
};

/// How many times longer than the first the longest pause between two tries is.
const RETRY_GROWTH_MAX: u32 = 20;

type Scanning = Pin<Box<dyn Future<Output = Result<Arc<Snapshot>, Stopped>> + Send>>;

/// The services of this machine.
#[derive(Clone, Copy, Debug)]
pub struct TimedServices<'a> {
    /// What stops and starts them.
    pub driver: &'a ServiceDriver,
    /// How long one may take.
    pub time_max: Duration,
}

impl Services for TimedServices<'_> {
    fn drive(&self, calls: &[ServiceCall]) -> Vec<TriggerFailure> {
        self.driver.run_all(calls, self.time_max)
    }
}

/// The daemon, as the executor sees it.
pub(super) struct DaemonMachine<'a> {
    updater: &'a Updater,
    /// What keeps the scanner out of the tree, and what it has to scan when it may.
    pause: Mutex<Option<(Pause, BTreeSet<TreePath>)>>,
    scanning: Mutex<Option<Scanning>>,
    /// The health check of the image.
    check: Option<HealthCheck>,
    /// What is remembered when the update has succeeded.
    accepted: Option<AcceptedImage>,
}

impl Machine for DaemonMachine<'_> {
    fn check_health(&self, check: &HealthCheck) -> Health {
        let health = self.updater.run_check(check);
        health.unwrap_or_else(|| Health::Failed("it was interrupted".to_owned()))
    }

    fn is_stopping(&self) -> bool {
        self.updater.stop.is_cancelled()
    }

    fn tree_settled(&self) {
        let pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((pause, touched)) = pause {
            let scanning: Scanning = Box::pin(pause.scan_touched(touched));
            *self.scanning.lock().unwrap_or_else(PoisonError::into_inner) = Some(scanning);
        }
    }

    fn note(&self, last: &LastUpdate, done: Option<&Triggers>) -> Result<(), PersistError> {
        // First, so that no update is known as done whose image may be forgotten.
        if let (Some(_), Some(accepted)) = (done, &self.accepted) {
            self.updater.state.store_accepted(accepted)?;
        }
        let report_state = &self.updater.report_state;
        report_state.change(|state| {
            note_update(&mut state.persisted, last, done);
            note_reboot(state);
            if done.is_some() {
                state.persisted.health_check.clone_from(&self.check);
            }
        });
        report_state.save_blocking(&self.updater.state)
    }
}

/// An update that has a journal which is not closed.
enum OpenJournal {
    /// It is known.
    Update(Box<RunningUpdate>),
    /// It is not known what it is, or how far.
    Lost,
}

impl Updater {
    /// Runs `work` in a thread of its own while the scanner is out of the tree, and does what comes
    /// after it. `touched` is scanned as soon as the tree is settled.
    pub(super) async fn conduct(
        self: &Arc<Self>,
        touched: BTreeSet<TreePath>,
        head: &Head,
        work: impl FnOnce(&Executor<'_>, &DaemonMachine<'_>) -> (RunningUpdate, UpdateEnd)
        + Send
        + 'static,
    ) {
        match self.run(touched, head, work).await {
            Ok((update, ended, scanning)) => self.conclude(update, ended, scanning).await,
            Err(error) => self.stay_stuck(OpenJournal::Lost, error),
        }
    }

    async fn run(
        self: &Arc<Self>,
        touched: BTreeSet<TreePath>,
        head: &Head,
        work: impl FnOnce(&Executor<'_>, &DaemonMachine<'_>) -> (RunningUpdate, UpdateEnd)
        + Send
        + 'static,
    ) -> Result<(RunningUpdate, UpdateEnd, Option<Scanning>), String> {
        let pause = match self.scanner.pause().await {
            Ok(pause) => Some((pause, touched)),
            Err(error) => {
                tracing::warn!("the update goes on without scanner: {error}");
                None
            }
        };
        let updater = Arc::clone(self);
        let (check, accepted) = (head.health_check.clone(), head.accepted.clone());
        let running = tokio::task::spawn_blocking(move || {
            let services = updater.services();
            let (pause, scanning) = (Mutex::new(pause), Mutex::new(None));
            let host = DaemonMachine { updater: &updater, pause, scanning, check, accepted };
            let (update, ended) = work(&updater.executor(&services), &host);
            let scanning = host.scanning.into_inner().unwrap_or_else(PoisonError::into_inner);
            (update, ended, scanning)
        });
        running.await.map_err(|error| error.to_string())
    }

    /// Runs the health check; `None` if subd is stopped meanwhile. Blocks.
    fn run_check(&self, check: &HealthCheck) -> Option<Health> {
        let runtime = Handle::current();
        let stopped = |time: Duration| {
            let stopping = async { timeout(time, self.stop.cancelled()).await.is_ok() };
            self.stop.is_cancelled() || runtime.block_on(stopping)
        };
        health::check(check, self.command_runner, stopped)
    }

    /// Runs the health check of the last image; nothing is undone. One at a time.
    ///
    /// # Errors
    ///
    /// `Unavailable` if subd is stopped meanwhile.
    pub async fn check_health(self: &Arc<Self>) -> Result<CheckHealthReply, Fault> {
        let _turn = self.checking.lock().await;
        let Some(check) = self.report_state.read(|state| state.persisted.health_check.clone())
        else {
            return Ok(CheckHealthReply { health: None });
        };
        let updater = Arc::clone(self);
        let checking = tokio::task::spawn_blocking(move || updater.run_check(&check));
        match checking.await {
            Ok(Some(health)) => Ok(CheckHealthReply { health: Some(health) }),
            Ok(None) => Err(Fault::new(FaultCode::Unavailable, "subd is stopping")),
            Err(error) => Err(Fault::new(FaultCode::Internal, error.to_string())),
        }
    }

    fn services(&self) -> TimedServices<'_> {
        TimedServices { driver: &self.driver, time_max: self.service_time_max }
    }

    fn executor<'a>(&'a self, services: &'a dyn Services) -> Executor<'a> {
        Executor {
            root: &self.root,
            directories: &self.directories,
            services: Some(services),
            boot_id: self.identity.boot_id(),
        }
    }

    /// Takes up an update that was interrupted before this start.
    pub fn resume(self: &Arc<Self>, resumed: Resumed) {
        let (mut update, carried) = match resumed {
            Resumed::Nothing => return,
            Resumed::Lost(why) => return self.stay_stuck(OpenJournal::Lost, why),
            Resumed::Update(update, carried) => (*update, carried),
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
                let ended = executor.finish(host, &mut update, carried);
                (update, ended)
            };
            updater.conduct(touched, &head, work).await;
        });
    }

    /// Does what comes after the executor.
    async fn conclude(
        self: &Arc<Self>,
        mut update: RunningUpdate,
        ended: UpdateEnd,
        scanning: Option<Scanning>,
    ) {
        let UpdateEnd { mut last, settled, journal, reboot } = ended;
        let (update_id, outcome) = (last.update_id, &last.outcome);
        let window = Duration::from_nanos(last.window_ns);
        tracing::info!(update_id, image = %last.image, ?outcome, ?window, "the update has ended");
        if settled != Some(FinalTree::Old) {
            // What was taken is part of the tree now, or may be.
            forget_taken(&update, &self.cache);
        } else if journal == JournalState::Closed {
            update = self.free(update).await;
        }
        self.report_state.set_cache(|| self.cache.ids());
        let scanning = match last.outcome {
            // The tree has changed once more since.
            Outcome::Undone(_) => {
                let touched = update.paths().cloned().collect();
                self.scanner.scan_touched(touched).await
            }
            _ => match scanning {
                Some(scanning) => scanning.await,
                None => Err(Stopped),
            },
        };
        if let Ok(snapshot) = scanning {
            let generation =
                self.report_state.take_snapshot(snapshot, self.identity.read(&self.root));
            last.verified_generation = Some(generation);
        }
        if reboot {
            last.trigger_failures.extend(self.reboot().await);
        }
        let own = update.journal.head.calls.own
            && matches!(last.outcome, Outcome::Done | Outcome::Undone(_));
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
                if own {
                    self.restart_own().await;
                }
            }
            // Whoever starts next takes it up.
            JournalState::Interrupted => {}
            JournalState::AwaitsBoot if last.trigger_failures.is_empty() => {
                self.note(last, None, UpdatePhase::Updating(update_id)).await;
            }
            JournalState::AwaitsBoot => {
                update.fail(last.trigger_failures);
                let unfinished = OpenJournal::Update(Box::new(update));
                self.stay_stuck(unfinished, "the reboot that it waits for failed".to_owned());
            }
            JournalState::Stuck(why) => {
                self.note(last, triggers, UpdatePhase::Updating(update_id)).await;
                self.stay_stuck(OpenJournal::Update(Box::new(update)), why);
            }
        }
    }

    /// Frees what the slots hold, where it holds nobody up.
    async fn free(self: &Arc<Self>, update: RunningUpdate) -> RunningUpdate {
        let updater = Arc::clone(self);
        let freeing = tokio::task::spawn_blocking(move || {
            free(&update, &updater.directories, &updater.cache);
            update
        });
        freeing.await.expect("what is freed was checked when it was made")
    }

    /// Tells that a journal cannot be closed, and tries again until it can.
    fn stay_stuck(self: &Arc<Self>, unfinished: OpenJournal, why: String) {
        self.report_state.change(|state| {
            state.update = UpdatePhase::Idle;
            state.stuck = Some(why);
        });
        let updater = Arc::clone(self);
        self.tasks.spawn(async move { updater.try_again(unfinished).await });
    }

    async fn try_again(self: Arc<Self>, mut unfinished: OpenJournal) {
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
                OpenJournal::Lost => match self.look_again().await {
                    Resumed::Nothing => {
                        self.report_state.change(|state| state.stuck = None);
                        return;
                    }
                    Resumed::Lost(why) => {
                        self.tell_stuck(why);
                        OpenJournal::Lost
                    }
                    found @ Resumed::Update(..) => return self.resume(found),
                },
            };
        }
    }

    /// Tries an update once more; gives it back if it is still stuck.
    async fn retry(self: &Arc<Self>, mut update: RunningUpdate) -> Option<Box<RunningUpdate>> {
        let touched = update.paths().cloned().collect();
        let head = update.journal.head.clone();
        let work = move |executor: &Executor<'_>, host: &DaemonMachine<'_>| {
            let ended = executor.retry(host, &mut update);
            (update, ended)
        };
        match self.run(touched, &head, work).await {
            Ok((update, UpdateEnd { journal: JournalState::Stuck(why), .. }, _)) => {
                self.tell_stuck(why);
                Some(Box::new(update))
            }
            Ok((update, ended, scanning)) => {
                self.conclude(update, ended, scanning).await;
                None
            }
            Err(error) => {
                self.stay_stuck(OpenJournal::Lost, error);
                None
            }
        }
    }

    /// Looks whether what is lost can be found now.
    async fn look_again(self: &Arc<Self>) -> Resumed {
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

    fn tell_stuck(&self, why: String) {
        if self.report_state.read(|state| state.stuck.as_ref() != Some(&why)) {
            tracing::error!("the update is still stuck: {why}");
            self.report_state.change(|state| state.stuck = Some(why));
        }
    }
}
