//! Fleets on which everything breaks that can: they do nothing wrong meanwhile, and are as they
//! must be after a repair. What must hold all the time is asserted by the world itself.

use std::time::{Duration, Instant};

use api::dominator::Status;
use dominator::core::claims::ClaimSettings;
use dominator::core::image_breaker::FailureLimits;

use crate::model::Server;
use crate::simulation::world_of;
use crate::world::{Faults, NONE, World, no_limits};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

fn hosts(world: &World) -> std::ops::Range<usize> {
    0..world.models.len()
}

fn converge(world: &mut World, until: Duration) -> Duration {
    let converged = world.run_until_converged(until);
    let behind: Vec<String> = hosts(world)
        .filter(|&host| !world.is_host_converged(host))
        .take(10)
        .map(|host| world.describe(host))
        .collect();
    converged.unwrap_or_else(|| panic!("at {until:?}: {behind:#?}"))
}

/// A bad time of `long`, then peace.
fn bad_run(seed: u64, machines: usize, long: Duration, faults: Faults) -> World {
    let mut world = world_of(machines, seed, NONE);
    world.is_traced = machines < 100;
    // Machines are known before anything goes wrong.
    let known = converge(&mut world, 3 * MINUTE);
    world.begin(faults);
    world.run_until(known + long);
    world.faults = NONE;
    world.heal();
    // Polls that were lost are given up, and what has happened is known.
    world.run_until(known + long + 3 * MINUTE);
    hosts(&world).for_each(|host| world.retry(host));
    let converged = converge(&mut world, known + long + 30 * MINUTE);
    world.must_be_quiet(converged);
    world
}

const BAD: Faults = Faults { lose: 3, repeat: 5, delay_max: 2_000, trouble_every: 1_500 };

#[test]
fn small_fleets_survive_everything_at_once() {
    let started = Instant::now();
    let mut traces = String::new();
    for seed in 1..=60 {
        let world = bad_run(seed, 12, 12 * MINUTE, BAD);
        traces.push_str(&world.trace);
    }
    // The bad times had some of everything.
    for words in [
        "is wrong-machine: ",
        "is fetch-failed: no source gave all objects: images:6971 gives other bytes",
        "is fetch-failed: no source gave all objects: images:6971 does not answer",
        "is poll-failed: ",
        "is image-not-ready: ",
        "is installed anew",
        "the image server is Slow",
        "hangs, or not any more",
        "the dominator crashes",
        "DisableUpdates",
        "the disk is full: true",
        "gets no commit: no space left on device",
        "gets no commit: something else is wanted now",
    ] {
        assert!(traces.contains(words), "there was no `{words}`");
    }
    println!("{:?}", started.elapsed());
}

#[test]
fn a_thousand_machines_survive_everything_at_once() {
    let started = Instant::now();
    bad_run(1, 1_000, 5 * MINUTE, Faults { trouble_every: 40, ..BAD });
    println!("{:?}", started.elapsed());
}

#[test]
fn a_thousand_machines_wait_an_hour_for_their_image_server() {
    let mut world = world_of(1_000, 2, NONE);
    world.is_traced = false;
    let mut now = converge(&mut world, 3 * MINUTE);
    let image = |number: usize| ["base/one", "base/two"][number % 2];
    for (round, server) in [Server::Away, Server::Lying, Server::Slow].into_iter().enumerate() {
        world.set_server(server);
        hosts(&world).for_each(|host| world.assign(host, image(round + host)));
        world.effects.clear();
        if server == Server::Away {
            world.run_until(now + 10 * MINUTE);
            // What it knows of the images goes with the dominator.
            world.restart_dominator();
            world.run_until(now + 11 * MINUTE);
            assert!(hosts(&world).all(|host| world.status(host) == Some(Status::ImageNotReady)));
            world.load_images();
        }
        world.run_until(now + HOUR);
        // Machines that have all objects need no server.
        let behind: Vec<usize> =
            hosts(&world).filter(|&host| !world.is_host_converged(host)).collect();
        match server {
            Server::Slow => assert!(behind.is_empty(), "{behind:?}"),
            Server::Away | Server::Lying | Server::Good => {
                assert!(behind.len() > 300, "{} are behind", behind.len());
                let mut named = 0;
                for &host in &behind {
                    // Some are at it just now.
                    let (status, detail) = (world.status(host).unwrap(), world.detail(host));
                    assert!(
                        matches!(status, Status::FetchFailed | Status::Fetching),
                        "{status}: {detail}"
                    );
                    named += usize::from(detail.contains("images:6971 "));
                }
                assert!(named * 10 > behind.len() * 9, "{named} of {} say why", behind.len());
            }
        }
        // It is asked again and again, but not all the time.
        let fetches = world.effects["fetch"];
        assert!(fetches < 15 * 1_000, "{fetches} fetches in an hour");
        world.set_server(Server::Good);
        now = converge(&mut world, now + HOUR + 13 * MINUTE);
    }
    world.must_be_quiet(now);
}

#[test]
fn a_thousand_machines_that_come_back_at_the_same_moment_are_taken_in_evenly() {
    let mut world = world_of(1_000, 3, NONE);
    world.is_traced = false;
    let mut now = converge(&mut world, 3 * MINUTE);
    for outage in [30, 200, 1_800] {
        world.cut_off(true);
        world.run_until(now + Duration::from_secs(outage));
        assert!(hosts(&world).all(|host| world.status(host) == Some(Status::Unreachable)));
        // All are behind by now.
        let image = if outage == 200 { "base/one" } else { "base/two" };
        hosts(&world).for_each(|host| world.assign(host, image));
        let back = now + Duration::from_secs(outage);
        world.cut_off(false);
        // 200 are dialled in a second.
        world.run_until(back + Duration::from_millis(5_100));
        let away = hosts(&world).filter(|&host| world.status(host) == Some(Status::Unreachable));
        assert_eq!(away.count(), 0);
        now = converge(&mut world, back + 2 * MINUTE);
        let (polls, calls) = world.most_at_once(back);
        println!("after {outage} s: {polls} polls and {calls} calls in a second, {:?}", now - back);
        // 200 of them are dialled in a second; each has some nine polls and six calls to do.
        let is_burst = polls > 200 * 12 || calls > 200 * 8;
        assert!(!is_burst, "{polls} polls and {calls} calls in one second");
    }
    world.must_be_quiet(now);
}

#[test]
fn a_full_disk_of_the_dominator_is_the_fault_of_no_machine_and_no_image() {
    let mut world = world_of(300, 5, NONE);
    let failures = FailureLimits { percent: 10, blocked_percent: 10, failures_min: 3 };
    world.limit(ClaimSettings { failures, ..no_limits() });
    let now = converge(&mut world, 3 * MINUTE);
    world.tally.clear();
    world.fill_disk(true);
    for host in hosts(&world) {
        let image = if world.required(host) == "base/one" { "base/two" } else { "base/one" };
        world.assign(host, image);
    }
    // What is staged expires meanwhile, and machines would count as vanished.
    world.run_until(now + HOUR);
    for host in hosts(&world) {
        assert_eq!(world.status(host), Some(Status::UpdatesDisabled), "{}", world.describe(host));
        let why = "the update cannot be recorded, and is not ordered before it is: no space left";
        assert!(world.detail(host).contains(why), "{}", world.describe(host));
    }
    let refused = world.disk.refused;
    assert!((1..300).contains(&refused), "asked in vain {refused} times");
    world.fill_disk(false);
    let converged = converge(&mut world, now + HOUR + 3 * MINUTE);
    assert_eq!(world.disk.refused, refused);
    assert_eq!(world.claims.stopped(), []);
    let ends: Vec<&str> = world.tally.ends.keys().map(String::as_str).collect();
    assert_eq!(ends, ["Good", "Withdrawn"]);
    assert!(!world.trace.contains("is update-failed"), "it was no machine's fault");
    world.must_be_quiet(converged);
}

#[test]
fn the_time_of_day_decides_nothing() {
    let run = |wall: fn(i64) -> i64| {
        let mut world = world_of(20, 4, Faults { trouble_every: 2_000, ..BAD });
        world.troubles().wall = wall;
        world.troubles().is_timeless = true;
        world.run_until(10 * MINUTE);
        world.trace
    };
    let trace = run(|seconds| seconds);
    // A day forwards, two years backwards, and something else every second.
    for wall in [
        |seconds| if seconds > 200 { seconds + 86_400 } else { seconds },
        |seconds| if seconds > 300 { seconds - 63_072_000 } else { seconds },
        |seconds| seconds * 7_919 % 100_000 - 50_000,
    ] {
        assert!(run(wall) == trace, "a clock that jumps has changed the story");
    }
}
