//! The machine database: which image every machine must have.
//!
//! A JSON array of objects, as in the founding design. Unknown fields are ignored, but
//! [`unknown_keys()`] names them; lines whose first characters are `#` or `//` are comments.

mod diff;

pub use diff::{ChangedField, ChangedMachine, MdbDiff};

use core::net::IpAddr;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::JsonSchema;
use crate::image::{ImageName, ImageNameError};
use crate::json::without_comments;
use crate::unknown_keys::{self, UnknownKey};

/// The longest host name of a machine, in bytes (RFC 1035, section 2.3.4).
pub const HOSTNAME_BYTES_MAX: usize = 253;

/// Why a machine database is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum MdbError {
    /// The text is not JSON, is truncated, or is not an array.
    #[error(
        "the machine database is not valid: expected [{{\"Hostname\": \"web1\", \
         \"RequiredImage\": \"web.0\"}}, ...]"
    )]
    Json {
        /// The line and the column, and what is wrong there.
        #[source]
        source: serde_json::Error,
    },
    /// Some records are invalid. One invalid record is enough to refuse all: it may be the trace of
    /// a faulty edit elsewhere.
    #[error("{}", sentence(records))]
    Records {
        /// All invalid records, in the order of the text.
        records: Vec<BadRecord>,
    },
}

/// An invalid record.
#[derive(Debug)]
pub struct BadRecord {
    /// The line that the record begins in, from 1.
    pub line: usize,
    pub why: RecordError,
}

/// Why a record is invalid.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// A field is missing or has a wrong type.
    #[error("{0}")]
    Fields(String),
    /// It has no usable host name.
    #[error("`{hostname}` is no host name")]
    Hostname { hostname: String },
    /// Another machine has the same host name.
    #[error("host name {hostname} was given already, in line {first}")]
    Duplicate {
        /// The line that the first record with this name begins in, from 1.
        first: usize,
        hostname: String,
    },
    /// An image name in it is invalid.
    #[error("{hostname} has a bad {field}: {source}")]
    Image {
        /// Its host name.
        hostname: String,
        /// `RequiredImage` or `PlannedImage`.
        field: &'static str,
        source: ImageNameError,
    },
}

/// How many bad records an error names.
const RECORDS_NAMED: usize = 5;

fn sentence(records: &[BadRecord]) -> String {
    let named = records.iter().take(RECORDS_NAMED);
    let mut parts: Vec<String> =
        named.map(|record| format!("line {}: {}", record.line, record.why)).collect();
    if records.len() > RECORDS_NAMED {
        parts.push(format!("and {} more", records.len() - RECORDS_NAMED));
    }
    parts.join("; ")
}

/// One machine. All fields are encoded, because bincode has no names of fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "PascalCase")]
pub struct Machine {
    /// The name of the machine, and the name its certificate must have.
    pub hostname: String,
    /// The address, if the name cannot be resolved.
    #[serde(default)]
    pub ip_address: Option<IpAddr>,
    /// The port of its subd, if not the dominator's default.
    #[serde(default)]
    pub subd_port: Option<u16>,
    /// The required image; without one the machine is only monitored.
    #[serde(default)]
    pub required_image: String,
    /// The planned image, whose objects are prefetched.
    #[serde(default)]
    pub planned_image: String,
    /// True to disable updates of the machine.
    #[serde(default)]
    pub disable_updates: bool,
    /// Groups that may act on the machine.
    #[serde(default)]
    pub owner_groups: Vec<String>,
    /// Users that may act on the machine.
    #[serde(default)]
    pub owner_users: Vec<String>,
    /// The location, such as `nyc/rack4`.
    #[serde(default)]
    pub location: String,
    /// Free-form labels.
    #[serde(default)]
    pub tags: BTreeMap<String, String>,
}

impl Machine {
    /// Returns the required image, if any.
    #[must_use]
    pub fn required(&self) -> Option<ImageName> {
        ImageName::new(&self.required_image).ok()
    }

    /// Returns the planned image, if any.
    #[must_use]
    pub fn planned(&self) -> Option<ImageName> {
        ImageName::new(&self.planned_image).ok()
    }
}

/// Returns a location, or the name of an image, without slashes at its ends.
#[must_use]
pub fn trimmed(path: &str) -> &str {
    path.trim_matches('/')
}

/// True if `path` is `wanted` or below it. Ignores slashes at their ends. False if `wanted` is
/// empty.
#[must_use]
pub fn is_within(path: &str, wanted: &str) -> bool {
    let (path, wanted) = (trimmed(path), trimmed(wanted));
    path.strip_prefix(wanted)
        .is_some_and(|rest| !wanted.is_empty() && (rest.is_empty() || rest.starts_with('/')))
}

/// The keys of a [`Machine`].
const KEYS: [&str; 10] = [
    "Hostname",
    "IpAddress",
    "SubdPort",
    "RequiredImage",
    "PlannedImage",
    "DisableUpdates",
    "OwnerGroups",
    "OwnerUsers",
    "Location",
    "Tags",
];

/// Returns the keys of a valid machine database that nothing reads.
#[must_use]
pub fn unknown_keys(text: &str) -> Vec<UnknownKey> {
    unknown_keys::find(&without_comments(text), &KEYS)
}

/// All machines, by host name.
pub type Machines = BTreeMap<String, Machine>;

/// Parses a machine database.
///
/// # Errors
///
/// [`MdbError`] names the line, and all records that are wrong.
pub fn parse(text: &str) -> Result<Machines, MdbError> {
    let text = without_comments(text);
    let list: Vec<&RawValue> =
        serde_json::from_str(&text).map_err(|source| MdbError::Json { source })?;
    let mut machines = Machines::new();
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    let mut bad = Vec::new();
    let (mut line, mut at) = (1, 0);
    for record in list {
        // The offset in the text, of which records are slices.
        let start = record.get().as_ptr().addr() - text.as_ptr().addr();
        line += text[at..start].bytes().filter(|&byte| byte == b'\n').count();
        at = start;
        match machine(record, &lines) {
            Ok(machine) => {
                lines.insert(machine.hostname.clone(), line);
                machines.insert(machine.hostname.clone(), machine);
            }
            Err(why) => bad.push(BadRecord { line, why }),
        }
    }
    if bad.is_empty() { Ok(machines) } else { Err(MdbError::Records { records: bad }) }
}

/// Returns the machine of one record; `lines` has the lines of the previous ones.
fn machine(record: &RawValue, lines: &BTreeMap<String, usize>) -> Result<Machine, RecordError> {
    let machine: Machine = serde_json::from_str(record.get()).map_err(|error| {
        // Its line and column count from the start of the record and would be misleading.
        let text = error.to_string();
        let end = text.rfind(" at line ").unwrap_or(text.len());
        RecordError::Fields(text[..end].to_owned())
    })?;
    let hostname = machine.hostname.clone();
    let plain = |character: char| character.is_ascii_alphanumeric() || "-._:*".contains(character);
    if hostname.is_empty() || hostname.len() > HOSTNAME_BYTES_MAX || !hostname.chars().all(plain) {
        return Err(RecordError::Hostname { hostname });
    }
    for (field, image) in
        [("RequiredImage", &machine.required_image), ("PlannedImage", &machine.planned_image)]
    {
        if !image.is_empty()
            && let Err(source) = ImageName::new(image)
        {
            return Err(RecordError::Image { hostname, field, source });
        }
    }
    match lines.get(&hostname) {
        Some(&first) => Err(RecordError::Duplicate { first, hostname }),
        None => Ok(machine),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_founding_designs_json_with_comments_and_unknown_fields() {
        let text = r#"
            # the fleet
            [
                // mail
                {"Hostname": "mailhost", "RequiredImage": "/mail.0", "PlannedImage": "mail.1"},
                {"Hostname": "compute0", "IpAddress": "::1", "SubdPort": 7000, "Rack": 4}
            ]"#;
        let machines = parse(text).unwrap();
        let mail = &machines["mailhost"];
        assert_eq!(mail.required().unwrap().as_str(), "mail.0");
        assert_eq!(mail.planned().unwrap().as_str(), "mail.1");
        assert_eq!(
            machines["compute0"],
            Machine {
                hostname: "compute0".into(),
                ip_address: Some("::1".parse().unwrap()),
                subd_port: Some(7000),
                ..Machine::default()
            }
        );
    }

    #[test]
    fn keys_that_no_machine_has_are_named() {
        let text = "# the fleet\n[{\"Hostname\": \"a\",\n\"RequiredImge\": \"x\"}]";
        let [unknown] = &*unknown_keys(text) else { panic!("one key is unknown") };
        assert_eq!((&*unknown.key, unknown.line), ("RequiredImge", 3));
        let all = serde_json::to_string(&[Machine::default()]).unwrap();
        assert_eq!(unknown_keys(&all), []);
        assert_eq!(
            KEYS.len(),
            serde_json::to_value(Machine::default()).unwrap().as_object().unwrap().len()
        );
    }

    #[test]
    fn names_what_is_wrong_and_where() {
        let table = [
            (r#"[{"Hostname": ""}]"#, "line 1: `` is no host name"),
            ("# a comment\n[\n{\"Hostname\": \"a/b\"}]", "line 3: `a/b` is no host name"),
            (
                "[{\"Hostname\": \"a\"},\n{\"Hostname\": \"b\"},\n{\n\"Hostname\": \"a\"}]",
                "line 3: host name a was given already, in line 1",
            ),
            ("[{\"Hostname\": \"a\"},\n\n{\"Host\": \"b\"}]", "line 3: missing field `Hostname`"),
            (
                "[{\"Hostname\": \"a\",\n\"RequiredImage\": 1}]",
                "line 1: invalid type: integer `1`, expected a string",
            ),
            ("[7]", "line 1: invalid type: integer `7`, expected struct Machine"),
        ];
        for (text, error) in table {
            assert_eq!(parse(text).unwrap_err().to_string(), error);
        }
        let image = parse(r#"[{"Hostname": "a", "RequiredImage": "x/../y"}]"#).unwrap_err();
        let image = image.to_string();
        assert!(image.starts_with("line 1: a has a bad RequiredImage: "), "{image}");
        let cut = "[\n{\"Hostname\": \"a\"},\n{\"Hostname\": ";
        let error = parse(cut).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("line 3"), "{source}");
    }

    #[test]
    fn names_all_bad_records_but_not_endlessly() {
        let records: Vec<String> = (0..7).map(|_| "{\"Hostname\": \"\"}".to_owned()).collect();
        let error = parse(&format!("[\n{}\n]", records.join(",\n"))).unwrap_err().to_string();
        let named: Vec<String> =
            (2..7).map(|line| format!("line {line}: `` is no host name")).collect();
        assert_eq!(error, format!("{}; and 2 more", named.join("; ")));
    }
}
