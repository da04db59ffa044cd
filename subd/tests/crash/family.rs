//! Families of points: which are tried, how they are tried at once, and what is said of them.
//!
//! | variable | what |
//! |---|---|
//! | `CRASH_POINTS` | how many points of each family are tried; `all` for all. 24 by default |
//! | `CRASH_SEED` | which ones; the same ones by default |
//! | `CRASH_POINT` | of those only the one called so, as a failure names it; its machine is kept |

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::machine::State;

/// How many points of each family are tried if nobody says so.
const POINTS: usize = 24;

/// How many failures are shown.
const SHOWN_MAX: usize = 10;

/// Which points are tried.
#[derive(Clone, Debug)]
pub struct Sample {
    /// At most so many of each family; all if `None`.
    pub points: Option<usize>,
    /// Which ones.
    seed: u64,
    /// Only this one.
    only: Option<String>,
}

/// What became of a machine that was broken and recovered.
#[derive(Clone, Copy, Debug)]
pub struct Survived {
    /// What it looks like.
    pub state: State,
    /// How long the recovery took.
    pub recovery: Duration,
}

impl Sample {
    /// What the environment says.
    pub fn from_environment() -> Self {
        let points = match std::env::var("CRASH_POINTS").as_deref() {
            Ok("all") => None,
            Ok(text) => Some(text.parse().expect("CRASH_POINTS is a number, or all")),
            Err(_) => Some(POINTS),
        };
        let seed = std::env::var("CRASH_SEED").map_or(1, |text| text.parse().unwrap());
        Self { points, seed, only: std::env::var("CRASH_POINT").ok() }
    }

    /// True if the machine of a point that fails is to be kept.
    pub fn keeps(&self) -> bool {
        self.only.is_some()
    }

    /// The points that are tried of `all`.
    fn choose<T: Display>(&self, all: Vec<T>) -> Vec<T> {
        match (&self.only, self.points) {
            (Some(only), _) => all.into_iter().filter(|one| one.to_string() == *only).collect(),
            (None, None) => all,
            (None, Some(count)) => self.spread(all, count),
        }
    }

    /// Some `count` of `all`: spread evenly, each at random within its share.
    pub fn spread<T>(&self, all: Vec<T>, count: usize) -> Vec<T> {
        let total = all.len();
        if count >= total {
            return all;
        }
        let mut state = self.seed | 1;
        let mut random = |below: usize| {
            // Xorshift: any spread will do.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % below as u64).unwrap()
        };
        let bound = |share: usize| share * total / count;
        let chosen: Vec<usize> = (0..count)
            .map(|share| bound(share) + random(bound(share + 1) - bound(share)))
            .collect();
        let is_chosen = |index: &usize| chosen.binary_search(index).is_ok();
        all.into_iter().enumerate().filter(|(index, _)| is_chosen(index)).map(|(_, p)| p).collect()
    }

    /// Tries a sample of the points `all` of the family `name`, several at once, and says how it
    /// went.
    ///
    /// # Errors
    ///
    /// What went wrong at the first points that failed.
    pub fn enumerate<T: Display + Sync>(
        &self,
        name: &str,
        all: Vec<T>,
        attempt: impl Fn(&T, usize) -> Result<Survived, String> + Sync,
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
                    Ok(one) => survived.lock().unwrap().push((one, point)),
                    Err(why) => {
                        eprintln!("wrong: {name}, {point}");
                        failed.lock().unwrap().push(format!("{point}: {why}"));
                    }
                }
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        let (survived, failed) = (survived.into_inner().unwrap(), failed.into_inner().unwrap());
        let old = survived.iter().filter(|(one, _)| one.state == State::Old).count();
        let slowest = survived.iter().max_by_key(|(one, _)| one.recovery);
        let slowest = slowest.map_or_else(String::new, |(one, point)| {
            format!("the slowest recovery took {} ms ({point}); ", one.recovery.as_millis())
        });
        println!(
            "{name}: {} of {total} points; {old} ended old, {} new, {} wrong; {slowest}{} s; \
             CRASH_SEED={}",
            points.len(),
            survived.len() - old,
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
