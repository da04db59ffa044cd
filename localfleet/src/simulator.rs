//! Thousands of simulated subs in one process, with the real protocol over real sockets.
//!
//! One listener accepts the connections to all of 127.0.0.0/8; the destination address identifies
//! the sub. A sub ([`sub`]) is a tree in memory that starts as the tree of an image, which is read
//! from a real imageserver. The server, the methods and their encoding are those of the product.
//!
//! The benchmark controls the simulator at a separate port: see [`control`].

pub mod control;
pub mod machines;
pub mod patch;
pub mod sub;

use rpc::tls::Security;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::Done;
use clap::Parser;
use daemon::{
    EXIT_FAILED, EXIT_MISUSE, IMAGESERVER_PORT, LogArgs, SecurityArgs, exit, listen, start_logging,
    stop_on_signals,
};
use model::image::ImageName;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rpc::client::{Client, Peer};
use rpc::server::{Router, Server, serve};
use rpc::trees::TreeReader;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use control::{ClearFirstTimes, Disturb, Drift, GetFirstTimes, GetSimulatorStatus, SetTasks};
use machines::{Accepted, MachineOptions, Machines, WorkTimes, monotonic};
use sub::FirstTimes;

const NAME: &str = "fleet-simulator";

/// The number of open files that a process needs in addition to its connections.
const FILES_BESIDE: u64 = 512;

/// The number of connections that may wait to be accepted. The kernel may allow fewer.
const BACKLOG: u32 = 16_384;

/// The pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Simulate many subs, on addresses of 127.0.0.0/8 and one port.
///
/// Each has a tree in memory and answers a dominator as subd does. Nothing is written, and no
/// object is fetched.
#[derive(Clone, Debug, Parser)]
#[command(name = "fleet-simulator")]
pub struct Arguments {
    /// The number of subs.
    #[arg(long, default_value_t = 100)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub subs: u32,
    /// The address of the first sub; the others follow.
    #[arg(long, value_name = "ADDR", default_value = "127.64.0.1")]
    pub first: Ipv4Addr,
    /// The port of all subs; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    pub port: u16,
    /// The address for the benchmark's commands, which nobody else should reach.
    #[arg(long, value_name = "ADDR:PORT")]
    pub control: SocketAddr,
    /// The imageserver with the images.
    #[arg(long, value_name = "ADDR")]
    pub imageserver: String,
    /// An image whose tree subs start with; several images are given to the subs in turn.
    #[arg(long, value_name = "NAME", required = true)]
    pub image: Vec<ImageName>,
    /// An image that subs may be updated to; its tree is in memory once for all of them.
    #[arg(long, value_name = "NAME")]
    pub update: Vec<ImageName>,
    /// The percentage of subs that differ from their image at the start, in one file each.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u8).range(..=100))]
    pub drifted: u8,
    /// Answer as releases of subd did that knew no computed files.
    #[arg(long)]
    pub former_release: bool,
    /// The duration of a scan after a change, in milliseconds.
    #[arg(long, default_value_t = 50)]
    pub scan_ms: u64,
    /// The duration of a fetch, in milliseconds.
    #[arg(long, default_value_t = 100)]
    pub fetch_ms: u64,
    /// The duration of the staging of an update, in milliseconds.
    #[arg(long, default_value_t = 50)]
    pub prepare_ms: u64,
    /// The duration of an update, in milliseconds.
    #[arg(long, default_value_t = 50)]
    pub update_ms: u64,
    #[command(flatten)]
    pub log: LogArgs,
    /// All subs have the same certificate.
    #[command(flatten)]
    pub security: SecurityArgs,
}

/// Runs the simulator with the arguments of this process.
pub fn main() -> ExitCode {
    simulate(Arguments::parse())
}

/// Runs the simulator in this process.
pub fn simulate(arguments: Arguments) -> ExitCode {
    if let Err(error) = start_logging(&arguments.log) {
        return exit(EXIT_MISUSE, &error, &[]);
    }
    match start(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit(EXIT_FAILED, &format!("{error:#}"), &[]),
    }
}

fn start(arguments: Arguments) -> anyhow::Result<()> {
    allow_connections(arguments.subs.into())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let stop = stop_on_signals().context("cannot catch signals")?;
        run(arguments, stop).await
    })
}

/// Raises the limit of open files so that this process, and those it starts, may have `count`
/// connections.
///
/// # Errors
///
/// If the limit cannot be raised, with what to do.
pub fn allow_connections(count: u64) -> anyhow::Result<()> {
    let wanted = count + FILES_BESIDE;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("cannot read a limit")?;
    if soft >= wanted {
        return Ok(());
    }
    setrlimit(Resource::RLIMIT_NOFILE, hard.max(wanted), hard.max(wanted)).with_context(|| {
        format!(
            "{count} subs need {wanted} open files in one process, and at most {hard} are allowed \
             here: allow more (`ulimit -Hn {wanted}` as root, or LimitNOFILE={wanted} in a unit; \
             the kernel itself allows what /proc/sys/fs/nr_open says), or simulate fewer subs"
        )
    })
}

/// Simulates until `stop` is cancelled.
///
/// # Errors
///
/// If an image cannot be read, or there is no port.
pub async fn run(arguments: Arguments, stop: CancellationToken) -> anyhow::Result<()> {
    let count = usize::try_from(arguments.subs)?;
    ensure!(
        machines::address(arguments.first, count - 1).is_some(),
        "{count} addresses from {} on are not all in 127.0.0.0/8",
        arguments.first
    );
    let security = arguments.security.for_daemon(NAME)?;
    let peer = Peer::parse(&arguments.imageserver, IMAGESERVER_PORT)?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let (client, reader) = (Client::new(peer, &security), Arc::new(TreeReader::new(processors)));
    let (mut images, mut updates) = (Vec::new(), Vec::new());
    for name in &arguments.image {
        images.push(reader.image(&client, name, Duration::ZERO).await?);
    }
    for name in &arguments.update {
        updates.push(reader.image(&client, name, Duration::ZERO).await?);
    }
    let listener = listen_everywhere(arguments.port).context("cannot listen for the subs")?;
    let port = listener.local_addr().context("a listener has an address")?.port();
    let work_times = WorkTimes {
        scan: Duration::from_millis(arguments.scan_ms),
        fetch: Duration::from_millis(arguments.fetch_ms),
        prepare: Duration::from_millis(arguments.prepare_ms),
        update: Duration::from_millis(arguments.update_ms),
    };
    let tracker = TaskTracker::new();
    let options = MachineOptions {
        count,
        first: arguments.first,
        port,
        work_times,
        drifted_percent: arguments.drifted,
        images,
        updates,
        reader,
    };
    let machines = Machines::new(options, tracker.clone(), stop.clone());
    tracker.spawn(stop.clone().run_until_cancelled_owned(Arc::clone(&machines).flap()));
    let mut router = machines.router(&security);
    if !arguments.former_release {
        router = machines::with_added_objects(router);
    }
    let server = Server::new(router, stop.clone());
    let control = listen("fleet-simulator", &security, arguments.control).await?;
    tracing::info!("{machines:?}");
    let accepting = accept(&listener, &machines, &server);
    let serving = serve(control, control_router(&machines, &security), stop.clone());
    let (_, ()) = tokio::join!(stop.run_until_cancelled(accepting), serving);
    drop(listener);
    server.finish().await;
    tracker.close();
    tracker.wait().await;
    Ok(())
}

/// Listens on all addresses, with a backlog for thousands of connections.
fn listen_everywhere(port: u16) -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv4Addr::UNSPECIFIED, port).into())?;
    socket.listen(BACKLOG)
}

/// Accepts connections for ever.
async fn accept(listener: &TcpListener, machines: &Machines, server: &Server) {
    // A dominator has one connection to each sub, and for a moment one that has just been lost.
    let permits = Arc::new(Semaphore::new(2 * machines.count() + 16));
    loop {
        let permit =
            Arc::clone(&permits).acquire_owned().await.expect("the semaphore is never closed");
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(local) = stream.local_addr() else { continue };
        let Some(number) = machines.number_at(local.ip()) else { continue };
        let cut = server.cut();
        match machines.accept(number, stream, &cut) {
            Accepted::Served(stream) => server.answer(stream, address, permit, cut),
            Accepted::Refused(stream) => {
                // Dropping the stream resets it; without the option it closes it.
                let _closed = stream.set_zero_linger();
            }
            Accepted::Held => {}
        }
    }
}

fn control_router(machines: &Arc<Machines>, security: &Security) -> Router<Arc<Machines>> {
    Router::new(NAME, security)
        .with_state(Arc::clone(machines))
        .method::<GetSimulatorStatus, _>(async |machines, _, ()| Ok(machines.report()))
        .method::<ClearFirstTimes, _>(async |machines, _, ()| {
            machines.each(|sub| sub.first_times = FirstTimes::default());
            Ok(monotonic())
        })
        .method::<GetFirstTimes, _>(
            async |machines, _, ()| Ok(machines.each(|sub| sub.first_times)),
        )
        .method::<Drift, _>(async |machines, _, request| {
            let number = usize::try_from(request.sub).unwrap_or(usize::MAX);
            machines.drift(number, request.chance)
        })
        .method::<SetTasks, _>(async |machines, _, count| {
            machines.set_tasks(count);
            Ok(Done {})
        })
        .method::<Disturb, _>(async |machines, _, request| {
            machines.disturb(request);
            Ok(Done {})
        })
}
