//! Records which objects are leased to clients, and until when.
//!
//! Times are seconds on a clock that starts with the server and that nobody can set. A lease is
//! identified by the first eight bytes of the object's digest: another object with the same prefix
//! is held too, which keeps a little garbage and loses nothing. If there are more leases than
//! [`LEASES_MAX`], each further lease holds all objects until it ends.
// tidy: core

use std::collections::BTreeMap;

use model::object::ObjectId;
use serde::{Deserialize, Serialize};

/// The most leases of single objects: about 30 MB.
pub const LEASES_MAX: usize = 1 << 20;

/// How often ended leases are pruned while the table is full, in seconds.
const PRUNE_INTERVAL: u64 = 60;

/// Leases with how many seconds more they last, whatever the clocks show meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemainingLeases {
    /// By the first eight bytes of the digest.
    objects: Vec<(u64, u64)>,
    everything: u64,
}

/// The leases of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leases {
    /// The end of each lease.
    ends: BTreeMap<u64, u64>,
    /// All objects are held until then.
    everything_until: u64,
    /// The end of the longest lease that was ever given.
    longest_until: u64,
    pruned_at: u64,
}

impl Leases {
    /// Returns no leases; all objects are held for the first `seconds`.
    #[must_use]
    pub fn new(seconds: u64) -> Self {
        Self { everything_until: seconds, longest_until: seconds, ..Self::default() }
    }

    /// Returns leases that begin with what remained of former ones.
    #[must_use]
    pub fn resume(former: RemainingLeases) -> Self {
        let RemainingLeases { objects, everything } = former;
        let ends: BTreeMap<u64, u64> = objects.into_iter().collect();
        let longest_until = ends.values().copied().chain([everything]).max().unwrap_or_default();
        Self { ends, everything_until: everything, longest_until, pruned_at: 0 }
    }

    /// Returns what remains of the leases at `now`.
    #[must_use]
    pub fn remaining(&self, now: u64) -> RemainingLeases {
        let left = self.ends.iter().map(|(object, end)| (*object, end.saturating_sub(now)));
        let objects = left.filter(|(_, seconds)| *seconds > 0).collect();
        RemainingLeases { objects, everything: self.everything_held_for(now) }
    }

    /// Leases `id` for `seconds` from `now` on, unless it is leased for longer already.
    pub fn give(&mut self, now: u64, id: &ObjectId, seconds: u64) {
        self.give_below(LEASES_MAX, now, id, seconds);
    }

    fn give_below(&mut self, leases_max: usize, now: u64, id: &ObjectId, seconds: u64) {
        let until = now.saturating_add(seconds);
        self.longest_until = self.longest_until.max(until);
        if let Some(end) = self.ends.get_mut(&short(id)) {
            *end = (*end).max(until);
            return;
        }
        if self.ends.len() >= leases_max && now >= self.pruned_at.saturating_add(PRUNE_INTERVAL) {
            self.prune(now);
        }
        if self.ends.len() < leases_max {
            self.ends.insert(short(id), until);
        } else {
            self.everything_until = self.everything_until.max(until);
        }
    }

    /// Forgets leases that have ended.
    pub fn prune(&mut self, now: u64) {
        self.ends.retain(|_, end| *end > now);
        self.pruned_at = now;
    }

    /// Returns true if `id` must not be removed.
    #[must_use]
    pub fn is_leased(&self, now: u64, id: &ObjectId) -> bool {
        now < self.everything_until || self.ends.get(&short(id)).is_some_and(|end| now < *end)
    }

    /// Returns for how many seconds more all objects are held; 0 if they are not.
    #[must_use]
    pub fn everything_held_for(&self, now: u64) -> u64 {
        self.everything_until.saturating_sub(now)
    }

    /// Returns for how many seconds more any object may be held; 0 if none is.
    #[must_use]
    pub fn longest_held_for(&self, now: u64) -> u64 {
        self.longest_until.saturating_sub(now)
    }

    /// Returns how many objects are leased, including ended leases that were not pruned.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ends.len()
    }
}

/// Returns the short id of an object, for use where a collision only keeps an unneeded object.
#[must_use]
pub fn short(id: &ObjectId) -> u64 {
    let first = id.digest().first_chunk().expect("a digest has at least 32 bytes");
    u64::from_be_bytes(*first)
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    fn id(number: u8) -> ObjectId {
        Algorithm::Blake3.digest(&[number])
    }

    #[test]
    fn a_lease_holds_until_it_ends_and_is_never_shortened() {
        let mut leases = Leases::default();
        leases.give(100, &id(1), 50);
        leases.give(110, &id(1), 10);
        assert!(leases.is_leased(149, &id(1)));
        assert!(!leases.is_leased(150, &id(1)));
        assert!(!leases.is_leased(100, &id(2)));
        leases.give(149, &id(1), 50);
        assert!(leases.is_leased(198, &id(1)));
        assert_eq!((leases.longest_held_for(150), leases.longest_held_for(500)), (49, 0));
        assert_eq!(leases.count(), 1);
        leases.prune(199);
        assert_eq!(leases.count(), 0);
    }

    #[test]
    fn after_a_start_everything_is_held_for_a_while() {
        let leases = Leases::new(60);
        assert!(leases.is_leased(59, &id(1)));
        assert!(!leases.is_leased(60, &id(1)));
        assert_eq!((leases.everything_held_for(20), leases.everything_held_for(60)), (40, 0));
        assert_eq!(leases.longest_held_for(20), 40);
    }

    #[test]
    fn what_remains_is_resumed() {
        let mut leases = Leases::new(110);
        leases.give(0, &id(1), 100);
        leases.give(100, &id(2), 50);
        let remaining = leases.remaining(105);
        let resumed = Leases::resume(remaining.clone());
        assert_eq!(resumed.remaining(0), remaining);
        let held =
            [4, 5, 44, 45].map(|now| [1, 2].map(|number| resumed.is_leased(now, &id(number))));
        assert_eq!(held, [[true, true], [false, true], [false, true], [false, false]]);
        assert_eq!((resumed.longest_held_for(0), resumed.everything_held_for(0)), (45, 5));
        assert_eq!(leases.remaining(1_000), RemainingLeases::default());
    }

    #[test]
    fn a_lease_too_many_holds_everything() {
        let mut leases = Leases::default();
        for number in 0..3 {
            leases.give_below(3, 100, &id(number), 50);
        }
        assert_eq!(leases.everything_held_for(100), 0);
        leases.give_below(3, 120, &id(3), 10);
        assert_eq!((leases.everything_held_for(120), leases.count()), (10, 3));
        assert!(leases.is_leased(129, &id(9)) && !leases.is_leased(130, &id(9)));
        // A leased object needs no new entry; ended leases make room.
        leases.give_below(3, 130, &id(0), 500);
        assert_eq!(leases.everything_held_for(130), 0);
        leases.give_below(3, 200, &id(4), 500);
        assert_eq!((leases.everything_held_for(200), leases.count()), (0, 2));
        assert!(leases.is_leased(200, &id(0)) && leases.is_leased(200, &id(4)));
    }
}
