//! The state, as it is written.

use expect_test::{expect, expect_file};
use provisioning::State;
use serde_json::{Value, json};

use crate::{answer, failures, provision_with, resources, success};

/// A state with all that it can have.
fn whole() -> State {
    let all = resources(&[
        ("database.a", json!({"spec": {"n": 0.12345678901234567}, "sensitive": ["password"]})),
        ("module.b", json!({"needs": ["a"]})),
        ("queue.c", json!({"needs": ["a"]})),
    ]);
    let mut state = State::new("web1");
    provision_with(&all, &mut state, |call| match call.provisioner().0 {
        _ if call.ids().contains("a") => Ok(success(&json!({"a": {"password": "x", "port": 1}}))),
        "ftl" => Err("exit status: 1".to_owned()),
        _ if call.request().token.is_some() => Err("no answer".to_owned()),
        _ => Ok(answer(&json!({"tasks": [{"running": {"token": "t-1"}}]}))),
    });
    assert_eq!(failures(&state), ["b: exit status: 1", "c: no answer"]);
    state
}

#[test]
fn a_state_is_read_as_it_was_written() {
    let state = whole();
    let text = serde_json::to_string_pretty(&state).unwrap() + "\n";
    expect_file!["state.json"].assert_eq(&text);
    assert_eq!(State::parse(&text), Ok(state));
}

#[test]
fn a_damaged_state_or_that_of_another_release_is_refused() {
    let text = serde_json::to_string(&whole()).unwrap();
    let mut newer: Value = serde_json::from_str(&text).unwrap();
    newer["version"] = json!(2);
    newer["new"] = json!(true);
    let mut older = newer.clone();
    older["version"] = json!(0);
    let mut stray: Value = serde_json::from_str(&text).unwrap();
    stray["open"][0]["ids"] = json!(["nowhere"]);
    let mut other: Value = serde_json::from_str(&text).unwrap();
    other["resources"]["a"]["made"]["resource"]["id"] = json!("b");
    let mut unknown: Value = serde_json::from_str(&text).unwrap();
    unknown["resorces"] = json!({});
    let table = [
        String::new(),
        "{}".to_owned(),
        "[]".to_owned(),
        "\0\0\0\0".to_owned(),
        "{\"version\": 1}".to_owned(),
        text[..text.len() / 2].to_owned(),
        format!("{text}{text}"),
        newer.to_string(),
        older.to_string(),
        stray.to_string(),
        other.to_string(),
        unknown.to_string(),
    ];
    let said: String =
        table.iter().map(|text| format!("{}\n", State::parse(text).unwrap_err())).collect();
    expect![[r#"
        file: EOF while parsing a value at line 1 column 0
        file: missing field `version` at line 1 column 2
        file: is an array, expected an object
        file: expected value at line 1 column 1
        file: missing field `machine` at line 1 column 14
        resources: EOF while parsing an object at line 1 column 633
        file: trailing characters at line 1 column 1268
        version: is 2, and this release reads 1: use the one that wrote it
        version: is 0, and this release reads 1: use the one that wrote it
        open: has a token of a resource that is not under way
        resources: has a resource under the id of another
        resorces: the key `resorces` is unknown; is `resources` meant? at line 1 column 120
    "#]]
    .assert_eq(&said);
}

#[test]
fn what_is_read_of_files_and_plugins_can_be_read_again_from_the_state() {
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    let value: Value = serde_json::from_str(&deep(32)).unwrap();
    let all = resources(&[("database.a", json!({"spec": {"deep": value}}))]);
    let mut state = State::new("web1");
    provision_with(&all, &mut state, |_| Ok(success(&json!({"a": {"deep": value}}))));
    let text = serde_json::to_string(&state).unwrap();
    assert_eq!(State::parse(&text), Ok(state));
    let value: Value = serde_json::from_str(&deep(33)).unwrap();
    let mut state = State::new("web1");
    provision_with(&all, &mut state, |_| Ok(success(&json!({"a": {"deep": value}}))));
    assert_eq!(failures(&state), ["a: its answer: an output of `a` lies more than 32 levels deep"]);
}
