//! `domtool cron` and `domtool task schedule`: docs/TASKS.md shows what they say.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use expect_test::{expect, expect_file};
use testing::document::{blocks, with_outputs};

use crate::certificates::{done, plain, run};

fn document() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/TASKS.md")
}

/// Writes the files of the document, which are its second and its third block of JSON.
fn write_files(directory: &Path, document: &str) {
    let files = blocks(document, "json").into_iter().skip(1);
    for (name, text) in ["logd.json", "runs.json"].iter().zip(files) {
        fs::write(directory.join(name), text).unwrap();
    }
}

/// Splits a line into words; those in quotes may have blanks.
fn words(line: &str) -> Vec<String> {
    let parts = line.split('\'').enumerate();
    let words = parts.flat_map(|(index, part)| match index % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    });
    words.collect()
}

/// Returns `document` with what those of its commands say in `directory` that call no dominator.
pub(crate) fn as_said(document: &str, directory: &Path) -> String {
    with_outputs(document, |command| {
        let command = command.strip_prefix("domtool ")?;
        let calls_nobody = ["cron ", "task schedule ", "rollout decide "];
        calls_nobody.iter().find(|begin| command.starts_with(*begin))?;
        let command = words(command);
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let output = plain(&run(directory, &command));
        Some(output.split_once("exit ").unwrap().0.to_owned())
    })
}

#[test]
fn the_document_shows_what_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(document()).unwrap();
    write_files(directory.path(), &text);
    let said = as_said(&text, directory.path());
    expect_file![document()].assert_eq(&said);
}

#[test]
fn a_task_file_may_come_from_standard_input() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_domtool"))
        .args(["task", "schedule", "-", "--format", "json", "--at", "2026-11-26T12:00:00Z"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let file = br#"{"name": "migrate", "argv": ["/bin/migrate"], "restart": {"policy": "never"}}"#;
    child.stdin.take().unwrap().write_all(file).unwrap();
    let output = child.wait_with_output().unwrap();
    expect![[r#"
        {
          "task": "migrate",
          "zone": null,
          "time": "2026-11-26T12:00:00Z",
          "previous": null,
          "next": null,
          "last_stop": null,
          "period_start": null,
          "should_run": true,
          "template": "d4aaabadb2cd842350e2bb894783ad085c0262ea4d02bec7b60932a9e71239bc",
          "decision": {
            "create": [
              {
                "name": "migrate-1795694400-0",
                "run_id": 0,
                "held": false,
                "scheduled_at": "2026-11-26T12:00:00Z",
                "manual": false,
                "reason": "the task must run, and no run is there"
              }
            ],
            "delete": [],
            "release": [],
            "refused": null,
            "wake_at": null
          },
          "condition": {
            "running": false,
            "expected": false,
            "since": null,
            "reason": "the task is wanted always, and no run is there"
          },
          "upcoming": []
        }
        exit 0
    "#]]
    .assert_eq(&plain(&output));
}

#[test]
fn faults_say_where_they_are() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    write_files(path, &fs::read_to_string(document()).unwrap());
    let file = fs::read_to_string(path.join("logd.json")).unwrap();
    fs::write(path.join("bad.json"), file.replace("17:00", "27:00")).unwrap();
    fs::write(path.join("bad-runs.json"), r#"{"runs": [{"name": "a", "state": "dead"}]}"#).unwrap();
    fs::write(path.join("long.json"), " ".repeat(70_000)).unwrap();
    let table: [&[&str]; 8] = [
        &["task", "schedule", "bad.json"],
        &["task", "schedule", "bad.json", "--format", "json"],
        &["task", "schedule", "logd.json", "--runs", "bad-runs.json", "--format", "json"],
        &["task", "schedule", "long.json", "--format", "json"],
        &["task", "schedule", "none.json", "--format", "json"],
        &["cron", "0 9 * * MON", "--zone", "Mars/Base", "--format", "json"],
        &["cron", "0 9 * *"],
        &["cron", "0 9 * * FRI-MON", "--format", "json"],
    ];
    let told: Vec<String> = table
        .iter()
        .map(|arguments| {
            let output = plain(&run(path, arguments));
            format!("{}\n{output}", arguments.join(" "))
        })
        .collect();
    expect_file!["faults_of_tasks.txt"].assert_eq(&told.concat());
}

#[test]
fn a_moment_that_is_none_is_misuse() {
    let directory = tempfile::tempdir().unwrap();
    let output = run(directory.path(), &["cron", "@daily", "--at", "noon", "--format", "json"]);
    let (code, data, talk) = testing::exit_and_output(&output);
    assert_eq!((code, data.as_str()), (Some(2), ""));
    assert!(talk.contains("`noon` is no time: expected a time such as 18:30"), "{talk}");
}

#[test]
fn a_moment_is_asked_with_flags_or_as_a_whole() {
    let directory = tempfile::tempdir().unwrap();
    let asked = |flags: &[&str]| {
        let arguments = ["cron", "0 9 * * *", "--at", "2026-11-26T09:00:00Z", "--format", "json"];
        let output = done(directory.path(), &[&arguments, flags].concat());
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        answer
    };
    let whole = serde_json::json!({
        "expression": "0 9 * * *", "zone": "UTC", "time": "2026-11-26T09:00:00Z",
        "previous": "2026-11-26T09:00:00Z", "next": "2026-11-27T09:00:00Z", "fires": true,
    });
    assert_eq!(asked(&[]), whole);
    assert_eq!(asked(&["--prev", "--next", "--fires"]), whole);
    let mut previous = whole;
    let fields = previous.as_object_mut().unwrap();
    fields.remove("next");
    fields.remove("fires");
    assert_eq!(asked(&["--prev"]), previous);
}
