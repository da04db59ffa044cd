//! What operators and peers get wrong, end to end: an error that says what and where, and
//! everything goes on.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use api::dominator::Status;
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::trees;

#[test]
fn a_bad_machine_database_changes_nothing_and_is_shown() {
    let tree = tempfile::tempdir().unwrap();
    trees::make(tree.path(), 1);
    let mut scenario = Scenario::start(1);
    scenario.add("test/1", tree.path());
    scenario.converge("test/1");
    for bad in ["[\n{\"Hostname\": \"sub-1\",\n \"RequiredImage\": ", "not JSON at all", "{}"] {
        fs::write(scenario.fleet.mdb(), bad).unwrap();
        let error = wait_for_status(&scenario, "mdb_error");
        assert!(error.contains("mdb.json") && error.contains("line"), "{error}");
        let subs = scenario.fleet.statuses().unwrap();
        assert_eq!(subs.len(), 1);
        assert_eq!(subs[0].required_image, "test/1");
    }
    scenario.converge("test/1");
    scenario.verify(tree.path());
}

/// What `domtool status` says in `field`, once it says something.
fn wait_for_status(scenario: &Scenario, field: &str) -> String {
    eventually(&format!("the status has {field}"), || {
        let output = scenario.fleet.domtool(&["--format", "json", "status"]).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        status[field].as_str().map(str::to_owned).ok_or(status)
    })
}

#[test]
fn an_image_that_does_not_exist_is_waited_for_by_name() {
    let tree = tempfile::tempdir().unwrap();
    trees::make(tree.path(), 1);
    let mut scenario = Scenario::start(1);
    scenario.fleet.require(Some("test/later")).unwrap();
    scenario.wait_for_any("no image", |status| status == Status::ImageNotReady);
    let subs = scenario.fleet.statuses().unwrap();
    assert!(subs[0].detail.contains("test/later"), "{subs:?}");
    scenario.add("test/later", tree.path());
    scenario.fleet.wait_synced("test/later", CONVERGE_MAX, |_| {}).unwrap();
    scenario.verify(tree.path());
}

#[test]
fn disable_updates_holds_over_a_restart() {
    let tree = tempfile::tempdir().unwrap();
    trees::make(tree.path(), 1);
    let mut scenario = Scenario::start(1);
    scenario.add("test/1", tree.path());
    let output = scenario.fleet.domtool(&["disable-updates", "testing the brake"]).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    scenario.fleet.require(Some("test/1")).unwrap();
    scenario.wait_for_any("the brake", |status| status == Status::UpdatesDisabled);
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    scenario.wait_for_any("the brake", |status| status == Status::UpdatesDisabled);
    let root = &scenario.fleet.subs[0].root;
    assert!(!root.join("etc").exists(), "an update went past the brake");
    let output = scenario.fleet.domtool(&["enable-updates"]).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    scenario.fleet.wait_synced("test/1", CONVERGE_MAX, |_| {}).unwrap();
    scenario.verify(tree.path());
}

#[test]
fn an_update_that_would_empty_the_machine_waits_for_the_operator() {
    let trees = tempfile::tempdir().unwrap();
    let (full, tiny) = (trees.path().join("full"), trees.path().join("tiny"));
    trees::make(&full, 1);
    fs::create_dir_all(tiny.join("etc")).unwrap();
    fs::write(tiny.join("etc/motd"), "nearly nothing\n").unwrap();
    let mut scenario = Scenario::start(1);
    scenario.add("test/full", &full);
    scenario.add("test/tiny", &tiny);
    scenario.converge("test/full");
    scenario.fleet.require(Some("test/tiny")).unwrap();
    scenario.wait_for_any("the danger", |status| status == Status::UnsafeUpdate);
    scenario.verify(&full);
    let output = scenario.fleet.domtool(&["clear-safety-shutoff", "sub-1"]).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    scenario.fleet.wait_synced("test/tiny", CONVERGE_MAX, |_| {}).unwrap();
    // Directories that hold what the machine keeps stay, though the image does not name them.
    let root = &scenario.fleet.subs[0].root;
    assert_eq!(fs::read_to_string(root.join("etc/motd")).unwrap(), "nearly nothing\n");
    assert_eq!(fs::read_to_string(root.join("srv/data/deep/own")).unwrap(), "sub-1");
    assert!(!root.join("usr").exists() && !root.join("etc/passwd").exists());
}

#[test]
fn every_daemon_survives_absurd_lengths_and_garbage() {
    let mut scenario = Scenario::start(1);
    let addresses = scenario.fleet.addresses().clone();
    let targets = [
        (addresses.imageserver, "ImageServer.GetImage"),
        (addresses.dominator, "Dominator.ShowSub"),
        (scenario.fleet.subs[0].address, "Subd.Prepare"),
    ];
    for (address, method) in targets {
        let absurd = [
            format!(
                "POST /rpc/{method} HTTP/1.1\r\nhost: x\r\ndominator-protocol: 1\r\n\
                 content-length: 1152921504606846976\r\n\r\n"
            )
            .into_bytes(),
            [
                format!(
                    "POST /rpc/{method} HTTP/1.1\r\nhost: x\r\ndominator-protocol: 1\r\n\
                     connection: close\r\ncontent-length: 8\r\n\r\n"
                )
                .into_bytes(),
                (1_u64 << 60).to_le_bytes().to_vec(),
            ]
            .concat(),
            format!(
                "POST /rpc/{method} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
                 content-type: application/json\r\ncontent-length: 3\r\n\r\n{{]x"
            )
            .into_bytes(),
            b"\x00\xff\xfe nothing that anyone speaks \r\n\r\n".to_vec(),
        ];
        for bytes in absurd {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            stream.write_all(&bytes).unwrap();
            let mut answer = [0; 64];
            let length = stream.read(&mut answer).unwrap_or(0);
            let answer = String::from_utf8_lossy(&answer[..length]).into_owned();
            assert!(!answer.starts_with("HTTP/1.1 200"), "{method}: {answer}");
        }
    }
    scenario.fleet.wait_ready().unwrap();
    scenario.fleet.check().unwrap();
}
