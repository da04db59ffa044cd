//! Machines that leave the machine database, and come back.

use std::time::Duration;

use api::dominator::departing::{DepartingMachine, DepartingState};
use api::subd::{GetTasks, TaskState};
use model::mdb::Machine;
use testing::eventually;

use crate::converges::Scenario;
use crate::orders::domtool;
use crate::tasks::{TRIGGERS, add_task, lines, make_tree, set_triggers};

const AFTER: Duration = Duration::from_secs(5);

/// Returns the machines that have left, with what becomes of their tasks.
fn departing(scenario: &Scenario) -> Vec<(String, DepartingState)> {
    let (code, out, talk) = domtool(scenario, &["--format", "json", "departing", "list"]);
    assert_eq!(code, 0, "{talk}");
    let machines: Vec<DepartingMachine> = serde_json::from_str(&out).unwrap();
    machines.into_iter().map(|machine| (machine.hostname, machine.state)).collect()
}

fn until_departing(scenario: &Scenario, expected: &[(&str, DepartingState)]) {
    eventually("domtool lists what has left", || {
        let listed = departing(scenario);
        let shown: Vec<_> = listed.iter().map(|(host, state)| (host.as_str(), *state)).collect();
        if shown == expected { Ok(()) } else { Err(listed) }
    });
}

/// Waits until the task of a machine has this state, and has been started so often.
fn until_task(scenario: &Scenario, index: usize, state: TaskState, starts: usize) {
    eventually("the task has the state", || {
        let reply = scenario.fleet.ask_sub::<GetTasks>(index, &());
        let known = reply.ok().and_then(|reply| reply.tasks.into_iter().next());
        let started = lines(&scenario.fleet.subs[index], "starts").len();
        match known {
            Some(report) if report.state == state && started == starts => Ok(()),
            other => Err(format!("{other:?} {started}")),
        }
    });
}

fn order(scenario: &Scenario, words: &[&str]) {
    let words: Vec<&str> = ["departing"].iter().chain(words).copied().collect();
    let (code, _, talk) = domtool(scenario, &words);
    assert_eq!(code, 0, "{talk}");
}

#[test]
fn a_machine_that_has_left_stops_its_tasks_and_starts_them_when_it_is_back() {
    use DepartingState::{Elsewhere, Left, Stopped, Undecided, Waiting};
    let seconds = format!("{}s", AFTER.as_secs());
    let mut scenario = Scenario::start_with_tasks_and(2, &[("--departing-after", &seconds)]);
    let tree = scenario.directory.path().join("1");
    make_tree(&tree);
    add_task(&tree, "1");
    set_triggers(&scenario, TRIGGERS);
    scenario.add("test/1", &tree);
    scenario.converge("test/1");
    let record = |sub: &localfleet::fleet::Sub| Machine {
        required_image: "test/1".to_owned(),
        ..sub.record()
    };
    let all: Vec<Machine> = scenario.fleet.subs.iter().map(record).collect();
    let (first, second) = (all[0].hostname.as_str(), all[1].hostname.as_str());
    until_task(&scenario, 0, TaskState::Running, 1);
    until_task(&scenario, 1, TaskState::Running, 1);

    scenario.fleet.replace_mdb(&all[1..]).unwrap();
    until_departing(&scenario, &[(first, Waiting)]);
    // A dominator that is killed knows it again.
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    until_departing(&scenario, &[(first, Stopped)]);
    until_task(&scenario, 0, TaskState::Suspended, 1);
    assert_eq!(lines(&scenario.fleet.subs[0], "ends"), ["there"]);
    until_task(&scenario, 1, TaskState::Running, 1);

    scenario.fleet.replace_mdb(&all).unwrap();
    until_task(&scenario, 0, TaskState::Running, 2);
    until_departing(&scenario, &[]);

    // An operator leaves it as it is, and changes the mind.
    scenario.fleet.replace_mdb(&all[1..]).unwrap();
    until_departing(&scenario, &[(first, Waiting)]);
    order(&scenario, &["leave", first, "--why", "it is moved"]);
    std::thread::sleep(AFTER * 2);
    assert_eq!(departing(&scenario), [(first.to_owned(), Left)]);
    until_task(&scenario, 0, TaskState::Running, 2);
    order(&scenario, &["stop", "*", "--why", "it is given back"]);
    until_departing(&scenario, &[(first, Stopped)]);
    until_task(&scenario, 0, TaskState::Suspended, 2);
    let (code, _, talk) = domtool(&scenario, &["departing", "stop", "other", "--why", "no"]);
    assert!(code == 1 && talk.contains("is called other"), "{talk}");

    // One that has another name now is left alone.
    let renamed = Machine { hostname: "renamed".to_owned(), ..all[1].clone() };
    scenario.fleet.replace_mdb(&[all[0].clone(), renamed]).unwrap();
    until_departing(&scenario, &[(second, Elsewhere)]);
    until_task(&scenario, 0, TaskState::Running, 3);

    // Too many at once wait for an operator.
    let away = |number| Machine {
        hostname: format!("away-{number}"),
        subd_port: Some(1),
        ..all[0].clone()
    };
    let many: Vec<Machine> = all.iter().cloned().chain((1..=4).map(away)).collect();
    scenario.fleet.replace_mdb(&many).unwrap();
    until_departing(&scenario, &[("renamed", Elsewhere)]);
    order(&scenario, &["forget", "renamed", "--why", "it has its name again"]);
    until_task(&scenario, 1, TaskState::Running, 1);
    scenario.fleet.replace_mdb(&all).unwrap();
    let names = ["away-1", "away-2", "away-3", "away-4"];
    until_departing(&scenario, &names.map(|name| (name, Undecided)));
    order(&scenario, &["forget", "away-[1-3]", "--why", "they never were"]);
    std::thread::sleep(AFTER + Duration::from_secs(3));
    assert_eq!(departing(&scenario), [("away-4".to_owned(), Undecided)]);
    until_task(&scenario, 0, TaskState::Running, 3);
    until_task(&scenario, 1, TaskState::Running, 1);
    scenario.fleet.stop().unwrap();
}
