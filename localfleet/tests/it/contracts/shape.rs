//! The shape of JSON: which paths there are, and of which types.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// The types that were seen at each path.
#[derive(Default)]
pub struct Shape(BTreeMap<String, BTreeSet<&'static str>>);

impl Shape {
    /// Adds what `value` has. Objects at the paths `maps` have keys that are data.
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

    /// The types at a path, in one word.
    pub fn at(&self, path: &str) -> String {
        let types: Vec<&str> = self.0.get(path).into_iter().flatten().copied().collect();
        types.join("|")
    }

    /// One line for each path, sorted.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.0.keys().map(|path| format!("{path}: {}", self.at(path)))
    }
}
