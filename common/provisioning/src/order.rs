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
///
/// Takes `waves * resources` steps.
#[must_use]
pub fn order(needs: &Needs) -> Order {
    let mut left: BTreeSet<&str> = needs.keys().copied().collect();
    let mut waves = Vec::new();
    loop {
        let is_ready = |id: &&&str| !needs[**id].iter().any(|need| left.contains(need.as_str()));
        let wave: Vec<&str> = left.iter().filter(is_ready).copied().collect();
        if wave.is_empty() {
            break;
        }
        left.retain(|id| !wave.contains(id));
        waves.push(wave.into_iter().map(str::to_owned).collect());
    }
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
