//! A real dominator with simulated machines: each is taken in, repaired and updated, and those that
//! are away delay nobody.

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

fn start(directory: &Path) -> SimulatedFleet {
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
    let simulator = directory.join("simulator");
    install(Path::new(env!("CARGO_BIN_EXE_localfleet")), &simulator).unwrap();
    let (first, second) = (["test/1".to_owned()], ["test/2".to_owned()]);
    SimulatedFleet::start(fleet, &simulator, SUBS, &first, &second, &["--fetch-ms=20"]).unwrap()
}

#[test]
fn simulated_machines_are_taken_in_repaired_and_updated() {
    let directory = tempfile::tempdir().unwrap();
    let mut all = start(directory.path());
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
