//! The daemon: its flags, its start and its end.

pub mod budget_flags;
pub mod command;

use rpc::tls::Security;
use std::path::PathBuf;
use std::sync::Arc;

use crate::interface::api::ApiState;
use crate::interface::pages::Pages;
use clap::Parser;
use daemon::config::ConfigArgs;
use daemon::{
    DOMINATOR_PORT, IMAGESERVER_PORT, ListenError, LogArgs, MDBD_PORT, SUBD_PORT, SecurityArgs,
    SecurityError, listen_text,
};
use futures_util::FutureExt as _;
use rpc::audit_log::{AuditArgs, AuditError, AuditLog};
use rpc::client::{Client, Peer, PeerError};
use rpc::page_frame::PageArgs;
use rpc::server::{Router, serve};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::mdb_diff::EditLimits;
use crate::core::pauses::Pauses;
use crate::daemon::budget_flags::{BudgetArgs, sources};
use crate::interface::metrics::FleetCollector;
use crate::runtime::claim_service::ClaimService;
use crate::runtime::clock::Clock;
use crate::runtime::commit_gate::CommitGate;
use crate::runtime::counters::Counters;
use crate::runtime::driver::Shared;
use crate::runtime::fleet::{Fleet, SETTINGS};
use crate::runtime::history::History;
use crate::runtime::identities::Identities;
use crate::runtime::images::Images;
use crate::storage::{HistoryLimits, State, StateError};
use rpc::trees::Reader;

/// The name of the daemon.
pub const NAME: &str = "dominator";

/// Keeps every machine of a fleet equal to the image that the machine database names for it.
///
/// The dominator reads the machine database whenever it changes, gets images from an image
/// server, and tells the subd of each machine what to fetch and what to change. Nothing runs on
/// machines but subd; domtool talks to this daemon.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "dominator",
    version,
    after_help = "Example:\n  \
        dominator --imageserver images:6971 --mdb /etc/fleet.json\n\n\
        The machine database is a JSON array:\n  \
        [{\"Hostname\": \"web1\", \"RequiredImage\": \"web/1.0\", \"IpAddress\": \"10.0.0.7\"}]"
)]
pub struct Arguments {
    /// Address to listen on; `[::]` is all addresses, IPv4 too
    #[arg(long, value_name = "ADDR", default_value = "[::]:6970")]
    pub listen: String,

    /// Image server that images come from
    #[arg(
        long,
        value_name = "ADDR",
        env = "DOMINATOR_IMAGESERVER",
        default_value = "localhost:6971"
    )]
    pub imageserver: String,

    /// Object server that subs are told to fetch from, as they reach it; the image server if not
    /// given. May be given several times: the first is tried first. With a LOCATION it is for the
    /// machines there and below, and is tried before those of wider locations and those of all
    #[arg(long, value_name = "[LOCATION=]ADDR")]
    pub imageserver_for_subs: Vec<String>,

    /// Machine database
    #[arg(long, value_name = "FILE", default_value = "/var/lib/Dominator/mdb")]
    pub mdb: PathBuf,

    /// The mdbd to follow, instead of reading a file
    #[arg(long, value_name = "ADDR", conflicts_with = "mdb")]
    pub mdb_server: Option<String>,

    /// Hold a machine database that lacks more than PERCENT of the machines that are known, until
    /// an operator accepts it. It counts from ten machines on
    #[arg(long, value_name = "PERCENT", default_value_t = 50,
          value_parser = clap::value_parser!(u8).range(..=100))]
    pub mdb_drop_max: u8,

    /// Hold a machine database that has another image for more than PERCENT of the machines that
    /// are known, until an operator accepts it. It counts from ten machines on
    #[arg(long, value_name = "PERCENT",
          value_parser = clap::value_parser!(u8).range(..=100))]
    pub mdb_reimage_max: Option<u8>,

    /// Command that is called when alarms begin or end: the brake is pulled, a machine database
    /// is held, a scanner stalls, ... Words separated by spaces; it reads what is new as JSON
    #[arg(long, value_name = "COMMAND")]
    pub alarm_command: Option<String>,

    /// Directory for what must survive a restart
    #[arg(long, value_name = "DIR", default_value = "/var/lib/dominator")]
    pub state: PathBuf,

    /// How much of what happened is kept: the size of all records together, in MiB. The oldest go
    /// first; the file takes up to twice as much
    #[arg(long, value_name = "MIB", default_value_t = 512,
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub history_max_mib: u64,

    /// How many days changes of machines are kept, if there is room. Orders are kept longer
    #[arg(long, value_name = "DAYS", default_value_t = 365,
          value_parser = clap::value_parser!(u32).range(1..=36_500))]
    pub history_days: u32,

    /// Port of subs whose record in the machine database names none
    #[arg(long, value_name = "PORT", default_value_t = SUBD_PORT)]
    pub subd_port: u16,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub budgets: BudgetArgs,

    #[command(flatten)]
    pub log: LogArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub security: SecurityArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub audit: AuditArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub pages: PageArgs,

    #[command(flatten)]
    #[allow(missing_docs, reason = "a docstring here would become the help of the group")]
    pub config: ConfigArgs,
}

/// Why the daemon does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error(transparent)]
    Security(#[from] SecurityError),
    #[error("invalid {flag}")]
    Address {
        flag: &'static str,
        #[source]
        source: PeerError,
    },
    #[error("cannot use the state directory")]
    State {
        #[source]
        source: StateError,
    },
    #[error(transparent)]
    Audit(#[from] AuditError),
    #[error("cannot listen")]
    Listen {
        #[source]
        source: ListenError,
    },
}

impl Arguments {
    /// Returns how much a machine database may change at once.
    #[must_use]
    pub fn mdb_limits(&self) -> EditLimits {
        EditLimits { drop_percent: self.mdb_drop_max, reimage_percent: self.mdb_reimage_max }
    }

    /// Splits the alarm command into words. Returns no word if there is no command.
    #[must_use]
    pub fn alarm_program(&self) -> Vec<String> {
        self.alarm_command
            .iter()
            .flat_map(|line| line.split_whitespace())
            .map(str::to_owned)
            .collect()
    }

    /// Returns the flags that differ in `new` and take effect only at a start.
    #[must_use]
    pub fn fixed_that_differ(&self, new: &Self) -> Vec<&'static str> {
        // All are named, so that a new one is not forgotten: what is not compared here is taken in
        // `with_changeable`, and where the configuration is does not matter once it is read.
        let Self {
            listen,
            imageserver,
            imageserver_for_subs,
            mdb,
            mdb_server,
            mdb_drop_max: _,
            mdb_reimage_max: _,
            alarm_command: _,
            state,
            history_max_mib,
            history_days,
            subd_port,
            budgets: _,
            log: LogArgs { filter: _, format },
            security: SecurityArgs { insecure, tls },
            audit,
            pages: PageArgs { private_pages },
            config: ConfigArgs { config: _ },
        } = self;
        let differ = [
            ("listen", *listen != new.listen),
            ("imageserver", *imageserver != new.imageserver),
            ("imageserver-for-subs", *imageserver_for_subs != new.imageserver_for_subs),
            ("mdb", *mdb != new.mdb),
            ("mdb-server", *mdb_server != new.mdb_server),
            ("state", *state != new.state),
            ("history-max-mib", *history_max_mib != new.history_max_mib),
            ("history-days", *history_days != new.history_days),
            ("subd-port", *subd_port != new.subd_port),
            ("log-format", *format != new.log.format),
            ("insecure", *insecure != new.security.insecure),
            ("tls", *tls != new.security.tls),
            ("audit-log", audit.audit_log != new.audit.audit_log),
            ("audit-max-size", audit.audit_max_size != new.audit.audit_max_size),
            ("audit-keep", audit.audit_keep != new.audit.audit_keep),
            ("private-pages", *private_pages != new.pages.private_pages),
        ];
        differ.into_iter().filter_map(|(flag, differs)| differs.then_some(flag)).collect()
    }

    /// Returns `self` with those flags of `new` that can change while the daemon runs.
    #[must_use]
    pub fn with_changeable(self, new: Self) -> Self {
        Self {
            mdb_drop_max: new.mdb_drop_max,
            mdb_reimage_max: new.mdb_reimage_max,
            alarm_command: new.alarm_command,
            budgets: new.budgets,
            log: LogArgs { filter: new.log.filter, format: self.log.format },
            ..self
        }
    }
}

/// Runs the daemon until `stop` is cancelled. New arguments come through `changed`; those that can
/// change while the daemon runs are applied.
///
/// # Errors
///
/// [`StartError`] if it does not start.
pub async fn run(
    arguments: Arguments,
    changed: mpsc::Receiver<Arguments>,
    stop: CancellationToken,
) -> Result<(), StartError> {
    let security = arguments.security.of_daemon(NAME)?;
    let address = |flag| move |source| StartError::Address { flag, source };
    let imageserver =
        Peer::parse(&arguments.imageserver, IMAGESERVER_PORT).map_err(address("--imageserver"))?;
    let sources = sources(&arguments.imageserver_for_subs, &imageserver, IMAGESERVER_PORT)
        .map_err(address("--imageserver-for-subs"))?;
    let mdb_server = arguments.mdb_server.as_deref().map(|text| Peer::parse(text, MDBD_PORT));
    let mdb_server = mdb_server.transpose().map_err(address("--mdb-server"))?;
    let state = State::open(&arguments.state).map_err(|source| StartError::State { source })?;
    let brake = state.brake().map_err(|source| StartError::State { source })?;
    let pauses = state.pauses().map_err(|source| StartError::State { source })?;
    let default_image = state.default_image();
    let default_image = default_image.map_err(|source| StartError::State { source })?;
    let kept = state.machines().map_err(|source| StartError::State { source })?;
    let stopped = state.stopped_images().map_err(|source| StartError::State { source })?;
    let state = Arc::new(state);
    let identities =
        Identities::open(Arc::clone(&state)).map_err(|source| StartError::State { source })?;
    let identities = Arc::new(identities);
    let settings = state.get(SETTINGS).map_err(|source| StartError::State { source })?;
    let settings = settings.unwrap_or_default();
    if let Some(brake) = &brake {
        tracing::warn!(reason = %brake.reason, who = %brake.who, "updates are disabled");
    }
    let listener = listen_text(NAME, &security, &arguments.listen, DOMINATOR_PORT)
        .await
        .map_err(|source| StartError::Listen { source })?;

    let limits = HistoryLimits {
        bytes: arguments.history_max_mib << 20,
        seconds: i64::from(arguments.history_days) * 86_400,
    };
    let audit = AuditLog::open(arguments.audit.settings(&arguments.state), NAME).await?;
    let private_pages = arguments.pages.private_pages;
    let history = History::start(Arc::clone(&state), limits)
        .map_err(|source| StartError::State { source })?;
    let tracker = TaskTracker::new();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let reader = Arc::new(Reader::new(processors));
    let images = Images::new(
        Client::new(imageserver, &security),
        Arc::clone(&reader),
        tracker.clone(),
        stop.clone(),
    );
    tracker
        .spawn(stop.clone().run_until_cancelled_owned(Arc::clone(&images).hold(holder(&listener))));
    let clock = Clock::start();
    let claim_service = Arc::new(ClaimService::new(clock, arguments.budgets.settings(), stopped));
    tracker.spawn(Arc::clone(&claim_service).run(Arc::clone(&state), stop.clone()));
    let shared = Arc::new(Shared {
        security: security.clone(),
        clock,
        reader,
        images,
        gate: CommitGate::new(brake, Pauses::from_kept(pauses)),
        history,
        audit: audit.clone(),
        identities: Arc::clone(&identities),
        default_image: watch::Sender::new(default_image.map(Arc::new)),
        metrics: Counters::default(),
        claim_service,
        sources,
        subd_port: arguments.subd_port,
    });
    let ending = Arc::clone(&shared);
    let fleet = Arc::new(Fleet::new(
        shared,
        state,
        arguments.mdb_limits(),
        kept,
        settings,
        tracker.clone(),
        stop.clone(),
    ));
    tracker.spawn(identities.keep(stop.clone()));
    let watching = stop.clone();
    let intake = intake(arguments.mdb.clone(), mdb_server, Arc::clone(&fleet), security);
    tracker.spawn(async move {
        watching.run_until_cancelled(intake).await;
    });
    let (alarms, programs) = watch::channel(arguments.alarm_program());
    let telling = crate::runtime::alarm_program::tell(Arc::clone(&fleet), programs);
    let following = command::apply_changes(Arc::clone(&fleet), arguments, changed, alarms);
    let keeping = Arc::clone(&fleet).keep_mdb();
    for work in [telling.boxed(), following.boxed(), keeping.boxed()] {
        let stop = stop.clone();
        tracker.spawn(async move {
            stop.run_until_cancelled(work).await;
        });
    }
    let router = router(&fleet, &tracker).audit(&audit).private_pages(private_pages);
    serve(listener, router, stop).await;
    tracker.close();
    tracker.wait().await;
    // This fails only if the writer panicked, which has been logged.
    let _closed = tokio::task::spawn_blocking(move || ending.history.close()).await;
    audit.close().await;
    Ok(())
}

/// What the image server calls this dominator: the name of the machine, and the port.
fn holder(listener: &TcpListener) -> String {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let port = listener.local_addr().map_or(DOMINATOR_PORT, |address| address.port());
    format!("dominator {}:{port}", host.to_string_lossy())
}

/// Takes the machine database from the server, if there is one, or else from the file, for ever.
async fn intake(file: PathBuf, server: Option<Peer>, fleet: Arc<Fleet>, security: Security) {
    match server {
        Some(server) => {
            crate::inputs::mdb_server::follow(Client::new(server, &security), fleet).await;
        }
        None => crate::inputs::mdb_file::watch(file, fleet).await,
    }
}

/// All that the daemon answers to.
#[must_use]
pub fn router(fleet: &Arc<Fleet>, tracker: &TaskTracker) -> Router<Pages> {
    let collector = Arc::new(FleetCollector::default());
    collector.watch(fleet);
    let state = ApiState { fleet: Arc::clone(fleet), tracker: tracker.clone() };
    let router =
        Router::new(NAME, &fleet.shared().security).with_state(state).metrics(|registry| {
            fleet.shared().metrics.register(registry);
            registry.register_collector(Box::new(collector));
        });
    crate::interface::pages::pages(crate::interface::api::methods(router), fleet)
}
