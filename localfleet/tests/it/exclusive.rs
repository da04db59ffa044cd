//! An exclusive task of three machines: one runs it, whatever is killed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use api::dominator::permits::{ListPermits, PermitHolder};
use api::subd::GetTasks;
use localfleet::fleet::{Sub, client_of};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use subd::tasks::processes::descendants;
use testing::eventually;

use crate::converges::Scenario;
use crate::tasks::{TRIGGERS, make_tree, set_triggers};

const PERMIT_TIME: Duration = Duration::from_secs(25);

const TASK: &str = r#"{"name": "job", "argv": ["/opt/job/run"], "exclusive": true,
    "stop_timeout_s": 1}"#;

/// Locks a file that all machines have, and records if it is locked already; and where it runs.
const RUN: &str = "#!/bin/sh\n\
    exec 9>>/var/log/lock; flock -n 9 || echo two >> /var/log/overlaps\n\
    read name < /var/log/own; echo $name >> /var/log/starts\nsleep 1000 & wait\n";

/// What all machines have as one file.
const SHARED: [&str; 3] = ["lock", "overlaps", "starts"];

fn add_task(tree: &Path) {
    fs::create_dir_all(tree.join("opt/job")).unwrap();
    fs::create_dir_all(tree.join("etc/dominator/tasks.d")).unwrap();
    fs::write(tree.join("etc/dominator/tasks.d/job.json"), TASK).unwrap();
    let run = tree.join("opt/job/run");
    fs::write(&run, RUN).unwrap();
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755)).unwrap();
}

fn share_files(scenario: &Scenario) {
    for name in SHARED {
        let shared = scenario.directory.path().join(name);
        fs::write(&shared, "").unwrap();
        for sub in &scenario.fleet.subs {
            fs::hard_link(&shared, sub.root.join("var/log").join(name)).unwrap();
        }
    }
}

fn lines(scenario: &Scenario, name: &str) -> Vec<String> {
    let text = fs::read_to_string(scenario.directory.path().join(name)).unwrap();
    text.lines().map(|line| line.trim_end_matches('\0').to_owned()).collect()
}

/// Waits until the task has been started `count` times. Returns where the last time, and after how
/// long.
fn started(scenario: &Scenario, count: usize) -> (usize, Duration) {
    let begun = Instant::now();
    let name = eventually("the task starts", || match lines(scenario, "starts") {
        starts if starts.len() == count => Ok(starts[count - 1].clone()),
        starts => Err(starts),
    });
    assert_eq!(lines(scenario, "overlaps"), Vec::<String>::new());
    let index = scenario.fleet.subs.iter().position(|sub| sub.hostname == name);
    (index.unwrap(), begun.elapsed())
}

fn holders(scenario: &Scenario) -> Vec<PermitHolder> {
    let fleet = &scenario.fleet;
    let client = client_of(fleet.addresses().dominator, fleet.security());
    let reply = fleet.call::<ListPermits>(&client, &()).unwrap();
    reply.tasks.into_iter().flat_map(|task| task.holders).collect()
}

fn runs_on(scenario: &Scenario, index: usize) {
    let hostname = &scenario.fleet.subs[index].hostname;
    eventually("the dominator knows who runs the task", || match &holders(scenario)[..] {
        [holder] if holder.is_live && holder.hostname == *hostname => Ok(()),
        others => Err(format!("{others:?}")),
    });
}

/// Kills all that runs on a machine, as if its power was out.
fn turn_off(sub: &mut Sub) {
    sub.daemon.kill().unwrap();
    let record = fs::read(sub.root.join(".subd/tasks/job/guard.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let guard = i32::try_from(record["pid"].as_i64().unwrap()).unwrap();
    let mut pids: Vec<i32> = descendants(guard).unwrap().iter().map(|one| one.pid).collect();
    pids.push(guard);
    for pid in pids {
        // One may have ended by itself, or because of the one before.
        let killed = kill(Pid::from_raw(pid), Signal::SIGKILL);
        assert!(matches!(killed, Ok(()) | Err(Errno::ESRCH)), "{killed:?}");
    }
}

fn domtool(scenario: &Scenario, words: &[&str]) {
    let output = scenario.fleet.domtool(words).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn one_machine_of_three_runs_an_exclusive_task() {
    let seconds = format!("{}s", PERMIT_TIME.as_secs());
    let mut scenario = Scenario::start_with_tasks_and(3, &[("--permit-time", &seconds)]);
    let tree = scenario.directory.path().join("1");
    make_tree(&tree);
    add_task(&tree);
    set_triggers(&scenario, TRIGGERS);
    scenario.add("test/1", &tree);
    share_files(&scenario);
    scenario.converge("test/1");
    let reply = scenario.fleet.ask_sub::<GetTasks>(0, &()).unwrap();
    if let [task] = &reply.tasks[..]
        && task.permit.is_none()
    {
        println!("not tested: {}", task.detail);
        return scenario.fleet.stop().unwrap();
    }
    let (first, _) = started(&scenario, 1);
    runs_on(&scenario, first);

    // Another start of the dominator leaves it there, also when what was given before has ended.
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    std::thread::sleep(PERMIT_TIME + PERMIT_TIME / 5);
    runs_on(&scenario, first);
    assert_eq!(started(&scenario, 1).0, first);

    // Without its subd the task ends in time, and another machine runs it.
    scenario.fleet.subs[first].daemon.kill().unwrap();
    let (second, after) = started(&scenario, 2);
    assert_ne!(second, first);
    println!("after {after:?} without subd another machine runs it");
    scenario.fleet.subs[first].daemon.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    runs_on(&scenario, second);

    // If it is known to be off, at once.
    turn_off(&mut scenario.fleet.subs[second]);
    let hostname = scenario.fleet.subs[second].hostname.clone();
    domtool(&scenario, &["fence", &hostname, "--why", "its power is out"]);
    let (third, after) = started(&scenario, 3);
    assert_ne!(third, second);
    assert!(after < PERMIT_TIME / 2, "it took {after:?}");
    println!("after {after:?} another machine runs what a fenced one did");
    // The kernel was not started again, so what the machine had lasts a while.
    std::thread::sleep(PERMIT_TIME);
    scenario.fleet.subs[second].daemon.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    domtool(&scenario, &["unfence", &hostname, "--why", "it has power"]);
    std::thread::sleep(PERMIT_TIME);
    runs_on(&scenario, third);
    assert_eq!(started(&scenario, 3).0, third);
    scenario.fleet.stop().unwrap();
}
