//! The shape of JSON and of metrics: the paths, families and labels, and their types.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// The types that were seen at each path.
#[derive(Default)]
pub struct Shape(BTreeMap<String, BTreeSet<&'static str>>);

impl Shape {
    /// Adds the types in `value`. Objects at the paths `maps` have keys that are data.
    pub fn add(&mut self, value: &Value, maps: &[&str]) {
        self.add_at("", value, maps);
    }

    fn add_at(&mut self, path: &str, value: &Value, maps: &[&str]) {
        let name = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let shown = if path.is_empty() { "." } else { path };
        self.0.entry(shown.to_owned()).or_default().insert(name);
        match value {
            Value::Array(elements) => {
                for element in elements {
                    self.add_at(&format!("{path}[]"), element, maps);
                }
            }
            Value::Object(fields) => {
                for (key, value) in fields {
                    let key = if maps.contains(&path) { "*" } else { key };
                    self.add_at(&format!("{path}.{key}"), value, maps);
                }
            }
            _ => {}
        }
    }

    /// Returns the types at a path, joined by `|`.
    pub fn at(&self, path: &str) -> String {
        let types: Vec<&str> = self.0.get(path).into_iter().flatten().copied().collect();
        types.join("|")
    }

    /// Returns a line for each path, sorted.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.0.keys().map(|path| format!("{path}: {}", self.at(path)))
    }
}

/// Returns a line for each family of metrics of a page, sorted: its name, the labels of its
/// samples, and its type.
pub fn metric_families(page: &str) -> String {
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
