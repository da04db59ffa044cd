//! Daemon tasks from image to process: nothing but a required image, on several machines.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::subd::{GetTasks, TaskReport, TaskState};
use localfleet::fleet::Sub;
use localfleet::source_trees::copy_programs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use subd::tasks::processes::descendants;
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario};

pub const TRIGGERS: &str = r#"[{"MatchLines": ["/opt/job/.*", "/etc/dominator/tasks.d/job\\.json"],
    "Service": "job", "Kind": "task"}]"#;

const TASK: &str = r#"{"name": "job", "argv": ["/opt/job/run"], "stop_timeout_s": 10}"#;

/// Locks a file, and records if it is locked already; and whether it is told to end before its own
/// file goes.
const RUN: &str = "#!/bin/sh\n# VERSION\n\
    exec 9>>/var/log/lock; flock -n 9 || echo two >> /var/log/overlaps\n\
    trap 'test -e /opt/job/run && echo there >> /var/log/ends; exit 0' TERM\n\
    echo VERSION >> /var/log/starts\nsleep 1000 & wait\n";

/// Makes a tree in which scripts run.
pub fn make_tree(tree: &Path) {
    copy_programs(["/bin/sh", "/usr/bin/sleep", "/usr/bin/flock"], tree).unwrap();
    for directory in ["dev", "etc", "proc", "var/log", "srv/data"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
    }
}

pub fn add_task(tree: &Path, version: &str) {
    fs::create_dir_all(tree.join("opt/job")).unwrap();
    fs::create_dir_all(tree.join("etc/dominator/tasks.d")).unwrap();
    fs::write(tree.join("etc/dominator/tasks.d/job.json"), TASK).unwrap();
    let run = tree.join("opt/job/run");
    fs::write(&run, RUN.replace("VERSION", version)).unwrap();
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755)).unwrap();
}

pub fn lines(sub: &Sub, name: &str) -> Vec<String> {
    let text = fs::read_to_string(sub.root.join("var/log").join(name)).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Waits until the task of each machine has been started as these versions, one after the other.
fn started(scenario: &Scenario, versions: &[&str]) {
    for sub in &scenario.fleet.subs {
        eventually("the task starts", || match lines(sub, "starts") {
            starts if starts == versions => Ok(()),
            starts => Err(starts),
        });
    }
}

pub fn report(scenario: &Scenario, index: usize) -> Option<TaskReport> {
    let reply = scenario.fleet.ask_sub::<GetTasks>(index, &()).ok()?;
    reply.tasks.into_iter().next()
}

fn until_running(scenario: &Scenario, starts: u32) {
    for index in 0..scenario.fleet.subs.len() {
        eventually("the task runs", || match report(scenario, index) {
            Some(report) if report.state == TaskState::Running && report.starts == starts => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }
}

/// Kills the program of the task, by its number on this machine.
pub fn kill_program(sub: &Sub) {
    let record = fs::read(sub.root.join(".subd/tasks/job/guard.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let guard = i32::try_from(record["pid"].as_i64().unwrap()).unwrap();
    let is_program = |pid: i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("/opt/job/run")
    };
    let found = descendants(guard).unwrap().into_iter().find(|process| is_program(process.pid));
    kill(Pid::from_raw(found.unwrap().pid), Signal::SIGKILL).unwrap();
}

pub fn set_triggers(scenario: &Scenario, triggers: &str) {
    fs::write(scenario.directory.path().join("triggers"), triggers).unwrap();
}

#[test]
fn each_machine_runs_one_task_through_kills_updates_and_its_end() {
    let mut scenario = Scenario::start_with_tasks(2);
    let trees: Vec<PathBuf> = ["1", "2", "3"]
        .map(|name| {
            let tree = scenario.directory.path().join(name);
            make_tree(&tree);
            tree
        })
        .into();
    add_task(&trees[0], "1");
    add_task(&trees[1], "2");
    set_triggers(&scenario, TRIGGERS);
    scenario.add("test/1", &trees[0]);
    scenario.add("test/2", &trees[1]);
    set_triggers(&scenario, "[]");
    scenario.add("test/3", &trees[2]);

    scenario.converge("test/1");
    started(&scenario, &["1"]);
    until_running(&scenario, 1);
    let listed = scenario.fleet.subtool(scenario.fleet.subs[0].address, &["task", "list"]).unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.contains("job   running       1"), "{listed}");

    // A subd that is killed finds the task again.
    scenario.fleet.subs.iter_mut().for_each(|sub| sub.daemon.kill().unwrap());
    scenario.fleet.subs.iter_mut().for_each(|sub| sub.daemon.start_again().unwrap());
    scenario.fleet.wait_ready().unwrap();
    until_running(&scenario, 1);
    started(&scenario, &["1"]);

    scenario.fleet.subs.iter().for_each(kill_program);
    started(&scenario, &["1", "1"]);

    // What somebody drops or edits there starts nothing, and goes.
    let dropped = scenario.fleet.subs[0].root.join("etc/dominator/tasks.d/other.json");
    fs::write(&dropped, TASK.replace("job", "other")).unwrap();
    let edited = scenario.fleet.subs[1].root.join("etc/dominator/tasks.d/job.json");
    fs::write(&edited, TASK.replace("/opt/job/run", "/bin/sh")).unwrap();
    eventually("the drift is repaired", || {
        !dropped.exists() && fs::read_to_string(&edited).unwrap() == TASK
    });
    scenario.fleet.wait_synced("test/1", CONVERGE_MAX, |_| {}).unwrap();
    until_running(&scenario, 2);
    started(&scenario, &["1", "1"]);

    scenario.converge("test/2");
    started(&scenario, &["1", "1", "2"]);
    until_running(&scenario, 1);
    scenario.verify(&trees[1]);

    scenario.converge("test/3");
    scenario.verify(&trees[2]);
    for (index, sub) in scenario.fleet.subs.iter().enumerate() {
        eventually("the task is forgotten", || !sub.root.join(".subd/tasks/job").exists());
        assert_eq!(lines(sub, "ends"), ["there", "there"]);
        assert_eq!(lines(sub, "overlaps"), Vec::<String>::new());
        assert_eq!(report(&scenario, index), None);
    }
    scenario.fleet.stop().unwrap();
}

/// How long after the update has a journal subd is killed, in milliseconds.
const DELAYS: [u64; 10] = [0, 2, 5, 10, 20, 40, 80, 160, 320, 640];

#[test]
fn a_machine_whose_subd_is_killed_in_an_update_runs_one_task_of_the_new_version() {
    let mut scenario = Scenario::start_with_tasks(1);
    let trees = ["1", "2"].map(|version| {
        let tree = scenario.directory.path().join(version);
        make_tree(&tree);
        add_task(&tree, version);
        tree
    });
    set_triggers(&scenario, TRIGGERS);
    scenario.add("test/1", &trees[0]);
    scenario.add("test/2", &trees[1]);
    scenario.converge("test/1");
    until_running(&scenario, 1);
    let mut inside = Vec::new();
    for (index, delay) in DELAYS.into_iter().enumerate() {
        let version = 2 - index % 2;
        scenario.fleet.require(Some(&format!("test/{version}"))).unwrap();
        let sub = &mut scenario.fleet.subs[0];
        let journal = sub.root.join(".subd/journal");
        let has_journal = || fs::read_dir(&journal).unwrap().next().is_some();
        eventually("the update has a journal", || has_journal().then_some(()).ok_or("not yet"));
        std::thread::sleep(Duration::from_millis(delay));
        sub.daemon.kill().unwrap();
        inside.push(has_journal());
        sub.daemon.start_again().unwrap();
        scenario.fleet.wait_synced(&format!("test/{version}"), CONVERGE_MAX, |_| {}).unwrap();
        let sub = &scenario.fleet.subs[0];
        eventually("the new version runs", || {
            let (report, starts) = (report(&scenario, 0), lines(sub, "starts"));
            let is_running = report.as_ref().is_some_and(|job| job.state == TaskState::Running);
            let is_new = starts.last().is_some_and(|last| *last == version.to_string());
            if is_running && is_new { Ok(()) } else { Err(format!("{report:?} {starts:?}")) }
        });
        assert_eq!(lines(sub, "overlaps"), Vec::<String>::new(), "after {delay} ms");
    }
    println!("killed while there was a journal: {inside:?}");
    assert!(inside.contains(&true));
    scenario.fleet.stop().unwrap();
}

#[test]
fn an_image_whose_tasks_cannot_run_is_refused() {
    let mut scenario = Scenario::start_insecure(0);
    let tree = scenario.directory.path().join("tree");
    let file = tree.join("etc/dominator/tasks.d/job.json");
    let (filter, triggers) =
        (scenario.directory.path().join("filter"), scenario.directory.path().join("triggers"));
    let no_json = "{\"name\": \"job\",\n \"argv\": [\"/opt/job/run\"],\n \"argw\": []}";
    let table = [
        (
            Some(TASK),
            "[]",
            "/etc/dominator/tasks.d/job.json has no trigger: one of kind task with \
                            the Service `job` would run it",
        ),
        (
            None,
            TRIGGERS,
            "trigger 1 is of kind task, and the image has no \
                          /etc/dominator/tasks.d/job.json",
        ),
        (
            Some(no_json),
            TRIGGERS,
            "the daemon tasks of the image cannot run: \
            /etc/dominator/tasks.d/job.json: argw: the key `argw` is unknown; is `argv` meant? at \
            line 3 column 7",
        ),
    ];
    for (text, rules, why) in table {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        match text {
            Some(text) => fs::write(&file, text).unwrap(),
            None => fs::remove_file(&file).unwrap(),
        }
        fs::write(&triggers, rules).unwrap();
        let words = [
            "add".as_ref(),
            "test/1".as_ref(),
            tree.as_os_str(),
            filter.as_os_str(),
            triggers.as_os_str(),
            "--required-paths=".as_ref(),
        ];
        let output = scenario.fleet.imagetool(&words).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(why), "{said}");
    }
    scenario.fleet.stop().unwrap();
}
