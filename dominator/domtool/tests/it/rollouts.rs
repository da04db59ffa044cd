//! `domtool rollout decide`: docs/ROLLOUTS.md shows what it says.

use std::fs;
use std::path::Path;

use expect_test::{expect, expect_file};
use testing::document::blocks;

use crate::certificates::{plain, run};
use crate::tasks::as_said;

#[test]
fn the_document_shows_what_is_said() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/ROLLOUTS.md");
    let text = fs::read_to_string(&document).unwrap();
    let directory = tempfile::tempdir().unwrap();
    // The others are environments.
    let is_document = |block: &&str| block.contains("\"event\"");
    let document_of_it = blocks(&text, "json").into_iter().find(is_document).unwrap();
    fs::write(directory.path().join("rollout.json"), document_of_it).unwrap();
    expect_file![document].assert_eq(&as_said(&text, directory.path()));
}

#[test]
fn an_answer_can_be_asked_about_again() {
    let directory = tempfile::tempdir().unwrap();
    let ask = |document: &serde_json::Value| -> serde_json::Value {
        fs::write(directory.path().join("d.json"), document.to_string()).unwrap();
        let said =
            plain(&run(directory.path(), &["rollout", "decide", "d.json", "--format", "json"]));
        serde_json::from_str(said.split_once("exit ").unwrap().0).unwrap()
    };
    let mut document = serde_json::json!({
        "environments": [{"name": "e", "desired": 1}],
        "event": {"start": {"id": "r1", "environments": ["e@1"]}},
    });
    let first = ask(&document);
    assert_eq!(first["rollout"]["steps"][0]["state"], "planning");
    document["rollout"] = first["rollout"].clone();
    document["rollout"]["steps"][0]["plan_is_empty"] = true.into();
    document.as_object_mut().unwrap().remove("event");
    assert_eq!(ask(&document)["rollout"]["state"], "succeeded");
}

#[test]
fn a_document_that_is_wrong_is_named() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("d.json"), r#"{"environments": [{"name": "e"}]}"#).unwrap();
    let ask = |arguments: &[&str]| plain(&run(directory.path(), arguments));
    expect![[r#"
        error: environments[0]: missing field `desired` at line 1 column 31
        exit 1
    "#]]
    .assert_eq(&ask(&["rollout", "decide", "d.json"]));
    expect![[r#"
        {
          "error": "missing field `desired` at line 1 column 31",
          "at": "environments[0]"
        }
        exit 1
    "#]]
    .assert_eq(&ask(&["rollout", "decide", "d.json", "--format", "json"]));
    expect![[r#"
        error: none.json: failed to open file `none.json`: No such file or directory (os error 2)
        exit 1
    "#]]
    .assert_eq(&ask(&["rollout", "decide", "none.json"]));
}
