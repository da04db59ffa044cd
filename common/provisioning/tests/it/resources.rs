//! Resource files.

use expect_test::expect_file;
use model::json::KeyError;
use provisioning::resource::{OnDrift, OnRemoval, Per};
use provisioning::{Resource, Resources};
use serde_json::{Map, Value, json};

fn parse(text: &str) -> Result<Resource, KeyError> {
    Resource::parse(text)
}

#[test]
fn everything_but_id_and_kind_has_a_default() {
    let resource = parse(r#"{"id": "a", "kind": "k"}"#).unwrap();
    let expected = Resource {
        id: "a".to_owned(),
        kind: "k".to_owned(),
        needs: Vec::new(),
        provides: [].into(),
        requires: [].into(),
        spec: Map::new(),
        on_removal: OnRemoval::Keep,
        on_drift: OnDrift::Report,
        per: Per::Machine,
        sensitive: Vec::new(),
        reader: None,
    };
    assert_eq!(resource, expected);
}

#[test]
fn a_whole_file_is_read_and_written() {
    let text = r#"
        # The database of foo.
        {"id": "foodb", "kind": "postgres", "needs": ["net0"], "requires": {"net": ">=1"},
         // As of the last release:
         "provides": {"sql": "15.2"}, "spec": {"size_gib": 10, "deep": [1, {"a": null}]},
         "on_removal": "destroy", "on_drift": "repair", "per": "fleet",
         "sensitive": ["password"], "reader": "www-data"}"#;
    let resource = parse(text).unwrap();
    assert_eq!((resource.on_removal, resource.on_drift), (OnRemoval::Destroy, OnDrift::Repair));
    assert_eq!((resource.per, resource.sensitive.len()), (Per::Fleet, 1));
    assert_eq!(resource.reader.as_deref(), Some("www-data"));
    let written = serde_json::to_string(&resource).unwrap();
    assert_eq!(parse(&written), Ok(resource));
}

/// Arrays in each other.
fn deep(levels: usize) -> String {
    format!("{}{}", "[".repeat(levels), "]".repeat(levels))
}

#[test]
fn what_cannot_be_used_is_refused_with_its_key() {
    let with = |field: &str| format!("{{\"id\": \"a\", \"kind\": \"k\",\n {field}}}");
    let many: Vec<String> = (0..257).map(|index| format!("n{index}")).collect();
    let files = [
        String::new(),
        "[]".to_owned(),
        "{}".to_owned(),
        "7".to_owned(),
        "{\"id\": \"a\"}".to_owned(),
        "{\"id\": \"a\", \"kind\": \"k\"} x".to_owned(),
        "{\"id\": \"../a\", \"kind\": \"k\"}".to_owned(),
        format!("{{\"id\": \"{}\", \"kind\": \"k\"}}", "a".repeat(65)),
        "{\"id\": \"a\", \"kind\": \"\"}".to_owned(),
        with("\"need\": []"),
        with("\"colour\": 1"),
        with("\"on_remove\": \"keep\""),
        with("\"kind\": \"l\""),
        with("\"needs\": \"b\""),
        with("\"needs\": [\"b\", \"b\"]"),
        with("\"needs\": [\"-b\"]"),
        with(&format!("\"needs\": {}", json!(many))),
        with("\"provides\": {\"sql\": \"new\"}"),
        with("\"provides\": {\"a b\": \"1\"}"),
        with("\"provides\": {\"sql\": 15}"),
        with("\"requires\": {\"sql\": \"~1\"}"),
        with("\"spec\": []"),
        with("\"spec\": null"),
        with(&format!("\"spec\": {{\"a\": {}}}", deep(33))),
        with(&format!("\"spec\": {{\"a\": {}}}", deep(200))),
        with("\"on_removal\": \"drop\""),
        with("\"on_drift\": \"fix\""),
        with("\"per\": \"host\""),
        with("\"sensitive\": \"password\""),
        with("\"reader\": \"a b\""),
        with("\"reader\": null"),
        " ".repeat(65_537),
    ];
    let said: String = files
        .iter()
        .map(|text| match parse(text) {
            Err(error) => format!("{error}\n"),
            Ok(resource) => panic!("{resource:?}"),
        })
        .collect();
    expect_file!["refused_files.txt"].assert_eq(&said);
    parse(&with(&format!("\"spec\": {{\"a\": {}}}", deep(32)))).unwrap();
}

#[test]
fn two_files_do_not_state_one_resource() {
    let file = r#"{"id": "a", "kind": "k"}"#;
    let error = Resources::parse([("a.json", file), ("b.json", file)]).unwrap_err();
    let text = model::display::error_chain(&error);
    assert_eq!(text, "b.json: id: `a` is the id of a resource in a.json too");
    let error = Resources::parse([("a.json", file), ("b.json", "{}")]).unwrap_err();
    assert_eq!((&*error.file, &*error.source.at), ("b.json", "file"));
    let many: Vec<(String, String)> = (0..1_001)
        .map(|index| (format!("{index}.json"), format!(r#"{{"id": "r{index}", "kind": "k"}}"#)))
        .collect();
    let many = many.iter().map(|(name, text)| (name.as_str(), text.as_str()));
    let error = Resources::parse(many).unwrap_err();
    assert_eq!(error.source.problem, "there are more than 1000 resources");
}

#[test]
fn the_key_is_of_scope_id_and_inputs() {
    let base = json!({"id": "a", "kind": "k", "needs": ["x", "y"], "provides": {"p": "1"},
        "spec": {"one": 1, "two": {"b": 2, "a": [1, 2]}}});
    let key = |value: &Value, machine: &str| parse(&value.to_string()).unwrap().key(machine);
    let changed = |field: &str, to: Value| {
        let mut value = base.clone();
        value[field] = to;
        key(&value, "m")
    };
    let same = key(&base, "m");
    assert_eq!(same, parse(&base.to_string().replace(':', " : ")).unwrap().key("m"));
    for (field, to) in [
        ("needs", json!(["y", "x"])),
        ("requires", json!({"q": ">=1"})),
        ("on_removal", json!("destroy")),
        ("on_drift", json!("repair")),
        ("sensitive", json!(["password"])),
        ("reader", json!("www-data")),
        ("spec", json!({"two": {"a": [1, 2], "b": 2}, "one": 1})),
    ] {
        assert_eq!(changed(field, to), same, "{field}");
    }
    let mut keys = vec![same, key(&base, "n")];
    for (field, to) in [
        ("id", json!("b")),
        ("kind", json!("l")),
        ("needs", json!(["x"])),
        ("provides", json!({"p": "2"})),
        ("per", json!("fleet")),
        ("spec", json!({"one": 1, "two": {"b": 2, "a": [2, 1]}})),
        ("spec", json!({"one": 1.5, "two": {"b": 2, "a": [1, 2]}})),
    ] {
        keys.push(changed(field, to));
    }
    keys.push(parse(&base.to_string()).unwrap().removal_key("m"));
    let count = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), count);
    // A fleet has one, whichever machine asks.
    let mut fleet = base;
    fleet["per"] = json!("fleet");
    assert_eq!(key(&fleet, "m"), key(&fleet, "n"));
}
