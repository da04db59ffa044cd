//! `dom-provisioner-file`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::{ask, destroyed, failed, made, run};

/// Of `hi`.
const SHA256: &str = "8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4";

fn file() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_dom-provisioner-file"))
}

#[test]
fn a_file_is_made_left_alone_changed_moved_and_removed() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let spec = |name: &str, content: &str| json!({"path": at(name), "content": content});
    let outputs = |name: &str| json!({"path": at(name), "sha256": SHA256});
    let make = |name: &str, previous: &[(&str, Value)]| {
        ask(file(), "provision", &[("f", spec(name, "hi"))], previous)
    };
    let one = |task: Value| json!({"tasks": [task]});
    let inode = |name: &str| std::os::unix::fs::MetadataExt::ino(&fs::metadata(at(name)).unwrap());

    assert_eq!(make("a", &[]), one(made("f", &outputs("a"))));
    assert_eq!(fs::read_to_string(at("a")).unwrap(), "hi");
    assert_eq!(fs::metadata(at("a")).unwrap().permissions().mode() & 0o7777, 0o644);
    let before = inode("a");
    // Again, as after a crash.
    assert_eq!(make("a", &[]), one(made("f", &outputs("a"))));
    assert_eq!(inode("a"), before);
    // What somebody has changed.
    fs::write(at("a"), "drift").unwrap();
    fs::write(at("a.dom-provisioner-new"), "of a crash").unwrap();
    make("a", &[]);
    assert_eq!(fs::read_to_string(at("a")).unwrap(), "hi");
    // A symbolic link is replaced, and not what it names.
    fs::rename(at("a"), at("target")).unwrap();
    std::os::unix::fs::symlink("target", at("a")).unwrap();
    make("a", &[]);
    assert!(fs::symlink_metadata(at("a")).unwrap().is_file());
    fs::remove_file(at("target")).unwrap();
    // Another path.
    assert_eq!(make("b", &[("f", spec("a", "hi"))]), one(made("f", &outputs("b"))));
    assert!(!at("a").exists());
    let removed = ask(file(), "provision", &[], &[("f", spec("b", "hi"))]);
    assert_eq!(removed, one(destroyed("f")));
    assert_eq!(ask(file(), "provision", &[], &[("f", spec("b", "hi"))]), one(destroyed("f")));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_plan_says_what_would_be_done() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let spec = |name: &str, mode: &str| json!({"path": at(name), "content": "hi", "mode": mode});
    fs::write(at("a"), "hi").unwrap();
    fs::write(at("b"), "ho").unwrap();
    let plan = |name: &str, mode: &str, previous: &[(&str, Value)]| {
        let answer = ask(file(), "plan", &[("f", spec(name, mode))], previous);
        answer["changes"][0]["op"].as_str().unwrap().to_owned()
    };
    let table = [
        ("a", "0644", &[][..], "none"),
        ("a", "0600", &[], "update"),
        ("b", "0644", &[], "update"),
        ("c", "0644", &[], "create"),
        ("a", "0644", &[("f", spec("b", "0644"))], "update"),
    ];
    for (name, mode, previous, op) in table {
        assert_eq!(plan(name, mode, previous), op, "{name} {mode}");
    }
    let gone = ask(file(), "plan", &[], &[("f", spec("a", "0644"))]);
    let delete = json!({"id": "f", "op": "delete", "text": "destroy it"});
    assert_eq!(gone, json!({"changes": [delete]}));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
}

#[test]
fn what_cannot_be_made_is_told_and_the_others_are_made() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("directory")).unwrap();
    let good = json!({"path": at("a"), "content": "hi"});
    let table = [
        (json!({"path": "a", "content": ""}), "spec: the path is not absolute".to_owned()),
        (json!({"path": "/a"}), "spec: missing field `content`".to_owned()),
        (
            json!({"path": "/a", "contents": ""}),
            "spec: the key `contents` is unknown; is `content` meant?".to_owned(),
        ),
        (
            json!({"path": "/a", "content": "", "mode": "rw"}),
            "spec: `rw` is no mode such as 0644".to_owned(),
        ),
        (
            json!({"path": at("directory"), "content": ""}),
            format!("{}: is a directory", at("directory").display()),
        ),
        (
            json!({"path": at("none/a"), "content": ""}),
            format!("{}: No such file or directory (os error 2)", at("none/a").display()),
        ),
    ];
    for (spec, error) in table {
        let answer = ask(file(), "provision", &[("f", spec), ("g", good.clone())], &[]);
        let outputs = json!({"path": at("a"), "sha256": SHA256});
        assert_eq!(answer, json!({"tasks": [failed("f", &error), made("g", &outputs)]}));
    }
}

#[test]
fn it_is_no_program_for_people() {
    for (words, said) in [
        (&[][..], "usage: plan, provision or status"),
        (&["provision"], "cannot read the request: "),
    ] {
        let mut command = Command::new(file());
        command.args(words);
        let output = run(command, b"{}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.starts_with(said) && output.status.code() == Some(1), "{text}");
    }
    let unknown = json!({"tasks": [{"unknown": {}}]});
    assert_eq!(ask(file(), "status", &[], &[]), unknown);
}
