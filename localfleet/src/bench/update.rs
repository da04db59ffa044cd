//! Measures updates of whole trees, beside rsync, and the time in which others see a mixture.
//!
//! A machine is updated to the changed tree and back, in turn; rsync does the same with a copy.
//! rsync reads both trees to find what differs; subd knows its tree from its scans.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::dominator::SubDetail;

use super::fixture::Change;
use super::measure::{Row, Samples, Took, cpu_of, mebibytes, memory_of, run, seconds};
use super::{Bench, CHANGES, MEMORY_WANTED, QUICK, QUICK_MAX, settle, subd_of, update_to, upload};
use crate::bench::inconsistency_window::{RenameWatch, WindowSampler};
use crate::compare::compare;
use crate::fleet::Fleet;

/// How long a machine is left alone before a quick update. Without a pause, the dominator's limit
/// of polls would be measured.
const QUIET: Duration = Duration::from_secs(4);

pub(super) fn rsync(flags: &[&str], source: &Path, target: &Path) -> anyhow::Result<Took> {
    let mut command = Command::new("rsync");
    run(command.args(flags).arg(source.join("")).arg(target.join("")), &[0])
}

/// Starts a fleet of one machine that has `first` and may be updated to the change and back.
fn prepared(
    bench: &Bench<'_>,
    name: &str,
    change: Change,
) -> anyhow::Result<(Fleet, PathBuf, Vec<PathBuf>)> {
    let first = bench.first()?.to_owned();
    let (changed, paths) = bench.changed(change)?;
    let mut fleet = bench.fleet(name, Some(&first), false)?;
    upload(&fleet, "first", &first, &[])?;
    upload(&fleet, change.name, &changed, &[])?;
    update_to(&mut fleet, "first")?;
    Ok((fleet, changed, paths))
}

/// Returns the times of the fetch and the window of the machine's last update, which must have had
/// `operations` operations.
fn last_update(detail: &SubDetail, operations: usize) -> anyhow::Result<(Duration, Duration)> {
    let poll = detail.poll.as_ref().context("the machine was polled")?;
    let update = poll.last_update.as_ref().context("there was an update")?;
    let done = usize::try_from(update.operations)?;
    ensure!(done == operations, "the update had {done} operations, not {operations}");
    let fetch = poll.last_fetch.as_ref().map_or(0, |fetch| fetch.took_ms);
    Ok((Duration::from_millis(fetch), Duration::from_nanos(update.window_ns)))
}

/// Measures updates to the change and back.
///
/// # Errors
///
/// If an update fails, or results in another tree.
pub fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (change, _) in CHANGES {
        rows.extend(beside_rsync(bench, change)?);
    }
    Ok(rows)
}

fn beside_rsync(bench: &Bench<'_>, change: Change) -> anyhow::Result<Vec<Row>> {
    let (mut fleet, changed, _) = prepared(bench, "update", change)?;
    let first = bench.first()?;
    let copy = bench.copy(first, "rsync")?;
    let id = subd_of(&fleet)?;
    let (mut whole, mut rest, mut cpu) =
        (Samples::default(), Samples::default(), Samples::default());
    let (mut peer, mut peer_cpu, mut peer_memory) =
        (Samples::default(), Samples::default(), Samples::default());
    for run in 0..bench.runs() {
        for (image, tree) in [(change.name, changed.as_path()), ("first", first)] {
            settle()?;
            let before = cpu_of(id)?;
            let took = update_to(&mut fleet, image)?;
            let (fetch, _) = last_update(&fleet.detail("sub-1")?, change.files)?;
            whole.add(took.as_secs_f64());
            rest.add(took.saturating_sub(fetch).as_secs_f64());
            cpu.add(cpu_of(id)?.saturating_sub(before).as_secs_f64());
            settle()?;
            let took = rsync(&["-ac", "--delete", "--fsync"], tree, &copy)?;
            peer.add(took.wall.as_secs_f64());
            peer_cpu.add(took.cpu.as_secs_f64());
            peer_memory.add(took.memory as f64);
            if run == 0 {
                let skip = |path: &Path| path.starts_with(".subd");
                let differences = compare(tree, &fleet.subs[0].root, &skip)?;
                ensure!(differences.is_empty(), "not as it should be: {differences:?}");
            }
        }
    }
    let memory = memory_of(id).context("subd has ended")?.most as f64;
    bench.end("update", fleet)?;
    std::fs::remove_dir_all(copy).context("cannot remove a tree")?;
    let row = |what: &str, ours: &Samples, peer: &Samples| Row {
        what: format!("update of {} files: {what}", change.files),
        ours: ours.shown(seconds),
        peer: format!("rsync -ac --delete --fsync: {}", peer.shown(seconds)),
        ratio: Some(ours.median() / peer.median()),
        wanted: String::new(),
    };
    Ok(vec![
        row("edit to synced", &whole, &peer),
        row("the same less the fetch", &rest, &peer),
        row("CPU of the machine", &cpu, &peer_cpu),
        Row {
            what: format!("update of {} files: the most resident memory", change.files),
            ours: mebibytes(memory),
            peer: format!("rsync: {}", peer_memory.shown(mebibytes)),
            ratio: Some(memory / peer_memory.median()),
            wanted: mebibytes(MEMORY_WANTED as f64),
        },
    ])
}

/// Measures the window, as a sampler sees it and as subd reports it.
///
/// # Errors
///
/// If an update fails, or the sampler missed it.
pub fn windows(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (change, wanted) in CHANGES {
        let (mut fleet, _, paths) = prepared(bench, "window", change)?;
        let root = fleet.subs[0].root.clone();
        let mut images = [change.name, "first"].into_iter().cycle();
        let mut next = || images.next().context("a cycle has no end");
        // One update to the change and one back.
        let mut ends = Vec::new();
        for _ in 0..2 {
            let renames = RenameWatch::of(paths.iter().map(|path| root.join(path)))?;
            update_to(&mut fleet, next()?)?;
            ends.push(renames.ends()?);
        }
        let (mut seen, mut reported) = (Samples::default(), Samples::default());
        for run in 0..usize::from(bench.arguments.windows) {
            let (first, last) = ends[run % 2].clone();
            let sampler = WindowSampler::start(first, last)?;
            update_to(&mut fleet, next()?)?;
            seen.add(sampler.window()?.as_secs_f64());
            let (_, window) = last_update(&fleet.detail("sub-1")?, change.files)?;
            reported.add(window.as_secs_f64());
        }
        bench.end("window", fleet)?;
        let percentiles = |samples: &Samples| {
            let at = |hundredths| seconds(samples.percentile(hundredths));
            format!("median {}, 99 % {}, most {}", at(50), at(99), at(100))
        };
        rows.push(Row {
            what: format!("window of {} files, {} runs", change.files, bench.arguments.windows),
            ours: format!("seen: {}", percentiles(&seen)),
            peer: format!("reported by subd: {}", percentiles(&reported)),
            ratio: Some(seen.percentile(99) / wanted),
            wanted: format!("99 % within {}", seconds(wanted)),
        });
    }
    Ok(rows)
}

/// Measures the time from the edit of the machine database to `synced`.
///
/// # Errors
///
/// If an update fails.
pub fn quick(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let (mut fleet, ..) = prepared(bench, "quick", QUICK)?;
    let mut samples = Samples::default();
    for _ in 0..bench.runs().max(10) {
        for image in [QUICK.name, "first"] {
            settle()?;
            std::thread::sleep(QUIET);
            samples.add(update_to(&mut fleet, image)?.as_secs_f64());
            last_update(&fleet.detail("sub-1")?, QUICK.files)?;
        }
    }
    bench.end("quick", fleet)?;
    Ok(vec![Row {
        what: format!("{} files, edit of the database to synced", QUICK.files),
        ours: samples.shown(seconds),
        peer: String::new(),
        ratio: Some(samples.median() / QUICK_MAX),
        wanted: seconds(QUICK_MAX),
    }])
}
