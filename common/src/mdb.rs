//! The machine database: which image every machine must have.
//!
//! A JSON array of objects, as in the founding design. Unknown fields are ignored; lines whose
//! first characters are `#` or `//` are comments.
// tidy: core

use core::net::IpAddr;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::comments::without_comments;
use crate::image::{ImageName, ImageNameError};

/// A machine database that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MdbError {
    /// The text is no JSON, is cut short, or is no array of machines.
    #[error(
        "the machine database is not valid: expected [{{\"Hostname\": \"web1\", \
         \"RequiredImage\": \"web.0\"}}, ...]"
    )]
    Json {
        /// The line and the column, and what is wrong there.
        #[source]
        source: serde_json::Error,
    },
    /// A machine has no usable host name.
    #[error("machine {number}: `{hostname}` is no host name")]
    Hostname {
        /// Which machine, from 1.
        number: usize,
        /// What it says.
        hostname: String,
    },
    /// Two machines have one host name.
    #[error("machine {number}: host name {hostname} was given already, to machine {first}")]
    Duplicate {
        /// Which machine, from 1.
        number: usize,
        /// Which machine had it first, from 1.
        first: usize,
        /// The name.
        hostname: String,
    },
    /// A machine names an image by something that is no image name.
    #[error("machine {number} ({hostname}): bad {field}")]
    Image {
        /// Which machine, from 1.
        number: usize,
        /// Its host name.
        hostname: String,
        /// `RequiredImage` or `PlannedImage`.
        field: &'static str,
        /// What is wrong with the name.
        #[source]
        source: ImageNameError,
    },
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
/// [`MdbError`] names the line, or the machine by its place from 1.
pub fn parse(text: &str) -> Result<Machines, MdbError> {
    let list: Vec<Machine> = serde_json::from_str(&without_comments(text))
        .map_err(|source| MdbError::Json { source })?;
    let mut machines = Machines::new();
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    for (index, machine) in list.into_iter().enumerate() {
        let number = index + 1;
        let hostname = machine.hostname.clone();
        let plain =
            |character: char| character.is_ascii_alphanumeric() || "-._:*".contains(character);
        if hostname.is_empty() || hostname.len() > 253 || !hostname.chars().all(plain) {
            return Err(MdbError::Hostname { number, hostname });
        }
        for (field, image) in
            [("RequiredImage", &machine.required_image), ("PlannedImage", &machine.planned_image)]
        {
            if !image.is_empty() {
                ImageName::new(image).map_err(|source| MdbError::Image {
                    number,
                    hostname: hostname.clone(),
                    field,
                    source,
                })?;
            }
        }
        if let Some(&first) = numbers.get(&hostname) {
            return Err(MdbError::Duplicate { number, first, hostname });
        }
        numbers.insert(hostname.clone(), number);
        machines.insert(hostname, machine);
    }
    Ok(machines)
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
            (r#"[{"Hostname": ""}]"#, "machine 1: `` is no host name"),
            (r#"[{"Hostname": "a/b"}]"#, "machine 1: `a/b` is no host name"),
            (
                r#"[{"Hostname": "a"}, {"Hostname": "b"}, {"Hostname": "a"}]"#,
                "machine 3: host name a was given already, to machine 1",
            ),
            (
                r#"[{"Hostname": "a", "RequiredImage": "x/../y"}]"#,
                "machine 1 (a): bad RequiredImage",
            ),
        ];
        for (text, error) in table {
            assert_eq!(parse(text).unwrap_err().to_string(), error);
        }
        let cut = "[\n{\"Hostname\": \"a\"},\n{\"Hostname\": ";
        let error = parse(cut).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("line 3"), "{source}");
    }
}
