//! The daemon: how it starts and how it stops.
//!
//! | module | what |
//! |---|---|
//! | [`command_line`] | the flags and the program |

pub mod command_line;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ::provisioning::machine::drift::Schedule;
use ::tasks::image::ImageTasks;
use api::audit::call_details::{WHY_BYTES_MAX, escape_and_cut};
use api::audit::record::AuditEvent;
use api::subd::{SpeedSource, UpdateOutcome, UpdatePhase};
use daemon::{ListenError, SUBD_PORT, listen_text};
use model::display::error_chain;
use model::filter::{PatternError, Patterns};
use model::scope::SUBD_DIRECTORY;
use rpc::audit_log::AuditLog;
use rpc::server::{Router, serve};
use rpc::tls::Security;
use system::random::random;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cache::{Cache, CacheError};
use crate::daemon::command_line::Options;
use crate::fetch::Fetcher;
use crate::fetch::network::Network;
use crate::interface::operator::end_pauses;
use crate::interface::{Service, router};
use crate::limits::rates::Speed;
use crate::limits::{Budgets, LimitArgs, throughput};
use crate::machine::IdentitySource;
use crate::machine::command_runner::CommandRunner;
use crate::machine::disruption::DisruptionGate;
use crate::machine::health::HealthChecker;
use crate::machine::probe::Probe;
use crate::machine::services::{self, ServiceDriver};
use crate::provisioning;
use crate::provisioning::plugins::Plugins;
use crate::provisioning::provisioner::{Provisioner, Surroundings};
use crate::root::{Root, RootError};
use crate::scan::pace::Pace;
use crate::scan::{Pause, Scanner, watch_for_stalls};
use crate::state::directories::Directories;
use crate::state::persisted_state::{PersistError, PersistedState, SavedState, StateDirectory};
use crate::state::{ReportState, State};
use crate::tasks::records::{self, SavedRecords};
use crate::tasks::runner::Tasks;
use crate::tasks::supervisor::{Backend, Supervisor, SupervisorChoice};
use crate::trust::Trust;
use crate::update::Updater;
use crate::update::end_refusals;
use crate::update::executor::Executor;
use crate::update::own_certificates::{OwnCertificates, former_files};
use crate::update::recovery::{Resumed, remove_leftovers};
use crate::update::update_task::{TaskControl, TimedServices};

/// Why subd does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error("cannot manage `{}`", path.display())]
    Root { path: PathBuf, source: RootError },
    #[error("cannot open the object cache")]
    Cache { source: CacheError },
    #[error("cannot manage `{}`", path.display())]
    State { path: PathBuf, source: PersistError },
    #[error("invalid --exclude")]
    Exclude { source: PatternError },
    #[error("cannot {what}")]
    System { what: &'static str, source: io::Error },
    #[error("cannot start")]
    Listen { source: ListenError },
}

/// A subd that is ready to answer calls.
pub struct Daemon {
    listener: TcpListener,
    router: Router<Arc<Service>>,
    audit: AuditLog,
    updater: Arc<Updater>,
    parts: Parts,
    /// Cancelled by the caller of [`Daemon::start`].
    stop_asked: CancellationToken,
}

/// What is opened on the disk before subd scans or answers calls.
struct Opened {
    root: Arc<Root>,
    directories: Arc<Directories>,
    state: Arc<StateDirectory>,
    saved: SavedState,
    cache: Arc<Cache>,
    resumed: Resumed,
    /// What runs tasks, and their records; or why they are not run.
    supervision: Result<Supervision, String>,
    /// The records of resources, and how plugins are run; `None` if nothing is provisioned here.
    provisioning: Option<(provisioning::records::SavedRecords, Plugins)>,
    /// Where the audit log is, unless a flag names another directory.
    audit: PathBuf,
}

/// What runs the daemon tasks of the image.
struct Supervision {
    supervisor: Arc<Supervisor>,
    records: SavedRecords,
}

/// The parts of the daemon that others use.
struct Parts {
    root: Arc<Root>,
    state: Arc<StateDirectory>,
    cache: Arc<Cache>,
    budgets: Arc<Budgets>,
    report_state: Arc<ReportState>,
    scanner: Arc<Scanner>,
    identity: IdentitySource,
    tasks: TaskTracker,
    /// Cancelled when subd is to stop, and when it is to start again.
    stop: CancellationToken,
}

impl Daemon {
    /// Opens everything, starts to scan, and listens. Stops when `stop` is cancelled.
    pub async fn start(
        options: Options,
        security: &Security,
        stop: CancellationToken,
    ) -> Result<Self, StartError> {
        let exclusions =
            Patterns::new(&options.exclude).map_err(|source| StartError::Exclude { source })?;
        let identity = IdentitySource::new(options.hostname.clone());
        let (to_open, boot_id) = (options.clone(), identity.boot_id().to_owned());
        let opening = tokio::task::spawn_blocking(move || open(&to_open, &boot_id));
        let opened = opening.await.map_err(|error| StartError::System {
            what: "open the root",
            source: io::Error::other(error),
        })??;
        let Opened { root, directories, state, saved, cache, resumed, supervision, .. } = opened;
        let (provisioning, audit) = (opened.provisioning, opened.audit);
        let audit = open_audit(&options, &audit, &resumed).await;
        let persisted = saved.get();
        let budgets = budgets(&options.limits, &persisted);
        let budgets = Arc::new(budgets.of_installation(!manages_this_machine(&options)));
        let report_state = ReportState::new(
            random(),
            identity.read(&root),
            exclusions.clone(),
            saved,
            cache.ids(),
        );
        let scan = persisted.configuration.scan.clone();
        let scanner =
            Scanner::start(Arc::clone(&root), exclusions, scan, Pace::default(), budgets.clone())
                .map_err(|source| StartError::System { what: "start the scanner", source })?;
        let parts = Parts {
            root,
            state,
            cache,
            budgets,
            report_state: Arc::new(report_state),
            scanner: Arc::new(scanner),
            identity,
            tasks: TaskTracker::new(),
            stop: stop.child_token(),
        };
        let unusable = parts.report_state.read(State::unusable_settings);
        let pause = match unusable {
            // A scanner that has ended reads nothing either.
            Some(_) => parts.scanner.pause().await.ok(),
            None => None,
        };
        let (daemon_tasks, tasks_not_run) =
            start_tasks(&options, supervision, &persisted.tasks, &resumed, &parts.report_state)?;
        let every = options.resource_check_every;
        let provisioner = provisioning.map(|provisioning| parts.provisioner(provisioning, every));
        let running = (daemon_tasks, provisioner);
        let updater = parts.updater(&options, security, directories, running);
        updater.start(resumed).await;
        let service = parts.service(&options, security, &updater, pause, tasks_not_run);
        parts.tasks.spawn(end_pauses(Arc::clone(&parts.report_state), parts.stop.clone()));
        parts.tasks.spawn(Arc::clone(&updater).watch_health());
        parts.tasks.spawn(end_refusals(Arc::clone(&parts.report_state), parts.stop.clone()));
        if options.limits.device_speed.is_none() {
            parts.measure_device();
        }
        let listener = listen_text("subd", security, &options.listen, SUBD_PORT)
            .await
            .map_err(|source| StartError::Listen { source })?;
        let router =
            router(&service, security).audit(&audit).private_pages(options.pages.private_pages);
        Ok(Self { listener, router, audit, updater, parts, stop_asked: stop })
    }

    /// The address that it listens on.
    pub fn address(&self) -> io::Result<std::net::SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until it is stopped, or has to be started again because the root could not be
    /// written before and can be now. An update that is under way is finished; an update that is
    /// only staged is discarded.
    pub async fn run(self) {
        let Self { listener, router, audit, updater, parts, stop_asked } = self;
        let Parts { root, report_state, scanner, identity, tasks, stop, .. } = parts;
        let probe = Probe { root: Arc::clone(&root), report_state: Arc::clone(&report_state) };
        tasks.spawn(watch_for_stalls(
            Arc::clone(&scanner),
            Arc::clone(&report_state),
            stop.clone(),
        ));
        tasks.spawn(report_snapshots(
            Arc::clone(&scanner),
            report_state,
            root,
            identity,
            stop.clone(),
        ));
        tasks.spawn(probe.watch(stop.clone()));
        tasks.spawn(services::report_alive(stop.clone()));
        services::report_ready();
        serve(listener, router, stop).await;
        if stop_asked.is_cancelled() {
            services::report_stopping();
        }
        tasks.close();
        tasks.wait().await;
        if let Some(tasks) = updater.daemon_tasks.clone() {
            // Tasks themselves run on.
            let ending = tokio::task::spawn_blocking(move || tasks.end());
            if let Err(error) = ending.await {
                tracing::error!(%error, "the thread that runs tasks did not stop");
            }
        }
        drop(updater);
        let stopping = tokio::task::spawn_blocking(move || scanner.stop());
        if let Err(error) = stopping.await {
            tracing::error!(%error, "the scanner did not stop");
        }
        audit.close().await;
    }
}

impl Parts {
    fn measure_device(&self) {
        let (root, report_state) = (Arc::clone(&self.root), Arc::clone(&self.report_state));
        let budgets = Arc::clone(&self.budgets);
        self.tasks.spawn(measure(root, report_state, budgets, self.stop.clone()));
    }

    /// Starts to provision what was ordered before this start.
    fn provisioner(
        &self,
        (records, plugins): (provisioning::records::SavedRecords, Plugins),
        check_every: Duration,
    ) -> Arc<Provisioner> {
        let name = self.identity.read(&self.root).hostname;
        let (told, asked) = (Arc::clone(&self.report_state), Arc::clone(&self.report_state));
        let surroundings = Surroundings {
            tell: Box::new(move || told.change(|_| ())),
            last_update: Box::new(move || asked.read(State::last_update_done)),
            checks: Schedule::new(check_every, &name),
        };
        let stop = self.stop.clone();
        let machine = (name.as_str(), self.identity.boot_id());
        let provisioner = Provisioner::new(records, plugins, machine, surroundings, stop);
        let provisioner = Arc::new(provisioner);
        let running = Arc::clone(&provisioner);
        self.tasks.spawn_blocking(move || running.run());
        provisioner
    }

    fn updater(
        &self,
        options: &Options,
        security: &Security,
        directories: Arc<Directories>,
        (daemon_tasks, provisioner): (Option<Arc<Tasks>>, Option<Arc<Provisioner>>),
    ) -> Arc<Updater> {
        let (tasks, stop) = (&self.tasks, &self.stop);
        let command = options.disruption_command.as_deref().unwrap_or_default();
        let gate = DisruptionGate::new(command, command_runner(options));
        if let Some(gate) = &gate {
            tasks.spawn(Arc::clone(gate).run(Arc::clone(&self.report_state), stop.clone()));
        }
        let state = Arc::clone(&self.state);
        let (tracker, ending) = (tasks.clone(), stop.clone());
        let trust = Trust::new(
            &options.trust,
            state,
            security.clone(),
            self.identity.clone(),
            tracker,
            ending,
        );
        Arc::new(Updater {
            trust,
            root: Arc::clone(&self.root),
            directories,
            cache: Arc::clone(&self.cache),
            report_state: Arc::clone(&self.report_state),
            scanner: Arc::clone(&self.scanner),
            driver: driver(options),
            own_service: options.own_service.clone(),
            health_checker: health_checker(options),
            gate,
            checking: tokio::sync::Mutex::new(()),
            down_time_max: options.reboot_timeout,
            service_time_max: options.service_timeout,
            retry_after: options.retry_after,
            state: Arc::clone(&self.state),
            identity: self.identity.clone(),
            own_certificates: OwnCertificates::below(
                &options.root,
                security,
                &self.state,
                options.put_back_after,
            ),
            daemon_tasks,
            provisioner,
            tasks: tasks.clone(),
            stop: stop.clone(),
            prepared: Mutex::new(None),
            deciding: Mutex::default(),
        })
    }

    fn service(
        &self,
        options: &Options,
        security: &Security,
        updater: &Arc<Updater>,
        pause: Option<Pause>,
        tasks_not_run: Option<String>,
    ) -> Arc<Service> {
        let fetched_bytes = Arc::new(AtomicU64::new(0));
        let fetcher = Fetcher {
            security: security.clone(),
            cache: Arc::clone(&self.cache),
            report_state: Arc::clone(&self.report_state),
            root: Arc::clone(&self.root),
            network: Arc::new(Network::new(Arc::clone(&self.budgets))),
            budgets: Arc::clone(&self.budgets),
            stall_max: options.source_timeout,
            tasks: self.tasks.clone(),
            subd_stop: self.stop.clone(),
            stop: self.stop.clone(),
            prefetch_stop: Arc::default(),
            fetched_bytes: Arc::clone(&fetched_bytes),
        };
        Arc::new(Service {
            root: Arc::clone(&self.root),
            report_state: Arc::clone(&self.report_state),
            cache: Arc::clone(&self.cache),
            scanner: Arc::clone(&self.scanner),
            fetcher,
            updater: Arc::clone(updater),
            budgets: Arc::clone(&self.budgets),
            fetched_bytes,
            stop: self.stop.clone(),
            only_dominator: options.dominator.clone(),
            tasks_not_run,
            configuring: Mutex::new(pause),
            giving_files: Arc::new(tokio::sync::Semaphore::new(1)),
        })
    }
}

/// Opens the audit log, and records an update that was finished or undone. A root that cannot be
/// written has none; it is scanned all the same.
async fn open_audit(options: &Options, directory: &Path, resumed: &Resumed) -> AuditLog {
    let audit = AuditLog::open_or_retry(options.audit.settings(directory), "subd").await;
    if let Some(update_id) = resumed.update_id() {
        let (Ok(why) | Err(why)) = resumed.text();
        let why = escape_and_cut(&why, WHY_BYTES_MAX);
        let arguments = format!("update={update_id}");
        let decision = "resume-update".to_owned();
        // What cannot be recorded was logged.
        let _written = audit.record(AuditEvent::Decided { decision, arguments, why }).await;
    }
    audit
}

/// The budgets by the flags, and by the limits that a dominator set before the restart.
fn budgets(flags: &LimitArgs, persisted: &PersistedState) -> Budgets {
    let mut speeds = flags.speeds();
    let reported = || {
        throughput::network_speed()
            .and_then(|speed| Speed::of_network(speed, SpeedSource::Interface))
    };
    let measured = || {
        let speed = persisted.network_speed?;
        Speed::of_network(speed, SpeedSource::Measured)
    };
    speeds.network = speeds.network.or_else(reported).or_else(measured);
    Budgets::new(flags.ceilings(), persisted.configuration.limits, speeds)
}

/// Measures the device, unless it was measured before. Until the speed is known, a slow device is
/// assumed.
async fn measure(
    root: Arc<Root>,
    report_state: Arc<ReportState>,
    budgets: Arc<Budgets>,
    stop: CancellationToken,
) {
    let known = report_state.read(|state| state.persisted.device.clone());
    let known = known.filter(|known| Speed::of_device(known.bytes_per_second).is_some());
    let before = known.clone();
    let measuring =
        tokio::task::spawn_blocking(move || throughput::measure_device(&root, before.as_ref()));
    let measured = tokio::select! {
        measured = measuring => measured,
        () = stop.cancelled() => return,
    };
    let Ok(Some(device)) = measured else {
        tracing::info!("the speed of the root's device is not known: a slow one is assumed");
        return;
    };
    let speed = device.bytes_per_second;
    match Speed::of_device(speed) {
        Some(speed) => budgets.set_device_speed(speed),
        None => tracing::warn!(
            "the root was read at {speed} bytes per second, which is not plausible: a slow device \
             is assumed"
        ),
    }
    if known.as_ref() == Some(&device) {
        return;
    }
    tracing::info!(device = device.device, "the root can be read at {speed} bytes per second");
    // Write-behind: a speed that is lost in a crash is measured again.
    report_state.persist_behind(move |_, persisted| persisted.device = Some(device)).await;
}

/// Reports each new snapshot.
async fn report_snapshots(
    scanner: Arc<Scanner>,
    report_state: Arc<ReportState>,
    root: Arc<Root>,
    identity: IdentitySource,
    stop: CancellationToken,
) {
    let mut snapshots = scanner.subscribe();
    loop {
        let snapshot = Arc::clone(&snapshots.borrow_and_update());
        let is_complete = snapshot.report.is_some();
        let generation = report_state.take_snapshot(snapshot, identity.read(&root));
        if is_complete {
            verify_last_update(&report_state, generation).await;
        }
        tokio::select! {
            news = snapshots.changed() => if news.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

/// Notes that the paths that the last update changed were scanned in `generation`, unless that is
/// known: a subd that was killed after the update had ended has not noted it.
async fn verify_last_update(report_state: &Arc<ReportState>, generation: u64) {
    let is_unverified = |state: &State| {
        let last = state.persisted.last_update.as_ref();
        state.update == UpdatePhase::Idle
            && last.is_some_and(|last| {
                last.outcome == UpdateOutcome::Done && last.verified_generation.is_none()
            })
    };
    if report_state.read(is_unverified) {
        // Write-behind: the first scan after the next start verifies it again.
        let verify = move |state: &mut State, persisted: &mut PersistedState| {
            let last = persisted.last_update.as_mut().filter(|_| is_unverified(state));
            if let Some(last) = last {
                last.verified_generation = Some(generation);
            }
        };
        report_state.persist_behind(verify).await;
    }
}

/// The directories on the disk, besides the object cache.
struct OpenDirectories {
    root: Root,
    directories: Directories,
    state: StateDirectory,
    audit: PathBuf,
}

impl OpenDirectories {
    /// Opens the directories, and takes the lock that keeps every other subd out.
    fn open(path: &Path, state_path: Option<&Path>) -> Result<Self, StartError> {
        let no_root = |source| StartError::Root { path: path.to_owned(), source };
        let no_state = |source| StartError::State { path: path.to_owned(), source };
        if !nix::unistd::geteuid().is_root() {
            tracing::warn!("not running as root: most changes will be refused by the kernel");
        }
        let root = Root::open(path).map_err(no_root)?;
        if let Some(base) = state_path {
            fs_err::create_dir_all(base).map_err(|source| StartError::System {
                what: "make the directory for state",
                source,
            })?;
        }
        let base = state_path.map(Root::open_as_seen).transpose().map_err(no_root)?;
        // The lock of the root is always in `/.subd`, so that two with different states meet there.
        let directory = Directories::state(&root, None).map_err(no_root)?;
        let state = StateDirectory::lock(directory).map_err(no_state)?;
        let state = match &base {
            None => state,
            Some(base) => {
                let elsewhere = Directories::state(&root, Some(base)).map_err(no_root)?;
                state.with_state_in(elsewhere)
            }
        };
        let directories = Directories::open(&root).map_err(no_root)?;
        let state = state.with_reserve(&directories.reserve);
        if let Err(error) = Directories::audit(&root, base.as_ref()) {
            tracing::error!("the audit log has no directory: {}", error_chain(&error));
        }
        let audit = state_path.map_or_else(|| path.join(&SUBD_DIRECTORY[1..]), Path::to_owned);
        Ok(Self { root, directories, state, audit })
    }
}

/// Opens everything on the disk, finishes an interrupted update, and removes leftovers of others.
fn open(options: &Options, boot_id: &str) -> Result<Opened, StartError> {
    let path = &options.root;
    let OpenDirectories { root, directories, state, audit } =
        OpenDirectories::open(path, options.state.as_deref())?;
    let driver = driver(options);
    let time_max = options.service_timeout;
    let supervision = supervision(options, &audit, &state, boot_id)?;
    if let Err(why) = &supervision {
        tracing::info!("daemon tasks are not run: {why}");
    }
    let provisioning = provisioning_of(options, &audit, &state)?;
    let tasks = supervision.as_ref().ok().map(|one| TaskControl::AtStart(&one.supervisor));
    let services = TimedServices { driver: &driver, tasks, time_max };
    let executor =
        Executor { root: &root, directories: &directories, services: Some(&services), boot_id };
    let resumed = Resumed::at_start(&executor);
    if !matches!(resumed, Resumed::Lost(_)) {
        let count = remove_leftovers(&directories, resumed.update_id());
        if count > 0 {
            tracing::info!(count, "removed leftovers of former updates");
        }
    }
    former_files::finish(&root, &directories, &state);
    let saved = state.load();
    let saved = saved.map_err(|source| StartError::State { path: path.clone(), source })?;
    let (cache, opened) = Cache::open(Arc::clone(&directories.objects))
        .map_err(|source| StartError::Cache { source })?;
    let crate::cache::OpenReport { objects, removed } = opened;
    tracing::info!(objects, removed, root = %path.display(), "the object cache is checked");
    let (root, directories) = (Arc::new(root), Arc::new(directories));
    let (state, cache) = (Arc::new(state), Arc::new(cache));
    Ok(Opened { root, directories, state, saved, cache, resumed, supervision, provisioning, audit })
}

/// Opens what is recorded of resources; `None` if nothing is provisioned here. Copies of plugins
/// are in `plugins` below `base`.
fn provisioning_of(
    options: &Options,
    base: &Path,
    state: &StateDirectory,
) -> Result<Option<(provisioning::records::SavedRecords, Plugins)>, StartError> {
    if !manages_this_machine(options) && options.supervisor != SupervisorChoice::Direct {
        return Ok(None);
    }
    let absolute = |path: &Path| {
        let failed = |source| StartError::System { what: "find a directory", source };
        path.canonicalize().map_err(failed)
    };
    let program = std::env::current_exe()
        .map_err(|source| StartError::System { what: "find the program of subd", source })?;
    let plugins = Plugins {
        copies: absolute(base)?.join("plugins"),
        root: absolute(&options.root)?,
        program,
        uses_installed: options.trust.trusted_keys.is_none(),
    };
    let records = provisioning::records::load(state)
        .map_err(|source| StartError::State { path: options.root.clone(), source })?;
    Ok(Some((records, plugins)))
}

/// Opens what runs daemon tasks, in `tasks` below `base`. The inner error is why they are not run.
fn supervision(
    options: &Options,
    base: &Path,
    state: &StateDirectory,
    boot_id: &str,
) -> Result<Result<Supervision, String>, StartError> {
    let (is_own, systemd) = (manages_this_machine(options), has_systemd());
    let backend = match Backend::choose(options.supervisor, &options.root, is_own, systemd) {
        Ok(backend) => backend,
        Err(why) => return Ok(Err(why.to_owned())),
    };
    let program = std::env::current_exe()
        .map_err(|source| StartError::System { what: "find the program of subd", source })?;
    // Absolute, because a guard has another working directory.
    let directory = base.canonicalize().map(|base| base.join("tasks"));
    let opened = directory.and_then(|place| Supervisor::new(place, backend, boot_id, program));
    let supervisor = match opened {
        Ok(supervisor) => Arc::new(supervisor),
        // The machine is scanned all the same, as with a root that is read-only.
        Err(error) => return Ok(Err(format!("their directory cannot be used: {error}"))),
    };
    // Until it is known whether an update was interrupted.
    supervisor.pauses().all = true;
    let records = records::load(state)
        .map_err(|source| StartError::State { path: options.root.clone(), source })?;
    Ok(Ok(Supervision { supervisor, records }))
}

/// Starts to run the tasks `defined`; if an update was interrupted, only when it has ended. Returns
/// what runs them, or why they are not run.
fn start_tasks(
    options: &Options,
    supervision: Result<Supervision, String>,
    defined: &ImageTasks,
    resumed: &Resumed,
    report_state: &Arc<ReportState>,
) -> Result<(Option<Arc<Tasks>>, Option<String>), StartError> {
    let Supervision { supervisor, records } = match supervision {
        Ok(supervision) => supervision,
        Err(why) => return Ok((None, Some(why))),
    };
    let runner = command_runner(options);
    let report_state = Arc::clone(report_state);
    // Wakes polls.
    let tell = move || report_state.change(|_| ());
    let tasks = Tasks::start(supervisor, records, defined.clone(), runner, tell)
        .map_err(|source| StartError::System { what: "start to run tasks", source })?;
    if resumed.update_id().is_none() {
        tasks.release();
    }
    Ok((Some(Arc::new(tasks)), None))
}

/// Finishes or undoes an update that was interrupted, and starts nothing. Returns a text that says
/// what was done; the inner error is why the tree is mixed.
pub fn recover(options: &Options) -> Result<Result<String, String>, StartError> {
    // The state elsewhere is not needed, and may be on a file-system that is not mounted yet.
    settle(options, None)
}

/// As [`recover`], with the state: subd's own TLS files may be what was interrupted, and are needed
/// for the start.
pub fn mend_own_certificates(options: &Options) -> Result<Result<String, String>, StartError> {
    settle(options, options.state.as_deref())
}

fn settle(options: &Options, state: Option<&Path>) -> Result<Result<String, String>, StartError> {
    let OpenDirectories { root, directories, state, .. } =
        OpenDirectories::open(&options.root, state)?;
    let identity = IdentitySource::new(options.hostname.clone());
    let boot_id = identity.boot_id();
    let executor = Executor { root: &root, directories: &directories, services: None, boot_id };
    let text = Resumed::at_start(&executor).text();
    former_files::finish(&root, &directories, &state);
    Ok(text)
}

fn driver(options: &Options) -> ServiceDriver {
    let command = options.service_command.as_deref();
    ServiceDriver::choose(command, manages_this_machine(options), has_systemd())
}

fn health_checker(options: &Options) -> Option<HealthChecker> {
    let command = options.health_command.as_deref();
    HealthChecker::choose(command, manages_this_machine(options), command_runner(options))
}

fn command_runner(options: &Options) -> CommandRunner {
    CommandRunner::choose(manages_this_machine(options), has_systemd())
}

fn manages_this_machine(options: &Options) -> bool {
    options.root.canonicalize().is_ok_and(|root| root == Path::new("/"))
}

fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}
