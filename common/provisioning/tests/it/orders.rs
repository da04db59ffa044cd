//! Waves and cycles.

use std::collections::BTreeMap;

use provisioning::order::{Cycle, Order, order};

fn of(needs: &[(&str, &[&str])]) -> Order {
    let owned: BTreeMap<&str, Vec<String>> = needs
        .iter()
        .map(|(id, needs)| (*id, needs.iter().map(|need| (*need).to_owned()).collect()))
        .collect();
    order(&owned.iter().map(|(id, needs)| (*id, needs.as_slice())).collect())
}

fn waves(waves: &[&[&str]]) -> Vec<Vec<String>> {
    let owned = |wave: &&[&str]| wave.iter().map(|id| (*id).to_owned()).collect();
    waves.iter().map(owned).collect()
}

fn cycle(members: &[&str], dependants: &[&str]) -> Option<Cycle> {
    let owned = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
    Some(Cycle { members: owned(members), dependants: owned(dependants) })
}

#[test]
fn each_comes_right_after_all_that_it_needs() {
    type Row<'a> = (&'a [(&'a str, &'a [&'a str])], &'a [&'a [&'a str]]);
    #[rustfmt::skip]
    let table: [Row; 6] = [
        (&[], &[]),
        (&[("a", &[])], &[&["a"]]),
        (&[("a", &[]), ("b", &[])], &[&["a", "b"]]),
        (&[("alpha", &["beta", "gamma"]), ("beta", &["kappa"]), ("gamma", &["delta"]),
           ("kappa", &[]), ("delta", &[])],
         &[&["delta", "kappa"], &["beta", "gamma"], &["alpha"]]),
        (&[("a", &["b", "d"]), ("b", &["c"]), ("c", &["d"]), ("d", &[])],
         &[&["d"], &["c"], &["b"], &["a"]]),
        // What is not there is told of elsewhere.
        (&[("a", &["none"])], &[&["a"]]),
    ];
    for (needs, expected) in table {
        assert_eq!(of(needs), Order { waves: waves(expected), cycle: None }, "{needs:?}");
    }
}

#[test]
fn a_cycle_is_named_with_what_depends_on_it() {
    let needs: [(&str, &[&str]); 6] = [
        ("base", &[]),
        ("kappa", &["base"]),
        ("gamma", &["kappa"]),
        ("alpha", &["beta", "gamma"]),
        ("beta", &["alpha"]),
        ("delta", &["beta"]),
    ];
    let expected = Order {
        waves: waves(&[&["base"], &["kappa"], &["gamma"]]),
        cycle: cycle(&["alpha", "beta"], &["delta"]),
    };
    assert_eq!(of(&needs), expected);
    let alone = Order { waves: Vec::new(), cycle: cycle(&["a"], &[]) };
    assert_eq!(of(&[("a", &["a"])]), alone);
    // Between two cycles: it depends on one, and the other depends on it.
    let needs: [(&str, &[&str]); 5] =
        [("a", &["b"]), ("b", &["a"]), ("c", &["a"]), ("d", &["e", "c"]), ("e", &["d"])];
    let both = Order { waves: Vec::new(), cycle: cycle(&["a", "b", "d", "e"], &["c"]) };
    assert_eq!(of(&needs), both);
}
