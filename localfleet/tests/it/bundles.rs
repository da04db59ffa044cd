//! Bundles beside the images of machines: a task of its own, brought by a rollout, repaired,
//! updated and taken away, and one that does not fit.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use api::dominator::{Status, SubSummary};
use api::subd::TaskState;
use model::mdb::Machine;
use serde_json::json;
use testing::eventually;

use crate::converges::Scenario;
use crate::orders::domtool;
use crate::rollouts::{asked, wait_for_state, with_file};
use crate::tasks::{TRIGGERS, add_task, kill_program, lines, make_tree, report};

/// Adds a sparse image with a task, which says `version` when it starts.
fn add_bundle(scenario: &Scenario, name: &str, version: &str, more: &[&str]) {
    let place = scenario.directory.path();
    let tree = place.join(format!("bundle-{version}"));
    add_task(&tree, version);
    for path in more {
        fs::create_dir_all(tree.join(path).parent().unwrap()).unwrap();
        fs::write(tree.join(path), version).unwrap();
    }
    let triggers = place.join("task-triggers");
    fs::write(&triggers, TRIGGERS).unwrap();
    let words = ["--format", "json", "add", name].map(Into::into);
    let files = [tree.into_os_string(), "-".into(), triggers.into_os_string()];
    scenario.imagetool(&[&words[..], &files[..]].concat());
}

/// Adds an image without tasks. Returns its tree.
fn add_base(scenario: &Scenario, version: u32) -> PathBuf {
    let tree = scenario.directory.path().join(format!("base-{version}"));
    make_tree(&tree);
    fs::write(tree.join("etc/version"), version.to_string()).unwrap();
    scenario.add(&format!("base/{version}"), &tree);
    tree
}

/// Requires an image of all machines; the tag `logs` says which get the bundle.
fn require(scenario: &Scenario, image: &str, with_logs: &[&str]) {
    let machine = |sub: &localfleet::fleet::Sub| {
        let logs = with_logs.contains(&sub.hostname.as_str()).to_string();
        let tags = BTreeMap::from([("logs".to_owned(), logs)]);
        Machine { required_image: image.to_owned(), tags, ..sub.record() }
    };
    let machines: Vec<Machine> = scenario.fleet.subs.iter().map(machine).collect();
    scenario.fleet.replace_mdb(&machines).unwrap();
}

/// Waits until each machine has verified its image.
fn until_synced(scenario: &mut Scenario, images: &[&str]) {
    scenario.wait_until("the machines are synced", |subs| {
        let is_so = |(sub, image): (&SubSummary, &&str)| {
            sub.status == Status::Synced && sub.required_image == **image
        };
        subs.len() == images.len() && subs.iter().zip(images).all(is_so)
    });
}

fn starts(scenario: &Scenario, index: usize, versions: &[&str]) {
    eventually("the task starts", || match lines(&scenario.fleet.subs[index], "starts") {
        starts if starts == versions => Ok(()),
        starts => Err(starts),
    });
}

/// Starts a rollout, and returns how it ended.
fn roll_out(scenario: &Scenario, what: &str, state: &str) -> String {
    let id = asked(scenario, &["rollout", "start", what, "--why", "next"])["id"].clone();
    let ended = wait_for_state(scenario, id.as_str().unwrap(), state);
    ended["rollout"]["cause"].as_str().unwrap().to_owned()
}

#[test]
fn a_bundle_comes_beside_the_image_of_a_machine_and_goes_with_its_files_and_task() {
    let mut scenario = Scenario::start_with_tasks(3);
    let first = add_base(&scenario, 1);
    add_base(&scenario, 2);
    let third = scenario.directory.path().join("base-3");
    fs::create_dir_all(third.join("opt/job")).unwrap();
    fs::write(third.join("opt/job/run"), "of the base").unwrap();
    add_base(&scenario, 3);
    add_bundle(&scenario, "bundles/job/1", "1", &[]);
    add_bundle(&scenario, "bundles/job/2", "2", &[]);
    add_bundle(&scenario, "bundles/job/3", "3", &["etc/version"]);
    let logs = ["sub-1", "sub-2"];
    require(&scenario, "base/1", &logs);
    until_synced(&mut scenario, &["base/1"; 3]);

    let job = |revision: u32| {
        json!({"name": "job", "select": {"tags": {"logs": ["true"]}},
            "source": {"bundle": format!("bundles/job/{revision}")},
            "strategy": {"min_healthy_percent": 50}})
    };
    assert_eq!(with_file(&scenario, &["env", "create"], &job(1)).0, 0);
    let (code, plan, said) = domtool(&scenario, &["rollout", "plan", "job"]);
    assert_eq!(code, 3, "{said}");
    assert!(plan.contains("2 machines: nothing -> bundles/job/1 (sub-1, sub-2)"), "{plan}");
    roll_out(&scenario, "job@1", "succeeded");
    let with_job = "base/1 + bundles/job/1";
    until_synced(&mut scenario, &[with_job, with_job, "base/1"]);
    (0..2).for_each(|index| starts(&scenario, index, &["1"]));
    starts(&scenario, 2, &[]);
    let explained = domtool(&scenario, &["explain", "sub-1"]).1;
    assert!(explained.contains("by job@1; the machine database says base/1"), "{explained}");

    // Drift in the bundle's files is repaired, also by a dominator that was killed.
    scenario.fleet.dominator.kill().unwrap();
    let program = scenario.fleet.subs[0].root.join("opt/job/run");
    fs::write(&program, "#!/bin/sh\n").unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    eventually("the program is as it was", || match fs::read_to_string(&program) {
        Ok(text) if text.contains("starts") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    until_synced(&mut scenario, &[with_job, with_job, "base/1"]);

    // The bundle and the image change each for itself.
    require(&scenario, "base/2", &logs);
    let with_job = "base/2 + bundles/job/1";
    until_synced(&mut scenario, &[with_job, with_job, "base/2"]);
    assert_eq!(fs::read_to_string(scenario.fleet.subs[1].root.join("etc/version")).unwrap(), "2");
    starts(&scenario, 1, &["1"]);
    assert_eq!(with_file(&scenario, &["env", "update"], &job(2)).0, 0);
    roll_out(&scenario, "job@2", "succeeded");
    let with_job = "base/2 + bundles/job/2";
    until_synced(&mut scenario, &[with_job, with_job, "base/2"]);
    starts(&scenario, 1, &["1", "2"]);

    // One that has a file of the image is not carried out.
    assert_eq!(with_file(&scenario, &["env", "update"], &job(3)).0, 0);
    let cause = roll_out(&scenario, "job@3", "rolled_back");
    let clash = "bundles/job/3 in base/2 + bundles/job/3: /etc/version is in base/2 too";
    assert_eq!(cause, format!("job failed: sub-1 cannot have {clash}"));
    // Where that comes about by an edit, the bundle is left out, and named.
    require(&scenario, "base/2 + bundles/job/3", &logs);
    let clash = "base/2 + bundles/job/3 + bundles/job/2";
    until_synced(&mut scenario, &[clash, clash, "base/2 + bundles/job/3"]);
    let detail = scenario.fleet.detail("sub-1").unwrap().summary.detail;
    let left_out = "conflict: bundles/job/3 is left out: /etc/version is in base/2 too";
    assert!(detail.contains(left_out), "{detail}");

    // So it is for an environment whose machines cannot have its bundle: it is not healthy there.
    require(&scenario, "base/3", &logs);
    let clash = "base/3 + bundles/job/2";
    until_synced(&mut scenario, &[clash, clash, "base/3"]);
    let shown = asked(&scenario, &["env", "show", "job"]);
    let facts = [&shown["machines"], &shown["healthy"], &shown["conflicts"]];
    assert_eq!(facts, [&json!(2), &json!(0), &json!(logs)]);

    // What a machine that leaves has of the bundle goes.
    require(&scenario, "base/1", &["sub-2"]);
    until_synced(&mut scenario, &["base/1", "base/1 + bundles/job/2", "base/1"]);
    eventually("the task has ended", || match lines(&scenario.fleet.subs[0], "ends").len() {
        0 => Err("it runs"),
        _ => Ok(()),
    });
    Scenario::verify_one(&scenario.fleet.subs[0], &first);
    assert_eq!(lines(&scenario.fleet.subs[1], "overlaps"), [""; 0]);
}

/// Adds a sparse image with one file, in a directory of its own.
fn add_libs(scenario: &Scenario, version: u32) {
    let tree = scenario.directory.path().join(format!("libs-{version}"));
    let directory = tree.join(format!("opt/libs-{version}"));
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("lib"), version.to_string()).unwrap();
    let name = format!("bundles/libs/{version}").into();
    let words = ["--format".into(), "json".into(), "add".into(), name];
    scenario.imagetool(&[&words[..], &[tree.into_os_string(), "-".into(), "-".into()]].concat());
}

#[test]
fn a_former_bundle_stays_on_machines_until_nothing_requires_it() {
    let mut scenario = Scenario::start_with_tasks(2);
    for version in [1, 2] {
        add_base(&scenario, version);
        add_libs(&scenario, version);
    }
    require(&scenario, "base/1", &[]);
    let libs = |version: u32| {
        json!({"name": "libs", "select": {"hosts": ["*"]}, "disjoint": true,
            "source": {"bundle": format!("bundles/libs/{version}")},
            "provides": {"libs": version.to_string()},
            "strategy": {"min_healthy_percent": 50}})
    };
    let web = |image: &str, range: &str| {
        json!({"name": "web", "select": {"hosts": ["*"]}, "depends_on": ["libs"],
            "source": {"image": image}, "requires": {"libs": range},
            "strategy": {"min_healthy_percent": 50}})
    };
    assert_eq!(with_file(&scenario, &["env", "create"], &libs(1)).0, 0);
    assert_eq!(with_file(&scenario, &["env", "create"], &web("base/1", "<2")).0, 0);
    roll_out(&scenario, "libs@1", "succeeded");
    roll_out(&scenario, "web@1", "succeeded");
    until_synced(&mut scenario, &["base/1 + bundles/libs/1"; 2]);

    assert_eq!(with_file(&scenario, &["env", "update"], &libs(2)).0, 0);
    let plan = domtool(&scenario, &["rollout", "plan", "libs"]).1;
    let both = "bundles/libs/1 -> bundles/libs/2 + bundles/libs/1 (sub-1, sub-2)";
    assert!(plan.contains(both), "{plan}");
    roll_out(&scenario, "libs@2", "succeeded");
    until_synced(&mut scenario, &["base/1 + bundles/libs/2 + bundles/libs/1"; 2]);
    let files = |scenario: &Scenario| {
        let file = |version: u32| format!("opt/libs-{version}/lib");
        [1, 2].map(|version| scenario.fleet.subs[1].root.join(file(version)).exists())
    };
    assert_eq!(files(&scenario), [true; 2]);
    let shown = domtool(&scenario, &["env", "show", "libs"]).1;
    let stays = "bundles/libs/1 stays beside it: others require what it provides";
    assert!(shown.contains(stays), "{shown}");

    // What comes after needs it no more.
    assert_eq!(with_file(&scenario, &["env", "update"], &web("base/2", ">=2")).0, 0);
    roll_out(&scenario, "web@2", "succeeded");
    until_ended(&scenario, "cleanup");
    until_synced(&mut scenario, &["base/2 + bundles/libs/2"; 2]);
    assert_eq!(files(&scenario), [false, true]);
}

/// Waits until a rollout of a kind that comes by itself, and so by its kind, has succeeded.
fn until_ended(scenario: &Scenario, kind: &str) {
    eventually("the rollout has ended", || {
        let all = asked(scenario, &["rollout", "list"])["rollouts"].clone();
        let facts = |one: &serde_json::Value| {
            ["kind", "by", "state"].map(|key| one["rollout"][key].as_str().unwrap().to_owned())
        };
        let has = all.as_array().unwrap().iter().any(|one| facts(one) == [kind, kind, "succeeded"]);
        if has { Ok(()) } else { Err(all) }
    });
}

/// Which of these paths a machine has.
fn present(scenario: &Scenario, index: usize, paths: &[&str]) -> Vec<bool> {
    let root = &scenario.fleet.subs[index].root;
    paths.iter().map(|path| root.join(path).exists()).collect()
}

#[test]
fn a_bundle_that_leaves_a_machine_without_an_image_takes_its_files_with_it() {
    let mut scenario = Scenario::start_with_tasks(2);
    add_base(&scenario, 1);
    add_bundle(&scenario, "bundles/job/1", "1", &[]);
    add_bundle(&scenario, "bundles/job/2", "2", &[]);
    add_libs(&scenario, 1);
    // The machines have files of their own.
    let logs = ["sub-1", "sub-2"];
    require(&scenario, "base/1", &logs);
    until_synced(&mut scenario, &["base/1"; 2]);
    require(&scenario, "", &logs);
    let job = |revision: u32| {
        json!({"name": "job", "select": {"tags": {"logs": ["true"]}},
            "source": {"bundle": format!("bundles/job/{revision}")},
            "strategy": {"min_healthy_percent": 50}})
    };
    let libs = json!({"name": "libs", "select": {"hosts": ["sub-1"]},
        "source": {"bundle": "bundles/libs/1"}});
    assert_eq!(with_file(&scenario, &["env", "create"], &job(1)).0, 0);
    assert_eq!(with_file(&scenario, &["env", "create"], &libs).0, 0);
    roll_out(&scenario, "job@1", "succeeded");
    roll_out(&scenario, "libs@1", "succeeded");
    let both = "(nothing) + bundles/job/1 + bundles/libs/1";
    until_synced(&mut scenario, &[both, "(nothing) + bundles/job/1"]);
    (0..2).for_each(|index| starts(&scenario, index, &["1"]));
    let paths = ["etc/version", "bin/sh", "opt", "opt/job", "opt/libs-1"];
    assert_eq!(present(&scenario, 0, &paths), [true; 5]);

    // One of two bundles goes.
    let back = asked(&scenario, &["rollout", "rollback", "libs", "--to", "0", "--why", "no use"]);
    wait_for_state(&scenario, back["id"].as_str().unwrap(), "succeeded");
    until_synced(&mut scenario, &["(nothing) + bundles/job/1"; 2]);
    assert_eq!(present(&scenario, 0, &paths), [true, true, true, true, false]);
    starts(&scenario, 0, &["1"]);

    // The last one goes, also if the dominator was away when that was wanted.
    scenario.fleet.dominator.kill().unwrap();
    require(&scenario, "", &["sub-2"]);
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    scenario.wait_until("the first machine has no image", |subs| {
        let is_so = |sub: &SubSummary, status, image: &str| {
            sub.status == status && sub.required_image == image
        };
        is_so(&subs[0], Status::ImageUndefined, "")
            && is_so(&subs[1], Status::Synced, "(nothing) + bundles/job/1")
    });
    assert_eq!(present(&scenario, 0, &paths), [true, true, true, false, false]);
    assert_eq!(present(&scenario, 0, &["etc/dominator", "etc"]), [false, true]);
    assert_eq!(lines(&scenario.fleet.subs[0], "ends").len(), 1, "the task has ended");

    // It comes back with the revision of the time, as a rollout by itself.
    assert_eq!(with_file(&scenario, &["env", "update"], &job(2)).0, 0);
    roll_out(&scenario, "job@2", "succeeded");
    require(&scenario, "", &logs);
    until_synced(&mut scenario, &["(nothing) + bundles/job/2"; 2]);
    starts(&scenario, 0, &["1", "2"]);
    until_ended(&scenario, "new_host");

    // An image again: its files are looked at, and those of the bundle stay.
    require(&scenario, "base/1", &logs);
    until_synced(&mut scenario, &["base/1 + bundles/job/2"; 2]);
    assert_eq!(present(&scenario, 1, &paths), [true, true, true, true, false]);
}

#[test]
fn a_task_that_dies_while_its_environment_is_not_active_is_not_restarted() {
    let mut scenario = Scenario::start_with_tasks(1);
    add_base(&scenario, 1);
    add_bundle(&scenario, "bundles/job/1", "1", &[]);
    require(&scenario, "base/1", &["sub-1"]);
    let job = json!({"name": "job", "select": {"tags": {"logs": ["true"]}},
        "source": {"bundle": "bundles/job/1"}});
    assert_eq!(with_file(&scenario, &["env", "create"], &job).0, 0);
    roll_out(&scenario, "job@1", "succeeded");
    starts(&scenario, 0, &["1"]);

    let reason = "the environment job is not active";
    let (code, said, _) = domtool(&scenario, &["env", "deactivate", "job"]);
    let means = "job is now not active; tasks that end by themselves are not restarted, and new \
                 machines get nothing; files are still repaired";
    assert!(code == 0 && said.contains(means), "{said}");
    let task = |scenario: &Scenario| report(scenario, 0).expect("it has a task");
    eventually("the machine knows", || match task(&scenario).not_restarted {
        Some(why) if why == reason => Ok(()),
        other => Err(other),
    });
    kill_program(&scenario.fleet.subs[0]);
    eventually("the task has ended", || match task(&scenario) {
        task if task.state == TaskState::NotRestarted => Ok(()),
        task => Err(task.detail),
    });
    // Also by another subd, which repairs its files, and which a dominator asks that was killed.
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.subs[0].daemon.kill().unwrap();
    let program = scenario.fleet.subs[0].root.join("opt/job/run");
    let text = fs::read_to_string(&program).unwrap();
    fs::write(&program, "#!/bin/sh\n").unwrap();
    scenario.fleet.subs[0].daemon.start_again().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    eventually("the program is as it was", || match fs::read_to_string(&program) {
        Ok(now) if now == text => Ok(()),
        other => Err(format!("{other:?}")),
    });
    until_synced(&mut scenario, &["base/1 + bundles/job/1"]);
    let task = task(&scenario);
    let detail = "and is not started again: the environment job is not active";
    assert!(task.state == TaskState::NotRestarted && task.detail.contains(detail), "{task:?}");
    starts(&scenario, 0, &["1"]);

    assert_eq!(domtool(&scenario, &["env", "activate", "job"]).0, 0);
    starts(&scenario, 0, &["1", "1"]);
}
