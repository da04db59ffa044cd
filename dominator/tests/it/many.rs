//! A large fleet in one process, without sockets: a thousand machines, or as many as
//! `DOMINATOR_SUBS` says.

use std::time::{Duration, Instant};

use crate::simulation::world_of;
use crate::world::NONE;

/// How many machines there are if nobody says so.
const MACHINES: usize = 1_000;

/// When all must be as they should be, on the clock of the simulation.
const CONVERGED: Duration = Duration::from_secs(60);

/// The most memory that this process has had, in bytes.
fn most_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() << 10
}

#[test]
fn a_large_fleet_converges_and_is_updated() {
    let machines = std::env::var("DOMINATOR_SUBS")
        .map_or(MACHINES, |text| text.parse().expect("DOMINATOR_SUBS is a number"));
    let (before, started) = (most_memory(), Instant::now());
    let mut world = world_of(machines, 1, NONE);
    world.is_traced = false;
    let mut now = Duration::ZERO;
    let mut until_converged = |world: &mut crate::world::World| {
        let (start, mut first) = (now, 0);
        // Nothing goes wrong, so a machine that is as it should be stays so.
        while first < machines {
            now += Duration::from_secs(1);
            world.run_until(now);
            while first < machines && world.is_host_converged(first) {
                first += 1;
            }
            assert!(now - start < CONVERGED, "{}", world.describe(first));
        }
        now - start
    };
    let converged = until_converged(&mut world);
    println!("{machines} machines converged after {converged:?}, {:?} so far", started.elapsed());
    (0..machines).for_each(|host| {
        let image = if host % 2 == 0 { "base/one" } else { "base/two" };
        world.assign(host, image);
    });
    let updated = until_converged(&mut world);
    let memory = most_memory().saturating_sub(before);
    println!(
        "and were updated within {updated:?}; it took {:?}, and {} bytes for each machine",
        started.elapsed(),
        memory / machines as u64
    );
}
