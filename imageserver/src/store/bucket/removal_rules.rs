//! What may be removed from a bucket that several servers share, and when a server that has gone
//! silent is given up.
//!
//! Time is that of the bucket, as it dates what is written, and beside it the time of day of the
//! server that looks. Only what both say has passed has passed ([`elapsed`]): a clock that jumps
//! ahead, of either, removes nothing too early, and one that is set back only delays.
// tidy: core

use serde::{Deserialize, Serialize};

/// For how long a collector must have been silent before another takes its turn or its list, in
/// seconds. Much longer than [`TURN_SECONDS_MAX`] and than any request lasts: a bucket refuses one
/// that was signed more than a quarter of an hour ago.
pub const SILENT_SECONDS: i64 = 1_800;

/// For how long a server waits before it takes back a list of its own, which it left when it was
/// killed, in seconds: no request of the dead process is on its way by then.
pub const OWN_SECONDS: i64 = 60;

/// For how long after it was renewed a collector acts upon its turn, in seconds by a clock that
/// nobody can set and that goes on while the machine sleeps.
pub const TURN_SECONDS_MAX: i64 = 120;

/// A moment, in seconds since 1970, as two clocks show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Clocks {
    /// That of the bucket.
    pub bucket: i64,
    /// That of the server.
    pub server: i64,
}

/// How many seconds have passed from `then` to `now` by both clocks.
#[must_use]
pub fn elapsed(then: Clocks, now: Clocks) -> i64 {
    let bucket = now.bucket.saturating_sub(then.bucket);
    bucket.min(now.server.saturating_sub(then.server))
}

/// What is known of an object that the images do not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// When the bucket dates it.
    pub modified: i64,
    /// When it was first seen that no image needs it.
    pub unneeded_since: Clocks,
    /// Some server has promised it to somebody.
    pub is_leased: bool,
}

/// What becomes of an object that the images do not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It may be removed.
    Goes,
    /// It was promised.
    Leased,
    /// It has not been without use for long enough.
    Waits,
}

/// Decides over an object that must have been there, and without use, for `seconds`.
#[must_use]
pub fn fate(known: Known, seconds: i64, now: Clocks) -> Fate {
    let is_old = now.bucket.saturating_sub(known.modified) >= seconds;
    if known.is_leased {
        Fate::Leased
    } else if is_old && elapsed(known.unneeded_since, now) >= seconds {
        Fate::Goes
    } else {
        Fate::Waits
    }
}

/// True if a lease that was given at `given` for `seconds` may still hold.
#[must_use]
pub fn holds(given: Clocks, seconds: u32, now: Clocks) -> bool {
    elapsed(given, now) <= i64::from(seconds)
}

/// True if the server `own` may take the turn that `holder` has had for `silent` seconds without a
/// word.
#[must_use]
pub fn may_take_turn(own: &str, holder: Option<&str>, silent: i64) -> bool {
    match holder {
        None => true,
        // It was killed: a data directory has one server.
        Some(holder) if holder == own => true,
        Some(_) => silent > SILENT_SECONDS,
    }
}

/// True if the server `own`, which removes nothing now, may take back the list that `writer` has
/// left and that is `age` seconds old.
#[must_use]
pub fn may_withdraw(own: &str, writer: &str, age: i64) -> bool {
    age > if own == writer { OWN_SECONDS } else { SILENT_SECONDS }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 86_400;

    fn at(seconds: i64) -> Clocks {
        Clocks { bucket: seconds, server: seconds }
    }

    #[test]
    fn what_goes_was_without_use_for_a_day_by_every_clock() {
        let known =
            |modified, since, is_leased| Known { modified, unneeded_since: since, is_leased };
        let now = Clocks { bucket: 10 * DAY, server: 20 * DAY };
        let day_ago = Clocks { bucket: 9 * DAY, server: 19 * DAY };
        #[rustfmt::skip]
        let table = [
            (known(0, day_ago, false), Fate::Goes),
            (known(0, day_ago, true), Fate::Leased),
            (known(9 * DAY + 1, day_ago, false), Fate::Waits),
            (known(0, Clocks { bucket: 9 * DAY + 1, ..day_ago }, false), Fate::Waits),
            (known(0, Clocks { server: 19 * DAY + 1, ..day_ago }, false), Fate::Waits),
            // Clocks that were set back.
            (known(11 * DAY, day_ago, false), Fate::Waits),
            (known(0, Clocks { bucket: 0, server: 21 * DAY }, false), Fate::Waits),
            (known(0, Clocks { bucket: 11 * DAY, server: 0 }, false), Fate::Waits),
        ];
        for (known, expected) in table {
            assert_eq!(fate(known, DAY, now), expected, "{known:?}");
        }
    }

    #[test]
    fn a_lease_holds_until_both_clocks_say_that_it_ended() {
        assert!(holds(at(100), 50, at(150)));
        assert!(!holds(at(100), 50, at(151)));
        assert!(holds(at(100), 50, Clocks { bucket: DAY, server: 150 }));
        assert!(holds(at(100), 50, Clocks { bucket: 150, server: DAY }));
    }

    #[test]
    fn who_is_silent_for_long_is_given_up() {
        assert!(may_take_turn("a", None, 0));
        assert!(may_take_turn("a", Some("a"), 0));
        assert!(!may_take_turn("a", Some("b"), SILENT_SECONDS));
        assert!(may_take_turn("a", Some("b"), SILENT_SECONDS + 1));
        assert!(!may_withdraw("a", "a", OWN_SECONDS) && may_withdraw("a", "a", OWN_SECONDS + 1));
        assert!(!may_withdraw("a", "b", SILENT_SECONDS));
        assert!(may_withdraw("a", "b", SILENT_SECONDS + 1));
    }
}
