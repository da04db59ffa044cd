//! Fetches are held to their shares of network and disk.
//!
//! Bounds on time are lower bounds: a slow machine never makes these tests fail. With
//! `SUBD_LONG_TESTS=1` they measure for a longer time, and the rate from both sides.

use rpc::tls::Security;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use api::subd::{
    GetLimits, LimitReason, Limits, ResourceUse, SetConfiguration, SetConfigurationRequest,
};
use rpc::client::{Client, Peer};

use super::reuse::{Loop, run};
use super::{MIB, begin, ended, fetch, object};
use crate::fetch::host::{Host, Vice, content};
use crate::fixture::Sub;

/// True for tests that measure for a longer time.
fn is_long() -> bool {
    std::env::var_os("SUBD_LONG_TESTS").is_some()
}

/// A network namespace with a line to this one.
struct Namespace {
    name: String,
    device: String,
    near: String,
    far: String,
}

impl Namespace {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // Several of one process at a time, too.
        let id = std::process::id() % 100_000 * 4 + NUMBER.fetch_add(1, Ordering::Relaxed);
        let (name, device) = (format!("subd-{id}"), format!("sd{id}"));
        let (net, host) = (id / 64 % 256, id % 64 * 4);
        let (near, far) =
            (format!("10.213.{net}.{}", host + 1), format!("10.213.{net}.{}", host + 2));
        let ip = |arguments: &str| run("ip", &arguments.split(' ').collect::<Vec<_>>());
        ip(&format!("netns add {name}"));
        ip(&format!("link add {device} type veth peer name {device}b netns {name}"));
        ip(&format!("addr add {near}/30 dev {device}"));
        ip(&format!("link set {device} up"));
        ip(&format!("-n {name} addr add {far}/30 dev {device}b"));
        ip(&format!("-n {name} link set {device}b up"));
        ip(&format!("-n {name} link set lo up"));
        Self { name, device, near, far }
    }

    /// Bytes that went to the namespace.
    fn sent_bytes(&self) -> u64 {
        let path = format!("/sys/class/net/{}/statistics/tx_bytes", self.device);
        std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The line goes with it.
        let _done = Command::new("ip").args(["netns", "delete", &self.name]).status();
    }
}

/// A subd in a process of its own.
struct Process(Child);

impl Process {
    fn start(mut command: Command, root: &Path, listen: &str, flags: &[&str]) -> (Self, Sub) {
        command.args(["--insecure", "--config", "/dev/null", "--listen", listen, "--root"]);
        let mut child = command.arg(root).args(flags).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line = lines.next().expect("it has ended").unwrap();
            if let Some((_, address)) = line.split_once("listening on http://") {
                break address.trim().to_owned();
            }
        };
        // Nobody would read what it says later, and it must not wait for a reader.
        std::thread::spawn(move || lines.for_each(drop));
        let client = Client::new(Peer::parse(&address, 1).unwrap(), &Security::Insecure);
        (Self(child), Sub::elsewhere(root, client))
    }

    /// Bytes that it has had written to a device, or will have.
    fn written_bytes(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/io", self.0.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: "));
        line.unwrap().parse().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _gone_already = self.0.kill();
        let _waited = self.0.wait();
    }
}

fn limits(write_percent: u8) -> SetConfigurationRequest {
    let limits = Limits { write_percent: Some(write_percent), ..Limits::default() };
    SetConfigurationRequest { scan: None, limits: Some(limits) }
}

#[tokio::test(flavor = "multi_thread")]
async fn writing_is_held_to_its_share_which_changes_in_the_middle() {
    let place = tempfile::tempdir().unwrap();
    // 10 per cent of 20 MiB in a second.
    let speed = (20 * MIB).to_string();
    let flags = ["--device-speed", &speed, "--write-percent", "10"];
    let sub = Sub::start_on(place.path(), &flags).await;
    let host = Host::start(Vice::None).await;
    let large = content(8, 5 * MIB);
    host.add(&large);
    let started = Instant::now();
    let last = fetch(&sub, 1, &[&host.address], &[object(&large)]).await;
    let took = started.elapsed();
    assert_eq!((last.error, last.bytes), (None, 5 * MIB as u64));
    // A quarter of a second may have been saved up before.
    assert!(took > Duration::from_millis(2_100), "{took:?}");
    let load = sub.poll().await.load;
    assert_eq!(load.write.limit, 2 * MIB as u64);
    assert!(load.write.used > 0, "{load:?}");
    assert_eq!(load.network, ResourceUse::default(), "what comes from this machine is not counted");
    // A twentieth of that: what is left of an object would take more than a minute.
    let next = content(9, 8 * MIB);
    host.add(&next);
    begin(&sub, 2, &[&host.address], &[object(&next)]).await;
    sub.client.call::<SetConfiguration>(&limits(1)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let reply = sub.poll().await;
    assert_eq!(reply.load.write.limit, 2 * MIB as u64 / 10);
    assert!(reply.last_fetch.unwrap().fetch_id == 1, "it is still under way");
    // Over the wire it never goes above the machine's own.
    sub.client.call::<SetConfiguration>(&limits(100)).await.unwrap();
    assert_eq!(sub.poll().await.load.write.limit, 2 * MIB as u64);
    assert_eq!(ended(&sub, 2).await.error, None);
    host.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_installation_is_held_back_only_by_what_somebody_has_set() {
    let place = tempfile::tempdir().unwrap();
    // By default it would take minutes.
    let sub = Sub::start_on(place.path(), &["--device-speed", "200000"]).await;
    let host = Host::start(Vice::None).await;
    let large = content(13, 5 * MIB);
    host.add(&large);
    let last = fetch(&sub, 1, &[&host.address], &[object(&large)]).await;
    assert_eq!((last.error, last.bytes), (None, 5 * MIB as u64));
    let write = async || sub.client.call::<GetLimits>(&()).await.unwrap().write;
    assert_eq!((write().await.limit, write().await.reason), (0, LimitReason::Installation));
    sub.client.call::<SetConfiguration>(&limits(50)).await.unwrap();
    assert_eq!((write().await.limit, write().await.reason), (100_000, LimitReason::Told));
    host.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_network_is_held_to_its_share() {
    let namespace = Namespace::new();
    let place = tempfile::tempdir().unwrap();
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &namespace.name, env!("CARGO_BIN_EXE_subd")]);
    let speed = (20 * MIB).to_string();
    let flags = ["--network-speed", &speed, "--network-percent", "10", "--write-percent", "100"];
    let listen = format!("{}:0", namespace.far);
    let (_process, sub) = Process::start(command, place.path(), &listen, &flags);
    let host = Host::start_at(&format!("{}:0", namespace.near), Vice::None).await;
    let length = if is_long() { 30 * MIB } else { 5 * MIB };
    let large = content(10, length);
    host.add(&large);
    let (started, before) = (Instant::now(), namespace.sent_bytes());
    let last = fetch(&sub, 1, &[&host.address], &[object(&large)]).await;
    let (took, sent) = (started.elapsed(), namespace.sent_bytes() - before);
    assert_eq!((last.error, last.bytes), (None, length as u64));
    let rate = 2.0 * MIB as f64;
    // A quarter of a second may have been saved up before.
    let least = length as f64 / rate - 0.4;
    assert!(took > Duration::from_secs_f64(least), "{took:?}");
    let load = sub.poll().await.load;
    assert_eq!(load.network.limit, 2 * MIB as u64);
    assert!(load.network.used > 0, "{load:?}");
    if is_long() {
        let measured = sent as f64 / took.as_secs_f64();
        println!("{sent} bytes in {took:?}: {:.3} of the share", measured / rate);
        assert!((0.9..1.1).contains(&(measured / rate)), "{sent} bytes in {took:?}");
    }
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_of_unknown_speed_is_measured_once() {
    let namespace = Namespace::new();
    let place = tempfile::tempdir().unwrap();
    let listen = format!("{}:0", namespace.far);
    let start = || {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &namespace.name, env!("CARGO_BIN_EXE_subd")]);
        Process::start(
            command,
            place.path(),
            &listen,
            &["--device-speed", "1000000000", "--network-percent", "10"],
        )
    };
    // The line of a namespace reports a speed that it does not have.
    run("ip", &["-n", &namespace.name, "route", "add", "default", "via", &namespace.near]);
    let (process, sub) = start();
    assert_eq!(sub.poll().await.load.network.limit, 0);
    let host = Host::start_at(&format!("{}:0", namespace.near), Vice::None).await;
    let large = content(12, 10 * MIB);
    host.add(&large);
    let last = fetch(&sub, 1, &[&host.address], &[object(&large)]).await;
    assert_eq!((last.error, last.bytes), (None, large.len() as u64));
    let limit = sub.poll().await.load.network.limit;
    assert!(limit > 0);
    let state = place.path().join(".subd/state/state.json");
    let is_told =
        |text: String| text.contains("network_speed") && !text.contains("\"network_speed\": null");
    let kept = || std::fs::read_to_string(&state).is_ok_and(is_told);
    // It is written when the fetch has been told of.
    testing::eventually_async("the speed is saved", async || kept()).await;
    drop(process);
    let (_process, sub) = start();
    assert_eq!(sub.poll().await.load.network.limit, limit);
    host.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_kernel_counts_as_written_is_within_the_share() {
    let disk = Loop::new("ext4");
    let speed = (20 * MIB).to_string();
    let flags = ["--device-speed", &speed, "--write-percent", "10"];
    let command = Command::new(env!("CARGO_BIN_EXE_subd"));
    let (process, sub) = Process::start(command, &disk.root(), "127.0.0.5:0", &flags);
    let host = Host::start(Vice::None).await;
    let large = content(11, if is_long() { 30 * MIB } else { 6 * MIB });
    host.add(&large);
    sub.tree().await;
    let before = process.written_bytes();
    begin(&sub, 1, &[&host.address], &[object(&large)]).await;
    let (started, first) = (Instant::now(), process.written_bytes());
    let time = Duration::from_secs(if is_long() { 12 } else { 2 });
    tokio::time::sleep(time).await;
    let (written, took) = (process.written_bytes() - first, started.elapsed().as_secs_f64());
    let rate = 2.0 * MIB as f64;
    // Half a MiB may have been saved up, and what is in the queue may come at once.
    let most = 1.1 * rate * took + 1.5 * MIB as f64;
    assert!((written as f64) < most, "{written} bytes in {took} s");
    let last = ended(&sub, 1).await;
    assert_eq!(last.error, None);
    let all = process.written_bytes() - before;
    assert!(all >= large.len() as u64, "{all}");
    if is_long() {
        println!("{written} bytes in {took} s: {:.3} of the share", written as f64 / took / rate);
        assert!((0.9..1.1).contains(&(written as f64 / took / rate)));
    }
    host.stop().await;
}
