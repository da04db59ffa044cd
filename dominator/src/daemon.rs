//! The daemon: its flags, how it starts and how it stops.

pub mod budget_flags;
pub mod command;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::subd::HoldMachineRequest;
use clap::Parser;
use daemon::config::ConfigArgs;
use daemon::{
    DOMINATOR_PORT, IMAGESERVER_PORT, ListenError, LogArgs, MDBD_PORT, SUBD_PORT, SecurityArgs,
    SecurityError, listen_text,
};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use model::display::error_chain;
use model::time_parse;
use rpc::audit_log::{AuditArgs, AuditError, AuditLog};
use rpc::client::{CallMemory, Client, Peer, PeerError};
use rpc::page_frame::PageArgs;
use rpc::server::{CallerArgs, Router, serve};
use rpc::tls::Security;
use rpc::trees::TreeReader;
use system::random::{random, random_bytes};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::mdb_diff::EditLimits;
use crate::core::sources::Sources;
use crate::core::vote_links::VoteLinks;
use crate::daemon::budget_flags::{BudgetArgs, sources};
use crate::interface::api::ApiState;
use crate::interface::metrics::FleetCollector;
use crate::interface::pages::Pages;
use crate::runtime::claim_service::ClaimService;
use crate::runtime::clock::Clock;
use crate::runtime::commit_gate::CommitGate;
use crate::runtime::computed::ComputedService;
use crate::runtime::dial_limiter::DialLimiter;
use crate::runtime::fleet::Fleet;
use crate::runtime::history::History;
use crate::runtime::identities::Identities;
use crate::runtime::images::Images;
use crate::runtime::interned::Interned;
use crate::runtime::operator_program;
use crate::runtime::permits::PermitService;
use crate::runtime::shared::{DriverCounters, Shared};
use crate::runtime::task_orders::TaskOrderService;
use crate::runtime::unused;
use crate::runtime::webhooks::{self, WebhookError, Webhooks};
use crate::storage::{HistoryLimits, Storage, StorageError};

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

    /// Refuse a machine database with keys that nothing reads, instead of a warning
    #[arg(long, conflicts_with = "mdb_server")]
    pub mdb_strict: bool,

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

    /// Command that is called when a rollout or one of its steps enters another state, such as one
    /// that waits for votes. Words separated by spaces; it reads what is new as JSON
    #[arg(long, value_name = "COMMAND")]
    pub rollout_command: Option<String>,

    /// Address at which voters reach the pages of this dominator, such as
    /// `https://dominator.example.com:6970`. With it the rollout command gets a link for each
    /// voter, with which that one votes once without a certificate
    #[arg(long, value_name = "URL", value_parser = pages_url)]
    pub pages_url: Option<String>,

    /// File with the webhooks of forges that are taken at `/webhook/NAME`: an open change is
    /// planned, and one that is merged becomes a rollout. See docs/ROLLOUTS.md
    #[arg(long, value_name = "FILE")]
    pub webhooks: Option<PathBuf>,

    /// Command that says whether a step of a rollout goes on, waits or is rolled back, for
    /// environments whose strategy has `analysis`. Words separated by spaces; it reads the
    /// question as JSON, and prints its answer as JSON
    #[arg(long, value_name = "COMMAND")]
    pub analysis_command: Option<String>,

    /// Directory for what must survive a restart
    #[arg(long, value_name = "DIR", default_value = "/var/lib/dominator")]
    pub state: PathBuf,

    /// How much of what happened is kept: the size of all records together, in MiB. The oldest go
    /// first; the file takes up to twice as much
    #[arg(long, value_name = "MIB", default_value_t = 512,
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub history_max_mib: u64,

    /// How long changes of machines are kept, if there is room; a plain number is days. Orders are
    /// kept longer
    #[arg(long, value_name = "DURATION", default_value = "365d", value_parser = history_time)]
    pub history_days: Duration,

    /// Port of subs whose record in the machine database names none
    #[arg(long, value_name = "PORT", default_value_t = SUBD_PORT)]
    pub subd_port: u16,

    /// Give machines that were off past the end of their certificate another one for the same key,
    /// if it ended at most DURATION ago, was not revoked, and is a computed file of their image; 0
    /// for none. A plain number is days
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = renewal_time)]
    pub renew_expired: Duration,

    /// How long the permit of an exclusive task lasts that is not prolonged
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = permit_time)]
    pub permit_time: Duration,

    /// How long after a machine has left the machine database its tasks are stopped. If more than
    /// three machines, and more than 1 % of all, have left at once, an operator decides
    #[arg(long, value_name = "DURATION", default_value = "15m",
          value_parser = time_parse::duration)]
    pub departing_after: Duration,

    #[command(flatten)]
    pub budgets: BudgetArgs,

    #[command(flatten)]
    pub log: LogArgs,

    #[command(flatten)]
    pub security: SecurityArgs,

    #[command(flatten)]
    pub audit: AuditArgs,

    #[command(flatten)]
    pub pages: PageArgs,

    #[command(flatten)]
    pub callers: CallerArgs,

    /// How many calls of one caller in a second may change something, with 20 times as many at
    /// once; 0: any number. Calls that only hold updates up are not counted
    #[arg(long, value_name = "N", default_value_t = 20, help_heading = "Security",
          value_parser = clap::value_parser!(u32).range(..=1 << 20))]
    pub changes_per_second: u32,

    /// Memory for the large messages of all machines together, in MiB: plans that are sent, and
    /// replies that are read. Machines wait in turn for it. One larger message at a time comes on
    /// top
    #[arg(long, value_name = "MIB", default_value_t = 128,
          value_parser = clap::value_parser!(u32).range(16..=1 << 20))]
    pub machine_memory: u32,

    #[command(flatten)]
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
    Storage {
        #[from]
        source: StorageError,
    },
    #[error(transparent)]
    Audit(#[from] AuditError),
    #[error(transparent)]
    Webhooks(#[from] WebhookError),
    #[error("cannot listen")]
    Listen {
        #[source]
        source: ListenError,
    },
}

impl Arguments {
    /// Returns how much a machine database may change at once.
    pub fn mdb_limits(&self) -> EditLimits {
        EditLimits { drop_percent: self.mdb_drop_max, reimage_percent: self.mdb_reimage_max }
    }

    /// Splits the alarm, the rollout and the analysis command into words. There is no word if there
    /// is no command.
    pub fn programs(&self) -> [Vec<String>; 3] {
        [&self.alarm_command, &self.rollout_command, &self.analysis_command].map(|command| {
            command.iter().flat_map(|line| line.split_whitespace()).map(str::to_owned).collect()
        })
    }

    /// Returns the flags that differ in `new` and take effect only at a start.
    pub fn fixed_that_differ(&self, new: &Self) -> Vec<&'static str> {
        // All fields are named, so that a new one is not forgotten: those that are ignored here are
        // taken over in `with_changeable`; `config` matters only while it is read.
        let Self {
            listen,
            imageserver,
            imageserver_for_subs,
            mdb,
            mdb_server,
            mdb_strict,
            mdb_drop_max: _,
            mdb_reimage_max: _,
            alarm_command: _,
            rollout_command: _,
            analysis_command: _,
            pages_url,
            webhooks,
            state,
            history_max_mib,
            history_days,
            subd_port,
            renew_expired,
            permit_time,
            departing_after,
            budgets: _,
            log: LogArgs { filter: _, format },
            security: SecurityArgs { insecure, tls },
            audit,
            pages: PageArgs { private_pages },
            callers: CallerArgs { caller_memory },
            changes_per_second,
            machine_memory,
            config: ConfigArgs { config: _ },
        } = self;
        let differ = [
            ("listen", *listen != new.listen),
            ("imageserver", *imageserver != new.imageserver),
            ("imageserver-for-subs", *imageserver_for_subs != new.imageserver_for_subs),
            ("mdb", *mdb != new.mdb),
            ("mdb-server", *mdb_server != new.mdb_server),
            ("mdb-strict", *mdb_strict != new.mdb_strict),
            ("pages-url", *pages_url != new.pages_url),
            ("webhooks", *webhooks != new.webhooks),
            ("state", *state != new.state),
            ("history-max-mib", *history_max_mib != new.history_max_mib),
            ("history-days", *history_days != new.history_days),
            ("subd-port", *subd_port != new.subd_port),
            ("renew-expired", *renew_expired != new.renew_expired),
            ("permit-time", *permit_time != new.permit_time),
            ("departing-after", *departing_after != new.departing_after),
            ("log-format", *format != new.log.format),
            ("insecure", *insecure != new.security.insecure),
            ("tls", *tls != new.security.tls),
            ("audit-log", audit.audit_log != new.audit.audit_log),
            ("audit-max-size", audit.audit_max_size != new.audit.audit_max_size),
            ("audit-keep", audit.audit_keep != new.audit.audit_keep),
            ("private-pages", *private_pages != new.pages.private_pages),
            ("caller-memory", *caller_memory != new.callers.caller_memory),
            ("changes-per-second", *changes_per_second != new.changes_per_second),
            ("machine-memory", *machine_memory != new.machine_memory),
        ];
        differ.into_iter().filter_map(|(flag, differs)| differs.then_some(flag)).collect()
    }

    /// Returns `self` with those flags of `new` that can change while the daemon runs.
    pub fn with_changeable(self, new: Self) -> Self {
        Self {
            mdb_drop_max: new.mdb_drop_max,
            mdb_reimage_max: new.mdb_reimage_max,
            alarm_command: new.alarm_command,
            rollout_command: new.rollout_command,
            analysis_command: new.analysis_command,
            budgets: new.budgets,
            log: LogArgs { filter: new.log.filter, format: self.log.format },
            ..self
        }
    }
}

/// The other daemons that the flags name.
struct ServerPeers {
    imageserver: Peer,
    sources: Sources,
    mdb_server: Option<Peer>,
}

impl ServerPeers {
    fn parse(arguments: &Arguments) -> Result<Self, StartError> {
        let address = |flag| move |source| StartError::Address { flag, source };
        let imageserver = Peer::parse(&arguments.imageserver, IMAGESERVER_PORT)
            .map_err(address("--imageserver"))?;
        let sources = sources(&arguments.imageserver_for_subs, &imageserver, IMAGESERVER_PORT)
            .map_err(address("--imageserver-for-subs"))?;
        let mdb_server = arguments.mdb_server.as_deref().map(|text| Peer::parse(text, MDBD_PORT));
        let mdb_server = mdb_server.transpose().map_err(address("--mdb-server"))?;
        Ok(Self { imageserver, sources, mdb_server })
    }
}

/// Checks the address of the pages.
fn pages_url(text: &str) -> Result<String, String> {
    let has_host = ["http://", "https://"].iter().any(|scheme| {
        text.strip_prefix(scheme).is_some_and(|host| !host.is_empty() && !host.contains(['?', '#']))
    });
    has_host.then(|| text.to_owned()).ok_or_else(|| "it is as https://HOST:PORT".to_owned())
}

/// Parses the time of a permit, in whole seconds.
fn permit_time(text: &str) -> Result<Duration, String> {
    let time = time_parse::duration(text)?;
    let (least, most) = (Duration::from_secs(15), Duration::from_secs(3_600));
    let is_fit = (least..=most).contains(&time);
    is_fit.then_some(time).ok_or_else(|| "it is from 15s to 1h".to_owned())
}

/// Parses how long changes of machines are kept.
fn history_time(text: &str) -> Result<Duration, String> {
    let time = time_parse::duration_or_days(text)?;
    let is_fit = (days(1)..=days(36_500)).contains(&time);
    is_fit.then_some(time).ok_or_else(|| "it is from 1d to 36500d".to_owned())
}

/// Parses how long ago a certificate may have ended that is renewed.
fn renewal_time(text: &str) -> Result<Duration, String> {
    let time = time_parse::duration_or_days(text)?;
    (time <= days(3_650)).then_some(time).ok_or_else(|| "it is at most 3650d".to_owned())
}

fn days(count: u64) -> Duration {
    Duration::from_secs(count * 86_400)
}

/// Runs the daemon until `stop` is cancelled. New arguments come through `changed`; those that can
/// change while the daemon runs are applied.
pub async fn run(
    arguments: Arguments,
    changed: mpsc::Receiver<Arguments>,
    stop: CancellationToken,
) -> Result<(), StartError> {
    let security = arguments.security.for_daemon(NAME)?;
    let servers = ServerPeers::parse(&arguments)?;
    let mdb_server = servers.mdb_server.clone();
    let state = Arc::new(Storage::open(&arguments.state)?);
    if let Some(brake) = &*state.brake.get() {
        tracing::warn!(reason = %brake.reason, who = %brake.who, "updates are disabled");
    }
    let listener = listen_text(NAME, &security, &arguments.listen, DOMINATOR_PORT)
        .await
        .map_err(|source| StartError::Listen { source })?;
    let audit = AuditLog::open(arguments.audit.settings(&arguments.state), NAME).await?;
    let tracker = TaskTracker::new();
    let shared = share(&arguments, &security, servers, state, audit.clone(), &tracker, &stop)?;
    let shared = Arc::new(shared);
    let fleet =
        Fleet::new(Arc::clone(&shared), arguments.mdb_limits(), tracker.clone(), stop.clone());
    let fleet = Arc::new(fleet);
    let until_stop = |work: BoxFuture<'static, ()>| {
        tracker.spawn(stop.clone().run_until_cancelled_owned(work));
    };
    until_stop(Arc::clone(&shared.images).hold(holder(&listener)).boxed());
    until_stop(unused::forget_regularly(Arc::clone(&shared)).boxed());
    tracker.spawn(Arc::clone(&shared.claim_service).run(stop.clone()));
    tracker.spawn(Arc::clone(&shared.task_orders).run(stop.clone()));
    until_stop(Arc::clone(&fleet).run_rollouts().boxed());
    until_stop(Arc::clone(&fleet).run_departing().boxed());
    until_stop(webhooks::run(Arc::clone(&fleet)).boxed());
    until_stop(Arc::clone(&shared.permits).save_time().boxed());
    until_stop(Arc::clone(&shared.computed).clean_regularly().boxed());
    until_stop(Arc::clone(&shared.computed).advance_regularly().boxed());
    tracker.spawn(Arc::clone(&shared.identities).save_behind(stop.clone()));
    tracker.spawn(Arc::clone(&shared.images).save_known(stop.clone()));
    tracker.spawn(Arc::clone(&fleet).save_mdb_again());
    let reading = read_mdb(
        arguments.mdb.clone(),
        arguments.mdb_strict,
        mdb_server,
        Arc::clone(&fleet),
        security,
    );
    until_stop(reading.boxed());
    let [alarm, rollout, analysis] = arguments.programs();
    let [(alarms, alarm_programs), (rollouts, rollout_programs)] =
        [alarm, rollout].map(watch::channel);
    fleet.set_analysis_command(analysis);
    until_stop(operator_program::tell_of_alarms(Arc::clone(&fleet), alarm_programs).boxed());
    until_stop(operator_program::tell_of_rollouts(Arc::clone(&fleet), rollout_programs).boxed());
    let private_pages = arguments.pages.private_pages;
    let limits = arguments.callers.limits().with_changes(arguments.changes_per_second);
    let programs = [alarms, rollouts];
    let changes = command::apply_changes(Arc::clone(&fleet), arguments, changed, programs);
    until_stop(changes.boxed());
    let router = router(&fleet, &tracker).audit(&audit).private_pages(private_pages);
    let router = router.limits(limits);
    serve(listener, router, stop.clone()).await;
    tracker.close();
    tracker.wait().await;
    // This fails only if the writer panicked, which has been logged.
    let _closed = tokio::task::spawn_blocking(move || shared.history.close()).await;
    audit.close().await;
    Ok(())
}

/// Makes what drivers share.
fn share(
    arguments: &Arguments,
    security: &Security,
    servers: ServerPeers,
    state: Arc<Storage>,
    audit: AuditLog,
    tracker: &TaskTracker,
    stop: &CancellationToken,
) -> Result<Shared, StartError> {
    let clock = Clock::start();
    let limits = HistoryLimits {
        bytes: arguments.history_max_mib << 20,
        seconds: i64::try_from(arguments.history_days.as_secs()).unwrap_or(i64::MAX),
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let reader = Arc::new(TreeReader::new(processors));
    let imageserver = Client::new(servers.imageserver, security);
    let claims = arguments.budgets.settings();
    let (known, tasks) = (Arc::clone(&state), tracker.clone());
    let store = state.open_computed()?;
    let (secured, asking) = (security.clone(), tracker.clone());
    let computed = ComputedService::new(store, clock, secured, asking, stop.clone())?;
    computed.set_limits(claims.failures);
    let holder = HoldMachineRequest { dominator: name(&state), start: random() };
    let vote_links = VoteLinks::new(arguments.pages_url.as_deref(), link_key(&state)?);
    Ok(Shared {
        vote_links,
        webhooks: Webhooks::read(arguments.webhooks.as_deref())?,
        security: security.clone(),
        clock,
        images: Images::new(imageserver, clock, Arc::clone(&reader), known, tasks, stop.clone()),
        reader,
        gate: CommitGate::new(Arc::clone(&state)),
        history: History::start(Arc::clone(&state), limits, clock)?,
        audit,
        identities: Arc::new(Identities::open(Arc::clone(&state), clock)?),
        claim_service: Arc::new(ClaimService::new(clock, claims, Arc::clone(&state))),
        computed: Arc::new(computed),
        task_orders: Arc::new(TaskOrderService::new(Arc::clone(&state))),
        permits: Arc::new(PermitService::open(arguments.permit_time, Arc::clone(&state), clock)),
        state,
        default_image_changed: watch::Sender::default(),
        metrics: DriverCounters::default(),
        sources: servers.sources,
        holder,
        dial_limiter: DialLimiter::default(),
        caches: Interned::default(),
        machine_memory: CallMemory::new((arguments.machine_memory as usize) << 20),
        subd_port: arguments.subd_port,
        departing_after: arguments.departing_after,
        renew_expired: arguments.renew_expired,
    })
}

/// Returns the name by which subs know this dominator. It is made at the first start.
fn name(state: &Storage) -> String {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let saved = state.name.modify(|name| {
        let new = || format!("{}-{:08x}", host.to_string_lossy(), random() >> 32);
        name.get_or_insert_with(new).clone()
    });
    let name = saved.unwrap_or_else(|error| {
        tracing::error!("the name of the dominator cannot be saved: {}", error_chain(&error));
        host.to_string_lossy().into_owned()
    });
    tracing::info!(name, "subs know this dominator by its name");
    name
}

/// Returns the key of links to vote. It is made at the first start.
fn link_key(state: &Storage) -> Result<[u8; 32], StorageError> {
    let key = state.link_key.modify(|key| {
        let new = || blake3::Hash::from_bytes(random_bytes()).to_string();
        key.get_or_insert_with(new).clone()
    })?;
    // A key that somebody has damaged makes no links.
    let key = blake3::Hash::from_hex(key).map_or_else(|_| random_bytes(), Into::into);
    Ok(key)
}

/// Returns the name under which this dominator holds images: that of the machine, and the port.
fn holder(listener: &TcpListener) -> String {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let port = listener.local_addr().map_or(DOMINATOR_PORT, |address| address.port());
    format!("dominator {}:{port}", host.to_string_lossy())
}

/// Reads the machine database from the server, if there is one, or else from the file, for ever.
async fn read_mdb(
    file: PathBuf,
    is_strict: bool,
    server: Option<Peer>,
    fleet: Arc<Fleet>,
    security: Security,
) {
    match server {
        Some(server) => {
            crate::inputs::follow_mdb_server(Client::new(server, &security), fleet).await;
        }
        None => crate::inputs::watch_mdb_file(file, is_strict, fleet).await,
    }
}

/// Returns the methods, pages and metrics of the daemon.
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
