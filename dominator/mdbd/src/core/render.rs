//! A machine database as text: one machine in each line, sorted by host name.
//!
//! Equal databases have equal texts, so that a file need not be written, nor a dominator told,
//! when nothing has changed.
// tidy: core

use core::net::IpAddr;
use std::collections::BTreeMap;

use model::mdb::{Machine, Machines};
use serde::Serialize;

/// A machine without the fields that say nothing.
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
    // No field can be forgotten here.
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
    serde_json::to_string(&line).expect("a machine has a JSON")
}

/// The text of `machines`: a JSON array that ends with a newline.
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
    use model::mdb::parse;

    use super::*;

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
