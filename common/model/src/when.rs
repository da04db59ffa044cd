//! Times for people.

pub mod written;

use crate::tree::Time;

/// How long before `now` it was: `12 s ago`.
#[must_use]
pub fn ago(now: Time, then: Time) -> String {
    let seconds = now.seconds.saturating_sub(then.seconds).max(0);
    format!("{} ago", lasting(seconds.unsigned_abs()))
}

/// So long, roughly: `12 s`, `3 days`.
#[must_use]
pub fn lasting(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// The moment in UTC, to the second.
#[must_use]
pub fn moment(time: Time) -> String {
    jiff::Timestamp::from_second(time.seconds)
        .map_or_else(|_| format!("{} s after 1970", time.seconds), |stamp| stamp.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_rough_and_moments_exact() {
        let at = |seconds| Time { seconds, nanoseconds: 999_999_999 };
        let table = [
            (0, "0 s ago"),
            (119, "119 s ago"),
            (120, "2 min ago"),
            (7_200, "2 h ago"),
            (200_000, "2 days ago"),
            (-5, "0 s ago"),
        ];
        for (distance, text) in table {
            assert_eq!(ago(at(1_000_000), at(1_000_000 - distance)), text);
        }
        assert_eq!(moment(at(1_700_000_000)), "2023-11-14T22:13:20Z");
    }
}
