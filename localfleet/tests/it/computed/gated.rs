//! Content revisions that wait for an environment: for votes and a rollout.

use std::fs;

use serde_json::json;
use testing::eventually;

use super::{Generators, add, require, wait_for, wait_for_content};
use crate::converges::Scenario;
use crate::orders::domtool;
use crate::rollouts::{asked, wait_for_state, with_file};
use crate::trees;

/// Waits until the environment has this newest revision.
fn until_revision(scenario: &Scenario, number: u64) {
    eventually("there is a new revision", || {
        let shown = asked(scenario, &["env", "show", "dns"]);
        if shown["newest"] == json!(number) { Ok(()) } else { Err(shown) }
    });
}

/// Approves the plan of a rollout, and waits until it has ended well.
fn approve(scenario: &Scenario, id: &str) {
    let step = format!("{id}/dns");
    let digest = eventually("it waits for votes", || {
        let shown = asked(scenario, &["rollout", "show", id])["rollouts"][0].clone();
        match shown["plans"][0]["digest"].as_str() {
            Some(digest) => Ok(digest.to_owned()),
            None => Err(shown),
        }
    });
    let words = ["approve", &step, "--digest", &digest, "--why", "looked at it"];
    let (code, _, said) = domtool(scenario, &words);
    assert_eq!(code, 0, "{said}");
    wait_for_state(scenario, id, "succeeded");
}

#[test]
fn a_content_revision_comes_to_machines_of_an_environment_by_a_rollout() {
    let directory = tempfile::tempdir().unwrap();
    let mut scenario = Scenario::start(4);
    let tree = directory.path().join("tree");
    trees::make(&tree, 1);
    for name in ["etc/resolv.conf", "etc/site.key"] {
        fs::write(tree.join(name), "a placeholder").unwrap();
    }
    let server = scenario.fleet.addresses().filegen.to_string();
    let generators = Generators::make(&directory.path().join("filegen"), &server);
    add(&scenario, "test/2", &tree, &generators.list);
    let _server = scenario.fleet.start_filegen(&generators.config).unwrap();
    require(&scenario, "test/2", &["nyc"; 4]);
    let [first, second, third] =
        ["first", "second", "third"].map(|word| format!("# {word}\nsearch nyc.example\n"));
    let [old, new] = [first.as_str(), second.as_str()];
    wait_for(&mut scenario, &[old; 4]);
    let mut dns = json!({"name": "dns", "select": {"hosts": ["sub-[123]"]},
        "source": {"content": server}, "strategy": {"min_healthy_percent": 50},
        "approval": {"voters": ["operator"], "min_approvals": 1, "author_alone": true}});
    assert_eq!(with_file(&scenario, &["env", "create"], &dns).0, 0);
    let shown = domtool(&scenario, &["env", "show", "dns"]).1;
    assert!(shown.contains("content revision 1"), "{shown}");

    // A machine in no environment has the new content at once, the others by a rollout.
    generators.write_template("second");
    wait_for(&mut scenario, &[old, old, old, new]);
    until_revision(&scenario, 2);
    let detail = scenario.fleet.detail("sub-1").unwrap().summary.detail;
    let waits =
        format!("content of {server}/2 waits, which comes with a rollout of an environment");
    assert!(detail.contains(&waits), "{detail}");
    let (code, plan, _) = domtool(&scenario, &["rollout", "plan", "dns"]);
    assert_eq!(code, 3);
    let change = format!("3 machines: {server}/1 -> {server}/2 (sub-1, sub-2, sub-3)");
    assert!(plan.contains(&change), "{plan}");
    let started = asked(&scenario, &["rollout", "start", "dns@2", "--why", "other servers"]);
    let id = started["id"].as_str().unwrap();
    wait_for_state(&scenario, id, "running");
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    wait_for(&mut scenario, &[old, old, old, new]);
    approve(&scenario, id);
    wait_for(&mut scenario, &[new; 4]);

    // They go back together, and the machine in no environment does not.
    let back = asked(&scenario, &["rollout", "rollback", "dns", "--why", "wrong servers"]);
    wait_for_state(&scenario, back["id"].as_str().unwrap(), "succeeded");
    wait_for(&mut scenario, &[old, old, old, new]);

    // The next one comes by itself, after the vote. Nobody passes that by an order about content.
    dns["start"] = json!("auto");
    assert_eq!(with_file(&scenario, &["env", "update"], &dns).0, 0);
    generators.write_template("third");
    wait_for_content(&scenario, &[old, old, old, &third]);
    until_revision(&scenario, 4);
    let words = ["computed", "resume", &format!("{server}/3"), "--urgent", "--why", "at once"];
    domtool(&scenario, &words);
    let list = asked(&scenario, &["rollout", "list"]);
    let rollout = list["rollouts"][0]["rollout"].clone();
    assert_eq!((&rollout["kind"], &rollout["by"]), (&json!("mdb"), &json!("the filegen-server")));
    wait_for(&mut scenario, &[old, old, old, &third]);
    approve(&scenario, rollout["id"].as_str().unwrap());
    wait_for(&mut scenario, &[third.as_str(); 4]);
}
