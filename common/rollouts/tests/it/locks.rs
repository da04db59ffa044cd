//! Locks, and rollouts that wait.

use expect_test::expect;
use serde_json::{Value, json};

use crate::{answer, states};

fn document() -> Value {
    json!({"environments": [
        {"name": "vpc", "desired": 2, "committed": 1},
        {"name": "rds", "desired": 2, "committed": 1, "depends_on": ["vpc"]},
        {"name": "ec2", "desired": 2, "committed": 1, "depends_on": ["rds"]},
        {"name": "dns", "desired": 2, "committed": 1},
    ], "scan": "plan"})
}

fn start(document: &mut Value, id: &str, environments: &[&str]) -> String {
    document["event"] = json!({"start": {"id": id, "environments": environments, "by": "ann"}});
    let answer = answer(document);
    let event = answer.event.as_ref().unwrap();
    let pending = answer.pending.as_ref().map_or("none", |rollout| rollout.id.as_str());
    let scope: Vec<&str> = answer.lock.scope.iter().map(String::as_str).collect();
    let said = format!(
        "{} {}\n{}pending {pending}, locks {}\n",
        event.code,
        event.message,
        states(&answer),
        scope.join(" ")
    );
    document["rollout"] = json!(answer.rollout);
    document["pending"] = json!(answer.pending);
    document["event"] = Value::Null;
    said
}

#[test]
fn a_start_waits_for_the_rollout_in_progress_and_replaces_one_that_waits() {
    let mut document = document();
    let mut said = start(&mut document, "r1", &["dns@2"]);
    said += &start(&mut document, "r2", &["vpc@2"]);
    said += &start(&mut document, "r3", &["rds@2"]);
    document["rollout"]["steps"][0]["plan_is_empty"] = json!(true);
    said += &states(&answer(&document));
    expect![[r#"
        200 r1 is started
        r1 running
        dns planning: a plan is to be made
        pending none, locks dns
        200 r2 is started
        r1 running
        dns planning: a plan is to be made
        pending r2, locks dns
        200 r3 is started; it replaces r2
        r1 running
        dns planning: a plan is to be made
        pending r3, locks dns
        r3 running
        ec2 waiting
        rds planning: a plan is to be made
    "#]]
    .assert_eq(&said);
}

#[test]
fn a_start_that_is_wrong_records_nothing() {
    let cases: [&[&str]; 5] = [&["dns@1"], &["dns@2", "mail@1"], &["dns"], &["dns@two"], &[]];
    let said = cases.map(|environments| start(&mut document(), "r1", environments));
    expect![[r#"
        409 dns has revision 2 now, and 1 was named
        no rollout
        pending none, locks 
        404 there is no environment `mail`
        no rollout
        pending none, locks 
        400 `dns` is not of the form NAME@REVISION
        no rollout
        pending none, locks 
        400 `dns@two` is not of the form NAME@REVISION
        no rollout
        pending none, locks 
        400 no environment is named
        no rollout
        pending none, locks 
    "#]]
    .assert_eq(&said.concat());
    let mut document = document();
    document["event"] = json!({"invalid": {"environment": "dns", "reason": "no such image"}});
    let answer = answer(&document);
    assert_eq!(
        json!(answer.event),
        json!({"code": 400,
        "message": "dns: no such image: nothing is recorded"})
    );
    assert_eq!((answer.rollout, answer.pending), (None, None));
}

#[test]
fn a_rollout_waits_for_the_lock_of_its_neighbours() {
    let other = |environment: &str, state: &str, kind: &str| {
        let mut document = document();
        document["others"] = json!([
            {"id": "r0", "kind": kind, "state": state, "environments": [environment]}]);
        start(&mut document, "r1", &["rds@2"]).lines().nth(1).unwrap().to_owned() + "\n"
    };
    let said = [
        other("vpc", "running", "user"),
        other("ec2", "rollback_failed", "user"),
        other("dns", "running", "user"),
        other("vpc", "pending", "user"),
        other("vpc", "running", "health_repair"),
    ];
    expect![[r#"
        r1 pending: waits for the lock of r0
        r1 pending: waits for the lock of r0
        r1 running
        r1 running
        r1 running
    "#]]
    .assert_eq(&said.concat());
    let mut document = document();
    document["lock"] = json!("global");
    document["others"] = json!([{"id": "r0", "state": "running", "environments": ["dns"]}]);
    let said = start(&mut document, "r1", &["rds@2"]);
    assert_eq!(said.lines().nth(1).unwrap(), "r1 pending: waits for the lock of r0");
}
