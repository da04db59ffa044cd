//! Tasks across restarts of subd and of the machine, changes of their definitions, and orders.

use std::fs;
use std::time::{Duration, Instant};

use api::subd::{Health, TaskOrder, TaskState};
use jiff::Timestamp;
use model::object::Algorithm;
use tasks::image::ImageTasks;
use testing::eventually;

use super::{JOB, LOCK, Machine, is_gone, is_there, kill_hard};

fn forever() -> String {
    format!("{LOCK}exec sleep 1000")
}

#[test]
fn a_later_subd_finds_what_an_earlier_one_has_started() {
    Machine::each(|machine| {
        let task = machine.task("", &forever());
        let running = machine.start(&task);
        let first = machine.started(1);
        running.until(TaskState::Running);
        running.end();
        assert!(is_there(first));
        // While nothing is known of an interrupted update, nothing is done.
        let running = machine.start(&task);
        running.until(TaskState::Running);
        assert_eq!((machine.lines("starts").len(), is_there(first)), (1, true));
        // It is watched as one of its own is.
        kill_hard(first);
        machine.started(2);
        machine.never_were_two();
        running.stop_all();
    });
}

#[test]
fn what_ends_while_subd_is_away_is_known_afterwards() {
    Machine::each(|machine| {
        let fields = r#""restart": {"policy": "never"}"#;
        let script = "echo >> PLACE/starts; while ! test -e PLACE/go; do sleep 0.01; done; exit 3";
        let task = machine.task(fields, script);
        let running = machine.start(&task);
        machine_started(machine);
        running.end();
        std::fs::write(machine.at("go"), "").unwrap();
        eventually("its end is recorded", || {
            if machine.at("tasks/job/ended.json").exists() { Ok(()) } else { Err("it is not") }
        });
        let running = machine.start(&task);
        let ended = running.until(TaskState::Failed).last_end.unwrap();
        assert!(ended.starts_with("exited with 3 at "), "{ended}");
        // It runs once for each version.
        running.end();
        let running = machine.start(&task);
        running.until(TaskState::Failed);
        assert_eq!(machine.lines("starts").len(), 1);
        let mut other = task;
        other.0.get_mut(JOB).unwrap().programs = vec![Algorithm::Blake3.digest(b"new")];
        running.tasks.define(&other);
        eventually("it runs again", || match machine.lines("starts").len() {
            2 => Ok(()),
            count => Err(count.to_string()),
        });
        running.until(TaskState::Failed);
        running.end();
    });
}

fn machine_started(machine: &Machine) {
    eventually("the task starts", || match machine.lines("starts").len() {
        1 => Ok(()),
        count => Err(count.to_string()),
    });
}

#[test]
fn a_task_is_back_after_a_boot_and_one_that_runs_once_is_not() {
    Machine::each(|machine| {
        for (fields, starts, state) in [
            ("", 2, TaskState::Running),
            (r#""restart": {"policy": "never"}"#, 1, TaskState::Failed),
        ] {
            let machine = Machine::new(machine.backend.clone());
            let task = machine.task(fields, &forever());
            let running = machine.start(&task);
            let first = machine.started(1);
            running.until(TaskState::Running);
            running.end();
            // Nothing of a former boot is left; its end is on no record.
            kill_hard(super::guard(&machine.at("tasks")));
            is_gone(first);
            let running = machine.start_in_boot("boot 2", &task);
            let report = running.until(state);
            assert!(report.last_end.unwrap().starts_with("ended with the machine at "));
            machine.started(starts);
            assert_eq!(machine.lines("starts").len(), starts);
            machine.never_were_two();
            running.stop_all();
        }
    });
}

/// A schedule that has started a run, and that stops it in `seconds`, at most 59.
fn stops_in(seconds: i64) -> String {
    let now = Timestamp::now().as_second();
    let offset = 60 - seconds - now.rem_euclid(60);
    let minute = (now + offset).div_euclid(60);
    let cron = |minute: i64| {
        format!("{} {} * * *", minute.rem_euclid(60), minute.div_euclid(60).rem_euclid(24))
    };
    let (start, stop) = (cron(minute), cron(minute + 1));
    format!(
        r#""schedule": {{"zone": "UTC", "offset_s": {offset}, "events": [
            {{"action": "start", "cron": "{start}"}}, {{"action": "stop", "cron": "{stop}"}}]}}"#
    )
}

#[test]
fn a_stop_time_holds_while_subd_is_away() {
    Machine::each(|machine| {
        let hours = machine.task(&stops_in(6), &forever());
        let running = machine.start(&hours);
        let first = machine.started(1);
        running.until(TaskState::Running);
        running.end();
        is_gone(first);
        eventually("its end is recorded", || {
            let ended = fs::read_to_string(machine.at("tasks/job/ended.json")).unwrap_or_default();
            if ended.contains(r#""asked": true"#) { Ok(()) } else { Err(ended) }
        });
        let running = machine.start(&hours);
        running.until(TaskState::Idle);
        assert_eq!(machine.lines("starts").len(), 1);
        running.stop_all();
    });
}

#[test]
fn a_guard_takes_another_stop_time_while_its_task_runs() {
    Machine::each(|machine| {
        let running = machine.start(&machine.task(&stops_in(59), &forever()));
        let first = machine.started(1);
        running.until(TaskState::Running);
        running.tasks.define(&machine.task(&stops_in(6), &forever()));
        eventually("the guard is told", || {
            let told = fs::read_to_string(machine.at("tasks/job/deadlines.json")).unwrap();
            let told: serde_json::Value = serde_json::from_str(&told).unwrap();
            let stop_at: Timestamp =
                told["deadlines"]["stop_at"].as_str().unwrap().parse().unwrap();
            let left = stop_at.duration_since(Timestamp::now()).as_secs();
            if left < 20 { Ok(()) } else { Err(format!("{left} s")) }
        });
        running.end();
        is_gone(first);
        machine.never_were_two();
    });
}

#[test]
fn an_exclusive_task_ends_before_its_permit_while_subd_is_away() {
    Machine::each(|machine| {
        let task = machine.task(r#""exclusive": true, "stop_timeout_s": 1"#, &forever());
        let running = machine.start(&task);
        if running.tasks.supervisor.no_exclusive_tasks().is_some() {
            let refused = running.until(TaskState::Refused).detail;
            assert!(refused.starts_with("an exclusive task needs "), "{refused}");
            return running.end();
        }
        assert!(running.until(TaskState::Held).detail.contains("waits for the permit"));
        let soon = || running.tasks.supervisor.boot_now().after_ms(15_000);
        running.tasks.permit(JOB, 7, &soon()).unwrap();
        let first = machine.started(1);
        let permit = running.until(TaskState::Running).permit.unwrap();
        assert!(permit.is_live && permit.is_wanted && permit.until.is_some(), "{permit:?}");
        running.end();
        is_gone(first);
        let running = machine.start(&task);
        eventually("the permit has ended", || {
            let permit = running.until(TaskState::Held).permit.unwrap();
            match (permit.until, permit.is_live, permit.number) {
                (None, false, 7) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
        let late = running.tasks.permit(JOB, 7, &running.tasks.supervisor.boot_now());
        assert!(late.unwrap_err().to_string().contains("was given up"));
        assert_eq!(machine.lines("starts").len(), 1);
        running.stop_all();
    });
}

#[test]
fn another_version_replaces_a_run_and_other_hours_do_not() {
    Machine::each(|machine| {
        let task = machine.task("", &forever());
        let running = machine.start(&task);
        let first = machine.started(1);
        let mut other = task;
        other.0.get_mut(JOB).unwrap().programs = vec![Algorithm::Blake3.digest(b"new")];
        running.tasks.define(&other);
        machine.started(2);
        is_gone(first);
        running.until(TaskState::Running);
        let events = r#""schedule": {"zone": "UTC", "events": [
            {"action": "start", "cron": "* * * * *"}, {"action": "stop", "cron": "0 0 29 2 *"}]},
            "on_template_change": "recreate""#;
        let hours = machine.task(events, &forever());
        running.tasks.define(&hours);
        let third = machine.started(3);
        let ignored = events.replace("recreate", "ignore");
        let mut ignored = machine.task(&ignored, &forever());
        ignored.0.get_mut(JOB).unwrap().programs = vec![Algorithm::Blake3.digest(b"newer")];
        running.tasks.define(&ignored);
        assert_eq!(running.until(TaskState::Running).starts, 1);
        assert!(is_there(third));
        machine.never_were_two();
        running.stop_all();
    });
}

#[test]
fn a_task_that_no_image_has_is_stopped_and_forgotten() {
    Machine::each(|machine| {
        let running = machine.start(&machine.task("", &forever()));
        let first = machine.started(1);
        running.tasks.define(&ImageTasks::default());
        is_gone(first);
        eventually("it is forgotten", || {
            if machine.at("tasks/job").exists() { Err("it is there") } else { Ok(()) }
        });
        assert_eq!(running.tasks.reports(), []);
        running.end();
    });
}

#[test]
fn orders_hold_over_a_restart_of_subd() {
    Machine::each(|machine| {
        let task = machine.task("", &forever());
        let running = machine.start(&task);
        let first = machine.started(1);
        running.until(TaskState::Running);
        let order = |running: &super::Running, order, why: &str| {
            running.tasks.order(JOB, order, why, 0).map_err(|fault| fault.message)
        };
        assert_eq!(order(&running, TaskOrder::Release, ""), Err("the task is not held".to_owned()));
        order(&running, TaskOrder::Hold, "disk swap").unwrap();
        is_gone(first);
        running.end();
        let running = machine.start(&task);
        assert_eq!(running.until(TaskState::Held).detail, "held: disk swap");
        let refused = order(&running, TaskOrder::Restart, "");
        assert_eq!(refused, Err("the task is held or suspended: end that first".to_owned()));
        order(&running, TaskOrder::Release, "").unwrap();
        let second = machine.started(2);
        running.until(TaskState::Running);
        order(&running, TaskOrder::Restart, "").unwrap();
        machine.started(3);
        is_gone(second);
        running.until(TaskState::Running);
        order(&running, TaskOrder::Suspend, "too loud").unwrap();
        assert_eq!(running.until(TaskState::Suspended).detail, "suspended: too loud");
        assert_eq!(machine.lines("starts").len(), 3);
        order(&running, TaskOrder::Resume, "").unwrap();
        machine.started(4);
        let unknown = running.tasks.order("other", TaskOrder::Hold, "x", 0).unwrap_err().message;
        assert_eq!(unknown, "the image of this machine has no task `other`");
        machine.never_were_two();
        running.stop_all();
    });
}

#[test]
fn an_update_with_a_health_check_waits_for_tasks() {
    Machine::each(|machine| {
        let fields = r#""health": {"interval_s": 1, "argv": ["/bin/sh", "-c", "exit 7"]}"#;
        let ill = machine.task(fields, &forever());
        let running = machine.start(&ill);
        let check = |tasks: &ImageTasks| {
            let deadline = Instant::now() + Duration::from_secs(2);
            running.tasks.await_health(tasks, deadline, || false)
        };
        let why = "task job is unhealthy: exit status: 7".to_owned();
        assert_eq!(check(&ill), Some(Health::Failed(why)));
        let dies = machine.task(r#""restart": {"policy": "never"}"#, "exit 3");
        running.tasks.define(&dies);
        let Some(Health::Failed(why)) = check(&dies) else { panic!("it is not healthy") };
        assert!(why.starts_with("task job is failed: exited with 3 at "), "{why}");
        let well = machine.task("", &forever());
        running.tasks.define(&well);
        assert_eq!(check(&well), Some(Health::Passed));
        assert_eq!(running.tasks.await_health(&ill, Instant::now(), || true), None);
        running.stop_all();
    });
}
