//! Documents that cannot be used.

use expect_test::expect;
use rollouts::Document;

#[test]
fn what_does_not_fit_together_is_named() {
    let cases = [
        r#"[]"#,
        r#"{"environments": [{"name": "e", "desired": 1, "requries": {}}]}"#,
        r#"{"environments": [{"name": "e", "desired": 1}, {"name": "e", "desired": 1}]}"#,
        r#"{"environments": [{"name": "", "desired": 1}]}"#,
        r#"{"environments": [{"name": "e", "desired": 1, "group": "g"}]}"#,
        r#"{"environments": [{"name": "e", "desired": 1, "depends_on": ["f"]}]}"#,
        r#"{"environments": [{"name": "a", "desired": 1, "depends_on": ["b"]},
                             {"name": "b", "desired": 1, "depends_on": ["a"]},
                             {"name": "c", "desired": 1, "depends_on": ["a"]}]}"#,
        r#"{"groups": [{"name": "g", "depends_on": ["h"]}, {"name": "h", "depends_on": ["g"]}],
            "environments": []}"#,
        r#"{"environments": [{"name": "e", "desired": 1, "requires": {"sql": "15 or so"}}]}"#,
        r#"{"environments": [{"name": "e", "desired": 1,
            "strategy": {"min_healthy_percent": 100}}]}"#,
        r#"{"environments": [{"name": "e", "desired": 1,
            "strategy": {"method": "start_then_stop"}}]}"#,
        r#"{"environments": [{"name": "e", "desired": 1,
            "approval": {"voters": ["ann"], "min_approvals": 2}}]}"#,
        r#"{"environments": [], "machines": [{"host": "web1", "environments": ["e"]}]}"#,
        r#"{"environments": [], "rollout": {"id": "r1", "steps": [
            {"id": "s", "environment": "e", "revision": 1}]}}"#,
    ];
    let errors = cases.map(|text| Document::parse(text).unwrap_err().to_string() + "\n");
    expect![[r#"
        file: is an array, expected an object
        environments[0].requries: the key `requries` is unknown; is `requires` meant? at line 1 column 56
        environments[1]: `e` is there twice
        environments[0]: has no name
        environments[0].group: there is no group `g`
        environments[0].depends_on: there is no environment `f`
        environments: these depend on each other: a, b
        groups: these depend on each other: g, h
        environments[0].requires.sql: `15 or so` is no range of versions: expected conditions such as `>=15, <17` at line 1 column 77
        environments[0].strategy.min_healthy_percent: 100 leaves no machine that could be changed, use at most 99
        environments[0].strategy.method: start_then_stop would run two versions of a task at once, use stop_then_start
        environments[0].approval.min_approvals: is 2, and there are 1 voters
        machines[0].environments: there is no environment `e`
        rollout.steps: there is no environment `e`
    "#]].assert_eq(&errors.concat());
}
