//! Keys of JSON files that nothing reads, which are often misspelt.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::value::RawValue;

use crate::display::{line_at, safe_text};

/// How many keys a text names.
const NAMED_MAX: usize = 5;

/// A key that nothing reads.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct UnknownKey {
    pub key: String,
    /// The line of its first value, from 1.
    pub line: usize,
    /// How many records have it.
    pub records: usize,
    /// The known key that is most like it, if one is.
    pub nearest: Option<&'static str>,
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, line, records, nearest } = self;
        write!(formatter, "line {line}: the key `{key}` is unknown")?;
        if let Some(nearest) = nearest {
            write!(formatter, "; is `{nearest}` meant?")?;
        }
        if *records > 1 {
            write!(formatter, " ({records} records have it)")?;
        }
        Ok(())
    }
}

/// Returns the keys of the records that are not `known`, each once, by line. `text` is an array of
/// JSON objects without comments; anything else has no unknown keys.
#[must_use]
pub fn find(text: &str, known: &[&'static str]) -> Vec<UnknownKey> {
    let records: Vec<BTreeMap<String, &RawValue>> = serde_json::from_str(text).unwrap_or_default();
    let mut unknown: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for (key, value) in records.into_iter().flatten() {
        if !known.contains(&&*key) {
            // The offset in the text, of which values are slices.
            let at = value.get().as_ptr().addr() - text.as_ptr().addr();
            let (first, records) = unknown.entry(key).or_insert((at, 0));
            *first = at.min(*first);
            *records += 1;
        }
    }
    let mut keys: Vec<UnknownKey> = unknown
        .into_iter()
        .map(|(key, (at, records))| UnknownKey {
            line: line_at(text, at),
            nearest: nearest(&key, known),
            key,
            records,
        })
        .collect();
    keys.sort_by_key(|unknown| unknown.line);
    keys
}

/// Describes unknown keys in one line; `None` for an empty list.
#[must_use]
pub fn describe(keys: &[UnknownKey]) -> Option<String> {
    let mut texts: Vec<String> = keys.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    if let more @ 1.. = keys.len().saturating_sub(NAMED_MAX) {
        texts.push(format!("and {more} more"));
    }
    (!texts.is_empty()).then(|| texts.join("; "))
}

/// Returns the known key that differs in a third of its letters at most.
#[must_use]
pub fn nearest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    let distance =
        |known: &str| strsim::damerau_levenshtein(&key.to_lowercase(), &known.to_lowercase());
    let best = known.iter().map(|known| (distance(known), *known)).min()?;
    (best.0 <= best.1.len() / 3).then_some(best.1)
}

/// Returns what is said of an unknown key in place of serde's text, which lists all known keys;
/// `None` if `problem` is about something else.
#[must_use]
pub fn explain(problem: &str) -> Option<String> {
    // unknown field `a`, expected one of `b`, `c`
    let (unknown, expected) = problem.split_once("`, expected ")?;
    let key = unknown.strip_prefix("unknown field `")?;
    let known: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
    let meant = nearest(key, &known);
    let meant = meant.map(|name| format!("; is `{name}` meant?")).unwrap_or_default();
    Some(format!("the key `{}` is unknown{meant}", safe_text(key, 80)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_are_named_once_with_their_line_and_the_nearest_name() {
        let text = r#"[
            {"Hostname": "a", "RequiredImge": "x", "Tags": {"Rack": "1"}},
            {"Hostname": "b",
             "requiredimage": "x", "Rack": 4},
            {"RequiredImge": "x"}
        ]"#;
        let known = ["Hostname", "RequiredImage", "PlannedImage", "Tags"];
        let texts: Vec<String> = find(text, &known).iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "line 2: the key `RequiredImge` is unknown; is `RequiredImage` meant? (2 records \
                 have it)",
                "line 4: the key `Rack` is unknown",
                "line 4: the key `requiredimage` is unknown; is `RequiredImage` meant?",
            ]
        );
        assert_eq!(find("{", &known), []);
        assert_eq!(find("[7]", &known), []);
    }

    #[test]
    fn a_text_names_some_of_them() {
        let text = r#"[{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}]"#;
        let keys = find(text, &[]);
        assert_eq!(describe(&keys[..1]).unwrap(), "line 1: the key `a` is unknown");
        assert!(describe(&keys).unwrap().ends_with("`e` is unknown; and 1 more"));
        assert_eq!(describe(&[]), None);
    }
}
