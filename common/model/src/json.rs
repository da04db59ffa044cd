//! Rules of JSON texts: comment lines, errors that name the key, one form for digests, and large
//! numbers as strings.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;

use serde::de::{DeserializeOwned, Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::JsonSchema;
use crate::display::safe_text;
use crate::unknown_keys;

/// A text that cannot be used, with the place in it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {problem}")]
pub struct KeyError {
    /// The key, as `schedule.events[1].cron`, or `file`.
    pub at: String,
    /// What is wrong, with the line where it is known.
    pub problem: String,
}

impl KeyError {
    /// Says what is wrong at a key.
    #[must_use]
    pub fn new(at: &str, problem: impl Into<String>) -> Self {
        Self { at: at.to_owned(), problem: problem.into() }
    }
}

/// Empties the comment lines of `text`, so that line numbers in errors stay right.
#[must_use]
pub fn without_comments(text: &str) -> String {
    let keep = |line: &str| {
        let start = line.trim_start();
        !start.starts_with('#') && !start.starts_with("//")
    };
    let lines: Vec<&str> =
        text.split('\n').map(|line| if keep(line) { line } else { "" }).collect();
    lines.join("\n")
}

/// Reads a JSON object.
///
/// # Errors
///
/// [`KeyError`] names the key. For a key that is unknown it has the known one that is most like it.
pub fn read_object<T: DeserializeOwned>(text: &str) -> Result<T, KeyError> {
    // Fields would be read from an array too, by their places.
    if text.trim_start().starts_with('[') {
        return Err(KeyError::new("file", "is an array, expected an object"));
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        // serde's path of the whole, and of what is no JSON.
        let at = if path == "." || path == "?" { "file" } else { &path };
        let problem = error.inner().to_string();
        let place = problem.rfind(" at line ").map_or("", |start| &problem[start..]);
        let unknown = unknown_keys::explain(&problem).map(|text| text + place);
        KeyError { at: safe_text(at, 80), problem: unknown.unwrap_or(problem) }
    })?;
    reader.end().map_err(|error| KeyError::new("file", error.to_string()))?;
    Ok(value)
}

/// Returns `value` without spaces and with sorted keys: equal values have equal texts.
#[must_use]
pub fn canonical(value: &Value) -> String {
    let mut text = String::new();
    write_canonical(value, &mut text);
    text
}

fn write_canonical(value: &Value, text: &mut String) {
    match value {
        Value::Object(fields) => {
            let sorted: BTreeMap<&String, &Value> = fields.iter().collect();
            let mut before = '{';
            for (key, value) in sorted {
                text.push(before);
                text.push_str(&Value::from(key.as_str()).to_string());
                text.push(':');
                write_canonical(value, text);
                before = ',';
            }
            text.push_str(if before == '{' { "{}" } else { "}" });
        }
        Value::Array(items) => {
            let mut before = '[';
            for value in items {
                text.push(before);
                write_canonical(value, text);
                before = ',';
            }
            text.push_str(if before == '[' { "[]" } else { "]" });
        }
        plain => text.push_str(&plain.to_string()),
    }
}

/// Writes numbers that may pass 2^53 as strings, because JavaScript and jq would round them.
///
/// For `#[serde(with = "model::json::LargeNumber")]`. Other encodings get the plain number.
#[derive(JsonSchema)]
#[schemars(inline, with = "String", extend("pattern" = "^-?[0-9]+$"))]
pub struct LargeNumber;

impl LargeNumber {
    /// Serializes a number, as text in JSON.
    pub fn serialize<T: Serialize + Display, S: Serializer>(
        number: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(number)
        } else {
            number.serialize(serializer)
        }
    }

    /// Deserializes a number; in JSON from text, or from a plain number.
    ///
    /// # Errors
    ///
    /// What the deserializer says, or a text that is no such number.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: Deserialize<'de> + FromStr,
        T::Err: Display,
        D: Deserializer<'de>,
    {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum TextOrNumber<T> {
            Text(String),
            Number(T),
        }
        if deserializer.is_human_readable() {
            match TextOrNumber::deserialize(deserializer)? {
                TextOrNumber::Text(text) => text.parse().map_err(D::Error::custom),
                TextOrNumber::Number(number) => Ok(number),
            }
        } else {
            T::deserialize(deserializer)
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::json::without_comments;

    #[test]
    fn empties_comment_lines_and_keeps_the_line_numbers() {
        assert_eq!(without_comments("# a\n  // b\n[1]\n \"#\""), "\n\n[1]\n \"#\"");
        assert_eq!(without_comments(""), "");
    }
}
