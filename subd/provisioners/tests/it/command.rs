//! `dom-provisioner-command`.

use std::path::Path;

use serde_json::{Value, json};

use crate::{ask, destroyed, failed, made};

fn command() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_dom-provisioner-command"))
}

fn shell(script: &str) -> Value {
    json!(["/bin/sh", "-c", script])
}

#[test]
fn commands_make_check_and_destroy() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    let path = file.display();
    let spec = json!({
        "check": shell(&format!("test -e {path} && echo '{{\"checked\": true}}'")),
        "apply": shell(&format!("cat >{path}; echo \"{{\\\"id\\\": \\\"$RESOURCE_ID\\\"}}\"")),
        "destroy": shell(&format!("rm -f {path}")),
    });
    let provision = || ask(command(), "provision", &[("c", spec.clone())], &[]);
    let plan = |previous: &[(&str, Value)]| {
        let answer = ask(command(), "plan", &[("c", spec.clone())], previous);
        answer["changes"][0]["op"].as_str().unwrap().to_owned()
    };
    assert_eq!((plan(&[]), plan(&[("c", spec.clone())])), ("create".into(), "update".into()));
    assert!(!file.exists());
    // Without a check, what was made is not known to differ.
    let blind = json!({"apply": ["/bin/false"]});
    let answer = ask(command(), "plan", &[("c", blind.clone())], &[("c", blind)]);
    assert_eq!(answer["changes"][0]["op"], "none");
    assert_eq!(provision(), json!({"tasks": [made("c", &json!({"id": "c"}))]}));
    let told: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!((&told["id"], &told["spec"]), (&json!("c"), &spec));
    assert_eq!(plan(&[]), "none");
    assert_eq!(provision(), json!({"tasks": [made("c", &json!({"checked": true}))]}));
    let removed = ask(command(), "provision", &[], &[("c", spec.clone())]);
    assert_eq!((removed, file.exists()), (json!({"tasks": [destroyed("c")]}), false));
}

#[test]
fn a_command_that_fails_is_named_with_its_last_words() {
    let table = [
        (
            json!({"apply": shell("echo one >&2; echo two >&2; exit 3")}),
            "apply: exit status: 3: two",
        ),
        (json!({"apply": shell("kill -9 $$")}), "apply: signal: 9 (SIGKILL): "),
        (json!({"apply": []}), "spec: the command `apply` is empty"),
        (
            json!({"apply": ["true"]}),
            "spec: `apply` does not begin with the absolute path of a program",
        ),
        (json!({"apply": ["/no/such"]}), "apply: /no/such: No such file or directory (os error 2)"),
        (json!({}), "spec: missing field `apply`"),
        (json!({"aply": []}), "spec: the key `aply` is unknown; is `apply` meant?"),
        // Its pipe is closed.
        (json!({"apply": shell("exec cat /dev/zero")}), "apply: signal: 13 (SIGPIPE): "),
    ];
    for (spec, error) in table {
        let answer = ask(command(), "provision", &[("c", spec)], &[]);
        assert_eq!(answer, json!({"tasks": [failed("c", error)]}));
    }
    // What it prints is no object.
    let answer = ask(command(), "provision", &[("c", json!({"apply": shell("echo hello")}))], &[]);
    assert_eq!(answer, json!({"tasks": [made("c", &json!({}))]}));
    let answer = ask(command(), "provision", &[], &[("c", json!({"apply": ["/bin/true"]}))]);
    assert_eq!(answer, json!({"tasks": [failed("c", "its spec has no command `destroy`")]}));
}
