//! The families of metrics that a page has: names, types and names of labels.

use std::collections::{BTreeMap, BTreeSet};

/// A line for each family, sorted: its name and type, and the labels of its samples.
pub fn families(page: &str) -> String {
    let mut families: BTreeMap<&str, (&str, BTreeSet<&str>)> = BTreeMap::new();
    for line in page.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.split_once(' ').unwrap();
            families.insert(name, (kind, BTreeSet::new()));
        }
    }
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (sample, labels) = match line.split_once('{') {
            None => (line.split_once(' ').unwrap().0, ""),
            Some((sample, rest)) => (sample, rest.split_once('}').unwrap().0),
        };
        let suffixes = ["", "_total", "_bucket", "_sum", "_count", "_created", "_info"];
        let of_family = |suffix: &&str| {
            sample.strip_suffix(*suffix).is_some_and(|name| families.contains_key(name))
        };
        let suffix = suffixes.iter().find(|suffix| of_family(suffix));
        let name = sample.strip_suffix(*suffix.unwrap_or_else(|| panic!("{line}"))).unwrap();
        let (_, known) = families.get_mut(name).unwrap();
        // No value of a label has a quote or a comma here.
        known.extend(labels.split(',').filter_map(|label| Some(label.split_once('=')?.0)));
    }
    let mut text = String::new();
    for (name, (kind, labels)) in families {
        let labels: Vec<&str> = labels.into_iter().collect();
        text.push_str(&format!("  {name}{{{}}} {kind}\n", labels.join(", ")));
    }
    text
}
