//! Groups of records, most of which have one member.
// tidy: core

use std::borrow::Borrow;
use std::collections::BTreeMap;

/// Members by the key of their group. Each group is sorted, and is removed with its last member. A
/// vector of one member reserves the memory of one, a `BTreeSet` that of eleven.
#[derive(Debug)]
pub(super) struct Groups<K, V>(BTreeMap<K, Vec<V>>);

impl<K, V> Default for Groups<K, V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord, V: Ord> Groups<K, V> {
    /// Adds a member to the group of `key`, if it is not there.
    pub(super) fn add(&mut self, key: K, member: V) {
        let group = self.0.entry(key).or_default();
        if let Err(place) = group.binary_search(&member) {
            group.reserve_exact(1);
            group.insert(place, member);
        }
    }

    /// Removes a member from the group of `key`, if it is there.
    pub(super) fn remove(&mut self, key: &K, member: &V) {
        let Some(group) = self.0.get_mut(key) else { return };
        if let Ok(place) = group.binary_search(member) {
            group.remove(place);
        }
        if group.is_empty() {
            self.0.remove(key);
        }
    }

    /// Returns the members of the group of `key`, in order.
    pub(super) fn of<Q: Ord + ?Sized>(&self, key: &Q) -> &[V]
    where
        K: Borrow<Q>,
    {
        self.0.get(key).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_in_order_and_a_group_ends_with_its_last_one() {
        let mut groups: Groups<String, u32> = Groups::default();
        for member in [3, 1, 2, 3] {
            groups.add("a".to_owned(), member);
        }
        groups.add("b".to_owned(), 7);
        assert_eq!(
            (groups.of("a"), groups.of("b"), groups.of("c")),
            (&[1, 2, 3][..], &[7][..], &[][..])
        );
        for member in [2, 9, 1, 3] {
            groups.remove(&"a".to_owned(), &member);
        }
        groups.remove(&"c".to_owned(), &1);
        let left = BTreeMap::from([("b".to_owned(), vec![7])]);
        assert_eq!(groups.0, left);
    }
}
