//! What plugins answer.

use expect_test::expect_file;
use provisioning::protocol::{Answer, Operation, PlanAnswer};

#[test]
fn an_answer_that_is_none_is_refused_without_its_values() {
    let answers = [
        "",
        "hunter2",
        "[]",
        "{}",
        "{\"tasks\": [",
        "{\"tasks\": {}}",
        "{\"tasks\": []} hunter2",
        "{\"tasks\": [\"hunter2\"]}",
        "{\"task\": []}",
        "{\"tasks\": [{\"sucess\": {}}]}",
        "{\"tasks\": [{\"running\": \"hunter2\"}]}",
        "{\"tasks\": [{\"running\": {}}]}",
        "{\"tasks\": [{\"running\": {\"token\": 7}}]}",
        "{\"tasks\": [{\"success\": {\"outputs\": {\"a\": \"hunter2, expected x\"}}}]}",
        "{\"tasks\": [{\"success\": {\"outputs\": \"a, expected hunter2\"}}]}",
        "{\"tasks\": [{\"failed\": \"hunter2\"}]}",
        "{\"tasks\": [{\"ids\": \"a\", \"failed\": {\"error\": \"x\"}}]}",
    ];
    let said: String = answers
        .iter()
        .map(|text| format!("{}\n", Answer::parse(text.as_bytes()).unwrap_err()))
        .collect();
    assert!(!said.contains("hunter2"), "{said}");
    expect_file!["refused_answers.txt"].assert_eq(&said);
    let long = format!("{{\"tasks\": [{}]}}", " ".repeat(1 << 20));
    let error = Answer::parse(long.as_bytes()).unwrap_err();
    assert_eq!(error.to_string(), "its answer: has more than 1048576 bytes");
}

#[test]
fn a_plan_is_for_people() {
    let text = r#"{"changes": [{"id": "a", "op": "create", "text": "with\u001b[2J 10 GiB"},
        {"id": "b", "op": "none", "error": "cannot shrink"}]}"#;
    let answer = PlanAnswer::parse(text.as_bytes()).unwrap();
    assert_eq!(answer.changes[0].op, Operation::Create);
    assert_eq!(answer.changes[0].text, "with [2J 10 GiB");
    assert_eq!(answer.changes[1].error.as_deref(), Some("cannot shrink"));
    let error = PlanAnswer::parse(br#"{"changes": [{"id": "a", "op": "shrink"}]}"#).unwrap_err();
    assert_eq!(error.at, "its answer: changes[0].op");
    let expected = "expected one of `create`, `update`, `delete`, `none` at line 1 column 39";
    assert_eq!(error.problem, expected);
}
