//! Measures the cost of TLS: the same fleet without it and with it, one after the other in the same
//! run.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::fixture::{self, Content, Shape};
use super::measure::{Row, cpu_of, mebibytes, memory_of, seconds};
use super::{Bench, upload_with};
use crate::simulated_fleet::SimulatedFleet;
use crate::simulator::allow_connections;

/// The number of files of the machines. Their trees do not matter here.
const FILES: usize = 100;

/// The mean size of these files, in bytes.
const FILE_BYTES: u64 = 1_000;

/// The most time for each step.
const LIMIT: Duration = Duration::from_secs(600);

/// How long a fleet is left alone before it counts as idle, and how long it is measured then.
const SETTLE: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_secs(75);

/// How often an image is fetched. The best time counts, because the disk is noisy.
const GETS: usize = 5;

/// The memory of a client in Go for one HTTP/2 connection with certificates on both sides, in
/// bytes.
const GO_CONNECTION: f64 = 44.0 * 1024.0;

/// The results of one fleet.
struct Taken {
    /// Resident memory of the dominator and of the simulator, in bytes.
    memory: [u64; 2],
    /// The same before the first connection.
    before: [u64; 2],
    /// Processor time of both until all machines were synced.
    intake: [Duration; 2],
    /// The time until all machines were synced.
    took: Duration,
    /// Processor time of both while the fleet was idle.
    idle: [Duration; 2],
    /// The time to get the tree of the machines' image, and the server's processor time.
    get: (Duration, Duration),
}

/// Measures fleets of [`super::Arguments::subs`] machines, one with certificates and one without.
///
/// # Errors
///
/// If a step takes too long or fails.
pub fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    allow_connections(bench.arguments.subs.into())?;
    let plain = fleet(bench, true)?;
    let tls = fleet(bench, false)?;
    let subs = f64::from(bench.arguments.subs);
    let name = format!("{} subs", bench.arguments.subs);
    let mut rows = Vec::new();
    let mut row = |what: String, ours: String, peer: String, ratio: f64, wanted: &str| {
        rows.push(Row { what, ours, peer, ratio: Some(ratio), wanted: wanted.to_owned() });
    };
    for (index, side) in ["client (dominator)", "server (simulator)"].into_iter().enumerate() {
        let grown =
            |taken: &Taken| taken.memory[index].saturating_sub(taken.before[index]) as f64 / subs;
        let shown = |taken: &Taken| {
            let all = mebibytes(taken.memory[index] as f64);
            format!("{:.1} KiB ({all} in all)", grown(taken) / 1024.0)
        };
        let ratio = grown(&tls) / grown(&plain);
        let what = format!("{name}: memory by connection, {side}, TLS beside plain");
        row(what, shown(&tls), shown(&plain), ratio, "");
        let more = grown(&tls) - grown(&plain);
        let what = format!("{name}: memory that TLS adds to a connection, {side}");
        let (ours, peer) = (format!("{:.1} KiB", more / 1024.0), "all of one, Go: 44 KiB");
        row(what, ours, peer.to_owned(), more / GO_CONNECTION, "44 KiB");
        let of = |times: &[Duration; 2]| times[index].as_secs_f64();
        let what = format!("{name}: CPU of the intake, {side}, TLS beside plain");
        let (ours, peer) = (of(&tls.intake), of(&plain.intake));
        row(what, seconds(ours), seconds(peer), ours / peer, "");
        let what = format!("{name}: CPU when idle, {side}, of a core, TLS beside plain");
        let (ours, peer) = (of(&tls.idle), of(&plain.idle));
        let percent = |spent: f64| format!("{:.2} %", 1e2 * spent / IDLE.as_secs_f64());
        row(what, percent(ours), percent(peer), ours / peer, "");
    }
    let pair = |what: &str, of: &dyn Fn(&Taken) -> Duration| {
        let (ours, peer) = (of(&tls).as_secs_f64(), of(&plain).as_secs_f64());
        (what.to_owned(), seconds(ours), seconds(peer), ours / peer)
    };
    let all = [
        pair(&format!("{name}: intake to all synced, TLS beside plain"), &|taken| taken.took),
        pair("imagetool get of 1.0 GB, the best of 5, TLS beside plain", &|taken| taken.get.0),
        pair("the same, CPU of the server", &|taken| taken.get.1),
    ];
    for (what, ours, peer, ratio) in all {
        row(what, ours, peer, ratio, "");
    }
    Ok(rows)
}

fn fleet(bench: &Bench<'_>, insecure: bool) -> anyhow::Result<Taken> {
    let how = if insecure { "plain" } else { "tls" };
    let directory = bench.fleet_directory(how);
    fs::create_dir_all(&directory).context("cannot make a directory")?;
    let fleet = bench.servers(directory.clone(), insecure)?;
    let tree = bench.place.join("tls-tree");
    let bytes = FILES as u64 * FILE_BYTES;
    fixture::make(
        &tree,
        Shape { seed: 0x5eed_5000, files: FILES, bytes, content: Content::Noise },
    )?;
    upload_with(&fleet, "base/1", &tree, ["/var/log/.*\n", "[]"], &[])?;
    fs::remove_dir_all(&tree).context("cannot remove a tree")?;
    upload_with(&fleet, "large/1", bench.first()?, ["/var/log/.*\n", "[]"], &[])?;
    let server = fleet.imageserver.id().context("the imageserver does not run")?;
    let target = directory.join("got");
    let mut get = (Duration::MAX, Duration::MAX);
    for _ in 0..GETS {
        // Earlier writes must not slow this run down.
        nix::unistd::sync();
        let (start, before) = (Instant::now(), cpu_of(server)?);
        let output = fleet.imagetool(&["get".as_ref(), "large/1".as_ref(), target.as_os_str()])?;
        ensure!(output.status.success(), "imagetool get failed");
        get = get.min((start.elapsed(), cpu_of(server)? - before));
        fs::remove_dir_all(&target).context("cannot remove a tree")?;
    }

    let subs = usize::try_from(bench.arguments.subs)?;
    eprintln!("{how}: starting {subs} simulated subs");
    let images = ["base/1".to_owned()];
    let mut all = SimulatedFleet::start(fleet, &bench.programs, subs, &images, &[], &[])?;
    let dominator = all.fleet.dominator.id().context("the dominator does not run")?;
    let simulator = all.simulator.id().context("the simulator does not run")?;
    let memory = || -> anyhow::Result<[u64; 2]> {
        let of = |id| memory_of(id).map(|memory| memory.now).context("it has ended");
        Ok([of(dominator)?, of(simulator)?])
    };
    let cpu = || -> anyhow::Result<[Duration; 2]> { Ok([cpu_of(dominator)?, cpu_of(simulator)?]) };
    let since = |now: [Duration; 2], then: [Duration; 2]| [now[0] - then[0], now[1] - then[1]];
    let (before, then, start) = (memory()?, cpu()?, Instant::now());
    all.require(|_| &images[0])?;
    all.wait_all_synced("all are taken in", LIMIT)?;
    let (took, intake) = (start.elapsed(), since(cpu()?, then));
    eprintln!("{how}: watching them idle for {} s", IDLE.as_secs());
    std::thread::sleep(SETTLE);
    let then = cpu()?;
    std::thread::sleep(IDLE);
    let idle = since(cpu()?, then);
    let memory = memory()?;
    all.stop()?;
    drop(all);
    fs::remove_dir_all(directory).context("cannot remove a fleet")?;
    Ok(Taken { memory, before, intake, took, idle, get })
}
