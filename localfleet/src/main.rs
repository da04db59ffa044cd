//! `localfleet`: the demo, and all other programs in one binary (see `programs`).

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use daemon::Jemalloc;
use localfleet::bench;
use localfleet::demo::Demo;
use localfleet::simulator;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// Run a whole fleet on this machine, and watch it converge.
///
/// Starts an imageserver, a dominator and some subds as separate processes on addresses of
/// 127.0.0.0/8, makes an image from real files of this machine, and shows how the machines get
/// it, how a machine that drifts is repaired, and how all are updated to a second version. Each
/// step is verified by comparing the trees.
///
/// Everything is kept below one temporary directory, which is removed at the end.
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:\n  localfleet\n  localfleet --once\n  \
    localfleet --image debian.tar.zst --subs 5\n  \
    localfleet demo rollout --once\n  localfleet bench\n\n\
        Needs root, because subd sets owners."
)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    fleet: FleetArguments,
}

#[derive(Clone, Args)]
struct FleetArguments {
    /// Use this archive or directory as the first version of the image.
    #[arg(long, value_name = "TAR|DIR")]
    image: Option<PathBuf>,

    /// End after the sequence: with 0 if each step was verified, else with 1.
    #[arg(long)]
    once: bool,

    /// How many subs to start: 3, or for rollouts 12, if it is not given.
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=100))]
    subs: Option<u8>,
}

#[derive(Clone, Copy, ValueEnum)]
enum DemoPart {
    /// Environments, a vote, a canary, and a bad revision that goes back by itself
    Rollout,
}

#[derive(Subcommand)]
enum Command {
    /// Show one part of the product: each step is verified by comparing the trees
    #[command(after_help = "Example: localfleet demo rollout --once")]
    Demo {
        part: DemoPart,
        #[command(flatten)]
        fleet: FleetArguments,
    },
    Bench(bench::Arguments),
    Simulate(simulator::Arguments),
    /// Write manual pages of all programs into a directory
    Man {
        /// The directory; it is made if it is not there
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

fn main() -> ExitCode {
    if let Some(code) = localfleet::programs::dispatch() {
        return code;
    }
    let arguments = Arguments::parse();
    // The simulator handles signals itself and does not need root.
    if let Some(Command::Simulate(arguments)) = arguments.command {
        return simulator::simulate(arguments);
    }
    let done = match &arguments.command {
        Some(Command::Man { directory }) => localfleet::programs::write_pages(directory),
        _ => run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "localfleet needs root: subd sets owners of files");
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The first signal sets the flag; while it is set, the next one ends the process at once.
        flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop))
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .context("cannot catch signals")?;
    }
    let binary = std::env::current_exe().context("cannot find this program")?;
    if let Some(Command::Bench(arguments)) = &arguments.command {
        let install = |programs: &Path| localfleet::programs::install(&binary, programs);
        return bench::run(arguments, install, stop);
    }
    let (part, settings) = match &arguments.command {
        Some(Command::Demo { part, fleet }) => (Some(*part), fleet),
        _ => (None, &arguments.fleet),
    };
    let subs = settings.subs.unwrap_or(if part.is_some() { 12 } else { 3 });
    println!("Preparing a fleet with {subs} subs.");
    let directory = tempfile::Builder::new()
        .prefix("localfleet-")
        .tempdir()
        .context("cannot make a temporary directory")?;
    let programs = directory.path().join("bin");
    localfleet::programs::install(&binary, &programs)?;
    let demo = Demo {
        programs,
        directory: directory.path().to_owned(),
        image: settings.image.clone(),
        subs: usize::from(subs),
        stop: Arc::clone(&stop),
    };
    let mut fleet = match part {
        Some(DemoPart::Rollout) => demo.show_rollouts()?,
        None => demo.run()?,
    };
    if !settings.once {
        println!("\nThe fleet stays up until Ctrl-C.\n\n{}", fleet.access_help());
        while !stop.load(Ordering::Relaxed) {
            fleet.check()?;
            std::thread::sleep(Duration::from_millis(200));
        }
        println!("Stopping, and removing {}.", directory.path().display());
    }
    fleet.stop()?;
    drop(fleet);
    directory.close().context("cannot remove the temporary directory")
}
