//! A path that cannot be changed, from the first repair around it to the end of the obstacle.

use std::fs;
use std::os::unix::net::UnixListener;
use std::process::Command;

use api::dominator::{Status, SubSummary};

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::trees;

fn domtool(scenario: &Scenario, words: &[&str]) -> (i32, String, String) {
    let output = scenario.fleet.domtool(words).unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Waits until the machine has this status, and its last update was to this image.
fn wait(scenario: &mut Scenario, status: Status, image: &str) {
    let is_so = |sub: &SubSummary| sub.status == status && sub.last_image == image;
    let what = format!("the machine is {status} with {image}");
    scenario.wait_until(&what, |subs| subs.len() == 1 && subs.iter().all(is_so));
}

#[test]
fn repairs_go_on_around_an_obstacle_and_images_that_need_the_path_wait_for_it() {
    let mut scenario = Scenario::start(1);
    let trees = [1, 2, 3].map(|number| scenario.directory.path().join(number.to_string()));
    trees::make(&trees[0], 1);
    fs::write(trees[0].join("etc/obstacle"), "1").unwrap();
    for tree in &trees[1..] {
        let copied = Command::new("cp").arg("-a").args([&trees[0], tree]).status().unwrap();
        assert!(copied.success());
        fs::write(tree.join("etc/new"), "new").unwrap();
    }
    fs::write(trees[2].join("etc/obstacle"), "3").unwrap();
    for (number, tree) in trees.iter().enumerate() {
        scenario.add(&format!("test/{}", number + 1), tree);
    }
    scenario.converge("test/1");

    // A socket is no part of an image: the file is missing, and something is at its path.
    let root = scenario.fleet.subs[0].root.clone();
    let obstacle = root.join("etc/obstacle");
    fs::remove_file(&obstacle).unwrap();
    let socket = UnixListener::bind(&obstacle).unwrap();
    fs::write(root.join("etc/unwanted"), "drift").unwrap();
    wait(&mut scenario, Status::PartlySynced, "test/1");
    assert!(!root.join("etc/unwanted").exists());
    let (code, out, _) = domtool(&scenario, &["explain", "sub-1"]);
    let why = "equals test/1, except for 1 path that cannot be changed: /etc/obstacle: it changed \
               since it was scanned: something is there now";
    assert!(code == 0 && out.contains(why), "{out}");
    let (code, _, said) = domtool(&scenario, &["go-on", "sub-1", "--why", "no need"]);
    assert!(code == 1 && said.contains("no update of sub-1 is held back"), "{said}");

    // The former image requires the same of the path.
    scenario.fleet.require(Some("test/2")).unwrap();
    wait(&mut scenario, Status::PartlySynced, "test/2");
    assert_eq!(fs::read(root.join("etc/new")).unwrap(), b"new");

    scenario.fleet.require(Some("test/3")).unwrap();
    wait(&mut scenario, Status::Blocked, "test/2");
    let (code, out, said) = domtool(&scenario, &["go-on", "sub-*", "--why", "not needed there"]);
    assert_eq!((code, &*out), (0, "sub-1\n"), "{said}");
    wait(&mut scenario, Status::PartlySynced, "test/3");
    let (_, out, _) = domtool(&scenario, &["audit"]);
    assert!(out.contains("go-on") && out.contains("not needed there"), "{out}");

    drop(socket);
    fs::remove_file(&obstacle).unwrap();
    let (code, out, said) = domtool(&scenario, &["fast-update", "sub-1"]);
    assert_eq!((code, &*out), (0, "sub-1: synced: equals test/3\n"), "{said}");
    scenario.fleet.wait_synced("test/3", CONVERGE_MAX, |_| {}).unwrap();
    scenario.verify(&trees[2]);
}
