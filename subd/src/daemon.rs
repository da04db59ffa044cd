//! subd as a whole: its flags, how it starts and how it stops.

pub mod command_line;

use rpc::tls::Security;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use api::audit::brief::{WHY_BYTES_MAX, short};
use api::audit::record::Event;
use daemon::config::ConfigArgs;
use daemon::{ListenError, LogArgs, SUBD_PORT, SecurityArgs, listen_text};
use model::filter::{PatternError, Patterns};
use model::report::report;
use model::scope::SUBD_DIRECTORY;
use model::trigger::services::OWN_SERVICE;
use rpc::audit_log::{AuditArgs, AuditLog};
use rpc::page_frame::PageArgs;
use rpc::server::{Router, serve};
use system::random::random;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cache::{Cache, CacheError};
use crate::fetch::network::Network;
use crate::fetch::{Fetcher, STALL_MAX};
use crate::interface::operator::end_pauses;
use crate::interface::server::{Service, router};
use crate::limits::throughput;
use crate::limits::{Budgets, LimitArgs};
use crate::machine::command_runner::CommandRunner;
use crate::machine::disruption::DisruptionGate;
use crate::machine::identity::IdentitySource;
use crate::machine::notify;
use crate::machine::probe::Probe;
use crate::machine::services::{ServiceDriver, TIME_MAX};
use crate::root::{Root, RootError};
use crate::scan::watchdog;
use crate::scan::{Pace, Scanner};
use crate::state::directories::Directories;
use crate::state::persisted_state::{PersistError, PersistedState, StateDirectory};
use crate::state::report_state::ReportState;
use crate::trust::{Trust, TrustArgs};
use crate::update::Updater;
use crate::update::executor::Executor;
use crate::update::recovery::{Resumed, remove_leftovers};
use crate::update::update_task::TimedServices;

/// Keeps this machine equal to its image.
///
/// subd scans and checksums the root file-system all the time, and reports to a dominator, which
/// tells it which objects to fetch and what to change. It keeps its cache and its state in
/// `/.subd` below the root.
///
/// Examples:
///
///   subd
///
///   subd --listen 127.0.0.2:6969 --root /srv/test --service-command 'echo would run'
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "subd", version, verbatim_doc_comment)]
pub struct Options {
    /// Where to listen: ADDRESS:PORT, or :PORT for all addresses.
    #[arg(long, value_name = "ADDR", default_value = ":6969")]
    pub listen: String,

    /// The directory to manage.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,

    /// Never scan or change paths that match this regular expression, which is anchored at the
    /// start of the path, nor what lies below them. May be repeated.
    #[arg(long, value_name = "REGEX")]
    pub exclude: Vec<String>,

    /// The command that drives services: it is split at white space, and run with the service and
    /// the verb as its last two arguments: stop, start or reload; restart for subd's own service,
    /// for whose end it should not wait; or reboot for the service `reboot`. Without it, systemctl
    /// is used where systemd runs and `service` elsewhere; and with another root than / no
    /// service is driven at all, because the services of this machine are not those of that root.
    #[arg(long, value_name = "CMD")]
    pub service_command: Option<String>,

    /// How long the service command may take, in seconds, before it is killed.
    #[arg(long, value_name = "SECONDS", default_value_t = TIME_MAX.as_secs())]
    pub service_timeout: u64,

    /// How long the machine may take to go down when it is to be rebooted, in seconds; after that
    /// it is reported and told again.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub reboot_timeout: u64,

    /// The name of subd's own service: it is never stopped for an update, and restarted last.
    #[arg(long, value_name = "NAME", default_value = OWN_SERVICE)]
    pub own_service: String,

    /// The command that says whether the machine may be disturbed now. It is split at white space,
    /// and run with check, request or cancel as its last argument, before an update that reboots or
    /// fires a trigger with HighImpact, and from time to time. Exit code 0 means permitted, 1 that
    /// permission is requested, 2 that it is denied. Without it the machine may always be
    /// disturbed.
    #[arg(long, value_name = "CMD")]
    pub disruption_command: Option<String>,

    /// Finish or undo an update that was interrupted, and end: for early boot, before any other
    /// service starts. Needs no network, and starts no service itself.
    #[arg(long)]
    pub recover: bool,

    /// How long to wait before an update is tried again that could be neither finished nor undone,
    /// in seconds; longer each time, at most twenty times as long.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub retry_after: u64,

    /// How long a source of objects may send nothing, in seconds, before it counts as lost.
    #[arg(long, value_name = "SECONDS", default_value_t = STALL_MAX.as_secs())]
    pub source_timeout: u64,

    /// Keep what must outlast a restart in `state` below this directory instead of `/.subd` below
    /// the root. Objects and staged updates are always in `/.subd`.
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,

    /// The host name to report, instead of the system's.
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,

    /// What subd may take of the machine.
    #[command(flatten)]
    pub limits: LimitArgs,

    /// Whose images are taken.
    #[command(flatten)]
    pub trust: TrustArgs,

    /// What is logged, and how.
    #[command(flatten)]
    pub log: LogArgs,

    /// How connections are protected.
    #[command(flatten)]
    pub security: SecurityArgs,

    /// The audit log.
    #[command(flatten)]
    pub audit: AuditArgs,

    /// Who may see pages.
    #[command(flatten)]
    pub pages: PageArgs,

    /// The configuration file.
    #[command(flatten)]
    pub config: ConfigArgs,
}

/// Why subd does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The root or `/.subd` cannot be used.
    #[error("cannot manage `{}`", path.display())]
    Root {
        /// The root.
        path: PathBuf,
        /// What and why.
        source: RootError,
    },
    /// The object cache cannot be opened.
    #[error("cannot open the object cache")]
    Cache {
        /// What and why.
        source: CacheError,
    },
    /// The state cannot be read, or another subd has it.
    #[error("cannot manage `{}`", path.display())]
    State {
        /// The root.
        path: PathBuf,
        /// What and why.
        source: PersistError,
    },
    /// An exclusion is bad.
    #[error("bad --exclude")]
    Exclude {
        /// What is wrong.
        source: PatternError,
    },
    /// The system refused something.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The address cannot be listened on.
    #[error("cannot start")]
    Listen {
        /// What and why.
        source: ListenError,
    },
}

/// A subd that is ready to serve.
pub struct Daemon {
    listener: TcpListener,
    router: Router,
    audit: AuditLog,
    scanner: Arc<Scanner>,
    report_state: Arc<ReportState>,
    updater: Arc<Updater>,
    tasks: TaskTracker,
    /// Cancelled by others, when subd is to end.
    asked: CancellationToken,
    /// Cancelled with that, and to start over.
    stop: CancellationToken,
    root: Arc<Root>,
    identity: IdentitySource,
}

/// What is opened before anything runs.
struct Opened {
    root: Arc<Root>,
    directories: Arc<Directories>,
    state: Arc<StateDirectory>,
    persisted: PersistedState,
    cache: Arc<Cache>,
    resumed: Resumed,
    /// Where the audit log has its directory, unless that is said elsewhere.
    audit: PathBuf,
}

impl Daemon {
    /// Opens everything, starts to scan, and listens. Stops when `stop` is cancelled.
    ///
    /// # Errors
    ///
    /// [`StartError`] says what cannot be used.
    pub async fn start(
        options: Options,
        security: &Security,
        stop: CancellationToken,
    ) -> Result<Self, StartError> {
        let (asked, stop) = (stop.clone(), stop.child_token());
        let exclusions =
            Patterns::new(&options.exclude).map_err(|source| StartError::Exclude { source })?;
        let identity = IdentitySource::new(options.hostname.clone());
        let (opened_by, boot_id) = (options.clone(), identity.boot_id().to_owned());
        let opening = tokio::task::spawn_blocking(move || open(&opened_by, &boot_id));
        let opened = opening.await.map_err(|error| StartError::System {
            what: "open the root",
            source: io::Error::other(error),
        })??;
        let Opened { root, directories, state, persisted, cache, resumed, audit } = opened;
        let audit = open_audit(&options, &audit, &resumed).await;
        let instance = random();
        let settings = persisted.configuration.scan.clone();
        let budgets = Arc::new(budgets(&options.limits, &persisted));
        let who = identity.read(&root);
        let report_state =
            ReportState::new(instance, who, exclusions.clone(), persisted, cache.ids());
        let report_state = Arc::new(report_state);
        let pace = Pace::default();
        let scanner =
            Scanner::start(Arc::clone(&root), exclusions, settings, pace, Arc::clone(&budgets))
                .map_err(|source| StartError::System { what: "start the scanner", source })?;
        let scanner = Arc::new(scanner);
        let (tasks, fetched_bytes) = (TaskTracker::new(), Arc::new(AtomicU64::new(0)));
        let command = options.disruption_command.as_deref();
        let gate = DisruptionGate::new(command.unwrap_or_default(), command_runner(&options));
        if let Some(gate) = &gate {
            tasks.spawn(Arc::clone(gate).run(Arc::clone(&report_state), stop.clone()));
        }
        let trust = Trust::of(
            &options.trust,
            Arc::clone(&state),
            security.clone(),
            tasks.clone(),
            stop.clone(),
        );
        let updater = Arc::new(Updater {
            trust,
            root: Arc::clone(&root),
            directories,
            cache: Arc::clone(&cache),
            report_state: Arc::clone(&report_state),
            scanner: Arc::clone(&scanner),
            driver: driver(&options),
            own_service: options.own_service.clone(),
            command_runner: command_runner(&options),
            gate,
            checking: tokio::sync::Mutex::new(()),
            down_time_max: Duration::from_secs(options.reboot_timeout.max(1)),
            service_time_max: Duration::from_secs(options.service_timeout),
            retry_after: Duration::from_secs(options.retry_after.max(1)),
            state: Arc::clone(&state),
            identity: identity.clone(),
            tasks: tasks.clone(),
            stop: stop.clone(),
            prepared: Mutex::new(None),
        });
        updater.note_boot().await;
        updater.resume(resumed);
        tasks.spawn(Arc::clone(&updater).watch_reboots());
        let fetcher = Fetcher {
            security: security.clone(),
            cache: Arc::clone(&cache),
            report_state: Arc::clone(&report_state),
            root: Arc::clone(&root),
            network: Arc::new(Network::new(Arc::clone(&budgets))),
            state: Arc::clone(&state),
            budgets: Arc::clone(&budgets),
            stall_max: Duration::from_secs(options.source_timeout.max(1)),
            tasks: tasks.clone(),
            leave: stop.clone(),
            stop: stop.clone(),
            way: Arc::default(),
            fetched_bytes: Arc::clone(&fetched_bytes),
        };
        let service = Arc::new(Service {
            root: Arc::clone(&root),
            report_state: Arc::clone(&report_state),
            cache,
            scanner: Arc::clone(&scanner),
            fetcher,
            updater: Arc::clone(&updater),
            budgets: Arc::clone(&budgets),
            state: Arc::clone(&state),
            fetched_bytes,
            stop: stop.clone(),
            index: Mutex::new(None),
            configuring: Mutex::new(()),
            giving_files: Arc::new(tokio::sync::Semaphore::new(1)),
        });
        tasks.spawn(end_pauses(Arc::clone(&report_state), Arc::clone(&state), stop.clone()));
        if options.limits.device_speed.is_none() {
            let (root, report_state) = (Arc::clone(&root), Arc::clone(&report_state));
            tasks.spawn(measure(root, report_state, state, budgets, stop.clone()));
        }
        let listener = listen_text("subd", security, &options.listen, SUBD_PORT)
            .await
            .map_err(|source| StartError::Listen { source })?;
        let router =
            router(&service, security).audit(&audit).private_pages(options.pages.private_pages);
        Ok(Self {
            listener,
            router,
            audit,
            scanner,
            report_state,
            updater,
            tasks,
            asked,
            stop,
            root,
            identity,
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn address(&self) -> io::Result<std::net::SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until it is stopped, or has to be started again because the root could not be
    /// written before and can be now. An update that is under way is finished, one that is merely
    /// staged is given up.
    pub async fn run(self) {
        let Self { listener, router, audit, scanner, report_state, updater, tasks, .. } = self;
        let Self { asked, stop, root, identity, .. } = self;
        let probe = Probe { root: Arc::clone(&root), report_state: Arc::clone(&report_state) };
        tasks.spawn(watchdog::watch(Arc::clone(&scanner), Arc::clone(&report_state), stop.clone()));
        let following = follow(Arc::clone(&scanner), report_state, root, identity, stop.clone());
        tasks.spawn(following);
        tasks.spawn(probe.watch(stop.clone()));
        tasks.spawn(notify::stay_alive(stop.clone()));
        notify::ready();
        serve(listener, router, stop).await;
        if asked.is_cancelled() {
            notify::stopping();
        }
        tasks.close();
        tasks.wait().await;
        drop(updater);
        let stopping = tokio::task::spawn_blocking(move || scanner.stop());
        if let Err(error) = stopping.await {
            tracing::error!(%error, "the scanner did not stop");
        }
        audit.close().await;
    }
}

/// Opens the audit log, and records an update that was finished or undone. A root that cannot be
/// written has none; it is scanned all the same.
async fn open_audit(options: &Options, directory: &Path, resumed: &Resumed) -> AuditLog {
    let audit = AuditLog::open_some_time(options.audit.settings(directory), "subd").await;
    if let Some(update_id) = resumed.update_id() {
        let (Ok(why) | Err(why)) = resumed.text();
        let why = short(&why, WHY_BYTES_MAX);
        let arguments = format!("update={update_id}");
        let decision = "resume-update".to_owned();
        // What cannot be recorded was logged.
        let _written = audit.record(Event::Decided { decision, arguments, why }).await;
    }
    audit
}

/// What subd may take by the flags, and by what a dominator asked for before the restart.
fn budgets(flags: &LimitArgs, persisted: &PersistedState) -> Budgets {
    let mut speeds = flags.speeds();
    speeds.network = speeds.network.or_else(throughput::network_speed).or(persisted.network_speed);
    Budgets::new(flags.ceilings(), persisted.configuration.limits, speeds)
}

/// Measures the device, unless it was measured before. Nobody waits for that: until it is known, a
/// slow one is assumed.
async fn measure(
    root: Arc<Root>,
    report_state: Arc<ReportState>,
    state: Arc<StateDirectory>,
    budgets: Arc<Budgets>,
    stop: CancellationToken,
) {
    let known = report_state.read(|state| state.persisted.device.clone());
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
    budgets.set_device_speed(device.bytes_per_second);
    if known.as_ref() == Some(&device) {
        return;
    }
    let speed = device.bytes_per_second;
    tracing::info!(device = device.device, "the root can be read at {speed} bytes per second");
    report_state.change(|state| state.persisted.device = Some(device));
    if let Err(error) = report_state.save(&state).await {
        tracing::warn!("{}", report(&error));
    }
}

/// Hands each new snapshot to the board.
async fn follow(
    scanner: Arc<Scanner>,
    report_state: Arc<ReportState>,
    root: Arc<Root>,
    identity: IdentitySource,
    stop: CancellationToken,
) {
    let mut snapshots = scanner.subscribe();
    loop {
        let snapshot = Arc::clone(&snapshots.borrow_and_update());
        report_state.take_snapshot(snapshot, identity.read(&root));
        tokio::select! {
            news = snapshots.changed() => if news.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

/// What is on the disk, besides objects.
struct Places {
    root: Root,
    directories: Directories,
    state: StateDirectory,
    audit: PathBuf,
}

impl Places {
    /// Opens them, and keeps every other subd out.
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
        if let Err(error) = Directories::audit(&root, base.as_ref()) {
            tracing::error!("the audit log has no directory: {}", report(&error));
        }
        let audit = state_path.map_or_else(|| path.join(&SUBD_DIRECTORY[1..]), Path::to_owned);
        Ok(Self { root, directories, state, audit })
    }
}

/// Opens what is on the disk, finishes an update that was interrupted, and clears what is left of
/// others.
fn open(options: &Options, boot_id: &str) -> Result<Opened, StartError> {
    let path = &options.root;
    let no_root = |source| StartError::Root { path: path.clone(), source };
    let Places { root, directories, state, audit } = Places::open(path, options.state.as_deref())?;
    let driver = driver(options);
    let time_max = Duration::from_secs(options.service_timeout);
    let services = TimedServices { driver: &driver, time_max };
    let executor =
        Executor { root: &root, directories: &directories, services: Some(&services), boot_id };
    let resumed = Resumed::at_start(&executor);
    if !matches!(resumed, Resumed::Lost(_)) {
        let count = remove_leftovers(&directories, resumed.update_id()).map_err(no_root)?;
        if count > 0 {
            tracing::info!(count, "cleared what updates of a former run had left");
        }
    }
    let persisted = state.load();
    let persisted = persisted.map_err(|source| StartError::State { path: path.clone(), source })?;
    let (cache, opened) = Cache::open(Arc::clone(&directories.objects))
        .map_err(|source| StartError::Cache { source })?;
    let crate::cache::Opened { objects, removed } = opened;
    tracing::info!(objects, removed, root = %path.display(), "the object cache is checked");
    let (root, directories) = (Arc::new(root), Arc::new(directories));
    let (state, cache) = (Arc::new(state), Arc::new(cache));
    Ok(Opened { root, directories, state, persisted, cache, resumed, audit })
}

/// Finishes or undoes an update that was interrupted, and starts nothing. Says what was done; the
/// error is why the tree is mixed.
///
/// # Errors
///
/// [`StartError`] if the root cannot be used.
pub fn recover(options: &Options) -> Result<Result<String, String>, StartError> {
    // The state is not needed, and may be on a file-system that is not mounted yet.
    let Places { root, directories, state: _lock, .. } = Places::open(&options.root, None)?;
    let identity = IdentitySource::new(options.hostname.clone());
    let boot_id = identity.boot_id();
    let executor = Executor { root: &root, directories: &directories, services: None, boot_id };
    Ok(Resumed::at_start(&executor).text())
}

fn driver(options: &Options) -> ServiceDriver {
    let command = options.service_command.as_deref();
    ServiceDriver::choose(command, manages_this_machine(options), has_systemd())
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

/// Says what an operator can do about `error`.
#[must_use]
pub fn hints(error: &StartError) -> Vec<&'static str> {
    match error {
        StartError::State { source: PersistError::Locked, .. } => {
            vec!["stop the other subd first, or give this one another --root"]
        }
        StartError::Root { .. } => vec!["--root must be a directory that root may write to"],
        StartError::Listen { .. } => vec!["choose another address with --listen"],
        _ => Vec::new(),
    }
}

/// The error with all that caused it, for people.
#[must_use]
pub fn describe(error: &StartError) -> String {
    report(error)
}
