//! An image that fails on the first machines does not reach the others.

use std::collections::BTreeMap;
use std::fs;

use api::dominator::{Status, SubSummary};
use localfleet::fleet::Fleet;

use crate::converges::Scenario;
use crate::trees;

fn domtool(fleet: &Fleet, words: &[&str]) -> (bool, String, String) {
    let output = fleet.domtool(words).unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn an_image_that_fails_its_health_check_stops_and_others_are_never_touched() {
    let flags = [
        ("--max-updating", "1"),
        ("--image-failure-min", "2"),
        ("--imageserver-for-subs", "nowhere=127.0.0.1:9"),
    ];
    let mut scenario = Scenario::start_with(5, &flags);
    let (first, second) =
        (scenario.directory.path().join("1"), scenario.directory.path().join("2"));
    trees::make(&first, 1);
    trees::make(&second, 2);
    scenario.add("test/1", &first);
    scenario.converge("test/1");

    let healthy = scenario.directory.path().join("healthy");
    let check = scenario.directory.path().join("health.json");
    let command = serde_json::json!({
        "command": ["/usr/bin/test", "-e", healthy.to_str().unwrap()],
        "within_seconds": 1,
        "undo": true,
    });
    fs::write(&check, command.to_string()).unwrap();
    let rules = |file: &str| scenario.directory.path().join(file).into_os_string();
    scenario.imagetool(&[
        "--format".into(),
        "json".into(),
        "add".into(),
        "test/2".into(),
        second.into_os_string(),
        rules("filter"),
        rules("triggers"),
        "--health-check".into(),
        check.into_os_string(),
    ]);
    // One machine keeps the first image and is no part of all this.
    let images: BTreeMap<String, &str> = scenario
        .fleet
        .subs
        .iter()
        .map(|sub| {
            (sub.hostname.clone(), if sub.hostname == "sub-5" { "test/1" } else { "test/2" })
        })
        .collect();
    scenario.services();
    scenario.fleet.require_each(&images).unwrap();
    let count =
        |subs: &[SubSummary], status| subs.iter().filter(|sub| sub.status == status).count();
    let has_stopped = |subs: &[SubSummary]| {
        count(subs, Status::HealthFailed) == 2
            && count(subs, Status::ImageStopped) == 2
            && count(subs, Status::Synced) == 1
    };
    scenario.wait_until("updates to it have stopped", has_stopped);
    // Those that have failed put their trees back; on the others nothing has ever happened.
    scenario.verify(&first);
    let mut touched: Vec<String> = scenario.services();
    touched.iter_mut().for_each(|line| line.truncate(5));
    touched.sort();
    touched.dedup();
    assert_eq!(touched.len(), 2, "{touched:?}");
    let (_, table, _) = domtool(&scenario.fleet, &["list-stopped"]);
    let why = "2 of 2 machines failed after the update to it (2 failed the health check), more \
               than 10 %";
    assert!(table.contains("test/2") && table.contains(why), "{table}");
    let (_, text, _) = domtool(&scenario.fleet, &["status"]);
    assert!(text.contains("image test/2: updates to it have STOPPED since "), "{text}");
    assert!(
        text.contains("budget --max-updating 1: 0 rollouts and 0 repairs of 1 place"),
        "{text}"
    );

    // That outlasts a dominator that is killed.
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    scenario.wait_until("they still have", has_stopped);
    let (_, json, _) = domtool(&scenario.fleet, &["--format", "json", "list-stopped"]);
    let stopped: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&stopped[0]["image"], &stopped[0]["why"]), (&"test/2".into(), &why.into()));

    // The fault was elsewhere.
    fs::write(&healthy, "").unwrap();
    let (done, _, said) = domtool(&scenario.fleet, &["resume-image", "test/1", "--why", "no"]);
    assert!(!done && said.contains("updates to test/1 have not stopped"), "{said}");
    let (done, _, said) =
        domtool(&scenario.fleet, &["resume-image", "test/2", "--why", "repaired"]);
    assert!(done, "{said}");
    scenario.wait_until("those that had waited have it", |subs| {
        count(subs, Status::HealthFailed) == 2 && count(subs, Status::Synced) == 3
    });
    let failed: Vec<String> = scenario
        .fleet
        .statuses()
        .unwrap()
        .into_iter()
        .filter(|sub| sub.status == Status::HealthFailed)
        .map(|sub| sub.hostname)
        .collect();
    for host in &failed {
        assert!(domtool(&scenario.fleet, &["retry", host]).0);
    }
    scenario.wait_until("all have what they must have", |subs| {
        subs.iter()
            .all(|sub| sub.status == Status::Synced && sub.last_image == images[&sub.hostname])
    });
    let (_, table, _) = domtool(&scenario.fleet, &["list-stopped"]);
    assert!(!table.contains("test/2"), "{table}");
    scenario.fleet.stop().unwrap();
}
