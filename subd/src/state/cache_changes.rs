//! Records how the object cache changed, so that a poll need not report all of it.
//!
//! Bounded: a caller that knows only a forgotten generation gets the whole cache.
// tidy: core

use std::collections::{BTreeMap, VecDeque};

use model::object::ObjectId;

/// The most changes that are remembered, of all generations together.
pub const CHANGES_MAX: usize = 32_768;

/// Objects that were added and removed, sorted. An object is in at most one of the two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Objects that are there now and were not.
    pub added: Vec<ObjectId>,
    /// Objects that were there and are not now.
    pub removed: Vec<ObjectId>,
}

/// What changed in which generation.
#[derive(Debug, Default)]
pub struct ChangeLog {
    /// The generation from which on everything is remembered.
    complete_from: u64,
    entries: VecDeque<(u64, Vec<(ObjectId, bool)>)>,
    length: usize,
}

impl ChangeLog {
    /// Starts with nothing to remember at `generation`.
    pub fn new(generation: u64) -> Self {
        Self { complete_from: generation, ..Self::default() }
    }

    /// Records that `changes` (object, true if it was added) led to `generation`.
    pub fn record(&mut self, generation: u64, changes: Vec<(ObjectId, bool)>) {
        self.length += changes.len();
        self.entries.push_back((generation, changes));
        while self.length > CHANGES_MAX
            && let Some((forgotten, changes)) = self.entries.pop_front()
        {
            self.length -= changes.len();
            self.complete_from = forgotten;
        }
    }

    /// Returns what changed after `generation`; `None` if that is no longer known.
    pub fn since(&self, generation: u64) -> Option<Changes> {
        if generation < self.complete_from {
            return None;
        }
        // The first change of an object shows whether it was cached before, the last change whether
        // it is cached now.
        let mut seen: BTreeMap<ObjectId, (bool, bool)> = BTreeMap::new();
        for (_, changes) in self.entries.iter().filter(|(at, _)| *at > generation) {
            for (id, present) in changes {
                seen.entry(*id).or_insert((!present, *present)).1 = *present;
            }
        }
        let mut changes = Changes::default();
        for (id, (before, now)) in seen {
            match (before, now) {
                (false, true) => changes.added.push(id),
                (true, false) => changes.removed.push(id),
                _ => {}
            }
        }
        Some(changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> ObjectId {
        let mut digest = [0; 32];
        digest[..4].copy_from_slice(&number.to_be_bytes());
        ObjectId::Blake3(digest)
    }

    #[test]
    fn tells_what_is_different_and_not_what_happened() {
        let mut log = ChangeLog::new(5);
        log.record(6, vec![(id(1), true), (id(2), true)]);
        log.record(8, vec![(id(1), false), (id(9), false)]);
        log.record(9, vec![(id(9), true), (id(3), true)]);
        let changes = |added: &[u32], removed: &[u32]| {
            let ids = |numbers: &[u32]| numbers.iter().map(|number| id(*number)).collect();
            Some(Changes { added: ids(added), removed: ids(removed) })
        };
        assert_eq!(log.since(4), None);
        assert_eq!(log.since(5), changes(&[2, 3], &[]));
        assert_eq!(log.since(6), changes(&[3], &[1]));
        assert_eq!(log.since(7), changes(&[3], &[1]));
        assert_eq!(log.since(8), changes(&[3, 9], &[]));
        assert_eq!(log.since(9), changes(&[], &[]));
    }

    #[test]
    fn forgets_the_oldest_first() {
        let mut log = ChangeLog::new(0);
        let half = u32::try_from(CHANGES_MAX / 2).unwrap();
        for generation in 1..=3 {
            let first = u32::try_from(generation).unwrap() * half;
            log.record(generation, (first..first + half).map(|n| (id(n), true)).collect());
        }
        assert_eq!(log.since(0), None);
        assert_eq!(log.since(1).unwrap().added.len(), CHANGES_MAX);
        assert_eq!(log.since(2).unwrap().added.len(), CHANGES_MAX / 2);
    }
}
