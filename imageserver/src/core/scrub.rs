//! Decides what a scrub reads next and how fast, and which lost objects are requested when.
//!
//! A pass reads one directory of objects after the other. It is spread over the first half of the
//! period, so that it completes even if the server does not run all the time. The next pass begins
//! when the period ends. Times are wall clock times, because a pass outlasts reboots. A clock that
//! was set is noticed and at most starts a pass too early.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use model::object::ObjectId;
use serde::{Deserialize, Serialize};

/// The slowest that a pass reads, in bytes per second: a small store is done soon.
const RATE_MIN: u64 = 1_000_000;

/// The longest wait before it is asked again what is next.
const PASS_WAIT_MAX: Duration = Duration::from_secs(3_600);

/// The settings of the scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubLimits {
    /// The period in which every object is read.
    pub every: Duration,
    /// The highest rate, in bytes per second.
    pub bytes_per_second_max: u64,
}

/// The progress of a pass. Saved over restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScrubProgress {
    /// When the pass began, in seconds since 1970.
    pub began: u64,
    /// The directory of objects that is read next.
    pub next: u16,
    /// Objects that were read in the pass.
    pub objects: u64,
    /// The length of these objects together, in bytes.
    pub bytes: u64,
    /// When a pass was last completed, in seconds since 1970; 0 if none was.
    pub completed: u64,
    /// True to read as fast as allowed, because no object of a former server is trusted.
    #[serde(skip)]
    pub hurry: bool,
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubStep {
    /// Begin a pass.
    Begin,
    /// Read a directory.
    Read { directory: u16, bytes_per_second: u64 },
    /// End the pass.
    Complete,
    /// Wait, and ask again.
    Wait(Duration),
}

impl ScrubProgress {
    /// Returns a new pass.
    #[must_use]
    pub fn begin(now: u64, completed: u64) -> Self {
        Self { began: now, completed, ..Self::default() }
    }

    /// Returns true if the progress fits a store with so many directories; a file may say anything.
    #[must_use]
    pub fn is_possible(&self, directory_count: u16) -> bool {
        self.next <= directory_count
    }

    /// Returns the next step in a store of `directory_count` directories that hold `held_bytes`.
    #[must_use]
    pub fn next(
        &self,
        now: u64,
        directory_count: u16,
        held_bytes: u64,
        limits: &ScrubLimits,
    ) -> ScrubStep {
        if self.began == 0 {
            return ScrubStep::Begin;
        }
        if self.next < directory_count {
            let bytes_per_second = self.rate(now, directory_count, held_bytes, limits);
            return ScrubStep::Read { directory: self.next, bytes_per_second };
        }
        if self.completed < self.began {
            return ScrubStep::Complete;
        }
        let again = self.began.saturating_add(limits.every.as_secs());
        // If the pass began in the future, the clock was set back.
        if now >= again || now < self.began {
            return ScrubStep::Begin;
        }
        ScrubStep::Wait(Duration::from_secs(again - now).min(PASS_WAIT_MAX))
    }

    /// The rate at which what is left is read in what is left of half the period.
    fn rate(&self, now: u64, directory_count: u16, held_bytes: u64, limits: &ScrubLimits) -> u64 {
        let left = u128::from(directory_count - self.next) * u128::from(held_bytes);
        let left = u64::try_from(left / u128::from(directory_count.max(1))).unwrap_or(u64::MAX);
        let elapsed = now.saturating_sub(self.began);
        let time = (limits.every.as_secs() / 2).saturating_sub(elapsed).max(1);
        let max = limits.bytes_per_second_max.max(1);
        if self.hurry {
            return max;
        }
        (left / time).clamp(RATE_MIN.min(max), max)
    }

    /// Returns true if the pass takes longer than the period.
    #[must_use]
    pub fn is_late(&self, now: u64, directory_count: u16, limits: &ScrubLimits) -> bool {
        let elapsed = now.saturating_sub(self.began);
        self.began != 0 && self.next < directory_count && elapsed > limits.every.as_secs()
    }

    /// Records that a directory was read.
    pub fn read(&mut self, objects: u64, bytes: u64) {
        self.next += 1;
        self.objects += objects;
        self.bytes += bytes;
    }

    /// Records that all were read, and what came of it too.
    pub fn complete(&mut self, now: u64) {
        self.completed = now.max(self.began);
    }
}

/// The most objects of one request.
pub const BATCH_MAX: usize = 1_000;

/// How long to wait after the first failed request for an object.
const WAIT_MIN: Duration = Duration::from_secs(60);

/// The longest wait.
const WAIT_MAX: Duration = Duration::from_secs(3_600);

/// The failed requests for lost objects.
#[derive(Debug, Default)]
pub struct Repairs {
    /// The failed requests for each object, and the time of the next one.
    waiting: BTreeMap<ObjectId, (u32, Duration)>,
}

/// The next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepairStep {
    /// Request these objects.
    Request(Vec<ObjectId>),
    /// Wait until then, or until the lost objects change.
    WaitUntil(Duration),
    /// Wait until an object is lost.
    Wait,
}

impl Repairs {
    /// Returns what to request at `now` to get `wanted`. An object that failed once is requested
    /// alone: it may be the one that interrupts the reply.
    pub fn next(&mut self, now: Duration, wanted: &BTreeSet<ObjectId>) -> RepairStep {
        self.waiting.retain(|id, _| wanted.contains(id));
        let fresh = wanted.iter().filter(|id| !self.waiting.contains_key(id));
        let fresh: Vec<ObjectId> = fresh.take(BATCH_MAX).copied().collect();
        if !fresh.is_empty() {
            return RepairStep::Request(fresh);
        }
        let first = self.waiting.iter().min_by_key(|(_, (_, at))| *at);
        match first {
            None => RepairStep::Wait,
            Some((id, (_, at))) if *at <= now => RepairStep::Request(vec![*id]),
            Some((_, (_, at))) => RepairStep::WaitUntil(*at),
        }
    }

    /// Records that `asked` were requested; those that are still wanted have failed.
    pub fn note_requested(&mut self, now: Duration, asked: &[ObjectId]) {
        for id in asked {
            let (times, at) = self.waiting.entry(*id).or_default();
            let wait = WAIT_MIN.saturating_mul(1 << (*times).min(10)).min(WAIT_MAX);
            *times += 1;
            *at = now + wait;
        }
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    const DAY: u64 = 86_400;
    const MAX: u64 = 10_000_000;
    const LIMITS: ScrubLimits =
        ScrubLimits { every: Duration::from_secs(30 * DAY), bytes_per_second_max: MAX };

    #[test]
    fn what_is_next_and_how_fast() {
        let at = |next, completed| ScrubProgress {
            began: 1_000,
            next,
            completed,
            ..ScrubProgress::default()
        };
        let read = |directory, bytes_per_second| ScrubStep::Read { directory, bytes_per_second };
        let wait = |seconds| ScrubStep::Wait(Duration::from_secs(seconds));
        let (tera, half) = (1_000_000_000_000, 1_000 + 15 * DAY);
        let hurried = ScrubProgress { hurry: true, ..at(3, 0) };
        let early = 990 + 30 * DAY;
        #[rustfmt::skip]
        let table = [
            // name                progress             now           held      step
            ("never read",         ScrubProgress::default(), 5,            0,        ScrubStep::Begin),
            ("a small store",      at(0, 0),          1_000,        tera / 9, read(0, 1_000_000)),
            ("a large store",      at(0, 0),          1_000,        9 * tera, read(0, 6_944_444)),
            ("half of it is read", at(256, 0),        1_000,        9 * tera, read(256, 3_472_222)),
            ("too large",          at(0, 0),          1_000,        90 * tera, read(0, MAX)),
            ("half the time over", at(511, 0),        half,         tera,     read(511, MAX)),
            ("clock was set back", at(5, 0),          1,            9 * tera, read(5, 6_876_627)),
            ("all is read",        at(512, 0),        2_000,        tera,     ScrubStep::Complete),
            ("it is done",         at(512, 2_000),    2_000,        tera,     wait(3_600)),
            ("it is nearly time",  at(512, 2_000),    early,        tera,     wait(10)),
            ("it is time",         at(512, 2_000),    early + 10,   tera,     ScrubStep::Begin),
            ("done, and set back", at(512, 2_000),    1,            tera,     ScrubStep::Begin),
            ("nothing believed",   hurried,           1_000,        1,        read(3, MAX)),
        ];
        for (name, progress, now, held_bytes, step) in table {
            assert_eq!(progress.next(now, 512, held_bytes, &LIMITS), step, "{name}");
        }
    }

    #[test]
    fn a_pass_reads_every_directory_once_in_half_the_period() {
        let mut now = 7;
        let mut progress = ScrubProgress::default();
        let held_bytes: u64 = 3_000_000_000_000;
        let mut directory_count = Vec::new();
        loop {
            match progress.next(now, 512, held_bytes, &LIMITS) {
                ScrubStep::Begin => progress = ScrubProgress::begin(now, progress.completed),
                ScrubStep::Read { directory, bytes_per_second } => {
                    directory_count.push(directory);
                    now += held_bytes / 512 / bytes_per_second;
                    progress.read(10, held_bytes / 512);
                    assert!(!progress.is_late(now, 512, &LIMITS));
                }
                ScrubStep::Complete => progress.complete(now),
                ScrubStep::Wait(_) => break,
            }
        }
        assert_eq!(directory_count, (0..512).collect::<Vec<u16>>());
        assert_eq!(progress.objects, 5_120);
        let took = now - 7;
        assert!((14 * DAY..=15 * DAY).contains(&took), "{took}");
    }

    #[test]
    fn a_pass_that_takes_too_long_is_late() {
        let progress = ScrubProgress { began: 1_000, next: 3, ..ScrubProgress::default() };
        assert!(!progress.is_late(1_000 + 30 * DAY, 512, &LIMITS));
        assert!(progress.is_late(1_001 + 30 * DAY, 512, &LIMITS));
        assert!(!ScrubProgress { next: 512, ..progress }.is_late(1_001 + 30 * DAY, 512, &LIMITS));
        assert!(!ScrubProgress::default().is_late(1 << 40, 512, &LIMITS));
        assert!(progress.is_possible(512) && !progress.is_possible(2));
    }

    #[test]
    fn what_does_not_come_is_asked_for_less_and_less_often() {
        let seconds = Duration::from_secs;
        let [one, two] = [&b"1"[..], b"2"].map(|content| Algorithm::Blake3.digest(content));
        let both = BTreeSet::from([one, two]);
        let all: Vec<ObjectId> = both.iter().copied().collect();
        let mut repairs = Repairs::default();
        assert_eq!(repairs.next(seconds(0), &BTreeSet::new()), RepairStep::Wait);
        assert_eq!(repairs.next(seconds(0), &both), RepairStep::Request(all.clone()));
        repairs.note_requested(seconds(0), &all);
        // One of them came.
        let only = BTreeSet::from([one]);
        assert_eq!(repairs.next(seconds(1), &only), RepairStep::WaitUntil(seconds(60)));
        let mut waits = Vec::new();
        let mut now = seconds(60);
        for _ in 0..9 {
            assert_eq!(repairs.next(now, &only), RepairStep::Request(vec![one]));
            repairs.note_requested(now, &[one]);
            let RepairStep::WaitUntil(at) = repairs.next(now, &only) else {
                panic!("it has just been asked")
            };
            waits.push((at - now).as_secs());
            now = at;
        }
        assert_eq!(waits, [120, 240, 480, 960, 1_920, 3_600, 3_600, 3_600, 3_600]);
        // One that is lost now does not wait for the other.
        assert_eq!(repairs.next(now - seconds(9), &both), RepairStep::Request(vec![two]));
        // One that was healed and is lost again begins anew.
        assert_eq!(repairs.next(now, &BTreeSet::new()), RepairStep::Wait);
        assert_eq!(repairs.next(now, &only), RepairStep::Request(vec![one]));
    }
}
