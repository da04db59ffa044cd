//! Versions such as `15.2`, and ranges such as `>=15, <17`.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use model::JsonSchema;
use model::display::safe_text;
use serde::{Deserialize, Serialize};

/// The most numbers of a version.
const NUMBERS_MAX: usize = 8;

/// Numbers with points between them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct Version(Vec<u64>);

/// Conditions that a version must meet, all of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct Range(Vec<(Comparison, Version)>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Less,
    AtMost,
    Equal,
    AtLeast,
    Greater,
}

/// The texts of comparisons; those of two letters first.
const COMPARISONS: [(&str, Comparison); 5] = [
    ("<=", Comparison::AtMost),
    (">=", Comparison::AtLeast),
    ("<", Comparison::Less),
    (">", Comparison::Greater),
    ("=", Comparison::Equal),
];

impl Range {
    /// Returns true if `version` meets all conditions. A condition looks only at as many numbers as
    /// it has: `15.2` is `=15` and `<=15`, and not `>15`.
    #[must_use]
    pub fn fits(&self, version: &Version) -> bool {
        self.0.iter().all(|(comparison, limit)| {
            let number = |index: usize| version.0.get(index).copied().unwrap_or_default();
            let numbers = (0..limit.0.len()).map(number);
            let ordering = numbers.cmp(limit.0.iter().copied());
            match comparison {
                Comparison::Less => ordering == Ordering::Less,
                Comparison::AtMost => ordering != Ordering::Greater,
                Comparison::Equal => ordering == Ordering::Equal,
                Comparison::AtLeast => ordering != Ordering::Less,
                Comparison::Greater => ordering == Ordering::Greater,
            }
        })
    }
}

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |part: &str| {
            let digits = part.bytes().all(|byte| byte.is_ascii_digit());
            digits.then(|| part.parse().ok()).flatten()
        };
        let numbers: Option<Vec<u64>> = text.split('.').map(number).collect();
        numbers.filter(|numbers| numbers.len() <= NUMBERS_MAX).map(Self).ok_or_else(|| {
            format!("`{}` is no version: expected numbers such as 15.2", safe_text(text, 80))
        })
    }
}

impl FromStr for Range {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let condition = |part: &str| {
            let part = part.trim();
            let known = COMPARISONS.iter().find(|(sign, _)| part.starts_with(sign));
            let (sign, comparison) = known.copied().unwrap_or(("", Comparison::Equal));
            part[sign.len()..].trim().parse().map(|version| (comparison, version))
        };
        text.split(',').map(condition).collect::<Result<_, String>>().map(Self).map_err(|_| {
            let text = safe_text(text, 80);
            format!("`{text}` is no range of versions: expected conditions such as `>=15, <17`")
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(u64::to_string).collect();
        formatter.write_str(&numbers.join("."))
    }
}

impl fmt::Display for Range {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let condition = |(comparison, version): &(Comparison, Version)| {
            let known = COMPARISONS.iter().find(|(_, known)| known == comparison);
            format!("{}{version}", known.map_or("", |(sign, _)| sign))
        };
        let conditions: Vec<String> = self.0.iter().map(condition).collect();
        formatter.write_str(&conditions.join(", "))
    }
}

impl TryFrom<String> for Version {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.to_string()
    }
}

impl TryFrom<String> for Range {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Range> for String {
    fn from(range: Range) -> Self {
        range.to_string()
    }
}
