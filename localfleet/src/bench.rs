//! Measures the product and comparable tools in the same run, and prints a table with ratios.
//!
//! Measures the installed product: real daemons as processes, called over the network. Peers run in
//! turns with it, so that other load on the machine affects both.

mod content;
mod fixture;
mod fleet;
mod inconsistency_window;
mod install;
mod measure;
mod rollouts;
mod serve;
mod store;
mod tasks;
mod tls;
mod update;
mod versions;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::dominator::Status;

use crate::fleet::{Addresses, Fleet, Options};
use crate::source_trees;
use fixture::{Change, LARGE, QUICK, SMALL};
pub use measure::Row;
use measure::{Memory, cpu_of, memory_of};

/// The most time for the update of a machine.
const UPDATE_MAX: Duration = Duration::from_secs(600);

/// How long an idle machine is measured.
const IDLE: Duration = Duration::from_secs(120);

/// How often the status of a machine is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Hashing all files, beside b3sum, sha512sum and aide.
    Content,
    /// An update of 68 files and one of 3,633, beside rsync.
    Update,
    /// The time in which others see a mixture of old and new files.
    Window,
    /// 50 files, from the edit of the machine database to `synced`.
    Quick,
    /// The installation of a whole system on an empty machine, beside rsync.
    Install,
    /// The installation of 40,000 files of 1.0 GB on ext4, beside `cp -a` and `sync`, and its cost
    /// for the image server.
    InstallTree,
    /// Memory and processor time of an idle subd.
    Idle,
    /// Daemon tasks on one machine: how soon they run, and what 200 of them cost.
    Tasks,
    /// Adding and fetching images, beside ostree, restic and casync.
    Store,
    /// An image server with a thousand versions of an image.
    Versions,
    /// A thousand machines that fetch through one network card, and some uploads.
    Serve,
    /// A dominator with ten thousand simulated machines, beside the Go Dominator.
    Fleet,
    /// Readers of a dominator's pages while its machine database is edited; with --subs 2000.
    Pages,
    /// Such a fleet with three computed files on each machine.
    Computed,
    /// Such a fleet with five daemon tasks on each machine.
    FleetTasks,
    /// The cost of TLS for such a fleet, and for getting an image.
    Tls,
    /// Decisions about rollouts of ten thousand machines in 200 environments.
    Rollouts,
}

/// Measures the product beside its peers.
///
/// Makes a tree of 40,000 files (1.0 GB) and changed versions of it, needs about 6 GB of disk and
/// half an hour. b3sum, sha512sum, aide, rsync, ostree, restic and casync must be installed.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    cargo run --profile dist -p localfleet -- bench\n  \
    localfleet bench content --runs 5\n  \
    localfleet bench content install --system debian.tar\n  \
    localfleet bench fleet --subs 10000")]
pub struct Arguments {
    /// The parts to measure; all if none is named.
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// The number of repetitions; the table has medians and ranges.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    runs: u16,
    /// The number of observations of the window.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(2..))]
    windows: u16,
    /// The system that is hashed and installed; real files of this machine by default.
    #[arg(long, value_name = "TAR|DIR")]
    system: Option<PathBuf>,
    /// The number of simulated machines for `fleet`, and of machines for `rollouts`.
    #[arg(long, default_value_t = 10_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    subs: u32,
    /// The number of files in the trees of `fleet`.
    #[arg(long, default_value_t = 40_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(100..=40_000))]
    files: u32,
    /// The number of versions of an image for `versions`.
    #[arg(long, default_value_t = 1_000)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=100_000))]
    versions: u32,
    /// The rate of the link of `serve`, in megabits per second.
    #[arg(long, default_value_t = 1_000, value_name = "MEGABITS")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    link: u32,
    /// Measure without TLS.
    #[arg(long)]
    insecure: bool,
    /// Make everything below this directory, so that its file-system is measured.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    directory: PathBuf,
}

/// What all parts share.
struct Bench<'run> {
    arguments: &'run Arguments,
    place: PathBuf,
    programs: PathBuf,
    stop: Arc<AtomicBool>,
    /// The tree that machines start with.
    first: PathBuf,
}

/// Runs the benchmark and prints a table.
///
/// # Errors
///
/// If something cannot be measured.
pub fn run(
    arguments: &Arguments,
    install: impl FnOnce(&Path) -> anyhow::Result<()>,
    stop: Arc<AtomicBool>,
) -> anyhow::Result<()> {
    let directory = tempfile::Builder::new()
        .prefix("localfleet-bench-")
        .tempdir_in(&arguments.directory)
        .context("cannot make a directory")?;
    let place = directory.path().to_owned();
    let programs = place.join("bin");
    install(&programs)?;
    let mut bench = Bench { arguments, programs, stop, first: place.join("first"), place };
    let wants = |part| arguments.parts.is_empty() || arguments.parts.contains(&part);
    println!("{}\n", machine());
    println!("| what | ours | peer | ratio | wanted |\n|---|---|---|---|---|");
    let mut any = |part, measure: fn(&mut Bench<'_>) -> anyhow::Result<Vec<Row>>| {
        if wants(part) {
            measure(&mut bench)?.iter().for_each(|row| println!("{row}"));
        }
        anyhow::Ok(())
    };
    any(Part::Content, content::measure)?;
    any(Part::Update, update::measure)?;
    any(Part::Window, update::windows)?;
    any(Part::Quick, update::quick)?;
    any(Part::Install, install::install)?;
    any(Part::InstallTree, install::install_tree)?;
    any(Part::Idle, content::idle)?;
    any(Part::Tasks, tasks::measure)?;
    any(Part::Store, store::measure)?;
    any(Part::Versions, versions::measure)?;
    any(Part::Serve, serve::measure)?;
    any(Part::Fleet, fleet::measure)?;
    any(Part::Pages, fleet::pages)?;
    any(Part::Computed, fleet::computed)?;
    any(Part::FleetTasks, fleet::tasks)?;
    any(Part::Tls, tls::measure)?;
    any(Part::Rollouts, rollouts::measure)?;
    directory.close().context("cannot remove the directory")
}

/// Returns a description of the machine that is used.
fn machine() -> String {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let info = text("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name\t: "));
    let kernel = text("/proc/sys/kernel/osrelease");
    let load = text("/proc/loadavg");
    format!(
        "{cpus} processors ({}), Linux {}, load before: {}",
        model.unwrap_or("unknown"),
        kernel.trim(),
        load.split(' ').next().unwrap_or_default()
    )
}

impl Bench<'_> {
    fn runs(&self) -> u16 {
        self.arguments.runs
    }

    /// Returns the tree that machines start with, and makes it at the first call.
    fn first(&self) -> anyhow::Result<&Path> {
        if !self.first.exists() {
            eprintln!("making the tree of {} files", fixture::FILES);
            fixture::make(&self.first, fixture::FIRST)?;
        }
        Ok(&self.first)
    }

    /// Returns a whole system and its name, and makes it at the first call.
    fn system(&self) -> anyhow::Result<(PathBuf, String)> {
        let made = self.place.join("system");
        let Some(source) = &self.arguments.system else {
            if !made.exists() {
                source_trees::from_this_machine(&made, &|line| eprintln!("{line}"))?;
            }
            return Ok((made, "files of this machine".to_owned()));
        };
        let name = source.file_name().unwrap_or(source.as_os_str()).display().to_string();
        let tree = if made.exists() { made } else { source_trees::from_image(source, &made)? };
        Ok((tree, name))
    }

    /// Makes a changed tree. Returns it with the paths that differ, relative to its root.
    fn changed(&self, change: Change) -> anyhow::Result<(PathBuf, Vec<PathBuf>)> {
        let target = self.place.join(change.name);
        if target.exists() {
            fs::remove_dir_all(&target).context("cannot remove a tree")?;
        }
        let paths = fixture::changed(self.first()?, fixture::FILES, &target, change)?;
        Ok((target, paths))
    }

    /// Copies a tree without sharing inodes.
    fn copy(&self, source: &Path, name: &str) -> anyhow::Result<PathBuf> {
        let target = self.place.join(name);
        source_trees::copy(source, &target)?;
        Ok(target)
    }

    /// Starts a fleet of one machine, called `name`, whose root has a copy of `tree`, or is empty.
    ///
    /// With `limited`, subd has its default limits. Otherwise writing and fetching are unlimited,
    /// so that the mechanism is measured.
    fn fleet(&self, name: &str, tree: Option<&Path>, limited: bool) -> anyhow::Result<Fleet> {
        let directory = self.fleet_directory(name);
        fs::create_dir_all(directory.join("roots")).context("cannot make a directory")?;
        if let Some(tree) = tree {
            eprintln!("{name}: copying the tree to the machine");
            source_trees::copy(tree, &directory.join("roots/sub-1"))?;
        }
        let flags = if limited { Vec::new() } else { unlimited() };
        self.fleet_at(name, Addresses::private()?, flags)
    }

    /// Starts a fleet of one machine, called `name`, at these addresses.
    fn fleet_at(
        &self,
        name: &str,
        addresses: Addresses,
        subd_flags: Vec<(&'static str, String)>,
    ) -> anyhow::Result<Fleet> {
        Fleet::start(Options {
            programs: self.programs.clone(),
            directory: self.fleet_directory(name),
            subs: 1,
            dominator_flags: Vec::new(),
            subd_flags,
            insecure: self.arguments.insecure,
            addresses,
            stop: Arc::clone(&self.stop),
        })
    }

    /// Stops a fleet and removes its files.
    fn end(&self, name: &str, mut fleet: Fleet) -> anyhow::Result<()> {
        fleet.stop()?;
        drop(fleet);
        fs::remove_dir_all(self.fleet_directory(name)).context("cannot remove a fleet")
    }

    /// Starts an image server and a dominator in `directory`, without subs.
    fn servers(&self, directory: PathBuf, insecure: bool) -> anyhow::Result<Fleet> {
        Fleet::start(Options {
            programs: self.programs.clone(),
            directory,
            subs: 0,
            subd_flags: Vec::new(),
            dominator_flags: Vec::new(),
            insecure,
            addresses: Addresses::private()?,
            stop: Arc::clone(&self.stop),
        })
    }

    /// Returns the directory of a fleet, separate from the named trees.
    fn fleet_directory(&self, name: &str) -> PathBuf {
        self.place.join("fleets").join(name)
    }
}

/// Returns flags with which a subd writes and fetches without limits.
fn unlimited() -> Vec<(&'static str, String)> {
    let flags = [
        ("--write-percent", "100"),
        ("--network-percent", "100"),
        ("--network-speed", "100000000000"),
    ];
    flags.map(|(flag, value)| (flag, value.to_owned())).into()
}

/// Uploads a tree as an image that covers everything except subd's own directory.
fn upload(fleet: &Fleet, image: &str, tree: &Path, flags: &[&str]) -> anyhow::Result<()> {
    upload_with(fleet, image, tree, ["", "[]"], flags)
}

/// Uploads a tree as an image with a filter and triggers.
fn upload_with(
    fleet: &Fleet,
    image: &str,
    tree: &Path,
    [filter, triggers]: [&str; 2],
    flags: &[&str],
) -> anyhow::Result<()> {
    eprintln!("uploading {image}");
    let file = |name: &str, text: &str| {
        let path = fleet.mdb().with_file_name(name);
        fs::write(&path, text).with_context(|| format!("cannot write the {name}"))?;
        anyhow::Ok(path.display().to_string())
    };
    let (filter, triggers) = (file("filter", filter)?, file("triggers", triggers)?);
    let tree = tree.display().to_string();
    let mut words: Vec<String> =
        ["add", image, &tree, &filter, &triggers, "--required-paths="].map(str::to_owned).into();
    words.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let output = fleet.imagetool(&words)?;
    ensure!(output.status.success(), "imagetool: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Requires an image of the machine and waits until it is synced. Returns how long that took.
fn update_to(fleet: &mut Fleet, image: &str) -> anyhow::Result<Duration> {
    let start = Instant::now();
    fleet.require(Some(image))?;
    loop {
        let subs = fleet.statuses()?;
        let is_synced = subs.iter().all(|sub| {
            sub.status == Status::Synced && sub.required_image == image && sub.last_image == image
        });
        if is_synced && !subs.is_empty() {
            return Ok(start.elapsed());
        }
        fleet.check()?;
        if start.elapsed() > UPDATE_MAX {
            let first = subs.first().map(|sub| format!("{}: {}", sub.status, sub.detail));
            bail!("not synced with {image}: {}", first.unwrap_or_default());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the process id of the machine's subd.
fn subd_of(fleet: &Fleet) -> anyhow::Result<u32> {
    fleet.subs.first().and_then(|sub| sub.daemon.id()).context("subd does not run")
}

/// Leaves the machine alone for `settle`, and measures what its subd takes in the two minutes after
/// that: the part of a core, and the memory.
fn cost_when_idle(fleet: &Fleet, settle: Duration) -> anyhow::Result<(f64, Memory)> {
    let id = subd_of(fleet)?;
    eprintln!("watching an idle machine for {} s", IDLE.as_secs());
    // What was begun before is not part of it.
    std::thread::sleep(settle);
    let (start, before) = (Instant::now(), cpu_of(id)?);
    std::thread::sleep(IDLE);
    let share = cpu_of(id)?.saturating_sub(before).as_secs_f64() / start.elapsed().as_secs_f64();
    Ok((share, memory_of(id).context("subd has ended")?))
}

/// Writes out dirty pages, so that each measurement starts from the same state.
fn settle() -> anyhow::Result<()> {
    let status = Command::new("sync").status().context("cannot run sync")?;
    ensure!(status.success(), "sync: {status}");
    Ok(())
}

/// The changes that are applied and undone, with the goals for their windows, in seconds.
const CHANGES: [(Change, f64); 2] = [(SMALL, 0.005), (LARGE, 0.1)];

/// The goal for memory with 40,000 files, in bytes.
const MEMORY_WANTED: u64 = 32 << 20;

/// The goal for [`QUICK`], in seconds.
const QUICK_MAX: f64 = 0.3;
