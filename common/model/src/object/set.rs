//! A set of object ids that takes little more room than their digests.
//!
//! A dominator keeps one for each machine. An id has room for the longest digest and says its
//! algorithm; here digests of one algorithm stand in one sorted list.

use std::collections::BTreeSet;

use super::ObjectId;

/// Ids of objects, each once, in their order. Looking for one takes steps in proportion to the
/// logarithm of how many there are; changes are made in one pass for many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectSet {
    blake3: Box<[[u8; 32]]>,
    sha512: Box<[[u8; 64]]>,
}

impl ObjectSet {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blake3.len() + self.sha512.len()
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if `id` is one of them.
    #[must_use]
    pub fn contains(&self, id: &ObjectId) -> bool {
        match id {
            ObjectId::Blake3(digest) => self.blake3.binary_search(digest).is_ok(),
            ObjectId::Sha512(digest) => self.sha512.binary_search(digest).is_ok(),
        }
    }

    /// All of them, sorted.
    pub fn iter(&self) -> impl Iterator<Item = ObjectId> {
        let blake3 = self.blake3.iter().copied().map(ObjectId::Blake3);
        blake3.chain(self.sha512.iter().copied().map(ObjectId::Sha512))
    }

    /// These less those in `removed`, and with those in `added`. One that is in both is there.
    #[must_use]
    pub fn changed(&self, added: &[ObjectId], removed: &[ObjectId]) -> Self {
        let removed: BTreeSet<&ObjectId> = removed.iter().collect();
        let rest = self.iter().filter(|id| !removed.contains(id));
        rest.chain(added.iter().copied()).collect()
    }
}

impl FromIterator<ObjectId> for ObjectSet {
    fn from_iter<Ids: IntoIterator<Item = ObjectId>>(ids: Ids) -> Self {
        let (mut blake3, mut sha512) = (Vec::new(), Vec::new());
        for id in ids {
            match id {
                ObjectId::Blake3(digest) => blake3.push(digest),
                ObjectId::Sha512(digest) => sha512.push(digest),
            }
        }
        Self { blake3: sorted(blake3), sha512: sorted(sha512) }
    }
}

/// Each of `digests` once, in order.
fn sorted<Digest: Ord>(mut digests: Vec<Digest>) -> Box<[Digest]> {
    digests.sort_unstable();
    digests.dedup();
    digests.into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::object::Algorithm;

    fn id(number: u8) -> ObjectId {
        let algorithm =
            if number.is_multiple_of(3) { Algorithm::Sha512 } else { Algorithm::Blake3 };
        algorithm.digest(&[number])
    }

    fn ids() -> impl Strategy<Value = Vec<ObjectId>> {
        prop::collection::vec((0_u8..30).prop_map(id), 0..40)
    }

    fn listed(ids: impl IntoIterator<Item = ObjectId>) -> Vec<ObjectId> {
        ids.into_iter().collect()
    }

    proptest! {
        #[test]
        fn it_holds_what_any_set_would(
            first in ids(),
            added in ids(),
            removed in ids(),
        ) {
            let mut want: BTreeSet<ObjectId> = first.iter().copied().collect();
            let set: ObjectSet = first.into_iter().collect();
            prop_assert_eq!(listed(set.iter()), listed(want.iter().copied()));
            let set = set.changed(&added, &removed);
            want.retain(|id| !removed.contains(id));
            want.extend(added);
            prop_assert_eq!(listed(set.iter()), listed(want.iter().copied()));
            prop_assert_eq!((set.len(), set.is_empty()), (want.len(), want.is_empty()));
            for number in 0..30 {
                prop_assert_eq!(set.contains(&id(number)), want.contains(&id(number)));
            }
        }
    }
}
