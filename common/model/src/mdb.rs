//! The machine database: which image every machine must have.
//!
//! A JSON array of objects, as in the founding design. Unknown fields are ignored; lines whose
//! first characters are `#` or `//` are comments.

mod edit;

pub use edit::{ChangedField, ChangedMachine, Edit};

use core::net::IpAddr;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::comments::without_comments;
use crate::image::{ImageName, ImageNameError};

/// A machine database that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MdbError {
    /// The text is no JSON, is cut short, or is no array.
    #[error(
        "the machine database is not valid: expected [{{\"Hostname\": \"web1\", \
         \"RequiredImage\": \"web.0\"}}, ...]"
    )]
    Json {
        /// The line and the column, and what is wrong there.
        #[source]
        source: serde_json::Error,
    },
    /// Some records are no machines. One wrong record is enough to refuse all: it may be the
    /// trace of an edit that went wrong elsewhere too.
    #[error("{}", sentence(records))]
    Records {
        /// All of them, in the order of the text.
        records: Vec<BadRecord>,
    },
}

/// A record that is no machine.
#[derive(Debug)]
pub struct BadRecord {
    /// The line that the record begins in, from 1.
    pub line: usize,
    /// What is wrong with it.
    pub why: RecordError,
}

/// What can be wrong with a record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// A field is missing or has a wrong type.
    #[error("{0}")]
    Fields(String),
    /// It has no usable host name.
    #[error("`{hostname}` is no host name")]
    Hostname {
        /// What it says.
        hostname: String,
    },
    /// Another machine has its host name.
    #[error("host name {hostname} was given already, in line {first}")]
    Duplicate {
        /// The line that the first record with this name begins in, from 1.
        first: usize,
        /// The name.
        hostname: String,
    },
    /// It names an image by something that is no image name.
    #[error("{hostname} has a bad {field}: {source}")]
    Image {
        /// Its host name.
        hostname: String,
        /// `RequiredImage` or `PlannedImage`.
        field: &'static str,
        /// What is wrong with the name.
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

/// One machine. No field is left out when it is encoded: bincode has no names of fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Machine {
    /// The name of the machine, and the name its certificate must have.
    pub hostname: String,
    /// Where to reach it, if the name does not tell.
    #[serde(default)]
    pub ip_address: Option<IpAddr>,
    /// The port of its subd, if not the dominator's default.
    #[serde(default)]
    pub subd_port: Option<u16>,
    /// The image it must have; without one the machine is only watched.
    #[serde(default)]
    pub required_image: String,
    /// The image it will get next; its objects are fetched ahead.
    #[serde(default)]
    pub planned_image: String,
    /// Leave the machine as it is.
    #[serde(default)]
    pub disable_updates: bool,
    /// Groups that may act on the machine.
    #[serde(default)]
    pub owner_groups: Vec<String>,
    /// Users that may act on the machine.
    #[serde(default)]
    pub owner_users: Vec<String>,
    /// Where it stands, such as `nyc/rack4`.
    #[serde(default)]
    pub location: String,
    /// Free-form labels.
    #[serde(default)]
    pub tags: BTreeMap<String, String>,
}

impl Machine {
    /// The image the machine must have, if the database names one.
    #[must_use]
    pub fn required(&self) -> Option<ImageName> {
        ImageName::new(&self.required_image).ok()
    }

    /// The image the machine will get next, if the database names one.
    #[must_use]
    pub fn planned(&self) -> Option<ImageName> {
        ImageName::new(&self.planned_image).ok()
    }
}

/// All machines, by host name.
pub type Machines = BTreeMap<String, Machine>;

/// Reads a machine database.
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
        // Where in the text it is: records are parts of it.
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

/// The machine of one record; `lines` has the lines of those before.
fn machine(record: &RawValue, lines: &BTreeMap<String, usize>) -> Result<Machine, RecordError> {
    let machine: Machine = serde_json::from_str(record.get()).map_err(|error| {
        // Its line and column count from the start of the record, and would mislead.
        let text = error.to_string();
        let end = text.rfind(" at line ").unwrap_or(text.len());
        RecordError::Fields(text[..end].to_owned())
    })?;
    let hostname = machine.hostname.clone();
    let plain = |character: char| character.is_ascii_alphanumeric() || "-._:*".contains(character);
    if hostname.is_empty() || hostname.len() > 253 || !hostname.chars().all(plain) {
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
