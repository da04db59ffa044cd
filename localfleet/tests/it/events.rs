//! What an intruder changed is on record when it has been put right.

use std::fs;

use api::dominator::events::{ChangeReason, EventDetails, HistoryEvent, PathOperation};
use api::subd::UpdateOutcome;
use model::object::Algorithm;
use model::tree::{Leaf, Node};
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::trees;

#[test]
fn a_repaired_file_is_on_record_with_the_content_that_it_had() {
    let image = tempfile::tempdir().unwrap();
    trees::make(image.path(), 1);
    fs::write(image.path().join("etc/passwd"), "root:x:0:0\n").unwrap();
    let mut scenario = Scenario::start(2);
    scenario.add("test/1", image.path());
    scenario.converge("test/1");

    let (edited, hostname) = {
        let sub = &scenario.fleet.subs[1];
        (sub.root.join("etc/passwd"), sub.hostname.clone())
    };
    fs::write(&edited, "root::0:0\n").unwrap();
    eventually("the file is repaired", || {
        fs::read_to_string(&edited).unwrap_or_default() == "root:x:0:0\n"
    });
    scenario.fleet.wait_synced("test/1", CONVERGE_MAX, |_| {}).unwrap();

    let words = ["--format", "json", "events", "--path", "/etc/passwd", "--reason", "drift"];
    let event = eventually("the end of the update is recorded", || {
        let shown = scenario.fleet.domtool(&words).unwrap();
        assert!(shown.status.success(), "{shown:?}");
        let mut events: Vec<HistoryEvent> = serde_json::from_slice(&shown.stdout).unwrap();
        assert_eq!(events.len(), 1, "{events:#?}");
        // How it ended is on record soon after.
        match &events[0].what {
            EventDetails::Change { update, .. } if update.outcome.is_some() => Ok(events.remove(0)),
            _ => Err(events),
        }
    });
    assert_eq!(event.about, hostname);
    let EventDetails::Change { update, change } = event.what else { panic!("{:?}", event.what) };
    assert_eq!((update.image.as_str(), update.outcome), ("test/1", Some(UpdateOutcome::Done)));
    assert_eq!((change.operation, change.reason), (PathOperation::Replace, ChangeReason::Drift));
    let object = |node: Option<Node>| match node {
        Some(Node::Leaf(Leaf::File(file))) => file.object.id(),
        other => panic!("{other:?}"),
    };
    let id = |content: &str| Algorithm::Blake3.digest(content.as_bytes());
    assert_eq!(object(change.old), id("root::0:0\n"));
    assert_eq!(object(change.new), id("root:x:0:0\n"));
    scenario.fleet.stop().unwrap();
}
