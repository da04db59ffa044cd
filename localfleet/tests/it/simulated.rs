//! A real dominator with simulated machines: each is taken in, repaired and updated, and those that
//! are away delay nobody.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use api::dominator::Status;
use localfleet::fleet::{Addresses, Fleet, Options, client_of};
use localfleet::programs::install;
use localfleet::simulated_fleet::SimulatedFleet;
use localfleet::simulator::control::{
    ClearFirstTimes, Disturb, DisturbRequest, Disturbance, Drift, DriftRequest,
};

use crate::converges::{CONVERGE_MAX, programs};
use crate::trees;

const SUBS: usize = 50;

const FLAGS: [&str; 1] = ["--fetch-ms=20"];

fn start(directory: &Path, flags: &[&str]) -> SimulatedFleet {
    let fleet = Fleet::start(Options {
        programs: programs(directory),
        directory: directory.to_owned(),
        subs: 0,
        subd_flags: Vec::new(),
        dominator_flags: Vec::new(),
        insecure: false,
        addresses: Addresses::private().unwrap(),
        stop: Arc::new(AtomicBool::new(false)),
    })
    .unwrap();
    let filter = directory.join("filter");
    fs::write(&filter, "/var/log/.*\n/tmp/.*\n").unwrap();
    for (version, name) in [(1, "test/1"), (2, "test/2")] {
        let tree = directory.join(format!("tree-{version}"));
        trees::make(&tree, version);
        let (tree, filter) = (tree.display().to_string(), filter.display().to_string());
        let output = fleet.imagetool(&["add", name, &tree, &filter, "-"]).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    install(Path::new(env!("CARGO_BIN_EXE_localfleet")), &directory.join("simulator")).unwrap();
    simulate(fleet, directory, "test/1", flags)
}

/// Starts the machines, which have `image`.
fn simulate(fleet: Fleet, directory: &Path, image: &str, flags: &[&str]) -> SimulatedFleet {
    let (first, second) = ([image.to_owned()], ["test/2".to_owned()]);
    SimulatedFleet::start(fleet, &directory.join("simulator"), SUBS, &first, &second, flags)
        .unwrap()
}

/// Adds the image `test/3`, which is `test/2` with a computed file, and starts what makes that.
fn add_computed(all: &mut SimulatedFleet, directory: &Path) {
    let path = |name: &str| directory.join(name);
    let source = all.fleet.addresses().filegen;
    fs::create_dir_all(path("layer/etc")).unwrap();
    let config = "[[generator]]\npath = \"/etc/machine.json\"\nkind = \"mdb\"\n";
    for (name, text) in [
        ("layer/etc/machine.json", ""),
        ("filegen.toml", config),
        ("computed", &format!("/etc/machine.json {source}\n")),
    ] {
        fs::write(path(name), text).unwrap();
    }
    let (list, layer) = (path("computed"), path("layer"));
    let words = ["add-overlay", "--required-paths=", "--computed"].map(OsStr::new);
    let words = words.into_iter().chain([list.as_os_str()]);
    let words = words.chain(["test/3", "test/2"].map(OsStr::new)).chain([layer.as_os_str()]);
    let output = all.fleet.imagetool(&words.collect::<Vec<_>>()).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let server = all.fleet.start_filegen(&path("filegen.toml")).unwrap();
    all.fleet.keep(server);
}

#[test]
fn machines_with_an_older_subd_get_a_newer_one_first() {
    let directory = tempfile::tempdir().unwrap();
    let mut all = start(directory.path(), &[&FLAGS[..], &["--former-release"]].concat());
    add_computed(&mut all, directory.path());
    let [first, second, third] = ["test/1", "test/2", "test/3"].map(str::to_owned);
    all.require(|_| &first).unwrap();
    all.wait_all_synced("all are taken in", CONVERGE_MAX).unwrap();
    all.require(|_| &third).unwrap();
    let are_too_old = |all: &SimulatedFleet| Ok(all.count(Status::SubdTooOld)? == SUBS);
    all.wait("all are too old", CONVERGE_MAX, are_too_old).unwrap();
    let why = "test/3 has computed files, which its subd does not know: require an image first \
               that brings a newer subd";
    for sub in all.fleet.statuses().unwrap() {
        assert!(sub.detail.starts_with(why), "{}", sub.detail);
        assert_eq!(sub.last_image, "test/1");
    }

    // The image with the newer subd, which starts then.
    all.require(|_| &second).unwrap();
    all.wait_all_synced("all have the newer subd", CONVERGE_MAX).unwrap();
    all.simulator.stop().unwrap();
    let mut all = simulate(all.fleet, directory.path(), "test/2", &FLAGS);
    all.require(|_| &third).unwrap();
    all.wait_all_synced("all have their computed file", CONVERGE_MAX).unwrap();
    let subs = all.fleet.statuses().unwrap();
    assert!(subs.iter().all(|sub| sub.last_image == "test/3"), "{subs:?}");
    all.stop().unwrap();
}

#[test]
fn simulated_machines_are_taken_in_repaired_and_updated() {
    let directory = tempfile::tempdir().unwrap();
    let mut all = start(directory.path(), &FLAGS);
    let (first, second) = ("test/1".to_owned(), "test/2".to_owned());
    all.require(|_| &first).unwrap();
    all.wait_all_synced("all are taken in", CONVERGE_MAX).unwrap();
    let first_times = all.first_times().unwrap();
    // Each differed from its image in a file of its own.
    assert!(
        first_times
            .iter()
            .all(|first_times| first_times.order().is_some() && first_times.verified.is_some())
    );

    // What all of them would do is told of one plan.
    let plans = |all: &SimulatedFleet| {
        let metrics = client_of(all.fleet.addresses().dominator, all.fleet.security());
        let (_, text) = all.fleet.get(&metrics, "/metrics").unwrap();
        let text = String::from_utf8(text.to_vec()).unwrap();
        let line = text.lines().find(|line| line.contains("plan_seconds_count")).unwrap();
        line.split_whitespace().last().unwrap().parse::<u64>().unwrap()
    };
    let before = plans(&all);
    let (plan, took) = all.plan(|_| &second).unwrap();
    println!("{SUBS} machines were planned for in {took:?}");
    let pair = &plan["pairs"][0];
    assert_eq!((&pair["machines"], &pair["same"]), (&SUBS.into(), &0.into()));
    assert_eq!(plan["updates"].as_array().unwrap().len(), 1);
    assert_eq!(plans(&all), before + 1);

    all.ask::<ClearFirstTimes>(&()).unwrap();
    all.ask::<Drift>(&DriftRequest { sub: 7, chance: 0x1234_5678_9abc_def0 }).unwrap();
    all.wait("drift is repaired", CONVERGE_MAX, |all| Ok(all.report()?.verified == 1)).unwrap();
    let first_times = all.first_times().unwrap();
    let seven = first_times[7];
    let steps = [seven.drifted, seven.order(), seven.prepare, seven.commit, seven.verified];
    assert!(steps.is_sorted() && steps[0].is_some(), "{seven:?}");
    assert_eq!(first_times.iter().filter(|first_times| first_times.order().is_some()).count(), 1);

    let disturbed = DisturbRequest { dead_percent: 20, flapping_percent: 10 };
    let number_of = |disturbance: Disturbance| {
        (0..SUBS).filter(|&sub| disturbed.disturbance(sub) == disturbance).count()
    };
    let dead = number_of(Disturbance::Refusing) + number_of(Disturbance::Silent);
    assert!(dead > 5 && number_of(Disturbance::Flapping) > 2);
    all.ask::<Disturb>(&disturbed).unwrap();
    all.wait(
        "the dead are missed",
        CONVERGE_MAX,
        |all| Ok(all.count(Status::Unreachable)? >= dead),
    )
    .unwrap();
    all.ask::<ClearFirstTimes>(&()).unwrap();
    all.require(|_| &second).unwrap();
    all.wait("the steady ones are updated", CONVERGE_MAX, |all| {
        let first_times = all.first_times()?;
        let steady = (0..SUBS).filter(|&sub| disturbed.disturbance(sub) == Disturbance::Steady);
        Ok(steady.map(|sub| first_times[sub]).all(|first_times| first_times.verified.is_some()))
    })
    .unwrap();

    all.ask::<Disturb>(&DisturbRequest::default()).unwrap();
    all.wait_all_synced("all have come back", CONVERGE_MAX).unwrap();
    let subs = all.fleet.statuses().unwrap();
    assert!(subs.iter().all(|sub| sub.last_image == "test/2"), "{subs:?}");
    assert_eq!(subs.len(), SUBS);
    all.stop().unwrap();
}
