//! A thousand machines within budgets: dead ones, drifting ones, and an image that fails.
//!
//! That no limit is passed, and that no Commit goes to an image that has stopped, is checked by the
//! simulation itself with each Commit.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::dominator::Status;
use dominator::core::budget::UpdateClass;
use dominator::core::budget::limits::{LocationLimit, MachineLimit, MachineLimits};
use dominator::core::claims::ClaimSettings;
use dominator::core::image_breaker::FailureLimits;
use dominator::core::sub::VANISHED_AFTER;
use model::image::ImageName;
use model::image::required::RequiredImage;
use model::trigger::Triggers;

use crate::simulation::{image, tree};
use crate::world::{Faults, NONE, World, no_limits};

const MACHINES: usize = 1_000;
const RACKS: usize = 20;
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// Three images, the second with a trigger of high impact if `is_high_impact`; all machines have
/// the first.
fn world(seed: u64, settings: ClaimSettings, is_high_impact: bool, faults: Faults) -> World {
    let (one, two) = (tree(1, false), tree(2, false));
    let mut second = RequiredImage::clone(&image("web/2", two, Some(&["/var/log/.*"])));
    if is_high_impact {
        let rules = r#"[{"MatchLines": ["/lib/.*"], "Service": "db", "HighImpact": true}]"#;
        second.content.triggers = Triggers::from_json(rules).unwrap();
        second = RequiredImage::new(second.content, second.tree);
    }
    let first = image("web/1", one.clone(), Some(&["/var/log/.*"]));
    let trees = vec![one; MACHINES];
    let third = image("web/3", tree(3, false), Some(&["/var/log/.*"]));
    let mut world = World::new(seed, trees, vec![first, Arc::new(second), third], faults);
    world.is_traced = false;
    for host in 0..MACHINES {
        world.locate(host, &format!("nyc/r{}", host % RACKS));
        world.assign(host, "web/1");
    }
    world.run_until_converged(MINUTE).expect("nothing is in the way of the first image");
    world.limit(settings);
    world.restart_dominator();
    world.run_until_converged(2 * MINUTE).expect("they have it already");
    world.tally.clear();
    world
}

fn limits(given: &[&str], each: Option<u32>) -> MachineLimits {
    let given: Vec<LocationLimit> = given.iter().map(|text| text.parse().unwrap()).collect();
    MachineLimits::new(None, &given, each.map(MachineLimit::Count))
}

fn failures(failures_min: u32) -> FailureLimits {
    FailureLimits { percent: 10, blocked_percent: 10, failures_min }
}

fn count(world: &World, status: Status) -> usize {
    (0..MACHINES).filter(|&host| world.status(host) == Some(status)).count()
}

fn second() -> ImageName {
    ImageName::new("web/2").unwrap()
}

#[test]
fn a_rollout_stays_within_its_budgets_and_delays_no_repair() {
    let settings = ClaimSettings {
        updating: limits(&["8%"], Some(6)),
        high_impact: limits(&["40", "nyc=36"], None),
        ..no_limits()
    };
    let mut world = world(1, settings, true, NONE);
    let start = world.now();
    (0..MACHINES).for_each(|host| world.assign(host, "web/2"));
    // While it goes on, machines that wait for it drift, and so do those that have it.
    world.run_until(start + 10 * SECOND);
    assert!(count(&world, Status::WaitingForBudget) > MACHINES / 2);
    let waiting = (0..MACHINES).find(|&host| world.status(host) == Some(Status::WaitingForBudget));
    let detail = world.detail(waiting.expect("most of them wait"));
    assert!(
        detail.contains(
            "machines under way of the 27 that --max-high-impact nyc=36 allows at once \
                         beside repairs; "
        ),
        "{detail}"
    );
    for round in 0..20 {
        let updated: Vec<usize> =
            (0..MACHINES).filter(|&host| world.is_host_converged(host)).collect();
        updated.iter().step_by(10).take(10).for_each(|&host| world.drift(host));
        world.run_until(start + (12 + 2 * round) * SECOND);
        // The dominator crashes in the middle of it.
        if round == 10 {
            world.restart_dominator();
        }
    }
    world.run_until_converged(start + 30 * MINUTE).expect("all get their turn");
    assert!(world.tally.is_empty());
    let waited = &world.tally.waited_longest;
    assert!(waited[&UpdateClass::Rollout] > 30 * SECOND, "{waited:?}");
    assert!(waited[&UpdateClass::Repair] < 15 * SECOND, "{waited:?}");
    assert!(world.tally.most > 27, "{}", world.tally.most);
}

#[test]
fn drift_of_the_whole_fleet_delays_no_rollout() {
    let settings = ClaimSettings { updating: limits(&["40"], None), ..no_limits() };
    let mut world = world(2, settings, false, NONE);
    (0..MACHINES - 60).for_each(|host| world.drift(host));
    world.run_until(world.now() + 10 * SECOND);
    (MACHINES - 60..MACHINES).for_each(|host| world.assign(host, "web/2"));
    world.run_until_converged(30 * MINUTE).expect("all get their turn");
    let waited = &world.tally.waited_longest;
    assert!(waited[&UpdateClass::Repair] > 60 * SECOND, "{waited:?}");
    assert!(waited[&UpdateClass::Rollout] < 15 * SECOND, "{waited:?}");
}

#[test]
fn dead_machines_use_up_no_budget_for_ever() {
    let settings = ClaimSettings { updating: limits(&["12"], None), ..no_limits() };
    let mut world = world(3, settings, false, NONE);
    // The first that are updated are never seen again: all places are taken by the dead.
    for host in 0..MACHINES {
        world.models[host].vanishes = Some(second());
    }
    let start = world.now();
    (0..MACHINES).for_each(|host| world.assign(host, "web/2"));
    world.run_until(start + MINUTE);
    let dead: Vec<usize> = (0..MACHINES).filter(|&host| !world.models[host].is_up).collect();
    assert_eq!(dead.len(), 9, "a quarter of the places is for repairs");
    (0..MACHINES).for_each(|host| world.models[host].vanishes = None);
    world.run_until(start + VANISHED_AFTER);
    assert_eq!(world.tally.begun[&second()], 9);
    world.run_until(start + VANISHED_AFTER + 20 * MINUTE);
    assert_eq!(world.tally.ends["Failed(Vanished)"], 9);
    let alive = (0..MACHINES).filter(|host| !dead.contains(host));
    let behind: Vec<usize> = alive.filter(|&host| !world.is_host_converged(host)).collect();
    assert!(behind.is_empty(), "{}", world.describe(behind[0]));
    dead.iter().for_each(|&host| world.revive(host));
    world.run_until_converged(60 * MINUTE).expect("they come back");
    assert!(world.tally.is_empty());
}

#[test]
fn an_image_that_fails_stops_and_the_rest_of_the_fleet_goes_on() {
    let settings =
        ClaimSettings { updating: limits(&["12"], None), failures: failures(5), ..no_limits() };
    let mut world = world(4, settings, false, NONE);
    for host in 0..MACHINES {
        world.models[host].sick = Some(second());
    }
    (0..MACHINES / 2).for_each(|host| world.assign(host, "web/2"));
    world.run_until(4 * MINUTE);
    // Nine are under way at once; after the fifth failure none is begun any more.
    let begun = world.tally.begun[&second()];
    assert!((5..=5 + 8).contains(&begun), "{begun} were begun");
    let failed = count(&world, Status::HealthFailed);
    assert_eq!(failed, usize::try_from(begun).unwrap());
    assert_eq!(count(&world, Status::ImageStopped), MACHINES / 2 - failed);
    let stop = &world.claims.stopped()[0];
    assert_eq!(stop.image, second());
    let stopped = (0..MACHINES).find(|&host| world.status(host) == Some(Status::ImageStopped));
    let detail = world.detail(stopped.expect("most of them are"));
    assert!(
        detail.contains(
            "updates to web/2 have stopped: 5 of 5 machines failed after the update to it (5 \
                         failed the health check), more than 10 %; another image goes on, or: \
                         domtool resume-image web/2 --why TEXT"
        ),
        "{detail}"
    );
    // The others do not notice, nor does it help to start the dominator again.
    (MACHINES / 2..MACHINES).step_by(50).for_each(|host| world.drift(host));
    world.run_until(5 * MINUTE);
    world.restart_dominator();
    world.run_until(8 * MINUTE);
    assert!((MACHINES / 2..MACHINES).all(|host| world.is_host_converged(host)));
    assert_eq!(world.tally.begun[&second()], begun);
    // The fault is found elsewhere.
    for host in 0..MACHINES {
        world.models[host].sick = None;
    }
    world.resume_image(&second());
    for host in 0..MACHINES {
        if world.status(host) == Some(Status::HealthFailed) {
            world.retry(host);
        }
    }
    world.run_until_converged(40 * MINUTE).expect("all get their turn");
    assert_eq!(world.claims.stopped(), []);
}

#[test]
fn an_image_that_fails_a_little_more_often_than_others_stops_too() {
    let settings =
        ClaimSettings { updating: limits(&["40"], None), failures: failures(6), ..no_limits() };
    let mut world = world(5, settings, false, NONE);
    // One in twenty fails, which is less than a tenth; after updates to another image none does.
    (0..MACHINES).step_by(20).for_each(|host| world.models[host].sick = Some(second()));
    (0..500).for_each(|host| world.assign(host, "web/3"));
    world.run_until(6 * MINUTE);
    assert!((0..500).all(|host| world.is_host_converged(host)));
    (500..MACHINES).for_each(|host| world.assign(host, "web/2"));
    world.run_until(20 * MINUTE);
    let [stop] = &world.claims.stopped()[..] else { panic!("{:?}", world.claims.stopped()) };
    assert!(
        stop.why.ends_with(", far more often than after other updates: 0 of 500"),
        "{}",
        stop.why
    );
    let begun = world.tally.begun[&second()];
    assert!((40..200).contains(&begun), "{begun} were begun");
}

#[test]
fn budgets_hold_on_a_bad_network_too() {
    let bad = Faults { lose: 3, repeat: 3, delay_max: 1_000, trouble_every: 0 };
    let settings =
        ClaimSettings { updating: limits(&["60"], Some(5)), network: Some(20_000), ..no_limits() };
    let mut world = world(6, settings, false, NONE);
    world.faults = bad;
    (0..MACHINES).for_each(|host| world.assign(host, "web/2"));
    for round in 0..10 {
        world.run_until((3 + round) * MINUTE);
        (0..20)
            .for_each(|host| world.crash((host * 37 + usize::try_from(round).unwrap()) % MACHINES));
        (500..520).for_each(|host| world.drift(host));
    }
    world.faults = NONE;
    world.run_until_converged(3 * 60 * MINUTE).expect("all get their turn");
    assert!(world.tally.is_empty());
    let ends: &BTreeMap<String, u32> = &world.tally.ends;
    assert!(ends["Good"] >= 1_000, "{ends:?}");
}
