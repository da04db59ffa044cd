//! Votes.

use expect_test::{expect, expect_file};
use serde_json::{Value, json};

use crate::{answer, states};

fn document(approval: Value) -> Value {
    json!({
        "environments": [
            {"name": "e", "desired": 2, "committed": 1, "author": "ann", "approval": approval}],
        "rollout": {"id": "r1", "state": "running", "steps": [
            {"id": "e", "environment": "e", "revision": 2, "from": 1, "state": "awaiting_approval",
             "digest": "d1"}]},
        "machines": [{"host": "web1", "environments": ["e"]}],
    })
}

/// Votes one after the other, and returns what is said and what follows.
fn vote(mut document: Value, votes: &[Value]) -> String {
    let mut said = String::new();
    for vote in votes {
        document["event"] = json!({"vote": vote});
        let answer = answer(&document);
        let event = answer.event.as_ref().unwrap();
        let step = states(&answer).lines().nth(1).unwrap().to_owned();
        said += &format!("{} {} -> {step}\n", event.code, event.message);
        document["rollout"] = json!(answer.rollout);
    }
    said
}

fn of(voter: &str, vote: &str) -> Value {
    json!({"step": "e", "voter": voter, "vote": vote, "digest": "d1"})
}

#[test]
fn votes_decide_and_can_be_changed_until_then() {
    let voters = json!({"voters": ["ann", "bob", "eve"], "min_approvals": 2, "min_rejections": 2});
    let votes = [
        of("bob", "approve"),
        of("bob", "approve"),
        of("bob", "reject"),
        of("eve", "approve"),
        of("ann", "approve"),
        of("bob", "approve"),
    ];
    expect![[r#"
        200 the vote of bob counts -> e awaiting_approval: waits for 1 more of ann, bob, eve
        200 the vote of bob counts -> e awaiting_approval: waits for 1 more of ann, bob, eve
        200 the vote of bob counts -> e awaiting_approval: waits for 2 more of ann, bob, eve
        200 the vote of eve counts -> e awaiting_approval: waits for 1 more of ann, bob, eve
        200 the vote of ann counts -> e applying: approved by ann, eve
        410 e is decided -> e applying: approved by ann, eve
    "#]]
    .assert_eq(&vote(document(voters), &votes));
}

#[test]
fn a_rejection_ends_the_step() {
    let voters = json!({"voters": ["bob", "eve"], "min_approvals": 1});
    expect![[r#"
        200 the vote of bob counts -> e failed: rejected by bob
    "#]]
    .assert_eq(&vote(document(voters), &[of("bob", "reject")]));
}

#[test]
fn the_author_is_not_the_only_approver() {
    let mut voters = json!({"voters": ["ann", "bob"], "min_approvals": 1});
    let votes = [of("ann", "approve"), of("bob", "approve")];
    expect_file!["said/the_author_is_not_the_only_approver.txt"]
        .assert_eq(&vote(document(voters.clone()), &votes));
    voters["author_alone"] = json!(true);
    expect![[r#"
        200 the vote of ann counts -> e applying: approved by ann
    "#]]
    .assert_eq(&vote(document(voters), &votes[..1]));
}

#[test]
fn votes_that_are_forged_late_or_about_another_plan_are_refused() {
    let voters = json!({"voters": ["bob"], "min_approvals": 1});
    let mut forged = of("bob", "approve");
    forged["link_valid"] = json!(false);
    let mut other_plan = of("bob", "approve");
    other_plan["digest"] = json!("d0");
    let mut other_step = of("bob", "approve");
    other_step["step"] = json!("f");
    let late = [of("bob", "approve"), of("bob", "reject")];
    let votes = [forged, other_step, of("mallory", "approve"), other_plan];
    expect_file!["said/votes_that_are_forged_late_or_about_another_plan_are_refused.txt"]
        .assert_eq(&vote(document(voters), &[&votes[..], &late[..]].concat()));
}

#[test]
fn a_vote_counts_only_for_the_plan_that_it_names() {
    let mut document = document(json!({"voters": ["bob", "eve"], "min_approvals": 1}));
    document["rollout"]["steps"][0]["votes"] = json!([
        {"voter": "bob", "vote": "approve", "digest": "d0"},
        {"voter": "mallory", "vote": "approve", "digest": "d1"}]);
    let answer = answer(&document);
    expect![[r#"
        r1 running
        e awaiting_approval: waits for 1 more of bob, eve
        [{"approvers":[],"depends_on":[],"id":"e","rejecters":[]}]"#]]
    .assert_eq(&(states(&answer) + &json!(answer.steps).to_string()));
}
