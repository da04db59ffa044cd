//! Decides which images expire, and whether the wall clock is right enough for that.
//!
//! A clock that is a year ahead would expire all images at once. So the wall clock is compared with
//! a clock that nobody can set and that runs on while the machine sleeps. The difference may drift
//! as clocks are disciplined, but must not jump. After a jump nothing expires until an operator
//! accepts the new time, or until the old time is back and stays for a while.
//!
//! The difference is saved, so a restart of the server changes nothing. After a reboot the other
//! clock begins at zero; the wall clock must then be later than the saved one, by no more than
//! machines are usually off.
// tidy: core

use model::display::utc;
use model::tree::Time;

/// The decision about an image with an expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The image has not expired.
    No,
    /// The object is removed.
    Expires,
    /// The image has expired but is in use.
    InUse,
}

/// Decides about an image that expires at `expires_at`.
#[must_use]
pub fn due(expires_at: Option<Time>, now: Time, is_held: bool) -> Due {
    match expires_at {
        Some(at) if at <= now && is_held => Due::InUse,
        Some(at) if at <= now => Due::Expires,
        _ => Due::No,
    }
}

/// The new expiry is earlier than the former one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShorterError {
    #[error(
        "it never expires, and what somebody may rely on is not taken back: delete it when \
         nobody needs it"
    )]
    Never,
    #[error(
        "it expires {}, which is later: an expiry is only put off, so delete the image if it \
         should go earlier",
        utc(*until)
    )]
    Longer { until: Time },
}

/// Returns the new expiry of an image that expires at `before` and should expire at `wanted`.
pub fn extend_expiry(
    before: Option<Time>,
    wanted: Option<Time>,
) -> Result<Option<Time>, ShorterError> {
    match (before, wanted) {
        (_, None) => Ok(None),
        (None, Some(_)) => Err(ShorterError::Never),
        (Some(until), Some(wanted)) if wanted < until => Err(ShorterError::Longer { until }),
        (Some(_), wanted) => Ok(wanted),
    }
}

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
    fn offset(self) -> i64 {
        self.wall.saturating_sub(self.since_boot)
    }
}

/// The last trusted readings, which are saved over restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
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
pub struct ClockWatch {
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
    #[must_use]
    pub fn new(
        saved: Option<&SavedClock>,
        boot_id: &str,
        settle: i64,
        first: ClockReading,
    ) -> Self {
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
    pub fn read(&mut self, now: ClockReading) -> ClockTrust {
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
    pub fn accept(&mut self, now: ClockReading) {
        self.read_at = now.since_boot;
        self.expected = (now.offset(), now.offset());
        self.steady = (now.offset(), now.since_boot.saturating_sub(self.settle));
    }

    /// Returns the readings to save if the clocks are trusted.
    #[must_use]
    pub fn saved(&self, boot_id: &str, now: ClockReading) -> SavedClock {
        SavedClock { boot_id: boot_id.to_owned(), wall: now.wall, offset: self.expected.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    #[test]
    fn an_image_goes_when_its_time_has_come_and_nobody_uses_it() {
        let table = [
            (None, false, Due::No),
            (None, true, Due::No),
            (Some(time(11)), false, Due::No),
            (Some(time(11)), true, Due::No),
            (Some(time(10)), false, Due::Expires),
            (Some(time(10)), true, Due::InUse),
        ];
        for (expires_at, is_held, expected) in table {
            assert_eq!(due(expires_at, time(10), is_held), expected);
        }
    }

    #[test]
    fn an_expiry_is_only_put_off() {
        let table = [
            (None, None, Ok(None)),
            (Some(time(10)), None, Ok(None)),
            (Some(time(10)), Some(time(10)), Ok(Some(time(10)))),
            (Some(time(10)), Some(time(11)), Ok(Some(time(11)))),
            (Some(time(10)), Some(time(9)), Err(ShorterError::Longer { until: time(10) })),
            (None, Some(time(10)), Err(ShorterError::Never)),
        ];
        for (before, wanted, expected) in table {
            assert_eq!(extend_expiry(before, wanted), expected);
        }
    }

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
    fn nothing_expires_after_a_jump_until_the_clock_is_back_for_a_while() {
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
