//! Daemon tasks as operators see and order them through the dominator.

use std::fs;

use api::dominator::tasks::{ListTasksReply, OrderTasksReply, TaskOrderOutcome};
use api::subd::TaskState;
use localfleet::fleet::client_of;
use testing::eventually;

use crate::converges::Scenario;
use crate::orders::domtool;
use crate::tasks::{add_task, lines, make_tree, set_triggers};

const TRIGGERS: &str = r#"[
    {"MatchLines": ["/opt/job/.*", "/etc/dominator/tasks.d/job\\.json"],
     "Service": "job", "Kind": "task"},
    {"MatchLines": ["/etc/dominator/tasks.d/dies\\.json"], "Service": "dies", "Kind": "task"}]"#;

const DIES: &str = r#"{"name": "dies", "argv": ["/bin/sh", "-c", "echo bye; exit 3"],
    "restart": {"backoff_s": [3600, 3600]}}"#;

/// Returns the tasks that domtool lists: machine, task and state.
fn listed(scenario: &Scenario, words: &[&str]) -> Vec<(String, String, TaskState)> {
    let words: Vec<&str> =
        ["--format", "json", "task", "list"].iter().chain(words).copied().collect();
    let (code, out, talk) = domtool(scenario, &words);
    assert_eq!(code, 0, "{talk}");
    let reply: ListTasksReply = serde_json::from_str(&out).unwrap();
    let rows = reply.tasks.into_iter();
    rows.map(|task| (task.hostname, task.report.name, task.report.state)).collect()
}

fn until_states(scenario: &Scenario, words: &[&str], expected: &[TaskState]) {
    eventually("domtool lists the states", || {
        let rows = listed(scenario, words);
        let states: Vec<TaskState> = rows.iter().map(|(_, _, state)| *state).collect();
        if states == expected { Ok(()) } else { Err(format!("{rows:?}")) }
    });
}

/// Gives an order, and returns the exit code and what became of it on each machine.
fn order(scenario: &Scenario, words: &[&str]) -> (i32, Vec<TaskOrderOutcome>) {
    let words: Vec<&str> = ["--format", "json", "task"].iter().chain(words).copied().collect();
    let (code, out, talk) = domtool(scenario, &words);
    let reply = serde_json::from_str::<OrderTasksReply>(&out);
    let reply = reply.unwrap_or_else(|error| panic!("{error}: {out}{talk}"));
    (code, reply.tasks.into_iter().map(|one| one.outcome).collect())
}

fn page(scenario: &Scenario, path: &str) -> String {
    let dominator = client_of(scenario.fleet.addresses().dominator, scenario.fleet.security());
    let (status, page) = scenario.fleet.get(&dominator, path).unwrap();
    let page = String::from_utf8(page).unwrap();
    assert_eq!(status, 200, "{page}");
    page
}

#[test]
fn operators_see_the_tasks_of_all_machines_and_order_them() {
    use TaskOrderOutcome::{Refused, Taken, Wanted};
    use TaskState::{Held, Running, Suspended, Waiting};
    let mut scenario = Scenario::start_with_tasks(2);
    let tree = scenario.directory.path().join("1");
    make_tree(&tree);
    add_task(&tree, "1");
    fs::write(tree.join("etc/dominator/tasks.d/dies.json"), DIES).unwrap();
    set_triggers(&scenario, TRIGGERS);
    scenario.add("test/1", &tree);
    scenario.converge("test/1");
    let hosts: Vec<String> = scenario.fleet.subs.iter().map(|sub| sub.hostname.clone()).collect();
    let (first, second) = (hosts[0].as_str(), hosts[1].as_str());

    until_states(&scenario, &[], &[Waiting, Running, Waiting, Running]);
    until_states(&scenario, &["*", "job"], &[Running, Running]);
    until_states(&scenario, &[first, "--state", "waiting"], &[Waiting]);
    let text = page(&scenario, "/tasks");
    assert!(text.contains("<p>2 active, 2 waiting</p>"), "{text}");
    assert!(text.contains(">dies</td><td class=\"bad\">waiting</td>"), "{text}");
    let text = page(&scenario, &format!("/sub?host={first}"));
    assert!(text.contains(">job</a></td><td class=\"good\">running</td>"), "{text}");
    let text = page(&scenario, "/metrics");
    assert!(text.contains("dominator_tasks{state=\"running\"} 2"), "{text}");

    let (code, text, talk) = domtool(&scenario, &["task", "explain", first, "dies"]);
    assert_eq!(code, 0, "{talk}");
    assert!(text.contains("before, it exited with 3 at "), "{text}");
    assert!(text.contains("it is started again at "), "{text}");
    let (code, text, talk) = domtool(&scenario, &["task", "logs", first, "dies"]);
    assert_eq!((code, text.as_str()), (0, "bye\n"), "{talk}");

    // Orders pass while updates are disabled.
    domtool(&scenario, &["disable-updates", "storm"]);
    let hold = order(&scenario, &["hold", first, "job", "--why", "disk swap"]);
    assert_eq!(hold, (0, vec![Taken]));
    until_states(&scenario, &["*", "job"], &[Held, Running]);
    eventually("it has stopped", || lines(&scenario.fleet.subs[0], "ends") == ["there"]);
    let (_, text, _) = domtool(&scenario, &["task", "explain", first, "job"]);
    assert!(text.contains("is held: disk swap\n"), "{text}");
    assert!(text.contains(&format!("it runs again after: domtool task release {first} job")));
    let (code, refused) = order(&scenario, &["restart", first, "job"]);
    assert!(matches!(&refused[..], [Refused(why)] if why.contains("held")), "{refused:?}");
    assert_eq!(code, 3);
    assert_eq!(order(&scenario, &["release", "*", "job"]), (0, vec![Taken, Taken]));
    until_states(&scenario, &["*", "job"], &[Running, Running]);
    assert_eq!(order(&scenario, &["restart", first, "job"]), (0, vec![Taken]));
    eventually("a new run has started", || {
        lines(&scenario.fleet.subs[0], "starts") == ["1", "1", "1"]
    });
    until_states(&scenario, &["*", "job"], &[Running, Running]);

    // The newest order counts, wherever it was given.
    let address = scenario.fleet.subs[1].address;
    scenario.fleet.subtool(address, &["task", "hold", "job", "--why", "here"]).unwrap();
    until_states(&scenario, &["*", "job"], &[Running, Held]);
    assert_eq!(order(&scenario, &["release", second, "job"]), (0, vec![Taken]));
    until_states(&scenario, &["*", "job"], &[Running, Running]);

    // A machine that is away is told when it is back, also by a dominator that was killed.
    scenario.fleet.subs[1].daemon.kill().unwrap();
    let is_away = || {
        let (_, out, _) = domtool(&scenario, &["task", "show", second, "job"]);
        if out.contains("does not answer") { Ok(()) } else { Err(out) }
    };
    eventually("the machine is away", is_away);
    let words = ["suspend", "*", "job", "--why", "quiet"];
    assert_eq!(order(&scenario, &words), (3, vec![Taken, Wanted]));
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.subs[1].daemon.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    until_states(&scenario, &["*", "job"], &[Suspended, Suspended]);
    assert_eq!(order(&scenario, &["resume", "*", "*ob"]), (0, vec![Taken, Taken]));
    until_states(&scenario, &["*", "job"], &[Running, Running]);

    let (code, text, talk) = domtool(&scenario, &["task", "history", first, "job"]);
    assert_eq!(code, 0, "{talk}");
    let verbs = ["task-hold", "task-release", "task-restart", "task-suspend", "task-resume"];
    assert!(verbs.iter().all(|verb| text.contains(verb)), "{text}");
    let (code, _, talk) = domtool(&scenario, &["task", "show", first, "other"]);
    assert!(code == 1 && talk.contains("called other"), "{talk}");
    for sub in &scenario.fleet.subs {
        assert_eq!(lines(sub, "overlaps"), Vec::<String>::new());
    }
    scenario.fleet.stop().unwrap();
}
