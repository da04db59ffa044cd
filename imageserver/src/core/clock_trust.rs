//! Whether the time of day may be believed when images are to expire.
//!
//! A clock that is set wrong by a year would expire all images at once. So the time of day is held
//! against a clock that nobody can set and that runs on while the machine sleeps. What the two
//! differ by is expected to stay: it may drift by as much as clocks are disciplined, but not jump.
//! After a jump nothing expires until an operator says that the new time is right, or until the
//! old one is back and has stayed for a while.
//!
//! A restart of the server changes nothing, as what was expected is kept. After a restart of the
//! machine the other clock begins anew; the time of day must then be later than it was, and not by
//! more than machines are usually off.
// tidy: core

/// How far the two clocks may be off from what is expected, in seconds.
const TOLERANCE: i64 = 60;

/// By how much the time of day may gain or lose: one second in so many.
const DRIFT: i64 = 1_000;

/// For how long a machine may be off without being asked about, in seconds.
const OFF_MAX: i64 = 30 * 24 * 3_600;

/// What both clocks show, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The time of day, since 1970.
    pub wall: i64,
    /// Since the machine was started, sleep included.
    pub since_boot: i64,
}

impl Reading {
    fn offset(self) -> i64 {
        self.wall.saturating_sub(self.since_boot)
    }
}

/// What is kept over restarts: readings that were believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The boot in which they were made.
    pub boot_id: String,
    /// What the time of day was then.
    pub wall: i64,
    /// What it differed by from the time since boot.
    pub offset: i64,
}

/// Whether the time of day may be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// It may.
    Trusted,
    /// It looks right, but has not for long enough. For so many seconds more.
    Settling(i64),
    /// It jumped, forwards if the number of seconds is positive.
    Jumped(i64),
}

/// Watches the clocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watch {
    /// The least and the greatest difference that is expected.
    expected: (i64, i64),
    /// The difference that was seen last, and since when it has been about that.
    steady: (i64, i64),
    /// When the clocks were read last.
    read_at: i64,
    /// For how long the difference must stay, in seconds.
    settle: i64,
}

impl Watch {
    /// Begins to watch, in the boot `boot_id`.
    #[must_use]
    pub fn new(kept: Option<&Kept>, boot_id: &str, settle: i64, first: Reading) -> Self {
        let expected = match kept {
            None => (i64::MIN / 4, i64::MAX / 4),
            Some(kept) if kept.boot_id == boot_id => (kept.offset, kept.offset),
            Some(kept) => {
                let least = kept.wall.saturating_sub(first.since_boot);
                (least, least.saturating_add(OFF_MAX))
            }
        };
        let steady = (first.offset(), first.since_boot);
        Self { expected, steady, read_at: first.since_boot, settle }
    }

    /// Takes note of what the clocks show.
    pub fn read(&mut self, now: Reading) -> Trust {
        let elapsed = now.since_boot.saturating_sub(self.read_at).max(0);
        self.read_at = now.since_boot;
        let (offset, moved) = (now.offset(), now.offset().saturating_sub(self.steady.0));
        if moved.saturating_abs() > TOLERANCE {
            self.steady = (offset, now.since_boot);
        } else {
            // Whole seconds would lose the drift of short intervals: one more does no harm.
            let drift = elapsed / DRIFT + 1;
            self.steady.0 += moved.clamp(-drift, drift);
        }
        let trust = self.trust(now);
        if trust == Trust::Trusted {
            self.expected = (self.steady.0, self.steady.0);
        }
        trust
    }

    fn trust(&self, now: Reading) -> Trust {
        let (least, greatest) = self.expected;
        let offset = now.offset();
        if offset < least.saturating_sub(TOLERANCE) {
            return Trust::Jumped(offset.saturating_sub(least));
        }
        if offset > greatest.saturating_add(TOLERANCE) {
            return Trust::Jumped(offset.saturating_sub(greatest));
        }
        let steady_for = now.since_boot.saturating_sub(self.steady.1);
        match self.settle.saturating_sub(steady_for) {
            ..=0 => Trust::Trusted,
            left => Trust::Settling(left),
        }
    }

    /// Believes what the clocks show: an operator says that it is right.
    pub fn accept(&mut self, now: Reading) {
        self.read_at = now.since_boot;
        self.expected = (now.offset(), now.offset());
        self.steady = (now.offset(), now.since_boot.saturating_sub(self.settle));
    }

    /// What is to be kept if the clocks may be believed.
    #[must_use]
    pub fn keep(&self, boot_id: &str, now: Reading) -> Kept {
        Kept { boot_id: boot_id.to_owned(), wall: now.wall, offset: self.expected.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 24 * 3_600;
    const START: i64 = 1_700_000_000;

    fn at(wall: i64, since_boot: i64) -> Reading {
        Reading { wall: START + wall, since_boot }
    }

    /// A watch that trusts the clock, at 1,000 s after boot.
    fn trusting() -> Watch {
        let mut watch = Watch::new(None, "boot", 600, at(0, 0));
        assert_eq!(watch.read(at(10, 10)), Trust::Settling(590));
        assert_eq!(watch.read(at(1_000, 1_000)), Trust::Trusted);
        watch
    }

    #[test]
    fn nothing_expires_after_a_jump_until_the_clock_is_back_for_a_while() {
        for jump in [61, DAY, 365 * DAY, -61, -DAY] {
            let mut watch = trusting();
            assert_eq!(watch.read(at(1_010 + jump, 1_010)), Trust::Jumped(jump));
            // It stays so for as long as the clock does, however long that is.
            assert_eq!(watch.read(at(9_000 + jump, 9_000)), Trust::Jumped(jump));
            assert_eq!(watch.read(at(10_000, 10_000)), Trust::Settling(600));
            assert_eq!(watch.read(at(10_599, 10_599)), Trust::Settling(1));
            assert_eq!(watch.read(at(10_600, 10_600)), Trust::Trusted);
        }
        let mut watch = trusting();
        assert_eq!(watch.read(at(1_010 + 60, 1_010)), Trust::Trusted);
    }

    #[test]
    fn an_operator_may_say_that_the_new_time_is_right() {
        let mut watch = trusting();
        let jumped = at(1_010 + DAY, 1_010);
        assert_eq!(watch.read(jumped), Trust::Jumped(DAY));
        watch.accept(jumped);
        assert_eq!(watch.read(at(1_020 + DAY, 1_020)), Trust::Trusted);
        assert_eq!(watch.read(at(1_030, 1_030)), Trust::Jumped(-DAY));
    }

    #[test]
    fn a_clock_that_is_set_while_it_settles_must_settle_anew() {
        let mut watch = Watch::new(None, "boot", 600, at(0, 0));
        assert_eq!(watch.read(at(500, 500)), Trust::Settling(100));
        assert_eq!(watch.read(at(DAY, 550)), Trust::Settling(600));
        assert_eq!(watch.read(at(DAY + 600, 1_150)), Trust::Trusted);
    }

    #[test]
    fn drift_is_followed_and_small_steps_are_not_believed_for_ever() {
        let mut watch = trusting();
        // Half a millisecond in each second, for a year.
        for minute in 1..525_600 {
            let since_boot = 1_000 + 60 * minute;
            assert_eq!(
                watch.read(at(since_boot + 60 * minute / 2_000, since_boot)),
                Trust::Trusted
            );
        }
        let mut watch = trusting();
        let mut trust = Trust::Trusted;
        for step in 1..10 {
            trust = watch.read(at(1_000 + 10 * step + 50 * step, 1_000 + 10 * step));
        }
        assert!(matches!(trust, Trust::Jumped(60..)), "{trust:?}");
    }

    #[test]
    fn what_was_expected_lasts_over_restarts() {
        let kept = trusting().keep("boot", at(1_000, 1_000));
        assert_eq!(kept, Kept { boot_id: "boot".to_owned(), wall: START + 1_000, offset: START });
        #[rustfmt::skip]
        let table = [
            // boot, at start: wall, since boot; trust 600 s later
            ("boot", at(2_000, 2_000), Trust::Trusted),
            ("boot", at(2_000 + DAY, 2_000), Trust::Jumped(DAY)),
            ("boot", at(2_000 - DAY, 2_000), Trust::Jumped(-DAY)),
            ("next", at(2_000, 5), Trust::Trusted),
            ("next", at(29 * DAY, 5), Trust::Trusted),
            ("next", at(1_000 + 31 * DAY, 0), Trust::Jumped(DAY)),
            ("next", at(1_000 - DAY, 0), Trust::Jumped(-DAY)),
        ];
        for (boot, start, trust) in table {
            let mut watch = Watch::new(Some(&kept), boot, 600, start);
            let later = Reading { wall: start.wall + 600, since_boot: start.since_boot + 600 };
            assert_eq!(watch.read(later), trust, "{boot} {start:?}");
        }
    }
}
