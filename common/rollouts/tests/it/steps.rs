//! How steps follow each other, are aborted, and go back.

use expect_test::{expect, expect_file};
use serde_json::{Value, json};

use crate::{answer, machine, states};

/// Returns a document whose rollout has steps of these environments, states and dependencies.
fn document(steps: &[(&str, &str, &[&str])]) -> Value {
    let environments = steps.iter().map(
        |(name, _, needs)| json!({"name": name, "desired": 2, "committed": 1, "depends_on": needs}),
    );
    let of_rollout = steps.iter().map(|(name, state, _)| {
        let applied = ["applying", "soaking", "succeeded"].contains(state);
        json!({"id": name, "environment": name, "revision": 2, "from": 1, "state": state,
               "applied": applied})
    });
    json!({
        "environments": environments.collect::<Vec<_>>(),
        "rollout": {"id": "r1", "state": "running", "steps": of_rollout.collect::<Vec<_>>()},
    })
}

#[test]
fn a_step_begins_when_those_that_it_depends_on_are_done() {
    let ready = |steps: &[(&str, &str, &[&str])]| answer(&document(steps)).ready;
    assert_eq!(ready(&[("foo", "waiting", &[]), ("bar", "waiting", &["foo"])]), ["foo"]);
    let three: [(&str, &str, &[&str]); 3] =
        [("foo", "succeeded", &[]), ("bar", "waiting", &["foo"]), ("zoo", "waiting", &["foo"])];
    assert_eq!(ready(&three), ["bar", "zoo"]);
    assert_eq!(ready(&[("foo", "noop", &[]), ("bar", "waiting", &["foo"])]), ["bar"]);
    assert_eq!(ready(&[("foo", "applying", &[]), ("bar", "waiting", &["foo"])]), [""; 0]);
}

#[test]
fn an_environment_of_a_group_waits_for_the_groups_before() {
    let mut document = document(&[("doo", "waiting", &[]), ("foo", "waiting", &[])]);
    document["groups"] = json!([{"name": "shared"}, {"name": "dev", "depends_on": ["shared"]}]);
    document["environments"][0]["group"] = json!("shared");
    document["environments"][1]["group"] = json!("dev");
    assert_eq!(answer(&document).ready, ["doo"]);
}

#[test]
fn a_failure_aborts_all_and_undoes_what_was_applied_in_reverse_order() {
    let mut document = document(&[
        ("foo", "succeeded", &[]),
        ("bar", "applying", &["foo"]),
        ("baz", "planning", &[]),
        ("zoo", "waiting", &["bar"]),
    ]);
    let created = json!([{"id": "db", "on_removal": "destroy"}, {"id": "net"},
                         {"id": "role", "on_removal": "destroy"}]);
    document["rollout"]["steps"][0]["created_resources"] = created;
    document["event"] = json!({"failure": {"step": "baz", "reason": "no plan: out of reach"}});
    let answer = answer(&document);
    expect![[r#"
        r1 rolling_back: baz failed: no plan: out of reach
        foo succeeded
        bar aborted: baz failed: no plan: out of reach
        baz failed: no plan: out of reach
        zoo aborted: baz failed: no plan: out of reach
        foo-back waiting: a step of the rollout has failed
        bar-back planning: a plan is to be made
    "#]]
    .assert_eq(&states(&answer));
    assert_eq!(answer.abort, ["bar", "zoo"]);
    assert_eq!(answer.rollback, ["foo-back", "bar-back"]);
    assert_eq!(answer.ready, ["bar-back"]);
    let back = &answer.rollout.unwrap().steps[4];
    assert_eq!((back.revision, back.from), (Some(1), Some(2)));
    assert_eq!(back.destroy, ["role", "db"]);
}

#[test]
fn a_rollout_of_which_nothing_was_applied_is_rolled_back_at_once() {
    let mut document = document(&[("foo", "planning", &[]), ("bar", "waiting", &["foo"])]);
    document["event"] = json!({"failure": {"step": "foo", "reason": "it is wrong"}});
    expect![[r#"
        r1 rolled_back: foo failed: it is wrong
        foo failed: it is wrong
        bar aborted: foo failed: it is wrong
    "#]]
    .assert_eq(&states(&answer(&document)));
}

#[test]
fn a_step_back_that_fails_does_not_keep_the_others() {
    let mut document = document(&[("foo", "succeeded", &[]), ("bar", "succeeded", &["foo"])]);
    let steps = document["rollout"]["steps"].as_array_mut().unwrap();
    steps.push(json!({"id": "foo-back", "environment": "foo", "revision": 1, "direction": "back"}));
    steps.push(json!({"id": "bar-back", "environment": "bar", "revision": 1, "direction": "back",
                      "state": "planning"}));
    document["rollout"]["state"] = json!("rolling_back");
    document["event"] = json!({"failure": {"step": "bar-back", "reason": "the disk is full"}});
    let first = answer(&document);
    expect![[r#"
        r1 rolling_back
        foo succeeded
        bar succeeded
        foo-back planning: a plan is to be made
        bar-back failed: the disk is full
    "#]]
    .assert_eq(&states(&first));
    assert_eq!(first.ready, ["foo-back"]);
    document["rollout"] = json!(first.rollout);
    document["rollout"]["steps"][2]["plan_is_empty"] = json!(true);
    document["event"] = Value::Null;
    expect![[r#"
        r1 rollback_failed: bar-back failed: the disk is full; resolve it
        foo succeeded
        bar succeeded
        foo-back noop: the plan changes nothing
        bar-back failed: the disk is full
    "#]]
    .assert_eq(&states(&answer(&document)));
}

#[test]
fn a_step_goes_from_its_plan_to_its_end() {
    let mut document = document(&[("e", "waiting", &[])]);
    document["machines"] = json!([machine("web1", 1, "running")]);
    let mut said = String::new();
    let mut round = |document: &mut Value| {
        let answer = answer(document);
        said += &states(&answer);
        said += &format!("  {}\n", json!(answer.tasks));
        document["rollout"] = json!(answer.rollout);
    };
    round(&mut document);
    document["rollout"]["steps"][0]["digest"] = json!("d1");
    round(&mut document);
    for (revision, state) in [(1, "stopping"), (1, "stopped"), (2, "starting"), (2, "running")] {
        document["machines"] = json!([machine("web1", revision, state)]);
        round(&mut document);
    }
    document["rollout"]["steps"][0]["soaked"] = json!(true);
    round(&mut document);
    expect_file!["said/a_step_goes_from_its_plan_to_its_end.txt"].assert_eq(&said);
}

#[test]
fn a_version_that_is_required_is_not_taken_away() {
    let mut document = document(&[("db", "planning", &[])]);
    document["environments"] = json!([
        {"name": "db", "desired": 2, "committed": 1, "provides": {"sql": "16.1"},
         "committed_provides": {"sql": "15.2"}},
        {"name": "web", "desired": 1, "committed": 1, "depends_on": ["db"],
         "requires": {"sql": "<16"}},
    ]);
    document["rollout"]["steps"][0]["digest"] = json!("d1");
    let refused = answer(&document);
    expect![[r#"
        r1 rolled_back: db failed: web requires sql <16, and db provides 16.1
        db failed: web requires sql <16, and db provides 16.1
    "#]]
    .assert_eq(&states(&refused));
    document["environments"][0]["disjoint"] = json!(true);
    let beside = answer(&document);
    expect_file!["said/a_version_that_is_required_is_not_taken_away.txt"]
        .assert_eq(&(states(&beside) + &json!(beside.graph).to_string()));
    // Nothing requires the old one any more.
    document["environments"][0]["kept"] = json!([{"revision": 1, "provides": {"sql": "15.2"}}]);
    document["environments"][1]["requires"] = json!({"sql": ">=16"});
    document["others"] = json!([{"id": "r9", "state": "pending", "environments": ["db"]}]);
    let cleanup = json!([{"environment": "db", "revision": 1, "after": ["r9"]}]);
    assert_eq!(json!(answer(&document).cleanup), cleanup);
}

#[test]
fn a_scan_takes_dependants_or_only_what_differs() {
    let document = json!({"environments": [
        {"name": "vpc", "desired": 1, "committed": 1},
        {"name": "rds", "desired": 2, "committed": 1, "depends_on": ["vpc"]},
        {"name": "dns", "desired": 1, "committed": 1, "depends_on": ["rds"]},
        {"name": "ec2", "desired": 4, "committed": 3, "depends_on": ["dns"]},
    ]});
    let scan = json!({"graph": {"rds": [], "dns": ["rds"], "ec2": ["dns"]},
                      "plan": {"rds": [], "ec2": ["rds"]}});
    assert_eq!(json!(answer(&document).scan), scan);
}
