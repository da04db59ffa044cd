//! Measures how fast files are hashed, and what an idle subd takes.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::subd::{Poll, PollRequest, ScanNow, ScanNowRequest};

use super::measure::{Row, Samples, Took, cpu_of, mebibytes, memory_of, run, seconds};
use super::{Bench, MEMORY_WANTED, cost_when_idle, subd_of, update_to, upload};
use crate::compare::list;
use crate::fleet::Fleet;

/// The most time for one content pass.
const PASS_MAX: Duration = Duration::from_secs(300);

/// The goal for the time of hashing, as a multiple of the peer's time.
const RATIO_WANTED: f64 = 1.15;

/// The goal for the share of a core that an idle subd takes.
const IDLE_WANTED: f64 = 0.01;

/// Runs one content pass of subd. Returns its duration and its processor time.
fn content_pass(fleet: &Fleet) -> anyhow::Result<(Duration, Duration)> {
    let poll = || fleet.ask_sub::<Poll>(0, &PollRequest::default());
    let (id, before) = (subd_of(fleet)?, poll()?);
    let (start, cpu) = (Instant::now(), cpu_of(id)?);
    fleet.ask_sub::<ScanNow>(0, &ScanNowRequest { content: true, media: false })?;
    let mut have = before.version;
    loop {
        let now = fleet.ask_sub::<Poll>(0, &PollRequest { have: Some(have), wait_ms: 100 })?;
        if now.counters.content_passes > before.counters.content_passes {
            let took = Duration::from_millis(now.counters.content_pass_ms);
            return Ok((took, cpu_of(id)?.saturating_sub(cpu)));
        }
        have = now.version;
        ensure!(start.elapsed() < PASS_MAX, "the content pass does not end");
    }
}

/// Runs a program with the paths of all files as arguments, in as few runs as possible.
fn hash_all(names: &Path, program: &str, flags: &[&str]) -> anyhow::Result<Took> {
    let mut command = Command::new("xargs");
    command.arg("-0").arg("-a").arg(names).arg(program).args(flags);
    run(&mut command, &[0])
}

/// Measures content passes beside b3sum, sha512sum and aide, over the tree of many files and over a
/// system.
///
/// # Errors
///
/// If one of them cannot be run.
pub fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let first = bench.first()?.to_owned();
    let mut rows = pass_over(bench, &first, &format!("{} files", super::fixture::FILES))?;
    let (system, name) = bench.system()?;
    rows.extend(pass_over(bench, &system, &name)?);
    Ok(rows)
}

/// Measures content passes over a tree that is called `name`.
fn pass_over(bench: &Bench<'_>, tree: &Path, name: &str) -> anyhow::Result<Vec<Row>> {
    let mut fleet = bench.fleet("content", Some(tree), false)?;
    let root = fleet.subs[0].root.clone();
    let names = bench.place.join("names");
    let mut text = Vec::new();
    for (path, metadata) in list(&root, &|path| path.starts_with(".subd"))? {
        if metadata.is_file() {
            text.extend_from_slice(root.join(path).as_os_str().as_bytes());
            text.push(0);
        }
    }
    fs::write(&names, text).context("cannot write the list of files")?;
    let mut rows = Vec::new();
    let peers: [(&str, &str, &[&str]); 2] =
        [("blake3", "b3sum", &["--num-threads", "1"]), ("sha512", "sha512sum", &[])];
    let mut ours_cpu = 0.0;
    for (algorithm, program, flags) in peers {
        upload(&fleet, algorithm, tree, &["--digest", algorithm])?;
        update_to(&mut fleet, algorithm)?;
        let mut samples: [Samples; 4] = Default::default();
        for number in 0..=bench.runs() {
            let (wall, cpu) = content_pass(&fleet)?;
            let peer = hash_all(&names, program, flags)?;
            // The first run of each warms the cache.
            if number > 0 {
                let values = [wall, cpu, peer.wall, peer.cpu].map(|took| took.as_secs_f64());
                samples.iter_mut().zip(values).for_each(|(samples, value)| samples.add(value));
            }
        }
        let [wall, cpu, peer_wall, peer_cpu] = samples;
        let wanted = format!("{RATIO_WANTED} times");
        let rows_of = [
            ("time", wall, &peer_wall, wanted),
            // A requested scan runs a metadata pass too, and polls are answered.
            ("CPU of subd, with a metadata pass", cpu.clone(), &peer_cpu, String::new()),
        ];
        for (what, ours, peer, wanted) in rows_of {
            rows.push(Row {
                what: format!("content pass of {name}, {algorithm}: {what}"),
                ours: ours.shown(seconds),
                peer: format!("{program}, 1 thread: {}", peer.shown(seconds)),
                ratio: Some(ours.median() / peer.median()),
                wanted,
            });
        }
        ours_cpu = cpu.median();
    }
    let ours = memory_of(subd_of(&fleet)?).context("subd has ended")?;
    rows.extend(beside_aide(bench, name, &root, ours_cpu, ours.most)?);
    bench.end("content", fleet)?;
    Ok(rows)
}

/// Measures processor time and memory of a whole check with SHA-512, beside aide.
fn beside_aide(
    bench: &Bench<'_>,
    name: &str,
    root: &Path,
    our_cpu: f64,
    our_memory: u64,
) -> anyhow::Result<Vec<Row>> {
    let shown = |name: &str| bench.place.join(name).display().to_string();
    let (database, config) = (shown("aide.db"), shown("aide.conf"));
    let root = root.display();
    let text = format!(
        "database_in=file:{database}\ndatabase_out=file:{database}\ngzip_dbout=no\n\
         report_url=file:/dev/null\nAll=p+u+g+n+i+s+m+c+sha512+acl+xattrs\n\
         !{root}/.subd\n{root} All\n"
    );
    fs::write(&config, text).context("cannot write the configuration of aide")?;
    let aide = |verb: &str| run(Command::new("aide").args(["--config", &config, verb]), &[0]);
    eprintln!("aide is learning the tree");
    aide("--init")?;
    let (mut cpu, mut memory) = (Samples::default(), Samples::default());
    for _ in 0..bench.runs() {
        let took = aide("--check")?;
        cpu.add(took.cpu.as_secs_f64());
        memory.add(took.memory as f64);
    }
    Ok(vec![
        Row {
            what: format!("all of {name} checked with sha512: CPU"),
            ours: seconds(our_cpu),
            peer: format!("aide --check: {}", cpu.shown(seconds)),
            ratio: Some(our_cpu / cpu.median()),
            wanted: String::new(),
        },
        Row {
            what: format!("the most resident memory, all digests of {name} replaced by sha512"),
            ours: mebibytes(our_memory as f64),
            peer: format!("aide --check: {}", memory.shown(mebibytes)),
            ratio: Some(our_memory as f64 / memory.median()),
            wanted: String::new(),
        },
    ])
}

/// Measures memory and processor time of an idle subd with default limits.
///
/// # Errors
///
/// If the fleet does not start.
pub fn idle(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let first = bench.first()?.to_owned();
    let mut fleet = bench.fleet("idle", Some(&first), true)?;
    upload(&fleet, "first", &first, &[])?;
    update_to(&mut fleet, "first")?;
    let (share, memory) = cost_when_idle(&fleet, Duration::from_secs(10))?;
    bench.end("idle", fleet)?;
    let wanted = MEMORY_WANTED as f64;
    Ok(vec![
        Row {
            what: format!("idle, {} files: CPU of a core", super::fixture::FILES),
            ours: format!("{:.2} %", share * 100.0),
            peer: String::new(),
            ratio: Some(share / IDLE_WANTED),
            wanted: format!("{} %", IDLE_WANTED * 100.0),
        },
        Row {
            what: format!("idle, {} files: resident memory", super::fixture::FILES),
            ours: format!(
                "{} (at most {})",
                mebibytes(memory.now as f64),
                mebibytes(memory.most as f64)
            ),
            peer: String::new(),
            ratio: Some(memory.now as f64 / wanted),
            wanted: mebibytes(wanted),
        },
    ])
}
