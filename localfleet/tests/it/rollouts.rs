//! Environments and rollouts with real daemons: a vote, a canary, a dependency, a bad revision that
//! goes back by itself, and a dominator that is killed at each of their stages.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use api::access::IdentityKind;
use certs::authority::Request;
use certs::files::Replace;
use serde_json::{Value, json};
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::orders::domtool;
use crate::trees;

/// Runs domtool, which must succeed. Returns its data as JSON.
pub fn asked(scenario: &Scenario, words: &[&str]) -> Value {
    let (code, out, said) = domtool(scenario, &[&["--format", "json"], words].concat());
    assert_eq!(code, 0, "{words:?}: {said}");
    serde_json::from_str(&out).unwrap()
}

/// Runs domtool with a file.
pub fn with_file(scenario: &Scenario, words: &[&str], content: &Value) -> (i32, String, String) {
    let file = scenario.directory.path().join("input.json");
    fs::write(&file, content.to_string()).unwrap();
    domtool(scenario, &[words, &[file.to_str().unwrap()]].concat())
}

fn rollout(scenario: &Scenario, id: &str) -> Value {
    asked(scenario, &["rollout", "show", id])["rollouts"][0].clone()
}

/// Waits until the rollout is as `is_so` says.
fn wait_for(scenario: &Scenario, id: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + CONVERGE_MAX;
    loop {
        let shown = rollout(scenario, id);
        if is_so(&shown) {
            return shown;
        }
        assert!(Instant::now() < end, "{id} is not so: {what}: {shown:#}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

pub fn wait_for_state(scenario: &Scenario, id: &str, state: &str) -> Value {
    wait_for(scenario, id, state, |shown| shown["rollout"]["state"] == state)
}

fn kill_dominator(scenario: &mut Scenario) {
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
}

fn required(scenario: &Scenario) -> Vec<String> {
    scenario.fleet.statuses().unwrap().into_iter().map(|sub| sub.required_image).collect()
}

fn add_sick(scenario: &Scenario, tree: &std::path::Path) {
    let check = scenario.directory.path().join("health.json");
    let command = json!({"command": ["/usr/bin/false"], "within_seconds": 1, "undo": true});
    fs::write(&check, command.to_string()).unwrap();
    let file = |name: &str| scenario.directory.path().join(name).into_os_string();
    let words = [
        "--format".into(),
        "json".into(),
        "add".into(),
        "test/sick".into(),
        tree.into(),
        file("filter"),
        file("triggers"),
        "--health-check".into(),
        check.into_os_string(),
    ];
    scenario.imagetool(&words);
}

fn images(scenario: &Scenario) -> PathBuf {
    let tree = |version: u32| {
        let tree = scenario.directory.path().join(format!("tree-{version}"));
        trees::make(&tree, version);
        tree
    };
    scenario.add("test/1", &tree(1));
    scenario.add("test/2", &tree(2));
    add_sick(scenario, &tree(3));
    scenario.directory.path().join("tree-2")
}

#[test]
fn revisions_come_step_by_step_and_a_bad_one_goes_back_by_itself() {
    let mut scenario = Scenario::start(4);
    let second = images(&scenario);
    scenario.converge("test/1");
    let environment = |name: &str, hosts: Value, rest: Value| {
        let mut environment = json!({
            "name": name, "select": {"hosts": hosts}, "source": {"image": "test/2"},
            "strategy": {"min_healthy_percent": 50, "soak_s": 1},
        });
        let rest = rest.as_object().unwrap().clone();
        environment.as_object_mut().unwrap().extend(rest);
        environment
    };
    let db = environment("db", json!(["sub-1"]), json!({}));
    let (code, _, said) = with_file(&scenario, &["env", "create"], &db);
    assert_eq!(code, 0, "{said}");
    let author = asked(&scenario, &["env", "show", "db"])["revisions"][0]["author"].clone();
    let approval = json!({"voters": [author], "min_approvals": 1, "author_alone": true});
    let rest = json!({"depends_on": ["db"], "approval": approval});
    let web = environment("web", json!(["sub-2", "sub-3", "sub-4"]), rest);
    assert_eq!(with_file(&scenario, &["env", "create"], &web).0, 0);
    let (code, _, said) = with_file(&scenario, &["env", "create"], &web);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("web exists already, with revision 1"), "{said}");
    assert_eq!(required(&scenario), ["test/1"; 4]);
    assert_eq!(domtool(&scenario, &["rollout", "plan"]).0, 3);

    let start = ["rollout", "start", "db@1", "web@1", "--why", "a release"];
    let id = asked(&scenario, &start)["id"].as_str().unwrap().to_owned();
    let shown = wait_for(&scenario, &id, "web waits for votes", |shown| {
        shown["rollout"]["steps"][1]["state"] == "awaiting_approval"
    });
    // The step before is done, and web is fetched while people vote.
    assert_eq!(required(&scenario), ["test/2", "test/1", "test/1", "test/1"]);
    assert_eq!(domtool(&scenario, &["lock", "check", "db"]).0, 3);
    kill_dominator(&mut scenario);
    let digest = shown["plans"][0]["digest"].as_str().unwrap();
    let step = format!("{id}/web");
    let (code, _, said) = domtool(&scenario, &["approve", &step, "--digest", "0000"]);
    assert_eq!(code, 1, "{said}");
    let vote = ["approve", &step, "--digest", digest, "--why", "tested"];
    assert_eq!(domtool(&scenario, &vote).0, 0);
    wait_for(&scenario, &id, "the canary is changed", |shown| {
        shown["rollout"]["steps"][1]["state"] != "awaiting_approval"
    });
    kill_dominator(&mut scenario);
    wait_for_state(&scenario, &id, "succeeded");
    scenario.fleet.wait_synced("test/2", CONVERGE_MAX, |_| {}).unwrap();
    scenario.verify(&second);
    assert_eq!(domtool(&scenario, &["lock", "check"]).0, 0);
    let explained = domtool(&scenario, &["explain", "sub-2"]).1;
    assert!(explained.contains("by web@1; the machine database says test/1"), "{explained}");

    // The health check of the next revision fails: it goes back, and the others never got it.
    let sick = json!({"name": "web", "source": {"image": "test/sick"}});
    assert_eq!(with_file(&scenario, &["env", "update", "--base", "1"], &sick).0, 0);
    let id = asked(&scenario, &["rollout", "start", "web@2", "--why", "next"])["id"].clone();
    let id = id.as_str().unwrap();
    let shown = wait_for(&scenario, id, "there is a plan", |shown| {
        shown["rollout"]["steps"][0]["state"] == "awaiting_approval"
    });
    let digest = shown["plans"][0]["digest"].as_str().unwrap();
    // Somebody votes with the form of the page.
    let vote = |vote, digest| {
        let fields =
            [("rollout", id), ("step", "web"), ("digest", digest), ("vote", vote), ("why", "seen")];
        let page = format!("/rollouts/{id}");
        let (status, content) = scenario.fleet.submit(&page, "/vote", &fields).unwrap();
        (status, String::from_utf8(content).unwrap())
    };
    let (status, content) = vote("approve", "0000");
    assert_eq!(status, 409, "{content}");
    assert_eq!(vote("perhaps", digest).0, 400);
    assert_eq!(vote("approve", digest).0, 303);
    let shown = wait_for_state(&scenario, id, "rolled_back");
    let cause = shown["rollout"]["cause"].as_str().unwrap();
    assert_eq!(cause, "web failed: a canary has failed: sub-2");
    scenario.fleet.wait_synced("test/2", CONVERGE_MAX, |_| {}).unwrap();
    scenario.verify(&second);
    let events = domtool(&scenario, &["events", "--kind", "update", "--image", "test/sick"]).1;
    assert!(!events.contains("sub-3") && !events.contains("sub-4"), "{events}");
}

/// Calls the dominator with curl, without a certificate. Returns the status and the content.
pub fn curl(scenario: &Scenario, path: &str, arguments: &[&str]) -> (String, String) {
    let address = scenario.fleet.addresses().dominator;
    let output = Command::new("curl")
        .args(["--silent", "--show-error", "--write-out", "\n%{http_code}", "--cacert"])
        .arg(scenario.fleet.certificates().authority_file().unwrap())
        .arg(format!("https://{address}{path}"))
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let (content, status) = text.rsplit_once('\n').unwrap();
    (status.to_owned(), content.to_owned())
}

/// Gets a page as a browser does, or sends a form if there are fields.
fn browse(scenario: &Scenario, path: &str, form: &[String]) -> (String, String) {
    let origin = format!("origin: https://{}", scenario.fleet.addresses().dominator);
    let mut arguments = Vec::new();
    if !form.is_empty() {
        arguments.extend(["--header", &origin]);
    }
    form.iter().for_each(|field| arguments.extend(["--data-urlencode", field]));
    curl(scenario, path, &arguments)
}

#[test]
fn somebody_without_a_certificate_votes_once_by_a_link() {
    let directory = tempfile::tempdir().unwrap();
    let (tell, told) = (directory.path().join("tell"), directory.path().join("told"));
    fs::write(&tell, "cat >>\"$1\"\n").unwrap();
    let line = format!("/bin/sh {} {}", tell.display(), told.display());
    let flags = [("--rollout-command", line.as_str()), ("--pages-url", "https://d.example/")];
    let scenario = Scenario::start_with(1, &flags);
    images(&scenario);
    scenario.fleet.require(Some("test/1")).unwrap();
    let web = json!({
        "name": "web", "select": {"hosts": ["*"]}, "source": {"image": "test/2"},
        "strategy": {"min_healthy_percent": 50},
        "approval": {"voters": ["bob", "eve"], "min_approvals": 2},
    });
    assert_eq!(with_file(&scenario, &["env", "create"], &web).0, 0);
    let id = asked(&scenario, &["rollout", "start", "web@1", "--why", "next"])["id"].clone();
    let id = id.as_str().unwrap();
    let links = eventually("the links are told", || {
        let text = fs::read_to_string(&told).unwrap_or_default();
        let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let last = lines.next_back().map(|last| last["rollouts"][0]["steps"][0]["links"].clone());
        match last.filter(|links| links["bob"].is_string()) {
            Some(links) => Ok(links),
            None => Err(text),
        }
    });
    let path = links["bob"].as_str().unwrap().strip_prefix("https://d.example").unwrap();
    // Whoever follows the link, such as a mail scanner, votes for nothing.
    let (status, page) = browse(&scenario, path, &[]);
    assert_eq!(status, "200", "{page}");
    assert_eq!(rollout(&scenario, id)["rollout"]["steps"][0]["votes"], json!([]));
    let field = |name: &str| {
        let found = page.split_once(&format!("name=\"{name}\" value=\"")).unwrap().1;
        format!("{name}={}", found.split('"').next().unwrap())
    };
    let names = ["token", "rollout", "step", "digest", "voter", "expires", "proof"];
    let mut form: Vec<String> = names.map(field).into();
    form.extend(["vote=approve", "why=it was tested"].map(str::to_owned));
    let other: Vec<String> =
        form.iter().map(|text| text.replace("voter=bob", "voter=eve")).collect();
    let (status, text) = browse(&scenario, "/vote-link", &other);
    assert_eq!(status, "403", "{text}");
    assert_eq!(browse(&scenario, "/vote", &form).0, "403");
    let (status, text) = browse(&scenario, "/vote-link", &form);
    assert_eq!(status, "303", "{text}");
    let votes = rollout(&scenario, id)["rollout"]["steps"][0]["votes"].clone();
    assert_eq!((&votes[0]["voter"], &votes[0]["vote"]), (&json!("bob"), &json!("approve")));
    let (status, page) = browse(&scenario, path, &[]);
    assert!(status == "200" && page.contains("bob has voted: approve"), "{page}");
    form[7] = "vote=reject".to_owned();
    let (status, text) = browse(&scenario, "/vote-link", &form);
    assert_eq!(status, "410", "{text}");
    let orders = domtool(&scenario, &["events", "--kind", "order"]).1;
    assert!(orders.contains("by a link: it was tested"), "{orders}");
}

#[test]
fn an_owner_brings_revisions_to_machines_and_takes_no_others() {
    let mut scenario = Scenario::start(2);
    images(&scenario);
    scenario.converge("test/1");
    let tls = scenario.directory.path().join("ann");
    let authority = scenario.fleet.certificates().authority().unwrap();
    let ann = Request {
        name: "ann".to_owned(),
        kind: IdentityKind::User,
        groups: vec!["webs".to_owned()],
        ..Request::default()
    };
    let issued = authority.issue(&ann).unwrap();
    issued.write(&tls, authority.ca_pem(), Replace::Own).unwrap();
    let by_ann = |words: &[&str], content: Option<&Value>| {
        let file = scenario.directory.path().join("by-ann.json");
        fs::write(&file, content.map(Value::to_string).unwrap_or_default()).unwrap();
        let dominator = scenario.fleet.addresses().dominator.to_string();
        let output = Command::new(scenario.directory.path().join("bin/domtool"))
            .args(["--dominator", &dominator, "--tls", tls.to_str().unwrap()])
            .args(words)
            .args(content.map(|_| &file))
            .output()
            .unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let web = json!({
        "name": "web", "select": {"hosts": ["sub-1"]}, "source": {"image": "test/1"},
        "owner_groups": ["webs"],
    });
    let (code, said) = by_ann(&["env", "create"], Some(&web));
    assert_eq!(code, 1);
    assert!(said.contains("it needs the power Dominator.EditEnvironments"), "{said}");
    assert_eq!(with_file(&scenario, &["env", "create"], &web).0, 0);
    let all = json!({"name": "web", "select": {"hosts": ["*"]}, "source": {"image": "test/2"}});
    let (code, said) = by_ann(&["env", "update"], Some(&all));
    assert_eq!(code, 1);
    assert!(said.contains("web.select: ann: an owner may not change it"), "{said}");
    let second = json!({"name": "web", "source": {"image": "test/2"}});
    assert_eq!(by_ann(&["env", "update"], Some(&second)), (0, String::new()));
    let start = ["rollout", "start", "web@2", "--why", "next"];
    assert_eq!(by_ann(&start, None).0, 0);
    wait_for_state(&scenario, "r1", "succeeded");
    assert_eq!(required(&scenario), ["test/2", "test/1"]);
    let (code, said) = by_ann(&["env", "delete", "web", "--why", "so"], None);
    assert_eq!(code, 1);
    assert!(said.contains("it needs the power Dominator.OrderEnvironment"), "{said}");
}
