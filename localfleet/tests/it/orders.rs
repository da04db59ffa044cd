//! Operators' orders about single machines, with real daemons: a pause over a kill of the
//! dominator, and an update now.

use std::fs;

use api::dominator::{Status, SubSummary};

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::trees;

/// Runs domtool; gives its exit code, data and talk.
pub fn domtool(scenario: &Scenario, words: &[&str]) -> (i32, String, String) {
    let output = scenario.fleet.domtool(words).unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_pause_outlives_a_kill_and_a_fast_update_repairs_drift_now() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    trees::make(first.path(), 1);
    trees::make(second.path(), 2);
    let mut scenario = Scenario::start(3);
    scenario.add("test/1", first.path());
    scenario.add("test/2", second.path());
    scenario.converge("test/1");

    let pause = ["pause", "sub-1", "--until", "3h", "--reason", "works"];
    let (code, out, talk) = domtool(&scenario, &pause);
    assert_eq!((code, out.as_str()), (0, "sub-1\n"), "{talk}");
    scenario.fleet.require(Some("test/2")).unwrap();
    let is_so = |sub: &SubSummary| match sub.hostname.as_str() {
        "sub-1" => sub.status == Status::Paused && sub.last_image == "test/1",
        _ => sub.status == Status::Synced && sub.last_image == "test/2",
    };
    let what = "the others have the new image, and the one that is paused has the old";
    let all_so = |subs: &[SubSummary]| subs.len() == 3 && subs.iter().all(is_so);
    scenario.wait_until(what, all_so);

    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    scenario.wait_until(what, all_so);
    let (code, out, talk) = domtool(&scenario, &["fast-update", "sub-1"]);
    assert_eq!(code, 1, "{out}{talk}");
    assert!(out.starts_with("sub-1: paused: "), "{out}");
    scenario.wait_until(what, all_so);

    // A machine that is in sync is listed too, and the history says until when it is paused.
    let (code, _, talk) = domtool(&scenario, &["pause", "sub-2", "--until", "3h", "--why", "w"]);
    assert_eq!(code, 0, "{talk}");
    let (code, out, talk) = domtool(&scenario, &["list-pauses"]);
    assert_eq!(code, 0, "{talk}");
    let rows: Vec<Vec<&str>> =
        out.lines().map(|line| line.split_whitespace().take(2).collect()).collect();
    assert_eq!(rows, [["HOST", "STATUS"], ["sub-1", "paused"], ["sub-2", "synced"]], "{out}");
    let (code, out, talk) = domtool(&scenario, &["audit", "--host", "sub-1"]);
    assert_eq!(code, 0, "{talk}");
    let (_, end) = out.split_once(": until ").unwrap();
    assert!(end.contains("Z; works"), "{out}");

    let (code, out, talk) = domtool(&scenario, &["resume", "sub-*"]);
    assert_eq!((code, out.as_str()), (0, "sub-1\nsub-2\n"), "{talk}");
    scenario.fleet.wait_synced("test/2", CONVERGE_MAX, |_| {}).unwrap();
    scenario.verify(second.path());

    // Drift is gone when the command returns.
    let root = &scenario.fleet.subs[1].root;
    fs::write(root.join("etc/unwanted"), "drift").unwrap();
    let (code, out, talk) = domtool(&scenario, &["fast-update", "sub-2"]);
    assert_eq!((code, out.as_str()), (0, "sub-2: synced: equals test/2\n"), "{talk}");
    assert!(!root.join("etc/unwanted").exists(), "{talk}");
    let (code, out, talk) = domtool(&scenario, &["explain", "sub-2"]);
    assert_eq!(code, 0, "{talk}");
    assert!(out.starts_with("sub-2: synced: equals test/2\n"), "{out}");
    assert!(out.contains("test/2, by its record in the machine database"), "{out}");
    scenario.verify(second.path());
}
