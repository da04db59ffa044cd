//! Decides what may be removed from a shared bucket, and when a silent server has lost its lease.
//!
//! Two clocks count: the bucket's, from the dates of what is written, and the wall clock of the
//! server that looks. Time has passed only if both say so ([`elapsed`]): a clock that jumps ahead
//! removes nothing too early, and one that is set back only delays.
// tidy: core

use serde::{Deserialize, Serialize};

/// For how long a collector must have been silent before another takes its lease or its list, in
/// seconds. Much longer than [`GC_LEASE_SECONDS_MAX`] and than any request lasts: a bucket
/// refuses one that was signed more than a quarter of an hour ago.
pub const SILENT_SECONDS: i64 = 1_800;

/// For how long a server waits before it takes back a list of its own, which it left when it was
/// killed, in seconds: no request of the dead process is on its way by then.
pub const OWN_SECONDS: i64 = 60;

/// For how long after it was renewed a collector acts upon its turn, in seconds by a clock that
/// nobody can set and that goes on while the machine sleeps.
pub const GC_LEASE_SECONDS_MAX: i64 = 120;

/// A moment, in seconds since 1970, as two clocks show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Clocks {
    /// The time by the bucket's clock.
    pub bucket: i64,
    /// The time by the server's clock.
    pub server: i64,
}

/// Returns how many seconds have passed from `then` to `now` by both clocks.
#[must_use]
pub fn elapsed(then: Clocks, now: Clocks) -> i64 {
    let bucket = now.bucket.saturating_sub(then.bucket);
    bucket.min(now.server.saturating_sub(then.server))
}

/// The state of an object that no image needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnneededState {
    /// The date in the bucket.
    pub modified: i64,
    /// When the object was first found to be unneeded.
    pub unneeded_since: Clocks,
    /// True if a client of any server has a lease on it.
    pub is_leased: bool,
}

/// The decision about an object that no image needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketDecision {
    /// The object is removed.
    Remove,
    /// A client has a lease on the object.
    Leased,
    /// It has not been unneeded for long enough.
    Wait,
}

/// Decides over an object that must have been there, and without use, for `seconds`.
#[must_use]
pub fn decide(known: UnneededState, seconds: i64, now: Clocks) -> BucketDecision {
    let is_old = now.bucket.saturating_sub(known.modified) >= seconds;
    if known.is_leased {
        BucketDecision::Leased
    } else if is_old && elapsed(known.unneeded_since, now) >= seconds {
        BucketDecision::Remove
    } else {
        BucketDecision::Wait
    }
}

/// Returns true if a lease that was given at `given` for `seconds` may still hold.
#[must_use]
pub fn holds(given: Clocks, seconds: u32, now: Clocks) -> bool {
    elapsed(given, now) <= i64::from(seconds)
}

/// Returns true if the server `own` may take the turn that `holder` has had for `silent` seconds
/// without a word.
#[must_use]
pub fn may_take_gc_lease(own: &str, holder: Option<&str>, silent: i64) -> bool {
    match holder {
        None => true,
        // It was killed: a data directory has one server.
        Some(holder) if holder == own => true,
        Some(_) => silent > SILENT_SECONDS,
    }
}

/// Returns true if the server `own`, which removes nothing now, may take back the list that
/// `writer` has left and that is `age` seconds old.
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
        let known = |modified, since, is_leased| UnneededState {
            modified,
            unneeded_since: since,
            is_leased,
        };
        let now = Clocks { bucket: 10 * DAY, server: 20 * DAY };
        let day_ago = Clocks { bucket: 9 * DAY, server: 19 * DAY };
        #[rustfmt::skip]
        let table = [
            (known(0, day_ago, false), BucketDecision::Remove),
            (known(0, day_ago, true), BucketDecision::Leased),
            (known(9 * DAY + 1, day_ago, false), BucketDecision::Wait),
            (known(0, Clocks { bucket: 9 * DAY + 1, ..day_ago }, false), BucketDecision::Wait),
            (known(0, Clocks { server: 19 * DAY + 1, ..day_ago }, false), BucketDecision::Wait),
            // Clocks that were set back.
            (known(11 * DAY, day_ago, false), BucketDecision::Wait),
            (known(0, Clocks { bucket: 0, server: 21 * DAY }, false), BucketDecision::Wait),
            (known(0, Clocks { bucket: 11 * DAY, server: 0 }, false), BucketDecision::Wait),
        ];
        for (known, expected) in table {
            assert_eq!(decide(known, DAY, now), expected, "{known:?}");
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
        assert!(may_take_gc_lease("a", None, 0));
        assert!(may_take_gc_lease("a", Some("a"), 0));
        assert!(!may_take_gc_lease("a", Some("b"), SILENT_SECONDS));
        assert!(may_take_gc_lease("a", Some("b"), SILENT_SECONDS + 1));
        assert!(!may_withdraw("a", "a", OWN_SECONDS) && may_withdraw("a", "a", OWN_SECONDS + 1));
        assert!(!may_withdraw("a", "b", SILENT_SECONDS));
        assert!(may_withdraw("a", "b", SILENT_SECONDS + 1));
    }
}
