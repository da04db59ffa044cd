//! Real daemons that are stopped, killed, cut off, damaged and lied to: the fleet says what is
//! wrong, and is as it must be after a repair.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use api::dominator::Status;
use api::subd::{Activity, Poll, PollRequest};
use localfleet::fleet::daemon_process::Daemon;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario};
use crate::liar::Liar;
use crate::trees;

pub fn signal(daemon: &Daemon, signal: Signal) {
    let id = i32::try_from(daemon.id().unwrap()).unwrap();
    kill(Pid::from_raw(id), signal).unwrap();
}

/// What failed is tried again at once, until all machines have the image and this tree.
fn mend(scenario: &mut Scenario, image: &str, tree: &Path) {
    for sub in &scenario.fleet.subs {
        // There may be nothing to retry any more.
        let _output = scenario.fleet.domtool(&["retry", sub.hostname.as_str()]).unwrap();
    }
    scenario.converge(image);
    scenario.verify(tree);
    scenario.fleet.stop().unwrap();
}

/// Two trees, and a fleet that has the first.
fn start(subs: usize) -> (Scenario, PathBuf, PathBuf) {
    begin(Scenario::start(subs))
}

fn begin(mut scenario: Scenario) -> (Scenario, PathBuf, PathBuf) {
    let (first, second) =
        (scenario.directory.path().join("1"), scenario.directory.path().join("2"));
    trees::make(&first, 1);
    trees::make(&second, 2);
    scenario.add("test/1", &first);
    scenario.add("test/2", &second);
    scenario.converge("test/1");
    (scenario, first, second)
}

#[test]
fn an_image_server_that_hangs_or_is_gone_delays_a_rollout_and_no_more() {
    let (mut scenario, first, second) = start(3);
    // It hangs before anyone has asked for the new image.
    signal(&scenario.fleet.imageserver, Signal::SIGSTOP);
    scenario.fleet.require(Some("test/2")).unwrap();
    scenario.wait_until("they are told of the new image", |subs| {
        subs.iter().all(|sub| sub.status == Status::ImageNotReady && sub.required_image == "test/2")
    });
    scenario.verify(&first);
    signal(&scenario.fleet.imageserver, Signal::SIGCONT);
    // It goes in the midst of it.
    scenario.wait_until("the rollout has begun", |subs| {
        subs.iter().any(|sub| !matches!(sub.status, Status::ImageNotReady))
    });
    scenario.fleet.imageserver.kill().unwrap();
    scenario.wait_until("each waits for the image server, or has the image", |subs| {
        let waits = [Status::ImageNotReady, Status::FetchFailed, Status::Synced];
        subs.len() == 3 && subs.iter().all(|sub| waits.contains(&sub.status))
    });
    scenario.fleet.imageserver.start_again().unwrap();
    mend(&mut scenario, "test/2", &second);
}

#[test]
fn a_damaged_object_is_put_aside_and_comes_back_with_the_next_upload() {
    let (mut scenario, first, second) = start(2);
    let wanted = fs::read(second.join("usr/lib/libx.so.1")).unwrap();
    let store = scenario.directory.path().join("imageserver");
    let object = find(&store, &wanted).expect("the object is in the store");
    let mut damaged = wanted;
    damaged[0] ^= 1;
    fs::remove_file(&object).unwrap();
    fs::write(&object, &damaged).unwrap();
    scenario.fleet.require(Some("test/2")).unwrap();
    let failed = scenario.wait_until("the object is missed", |subs| {
        subs.iter().all(|sub| sub.status == Status::FetchFailed)
    });
    let server = scenario.fleet.addresses().imageserver.to_string();
    for sub in failed {
        assert!(sub.detail.contains(&server), "{}", sub.detail);
    }
    scenario.verify(&first);
    assert_eq!(find(&store.join("objects"), &damaged), None, "it is where objects are served from");
    assert!(find(&store, &damaged).is_some(), "it was not put aside");
    // The same content in another image.
    scenario.add("test/2-again", &second);
    mend(&mut scenario, "test/2", &second);
}

#[test]
fn wrong_bytes_on_the_way_are_installed_nowhere() {
    let liar = Liar::start("library of version 2");
    let address = liar.address.to_string();
    // Of what travels in TLS it could change nothing.
    let scenario = Scenario::start_insecure_with(2, &[("--imageserver-for-subs", &address)]);
    liar.stand_before(scenario.fleet.addresses().imageserver);
    let (mut scenario, first, second) = begin(scenario);
    scenario.fleet.require(Some("test/2")).unwrap();
    let failed = scenario.wait_until("the lie is seen", |subs| {
        subs.iter().all(|sub| sub.status == Status::FetchFailed)
    });
    for sub in failed {
        assert!(sub.detail.contains(&address), "{}", sub.detail);
    }
    assert!(liar.told() >= 2);
    scenario.verify(&first);
    liar.tell_the_truth();
    mend(&mut scenario, "test/2", &second);
}

/// The file below `directory` with this content.
fn find(directory: &Path, content: &[u8]) -> Option<PathBuf> {
    for entry in fs::read_dir(directory).ok()? {
        let path = entry.ok()?.path();
        let found = if path.is_dir() {
            find(&path, content)
        } else {
            let is_same = fs::metadata(&path).is_ok_and(|it| it.len() == content.len() as u64)
                && fs::read(&path).is_ok_and(|bytes| bytes == content);
            is_same.then_some(path)
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

#[test]
fn a_subd_that_is_killed_between_the_fetch_and_the_update_starts_over() {
    let (mut scenario, first, second) = start(2);
    // The brake lets machines fetch, and no more.
    let braked = scenario.fleet.domtool(&["disable-updates", "until all is fetched"]).unwrap();
    assert!(braked.status.success());
    scenario.fleet.require(Some("test/2")).unwrap();
    scenario.wait_until("all is fetched", |subs| {
        subs.iter().all(|sub| sub.detail.contains("all objects are there"))
    });
    scenario.fleet.subs[0].daemon.kill().unwrap();
    scenario.fleet.subs[0].daemon.start_again().unwrap();
    scenario.verify(&first);
    let released = scenario.fleet.domtool(&["enable-updates"]).unwrap();
    assert!(released.status.success());
    // The other one is killed as soon as it has anything to do with the update.
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < CONVERGE_MAX, "sub-2 has nothing to do with the update");
        let request = PollRequest { have: None, wait_ms: 0 };
        let reply = scenario.fleet.ask_sub::<Poll>(1, &request).unwrap();
        let is_done = reply.last_image.is_some_and(|image| image.as_str() == "test/2");
        if is_done || !matches!(reply.activity, Activity::Idle | Activity::Fetching { .. }) {
            break;
        }
    }
    scenario.fleet.subs[1].daemon.kill().unwrap();
    scenario.fleet.subs[1].daemon.start_again().unwrap();
    mend(&mut scenario, "test/2", &second);
}

#[test]
fn a_subd_that_is_killed_before_it_verified_an_update_verifies_it_after_its_start() {
    let (mut scenario, first, second) = start(1);
    let sub = &mut scenario.fleet.subs[0];
    let file = sub.root.join(".subd/state/state.json");
    // It is reported before it is saved.
    let mut state = eventually("the verified update is saved", || {
        let state: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        state["last_update"]["verified_generation"].is_number().then_some(state)
    });
    sub.daemon.kill().unwrap();
    // What such a kill leaves: how the update ended is saved, and no scan after it.
    state["last_update"]["verified_generation"] = serde_json::Value::Null;
    fs::write(&file, state.to_string()).unwrap();
    sub.daemon.start_again().unwrap();
    scenario.converge("test/1");
    scenario.verify(&first);
    mend(&mut scenario, "test/2", &second);
}

#[test]
fn a_hangup_ends_no_daemon() {
    let (mut scenario, _first, second) = start(1);
    for daemon in [&scenario.fleet.imageserver, &scenario.fleet.subs[0].daemon] {
        signal(daemon, Signal::SIGHUP);
    }
    mend(&mut scenario, "test/2", &second);
}

#[test]
fn a_subd_that_hangs_in_the_middle_of_a_poll_delays_nobody_and_goes_on() {
    let (mut scenario, first, second) = start(2);
    signal(&scenario.fleet.subs[0].daemon, Signal::SIGSTOP);
    scenario.fleet.require(Some("test/2")).unwrap();
    // The other one has the new image meanwhile; this one has nothing.
    scenario.wait_until("the other machine has the new image", |subs| {
        subs[1].status == Status::Synced && subs[1].last_image == "test/2"
    });
    let hanging = &scenario.fleet.subs[0];
    let library = |root: &Path| fs::read(root.join("usr/lib/libx.so.1")).unwrap();
    assert_eq!(library(&hanging.root), library(&first));
    signal(&hanging.daemon, Signal::SIGCONT);
    mend(&mut scenario, "test/2", &second);
}
