//! Families of crash points: which points are tried, several at a time, and a summary of the
//! result.
//!
//! | variable | what |
//! |---|---|
//! | `CRASH_POINTS` | how many points of each family are tried; `all` for all. 24 by default |
//! | `CRASH_SEED` | seed of the choice of points; 1 by default |
//! | `CRASH_POINT` | the name of the one point that is tried, as a failure prints it |

use std::fmt::Display;
use std::mem::take;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use model::lock::locked;
use tempfile::TempDir;

/// How many points of each family are tried by default.
const POINTS: usize = 24;

/// How many failures are shown.
const SHOWN_MAX: usize = 10;

/// A file-system in memory, so that nothing waits for a disk.
const MEMORY: &str = "/dev/shm";

/// The choice of the points that are tried.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The most points of each family; all if `None`.
    pub points: Option<usize>,
    seed: u64,
    only: Option<String>,
}

impl Sample {
    /// Reads the environment variables.
    #[must_use]
    pub fn from_environment() -> Self {
        let points = match std::env::var("CRASH_POINTS").as_deref() {
            Ok("all") => None,
            Ok(text) => Some(text.parse().expect("CRASH_POINTS is a number, or all")),
            Err(_) => Some(POINTS),
        };
        let seed = std::env::var("CRASH_SEED")
            .map_or(1, |text| text.parse().expect("CRASH_SEED is a number"));
        Self { points, seed, only: std::env::var("CRASH_POINT").ok() }
    }

    /// Returns true if only one point is tried, so that what it leaves is worth a look.
    #[must_use]
    pub fn is_one_point(&self) -> bool {
        self.only.is_some()
    }

    fn choose<T: Display>(&self, all: Vec<T>) -> Vec<T> {
        match (&self.only, self.points) {
            (Some(only), _) => all.into_iter().filter(|one| one.to_string() == *only).collect(),
            (None, None) => all,
            (None, Some(count)) => self.spread(all, count),
        }
    }

    /// Returns `count` of `all`: one at random of each of `count` equal ranges.
    #[must_use]
    pub fn spread<T>(&self, all: Vec<T>, count: usize) -> Vec<T> {
        let total = all.len();
        if count >= total {
            return all;
        }
        let mut state = self.seed | 1;
        let mut random = |below: usize| {
            // Xorshift, good enough to spread points.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % below as u64).expect("it is below a usize")
        };
        let bound = |range: usize| range * total / count;
        let chosen: Vec<usize> = (0..count)
            .map(|range| bound(range) + random(bound(range + 1) - bound(range)))
            .collect();
        let is_chosen = |index: &usize| chosen.binary_search(index).is_ok();
        all.into_iter().enumerate().filter(|(index, _)| is_chosen(index)).map(|(_, p)| p).collect()
    }

    /// Tries a sample of the points `all` of the family `name`, several at a time, and prints how
    /// many were tried and what `summary` makes of their results.
    ///
    /// # Errors
    ///
    /// The first failures, each with the name of its point.
    pub fn enumerate<P: Display + Sync, T: Send>(
        &self,
        name: &str,
        all: Vec<P>,
        attempt: impl Fn(&P, usize) -> Result<T, String> + Sync,
        summary: impl FnOnce(&[(T, &P)]) -> String,
    ) -> Result<(), String> {
        let start = Instant::now();
        let total = all.len();
        let points = self.choose(all);
        let next = AtomicUsize::new(0);
        let (survived, failed) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        let work = || {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(point) = points.get(number) else { return };
                let attempted = catch_unwind(AssertUnwindSafe(|| attempt(point, number)));
                match attempted.unwrap_or_else(|_| Err("the test panicked".to_owned())) {
                    Ok(result) => locked(&survived).push((result, point)),
                    Err(error) => {
                        eprintln!("failed: {name}, {point}");
                        locked(&failed).push(format!("{point}: {error}"));
                    }
                }
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        let (survived, failed) = (take(&mut *locked(&survived)), take(&mut *locked(&failed)));
        println!(
            "{name}: {} of {total} points; {}{} failed; {} s; CRASH_SEED={}",
            points.len(),
            summary(&survived),
            failed.len(),
            start.elapsed().as_secs(),
            self.seed,
        );
        if failed.is_empty() {
            return Ok(());
        }
        let shown = failed.iter().take(SHOWN_MAX).map(String::as_str).collect::<Vec<_>>();
        Err(format!("{} points failed, such as\n{}", failed.len(), shown.join("\n")))
    }
}

/// A temporary directory in memory that gives each attempt paths of its own.
#[derive(Debug)]
pub struct Scratch {
    directory: TempDir,
    next: AtomicUsize,
}

impl Scratch {
    /// Makes the directory.
    #[must_use]
    pub fn new() -> Self {
        let mut builder = tempfile::Builder::new();
        let directory = builder.prefix("crash.").tempdir_in(MEMORY).or_else(|_| builder.tempdir());
        Self {
            directory: directory.expect("a temporary directory is made"),
            next: AtomicUsize::new(0),
        }
    }

    /// Returns a path at which nothing exists.
    #[must_use]
    pub fn free_path(&self) -> PathBuf {
        self.directory.path().join(self.next.fetch_add(1, Ordering::Relaxed).to_string())
    }

    /// Leaves the directory for somebody to look at.
    pub fn keep(self) {
        let _path = self.directory.keep();
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// Copies a file or directory with all its attributes.
pub fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp").arg("-a").arg(from).arg(to).status().expect("cp is installed");
    assert!(status.success(), "cp");
}

/// Returns the paths in `directory`, sorted.
#[must_use]
pub fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs_err::read_dir(directory).expect("a directory is listed");
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("its entries are listed").path()).collect();
    paths.sort_unstable();
    paths
}

/// Returns the status and the output of a program in one line.
#[must_use]
pub fn in_one_line(output: &Output) -> String {
    let (out, error) = (&output.stdout, &output.stderr);
    let (out, error) = (String::from_utf8_lossy(out), String::from_utf8_lossy(error));
    format!("{}: {} {}", output.status, out.trim(), error.trim())
}
