//! The image that machines get next is fetched ahead.

use std::fs;

use api::dominator::{Status, SubSummary};

use crate::converges::Scenario;
use crate::trees;

#[test]
fn a_switch_to_the_planned_image_needs_no_image_server() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    trees::make(first.path(), 1);
    trees::make(second.path(), 2);
    let mut scenario = Scenario::start(2);
    scenario.add("test/1", first.path());
    scenario.add("test/2", second.path());
    scenario.converge("test/1");

    let database = fs::read_to_string(scenario.fleet.mdb()).unwrap();
    let planned = database.replace("\"PlannedImage\": \"\"", "\"PlannedImage\": \"test/2\"");
    assert_ne!(planned, database);
    fs::write(scenario.fleet.mdb(), planned).unwrap();
    let told = "equals test/1; has all objects of test/2, which comes next";
    wait_until_synced(&mut scenario, told);
    scenario.verify(first.path());

    scenario.fleet.imageserver.kill().unwrap();
    let database = fs::read_to_string(scenario.fleet.mdb()).unwrap();
    let switched =
        database.replace("\"RequiredImage\": \"test/1\"", "\"RequiredImage\": \"test/2\"");
    fs::write(scenario.fleet.mdb(), switched).unwrap();
    wait_until_synced(&mut scenario, "equals test/2");
    scenario.fleet.imageserver.start_again().unwrap();
    scenario.verify(second.path());
}

/// Waits until all machines are synced, and this is said of them.
fn wait_until_synced(scenario: &mut Scenario, detail: &str) {
    let is_so = |sub: &SubSummary| sub.status == Status::Synced && sub.detail == detail;
    scenario.wait_until(detail, |subs| subs.iter().all(is_so));
}
