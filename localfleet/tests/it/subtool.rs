//! One machine is updated with subtool, without a dominator.

use std::fs;
use std::path::Path;
use std::process::Output;

use crate::converges::Scenario;
use crate::trees;

/// The exit code, what was printed as JSON, and what was said.
type Run = (i32, serde_json::Value, String);

fn taken(output: Output) -> Run {
    let Output { status, stdout, stderr } = output;
    let value = serde_json::from_slice(&stdout).unwrap_or_default();
    (status.code().unwrap(), value, String::from_utf8(stderr).unwrap())
}

fn subtool(scenario: &Scenario, words: &[&str]) -> Run {
    let words: Vec<&str> = ["--format", "json"].iter().chain(words).copied().collect();
    taken(scenario.fleet.subtool(scenario.fleet.subs[0].address, &words).unwrap())
}

#[test]
fn a_machine_is_updated_paused_and_installed_anew_by_hand() {
    let mut scenario = Scenario::start(1);
    let tree = |name: &str| scenario.directory.path().join(name);
    let (first, second, third, tiny) = (tree("1"), tree("2"), tree("3"), tree("4"));
    trees::make(&first, 1);
    trees::make(&second, 2);
    trees::make(&third, 2);
    for name in ["one", "two", "three"] {
        fs::write(third.join("etc").join(format!("new-{name}")), name).unwrap();
    }
    for kept in ["var/log", "srv/data"] {
        fs::create_dir_all(tiny.join(kept)).unwrap();
    }
    fs::write(tiny.join("f"), "f").unwrap();
    for (name, tree) in [("test/1", &first), ("test/2", &second), ("test/3", &third)] {
        scenario.add(name, tree);
    }
    scenario.add("test/4", &tiny);

    // The machine scans as nobody has asked yet, and goes on so.
    let before = subtool(&scenario, &["get-config"]).1;
    let (code, preview, said) = subtool(&scenario, &["show-update", "test/1"]);
    assert_eq!((code, &preview["same"]), (3, &false.into()), "{said}");
    assert!(said.contains("Scanning with the settings of test/1, for this alone."), "{said}");
    assert_eq!(subtool(&scenario, &["get-config"]).1, before);
    let verbs = |when: &str| -> Vec<String> {
        let calls = preview["services"][when].as_array().unwrap();
        let words = calls.iter().map(|call| format!("{} {}", call["service"], call["verb"]));
        words.map(|words| words.replace('"', "")).collect()
    };
    assert_eq!(verbs("before"), ["programs stop", "settings stop"]);
    assert_eq!(verbs("after"), ["programs start", "settings start"]);
    assert!(preview["fetch_objects"].as_u64().unwrap() > 300);

    let (code, report, said) = subtool(&scenario, &["push-image", "test/1"]);
    assert_eq!((code, &report["updates"]), (0, &1.into()), "{said}");
    assert_eq!(report["fetched_objects"], preview["fetch_objects"]);
    scenario.verify(&first);
    let services = ["programs stop", "settings stop", "programs start", "settings start"];
    assert_eq!(scenario.services(), services.map(|line| format!("sub-1 {line}")));
    let (code, preview, said) = subtool(&scenario, &["show-update", "test/1"]);
    assert_eq!((code, &preview["same"]), (0, &true.into()), "{said}");
    let (code, report, _) = subtool(&scenario, &["push-image", "test/1"]);
    assert_eq!((code, &report["updates"]), (0, &0.into()));
    let (code, scanned, said) = subtool(&scenario, &["wait-for-image", "test/1"]);
    assert_eq!((code, &scanned["image"]), (0, &"test/1".into()), "{said}");

    subtool(&scenario, &["pause", "--for", "1h", "--reason", "disk swap"]);
    let (code, _, said) = subtool(&scenario, &["push-image", "test/2"]);
    assert!(code == 1 && said.contains("updates are paused until "), "{said}");
    assert!(said.ends_with("hint: subtool poll shows the pause; subtool resume ends it\n"));
    scenario.verify(&first);
    subtool(&scenario, &["resume"]);
    let (code, _, said) = subtool(&scenario, &["push-image", "test/2"]);
    assert_eq!(code, 0, "{said}");
    scenario.verify(&second);

    let (code, _, said) = subtool(&scenario, &["push-image", "test/4"]);
    assert!(code == 1 && said.contains("error: the update is unsafe: it would remove"), "{said}");
    scenario.verify(&second);

    // A machine whose files are in its cache fetches only what it never had.
    scenario.fleet.subs[0].daemon.stop().unwrap();
    let root = scenario.fleet.subs[0].root.clone();
    let (code, sums, said) = harvest(&scenario, &root);
    assert_eq!((code, &sums["left"]), (0, &0.into()), "{said}");
    scenario.fleet.subs[0].daemon.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    let (code, report, said) = subtool(&scenario, &["push-image", "test/3"]);
    assert_eq!((code, &report["fetched_objects"]), (0, &3.into()), "{said}");
    scenario.verify(&third);

    let (code, _, said) = subtool(&scenario, &["push-image", "test/4", "--force-unsafe"]);
    assert_eq!(code, 0, "{said}");
    scenario.verify(&tiny);
    scenario.fleet.stop().unwrap();
}

/// Empties `root` into the cache, but for what the machine keeps.
fn harvest(scenario: &Scenario, root: &Path) -> Run {
    let mut words = vec!["--root", root.to_str().unwrap(), "--yes", "--format", "json"];
    words.extend(["--exclude", "/var/log/.*", "--exclude", "/srv/data"]);
    taken(scenario.fleet.fs2objectcache(&words).unwrap())
}
