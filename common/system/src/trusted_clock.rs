//! Finds out whether the wall clock is right enough to delete by age.
//!
//! A clock that is a year ahead would make everything old at once. So the wall clock is compared
//! with a clock that nobody can set and that runs on while the machine sleeps. The difference may
//! drift as clocks are disciplined, but must not jump. After a jump the clock is not trusted until
//! an operator accepts the new time, or until the old time is back and stays for a while.
//!
//! The difference is saved, so a restart of the daemon changes nothing. After a reboot the other
//! clock begins at zero; the wall clock must then be later than the saved one, by no more than
//! machines are usually off.

use model::tree::Time;
use serde::{Deserialize, Serialize};

use crate::clock::{since_boot, wall};

/// How often the clock is saved, in seconds.
const SAVE_INTERVAL: i64 = 300;

/// The tolerated deviation of the difference between the clocks, in seconds.
const TOLERANCE: i64 = 60;

/// The tolerated drift: one second in so many.
const DRIFT: i64 = 1_000;

/// The longest accepted time that a machine is off, in seconds.
const OFF_MAX: i64 = 30 * 24 * 3_600;

/// The readings of both clocks, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// The time of day, in seconds since 1970.
    pub wall: i64,
    /// The time since the machine was started, sleep included.
    pub since_boot: i64,
}

impl ClockReading {
    /// Reads both clocks, one after the other.
    #[must_use]
    pub fn now() -> Self {
        let since_boot = i64::try_from(since_boot().as_secs()).unwrap_or(i64::MAX);
        Self { wall: wall().seconds, since_boot }
    }

    fn offset(self) -> i64 {
        self.wall.saturating_sub(self.since_boot)
    }
}

/// The last trusted readings, which are saved over restarts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedClock {
    /// The boot in which the readings were made.
    pub boot_id: String,
    /// The time of day.
    pub wall: i64,
    /// The difference between the time of day and the time since boot.
    pub offset: i64,
}

/// Whether the time of day is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockTrust {
    /// The time of day is right.
    Trusted,
    /// The clock must stay right for that many more seconds.
    Settling(i64),
    /// The clock jumped by that many seconds.
    Jumped(i64),
}

/// Compares the clocks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ClockWatch {
    /// The least and the greatest difference that is expected.
    expected: (i64, i64),
    /// The difference that was seen last, and since when it has been about that.
    steady: (i64, i64),
    /// When the clocks were last read.
    read_at: i64,
    /// How long the difference must stay the same, in seconds.
    settle: i64,
}

impl ClockWatch {
    /// Starts to compare the clocks, in the boot `boot_id`.
    fn new(saved: Option<&SavedClock>, boot_id: &str, settle: i64, first: ClockReading) -> Self {
        let expected = match saved {
            None => (i64::MIN / 4, i64::MAX / 4),
            Some(saved) if saved.boot_id == boot_id => (saved.offset, saved.offset),
            Some(saved) => {
                let least = saved.wall.saturating_sub(first.since_boot);
                (least, least.saturating_add(OFF_MAX))
            }
        };
        let steady = (first.offset(), first.since_boot);
        Self { expected, steady, read_at: first.since_boot, settle }
    }

    /// Records what the clocks show.
    fn read(&mut self, now: ClockReading) -> ClockTrust {
        let elapsed = now.since_boot.saturating_sub(self.read_at).max(0);
        self.read_at = now.since_boot;
        let (offset, moved) = (now.offset(), now.offset().saturating_sub(self.steady.0));
        if moved.saturating_abs() > TOLERANCE {
            self.steady = (offset, now.since_boot);
        } else {
            // Rounded up, because whole seconds would lose the drift of short intervals.
            let drift = elapsed / DRIFT + 1;
            self.steady.0 += moved.clamp(-drift, drift);
        }
        let trust = self.trust(now);
        if trust == ClockTrust::Trusted {
            self.expected = (self.steady.0, self.steady.0);
        }
        trust
    }

    fn trust(&self, now: ClockReading) -> ClockTrust {
        let (least, greatest) = self.expected;
        let offset = now.offset();
        if offset < least.saturating_sub(TOLERANCE) {
            return ClockTrust::Jumped(offset.saturating_sub(least));
        }
        if offset > greatest.saturating_add(TOLERANCE) {
            return ClockTrust::Jumped(offset.saturating_sub(greatest));
        }
        let steady_for = now.since_boot.saturating_sub(self.steady.1);
        match self.settle.saturating_sub(steady_for) {
            ..=0 => ClockTrust::Trusted,
            left => ClockTrust::Settling(left),
        }
    }

    /// Accepts the clocks as they are, as an operator requests.
    fn accept(&mut self, now: ClockReading) {
        self.read_at = now.since_boot;
        self.expected = (now.offset(), now.offset());
        self.steady = (now.offset(), now.since_boot.saturating_sub(self.settle));
    }

    /// Returns the readings to save if the clocks are trusted.
    fn saved(&self, boot_id: &str, now: ClockReading) -> SavedClock {
        SavedClock { boot_id: boot_id.to_owned(), wall: now.wall, offset: self.expected.0 }
    }
}

/// What a daemon does only while it trusts the clock; for its log.
#[derive(Clone, Copy, Debug)]
pub struct ClockUse {
    /// What does not happen after a jump, such as `no image expires`.
    pub stopped: &'static str,
    /// What happens again, such as `images expire`.
    pub resumed: &'static str,
    /// The command that accepts the clock.
    pub accept: &'static str,
}

/// The wall clock, and whether it is trusted.
#[derive(Debug)]
pub struct TrustedClock {
    clock_use: ClockUse,
    boot_id: String,
    watch: ClockWatch,
    trust: ClockTrust,
    /// When the clock was saved, in seconds since boot.
    saved_at: Option<i64>,
}

impl TrustedClock {
    /// Begins to compare the clocks. The clock is trusted when they have agreed for `settle`
    /// seconds.
    #[must_use]
    pub fn new(clock_use: ClockUse, saved: Option<&SavedClock>, settle: i64) -> Self {
        let boot_id = boot_id();
        let watch = ClockWatch::new(saved, &boot_id, settle, ClockReading::now());
        let trust = ClockTrust::Settling(settle);
        Self { clock_use, boot_id, watch, trust, saved_at: None }
    }

    /// Returns whether the clock was trusted when it was last read.
    #[must_use]
    pub fn trust(&self) -> ClockTrust {
        self.trust
    }

    /// Reads the clocks. Returns the time of day if it is trusted. Logs when that changes.
    pub fn read(&mut self, now: ClockReading) -> Option<Time> {
        let before = std::mem::replace(&mut self.trust, self.watch.read(now));
        let ClockUse { stopped, resumed, accept } = self.clock_use;
        match (before, self.trust) {
            (ClockTrust::Jumped(_), ClockTrust::Jumped(_)) => {}
            (_, ClockTrust::Jumped(seconds)) => tracing::error!(
                seconds,
                "the clock jumped: {stopped} until it is back, or an operator says that it is \
                 right with `{accept}`"
            ),
            (ClockTrust::Jumped(_), ClockTrust::Settling(seconds)) => {
                tracing::warn!("the clock is back: {resumed} again if it stays for {seconds} s");
            }
            (ClockTrust::Jumped(_) | ClockTrust::Settling(_), ClockTrust::Trusted) => {
                tracing::info!("the clock is trusted: {resumed}");
            }
            _ => {}
        }
        (self.trust == ClockTrust::Trusted).then_some(Time { seconds: now.wall, nanoseconds: 0 })
    }

    /// Returns what is to be saved, if the clock is trusted and was not saved lately.
    #[must_use]
    pub fn unsaved(&self, now: ClockReading) -> Option<SavedClock> {
        let is_due = self.saved_at.is_none_or(|at| now.since_boot >= at + SAVE_INTERVAL);
        let is_wanted = is_due && self.trust == ClockTrust::Trusted;
        is_wanted.then(|| self.watch.saved(&self.boot_id, now))
    }

    /// Notes that the clock was saved.
    pub fn note_saved(&mut self, now: ClockReading) {
        self.saved_at = Some(now.since_boot);
    }

    /// Trusts the clock as it is, as an operator requests. Returns by how many seconds it had
    /// jumped; 0 if it was trusted.
    pub fn accept(&mut self, now: ClockReading) -> i64 {
        let jumped = match self.watch.read(now) {
            ClockTrust::Jumped(seconds) => seconds,
            ClockTrust::Trusted | ClockTrust::Settling(_) => 0,
        };
        self.watch.accept(now);
        self.trust = ClockTrust::Trusted;
        self.saved_at = None;
        jumped
    }
}

/// Returns which boot of the machine this is. If the kernel does not say so, no other is the same.
fn boot_id() -> String {
    match std::fs::read_to_string("/proc/sys/kernel/random/boot_id") {
        Ok(id) => id.trim().to_owned(),
        Err(error) => {
            tracing::warn!("cannot read the boot id of the machine: {error}");
            format!("unknown, at {}", wall().seconds)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 24 * 3_600;
    const START: i64 = 1_700_000_000;

    fn at(wall: i64, since_boot: i64) -> ClockReading {
        ClockReading { wall: START + wall, since_boot }
    }

    /// A watch that trusts the clock, at 1,000 s after boot.
    fn trusting() -> ClockWatch {
        let mut watch = ClockWatch::new(None, "boot", 600, at(0, 0));
        assert_eq!(watch.read(at(10, 10)), ClockTrust::Settling(590));
        assert_eq!(watch.read(at(1_000, 1_000)), ClockTrust::Trusted);
        watch
    }

    #[test]
    fn the_clock_is_not_trusted_after_a_jump_until_the_clock_is_back_for_a_while() {
        for jump in [61, DAY, 365 * DAY, -61, -DAY] {
            let mut watch = trusting();
            assert_eq!(watch.read(at(1_010 + jump, 1_010)), ClockTrust::Jumped(jump));
            // It stays so for as long as the clock does, however long that is.
            assert_eq!(watch.read(at(9_000 + jump, 9_000)), ClockTrust::Jumped(jump));
            assert_eq!(watch.read(at(10_000, 10_000)), ClockTrust::Settling(600));
            assert_eq!(watch.read(at(10_599, 10_599)), ClockTrust::Settling(1));
            assert_eq!(watch.read(at(10_600, 10_600)), ClockTrust::Trusted);
        }
        let mut watch = trusting();
        assert_eq!(watch.read(at(1_010 + 60, 1_010)), ClockTrust::Trusted);
    }

    #[test]
    fn an_operator_may_say_that_the_new_time_is_right() {
        let mut watch = trusting();
        let jumped = at(1_010 + DAY, 1_010);
        assert_eq!(watch.read(jumped), ClockTrust::Jumped(DAY));
        watch.accept(jumped);
        assert_eq!(watch.read(at(1_020 + DAY, 1_020)), ClockTrust::Trusted);
        assert_eq!(watch.read(at(1_030, 1_030)), ClockTrust::Jumped(-DAY));
    }

    #[test]
    fn a_clock_that_is_set_while_it_settles_must_settle_anew() {
        let mut watch = ClockWatch::new(None, "boot", 600, at(0, 0));
        assert_eq!(watch.read(at(500, 500)), ClockTrust::Settling(100));
        assert_eq!(watch.read(at(DAY, 550)), ClockTrust::Settling(600));
        assert_eq!(watch.read(at(DAY + 600, 1_150)), ClockTrust::Trusted);
    }

    #[test]
    fn drift_is_followed_and_small_steps_are_not_believed_for_ever() {
        let mut watch = trusting();
        // Half a millisecond in each second, for a year.
        for minute in 1..525_600 {
            let since_boot = 1_000 + 60 * minute;
            assert_eq!(
                watch.read(at(since_boot + 60 * minute / 2_000, since_boot)),
                ClockTrust::Trusted
            );
        }
        let mut watch = trusting();
        let mut trust = ClockTrust::Trusted;
        for step in 1..10 {
            trust = watch.read(at(1_000 + 10 * step + 50 * step, 1_000 + 10 * step));
        }
        assert!(matches!(trust, ClockTrust::Jumped(60..)), "{trust:?}");
    }

    #[test]
    fn what_was_expected_lasts_over_restarts() {
        let saved = trusting().saved("boot", at(1_000, 1_000));
        assert_eq!(
            saved,
            SavedClock { boot_id: "boot".to_owned(), wall: START + 1_000, offset: START }
        );
        #[rustfmt::skip]
        let table = [
            // boot, at start: wall, since boot; trust 600 s later
            ("boot", at(2_000, 2_000), ClockTrust::Trusted),
            ("boot", at(2_000 + DAY, 2_000), ClockTrust::Jumped(DAY)),
            ("boot", at(2_000 - DAY, 2_000), ClockTrust::Jumped(-DAY)),
            ("next", at(2_000, 5), ClockTrust::Trusted),
            ("next", at(29 * DAY, 5), ClockTrust::Trusted),
            ("next", at(1_000 + 31 * DAY, 0), ClockTrust::Jumped(DAY)),
            ("next", at(1_000 - DAY, 0), ClockTrust::Jumped(-DAY)),
        ];
        for (boot, start, trust) in table {
            let mut watch = ClockWatch::new(Some(&saved), boot, 600, start);
            let later = ClockReading { wall: start.wall + 600, since_boot: start.since_boot + 600 };
            assert_eq!(watch.read(later), trust, "{boot} {start:?}");
        }
    }
}
