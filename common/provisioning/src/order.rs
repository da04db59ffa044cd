//! Which resources come after which.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

/// What each resource needs, by id. What is needed and is no key itself is left out of the order.
pub type Needs<'a> = BTreeMap<&'a str, &'a [String]>;

/// The order of resources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// The resources of a wave need only those of former waves.
    pub waves: Vec<Vec<String>>,
    /// What cannot be put in order.
    pub cycle: Option<Cycle>,
}

/// Resources that need each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cycle {
    /// Those that need themselves, through others.
    pub members: Vec<String>,
    /// The others that need a member, through others.
    pub dependants: Vec<String>,
}

/// Puts resources in order: each into the first wave after all that it needs.
#[must_use]
pub fn order(needs: &Needs) -> Order {
    // How many of its needs are in no wave yet, of each; and what needs it.
    let mut missing: BTreeMap<&str, usize> = BTreeMap::new();
    let mut dependants: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (id, needed) in needs {
        let needed = needed.iter().filter(|need| needs.contains_key(need.as_str()));
        missing.insert(id, needed.clone().count());
        needed.for_each(|need| dependants.entry(need).or_default().push(id));
    }
    let ready = missing.iter().filter(|(_, count)| **count == 0);
    let mut wave: BTreeSet<&str> = ready.map(|(id, _)| *id).collect();
    let mut waves: Vec<Vec<String>> = Vec::new();
    while !wave.is_empty() {
        let mut next = BTreeSet::new();
        for id in &wave {
            missing.remove(id);
            for dependant in dependants.get(id).into_iter().flatten() {
                let Some(count) = missing.get_mut(dependant) else { continue };
                *count -= 1;
                if *count == 0 {
                    next.insert(*dependant);
                }
            }
        }
        waves.push(wave.into_iter().map(str::to_owned).collect());
        wave = next;
    }
    let left: BTreeSet<&str> = missing.into_keys().collect();
    let (members, dependants): (Vec<&str>, Vec<&str>) =
        left.iter().partition(|id| needs_itself(id, needs, &left));
    let owned = |ids: Vec<&str>| ids.into_iter().map(str::to_owned).collect();
    let cycle = (!left.is_empty())
        .then(|| Cycle { members: owned(members), dependants: owned(dependants) });
    Order { waves, cycle }
}

fn needs_itself(id: &str, needs: &Needs, among: &BTreeSet<&str>) -> bool {
    let mut seen = BTreeSet::new();
    let mut next: Vec<&str> = needs[id].iter().map(String::as_str).collect();
    while let Some(need) = next.pop() {
        if need == id {
            return true;
        }
        if among.contains(need) && seen.insert(need) {
            next.extend(needs[need].iter().map(String::as_str));
        }
    }
    false
}
