//! What real machines would do is told, is not done, and then is what they do; limits reach them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::dominator::Status;
use api::subd::{CacheReport, Poll, PollRequest, SubVersion};
use serde_json::{Value, json};
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::trees;

const OLD: &str = r#"[
    {"MatchLines": ["/etc/.*"], "Service": "settings"},
    {"MatchLines": ["/usr/bin/.*"], "Service": "programs"},
    {"MatchLines": ["/boot/.*"], "Service": "gone", "HighImpact": true}
]"#;
const NEW: &str = r#"[
    {"MatchLines": ["/etc/.*"], "Service": "settings", "DoReload": true},
    {"MatchLines": ["/usr/bin/.*"], "Service": "programs", "SortName": "9"},
    {"MatchLines": ["/opt/.*"], "Service": "fresh", "DoReload": true},
    {"MatchLines": ["/never"], "Service": "idle"}
]"#;

/// What did not change for so long has come to rest: what happened is gathered for a second before
/// it is written.
const QUIET: Duration = Duration::from_millis(2_500);

/// What tells a file from one that was written since.
type Stamp = (u64, u64, i64, i64);

/// All files below `directory`.
fn files(directory: &Path) -> BTreeMap<PathBuf, Stamp> {
    let entries = walkdir::WalkDir::new(directory).into_iter().map(Result::unwrap);
    let files = entries.filter(|entry| !entry.file_type().is_dir());
    let stamp = |entry: walkdir::DirEntry| {
        let data = entry.metadata().unwrap();
        (entry.into_path(), (data.ino(), data.len(), data.mtime(), data.mtime_nsec()))
    };
    files.map(stamp).collect()
}

/// All that a plan must leave as it is: the dominator's state, the machines' trees with their
/// caches and journals, and what the subs say of them.
#[derive(Debug, PartialEq)]
struct All {
    state: Vec<u8>,
    machines: Vec<(BTreeMap<PathBuf, Stamp>, SubVersion, Option<CacheReport>)>,
}

fn all(scenario: &Scenario) -> All {
    let state = scenario.directory.path().join("dominator/dominator.redb");
    let machine = |index: usize| {
        let reply = scenario.fleet.ask_sub::<Poll>(index, &PollRequest::default()).unwrap();
        // Alarms of a machine under load are news, and no change.
        let version = SubVersion { status: 0, ..reply.version };
        (files(&scenario.fleet.subs[index].root), version, reply.cache)
    };
    let machines = (0..scenario.fleet.subs.len()).map(machine).collect();
    All { state: fs::read(state).unwrap(), machines }
}

/// The same, when what is written without being asked for has been written: how machines got their
/// status, by what they are known, what a scan found.
fn settled(scenario: &Scenario) -> All {
    let start = Instant::now();
    let (mut last, mut since) = (all(scenario), Instant::now());
    while since.elapsed() < QUIET {
        assert!(start.elapsed() < CONVERGE_MAX, "the fleet does not come to rest");
        std::thread::sleep(Duration::from_millis(100));
        let now = all(scenario);
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    last
}

/// Runs domtool; gives its exit code and its data.
fn domtool(scenario: &Scenario, words: &[&str]) -> (i32, Value) {
    let words: Vec<&str> = words.iter().chain(&["--format", "json"]).copied().collect();
    let output = scenario.fleet.domtool(&words).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let data = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    (output.status.code().unwrap(), data)
}

#[test]
fn what_is_planned_is_not_done_and_the_edit_does_what_was_planned() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    trees::make(first.path(), 1);
    trees::make(second.path(), 2);
    let mut scenario = Scenario::start(2);
    let triggers = scenario.directory.path().join("triggers");
    fs::write(&triggers, OLD).unwrap();
    scenario.add("test/1", first.path());
    fs::write(&triggers, NEW).unwrap();
    scenario.add("test/2", second.path());
    scenario.converge("test/1");
    scenario.services();

    let database = fs::read_to_string(scenario.fleet.mdb()).unwrap();
    let candidate = scenario.directory.path().join("candidate.json");
    fs::write(&candidate, database.replace("test/1", "test/2")).unwrap();
    let before = settled(&scenario);
    let words = ["plan", "--mdb", candidate.to_str().unwrap()];
    let (code, plan) = domtool(&scenario, &words);
    let (one, preview) = domtool(&scenario, &["plan", "sub-1", "--image", "test/2"]);
    assert_eq!((code, one), (3, 3));
    assert_eq!(all(&scenario), before, "a plan must write nothing");
    assert_eq!(scenario.services(), Vec::<String>::new());
    assert_eq!(plan["unknown"], json!({}));
    assert_eq!(plan["updates"].as_array().unwrap().len(), 1, "the machines are alike: {plan}");
    let update = &plan["updates"][0];
    assert_eq!(update["services"], preview["preview"]["services"]);
    assert_eq!(update["services"]["high_impact"], json!(true));
    let (code, same) = domtool(&scenario, &["plan", "sub-2"]);
    assert_eq!((code, &same["preview"]["same"]), (0, &json!(true)));

    fs::rename(&candidate, scenario.fleet.mdb()).unwrap();
    scenario.fleet.wait_synced("test/2", CONVERGE_MAX, |_| {}).unwrap();
    scenario.verify(second.path());
    let mut expected = Vec::new();
    for sub in ["sub-1", "sub-2"] {
        for when in ["before", "after"] {
            for call in update["services"][when].as_array().unwrap() {
                let word = |name: &str| call[name].as_str().unwrap().to_owned();
                expected.push(format!("{sub} {} {}", word("service"), word("verb")));
            }
        }
    }
    assert_eq!(scenario.services(), expected);
    let of_one: Vec<&str> =
        expected.iter().filter_map(|line| line.strip_prefix("sub-1 ")).collect();
    let by_hand = [
        "programs stop",
        "gone stop",
        "settings stop",
        "programs start",
        "fresh reload",
        "settings start",
    ];
    assert_eq!(of_one, by_hand);
    let changes = &update["changes"];
    let count = |name: &str| changes[name].as_u64().unwrap();
    let operations: u64 = ["create", "replace", "change", "remove"].map(count).iter().sum();
    for (sub, machine) in ["sub-1", "sub-2"].iter().zip(plan["machines"].as_array().unwrap()) {
        let poll = scenario.fleet.detail(sub).unwrap().poll.unwrap();
        assert_eq!(u64::from(poll.last_update.unwrap().operations), operations);
        let fetch = poll.last_fetch.unwrap();
        let planned = &machine["outlook"]["update"]["fetch_objects"];
        // What the machine has elsewhere in its tree does not travel.
        assert_eq!(json!(fetch.objects + fetch.reused), *planned, "{fetch:?}");
    }
    let mdb = scenario.fleet.mdb();
    let words = ["plan", "--all", "--mdb", mdb.to_str().unwrap()];
    let (code, plan) = domtool(&scenario, &words);
    assert_eq!((code, &plan["pairs"][0]["same"]), (0, &json!(2)));
    scenario.fleet.stop().unwrap();
}

#[test]
fn a_first_adoption_and_another_filter_are_planned_and_the_machines_stay_as_they_are() {
    let tree = tempfile::tempdir().unwrap();
    trees::make(tree.path(), 1);
    let mut scenario = Scenario::start(2);
    scenario.add("test/1", tree.path());
    scenario.fleet.require(None).unwrap();
    scenario.wait_until("no image is required", |subs| {
        subs.len() == 2 && subs.iter().all(|sub| sub.status == Status::ImageUndefined)
    });
    let before = settled(&scenario);
    let database = fs::read_to_string(scenario.fleet.mdb()).unwrap();
    let mut machines: Value = serde_json::from_str(&database).unwrap();
    for machine in machines.as_array_mut().unwrap() {
        machine["RequiredImage"] = json!("test/1");
    }
    let candidate = scenario.directory.path().join("candidate.json");
    fs::write(&candidate, machines.to_string()).unwrap();
    let fleet = ["plan", "--mdb", candidate.to_str().unwrap()];
    let one = ["plan", "sub-1", "--image", "test/1"];
    let ((code, plan), (same_code, preview)) = std::thread::scope(|scope| {
        let other = scope.spawn(|| domtool(&scenario, &one));
        (domtool(&scenario, &fleet), other.join().unwrap())
    });
    assert_eq!((code, same_code, &plan["unknown"]), (3, 3, &json!({})), "{plan}");
    assert_eq!(plan["machines"].as_array().unwrap().len(), 2, "{plan}");
    assert_eq!(preview["waits"], json!([]));
    let planned =
        |preview: &Value| preview["preview"]["plan"]["operations"].as_array().unwrap().len();
    let operations = planned(&preview);
    assert_eq!(fs::read_to_string(scenario.fleet.mdb()).unwrap(), database);
    assert_eq!(all(&scenario), before, "a plan must change nothing");
    scenario.converge("test/1");
    scenario.verify(tree.path());
    let poll = scenario.fleet.detail("sub-1").unwrap().poll.unwrap();
    assert_eq!(poll.last_update.unwrap().operations as usize, operations);

    // The machine keeps what the next image does not keep.
    fs::write(scenario.directory.path().join("filter"), "/srv/data$\n").unwrap();
    scenario.add("test/2", tree.path());
    let before = settled(&scenario);
    let (code, preview) = domtool(&scenario, &["plan", "sub-1", "--image", "test/2"]);
    let removed = &preview["preview"]["plan"]["operations"][0]["path"];
    assert_eq!((code, planned(&preview), removed), (3, 1, &json!("/var/log/own")), "{preview}");
    assert_eq!(all(&scenario), before, "a plan must change nothing");
    let subtool = |image: &str| {
        let output =
            scenario.fleet.subtool(scenario.fleet.subs[0].address, &["show-update", image]);
        output.unwrap().status.code()
    };
    // The dominator that requires test/1 is not in the way.
    assert_eq!((subtool("test/2"), subtool("test/1")), (Some(3), Some(0)));
    assert_eq!(all(&scenario), before, "a plan must change nothing");
    scenario.fleet.stop().unwrap();
}

#[test]
fn kept_files_with_numbers_that_mean_others_in_the_next_image_are_counted() {
    let place = tempfile::tempdir().unwrap();
    let mut scenario = Scenario::start(2);
    for (version, users, groups) in [
        (1, "root:x:0:0::/:\npostfix:x:105:110::/:\n", "root:x:0:\npostfix:x:110:\n"),
        (2, "root:x:0:0::/:\nredis:x:105:111::/:\n", "root:x:0:\npostfix:x:112:\n"),
    ] {
        let tree = place.path().join(version.to_string());
        trees::make(&tree, version);
        fs::write(tree.join("etc/passwd"), users).unwrap();
        fs::write(tree.join("etc/group"), groups).unwrap();
        scenario.add(&format!("test/{version}"), &tree);
    }
    scenario.converge("test/1");
    // The filter keeps what is in /var/log, and /srv/data.
    let root = scenario.fleet.subs[0].root.clone();
    let mail = root.join("var/log/mail");
    fs::create_dir(&mail).unwrap();
    for number in 0..1_203 {
        fs::write(mail.join(number.to_string()), "").unwrap();
        chown(mail.join(number.to_string()), Some(105), Some(0)).unwrap();
    }
    chown(&mail, Some(105), Some(110)).unwrap();
    let before = settled(&scenario);

    let said = |words: &[&str]| {
        let output = scenario.fleet.domtool(words).unwrap();
        let data = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(3), "{data}");
        let is_meant = |line: &&str| line.contains("kept file") || line.contains("NOT KNOWN");
        data.lines().filter(is_meant).map(str::to_owned).collect::<Vec<_>>()
    };
    let lines = [
        "sub-1: 1,204 kept files have UID 105, which is postfix in test/1 and redis in test/2",
        "sub-1: 1 kept file has GID 110, which is postfix in test/1 and no group in test/2",
    ];
    assert_eq!(said(&["plan", "sub-1", "--image", "test/2"]), lines);
    assert_eq!(said(&["plan", "sub-2", "--image", "test/2"]), [""; 0]);
    let database = fs::read_to_string(scenario.fleet.mdb()).unwrap();
    let candidate = scenario.directory.path().join("candidate.json");
    fs::write(&candidate, database.replace("test/1", "test/2")).unwrap();
    let words = ["plan", "--mdb", candidate.to_str().unwrap()];
    assert_eq!(said(&words), lines);
    let (_, plan) = domtool(&scenario, &words);
    let (_, one) = domtool(&scenario, &["plan", "sub-1", "--image", "test/2"]);
    let machine = |hostname: &str, users: u32, groups: u32| {
        let numbers = json!([
            {"kind": "user", "number": 105, "former": "postfix", "now": "redis", "files": users},
            {"kind": "group", "number": 110, "former": "postfix", "now": null, "files": groups},
        ]);
        json!({"hostname": hostname, "from": "test/1", "image": "test/2", "numbers": numbers,
               "unfinished": null, "unknown": null})
    };
    let machines = [machine("sub-1", 1_204, 1), machine("sub-2", 0, 0)];
    assert_eq!(plan["kept_files"], json!({"machines": machines, "unknown": null}));
    assert_eq!(one["kept_files"], json!({"machines": machines[..1], "unknown": null}));
    assert_eq!(all(&scenario), before, "a plan must change nothing");
    scenario.fleet.stop().unwrap();
}

/// Waits until the machine reports that it was told these limits.
fn wait_told(scenario: &Scenario, hostname: &str, expected: &Value) -> Value {
    eventually("the machine reports its limits", || {
        let output = scenario.fleet.domtool(&["get-config", hostname, "--format", "json"]).unwrap();
        let reply: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let machine = &reply["machine"];
        let is_told = machine["reported"]["told"] == *expected && machine["wanted"] == *expected;
        is_told.then(|| machine.clone()).ok_or(reply)
    })
}

#[test]
fn limits_reach_a_real_machine_and_outlive_its_restart_and_the_dominators() {
    let tree = tempfile::tempdir().unwrap();
    trees::make(tree.path(), 1);
    let mut scenario = Scenario::start(1);
    scenario.add("test/1", tree.path());
    scenario.converge("test/1");
    let set = |scenario: &Scenario, words: &[&str]| {
        let words = [&["set-config"], words, &["--why", "slow links"]].concat();
        assert_eq!(domtool(scenario, &words), (0, json!({"machines": 1})));
    };
    set(&scenario, &["--fleet", "network-percent=5", "scan-percent=1"]);
    set(&scenario, &["--host", "sub-1", "scan-percent=50"]);
    let limits = |network: Value| {
        json!({"cpu_percent": null, "scan_percent": 50, "write_percent": null,
               "network_percent": network})
    };
    let wanted = limits(json!(5));
    let machine = wait_told(&scenario, "sub-1", &wanted);
    assert_eq!(machine["from"]["scan-percent"], json!({"host": "sub-1"}));
    assert_eq!(machine["reported"]["ceilings"]["scan_percent"], Value::Null);
    let shown = scenario.fleet.domtool(&["get-config", "sub-1"]).unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let line = shown.lines().find(|line| line.trim_start().starts_with("scan-percent")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words, ["scan-percent", "50", "host", "sub-1", "50", "-", "50"], "{shown}");
    // Where each limit comes from is said by the machine.
    let shown = scenario.fleet.domtool(&["show-sub", "sub-1"]).unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    for (name, said) in [
        ("cpu limit", "5 % of a core by default"),
        ("scan limit", ": 50 % as set by a dominator or subtool, of "),
        ("write limit", "none: this is an installation"),
        ("network limit", "5 % "),
    ] {
        let line = shown.lines().find(|line| line.trim_start().starts_with(name));
        assert!(line.is_some_and(|line| line.contains(said)), "{name}: {shown}");
    }

    scenario.fleet.subs[0].daemon.stop().unwrap();
    scenario.fleet.subs[0].daemon.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    wait_told(&scenario, "sub-1", &wanted);
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    wait_told(&scenario, "sub-1", &wanted);

    // What is set by hand holds until the dominator sees it.
    let address = scenario.fleet.subs[0].address;
    let by_hand = ["set-config", "network-percent=1"];
    assert!(scenario.fleet.subtool(address, &by_hand).unwrap().status.success());
    wait_told(&scenario, "sub-1", &wanted);
    set(&scenario, &["--fleet", "--unset", "network-percent"]);
    wait_told(&scenario, "sub-1", &limits(Value::Null));
    scenario.verify(tree.path());
    scenario.fleet.stop().unwrap();
}
