//! The command line of `imageserver check`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use daemon::{EXIT_DONE, EXIT_FAILED, exit};
use indicatif::{ProgressBar, ProgressStyle};
use model::display::{error_chain, size};
use tool::{EXIT_DIFFERENT, Format, Output, json};

use super::{CheckOptions, CheckProgress, DIRECTORIES, check};

/// How often the progress on a terminal is updated.
const SHOW_EVERY: Duration = Duration::from_millis(200);

/// How many threads read by default: on a virtual SSD twice as fast as two, and a disk that turns
/// can put in order what it is asked.
const THREADS: usize = 8;

/// Checks a store that no server uses: reads and hashes every object, and checks that every image
/// has all its objects.
///
/// Changes nothing, unless --repair is given. A running server checks its store by itself. Stop it
/// to check all at once, or check a copy or a snapshot of the disk.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct CheckArgs {
    /// Move corrupt objects to the quarantine, so that the next upload, or a server with
    /// --repair-from, replaces them.
    #[arg(long)]
    repair: bool,

    /// How many objects are read at one time.
    #[arg(long, value_name = "N", default_value_t = THREADS)]
    threads: usize,

    /// How the result is printed.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t)]
    format: Format,
}

const EXAMPLES: &str = "\
Examples:
  # Is all there, and whole?
  imageserver check --data /var/lib/imageserver

  # Put aside what is not, then start the server and upload one image again
  imageserver check --data /var/lib/imageserver --repair

  # What is missing, for a script
  imageserver check --data /mnt/backup --format json | jq '.incomplete[].image'

Exit codes: 0 all is there and whole, 1 not all could be looked at, 2 misuse, 3 something is
missing, damaged or unknown.";

/// Checks the store in `data`, and prints what was found.
pub fn run(data: PathBuf, args: &CheckArgs) -> std::process::ExitCode {
    let options = CheckOptions { data, repair: args.repair, threads: args.threads };
    let progress = CheckProgress::default();
    let done = AtomicBool::new(false);
    let checked = std::thread::scope(|scope| {
        let shown = scope.spawn(|| show(&progress, &done));
        let checked = check(&options, &progress);
        done.store(true, Ordering::Release);
        shown.thread().unpark();
        checked
    });
    let findings = match checked {
        Ok(findings) => findings,
        Err(error) => return exit(EXIT_FAILED, &error_chain(&error), &[]),
    };
    let code = if findings.is_clean() { EXIT_DONE } else { EXIT_DIFFERENT };
    let text = match args.format {
        Format::Table => findings.text(),
        Format::Json => json(&findings),
    };
    Output { text, code }.print()
}

/// Shows on the standard error, if that is a terminal, how far the check is.
fn show(progress: &CheckProgress, done: &AtomicBool) {
    let bar = ProgressBar::new(DIRECTORIES);
    let template = "reading: {percent} % [{wide_bar}] {msg}, {eta} left";
    bar.set_style(ProgressStyle::with_template(template).expect("the template is a constant"));
    let load = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Relaxed);
    let mut images = 0;
    while !done.load(Ordering::Acquire) {
        std::thread::park_timeout(SHOW_EVERY);
        let bytes = load(&progress.bytes);
        let milliseconds = u64::try_from(bar.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
        let rate = size(bytes.saturating_mul(1_000) / milliseconds);
        let objects = load(&progress.objects);
        bar.set_message(match images {
            0 => format!("{objects} objects, {}, {rate}/s", size(bytes)),
            images => format!("{images} images"),
        });
        bar.set_position(load(&progress.directories).min(DIRECTORIES));
        images = load(&progress.images);
    }
    bar.finish_and_clear();
}
