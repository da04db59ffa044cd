//! Which machines selectors select, one by one and by an index of all.

use std::collections::{BTreeMap, BTreeSet};

use model::mdb::Machine;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::select;
use rollouts::selector::{HostPatterns, Selector};
use rollouts::selector_index::SelectorIndex;

const HOSTS: [&str; 4] = ["web1", "web2", "db1", "x"];
const LOCATIONS: [&str; 6] = ["", "nyc", "nyc/r1", "/nyc/r2/", "sfo", "nycx"];

fn tags() -> impl Strategy<Value = BTreeMap<String, String>> {
    btree_map(select(vec!["tier", "role"]), select(vec!["a", "b", ""]), 0..3)
        .prop_map(|tags| tags.into_iter().map(|(key, value)| (key.into(), value.into())).collect())
}

fn machine() -> impl Strategy<Value = Machine> {
    (select(&HOSTS[..]), select(&LOCATIONS[..]), tags()).prop_map(|(host, location, tags)| {
        Machine {
            hostname: host.to_owned(),
            location: location.to_owned(),
            tags,
            ..Machine::default()
        }
    })
}

fn selector() -> impl Strategy<Value = Selector> {
    let hosts = vec(select(vec!["web1", "web*", "db1", "[dx]*", "x"]), 0..3);
    let values = vec(select(vec!["a", "b", "a", ""]), 1..4);
    let tags = btree_map(select(vec!["tier", "role"]), values, 0..3);
    (hosts, vec(select(&LOCATIONS[..]), 0..3), tags).prop_map(|(hosts, locations, tags)| {
        let owned = |texts: Vec<&str>| texts.into_iter().map(str::to_owned).collect::<Vec<_>>();
        Selector {
            hosts: HostPatterns::new(owned(hosts)),
            locations: owned(locations),
            tags: tags.into_iter().map(|(key, values)| (key.to_owned(), owned(values))).collect(),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 2_000,
        ..Default::default()
    })]

    #[test]
    fn an_index_finds_each_selector_once(
        selectors in vec(selector(), 0..8),
        machine in machine(),
    ) {
        let index = SelectorIndex::new(selectors.iter().zip(0..));
        let found = index.selecting(&machine);
        let one_by_one = selectors.iter().zip(0..).filter(|(one, _)| one.selects(&machine));
        let expected: BTreeSet<usize> = one_by_one.map(|(_, number)| number).collect();
        prop_assert_eq!(found.len(), expected.len(), "twice: {:?}", found);
        prop_assert_eq!(BTreeSet::from_iter(found), expected);
    }
}
