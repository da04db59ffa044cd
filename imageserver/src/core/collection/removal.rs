//! Decides which objects may be removed: those that no image needs and no lease holds.
//!
//! A needed file is identified by the first eight bytes of its digest, so an object with the same
//! prefix stays too. A directory is identified by nearly all of its digest: a directory that is
//! mistaken for another one would not be walked, and the objects that it needs would be lost.
// tidy: core

use std::collections::{BTreeSet, BinaryHeap};

use model::object::ObjectId;

use super::leases::{Leases, short};

/// The objects needed by the images that were walked.
#[derive(Clone, Debug, Default)]
pub struct WalkedImages {
    /// The objects needed by the images that were walked.
    pub needed: NeededObjects,
    /// How many images had been added when the last of them was walked.
    pub additions: u64,
}

/// The decision about an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalDecision {
    /// The object is removed.
    Remove,
    /// An image needs the object.
    Needed,
    /// A client has a lease on the object.
    Leased,
    /// An image that was added since must be walked first.
    WalkAgain,
}

/// Decides about `id` at `now`, when `additions` images have been added. No image may be added and
/// no lease given until the decision is carried out.
#[must_use]
pub fn decide(
    knowledge: &WalkedImages,
    additions: u64,
    leases: &Leases,
    now: u64,
    id: &ObjectId,
) -> RemovalDecision {
    if additions != knowledge.additions {
        RemovalDecision::WalkAgain
    } else if knowledge.needed.contains(id) {
        RemovalDecision::Needed
    } else if leases.is_leased(now, id) {
        RemovalDecision::Leased
    } else {
        RemovalDecision::Remove
    }
}

/// A prefix of a digest that is long enough to rule out collisions.
const STRONG_BYTES: usize = 32;

/// The objects that images need. Takes about 14 bytes for each.
#[derive(Clone, Debug, Default)]
pub struct NeededObjects {
    needed: BTreeSet<u64>,
    walked: BTreeSet<[u8; STRONG_BYTES]>,
}

impl NeededObjects {
    /// Records that an image needs `id`.
    pub fn add(&mut self, id: &ObjectId) {
        self.needed.insert(short(id));
    }

    /// Records that an image needs the directory `id`. Returns true if the directory must be
    /// walked.
    pub fn add_directory(&mut self, id: &ObjectId) -> bool {
        self.add(id);
        let strong = id.digest().first_chunk().expect("a digest has at least 32 bytes");
        self.walked.insert(*strong)
    }

    /// Returns true if an image needs `id`, or an object with the same prefix.
    #[must_use]
    pub fn contains(&self, id: &ObjectId) -> bool {
        self.needed.contains(&short(id))
    }
}

/// The most candidates that are remembered: about 25 MB.
pub const REMEMBERED_MAX: usize = 250_000;

/// An object that may be removed. The order is that of removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// When the file was last changed, in nanoseconds by the file-system's clock. Only orders the
    /// candidates: a wrong clock removes nothing that is needed.
    pub stored: i128,
    pub id: ObjectId,
    /// The space that it takes, in bytes.
    pub bytes: u64,
}

/// The oldest of the offered candidates.
#[derive(Debug)]
pub struct OldestObjects {
    heap: BinaryHeap<Candidate>,
    limit: usize,
    is_complete: bool,
}

impl OldestObjects {
    /// Returns a selection of at most `limit` candidates.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { heap: BinaryHeap::new(), limit, is_complete: true }
    }

    /// Remembers `candidate`, unless enough older ones are known.
    pub fn offer(&mut self, candidate: Candidate) {
        self.heap.push(candidate);
        if self.heap.len() > self.limit {
            self.is_complete = false;
            self.heap.pop();
        }
    }

    /// Returns true if all offered candidates are remembered.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns the remembered candidates, the oldest first.
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
    fn only_what_is_known_to_be_garbage_goes() {
        let [needed, leased, both, none] =
            [1, 2, 3, 4].map(|byte| Algorithm::Blake3.digest(&[byte]));
        let mut knowledge = WalkedImages { additions: 5, ..WalkedImages::default() };
        let mut leases = Leases::default();
        for id in [needed, both] {
            knowledge.needed.add(&id);
        }
        for id in [leased, both] {
            leases.give(0, &id, 10);
        }
        #[rustfmt::skip]
        let table = [
            (needed, 5, 0, RemovalDecision::Needed), (needed, 5, 10, RemovalDecision::Needed),
            (leased, 5, 9, RemovalDecision::Leased), (leased, 5, 10, RemovalDecision::Remove),
            (both, 5, 9, RemovalDecision::Needed), (both, 5, 10, RemovalDecision::Needed),
            (none, 5, 0, RemovalDecision::Remove), (none, 6, 0, RemovalDecision::WalkAgain),
        ];
        for (id, additions, now, verdict) in table {
            assert_eq!(decide(&knowledge, additions, &leases, now, &id), verdict);
        }
    }

    #[test]
    fn a_directory_is_entered_once() {
        let mut needed = NeededObjects::default();
        let [file, directory, other] = [1, 2, 3].map(|byte| Algorithm::Blake3.digest(&[byte]));
        needed.add(&file);
        assert!(needed.add_directory(&directory));
        assert!(!needed.add_directory(&directory));
        assert!(needed.contains(&file) && needed.contains(&directory) && !needed.contains(&other));
    }

    #[test]
    fn objects_that_begin_alike_are_kept_and_directories_that_do_are_told_apart() {
        let mut needed = NeededObjects::default();
        let (mut one, mut two) = ([7; 32], [7; 32]);
        (one[31], two[31]) = (1, 2);
        let (one, two) = (ObjectId::Blake3(one), ObjectId::Blake3(two));
        assert!(needed.add_directory(&one));
        assert!(needed.contains(&two));
        assert!(needed.add_directory(&two));
    }

    #[test]
    fn the_oldest_are_remembered_in_order() {
        let candidate = |stored: i128| {
            let id = Algorithm::Blake3.digest(&stored.to_le_bytes());
            Candidate { stored, id, bytes: 1 }
        };
        let times = [5, 3, 9, -1, 7, 3, 8];
        let mut all = OldestObjects::new(7);
        let mut some = OldestObjects::new(3);
        for stored in times {
            all.offer(candidate(stored));
            some.offer(candidate(stored));
        }
        assert_eq!((all.is_complete(), some.is_complete()), (true, false));
        let stored = |oldest: OldestObjects| -> Vec<i128> {
            oldest.into_vec().into_iter().map(|candidate| candidate.stored).collect()
        };
        assert_eq!(stored(some), [-1, 3, 3]);
        assert_eq!(stored(all), [-1, 3, 3, 5, 7, 8, 9]);
    }
}
