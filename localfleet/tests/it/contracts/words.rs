//! The words that JSON shows in place of numbers: statuses, outcomes, reasons.

use std::collections::BTreeMap;
use std::path::Path;

use api::access::Access;
use api::audit;
use api::dominator::{Status, content, departing, events, explain, orders, plan, settings};
use api::fault::FaultCode;
use api::image_server::replication;
use api::subd;
use certs::record;
use dominator::core::alarms;
use expect_test::expect_file;
use model::{object, scope, trigger};
use provisioning::machine::preview::PlannedEffect;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The words of an enumeration, sorted: as the decoder lists them when it gets another one.
fn words<T: DeserializeOwned>() -> Vec<String> {
    let refusal = |json: &str| match serde_json::from_str::<T>(json) {
        Ok(_) => panic!("{json} is taken"),
        Err(error) => error.to_string(),
    };
    let of_text = refusal("\"?\"");
    // Some are known by one of their fields.
    let refusal = if of_text.contains("`?`") { of_text } else { refusal(r#"{"kind": "?"}"#) };
    let Some((_, listed)) = refusal.split_once("unknown variant `?`, expected ") else {
        panic!("{refusal}");
    };
    let quoted = listed.split('`').skip(1).step_by(2);
    let mut words: Vec<String> = quoted.map(str::to_owned).collect();
    words.sort_unstable();
    words
}

fn word(value: &impl Serialize) -> String {
    serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
}

fn manual() -> String {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/OPERATING.md");
    std::fs::read_to_string(place).unwrap()
}

/// The word that a line of a table is about.
fn first_cell(line: &str) -> Option<&str> {
    line.strip_prefix("| `")?.split_once("` |").map(|(word, _)| word)
}

#[test]
fn words_of_json_stay() {
    let all: BTreeMap<&str, Vec<String>> = [
        ("access of a method", words::<Access>()),
        ("action on a path, in a plan", words::<model::plan::Action>()),
        ("action of an event, in a schedule", words::<tasks::schedule::Action>()),
        ("activity of a sub", words::<subd::Activity>()),
        ("alarm of a sub", words::<subd::Alarm>()),
        ("algorithm of a digest", words::<object::Algorithm>()),
        ("attributes of a scan", words::<scope::Attributes>()),
        ("cache of a sub", words::<subd::CacheReport>()),
        ("coverage of a scan", words::<scope::Coverage>()),
        ("difference of a path", words::<model::plan::Difference>()),
        ("effect of an image on a resource, planned", words::<PlannedEffect>()),
        ("effect of an update on a task", words::<tasks::planned::PlannedTask>()),
        ("end of a pause", words::<orders::PauseEnd>()),
        ("end of an image", words::<replication::ImageEnd>()),
        ("event, of the history", words::<events::EventDetails>()),
        ("failure of a fetch", words::<subd::FetchFailure>()),
        ("fault of a call", words::<FaultCode>()),
        ("gap of a plan", words::<plan::NoPlanReason>()),
        ("health of an image", words::<subd::Health>()),
        ("handling of a removed resource", words::<provisioning::resource::OnRemoval>()),
        ("handling of drift of a resource", words::<provisioning::resource::OnDrift>()),
        ("kind of events, of the history", words::<events::EventKind>()),
        ("level of a limit", words::<settings::Level>()),
        ("limit of a sub", words::<settings::Limit>()),
        ("link of a replica", words::<replication::LinkState>()),
        ("obstacle of an update", words::<model::plan::Obstacle>()),
        ("occupant of a path", words::<model::plan::Occupant>()),
        ("operation on a resource, in a plan", words::<provisioning::protocol::Operation>()),
        ("operation on a path, in the history", words::<events::PathOperation>()),
        ("outcome of a call, in an audit log", words::<audit::record::CallOutcome>()),
        ("outcome of an update", words::<subd::UpdateOutcome>()),
        ("outlook of a machine, in a plan", words::<plan::PlanOutcome>()),
        ("reason of a change, in the history", words::<events::ChangeReason>()),
        ("reason of a revocation", words::<record::Reason>()),
        ("record of an audit log", words::<audit::record::AuditEvent>()),
        ("scope of a resource", words::<provisioning::resource::Per>()),
        ("source of a required image", words::<explain::ImageSource>()),
        ("state of a machine that has left", words::<departing::DepartingState>()),
        ("state of a run of a task", words::<tasks::RunState>()),
        ("status of a machine", words::<Status>()),
        ("stage of a change of content", words::<content::ContentStage>()),
        ("target of a trigger", words::<trigger::Kind>()),
        ("trouble of a replica", words::<replication::ReplicationTrouble>()),
        (
            "trouble of a replica's directories",
            words::<replication::directories::DirectoriesTrouble>(),
        ),
        ("verb of a service", words::<trigger::services::ServiceVerb>()),
    ]
    .into();
    let mut text = String::new();
    for (what, words) in all {
        text.push_str(&format!("{what}\n"));
        for word in words {
            text.push_str(&format!("  {word}\n"));
        }
    }
    expect_file!["words.txt"].assert_eq(&text);
}

/// The alarms that the dominator raises by itself; those of machines are among the words of JSON.
const ALARMS: [&str; 22] = [
    alarms::ROLLOUT_COMMAND,
    alarms::ROLLOUT_FAILED,
    alarms::ROLLOUT_VOTES,
    alarms::COMPUTED_FILES,
    alarms::CONTENT_STOPPED,
    alarms::IMAGE_CHANGED,
    alarms::CLOCK_JUMPED,
    alarms::DEPARTING,
    alarms::HISTORY_FAILING,
    alarms::IMAGE_STOPPED,
    alarms::IMAGE_UNHEALTHY,
    alarms::MDB_HELD,
    alarms::MDB_NOT_KEPT,
    alarms::MDB_REFUSED,
    alarms::OTHER_DOMINATOR,
    alarms::PERMIT_CONFLICT,
    alarms::PROVISION_FAILED,
    alarms::RESOURCE_DRIFT,
    alarms::TASK_BACK_OFF,
    alarms::TASK_FAILED,
    alarms::TASK_UNHEALTHY,
    alarms::UPDATES_DISABLED,
];

#[test]
fn each_alarm_is_explained_where_operators_look_it_up() {
    let manual = manual();
    let section = manual.split("\n## ").find(|section| section.starts_with("Alarms\n")).unwrap();
    let explained: Vec<&str> = section.lines().filter_map(first_cell).collect();
    let of_machines = words::<subd::Alarm>();
    let mut known: Vec<&str> = of_machines.iter().map(String::as_str).chain(ALARMS).collect();
    known.sort_unstable();
    let mut sorted = explained.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, known);
}

#[test]
fn each_status_is_explained_where_operators_look_it_up() {
    let manual = manual();
    let explained: Vec<&str> = manual
        .split("\n## ")
        .filter(|section| section.starts_with("Statuses\n"))
        .flat_map(str::lines)
        .filter_map(first_cell)
        .collect();
    let sorted = |mut words: Vec<String>| {
        words.sort_unstable();
        words
    };
    let explained = sorted(explained.into_iter().map(str::to_owned).collect());
    assert_eq!(explained, words::<Status>());
    // What is printed for people is the same word.
    let printed = sorted(Status::ALL.iter().map(ToString::to_string).collect());
    assert_eq!(printed, words::<Status>());
    assert_eq!(sorted(Status::ALL.iter().map(word).collect()), printed);
}
