//! Maintenance windows, freezes, and what is urgent.

use expect_test::expect;
use model::tree::Time;
use rollouts::window::{Closed, Window, opening};
use serde_json::{Value, json};

use crate::{answer, machine};

fn window(zone: &str, begins: &str, minutes: u32) -> Window {
    Window { zone: zone.to_owned(), begins: begins.to_owned(), minutes }
}

fn time(text: &str) -> Time {
    let at: jiff::Timestamp = text.parse().unwrap();
    Time { seconds: at.as_second(), nanoseconds: 0 }
}

#[test]
fn a_window_is_open_from_its_beginning_for_its_length() {
    let night = window("Europe/Berlin", "0 2 * * *", 120);
    let weekend = window("UTC", "0 0 * * SAT", 2 * 24 * 60);
    let never = window("UTC", "0 0 30 2 *", 60);
    let open = |since: &str| Ok(Some(time(since)));
    let closed = |next: &str| Err(Closed { next: Some(time(next)) });
    #[rustfmt::skip]
    let table = [
        (vec![],                     "2026-06-03T12:00:00Z", Ok(None)),
        (vec![&night],               "2026-06-02T23:59:59Z", closed("2026-06-03T00:00:00Z")),
        (vec![&night],               "2026-06-03T00:00:00Z", open("2026-06-03T00:00:00Z")),
        (vec![&night],               "2026-06-03T01:59:59Z", open("2026-06-03T00:00:00Z")),
        (vec![&night],               "2026-06-03T02:00:00Z", closed("2026-06-04T00:00:00Z")),
        // In winter it is another hour of UTC.
        (vec![&night],               "2026-12-03T01:30:00Z", open("2026-12-03T01:00:00Z")),
        // 2026-06-06 is a Saturday.
        (vec![&night, &weekend],     "2026-06-05T12:00:00Z", closed("2026-06-06T00:00:00Z")),
        (vec![&night, &weekend],     "2026-06-07T12:00:00Z", open("2026-06-06T00:00:00Z")),
        (vec![&never],               "2026-06-07T12:00:00Z", Err(Closed { next: None })),
        (vec![&never, &weekend],     "2026-06-08T00:00:00Z", closed("2026-06-13T00:00:00Z")),
    ];
    for (windows, now, expected) in table {
        let windows: Vec<Window> = windows.into_iter().cloned().collect();
        assert_eq!(opening(&windows, time(now)), expected, "{now} {windows:?}");
    }
}

#[test]
fn a_window_that_cannot_be_is_named() {
    let keys: Vec<String> = [
        window("Europe/Nowhere", "0 2 * * *", 60),
        window("UTC", "0 25 * * *", 60),
        window("UTC", "0 2 * * *", 0),
        window("UTC", "0 2 * * *", 20_000),
    ]
    .iter()
    .map(|window| window.check("windows[0]").unwrap_err().at)
    .collect();
    let expected = ["zone", "begins", "minutes", "minutes"].map(|key| format!("windows[0].{key}"));
    assert_eq!(keys, expected);
}

/// Says what a step does with two machines, of which one is to be changed.
fn said(closed: bool, soaked_s: u64, rollout: &Value) -> String {
    said_of("running", closed, soaked_s, rollout)
}

/// The same, with the state of the one that is to be changed.
fn said_of(state: &str, closed: bool, soaked_s: u64, rollout: &Value) -> String {
    let mut rollout_with_steps = json!({"id": "r1", "state": "running", "by": "ann", "steps": [
        {"id": "e", "environment": "e", "revision": 2, "from": 1, "state": "applying",
         "digest": "d", "applied": true, "healthy_for_s": soaked_s}]});
    rollout_with_steps.as_object_mut().unwrap().extend(rollout.as_object().unwrap().clone());
    let mut environment = json!({"name": "e", "desired": 2, "committed": 1,
                                 "strategy": {"soak_s": 60, "min_healthy_percent": 50}});
    if closed {
        environment["closed"] = "frozen by bob: a sale".into();
    }
    let answer = answer(&json!({
        "environments": [environment],
        "rollout": rollout_with_steps,
        "machines": [machine("a", 2, "running"), machine("b", 1, state)],
    }));
    let batch = &answer.batches[0];
    format!("{} {}\n", batch.hosts.join(" "), batch.reason)
}

#[test]
fn nothing_more_is_changed_while_it_is_closed_unless_it_is_urgent_or_goes_back() {
    let lines = [
        said(false, 60, &json!({})),
        said(true, 60, &json!({})),
        said(false, 10, &json!({})),
        said(true, 10, &json!({"urgent": true})),
        said(true, 60, &json!({"kind": "rollback"})),
        said(true, 60, &json!({"kind": "health_repair"})),
        // What fails with its former revision waits too; what was stopped for the step does not.
        said_of("failed", true, 60, &json!({})),
        said_of("failed", false, 10, &json!({})),
        said_of("stopped", true, 60, &json!({})),
    ];
    expect![[r#"
        b 1 of 1 left
         frozen by bob: a sale
         healthy for 10 of 60 s
        b 1 of 1 left
        b 1 of 1 left
        b 1 of 1 left
         frozen by bob: a sale
         healthy for 10 of 60 s
        b 1 of 1 left
    "#]]
    .assert_eq(&lines.concat());
}

#[test]
fn what_is_urgent_needs_a_vote_of_somebody_else() {
    let said = |votes: Value, urgent: bool| {
        let answer = answer(&json!({
            "environments": [{"name": "e", "desired": 2, "committed": 1, "approval": {
                "voters": ["ann", "bob"], "min_approvals": 1, "author_alone": true}}],
            "rollout": {"id": "r1", "state": "running", "by": "ann", "urgent": urgent, "steps": [
                {"id": "e", "environment": "e", "revision": 2, "from": 1, "digest": "d",
                 "state": "awaiting_approval", "votes": votes}]},
            "machines": [machine("a", 1, "running")],
        }));
        answer.rollout.unwrap().steps[0].cause.clone() + "\n"
    };
    let vote = |voter: &str| json!({"voter": voter, "vote": "approve", "digest": "d"});
    let lines = [
        said(json!([]), true),
        said(json!([vote("ann")]), false),
        said(json!([vote("ann")]), true),
        said(json!([vote("ann"), vote("bob")]), true),
        said(json!([vote("bob")]), true),
    ];
    expect![[r#"
        waits for 1 more of ann, bob
        approved by ann
        is urgent: waits for somebody else than ann
        approved by ann, bob
        approved by bob
    "#]]
    .assert_eq(&lines.concat());
}
