//! Documents that cannot be used.

use expect_test::expect_file;
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
    expect_file!["said/what_does_not_fit_together_is_named.txt"].assert_eq(&errors.concat());
}
