//! Webhooks of a forge with real daemons: an open change is planned, one that is merged is rolled
//! out, and what is forged or sent twice does nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::orders::domtool;
use crate::rollouts::curl;
use crate::trees;

const SECRET: &str = "a secret of the forge";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Sends a webhook as the forge does. Returns the status and the answer.
fn send(
    scenario: &Scenario,
    name: &str,
    secret: &str,
    event: &str,
    body: &Value,
) -> (String, String) {
    let file = scenario.directory.path().join("body");
    fs::write(&file, body.to_string()).unwrap();
    let mut digest = Command::new("openssl");
    let digest = digest.args(["dgst", "-sha256", "-hmac", secret, "-r"]).arg(&file);
    let digest = String::from_utf8(digest.output().unwrap().stdout).unwrap();
    let signature = digest.split(' ').next().unwrap();
    let (signed, event) =
        (format!("x-hub-signature-256: sha256={signature}"), format!("x-github-event: {event}"));
    let data = format!("@{}", file.display());
    let arguments = ["--header", &signed, "--header", &event, "--data-binary", &data];
    curl(scenario, &format!("/webhook/{name}"), &arguments)
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Waits until the status command was called `count` times. Returns what it was told last.
fn told(directory: &Path, count: usize) -> Value {
    eventually("the status is told", || {
        let text = fs::read_to_string(directory.join("told")).unwrap_or_default();
        let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        match lines.nth(count - 1) {
            Some(last) => Ok(last),
            None => Err(text),
        }
    })
}

#[test]
fn a_change_is_planned_when_it_is_open_and_rolled_out_when_it_is_merged() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    fs::set_permissions(place, fs::Permissions::from_mode(0o755)).unwrap();
    write(&place.join("secret"), SECRET);
    write(
        &place.join("fetch"),
        "#!/bin/sh\nid -un >&2\ntest \"$(id -un)\" = nobody && cat \"$1\"\n",
    );
    write(&place.join("status"), "#!/bin/sh\ncat >>\"$1\"\n");
    let environments = |image: &str| {
        let web = json!({"name": "web", "select": {"hosts": ["*"]}, "source": {"image": image}});
        write(&place.join("files"), &json!({"environments": [web]}).to_string());
    };
    environments("test/2");
    let shown = place.display();
    let text = format!(
        "[[webhook]]\nname = \"fleet\"\nsecret_file = \"{shown}/secret\"\nbranch = \"main\"\n\
         paths = [\"fleet/\"]\nfetch = [\"{shown}/fetch\", \"{shown}/files\"]\nuser = \"nobody\"\n\
         status = [\"{shown}/status\", \"{shown}/told\"]\n"
    );
    write(&place.join("webhooks.toml"), &text);
    let file = place.join("webhooks.toml").display().to_string();
    let mut scenario = Scenario::start_with(1, &[("--webhooks", &file)]);
    for version in [1, 2] {
        let tree = scenario.directory.path().join(format!("tree-{version}"));
        trees::make(&tree, version);
        scenario.add(&format!("test/{version}"), &tree);
    }
    scenario.converge("test/1");

    let open = json!({"action": "opened", "number": 7, "pull_request":
        {"title": "web 2", "base": {"ref": "main"}, "head": {"sha": COMMIT}}});
    for (name, secret) in [("fleet", "another secret"), ("nobody", SECRET)] {
        let (status, answer) = send(&scenario, name, secret, "pull_request", &open);
        assert_eq!(status, "403", "{answer}");
    }
    let planned = send(&scenario, "fleet", SECRET, "pull_request", &open);
    assert_eq!(planned, ("200".to_owned(), format!("{COMMIT} is planned\n")));
    let status = told(place, 1);
    let class = &status["plans"][0]["classes"][0];
    assert_eq!((&status["state"], &status["number"]), (&json!("success"), &json!(7)), "{status}");
    assert_eq!((&class["from"], &class["to"]), (&json!("test/1"), &json!("test/2")));
    assert_eq!(status["plans"][0]["unknown_images"], json!([]));
    // Nothing is stored.
    let (_, listed, _) = domtool(&scenario, &["--format", "json", "env", "list"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed, json!([]));

    let push = |paths: &[&str]| {
        let commits = json!([{"message": "web 2", "modified": paths}]);
        json!({"ref": "refs/heads/main", "after": COMMIT, "commits": commits})
    };
    let (status, answer) = send(&scenario, "fleet", SECRET, "push", &push(&["README"]));
    assert_eq!((status.as_str(), answer.as_str()), ("200", "no file is changed that counts\n"));
    assert_eq!(send(&scenario, "fleet", SECRET, "push", &push(&["fleet/web.json"])).0, "200");
    let status = told(place, 2);
    assert_eq!(status["summary"], "r1 was started: web@1", "{status}");
    scenario.fleet.wait_synced("test/2", CONVERGE_MAX, |_| {}).unwrap();
    let events = domtool(&scenario, &["events", "--kind", "order"]).1;
    assert!(events.contains("webhook fleet"), "{events}");

    // What is sent once more changes nothing: the fetch gets what the branch says now.
    assert_eq!(send(&scenario, "fleet", SECRET, "push", &push(&["fleet/web.json"])).0, "200");
    assert_eq!(told(place, 3)["summary"], "there is nothing to start");
    environments("test/9");
    assert_eq!(send(&scenario, "fleet", SECRET, "pull_request", &open).0, "200");
    let status = told(place, 4);
    assert_eq!(status["state"], "failure");
    let summary = status["summary"].as_str().unwrap();
    assert!(summary.contains("the image server does not give test/9"), "{summary}");
    write(&place.join("files"), "no JSON");
    assert_eq!(send(&scenario, "fleet", SECRET, "push", &push(&["fleet/web.json"])).0, "200");
    let summary = told(place, 5)["summary"].clone();
    assert!(summary.as_str().unwrap().starts_with("what was fetched is not as expected"));
}
