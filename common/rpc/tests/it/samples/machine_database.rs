//! The methods of the machine database.

use api::Done;
use api::dominator::Brake;
use api::dominator::mdb::*;
use api::dominator::plan::*;
use api::mdb::{GetMdbReply, GetMdbRequest};

use super::{blake3, texts, time, why};

pub(super) fn held_mdb() -> HeldMdb {
    HeldMdb { digest: blake3(0x71), why: "it lacks 6 of 10".to_owned(), since: time() }
}

pub fn show_mdb() -> (ShowMdbRequest, ShowMdbReply) {
    let hostname = "web-1".to_owned();
    let machine = model::mdb::Machine { hostname, ..Default::default() };
    let reply = ShowMdbReply { machines: vec![machine], held: Some(held_mdb()) };
    (ShowMdbRequest { held: true }, reply)
}

pub fn accept_mdb() -> (AcceptMdbRequest, Done) {
    let (who, why) = ("ann".to_owned(), why());
    (AcceptMdbRequest { digest: blake3(0x71), who, why }, Done {})
}

pub fn check_mdb() -> (CheckMdbRequest, CheckMdbReply) {
    let (reason, who) = ("outage".to_owned(), "ann".to_owned());
    let hostname = "web-1".to_owned();
    let machine = model::mdb::Machine { hostname, ..Default::default() };
    let reply = CheckMdbReply {
        held: Some("it lacks 6 of 10".to_owned()),
        brake: Some(Brake { reason, who, since: time() }),
        added: texts(&["a"]),
        removed: texts(&["b"]),
        changed: texts(&["c"]),
    };
    (CheckMdbRequest { machines: vec![machine] }, reply)
}

pub fn get_mdb() -> (GetMdbRequest, GetMdbReply) {
    let text = r#"[{
        "Hostname": "web-1", "IpAddress": "10.0.0.7", "SubdPort": 7000, "RequiredImage": "base/1",
        "PlannedImage": "base/2", "DisableUpdates": true, "OwnerGroups": ["web"],
        "OwnerUsers": ["ann"], "Location": "nyc/rack4", "Tags": {"role": "front"}
    }]"#;
    let machines = model::mdb::parse(text).unwrap().into_values().collect();
    let request = GetMdbRequest { have: Some(blake3(0xaa)), wait_ms: 60_000 };
    (request, GetMdbReply { version: blake3(0xbb), machines: Some(machines) })
}
