//! Which machines are changed, and what is started and stopped on them.

use expect_test::{expect, expect_file};
use serde_json::{Value, json};

use crate::{answer, machine};

fn document(strategy: Value, machines: Vec<Value>) -> Value {
    json!({
        "environments": [{"name": "e", "desired": 2, "committed": 1, "strategy": strategy}],
        "rollout": {"id": "r1", "state": "running", "steps": [
            {"id": "e", "environment": "e", "revision": 2, "from": 1, "state": "applying",
             "digest": "d", "applied": true}]},
        "machines": machines,
    })
}

/// Says what is done with machines `a`, `b` and so on, which have these revisions and states.
fn batch(strategy: &Value, machines: &[(u64, &str)]) -> String {
    let named = machines.iter().zip('a'..='z').map(|((revision, state), host)| {
        let mut machine = machine(&host.to_string(), *revision, state);
        match *state {
            "none" => machine["tasks"] = json!([]),
            "cut" => {
                machine["reachable"] = json!(false);
                machine["tasks"][0]["state"] = json!("running");
            }
            _ => {}
        }
        machine
    });
    let answer = answer(&document(strategy.clone(), named.collect()));
    match answer.batches.first() {
        Some(batch) => {
            let state = json!(batch.state);
            format!("{} {}: {}\n", state.as_str().unwrap(), batch.hosts.join(" "), batch.reason)
        }
        None => answer.rollout.unwrap().steps[0].cause.clone() + "\n",
    }
}

#[test]
fn as_many_stay_healthy_as_the_percentage_says() {
    const OLD: (u64, &str) = (1, "running");
    const NEW: (u64, &str) = (2, "running");
    let half = json!({"min_healthy_percent": 50, "canary": 0});
    let strict = json!({"min_batch": 0, "canary": 0});
    let default = json!({});
    let said = [
        batch(&half, &[OLD; 10]),
        batch(&half, &[(2, "starting"), (1, "stopping"), OLD, OLD, OLD, OLD]),
        batch(&half, &[NEW, NEW, OLD, OLD]),
        batch(&half, &[(1, "unhealthy"), (1, "failed"), (0, "none"), OLD]),
        batch(&half, &[(1, "cut"), (1, "cut"), OLD, OLD]),
        batch(&half, &[NEW, NEW, (1, "cut"), NEW]),
        batch(&half, &[(1, "cut"), (1, "cut"), (1, "cut"), NEW]),
        batch(&default, &[(1, "cut")]),
        batch(&half, &[NEW, NEW, (2, "failed"), NEW]),
        batch(&half, &[NEW, (2, "failed"), (2, "failed"), (2, "unhealthy"), OLD]),
        batch(&default, &[OLD; 20]),
        batch(&default, &[(1, "stopping"), OLD, OLD, OLD, OLD]),
        batch(&default, &[(2, "starting"), OLD, OLD, OLD, OLD]),
        batch(&default, &[(2, "failed"), OLD, OLD, OLD, OLD]),
        batch(&default, &[NEW, OLD, OLD, OLD, OLD, OLD, OLD, OLD, OLD, OLD]),
        batch(&default, &[OLD, OLD, OLD]),
        batch(&default, &[NEW, OLD, OLD]),
        batch(&default, &[NEW, (1, "stopping"), OLD]),
        batch(&strict, &[OLD, OLD, OLD]),
        batch(&default, &[]),
    ];
    expect_file!["said/as_many_stay_healthy_as_the_percentage_says.txt"].assert_eq(&said.concat());
}

/// Says what is started and stopped on one machine with these tasks of `e`.
fn actions(change: impl FnOnce(&mut Value), tasks: &[(u64, &str)]) -> String {
    let tasks = tasks
        .iter()
        .map(|(revision, state)| json!({"environment": "e", "revision": revision, "state": state}));
    let machine = json!({"host": "a", "environments": ["e"], "tasks": tasks.collect::<Vec<_>>()});
    let mut document = document(json!({}), vec![machine]);
    change(&mut document);
    let actions = answer(&document).tasks;
    let Some(actions) = actions.first() else { return "nothing\n".to_owned() };
    let stop = actions.stop.iter().map(|one| format!("stop {}: {}\n", one.revision, one.reason));
    let start = actions.start.iter().map(|one| format!("start {}: {}\n", one.revision, one.reason));
    stop.chain(start).collect()
}

#[test]
fn one_task_is_stopped_before_another_is_started() {
    let none = |_: &mut Value| {};
    let idle = |document: &mut Value| document["rollout"] = Value::Null;
    let inactive = |document: &mut Value| {
        document["rollout"] = Value::Null;
        document["environments"][0]["active"] = json!(false);
    };
    let left = |document: &mut Value| document["machines"][0]["environments"] = json!([]);
    let cut = |document: &mut Value| document["machines"][0]["reachable"] = json!(false);
    let said = [
        actions(none, &[(1, "running")]),
        actions(none, &[(1, "stopping")]),
        actions(none, &[(1, "stopped")]),
        actions(none, &[]),
        actions(none, &[(2, "starting")]),
        actions(none, &[(2, "running"), (1, "running")]),
        actions(none, &[(2, "running"), (2, "running")]),
        actions(idle, &[(1, "failed")]),
        actions(idle, &[]),
        actions(idle, &[(1, "running"), (1, "starting")]),
        actions(inactive, &[(1, "failed")]),
        actions(inactive, &[]),
        actions(inactive, &[(1, "running")]),
        actions(left, &[(1, "running")]),
        actions(cut, &[(1, "running")]),
    ];
    expect![[r#"
        stop 1: the rollout has come to the machine
        nothing
        start 2: the rollout has come to the machine
        start 2: the rollout has come to the machine
        nothing
        stop 1: there may be one
        stop 2: there may be one
        start 1: it is dead
        start 1: the machine is new in the environment
        stop 1: there may be one
        nothing
        nothing
        nothing
        stop 1: the environment does not select the machine
        nothing
    "#]]
    .assert_eq(&said.concat());
}

/// Two steps of one rollout that concern the same machines.
#[test]
fn steps_do_not_take_down_more_together_than_each_may() {
    let machines: Vec<Value> = (1..=4)
        .map(|number| {
            let task = |name: &str| {
                // Two machines have the second one already.
                let revision = if name == "b" && number <= 2 { 2 } else { 1 };
                json!({"environment": name, "revision": revision, "state": "running"})
            };
            let environments = json!(["a", "b"]);
            let host = format!("m{number}");
            let tasks = [task("a"), task("b")];
            json!({"host": host, "environments": environments, "tasks": tasks})
        })
        .collect();
    let environment = |name: &str| {
        let strategy = json!({"min_healthy_percent": 50, "canary": 0});
        json!({"name": name, "desired": 2, "committed": 1, "strategy": strategy})
    };
    let step = |name: &str| {
        let state = "applying";
        json!({"id": name, "environment": name, "revision": 2, "from": 1, "state": state})
    };
    let document = json!({
        "environments": [environment("a"), environment("b")],
        "rollout": {"id": "r1", "state": "running", "steps": [step("a"), step("b")]},
        "machines": machines,
    });
    let answer = answer(&document);
    let hosts: Vec<&[String]> = answer.batches.iter().map(|batch| &*batch.hosts).collect();
    let first = ["m1".to_owned(), "m2".to_owned()];
    assert_eq!(hosts, [&first[..], &[]]);
}
