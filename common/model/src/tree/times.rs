//! What a file-system keeps of the times that are set.
//!
//! ext4 with small inodes keeps whole seconds, FAT every second one, ext3 nothing after 2038. A
//! file that gets the time of its image then shows another one, and would differ for ever. So the
//! machine finds out what its file-system makes of a time, and whoever compares a wanted time with
//! one that was read asks for [`Times::kept`] first.

use serde::{Deserialize, Serialize};

use super::Time;

/// The granularity and the range of the times of a file-system. The default keeps every time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// Times are rounded down to a multiple of this, in nanoseconds: 1 to 2,000,000,000.
    pub granularity_ns: u32,
    /// The earliest, in seconds since 1970.
    #[serde(with = "crate::wide")]
    pub first_seconds: i64,
    /// The latest, in seconds since 1970.
    #[serde(with = "crate::wide")]
    pub last_seconds: i64,
}

impl Default for Times {
    fn default() -> Self {
        Self { granularity_ns: 1, first_seconds: i64::MIN, last_seconds: i64::MAX }
    }
}

/// The granularities that file-systems have, in nanoseconds: NTFS has 100, UDF 1,000, exFAT
/// 10,000,000, ext3 a second and FAT two.
const GRANULARITIES_NS: [u32; 7] =
    [1, 100, 1_000, 1_000_000, 10_000_000, 1_000_000_000, 2_000_000_000];

impl Times {
    /// A time that shows each granularity when it is set and read back: an odd second, and every
    /// digit after it a nine.
    pub const TRIAL: Time = Time { seconds: 1_234_567_891, nanoseconds: 999_999_999 };

    /// What a file-system keeps that made `trial` of [`Times::TRIAL`], and `first` and `last` of
    /// times long ago and far ahead.
    #[must_use]
    pub fn learned(trial: Time, first: Time, last: Time) -> Self {
        let fits = |granularity_ns: &u32| {
            let times = Self { granularity_ns: *granularity_ns, ..Self::default() };
            times.kept(Self::TRIAL) == trial
        };
        let granularity_ns = GRANULARITIES_NS.into_iter().find(fits).unwrap_or(1);
        let (first_seconds, last_seconds) = (first.seconds, last.seconds);
        Self { granularity_ns, first_seconds, last_seconds }
    }

    /// What is read back of `time` after it was set.
    #[must_use]
    pub fn kept(self, time: Time) -> Time {
        let Time { seconds, nanoseconds } = time;
        if seconds <= self.first_seconds && self.first_seconds > i64::MIN {
            return Time { seconds: self.first_seconds, nanoseconds: 0 };
        }
        if seconds >= self.last_seconds && self.last_seconds < i64::MAX {
            return Time { seconds: self.last_seconds, nanoseconds: 0 };
        }
        let granularity_ns = self.granularity_ns.max(1);
        let whole = i64::from(granularity_ns / 1_000_000_000);
        match whole {
            0 => Time { seconds, nanoseconds: nanoseconds - nanoseconds % granularity_ns },
            _ => Time { seconds: seconds - seconds.rem_euclid(whole), nanoseconds: 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(seconds: i64, nanoseconds: u32) -> Time {
        Time { seconds, nanoseconds }
    }

    #[test]
    fn keeps_what_the_file_system_keeps() {
        let by = |granularity_ns| Times { granularity_ns, ..Times::default() };
        let ext3 = Times { granularity_ns: 1_000_000_000, first_seconds: -9, last_seconds: 9 };
        #[rustfmt::skip]
        let table = [
            (by(1),             time(5, 123_456_789),  time(5, 123_456_789)),
            (by(100),           time(5, 123_456_789),  time(5, 123_456_700)),
            (by(10_000_000),    time(5, 123_456_789),  time(5, 120_000_000)),
            (by(1_000_000_000), time(5, 123_456_789),  time(5, 0)),
            (by(2_000_000_000), time(5, 123_456_789),  time(4, 0)),
            (by(2_000_000_000), time(-5, 123_456_789), time(-6, 0)),
            (by(0),             time(5, 1),            time(5, 1)),
            (by(1),             time(i64::MAX, 1),     time(i64::MAX, 1)),
            (by(1),             time(i64::MIN, 1),     time(i64::MIN, 1)),
            (ext3,              time(8, 1),            time(8, 0)),
            (ext3,              time(9, 1),            time(9, 0)),
            (ext3,              time(i64::MAX, 1),     time(9, 0)),
            (ext3,              time(-10, 1),          time(-9, 0)),
        ];
        for (times, set, expected) in table {
            assert_eq!(times.kept(set), expected, "{times:?} {set:?}");
            assert_eq!(times.kept(expected), expected, "what was kept is kept again");
        }
    }

    #[test]
    fn learns_from_what_is_read_back() {
        let (first, last) = (time(-2_147_483_648, 0), time(2_147_483_647, 0));
        for granularity_ns in GRANULARITIES_NS {
            let times =
                Times { granularity_ns, first_seconds: first.seconds, last_seconds: last.seconds };
            assert_eq!(Times::learned(times.kept(Times::TRIAL), first, last), times);
        }
        assert_eq!(Times::learned(time(1, 2), first, last).granularity_ns, 1);
    }
}
