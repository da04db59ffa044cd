//! Rollbacks to the former image, with real daemons: over a kill of the dominator, to their end.

use api::dominator::Status;
use serde_json::Value;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::orders::domtool;
use crate::trees;

fn json(scenario: &Scenario, words: &[&str]) -> Value {
    let (code, out, said) = domtool(scenario, &[&["--format", "json"], words].concat());
    assert_eq!(code, 0, "{words:?}: {said}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn machines_go_back_to_their_former_image_until_another_is_required() {
    let directory = tempfile::tempdir().unwrap();
    let mut scenario = Scenario::start(2);
    let roots = [1, 2, 3].map(|version| {
        let tree = directory.path().join(version.to_string());
        trees::make(&tree, version);
        scenario.add(&format!("test/{version}"), &tree);
        tree
    });
    scenario.converge("test/1");
    let (code, out, said) = domtool(&scenario, &["rollback", "--from", "test/1", "sub-*"]);
    assert_eq!((code, out.as_str()), (1, ""), "{said}");
    assert!(said.contains("the former image of sub-1, sub-2 is not known"), "{said}");

    scenario.converge("test/2");
    let back = ["rollback", "--from", "test/2", "sub-1", "--why", "test/2 crashes"];
    let (code, out, said) = domtool(&scenario, &back);
    assert_eq!(code, 0, "{said}");
    assert!(out.contains("\n sub-1  test/2  test/1"), "{out}");
    assert!(said.contains("To make this permanent, set RequiredImage to test/1"), "{said}");
    let what = "one machine has its former image";
    let is_so = |subs: &[api::dominator::SubSummary]| {
        subs.iter().all(|sub| sub.status == Status::Synced)
            && subs[0].last_image == "test/1"
            && subs[1].last_image == "test/2"
    };
    scenario.wait_until(what, is_so);
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    let subs = scenario.wait_until(what, is_so);
    assert!(subs[0].detail.contains("rolled back from test/2 by"), "{}", subs[0].detail);

    let listed = json(&scenario, &["list-rollbacks"]);
    assert_eq!(listed[0]["hostname"], "sub-1");
    assert_eq!(listed[0]["rollback"]["image"], "test/1");
    let shown = |words: &[&str]| domtool(&scenario, words).1;
    assert!(shown(&["show-sub", "sub-1"]).contains("ROLLED BACK"));
    assert!(shown(&["explain", "sub-1"]).contains("test/1, rolled back from test/2 by"));
    assert!(
        shown(&["events", "--host", "sub-1"]).contains(": from test/2 to test/1; test/2 crashes")
    );
    assert!(shown(&["list-subs", "--image", "test/1"]).contains("sub-1"));
    let log = scenario.directory.path().join("dominator/audit/audit.log");
    let log = shown(&["audit", "show", log.to_str().unwrap()]);
    assert!(log.contains("Dominator.RollBack"), "{log}");

    // It is given again after its advice was taken: nobody goes on to the image that crashes.
    let images = [("sub-1", "test/1"), ("sub-2", "test/2")];
    let images = images.map(|(host, image)| (host.to_owned(), image));
    scenario.fleet.require_each(&images.into()).unwrap();
    scenario.wait_until("the record is taken", |subs| !subs[0].detail.contains("rolled back"));
    let (code, _, said) = domtool(&scenario, &back);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("test/2 is not required of sub-1, so there is nothing"), "{said}");
    let (code, out, said) = domtool(&scenario, &["rollback", "--from", "test/2", "sub-*"]);
    assert_eq!(code, 3, "{said}");
    assert!(
        said.contains("Left out, because test/2 is not required: 1 machine (sub-1)."),
        "{said}"
    );
    assert!(out.contains("\n sub-2  test/2  test/1") && !out.contains("sub-1"), "{out}");
    scenario.fleet.wait_synced("test/1", CONVERGE_MAX, |_| {}).unwrap();

    // Another image ends it, and the image from which it was rolled back does not bring it back.
    for image in ["test/3", "test/2"] {
        scenario.converge(image);
    }
    assert_eq!(json(&scenario, &["list-rollbacks"]), Value::Array(Vec::new()));
    scenario.verify(&roots[1]);

    let (code, _, said) = domtool(&scenario, &["rollback", "--from", "test/2", "sub-*"]);
    assert_eq!(code, 0, "{said}");
    scenario.fleet.wait_synced("test/3", CONVERGE_MAX, |_| {}).unwrap();
    scenario.verify(&roots[2]);
    let (code, _, said) = domtool(&scenario, &["rollback", "--end", "sub-*"]);
    assert_eq!(code, 0, "{said}");
    scenario.fleet.wait_synced("test/2", CONVERGE_MAX, |_| {}).unwrap();
    let (code, _, said) = domtool(&scenario, &["rollback", "--end", "sub-1"]);
    assert_eq!(code, 1);
    assert!(said.contains("sub-1 is not rolled back"), "{said}");

    let deleted = scenario.fleet.imagetool(&["delete", "--yes", "--force", "test/3"]).unwrap();
    assert!(deleted.status.success());
    let (code, _, said) = domtool(&scenario, &["rollback", "--from", "test/2", "sub-1"]);
    assert_eq!(code, 1);
    assert!(said.contains("the image server does not give test/3, the former image"), "{said}");
    scenario.verify(&roots[1]);
}
