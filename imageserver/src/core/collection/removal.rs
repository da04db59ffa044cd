//! Whether one object may be removed now.
// tidy: core

use model::object::ObjectId;

use super::leases::Leases;
use crate::core::collection::needed_objects::Marks;

/// What is known of the images, and when it was.
#[derive(Clone, Debug, Default)]
pub struct Knowledge {
    /// What the images need that were walked.
    pub marks: Marks,
    /// How many images had been added when the last of them was walked.
    pub additions: u64,
}

/// What is to become of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes.
    Remove,
    /// An image needs it.
    Needed,
    /// It is promised to a caller.
    Leased,
    /// An image was added since, which must be walked first.
    WalkAgain,
}

/// Decides over `id` at `now`, when `additions` images have been added. Nothing is added, and no
/// lease given, until what was decided is done.
#[must_use]
pub fn decide(
    knowledge: &Knowledge,
    additions: u64,
    leases: &Leases,
    now: u64,
    id: &ObjectId,
) -> Verdict {
    if additions != knowledge.additions {
        Verdict::WalkAgain
    } else if knowledge.marks.needs(id) {
        Verdict::Needed
    } else if leases.hold(now, id) {
        Verdict::Leased
    } else {
        Verdict::Remove
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
        let mut knowledge = Knowledge { additions: 5, ..Knowledge::default() };
        let mut leases = Leases::default();
        for id in [needed, both] {
            knowledge.marks.need(&id);
        }
        for id in [leased, both] {
            leases.give(0, &id, 10);
        }
        #[rustfmt::skip]
        let table = [
            (needed, 5, 0, Verdict::Needed), (needed, 5, 10, Verdict::Needed),
            (leased, 5, 9, Verdict::Leased), (leased, 5, 10, Verdict::Remove),
            (both, 5, 9, Verdict::Needed), (both, 5, 10, Verdict::Needed),
            (none, 5, 0, Verdict::Remove), (none, 6, 0, Verdict::WalkAgain),
        ];
        for (id, additions, now, verdict) in table {
            assert_eq!(decide(&knowledge, additions, &leases, now, &id), verdict);
        }
    }
}
