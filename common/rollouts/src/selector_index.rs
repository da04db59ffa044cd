//! Finds which of many selectors select a machine, without asking all of them.

use std::collections::{BTreeMap, BTreeSet};

use model::mdb::{Machine, trimmed};

use crate::selector::Selector;

/// A value that the record of a machine must have to be selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key<'a> {
    Host(&'a str),
    Tag(&'a str, &'a str),
    /// The first part of a location.
    Location(&'a str),
}

impl<'a> Key<'a> {
    /// Returns keys of which a machine has exactly one if it is selected; none if that is not
    /// known.
    fn all_of(selector: &'a Selector) -> BTreeSet<Self> {
        let is_name = |pattern: &String| !pattern.contains(['*', '?', '[', '{', '\\', '!']);
        let hosts = selector.hosts.patterns();
        if !hosts.is_empty() && hosts.iter().all(is_name) {
            hosts.iter().map(|name| Self::Host(name)).collect()
        } else if let Some((tag, values)) = selector.tags.first_key_value() {
            values.iter().map(|value| Self::Tag(tag, value)).collect()
        } else {
            selector.locations.iter().map(|location| Self::of_location(location)).collect()
        }
    }

    fn of_location(location: &'a str) -> Self {
        Self::Location(trimmed(location).split('/').next().unwrap_or_default())
    }

    fn all_of_machine(machine: &'a Machine) -> impl Iterator<Item = Self> {
        let tags = machine.tags.iter().map(|(tag, value)| Self::Tag(tag, value));
        tags.chain([Self::Host(&machine.hostname), Self::of_location(&machine.location)])
    }
}

/// Selectors, each with what is asked for.
#[derive(Debug)]
pub struct SelectorIndex<'a, T> {
    by_key: BTreeMap<Key<'a>, Vec<(&'a Selector, T)>>,
    /// Those that may select any machine.
    others: Vec<(&'a Selector, T)>,
}

impl<'a, T: Copy> SelectorIndex<'a, T> {
    /// Makes it of all selectors.
    pub fn new(selectors: impl IntoIterator<Item = (&'a Selector, T)>) -> Self {
        let mut index = Self { by_key: BTreeMap::new(), others: Vec::new() };
        for (selector, item) in selectors {
            let keys = Key::all_of(selector);
            if keys.is_empty() {
                index.others.push((selector, item));
            }
            for key in keys {
                index.by_key.entry(key).or_default().push((selector, item));
            }
        }
        index
    }

    /// Returns those that select the machine with this record, in no order.
    pub fn selecting(&self, machine: &Machine) -> Vec<T> {
        let keys = Key::all_of_machine(machine);
        let some = keys.filter_map(|key| self.by_key.get(&key)).flatten();
        let may = some.chain(&self.others);
        may.filter(|(selector, _)| selector.selects(machine)).map(|(_, item)| *item).collect()
    }
}
