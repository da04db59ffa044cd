//! Tasks as units of a real systemd, from an update to the end of the task.

use std::fs;
use std::path::Path;

use api::subd::{
    GetTaskLog, GetTaskLogRequest, GetTasks, GetTasksReply, OrderTask, OrderTaskRequest, TaskOrder,
    TaskReport, TaskState, UpdateOutcome,
};
use testing::{eventually, eventually_async};

use crate::debian::{Booted, Scenario, configuration, free_address, install, tree};
use crate::systemd::{boot, install_units};

const TRIGGERS: &str = r#"[{"MatchLines": ["/opt/job/.*", "/etc/dominator/tasks.d/job.json"],
    "Service": "job", "Kind": "task"}]"#;

const TASK: &str = r#"{"name": "job", "argv": ["/bin/sh", "/opt/job/run"], "user": "nobody",
    "limits": {"memory_mib": 64, "cpu_percent": 50, "processes": 20}}"#;

/// Locks a file, and records if it is locked already; and whether its file is there at the end.
const RUN: &str = "exec 9>>/var/log/job/lock; flock -n 9 || echo two >> /var/log/job/overlaps\n\
    trap 'test -e /opt/job/run && echo there >> /var/log/job/ends; exit 0' TERM\n\
    echo said VERSION; echo $$ >> /var/log/job/starts\n\
    sleep 1000 & wait\n";

const UNIT: &str = "subd-task-job.service";

fn lines(root: &Path, name: &str) -> Vec<String> {
    let text = fs::read_to_string(root.join("var/log/job").join(name)).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Waits until the task runs, which its run has started so often, and has come so far that it says
/// so; `total` is how often it has said so by then.
async fn running(scenario: &Scenario, starts: u32, total: usize) {
    let has_said = || lines(&scenario.sub.root, "starts").len() == total;
    eventually_async("the task runs", async || {
        let reply = scenario.sub.client.call::<GetTasks>(&()).await;
        let GetTasksReply { supervisor, tasks, .. } = reply.unwrap_or_default();
        match tasks.into_iter().next() {
            Some(TaskReport { state: TaskState::Running, starts: count, .. })
                if count == starts && has_said() =>
            {
                assert_eq!(supervisor.as_deref(), Some("systemd"));
                Ok(())
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

/// What systemd says of the unit.
fn property(machine: &Booted, name: &str) -> String {
    property_of(machine, UNIT, name)
}

fn property_of(machine: &Booted, unit: &str, name: &str) -> String {
    let shown = machine.run(&["systemctl", "show", "--value", "--property", name, unit]);
    shown.trim().to_owned()
}

/// Kills a process by the number that it has in the machine.
fn kill_inside(machine: &Booted, pid: &str) {
    machine.run(&["sh", "-c", &format!("kill -KILL {pid}")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn systemd_runs_tasks_as_units_and_subd_finds_them_again() {
    let Some(tree) = tree("systemd") else { return };
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("machine");
    let address = free_address("127.0.0.6");
    install(&tree, &root, &address);
    install_units(&root);
    fs::write(root.join("etc/subd/config.toml"), configuration(&address)).unwrap();
    fs::create_dir_all(root.join("var/log/job")).unwrap();
    std::os::unix::fs::chown(root.join("var/log/job"), Some(65_534), None).unwrap();
    let machine = boot(&root);
    let mut scenario = Scenario::start(&root, &address).await;

    let version = |version: &str| RUN.replace("VERSION", version);
    let first = version("1");
    let last = scenario
        .update(
            |edit| {
                edit.directory("/opt/job", 0o755)
                    .file("/opt/job/run", &first)
                    .directory("/etc/dominator", 0o755)
                    .directory("/etc/dominator/tasks.d", 0o755)
                    .file("/etc/dominator/tasks.d/job.json", TASK)
            },
            TRIGGERS,
            None,
        )
        .await;
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Done, vec![]));
    running(&scenario, 1, 1).await;
    assert_eq!(property(&machine, "MemoryMax"), (64 << 20).to_string());
    assert_eq!(property(&machine, "TasksMax"), "21");
    assert_eq!(property(&machine, "CPUQuotaPerSecUSec"), "500ms");

    // The unit outlives its subd.
    kill_inside(&machine, &property_of(&machine, "subd.service", "MainPID"));
    scenario.answers().await;
    machine.run(&["systemctl", "restart", "subd.service"]);
    running(&scenario, 1, 1).await;

    // So do restarts by subd when the program, or what watches it, is killed.
    kill_inside(&machine, lines(&root, "starts").last().unwrap());
    running(&scenario, 2, 2).await;
    let guard = property(&machine, "MainPID");
    kill_inside(&machine, &guard);
    running(&scenario, 3, 3).await;

    // An order holds over a stop of the unit by hand.
    let order = |order, why: &str| {
        let (task, why) = ("job".to_owned(), why.to_owned());
        OrderTaskRequest { task, order, why, number: 0 }
    };
    let client = &scenario.sub.client;
    client.call::<OrderTask>(&order(TaskOrder::Hold, "test")).await.unwrap();
    eventually("the unit is gone", || property(&machine, "ActiveState") == "inactive");
    client.call::<OrderTask>(&order(TaskOrder::Release, "")).await.unwrap();
    running(&scenario, 4, 4).await;
    machine.run(&["systemctl", "stop", UNIT]);
    running(&scenario, 5, 5).await;

    let second = version("2");
    let last = scenario.update(|edit| edit.file("/opt/job/run", &second), TRIGGERS, None).await;
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Done, vec![]));
    running(&scenario, 1, 6).await;
    let request = GetTaskLogRequest { task: "job".to_owned(), bytes: 10_000 };
    eventually_async("the journal has it", async || {
        let log = scenario.sub.client.call::<GetTaskLog>(&request).await.unwrap();
        let log = String::from_utf8(log.text.0).unwrap();
        if log.contains("said 1\n") && log.contains("said 2\n") { Ok(()) } else { Err(log) }
    })
    .await;

    let last =
        scenario.update(|edit| edit.remove("/opt/job").remove("/etc/dominator"), "[]", None).await;
    assert_eq!((last.outcome, last.trigger_failures), (UpdateOutcome::Done, vec![]));
    assert_eq!(property(&machine, "ActiveState"), "inactive");
    assert_eq!(lines(&root, "ends"), ["there"; 4]);
    assert_eq!(lines(&root, "overlaps"), Vec::<String>::new());
    assert!(!machine.console().contains("panicked"), "{}", machine.console());
    scenario.source.stop().await;
}
