//! How fast a step goes: its least duration, and what the analysis says between batches.

use expect_test::expect;
use serde_json::{Value, json};

use crate::{answer, machine};

/// Says what a step does that has changed the first `changed` of five machines.
fn said(strategy: &Value, changed: usize, step: &Value) -> String {
    let mut steps = json!([{"id": "e", "environment": "e", "revision": 2, "from": 1,
                            "state": "applying", "digest": "d", "applied": true}]);
    steps[0].as_object_mut().unwrap().extend(step.as_object().unwrap().clone());
    let machines = ["a", "b", "c", "d", "f"].iter().enumerate();
    let machines =
        machines.map(|(index, host)| machine(host, 1 + u64::from(index < changed), "running"));
    let answer = answer(&json!({
        "environments": [{"name": "e", "desired": 2, "committed": 1, "strategy": strategy}],
        "rollout": {"id": "r1", "state": "running", "steps": steps},
        "machines": machines.collect::<Vec<_>>(),
    }));
    let step = &answer.rollout.as_ref().unwrap().steps[0];
    match answer.batches.first() {
        Some(batch) => {
            let hosts = batch.hosts.join(" ");
            format!("{} {hosts}: {}\n", json!(batch.state).as_str().unwrap(), batch.reason)
        }
        None => format!("{}: {}\n", json!(step.state).as_str().unwrap(), step.cause),
    }
}

#[test]
fn machines_are_changed_evenly_over_the_least_duration() {
    let strategy = json!({"min_healthy_percent": 0, "min_duration_s": 100});
    let said =
        |changed, seconds: u64| said(&strategy, changed, &json!({"applying_for_s": seconds}));
    let lines = [
        said(0, 0),
        said(1, 0),
        said(1, 24),
        said(1, 25),
        said(1, 60),
        said(2, 49),
        said(3, 99),
        said(4, 99),
        said(4, 100),
        said(0, 1_000),
        said(5, 99),
        said(5, 100),
    ];
    let begins = json!({"min_healthy_percent": 0, "min_duration_s": 100, "canary": 0});
    let begins = self::said(&begins, 0, &json!({"state": "awaiting_approval", "applied": false}));
    assert_eq!(begins, "go a: 1 of 5 left\n");
    expect![[r#"
        go a: 1 as canary, of 5 left
        wait : has taken 0 of at least 100 s
        wait : has taken 24 of at least 100 s
        go b: 1 of 4 left
        go b c: 2 of 4 left
        wait : has taken 49 of at least 100 s
        go d: 1 of 2 left
        wait : has taken 99 of at least 100 s
        go f: 1 of 1 left
        go a: 1 as canary, of 5 left
        wait : has taken 99 of at least 100 s
        done : 5 of 5 machines are done
    "#]]
    .assert_eq(&lines.concat());
}

#[test]
fn the_analysis_is_heard_before_more_machines_are_changed() {
    let strategy = json!({"min_healthy_percent": 0, "soak_s": 60, "analysis": {"query": "up"}});
    let said = |changed, seconds: u64, advice: &str| {
        let mut step = json!({"healthy_for_s": seconds});
        if !advice.is_empty() {
            step["analysis"] = json!({"advice": advice, "why": "2 % errors"});
        }
        said(&strategy, changed, &step)
    };
    let lines = [
        said(0, 0, ""),
        said(1, 59, ""),
        said(1, 60, ""),
        said(1, 60, "wait"),
        said(1, 60, "roll_back"),
        said(1, 60, "go"),
        said(5, 60, ""),
        said(5, 60, "wait"),
        said(5, 60, "roll_back"),
        said(5, 60, "go"),
    ];
    expect![[r#"
        go a: 1 as canary, of 5 left
        wait : healthy for 59 of 60 s
        wait : waits for the analysis of what was changed
        wait : the analysis says wait: 2 % errors
        failed: the analysis says roll back: 2 % errors
        go b c d f: 4 of 4 left
        wait : waits for the analysis of what was changed
        wait : the analysis says wait: 2 % errors
        failed: the analysis says roll back: 2 % errors
        succeeded: 5 of 5 machines are done
    "#]]
    .assert_eq(&lines.concat());
}

#[test]
fn what_is_urgent_takes_its_time_for_the_analysis_only() {
    let strategy = json!({"min_healthy_percent": 0, "min_duration_s": 100, "analysis": {}});
    let said = |rollout: Value| {
        let mut rollout_of = json!({"id": "r1", "state": "running", "steps": [
            {"id": "e", "environment": "e", "revision": 2, "from": 1, "state": "applying",
             "digest": "d", "applied": true, "applying_for_s": 0}]});
        rollout_of.as_object_mut().unwrap().extend(rollout.as_object().unwrap().clone());
        let answer = answer(&json!({
            "environments": [{"name": "e", "desired": 2, "committed": 1, "strategy": strategy}],
            "rollout": rollout_of,
            "machines": [machine("a", 2, "running"), machine("b", 1, "running")],
        }));
        let batch = &answer.batches[0];
        format!("{} {}\n", batch.hosts.join(" "), batch.reason)
    };
    let lines = [
        said(json!({})),
        said(json!({"urgent": true})),
        said(json!({"kind": "rollback"})),
        said(json!({"kind": "health_repair"})),
    ];
    expect![[r#"
         waits for the analysis of what was changed
         waits for the analysis of what was changed
        b 1 of 1 left
        b 1 of 1 left
    "#]]
    .assert_eq(&lines.concat());
}
