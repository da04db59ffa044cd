//! Measures an image server behind a network card: many machines that fetch at the same time, and
//! concurrent uploads.
//!
//! Server and clients have separate network namespaces, and the kernel limits the rate of the link
//! between them in both directions. Only the bytes of objects that arrive count; headers of
//! Ethernet, IP and TCP take 4.4 % of the link with packets of 1,500 bytes.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::image_server::{GetImage, GetImageRequest};
use api::object_server::{AddObjects, GetObjectsRequest};
use api::object_stream::ObjectHead;
use bytes::Bytes;
use certs::sets::Set;
use model::image::ImageName;
use model::object::{Algorithm, ObjectId};
use model::tree::{Leaf, Node};
use nix::sched::{CloneFlags, setns};
use rpc::client::Client;
use rpc::trees::TreeReader;
use tokio::time::Instant;

use super::Bench;
use super::measure::{Row, Samples, cpu_of, mebibytes, memory_of, run};
use crate::fleet::certificates::{Certificates, OPERATOR};
use crate::fleet::client_of;
use crate::fleet::daemon_process::Daemon;
use crate::simulator::allow_connections;

/// The number of machines that fetch, and of uploads, at the same time.
const FETCHERS: usize = 1_000;
const UPLOADS: u64 = 16;

/// The bytes that a machine fetches: for a first installation, a large update, a small one.
const SIZES: [(&str, u64); 3] =
    [("1 GB", 1_000_000_000), ("100 MB", 100_000_000), ("1 MB", 1_000_000)];

/// How long the clients are measured, and how long they have run before.
const WATCHED: Duration = Duration::from_secs(20);
const SETTLE: Duration = Duration::from_secs(5);

/// The number of objects in a request, as subd sends it.
const REQUEST_OBJECTS: usize = 512;

/// The size of an object that is uploaded, in bytes.
const UPLOADED_BYTES: usize = 64 << 10;

/// The goal for the used share of the link.
const LINK_WANTED: f64 = 0.95;

const ADDRESS: &str = "10.77.0.1:6971";

/// Two network namespaces and a link between them, which are removed on drop.
struct Link {
    server: String,
    clients: String,
}

impl Link {
    /// Makes a link of `megabits` per second.
    fn new(megabits: u32) -> anyhow::Result<Self> {
        let id = std::process::id();
        let link = Self { server: format!("store-{id}"), clients: format!("fetch-{id}") };
        let (server, clients) = (&link.server, &link.clients);
        let shape = format!("tbf rate {megabits}mbit burst 256kb latency 400ms");
        for words in [
            format!("ip netns add {server}"),
            format!("ip netns add {clients}"),
            format!("ip -n {server} link add s type veth peer name c netns {clients}"),
            format!("ip -n {server} addr add 10.77.0.1/30 dev s"),
            format!("ip -n {clients} addr add 10.77.0.2/30 dev c"),
            format!("ip -n {server} link set s up"),
            format!("ip -n {clients} link set c up"),
            format!("tc -n {server} qdisc add dev s root {shape}"),
            format!("tc -n {clients} qdisc add dev c root {shape}"),
        ] {
            let mut words = words.split(' ');
            let program = words.next().unwrap_or_default();
            run(Command::new(program).args(words), &[0])
                .context("cannot make a network namespace: this needs root")?;
        }
        Ok(link)
    }

    /// Returns the arguments of ip(8) that run `program` in a namespace.
    fn inside(namespace: &str, program: &Path) -> Vec<std::ffi::OsString> {
        ["netns", "exec", namespace].map(Into::into).into_iter().chain([program.into()]).collect()
    }

    /// Runs `work` on a thread in the namespace of the clients.
    fn at_clients<T: Send>(
        &self,
        work: impl AsyncFnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let namespace = File::open(Path::new("/run/netns").join(&self.clients))?;
        let thread = || {
            setns(&namespace, CloneFlags::CLONE_NEWNET).context("cannot enter a namespace")?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(work())
        };
        std::thread::scope(|scope| scope.spawn(thread).join())
            .map_err(|_| anyhow::anyhow!("a thread panicked"))?
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for namespace in [&self.server, &self.clients] {
            // An error leaves a namespace behind; nothing more can be done.
            let _ended = run(Command::new("ip").args(["netns", "del", namespace]), &[0]);
        }
    }
}

/// Measures fetches, then uploads, through the link.
///
/// # Errors
///
/// If the link cannot be made, or something fails.
pub fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let megabits = bench.arguments.link;
    allow_connections(FETCHERS as u64)?;
    let tree = bench.first()?.display().to_string();
    let link = Link::new(megabits)?;
    let directory = bench.fleet_directory("serve");
    std::fs::create_dir_all(&directory).context("cannot make a directory")?;
    let mut arguments = Link::inside(&link.server, &bench.programs.join("imageserver"));
    let data = directory.join("data").display().to_string();
    let certificates = match bench.arguments.insecure {
        true => Certificates::none(),
        false => Certificates::make(&directory.join("tls"))?,
    };
    let address: SocketAddr = ADDRESS.parse().context("it is an address")?;
    certificates.for_daemon("imageserver", Set::Imageserver, &[&address.ip().to_string()])?;
    let security = certificates.security(OPERATOR)?;
    arguments.extend(certificates.flags("imageserver").into_iter().map(Into::into));
    arguments.extend(["--listen", ADDRESS, "--data", &data].map(Into::into));
    let log = directory.join("log");
    let mut server = Daemon::start("imageserver", Path::new("ip"), arguments, log)?;
    let client = || client_of(address, &security);
    link.at_clients(async || ready(&client(), &mut server).await)?;
    eprintln!("uploading the images");
    let (system, name) = bench.system()?;
    for (image, tree) in [("image", tree), ("system", system.display().to_string())] {
        let mut add = Command::new("ip");
        add.args(Link::inside(&link.clients, &bench.programs.join("imagetool")));
        add.args(certificates.flags(OPERATOR));
        add.args(["--imageserver", ADDRESS, "add", image, &tree, "-", "-"]);
        run(&mut add, &[0])?;
    }
    let objects = link.at_clients(async || files_of(&client(), "image").await)?;
    let mut fetched: Vec<(String, u64, Vec<ObjectId>)> =
        SIZES.map(|(name, bytes)| (name.to_owned(), bytes, first_of(&objects, bytes))).into();
    // Real files, which are compressed on the wire.
    let objects = link.at_clients(async || files_of(&client(), "system").await)?;
    let bytes = objects.iter().map(|(_, bytes)| bytes).sum();
    fetched.push((name, bytes, objects.into_iter().map(|(id, _)| id).collect()));
    let id = server.id().context("the imageserver does not run")?;
    let mut rows = Vec::new();
    for (name, bytes, ids) in fetched {
        eprintln!("{FETCHERS} machines fetch {name}");
        let before = cpu_of(id)?;
        let counts = link.at_clients(async || fetch(client, &ids).await)?;
        let cpu = (cpu_of(id)? - before).as_secs_f64() / (WATCHED + SETTLE).as_secs_f64();
        rows.extend(of_link(&format!("{FETCHERS} machines fetch {name} each"), &counts, megabits));
        let rate = counts.iter().sum::<f64>() / bytes as f64;
        let most = memory_of(id).context("the imageserver has ended")?.most;
        rows.push(Row {
            what: format!("{FETCHERS} machines fetch {name} each: machines per second"),
            ours: format!(
                "{rate:.2} (imageserver: {:.0} % of a core, at most {})",
                1e2 * cpu,
                mebibytes(most as f64)
            ),
            peer: String::new(),
            ratio: None,
            wanted: String::new(),
        });
    }
    eprintln!("{UPLOADS} uploads");
    let counts = link.at_clients(async || upload(client).await)?;
    rows.extend(of_link(&format!("{UPLOADS} uploads"), &counts, megabits));
    server.stop()?;
    std::fs::remove_dir_all(&directory).context("cannot remove the data")?;
    Ok(rows)
}

/// Returns lines for the used share of the link and how evenly it was divided; `counts` are bytes
/// per second.
fn of_link(what: &str, counts: &[f64], megabits: u32) -> Vec<Row> {
    let (sum, link) = (counts.iter().sum::<f64>(), f64::from(megabits) * 125_000.0);
    let squares: f64 = counts.iter().map(|count| count * count).sum();
    let mut sorted = Samples::default();
    counts.iter().for_each(|count| sorted.add(*count));
    let shown = |value: f64| format!("{:.2} MB/s", value / 1e6);
    vec![
        Row {
            what: format!("{what}: of a link of {megabits} Mb/s, headers of TCP/IP left out"),
            ours: format!("{:.1} % ({})", 1e2 * sum / link, shown(sum)),
            peer: String::new(),
            ratio: Some(sum / link / LINK_WANTED),
            wanted: format!("{:.0} %", 1e2 * LINK_WANTED),
        },
        Row {
            what: format!("{what}: fairness (Jain's index; 1 is even)"),
            ours: format!(
                "{:.3} (1 % {}, median {}, 99 % {})",
                sum * sum / squares / counts.len() as f64,
                shown(sorted.percentile(1)),
                shown(sorted.median()),
                shown(sorted.percentile(99))
            ),
            peer: String::new(),
            ratio: None,
            wanted: String::new(),
        },
    ]
}

async fn ready(client: &Client, server: &mut Daemon) -> anyhow::Result<()> {
    let start = Instant::now();
    while !matches!(client.get("/healthz").await, Ok((200, _))) {
        server.check()?;
        ensure!(start.elapsed() < Duration::from_secs(30), "the imageserver does not answer");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Returns the objects of the files of an image with their sizes, each once.
async fn files_of(client: &Client, name: &str) -> anyhow::Result<Vec<(ObjectId, u64)>> {
    let request = GetImageRequest { name: ImageName::new(name)?, wait_ms: 0 };
    let image = client.call::<GetImage>(&request).await?;
    let tree = Arc::new(TreeReader::new(1)).from_image_server(client, image.content.root).await?;
    let files = tree.nodes().filter_map(|(_, node)| match node {
        Node::Leaf(Leaf::File(file)) => Some((file.object.id(), file.size_bytes)),
        _ => None,
    });
    let each: std::collections::BTreeMap<ObjectId, u64> = files.collect();
    Ok(each.into_iter().collect())
}

/// Returns as many of `objects` as have `bytes` bytes in total.
fn first_of(objects: &[(ObjectId, u64)], bytes: u64) -> Vec<ObjectId> {
    let mut sum = 0;
    let wanted = objects.iter().filter(|(_, size)| *size <= bytes / 10);
    let taken = wanted.take_while(|(_, size)| {
        let is_wanted = sum < bytes;
        sum += size;
        is_wanted
    });
    taken.map(|(id, _)| *id).collect()
}

/// The bytes that each client has moved so far.
struct Counts(Vec<Arc<AtomicU64>>);

impl Counts {
    fn new(clients: usize) -> Self {
        Self((0..clients).map(|_| Arc::default()).collect())
    }

    /// Measures for a while. Returns bytes per second for each client.
    async fn watch(&self) -> Vec<f64> {
        let now =
            || -> Vec<u64> { self.0.iter().map(|count| count.load(Ordering::Relaxed)).collect() };
        tokio::time::sleep(SETTLE).await;
        let (before, start) = (now(), Instant::now());
        tokio::time::sleep(WATCHED).await;
        let took = start.elapsed().as_secs_f64();
        let gained = now().into_iter().zip(before).map(|(now, before)| now - before);
        gained.map(|bytes| bytes as f64 / took).collect()
    }
}

/// Runs many clients, with a connection each, that fetch all of `ids` again and again.
async fn fetch(client: impl Fn() -> Client, ids: &[ObjectId]) -> anyhow::Result<Vec<f64>> {
    let counts = Counts::new(FETCHERS);
    let mut tasks = tokio::task::JoinSet::new();
    for (number, count) in counts.0.iter().enumerate() {
        let (client, count, mut ids) = (client(), Arc::clone(count), ids.to_vec());
        // Machines do not ask for the same objects at the same moment.
        let middle = number * ids.len() / FETCHERS;
        ids.rotate_left(middle);
        tasks.spawn(async move {
            loop {
                for ids in ids.chunks(REQUEST_OBJECTS) {
                    let request = GetObjectsRequest { ids: ids.to_vec() };
                    let mut reader = client.get_objects(&request).await?;
                    while reader.head().await? != ObjectHead::End {
                        while let Some(chunk) = reader.chunk().await? {
                            count.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                        }
                    }
                }
            }
        });
    }
    watched(&counts, tasks).await
}

/// Returns what the clients move, unless one of them fails.
async fn watched(
    counts: &Counts,
    mut tasks: tokio::task::JoinSet<anyhow::Result<()>>,
) -> anyhow::Result<Vec<f64>> {
    tokio::select! {
        counts = counts.watch() => Ok(counts),
        Some(ended) = tasks.join_next() => {
            ended.context("a client has ended")??;
            anyhow::bail!("a client has ended")
        }
    }
}

/// Runs some clients that upload new objects without end.
async fn upload(client: impl Fn() -> Client) -> anyhow::Result<Vec<f64>> {
    let counts = Counts::new(usize::try_from(UPLOADS)?);
    let mut tasks = tokio::task::JoinSet::new();
    for (number, count) in (0_u64..).zip(&counts.0) {
        let (client, count) = (client(), Arc::clone(count));
        let mut next = number;
        let pieces = std::iter::repeat_with(move || {
            next += UPLOADS;
            count.fetch_add(UPLOADED_BYTES as u64, Ordering::Relaxed);
            let content: Vec<u8> =
                (next | 1 << 63).to_le_bytes().into_iter().cycle().take(UPLOADED_BYTES).collect();
            let mut piece = Vec::with_capacity(UPLOADED_BYTES + 64);
            let id = Algorithm::Blake3.digest(&content);
            ObjectHead::Object { id, size_bytes: content.len() as u64 }.encode(&mut piece);
            piece.extend_from_slice(&content);
            Ok(Bytes::from(piece))
        });
        tasks.spawn(async move {
            client.upload::<AddObjects>(futures_util::stream::iter(pieces)).await?;
            Ok(())
        });
    }
    watched(&counts, tasks).await
}
