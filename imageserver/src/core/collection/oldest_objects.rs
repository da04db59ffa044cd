//! The oldest of many objects, of which only some are remembered at a time.
// tidy: core

use std::collections::BinaryHeap;

use model::object::ObjectId;

/// The most that are remembered: some 25 MB.
pub const REMEMBERED_MAX: usize = 250_000;

/// An object that may be removed. The order is that of removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// When its file was last changed, in nanoseconds of the clock that the file-system had. It
    /// only says what goes first: a clock that was wrong removes nothing that is needed.
    pub stored: i128,
    /// What it is.
    pub id: ObjectId,
    /// The space that it takes, in bytes.
    pub bytes: u64,
}

/// The oldest of those that were offered.
#[derive(Debug)]
pub struct Oldest {
    heap: BinaryHeap<Candidate>,
    limit: usize,
    is_complete: bool,
}

impl Oldest {
    /// Remembers at most `limit`.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { heap: BinaryHeap::new(), limit, is_complete: true }
    }

    /// Remembers `candidate`, unless there are enough that are older.
    pub fn offer(&mut self, candidate: Candidate) {
        self.heap.push(candidate);
        if self.heap.len() > self.limit {
            self.is_complete = false;
            self.heap.pop();
        }
    }

    /// True if all that were offered are remembered.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Those that are remembered, the oldest first.
    #[must_use]
    pub fn into_vec(self) -> Vec<Candidate> {
        self.heap.into_sorted_vec()
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn the_oldest_are_remembered_in_order() {
        let candidate = |stored: i128| {
            let id = Algorithm::Blake3.digest(&stored.to_le_bytes());
            Candidate { stored, id, bytes: 1 }
        };
        let times = [5, 3, 9, -1, 7, 3, 8];
        let mut all = Oldest::new(7);
        let mut some = Oldest::new(3);
        for stored in times {
            all.offer(candidate(stored));
            some.offer(candidate(stored));
        }
        assert_eq!((all.is_complete(), some.is_complete()), (true, false));
        let stored = |oldest: Oldest| -> Vec<i128> {
            oldest.into_vec().into_iter().map(|candidate| candidate.stored).collect()
        };
        assert_eq!(stored(some), [-1, 3, 3]);
        assert_eq!(stored(all), [-1, 3, 3, 5, 7, 8, 9]);
    }
}
