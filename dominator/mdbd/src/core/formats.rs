//! Formats of machines: what sources give, JSON or a plain list of hosts, and the file that mdbd
//! writes.
//!
//! Both formats of sources pass the same checks: a list is converted to JSON with the same lines,
//! so that an error names the line that the author of the list sees.
// tidy: core

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};

use model::mdb::{Machine, Machines, MdbError, parse, unknown_keys};
use model::unknown_keys::{UnknownKey, describe};
use serde::{Deserialize, Serialize};

/// Format of a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// A machine database, as the dominator reads it.
    #[default]
    Json,
    /// Lines of `HOST [REQUIRED-IMAGE [PLANNED-IMAGE]]`; a word that begins with `#` starts a
    /// comment.
    Hosts,
}

/// Invalid data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    #[error("line {line} is not UTF-8")]
    Text { line: usize },
    #[error("line {line}: unexpected `{word}` after HOST REQUIRED-IMAGE PLANNED-IMAGE")]
    Words { line: usize, word: String },
    #[error(transparent)]
    Machines(MdbError),
    #[error("the record of {hostname} sets {field}, and this source may set only {allowed}")]
    Field {
        hostname: String,
        field: String,
        /// The names of fields.
        allowed: String,
    },
}

/// What a source may set of a machine.
pub const FIELDS: [&str; 9] = [
    "DisableUpdates",
    "IpAddress",
    "Location",
    "OwnerGroups",
    "OwnerUsers",
    "PlannedImage",
    "RequiredImage",
    "SubdPort",
    "Tags",
];

/// Checks that records set only fields that are `allowed`.
///
/// # Errors
///
/// [`DataError::Field`] names the first other one.
pub fn check_fields(machines: &Machines, allowed: &BTreeSet<String>) -> Result<(), DataError> {
    for machine in machines.values() {
        let fields: serde_json::Map<_, _> =
            serde_json::from_str(&line(machine)).expect("it was just made");
        let other = fields.into_iter().map(|(field, _)| field);
        let mut other = other.filter(|field| field != "Hostname" && !allowed.contains(field));
        if let Some(field) = other.next() {
            let allowed = Vec::from_iter(allowed.iter().map(String::as_str)).join(", ");
            let allowed = if allowed.is_empty() { "Hostname".to_owned() } else { allowed };
            return Err(DataError::Field { hostname: machine.hostname.clone(), field, allowed });
        }
    }
    Ok(())
}

/// Reads the data of a source. Also returns what is said of misspelt keys, if there are some. Other
/// keys that nothing reads are for other readers of the same inventory.
///
/// # Errors
///
/// [`DataError`] names the line or record; one invalid record invalidates all.
pub fn read(format: Format, bytes: &[u8]) -> Result<(Machines, Option<String>), DataError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|&&byte| byte == b'\n').count();
        DataError::Text { line }
    })?;
    // Some editors start a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match format {
        Format::Json => parse(text).map(|machines| (machines, describe(&misspelt_keys(text)))),
        Format::Hosts => parse(&json_of(text)?).map(|machines| (machines, None)),
    }
    .map_err(DataError::Machines)
}

fn misspelt_keys(text: &str) -> Vec<UnknownKey> {
    let mut keys = unknown_keys(text);
    keys.retain(|key| key.nearest.is_some());
    keys
}

/// A line of a list as a JSON record.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct ListRecord<'a> {
    hostname: &'a str,
    required_image: &'a str,
    planned_image: &'a str,
}

/// Converts a list to JSON with each record on its line of the list.
fn json_of(list: &str) -> Result<String, DataError> {
    let mut json = "[".to_owned();
    let mut is_first = true;
    for (index, line) in list.lines().enumerate() {
        if index > 0 {
            json.push('\n');
        }
        let mut words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
        let Some(hostname) = words.next() else { continue };
        let record = ListRecord {
            hostname,
            required_image: words.next().unwrap_or_default(),
            planned_image: words.next().unwrap_or_default(),
        };
        if let Some(word) = words.next() {
            return Err(DataError::Words { line: index + 1, word: word.to_owned() });
        }
        if !is_first {
            json.push(',');
        }
        is_first = false;
        json.push_str(&serde_json::to_string(&record).expect("strings can be encoded"));
    }
    json.push(']');
    Ok(json)
}

/// A machine without its empty fields.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Line<'a> {
    hostname: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip_address: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subd_port: Option<u16>,
    #[serde(skip_serializing_if = "str::is_empty")]
    required_image: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    planned_image: &'a str,
    #[serde(skip_serializing_if = "is_false")]
    disable_updates: bool,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    owner_groups: &'a [String],
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    owner_users: &'a [String],
    #[serde(skip_serializing_if = "str::is_empty")]
    location: &'a str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    tags: &'a BTreeMap<String, String>,
}

fn is_false(truth: &bool) -> bool {
    !truth
}

fn line(machine: &Machine) -> String {
    // Destructured so that no field is forgotten.
    let Machine {
        hostname,
        ip_address,
        subd_port,
        required_image,
        planned_image,
        disable_updates,
        owner_groups,
        owner_users,
        location,
        tags,
    } = machine;
    let line = Line {
        hostname,
        ip_address: *ip_address,
        subd_port: *subd_port,
        required_image,
        planned_image,
        disable_updates: *disable_updates,
        owner_groups,
        owner_users,
        location,
        tags,
    };
    serde_json::to_string(&line).expect("machines can be encoded")
}

/// Renders `machines` as a JSON array with one machine per line, sorted by host name, and a newline
/// at the end.
///
/// Equal databases have equal texts: if nothing has changed, no file is written and no dominator is
/// notified.
#[must_use]
pub fn render(machines: &Machines) -> String {
    if machines.is_empty() {
        return "[]\n".to_owned();
    }
    let lines: Vec<String> = machines.values().map(line).collect();
    format!("[\n{}\n]\n", lines.join(",\n"))
}

#[cfg(test)]
mod tests {
    use model::display::error_chain;

    use super::*;

    #[test]
    fn a_list_has_a_host_in_each_line() {
        let list = "# the fleet\nweb1 base/1 base/2\n\n  db1\tbase/1 # no plan yet\r\nspare\n#end";
        let machine = |hostname: &str, required: &str, planned: &str| Machine {
            hostname: hostname.into(),
            required_image: required.into(),
            planned_image: planned.into(),
            ..Machine::default()
        };
        let machines: Vec<Machine> =
            read(Format::Hosts, list.as_bytes()).unwrap().0.into_values().collect();
        let expected = [
            machine("db1", "base/1", ""),
            machine("spare", "", ""),
            machine("web1", "base/1", "base/2"),
        ];
        assert_eq!(machines, expected);
        assert_eq!(read(Format::Hosts, b"").unwrap(), (Machines::new(), None));
    }

    #[test]
    fn misspelt_keys_are_named() {
        let inventory = "[{\"Hostname\": \"a\", \"Rack\": 4},\n\
                         {\"Hostname\": \"b\", \"RequiredImge\": \"b/1\"}]";
        let (machines, said) = read(Format::Json, inventory.as_bytes()).unwrap();
        assert_eq!(Vec::from_iter(machines.keys()), ["a", "b"]);
        let want = "line 2: the key `RequiredImge` is unknown; is `RequiredImage` meant?";
        assert_eq!(said.as_deref(), Some(want));
    }

    #[test]
    fn the_json_of_a_list_has_its_lines() {
        let json = json_of("\na\n# b\n\nc d\n").unwrap();
        let lines: Vec<&str> = json.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[1].contains("\"a\""), "{json}");
        assert!(lines[4].starts_with(",{\"Hostname\":\"c\""), "{json}");
    }

    #[test]
    fn all_fields_that_can_be_set_have_a_name() {
        let one = || vec!["x".to_owned()];
        let machine = Machine {
            hostname: "a".to_owned(),
            ip_address: Some(IpAddr::from([127, 0, 0, 1])),
            subd_port: Some(1),
            required_image: "x".to_owned(),
            planned_image: "x".to_owned(),
            disable_updates: true,
            owner_groups: one(),
            owner_users: one(),
            location: "x".to_owned(),
            tags: BTreeMap::from([("x".to_owned(), "y".to_owned())]),
        };
        let fields: BTreeMap<String, serde_json::Value> =
            serde_json::from_str(&line(&machine)).unwrap();
        let named = FIELDS.iter().copied().chain(["Hostname"]).collect::<BTreeSet<&str>>();
        assert_eq!(fields.keys().map(String::as_str).collect::<BTreeSet<&str>>(), named);
    }

    #[test]
    fn one_wrong_record_refuses_all() {
        use Format::{Hosts, Json};
        let table: [(Format, &[u8], &str); 8] = [
            (Json, br#"[{"Hostname": "a"}, {"Hostname": "a"}]"#, "host name a was given already"),
            (Json, b"[{\"Hostname\": \"a/b\"}]", "`a/b` is no host name"),
            (Json, b"[\n{\"Hostname\": \"a\"},\n", "line 3"),
            (Json, b"[\n\"\xfc\"]", "line 2 is not UTF-8"),
            (Hosts, b"a\nb\na\n", "host name a was given already"),
            (Hosts, b"a\n\nb x y z", "line 3: unexpected `z` after"),
            (Hosts, b"a x/../y", "RequiredImage"),
            (Hosts, b"{\"Hostname\":", "is no host name"),
        ];
        for (format, bytes, part) in table {
            let error = error_chain(&read(format, bytes).unwrap_err());
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn each_machine_has_a_line_with_what_is_known_of_it() {
        let machines = parse(
            r#"[{"Hostname": "web1", "RequiredImage": "web/1", "Tags": {"b": "2", "a": "1"},
                 "OwnerUsers": ["ann"], "Rack": 4},
                {"Tags": {}, "Hostname": "db1", "IpAddress": "::1", "SubdPort": 7000,
                 "DisableUpdates": true, "PlannedImage": "db/2"},
                {"Location": "nyc \"4\"", "OwnerGroups": ["dba", "ops"], "Hostname": "c"},
                {"Hostname": "bare", "RequiredImage": "", "DisableUpdates": false}]"#,
        )
        .unwrap();
        let text = render(&machines);
        let expected = r#"[
{"Hostname":"bare"},
{"Hostname":"c","OwnerGroups":["dba","ops"],"Location":"nyc \"4\""},
{"Hostname":"db1","IpAddress":"::1","SubdPort":7000,"PlannedImage":"db/2","DisableUpdates":true},
{"Hostname":"web1","RequiredImage":"web/1","OwnerUsers":["ann"],"Tags":{"a":"1","b":"2"}}
]
"#;
        assert_eq!(text, expected);
        assert_eq!(parse(&text).unwrap(), machines);
        assert_eq!(render(&Machines::new()), "[]\n");
    }
}
