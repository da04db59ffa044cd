//! The object servers from which the machines of each location fetch.
// tidy: core

use std::collections::BTreeMap;
use std::sync::Arc;

use model::mdb::{is_within, trimmed};

/// Object servers, by location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    /// The servers of each location that has servers of its own: first these, then those of wider
    /// locations, then those of all.
    by_location: BTreeMap<String, Arc<[String]>>,
    all: Arc<[String]>,
}

impl Sources {
    /// Makes the lists from servers (`host:port`) in the order in which they are tried, each for a
    /// location or for all.
    #[must_use]
    pub fn new(given: &[(Option<String>, String)]) -> Self {
        let servers_of = |location: Option<&str>| {
            let mut matching: Vec<(usize, &String)> = given
                .iter()
                .filter_map(|(at, server)| match (at.as_deref().map(trimmed), location) {
                    (None, _) => Some((0, server)),
                    (Some(at), Some(location)) => {
                        is_within(location, at).then_some((at.len(), server))
                    }
                    (Some(_), None) => None,
                })
                .collect();
            // The longest location first. The sort is stable.
            matching.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
            matching.into_iter().map(|(_, server)| server.clone()).collect::<Arc<[String]>>()
        };
        let locations = given.iter().filter_map(|(at, _)| at.as_deref().map(trimmed));
        let by_location =
            locations.map(|location| (location.to_owned(), servers_of(Some(location)))).collect();
        Self { by_location, all: servers_of(None) }
    }

    /// Returns the servers of a machine at `location`, in the order in which they are tried.
    #[must_use]
    pub fn of(&self, location: &str) -> Arc<[String]> {
        let location = trimmed(location);
        let matching = self.by_location.iter().filter(|(at, _)| is_within(location, at));
        let nearest = matching.max_by_key(|(at, _)| at.len());
        Arc::clone(nearest.map_or(&self.all, |(_, servers)| servers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_servers_come_first_and_those_of_all_last() {
        let given = [
            (None, "main:1"),
            (Some("nyc"), "nyc:1"),
            (Some("/nyc/r4/"), "rack:1"),
            (Some("nyc"), "nyc:2"),
            (None, "spare:1"),
        ];
        let given = given.map(|(at, server)| (at.map(str::to_owned), server.to_owned()));
        let sources = Sources::new(&given);
        let table = [
            ("", "main:1 spare:1"),
            ("sfo", "main:1 spare:1"),
            ("nyc2", "main:1 spare:1"),
            ("nyc", "nyc:1 nyc:2 main:1 spare:1"),
            ("nyc/r5", "nyc:1 nyc:2 main:1 spare:1"),
            ("nyc/r4/u7", "rack:1 nyc:1 nyc:2 main:1 spare:1"),
        ];
        for (location, expected) in table {
            assert_eq!(sources.of(location).join(" "), expected, "{location}");
        }
    }
}
