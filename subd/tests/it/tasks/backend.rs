//! What each backend must do with one attempt.

use std::collections::BTreeSet;
use std::fs;

use api::subd::{Health, TaskState};
use nix::unistd::Pid;
use subd::tasks::supervisor::Backend;
use tasks::image::ImageTasks;
use testing::eventually;

use super::{JOB, LOCK, Machine, guard, is_gone, is_there, kill_hard, pid};
use crate::debian::tree;

fn forever() -> String {
    format!("{LOCK}exec sleep 1000")
}

#[test]
fn a_task_runs_once_and_is_restarted_when_it_dies() {
    Machine::each(|machine| {
        let task = machine.task(r#""restart": {"backoff_s": [1, 2]}"#, &forever());
        let running = machine.start(&task);
        let first = machine.started(1);
        assert_eq!(running.until(TaskState::Running).starts, 1);
        kill_hard(first);
        machine.started(2);
        let report = running.until(TaskState::Running);
        let ended = report.last_end.unwrap();
        assert!(ended.starts_with("was killed by signal 9 at "), "{ended}");
        machine.never_were_two();
        running.stop_all();
    });
}

#[test]
fn what_a_task_leaves_behind_is_stopped_before_it_starts_again() {
    Machine::each(|machine| {
        // In a session and group of its own, it has the lock and its parent has ended.
        let script = format!(
            "{LOCK}setsid sh -c 'echo $$ >> PLACE/left; sleep 1000' &\n\
            while ! test -s PLACE/left; do sleep 0.01; done; exit 0"
        );
        let task = machine.task(r#""stop_timeout_s": 1"#, &script);
        let running = machine.start(&task);
        machine.started(2);
        is_gone(pid(&machine.lines("left")[0]));
        machine.never_were_two();
        running.stop_all();
    });
}

#[test]
fn what_ignores_the_stop_signal_is_killed_with_all_that_it_started() {
    Machine::each(|machine| {
        let script = format!(
            "{LOCK}trap '' TERM\n\
             setsid sh -c 'trap \"\" TERM; echo $$ > PLACE/child; sleep 1000' &\n\
             while :; do sleep 1000; done"
        );
        let task = machine.task(r#""stop_timeout_s": 1"#, &script);
        let running = machine.start(&task);
        let main = machine.started(1);
        let child = eventually("the child", || match machine.lines("child").first() {
            Some(child) => Ok(pid(child)),
            None => Err("it is not there"),
        });
        let tasks = BTreeSet::from([JOB.to_owned()]);
        assert_eq!(running.tasks.pause(&tasks), []);
        assert!(!is_there(main) && !is_there(child));
        // It comes back after the pause.
        running.tasks.release();
        machine.started(2);
        machine.never_were_two();
        running.stop_all();
    });
}

#[test]
fn a_task_gets_its_own_signal_and_has_time() {
    Machine::each(|machine| {
        let script = format!(
            "{LOCK}trap 'echo stopped > PLACE/said; exit 0' USR1\n\
            while :; do sleep 0.01; done"
        );
        let task = machine.task(r#""stop_signal": "USR1""#, &script);
        let running = machine.start(&task);
        machine.started(1);
        running.stop_all();
        assert_eq!(machine.lines("said"), ["stopped"]);
    });
}

#[test]
fn a_task_has_the_surroundings_that_its_file_says() {
    Machine::each(|machine| {
        let fields = r#""user": "nobody", "groups": ["adm"], "environment": {"A": "b c"},
            "working_directory": "/usr", "limits": {"open_files": 77},
            "restart": {"policy": "never"}"#;
        let script = "id -un; id -gn; id -Gn | tr ' ' '\\n' | grep -c adm; pwd; ulimit -n; umask\n\
            env | grep -v SUBD_ | sort | tr '\\n' ' '; cat";
        let running = machine.start(&machine.task(fields, script));
        running.until(TaskState::Succeeded);
        let said = machine.lines("tasks/job/log");
        let expected = [
            "nobody",
            "nogroup",
            "1",
            "/usr",
            "77",
            "0022",
            "A=b c HOME=/nonexistent LANG=C.UTF-8 LOGNAME=nobody \
             PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PWD=/usr \
             USER=nobody ",
        ];
        assert_eq!(said, expected);
        running.stop_all();
    });
}

#[test]
fn what_cannot_be_started_says_why() {
    Machine::each(|machine| {
        let text = r#"{"name": "job", "argv": ["/nonexistent"], "restart": {"policy": "never"}}"#;
        let mut task = machine.task("", "");
        task.0.get_mut(JOB).unwrap().text = text.to_owned();
        let running = machine.start(&task);
        let ended = running.until(TaskState::Failed).last_end.unwrap();
        let why = "could not be started: cannot execute /nonexistent: No such file or directory";
        assert!(ended.starts_with(why), "{ended}");
        running.end();
        let machine = Machine::new(machine.backend.clone());
        let no_user = machine.task(r#""user": "nemo", "restart": {"policy": "never"}"#, "true");
        let running = machine.start(&no_user);
        let ended = running.until(TaskState::Failed).last_end.unwrap();
        let why = "could not be started: /etc/passwd has no user `nemo`";
        assert!(ended.starts_with(why), "{ended}");
        running.end();
    });
}

#[test]
fn output_fills_no_more_than_it_may() {
    Machine::each(|machine| {
        let fields = r#""output": {"rotate_kib": 64, "keep": 1}, "restart": {"policy": "never"}"#;
        let running = machine.start(&machine.task(fields, "yes | head -c 1000000; echo end"));
        running.until(TaskState::Succeeded);
        let length = |name: &str| fs::metadata(machine.at("tasks/job").join(name)).unwrap().len();
        assert!(length("log") <= 64 << 10 && length("log.1") <= 64 << 10);
        assert!(!machine.at("tasks/job/log.2").exists());
        assert_eq!(machine.lines("tasks/job/log").last().unwrap(), "end");
        running.end();
    });
}

#[test]
fn health_is_asked_for_as_the_user_of_the_task() {
    Machine::each(|machine| {
        let place = machine.place.path().display();
        let fields = format!(
            r#""user": "nobody", "health": {{"interval_s": 1, "argv": ["/bin/sh", "-c",
               "id -un; test -e {place}/well"]}}"#
        );
        let running = machine.start(&machine.task(&fields, "exec sleep 1000"));
        let report = running.until(TaskState::Unhealthy);
        assert_eq!(report.health, Some(Health::Failed("nobody\nexit status: 1".to_owned())));
        fs::write(machine.at("well"), "").unwrap();
        assert_eq!(running.until(TaskState::Running).health, Some(Health::Passed));
        running.stop_all();
    });
}

#[test]
fn a_guard_that_is_killed_takes_its_task_with_it() {
    Machine::each(|machine| {
        // What has left the group and the session of the task is found too.
        let script = format!(
            "{LOCK}setsid sh -c 'echo $$ >> PLACE/left; exec sleep 1000' &\n\
            exec sleep 1000"
        );
        let running = machine.start(&machine.task("", &script));
        let first = machine.started(1);
        eventually("the child", || {
            if machine.lines("left").len() == 1 { Ok(()) } else { Err("it is not there") }
        });
        kill_hard(guard(&machine.at("tasks")));
        machine.started(2);
        assert!(!is_there(first));
        is_gone(pid(&machine.lines("left")[0]));
        machine.never_were_two();
        let ended = running.until(TaskState::Running).last_end.unwrap();
        assert!(
            ended.starts_with("was killed, because the process that watched it was"),
            "{ended}"
        );
        running.stop_all();
    });
}

/// A task of another root runs in that root, with process numbers and mounts of its own.
#[test]
fn a_task_of_another_root_runs_in_that_root() {
    let Some(debian) = tree("minbase") else { return };
    let backend = Backend::Direct { cgroups: None, root: Some(debian) };
    let machine = Machine::new(backend);
    let script = "cat /etc/debian_version >/dev/null && echo inside; ls -d /proc/[0-9]* | wc -l\n\
        test -e MARK && echo outside; exec sleep 1000"
        .replace("MARK", &machine.at("state").display().to_string());
    let running = machine.start(&machine.task("", &script));
    running.until(TaskState::Running);
    let said = eventually("the output", || match machine.lines("tasks/job/log") {
        lines if lines.len() == 2 => Ok(lines),
        lines => Err(format!("{lines:?}")),
    });
    assert_eq!(said[0], "inside");
    // The first process, the program and its children.
    assert!(said[1].parse::<u32>().unwrap() <= 5, "{said:?}");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("minbase/proc"), "{mounts}");
    running.stop_all();
    let left = subd::tasks::processes::descendants(Pid::this().as_raw()).unwrap();
    assert!(left.iter().all(|process| {
        let line = fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        !String::from_utf8_lossy(&line).contains("task-init")
    }));
    assert_eq!(machine.start(&ImageTasks::default()).tasks.reports(), []);
}
