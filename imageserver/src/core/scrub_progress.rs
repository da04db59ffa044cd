//! How far reading the whole store is, what is read next, and how fast.
//!
//! A pass reads one directory of objects after the other. It is spread over the first half of the
//! period, so that it is done in time although the server may not always run; the next begins when
//! the period is over. Times are those of the wall clock, because a pass outlasts many starts of
//! the machine; a clock that was set is noticed, and costs at most a pass too early.
// tidy: core

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The slowest that a pass reads, in bytes per second: a small store is done soon.
const RATE_MIN: u64 = 1_000_000;

/// The longest wait before it is asked again what is next.
const WAIT_MAX: Duration = Duration::from_secs(3_600);

/// What an operator has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Within this time every object is read.
    pub every: Duration,
    /// No more than this is read, in bytes per second.
    pub bytes_per_second_max: u64,
}

/// How far a pass is. Kept over restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Course {
    /// When the pass began, in seconds since 1970.
    pub began: u64,
    /// The directory of objects that is read next.
    pub next: u16,
    /// Objects that were read in the pass.
    pub objects: u64,
    /// Their length together.
    pub bytes: u64,
    /// When a pass was last completed, in seconds since 1970; 0 if none was.
    pub completed: u64,
    /// True to read as fast as is allowed: nothing is believed to be there before.
    #[serde(skip)]
    pub hurry: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Begin a pass.
    Begin,
    /// Read a directory.
    Read {
        /// Which.
        place: u16,
        /// How fast.
        bytes_per_second: u64,
    },
    /// End the pass.
    Complete,
    /// Wait, and ask again.
    Wait(Duration),
}

impl Course {
    /// A pass that begins.
    #[must_use]
    pub fn begin(now: u64, completed: u64) -> Self {
        Self { began: now, completed, ..Self::default() }
    }

    /// True if this is a pass of a store with so many directories; a file may say anything.
    #[must_use]
    pub fn is_possible(&self, places: u16) -> bool {
        self.next <= places
    }

    /// What is to be done next in a store of `places` directories that hold `held_bytes`.
    #[must_use]
    pub fn next(&self, now: u64, places: u16, held_bytes: u64, limits: &Limits) -> Step {
        if self.began == 0 {
            return Step::Begin;
        }
        if self.next < places {
            let bytes_per_second = self.rate(now, places, held_bytes, limits);
            return Step::Read { place: self.next, bytes_per_second };
        }
        if self.completed < self.began {
            return Step::Complete;
        }
        let again = self.began.saturating_add(limits.every.as_secs());
        // A pass that began in the future: the clock was set back since.
        if now >= again || now < self.began {
            return Step::Begin;
        }
        Step::Wait(Duration::from_secs(again - now).min(WAIT_MAX))
    }

    /// The rate at which what is left is read in what is left of half the period.
    fn rate(&self, now: u64, places: u16, held_bytes: u64, limits: &Limits) -> u64 {
        let left = u128::from(places - self.next) * u128::from(held_bytes);
        let left = u64::try_from(left / u128::from(places.max(1))).unwrap_or(u64::MAX);
        let elapsed = now.saturating_sub(self.began);
        let time = (limits.every.as_secs() / 2).saturating_sub(elapsed).max(1);
        let max = limits.bytes_per_second_max.max(1);
        if self.hurry {
            return max;
        }
        (left / time).clamp(RATE_MIN.min(max), max)
    }

    /// True if the pass takes longer than the period.
    #[must_use]
    pub fn is_late(&self, now: u64, places: u16, limits: &Limits) -> bool {
        let elapsed = now.saturating_sub(self.began);
        self.began != 0 && self.next < places && elapsed > limits.every.as_secs()
    }

    /// Takes note that a directory was read.
    pub fn read(&mut self, objects: u64, bytes: u64) {
        self.next += 1;
        self.objects += objects;
        self.bytes += bytes;
    }

    /// Takes note that all were read, and what came of it too.
    pub fn complete(&mut self, now: u64) {
        self.completed = now.max(self.began);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400;
    const MAX: u64 = 10_000_000;
    const LIMITS: Limits =
        Limits { every: Duration::from_secs(30 * DAY), bytes_per_second_max: MAX };

    #[test]
    fn what_is_next_and_how_fast() {
        let at = |next, completed| Course { began: 1_000, next, completed, ..Course::default() };
        let read = |place, bytes_per_second| Step::Read { place, bytes_per_second };
        let wait = |seconds| Step::Wait(Duration::from_secs(seconds));
        let (tera, half) = (1_000_000_000_000, 1_000 + 15 * DAY);
        let hurried = Course { hurry: true, ..at(3, 0) };
        let early = 990 + 30 * DAY;
        #[rustfmt::skip]
        let table = [
            // name                course             now           held      step
            ("never read",         Course::default(), 5,            0,        Step::Begin),
            ("a small store",      at(0, 0),          1_000,        tera / 9, read(0, 1_000_000)),
            ("a large store",      at(0, 0),          1_000,        9 * tera, read(0, 6_944_444)),
            ("half of it is read", at(256, 0),        1_000,        9 * tera, read(256, 3_472_222)),
            ("too large",          at(0, 0),          1_000,        90 * tera, read(0, MAX)),
            ("half the time over", at(511, 0),        half,         tera,     read(511, MAX)),
            ("clock was set back", at(5, 0),          1,            9 * tera, read(5, 6_876_627)),
            ("all is read",        at(512, 0),        2_000,        tera,     Step::Complete),
            ("it is done",         at(512, 2_000),    2_000,        tera,     wait(3_600)),
            ("it is nearly time",  at(512, 2_000),    early,        tera,     wait(10)),
            ("it is time",         at(512, 2_000),    early + 10,   tera,     Step::Begin),
            ("done, and set back", at(512, 2_000),    1,            tera,     Step::Begin),
            ("nothing believed",   hurried,           1_000,        1,        read(3, MAX)),
        ];
        for (name, course, now, held_bytes, step) in table {
            assert_eq!(course.next(now, 512, held_bytes, &LIMITS), step, "{name}");
        }
    }

    #[test]
    fn a_pass_reads_every_directory_once_in_half_the_period() {
        let mut now = 7;
        let mut course = Course::default();
        let held_bytes: u64 = 3_000_000_000_000;
        let mut places = Vec::new();
        loop {
            match course.next(now, 512, held_bytes, &LIMITS) {
                Step::Begin => course = Course::begin(now, course.completed),
                Step::Read { place, bytes_per_second } => {
                    places.push(place);
                    now += held_bytes / 512 / bytes_per_second;
                    course.read(10, held_bytes / 512);
                    assert!(!course.is_late(now, 512, &LIMITS));
                }
                Step::Complete => course.complete(now),
                Step::Wait(_) => break,
            }
        }
        assert_eq!(places, (0..512).collect::<Vec<u16>>());
        assert_eq!(course.objects, 5_120);
        let took = now - 7;
        assert!((14 * DAY..=15 * DAY).contains(&took), "{took}");
    }

    #[test]
    fn a_pass_that_takes_too_long_is_late() {
        let course = Course { began: 1_000, next: 3, ..Course::default() };
        assert!(!course.is_late(1_000 + 30 * DAY, 512, &LIMITS));
        assert!(course.is_late(1_001 + 30 * DAY, 512, &LIMITS));
        assert!(!Course { next: 512, ..course }.is_late(1_001 + 30 * DAY, 512, &LIMITS));
        assert!(!Course::default().is_late(1 << 40, 512, &LIMITS));
        assert!(course.is_possible(512) && !course.is_possible(2));
    }
}
