//! Decides how often the passes run, and whether the scanner is stalled. The budgets of
//! [`crate::limits`] hold how much the passes use in the meantime.
//!
//! A pass is stalled if nothing has moved for two of its periods, for example because a disk or a
//! network file-system hangs; or if it moves and still has not ended after two of its periods, so
//! that changes are noticed late. Nobody knows how long the first pass takes: it only has to move.
// tidy: core

use std::fmt;
use std::time::Duration;

use model::path::TreePath;

/// The shortest sleep. Shorter ones are added up.
pub const REST_MIN: Duration = Duration::from_millis(20);

/// How often the scanner works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// A metadata pass starts this many times the processor time of the last one after it ended:
    /// 250 is 0.4 % of a core. An idle subd shall take half a per cent with all that it does.
    pub metadata_interval_factor: u32,
    /// The shortest time between two metadata passes.
    pub metadata_interval_min: Duration,
    /// The longest time between two metadata passes.
    pub metadata_interval_max: Duration,
    /// How long a metadata pass may read files; each is read for `reading_min` in any case. What is
    /// not read then counts as different from any image, and the next pass reads on.
    pub reading_max: Duration,
    /// The same for the first pass, which reads all files.
    pub first_reading_max: Duration,
    pub reading_min: Duration,
    /// A directory that has more entries in the scope is left alone.
    pub directory_entries_max: usize,
    /// The time between two content passes.
    pub content_pause: Duration,
    /// The time between two media passes.
    pub media_pause: Duration,
    /// The shortest time without progress that counts as a stall, because a sleeping disk takes
    /// seconds to wake.
    pub stall_min: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            metadata_interval_factor: 250,
            metadata_interval_min: Duration::from_secs(1),
            metadata_interval_max: Duration::from_secs(10 * 60),
            reading_max: Duration::from_secs(10 * 60),
            first_reading_max: Duration::from_secs(24 * 60 * 60),
            reading_min: Duration::from_secs(1),
            directory_entries_max: 2_000_000,
            content_pause: Duration::from_secs(15 * 60),
            media_pause: Duration::from_secs(60 * 60),
            stall_min: Duration::from_secs(10),
        }
    }
}

impl Pace {
    /// Returns how long to wait after a metadata pass that took `cpu` of processor time without
    /// hashing.
    pub fn metadata_interval(&self, cpu: Duration) -> Duration {
        cpu.saturating_mul(self.metadata_interval_factor)
            .max(self.metadata_interval_min)
            .min(self.metadata_interval_max)
    }

    /// Returns how long a metadata pass may read files.
    pub fn reading_max(&self, is_first: bool) -> Duration {
        if is_first { self.first_reading_max } else { self.reading_max }
    }

    /// Returns how long a pass may take, or make no progress, that starts `interval` after the one
    /// before it, which took `took`: two of its periods.
    pub fn stall_limit(&self, interval: Duration, took: Duration) -> Duration {
        interval.saturating_add(took).saturating_mul(2).max(self.stall_min)
    }
}

/// A kind of pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassKind {
    Metadata,
    /// Hashes every file, through the page cache.
    Content,
    /// Hashes every file, around the page cache.
    Media,
    /// A scan with other settings.
    Preview,
}

impl fmt::Display for PassKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Metadata => "metadata pass",
            Self::Content => "content pass",
            Self::Media => "media pass",
            Self::Preview => "scan for a preview",
        })
    }
}

/// The work of the scanner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentWork {
    pub pass: PassKind,
    /// The path that it works on.
    pub path: TreePath,
    /// When it began, since the start of the scanner.
    pub began: Duration,
    /// How long it may take, or make no progress.
    pub limit: Duration,
    /// True if it may take any time while it makes progress.
    pub may_be_long: bool,
}

/// The state of a watcher between two checks.
#[derive(Clone, Debug, Default)]
pub struct StallDetector {
    moves: u64,
    since: Duration,
    raised: Option<String>,
}

impl StallDetector {
    /// Reads the status of the scanner at the time `now` after its start, when it had moved so many
    /// times and was at `work`, or at nothing. Says what it is at if it stands still; the text
    /// stays the same until it does not.
    pub fn check(
        &mut self,
        now: Duration,
        moves: u64,
        work: Option<&CurrentWork>,
    ) -> Option<String> {
        if moves != self.moves || work.is_none() {
            self.moves = moves;
            self.since = now;
        }
        let stands = now.saturating_sub(self.since);
        let stalled = work.filter(|work| {
            let lasts = now.saturating_sub(work.began);
            stands > work.limit || (!work.may_be_long && lasts > work.limit)
        });
        match stalled {
            None => self.raised = None,
            Some(CurrentWork { pass, path, .. }) if self.raised.is_none() => {
                self.raised = Some(format!("the {pass} is at {path}"));
            }
            Some(_) => {}
        }
        self.raised.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_than_half_a_per_cent_of_a_core_within_limits() {
        let pace = Pace::default();
        #[rustfmt::skip]
        let table = [(0, 1_000), (4, 1_000), (80, 20_000), (300, 75_000), (9_000, 600_000)];
        for (cpu, interval) in table {
            let got = pace.metadata_interval(Duration::from_millis(cpu));
            assert_eq!(got, Duration::from_millis(interval), "{cpu} ms");
        }
    }

    #[test]
    fn two_periods_are_the_limit_of_a_pass() {
        let pace = Pace::default();
        #[rustfmt::skip]
        let table = [(1_000, 5, 10_000), (16_000, 80, 32_160), (60_000, 90_000, 300_000)];
        for (interval, took, limit) in table {
            let got =
                pace.stall_limit(Duration::from_millis(interval), Duration::from_millis(took));
            assert_eq!(got, Duration::from_millis(limit), "{interval} ms");
        }
    }
}

#[cfg(test)]
mod stall_tests {
    use super::*;

    fn work(path: &str, began: u64, may_be_long: bool) -> CurrentWork {
        CurrentWork {
            pass: PassKind::Metadata,
            path: path.parse().unwrap(),
            began: Duration::from_secs(began),
            limit: Duration::from_secs(10),
            may_be_long,
        }
    }

    #[test]
    fn what_stands_still_is_named_until_it_moves() {
        let mut watch = StallDetector::default();
        let mut look = |now, moves, work: Option<&CurrentWork>| {
            watch.check(Duration::from_secs(now), moves, work)
        };
        let (first, next) = (work("/a", 5, true), work("/b", 5, true));
        let stalled = Some("the metadata pass is at /a".to_owned());
        assert_eq!(look(0, 0, None), None);
        assert_eq!(look(100, 0, None), None, "it rests");
        assert_eq!(look(101, 7, Some(&first)), None);
        assert_eq!(look(111, 7, Some(&first)), None);
        assert_eq!(look(112, 7, Some(&first)), stalled);
        assert_eq!(look(120, 7, Some(&first)), stalled);
        assert_eq!(look(121, 8, Some(&next)), None);
        assert_eq!(look(130, 9, Some(&next)), None, "the first one may be long");
    }

    #[test]
    fn what_does_not_come_to_its_end_is_named_as_it_was_first() {
        let mut watch = StallDetector::default();
        let mut look = |now, moves, work: Option<&CurrentWork>| {
            watch.check(Duration::from_secs(now), moves, work)
        };
        assert_eq!(look(15, 3, Some(&work("/a", 5, false))), None);
        let stalled = Some("the metadata pass is at /b".to_owned());
        assert_eq!(look(16, 4, Some(&work("/b", 5, false))), stalled);
        assert_eq!(look(17, 5, Some(&work("/c", 5, false))), stalled);
        assert_eq!(look(18, 6, None), None);
        assert_eq!(look(19, 7, Some(&work("/d", 18, false))), None);
    }
}
