//! subd as a whole: its flags, how it starts and how it stops.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use common::api::subd::Outcome;
use common::daemon::config::ConfigArgs;
use common::daemon::{ListenError, SUBD_PORT, SecurityArgs, listen_text};
use common::filter::{PatternError, Patterns};
use common::report::report;
use common::wire::server::{Router, serve};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::board::Board;
use crate::cache::{Cache, CacheError};
use crate::fetch::Fetcher;
use crate::home::Home;
use crate::identity::IdentitySource;
use crate::root::{Root, RootError};
use crate::saved::{Saved, SavedError, StateDirectory};
use crate::scan::{Pace, Scanner};
use crate::server::{Service, router};
use crate::service::{ServiceDriver, TIME_MAX};
use crate::update::Updater;

/// Keeps this machine equal to its image.
///
/// subd scans and checksums the root file-system all the time, and reports to a dominator, which
/// tells it which objects to fetch and what to change. It keeps its cache and its state in
/// `/.subd` below the root.
///
/// Examples:
///
///   subd --insecure
///
///   subd --insecure --listen 127.0.0.2:6969 --root /srv/test --service-command 'echo would run'
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
    /// the verb (stop, start, reload or reboot) as its last two arguments. Without it, systemctl
    /// is used where systemd runs and `service` elsewhere; and with another root than / no
    /// service is driven at all, because the services of this machine are not those of that root.
    #[arg(long, value_name = "CMD")]
    pub service_command: Option<String>,

    /// How long the service command may take, in seconds, before it is killed.
    #[arg(long, value_name = "SECONDS", default_value_t = TIME_MAX.as_secs())]
    pub service_timeout: u64,

    /// Keep what must outlast a restart in `state` below this directory instead of `/.subd` below
    /// the root. Objects and staged updates are always in `/.subd`.
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,

    /// The host name to report, instead of the system's.
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,

    /// What to log: error, warn, info, debug or trace, or directives such as info,subd=debug.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log: String,

    /// How connections are protected.
    #[command(flatten)]
    pub security: SecurityArgs,

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
        source: SavedError,
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
    scanner: Arc<Scanner>,
    board: Arc<Board>,
    updater: Arc<Updater>,
    tasks: TaskTracker,
    stop: CancellationToken,
    root: Arc<Root>,
    identity: IdentitySource,
}

/// What is opened before anything runs.
struct Opened {
    root: Arc<Root>,
    home: Arc<Home>,
    state: Arc<StateDirectory>,
    saved: Saved,
    cache: Arc<Cache>,
}

impl Daemon {
    /// Opens everything, starts to scan, and listens. Stops when `stop` is cancelled.
    ///
    /// # Errors
    ///
    /// [`StartError`] says what cannot be used.
    pub async fn start(options: Options, stop: CancellationToken) -> Result<Self, StartError> {
        let exclusions =
            Patterns::new(&options.exclude).map_err(|source| StartError::Exclude { source })?;
        let (root, state) = (options.root.clone(), options.state.clone());
        let opening = tokio::task::spawn_blocking(move || open(&root, state.as_deref()));
        let opened = opening.await.map_err(|error| StartError::System {
            what: "open the root",
            source: io::Error::other(error),
        })??;
        let Opened { root, home, state, saved, cache } = opened;
        let instance = random_number()
            .map_err(|source| StartError::System { what: "read random bytes", source })?;
        let identity = IdentitySource::new(options.hostname.clone());
        let settings = saved.configuration.scan.clone();
        let who = identity.read(&root);
        let board = Board::new(instance, who, exclusions.clone(), saved, cache.ids());
        let board = Arc::new(board);
        let scanner = Scanner::start(Arc::clone(&root), exclusions, settings, Pace::default())
            .map_err(|source| StartError::System { what: "start the scanner", source })?;
        let scanner = Arc::new(scanner);
        let (tasks, fetched_bytes) = (TaskTracker::new(), Arc::new(AtomicU64::new(0)));
        let updater = Arc::new(Updater {
            root: Arc::clone(&root),
            home,
            cache: Arc::clone(&cache),
            board: Arc::clone(&board),
            scanner: Arc::clone(&scanner),
            driver: driver(&options),
            service_time_max: Duration::from_secs(options.service_timeout),
            state: Arc::clone(&state),
            identity: identity.clone(),
            tasks: tasks.clone(),
            stop: stop.clone(),
            prepared: Mutex::new(None),
        });
        updater.resume();
        let fetcher = Fetcher {
            cache: Arc::clone(&cache),
            board: Arc::clone(&board),
            root: Arc::clone(&root),
            tasks: tasks.clone(),
            stop: stop.clone(),
            fetched_bytes: Arc::clone(&fetched_bytes),
        };
        let service = Arc::new(Service {
            root: Arc::clone(&root),
            board: Arc::clone(&board),
            cache,
            scanner: Arc::clone(&scanner),
            fetcher,
            updater: Arc::clone(&updater),
            state,
            fetched_bytes,
            stop: stop.clone(),
            index: Mutex::new(None),
            configuring: tokio::sync::Mutex::new(()),
        });
        let listener = listen_text("subd", &options.listen, SUBD_PORT)
            .await
            .map_err(|source| StartError::Listen { source })?;
        let router = router(&service);
        Ok(Self { listener, router, scanner, board, updater, tasks, stop, root, identity })
    }

    /// Where it listens.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn address(&self) -> io::Result<std::net::SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until it is stopped. An update that is under way is finished, one that is merely
    /// staged is given up.
    pub async fn run(self) {
        let Self { listener, router, scanner, board, updater, tasks, stop, root, identity } = self;
        let following = follow(Arc::clone(&scanner), board, root, identity, stop.clone());
        tasks.spawn(following);
        serve(listener, router, stop).await;
        tasks.close();
        tasks.wait().await;
        drop(updater);
        let stopping = tokio::task::spawn_blocking(move || scanner.stop());
        if let Err(error) = stopping.await {
            tracing::error!(%error, "the scanner did not stop");
        }
    }
}

/// Hands each new snapshot to the board.
async fn follow(
    scanner: Arc<Scanner>,
    board: Arc<Board>,
    root: Arc<Root>,
    identity: IdentitySource,
    stop: CancellationToken,
) {
    let mut snapshots = scanner.subscribe();
    loop {
        let snapshot = Arc::clone(&snapshots.borrow_and_update());
        board.take_snapshot(snapshot, identity.read(&root));
        tokio::select! {
            news = snapshots.changed() => if news.is_err() { return },
            () = stop.cancelled() => return,
        }
    }
}

/// Opens what is on the disk, and clears what a crash left.
fn open(path: &Path, state: Option<&Path>) -> Result<Opened, StartError> {
    let no_root = |source| StartError::Root { path: path.to_owned(), source };
    let no_state = |source| StartError::State { path: path.to_owned(), source };
    if !nix::unistd::geteuid().is_root() {
        tracing::warn!("not running as root: most changes will be refused by the kernel");
    }
    let root = Root::open(path).map_err(no_root)?;
    if let Some(base) = state {
        fs_err::create_dir_all(base).map_err(|source| StartError::System {
            what: "make the directory for state",
            source,
        })?;
    }
    let base = state.map(Root::open).transpose().map_err(no_root)?;
    // The lock of the root is always in `/.subd`, so that two with different states meet there.
    let directory = Home::state(&root, None).map_err(no_root)?;
    let state = StateDirectory::lock(directory).map_err(no_state)?;
    let state = match &base {
        None => state,
        Some(base) => {
            let elsewhere = Home::state(&root, Some(base)).map_err(no_root)?;
            state.with_state_in(elsewhere)
        }
    };
    let saved = state.load().map_err(no_state)?;
    let home = Home::open(&root).map_err(no_root)?;
    let stuck = saved.last_update.as_ref();
    let stuck = stuck.filter(|last| matches!(last.outcome, Outcome::Stuck(_)));
    let leftovers = home.clear(stuck.map(|last| last.update_id)).map_err(no_root)?;
    if leftovers.begun > 0 {
        let count = leftovers.begun;
        tracing::error!(count, "an update was cut short: the tree may be mixed until the next one");
    }
    if leftovers.staged > 0 {
        tracing::info!(count = leftovers.staged, "cleared staged updates of a former run");
    }
    let (cache, opened) =
        Cache::open(Arc::clone(&home.objects)).map_err(|source| StartError::Cache { source })?;
    let crate::cache::Opened { objects, removed } = opened;
    tracing::info!(objects, removed, root = %path.display(), "the object cache is checked");
    let (root, home) = (Arc::new(root), Arc::new(home));
    Ok(Opened { root, home, state: Arc::new(state), saved, cache: Arc::new(cache) })
}

fn driver(options: &Options) -> ServiceDriver {
    let is_slash = options.root.canonicalize().is_ok_and(|root| root == Path::new("/"));
    let has_systemd = Path::new("/run/systemd/system").is_dir();
    ServiceDriver::choose(options.service_command.as_deref(), is_slash, has_systemd)
}

/// A number that nobody can guess, and that no other start has.
fn random_number() -> io::Result<u64> {
    use std::io::Read;
    let mut bytes = [0; 8];
    fs_err::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Says what an operator can do about `error`.
#[must_use]
pub fn hints(error: &StartError) -> Vec<&'static str> {
    match error {
        StartError::State { source: SavedError::Locked, .. } => {
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
