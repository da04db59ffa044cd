//! Thousands of subs in one process, that speak the real wire over real sockets.
//!
//! One listener takes the connections to all of 127.0.0.0/8; the address that was dialled says
//! which sub is meant. What a sub is made of is in [`sub`]: a tree in memory that starts as that of
//! an image, which is read from a real imageserver. The server, the methods and their encoding are
//! those of the product; nothing of the wire is imitated.
//!
//! The benchmark asks the simulator at a port of its own: see [`control`].

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
use rpc::trees::Reader;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use control::{ClearMarks, Disturb, Drift, GetMarks, Report};
use machines::{Machines, Pace, Plenty, Taken, monotonic};
use sub::Marks;

/// What it is called.
const NAME: &str = "fleet-simulator";

/// Open files that a process needs beside its connections.
const FILES_BESIDE: u64 = 512;

/// Connections that wait to be taken in; the kernel may allow fewer.
const BACKLOG: u32 = 16_384;

/// How long to wait when a connection cannot be taken in.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Simulate many subs, on addresses of 127.0.0.0/8 and one port.
///
/// Each has a tree in memory and speaks to a dominator as subd does. Nothing is written, and no
/// object is fetched.
#[derive(Clone, Debug, Parser)]
#[command(name = "fleet-simulator")]
pub struct Arguments {
    /// How many subs.
    #[arg(long, default_value_t = 100)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub subs: u32,
    /// The address of the first; the others follow.
    #[arg(long, value_name = "ADDR", default_value = "127.64.0.1")]
    pub first: Ipv4Addr,
    /// The port of all; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    pub port: u16,
    /// Where the benchmark asks, which nobody else should reach.
    #[arg(long, value_name = "ADDR:PORT")]
    pub control: SocketAddr,
    /// The imageserver that has their images.
    #[arg(long, value_name = "ADDR")]
    pub imageserver: String,
    /// An image whose tree subs start with; they have the images that are given in turns.
    #[arg(long, value_name = "NAME", required = true)]
    pub image: Vec<ImageName>,
    /// An image that they may be updated to: its tree is held once for all.
    #[arg(long, value_name = "NAME")]
    pub update: Vec<ImageName>,
    /// How many of them differ from their image at first, in a file each, per cent.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u8).range(..=100))]
    pub drifted: u8,
    /// How long a scan of what has changed takes, in milliseconds.
    #[arg(long, default_value_t = 50)]
    pub scan_ms: u64,
    /// How long a fetch takes, in milliseconds.
    #[arg(long, default_value_t = 100)]
    pub fetch_ms: u64,
    /// How long it takes to stage an update, in milliseconds.
    #[arg(long, default_value_t = 50)]
    pub prepare_ms: u64,
    /// How long it takes to carry an update out, in milliseconds.
    #[arg(long, default_value_t = 50)]
    pub update_ms: u64,
    /// What is logged, and how.
    #[command(flatten)]
    pub log: LogArgs,
    /// How connections are protected: one certificate is for all subs.
    #[command(flatten)]
    pub security: SecurityArgs,
}

/// Runs the simulator, with the arguments of this process.
pub fn main() -> ExitCode {
    simulate(Arguments::parse())
}

/// Runs the simulator as this process.
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

/// Lets this process, and those it starts, have so many connections at one time.
///
/// # Errors
///
/// Says what to do if the limit of open files is too low and cannot be raised.
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
    let security = arguments.security.of_daemon(NAME)?;
    let peer = Peer::parse(&arguments.imageserver, IMAGESERVER_PORT)?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let (client, reader) = (Client::new(peer, &security), Arc::new(Reader::new(processors)));
    let (mut images, mut updates) = (Vec::new(), Vec::new());
    for name in &arguments.image {
        images.push(reader.image(&client, name, Duration::ZERO).await?);
    }
    for name in &arguments.update {
        updates.push(reader.image(&client, name, Duration::ZERO).await?);
    }
    let listener = listen_everywhere(arguments.port).context("cannot listen for the subs")?;
    let port = listener.local_addr().context("a listener has an address")?.port();
    let pace = Pace {
        scan: Duration::from_millis(arguments.scan_ms),
        fetch: Duration::from_millis(arguments.fetch_ms),
        prepare: Duration::from_millis(arguments.prepare_ms),
        update: Duration::from_millis(arguments.update_ms),
    };
    let tracker = TaskTracker::new();
    let plenty = Plenty {
        count,
        first: arguments.first,
        port,
        pace,
        drifted_percent: arguments.drifted,
        images,
        updates,
        reader,
    };
    let machines = Machines::new(plenty, tracker.clone(), stop.clone());
    tracker.spawn(stop.clone().run_until_cancelled_owned(Arc::clone(&machines).flap()));
    let server = Server::new(machines.router(&security), stop.clone());
    let control = listen("fleet-simulator", &security, arguments.control).await?;
    tracing::info!("{machines:?}");
    let taking = take_in(&listener, &machines, &server);
    let serving = serve(control, control_router(&machines, &security), stop.clone());
    let (_, ()) = tokio::join!(stop.run_until_cancelled(taking), serving);
    drop(listener);
    server.finish().await;
    tracker.close();
    tracker.wait().await;
    Ok(())
}

/// Listens on all addresses; thousands may knock at the same time.
fn listen_everywhere(port: u16) -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv4Addr::UNSPECIFIED, port).into())?;
    socket.listen(BACKLOG)
}

/// Takes connections in for ever.
async fn take_in(listener: &TcpListener, machines: &Machines, server: &Server) {
    // A dominator has one to each sub, and for a moment one that has just been lost.
    let places = Arc::new(Semaphore::new(2 * machines.count() + 16));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.expect("it is never closed");
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(local) = stream.local_addr() else { continue };
        let Some(number) = machines.at(local.ip()) else { continue };
        let cut = server.cut();
        match machines.take(number, stream, &cut) {
            Taken::Served(stream) => server.answer(stream, address, place, cut),
            Taken::Refused(stream) => {
                // It is reset; if it cannot be, it is closed.
                let _closed = stream.set_zero_linger();
            }
            Taken::Held => {}
        }
    }
}

fn control_router(machines: &Arc<Machines>, security: &Security) -> Router {
    let all = || Arc::clone(machines);
    let (reported, cleared, marked, drifting, disturbed) = (all(), all(), all(), all(), all());
    Router::new(NAME, security)
        .method::<Report, _, _>(move |_, ()| {
            let reply = reported.report();
            async move { Ok(reply) }
        })
        .method::<ClearMarks, _, _>(move |_, ()| {
            cleared.each(|sub| sub.marks = Marks::default());
            async move { Ok(monotonic()) }
        })
        .method::<GetMarks, _, _>(move |_, ()| {
            let marks = marked.each(|sub| sub.marks);
            async move { Ok(marks) }
        })
        .method::<Drift, _, _>(move |_, request| {
            let number = usize::try_from(request.sub).unwrap_or(usize::MAX);
            let reply = drifting.drift(number, request.chance);
            async move { reply }
        })
        .method::<Disturb, _, _>(move |_, request| {
            disturbed.disturb(request);
            async move { Ok(Done {}) }
        })
}
