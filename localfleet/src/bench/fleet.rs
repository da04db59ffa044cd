//! Measures what a dominator takes for a whole simulated fleet.
//!
//! The simulator takes the times, on the clock that all processes share: an order counts when it
//! has arrived. Processor time and memory are those of the dominator's process; those of the
//! simulator are shown too, because both share the same processors.

mod computed;
mod readers;
mod release;
mod tasks;

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::dominator::Status;

use super::fixture::{self, Change, Content, Shape};
use super::measure::{Row, Samples, cpu_of, mebibytes, memory_of, seconds};
use super::{Bench, upload_with};
use crate::fleet::Fleet;
use crate::simulated_fleet::SimulatedFleet;
use crate::simulator::allow_connections;
use crate::simulator::control::{
    ClearFirstTimes, Disturb, DisturbRequest, Disturbance, Drift, DriftRequest,
};
use crate::simulator::machines::monotonic;
use crate::simulator::sub::FirstTimes;
use release::RELEASE;

/// The filter of every image.
const FILTER: &str = "/var/log/.*\n/var/tmp/.*\n/tmp/.*\n/home/.*\n";

/// The number of images of the fleet.
const IMAGES: u64 = 3;

/// The mean size of a file, in bytes. The content does not matter to the dominator.
const FILE_BYTES: u64 = 1_000;

/// The most time for each step.
const LIMIT: Duration = Duration::from_secs(600);

/// How long a fleet is left alone before it counts as idle, and how long it is measured then. In
/// the first minute after work polls wait 20 s, and connections are replaced.
const QUIET: Duration = Duration::from_secs(90);
const IDLE: Duration = Duration::from_secs(75);

/// How long a disturbance lasts before its cost is measured.
const SETTLE: Duration = Duration::from_secs(10);

/// The number of machines that drift one after the other, and the pause between them.
const DRIFTS: u32 = 200;
const DRIFT_PAUSE: Duration = Duration::from_millis(20);

/// The disturbed part of the fleet, and how long the disturbance lasts before the next update.
const DISTURBED: DisturbRequest = DisturbRequest { dead_percent: 10, flapping_percent: 5 };
const DISTURBED_FOR: Duration = Duration::from_secs(60);

/// The goals.
const INTAKE_WANTED: f64 = 60.0;
const ORDERED_WANTED: f64 = 10.0;
const IDLE_WANTED: f64 = 0.05;
const POLL_WANTED: f64 = 0.000_10;
const MEMORY_WANTED: f64 = 64.0 * 1024.0;

/// The figures of the Go Dominator, measured on such a machine with 200 small subs.
const GO_POLL: f64 = 0.000_13;
const GO_MEMORY: f64 = 82_000.0;

/// The processor time of the dominator and the simulator so far.
#[derive(Clone, Copy)]
struct Cpu {
    dominator: Duration,
    simulator: Duration,
}

/// The running benchmark.
struct Run {
    all: SimulatedFleet,
    subs: usize,
    name: String,
    is_disturbed: bool,
    rows: Vec<Row>,
}

/// Measures a fleet during its intake, when it is idle, drifts, is updated, after a restart, and
/// when it is disturbed.
///
/// # Errors
///
/// If a step does not reach its goal in time.
pub fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    measured(bench, |run, [first, second, third], files| {
        run.intake(first, files)?;
        run.plan(second)?;
        run.idle()?;
        run.drift()?;
        run.update(second, "", fixture::SMALL.files)?;
        run.restart()?;
        run.release(third, second)?;
        run.disturbed(first)
    })
}

/// Measures pages and edits of the machine database, with many readers.
///
/// # Errors
///
/// If a step does not reach its goal in time.
pub fn pages(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    measured(bench, |run, [first, ..], files| {
        run.intake(first, files)?;
        run.readers(first)
    })
}

/// Measures a fleet with computed files.
///
/// # Errors
///
/// If a step does not reach its goal in time.
pub fn computed(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let directory = bench.fleet_directory("filegen");
    fs::create_dir_all(&directory).context("cannot make a directory")?;
    measured(bench, |run, [first, ..], files| {
        run.intake(first, files)?;
        run.computed(&directory, first)
    })
}

/// Measures a fleet with daemon tasks.
///
/// # Errors
///
/// If a step does not reach its goal in time.
pub fn tasks(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    measured(bench, |run, [first, ..], files| {
        run.intake(first, files)?;
        run.tasks()
    })
}

/// The image of each machine, by its number.
type ImageOf<'names> = &'names dyn Fn(usize) -> String;

/// Starts a fleet, and gives it to `steps` with the first image of each machine, its small update,
/// its new release, and the number of files of an image.
fn measured(
    bench: &mut Bench<'_>,
    steps: impl FnOnce(&mut Run, [ImageOf<'_>; 3], usize) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Row>> {
    let (subs, files) = (bench.arguments.subs, usize::try_from(bench.arguments.files)?);
    allow_connections(subs.into())?;
    let directory = bench.fleet_directory("fleet");
    fs::create_dir_all(&directory).context("cannot make a directory")?;
    let fleet = bench.servers(directory, bench.arguments.insecure)?;
    let [images, updates, releases] = upload_images(bench, &fleet, files)?;
    let subs = usize::try_from(subs)?;
    eprintln!("starting {subs} simulated subs");
    let others = [&updates[..], &releases].concat();
    let all = SimulatedFleet::start(fleet, &bench.programs, subs, &images, &others, &[])?;
    let name = format!("{subs} subs");
    let mut run = Run { all, subs, name, is_disturbed: false, rows: Vec::new() };
    let of = |names: Vec<String>| move |number: usize| names[number % names.len()].clone();
    let (first, second, third) = (of(images), of(updates), of(releases));
    steps(&mut run, [&first, &second, &third], files)?;
    let Run { mut all, rows, .. } = run;
    all.stop()?;
    drop(all);
    fs::remove_dir_all(bench.fleet_directory("fleet")).context("cannot remove a fleet")?;
    Ok(rows)
}

/// Makes and uploads the images, a small update and a new release of each. Returns their names.
fn upload_images(
    bench: &Bench<'_>,
    fleet: &Fleet,
    files: usize,
) -> anyhow::Result<[Vec<String>; 3]> {
    let mut names: [Vec<String>; 3] = Default::default();
    for number in 1..=IMAGES {
        eprintln!("making image {number} of {IMAGES}");
        let [tree, update, release] = ["tree", "update", "release"]
            .map(|name| bench.place.join("fleet").with_extension(name));
        let bytes = files as u64 * FILE_BYTES;
        fixture::make(
            &tree,
            Shape { seed: 0x5eed_2000 + number, files, bytes, content: Content::Noise },
        )?;
        let change = Change { seed: 0x5eed_3000 + number, ..fixture::SMALL };
        fixture::changed(&tree, files, &update, change)?;
        let change =
            Change { seed: RELEASE.seed + number, files: files.min(RELEASE.files), ..RELEASE };
        fixture::changed(&tree, files, &release, change)?;
        for (version, tree) in [tree, update, release].iter().enumerate() {
            let name = format!("base-{number}/{}", version + 1);
            upload_with(fleet, &name, tree, [FILTER, "[]"], &[])?;
            fs::remove_dir_all(tree).context("cannot remove a tree")?;
            names[version].push(name);
        }
    }
    Ok(names)
}

impl Run {
    fn dominator(&self) -> anyhow::Result<u32> {
        self.all.fleet.dominator.id().context("the dominator does not run")
    }

    fn cpu(&self) -> anyhow::Result<Cpu> {
        let simulator = self.all.simulator.id().context("the simulator does not run")?;
        Ok(Cpu { dominator: cpu_of(self.dominator()?)?, simulator: cpu_of(simulator)? })
    }

    /// Adds a line to the table.
    fn row(&mut self, what: &str, ours: String) {
        let what = format!("{}: {what}", self.name);
        let (peer, ratio, wanted) = (String::new(), None, String::new());
        self.rows.push(Row { what, ours, peer, ratio, wanted });
    }

    /// Adds a line for a time that should not be longer than `wanted`, in seconds.
    fn wanted(&mut self, what: &str, value: f64, wanted: f64) {
        self.row(what, seconds(value));
        if let Some(row) = self.rows.last_mut() {
            row.ratio = Some(value / wanted);
            row.wanted = seconds(wanted);
        }
    }

    /// Adds lines for the processor time since `before`.
    fn spent(&mut self, what: &str, before: Cpu) -> anyhow::Result<()> {
        let now = self.cpu()?;
        let dominator = (now.dominator - before.dominator).as_secs_f64();
        let simulator = (now.simulator - before.simulator).as_secs_f64();
        let both = format!("{} (simulator: {})", seconds(dominator), seconds(simulator));
        self.row(&format!("{what}: CPU of the dominator"), both);
        Ok(())
    }

    /// Adds lines for the resident memory of the dominator, in total and for each sub.
    fn memory(&mut self, what: &str, bytes: u64) {
        let (subs, bytes) = (self.subs as f64, bytes as f64);
        self.rows.push(Row {
            what: format!(
                "{}: resident memory of the dominator {what}, by subs, connections included",
                self.name
            ),
            ours: format!("{:.1} KiB ({})", bytes / subs / 1024.0, mebibytes(bytes)),
            peer: format!("Go Dominator: {:.1} KiB", GO_MEMORY / 1024.0),
            ratio: Some(bytes / subs / GO_MEMORY),
            wanted: format!("{:.0} KiB", MEMORY_WANTED / 1024.0),
        });
    }

    /// Resets the peak memory of the dominator.
    fn forget_peak(&self) -> anyhow::Result<()> {
        let path = format!("/proc/{}/clear_refs", self.dominator()?);
        fs::write(path, "5").context("cannot reset the most memory of the dominator")
    }

    fn intake(&mut self, image_of: &dyn Fn(usize) -> String, files: usize) -> anyhow::Result<()> {
        eprintln!("{}: taking them in", self.name);
        let start_ns = self.all.ask::<ClearFirstTimes>(&())?;
        let before = self.cpu()?;
        let start = Instant::now();
        self.require(image_of)?;
        let subs = self.subs;
        self.all.wait("all have answered", LIMIT, |all| {
            let counts = all.fleet.status()?.counts;
            let strange = [Status::Connecting, Status::Unreachable];
            let known = counts.iter().filter(|(status, _)| !strange.contains(status));
            Ok(usize::try_from(known.map(|(_, count)| count).sum::<u32>())? == subs)
        })?;
        let known = start.elapsed();
        self.all.wait_all_synced("all are taken in", LIMIT)?;
        let synced = start.elapsed();
        let first_times = self.all.first_times()?;
        let what = format!("intake, {IMAGES} images of {files} files, a file of each sub drifted");
        self.row(&format!("{what}: all have answered"), seconds(known.as_secs_f64()));
        self.last(
            &format!("{what}: to the order of the last"),
            &first_times,
            start_ns,
            FirstTimes::order,
        );
        self.wanted(&format!("{what}: to all synced"), synced.as_secs_f64(), INTAKE_WANTED);
        self.spent("intake", before)
    }

    fn require(&self, image_of: &dyn Fn(usize) -> String) -> anyhow::Result<()> {
        let names: Vec<String> = (0..self.subs).map(image_of).collect();
        self.all.require(|number| &names[number])
    }

    /// Adds lines for the time from `start_ns` until half of the subs, and until all of them, saw
    /// something.
    fn last(
        &mut self,
        what: &str,
        first_times: &[FirstTimes],
        start_ns: u64,
        mark: impl Fn(&FirstTimes) -> Option<u64>,
    ) {
        let mut times: Vec<u64> = first_times.iter().filter_map(mark).collect();
        times.sort_unstable();
        let shown = |at: Option<&u64>| {
            let took = at.map_or(0, |at| at.saturating_sub(start_ns));
            seconds(Duration::from_nanos(took).as_secs_f64())
        };
        let (half, count) = (shown(times.get(times.len() / 2)), times.len());
        self.row(what, format!("{} (half within {half}; {count} subs)", shown(times.last())));
    }

    /// Runs `domtool plan` for an update of all machines twice: without cached plans and with them.
    fn plan(&mut self, image_of: &dyn Fn(usize) -> String) -> anyhow::Result<()> {
        eprintln!("{}: planning an update of all that is not made", self.name);
        let names: Vec<String> = (0..self.subs).map(image_of).collect();
        for what in ["dry run of an update of all", "the same once more"] {
            let before = self.cpu()?;
            let (plan, took) = self.all.plan(|number| &names[number])?;
            let machines = plan["machines"].as_array().map_or(0, Vec::len);
            ensure!(machines == self.subs, "{machines} machines were planned for");
            self.row(&format!("{what}, by domtool"), seconds(took.as_secs_f64()));
            eprintln!("{}: {what}: {took:?}", self.name);
            self.spent(what, before)?;
        }
        Ok(())
    }

    /// Measures the idle fleet. Returns the part of a core that the dominator takes.
    fn idle(&mut self) -> anyhow::Result<f64> {
        let name = &self.name;
        eprintln!("{name}: watching them idle for {} s, in {} s", IDLE.as_secs(), QUIET.as_secs());
        std::thread::sleep(QUIET);
        let (before, polls, start) = (self.cpu()?, self.all.report()?.polls, Instant::now());
        std::thread::sleep(IDLE);
        let (now, polls) = (self.cpu()?, self.all.report()?.polls - polls);
        let took = start.elapsed().as_secs_f64();
        let dominator = (now.dominator - before.dominator).as_secs_f64();
        let simulator = (now.simulator - before.simulator).as_secs_f64();
        self.row(
            "idle: CPU of the dominator, of a core",
            format!("{:.2} % (simulator: {:.2} %)", 1e2 * dominator / took, 1e2 * simulator / took),
        );
        if let Some(row) = self.rows.last_mut() {
            row.ratio = Some(dominator / took / IDLE_WANTED);
            row.wanted = format!("{} %", IDLE_WANTED * 100.0);
        }
        ensure!(polls > 0, "no sub was polled in {took} s");
        let poll = dominator / polls as f64;
        self.rows.push(Row {
            what: format!("{}: idle: CPU of the dominator by polls, all included", self.name),
            ours: format!("{:.3} ms ({polls} polls)", poll * 1e3),
            peer: format!("Go Dominator: {:.2} ms", GO_POLL * 1e3),
            ratio: Some(poll / GO_POLL),
            wanted: format!("{:.2} ms", POLL_WANTED * 1e3),
        });
        let memory = memory_of(self.dominator()?).context("the dominator has ended")?;
        self.memory("idle", memory.now);
        Ok(dominator / took)
    }

    /// Makes one machine after the other drift.
    fn drift(&mut self) -> anyhow::Result<()> {
        eprintln!("{}: letting some drift", self.name);
        self.all.ask::<ClearFirstTimes>(&())?;
        let drifts = DRIFTS.min(u32::try_from(self.subs)?);
        let step = u32::try_from(self.subs)? / drifts;
        for number in 0..drifts {
            let chance = u64::from(number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            self.all.ask::<Drift>(&DriftRequest { sub: number * step, chance })?;
            std::thread::sleep(DRIFT_PAUSE);
        }
        self.all.wait("drift is repaired", LIMIT, |all| Ok(all.report()?.verified >= drifts))?;
        let (mut ordered, mut repaired) = (Samples::default(), Samples::default());
        for first_times in self.all.first_times()? {
            let Some(drifted) = first_times.drifted else { continue };
            let since = |mark: Option<u64>| {
                mark.map(|at| Duration::from_nanos(at.saturating_sub(drifted)).as_secs_f64())
            };
            if let (Some(order), Some(end)) =
                (since(first_times.order()), since(first_times.verified))
            {
                ordered.add(order);
                repaired.add(end);
            }
        }
        let shown = |samples: &Samples| {
            let at = |hundredths| seconds(samples.percentile(hundredths));
            format!("median {}, 99 % {}, most {}", at(50), at(99), at(100))
        };
        self.row(&format!("{drifts} drifts, found to ordered"), shown(&ordered));
        self.row(&format!("{drifts} drifts, found to repaired and scanned"), shown(&repaired));
        Ok(())
    }

    /// Requires another image of all machines at the same time.
    fn update(
        &mut self,
        image_of: &dyn Fn(usize) -> String,
        what: &str,
        files: usize,
    ) -> anyhow::Result<()> {
        let what = format!("{what}update of all by {files} files, from the edit");
        eprintln!("{}: {what}", self.name);
        self.all.ask::<ClearFirstTimes>(&())?;
        self.forget_peak()?;
        let before = self.cpu()?;
        self.require(image_of)?;
        // The time to write the file does not count.
        let start_ns = monotonic();
        let is_steady = |number: &usize| self.disturbance(*number) == Disturbance::Steady;
        let steady: Vec<usize> = (0..self.subs).filter(is_steady).collect();
        self.all.wait(&what, LIMIT, |all| {
            if (all.report()?.verified as usize) < steady.len() {
                return Ok(false);
            }
            let first_times = all.first_times()?;
            Ok(steady.iter().all(|&number| first_times[number].verified.is_some()))
        })?;
        let first_times = self.all.first_times()?;
        let first_times: Vec<FirstTimes> =
            steady.iter().map(|&number| first_times[number]).collect();
        let last = first_times
            .iter()
            .filter_map(|first_times| first_times.prepare)
            .max()
            .unwrap_or(start_ns);
        let last = Duration::from_nanos(last.saturating_sub(start_ns)).as_secs_f64();
        self.last(
            &format!("{what} until the last is told to fetch"),
            &first_times,
            start_ns,
            |first_times| first_times.order(),
        );
        let ordered = format!("{what} until the last is ordered");
        match files == fixture::SMALL.files {
            true => self.wanted(&ordered, last, ORDERED_WANTED),
            false => self.row(&ordered, seconds(last)),
        }
        self.last(
            &format!("{what} until the last has it"),
            &first_times,
            start_ns,
            |first_times| first_times.verified,
        );
        if steady.len() == self.subs {
            self.all.wait_all_synced(&what, LIMIT)?;
            let took = Duration::from_nanos(monotonic().saturating_sub(start_ns)).as_secs_f64();
            self.row(&format!("{what} until all are synced"), seconds(took));
        }
        self.spent(&what, before)?;
        let memory = memory_of(self.dominator()?).context("the dominator has ended")?;
        self.memory(&format!("at most, during the {what}"), memory.most);
        Ok(())
    }

    fn disturbance(&self, number: usize) -> Disturbance {
        if self.is_disturbed { DISTURBED.disturbance(number) } else { Disturbance::Steady }
    }

    /// Restarts the dominator with a synced fleet.
    fn restart(&mut self) -> anyhow::Result<()> {
        eprintln!("{}: starting the dominator again", self.name);
        self.all.fleet.dominator.stop()?;
        let simulator = self.cpu_of_simulator()?;
        let start = Instant::now();
        self.all.fleet.dominator.start_again()?;
        self.all.fleet.wait_ready()?;
        self.all.wait_all_synced("all are taken in again", LIMIT)?;
        let took = start.elapsed().as_secs_f64();
        self.wanted(
            "the dominator starts again, the fleet is in place: to all synced",
            took,
            INTAKE_WANTED,
        );
        let before = Cpu { dominator: Duration::ZERO, simulator };
        self.spent("the dominator starts again", before)
    }

    /// Starts the dominator again. Returns the seconds to all synced, and its memory a while later,
    /// in bytes.
    fn started(&mut self, what: &str) -> anyhow::Result<(f64, u64)> {
        eprintln!("{}: starting the dominator again, {what}", self.name);
        self.all.fleet.dominator.stop()?;
        let start = Instant::now();
        self.all.fleet.dominator.start_again()?;
        self.all.fleet.wait_ready()?;
        self.all.wait_all_synced("all are taken in again", LIMIT)?;
        let took = start.elapsed().as_secs_f64();
        self.wanted(&format!("{what}: the dominator starts, to all synced"), took, INTAKE_WANTED);
        Ok((took, self.rest(&format!("a minute later, {what}"))?))
    }

    fn cpu_of_simulator(&self) -> anyhow::Result<Duration> {
        cpu_of(self.all.simulator.id().context("the simulator does not run")?)
    }

    /// Updates the fleet while a part of it is dead and a part is flapping.
    fn disturbed(&mut self, image_of: &dyn Fn(usize) -> String) -> anyhow::Result<()> {
        let DisturbRequest { dead_percent, flapping_percent } = DISTURBED;
        let what = format!("{dead_percent} % dead, {flapping_percent} % flapping: ");
        eprintln!("{}: {what}for {} s", self.name, DISTURBED_FOR.as_secs());
        self.all.ask::<Disturb>(&DISTURBED)?;
        self.is_disturbed = true;
        std::thread::sleep(SETTLE);
        let (before, start) = (self.cpu()?, Instant::now());
        std::thread::sleep(DISTURBED_FOR);
        let now = self.cpu()?;
        let of = |spent: Duration| 1e2 * spent.as_secs_f64() / start.elapsed().as_secs_f64();
        self.row(
            &format!("{what}nothing to do: CPU of the dominator, of a core"),
            format!(
                "{:.2} % (simulator: {:.2} %)",
                of(now.dominator - before.dominator),
                of(now.simulator - before.simulator)
            ),
        );
        self.update(image_of, &what, fixture::SMALL.files)?;
        eprintln!("{}: all come up", self.name);
        self.is_disturbed = false;
        let start = Instant::now();
        self.all.ask::<Disturb>(&DisturbRequest::default())?;
        self.all.wait_all_synced("all have come up", LIMIT)?;
        let took = start.elapsed().as_secs_f64();
        self.row(&format!("{what}all come up: to all synced"), seconds(took));
        Ok(())
    }
}
