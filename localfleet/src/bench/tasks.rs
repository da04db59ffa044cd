//! Daemon tasks on one machine without systemd: how soon they run and their end is seen, and what
//! many of them cost.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use api::dominator::Status;
use api::subd::{GetTasks, Poll, PollRequest, TaskReport, TaskState};
use model::mdb::Machine;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::measure::{Row, Samples, mebibytes, seconds};
use super::{Bench, cost_when_idle, update_to, upload_with};
use crate::fleet::{Addresses, Fleet};
use crate::source_trees::{copy, copy_programs};

/// The tasks of the machine with many.
const MANY: usize = 200;

/// The most time until a task is as it should be, and how often it is asked for.
const LIMIT: Duration = Duration::from_secs(120);
const ASK_INTERVAL: Duration = Duration::from_millis(1);

/// How long a machine is left alone before it counts as idle.
const SETTLE: Duration = Duration::from_secs(20);

/// The goals, in seconds, bytes and as a part of a core.
const START_WANTED: f64 = 0.05;
const END_WANTED: f64 = 0.05;
const RECORD_WANTED: f64 = 2.0;
const MEMORY_WANTED: f64 = 36.0 * 1024.0 * 1024.0;
const CPU_WANTED: f64 = 0.005;

/// The program of the tasks. A new file tells when it runs.
const PROGRAM: &str = "#!/bin/sh\n: > /var/log/started-$1\nexec sleep 100000\n";

/// Makes a tree with a shell and the definitions of `count` tasks. Returns it with its triggers.
fn tree_with(bench: &Bench<'_>, count: usize) -> anyhow::Result<(PathBuf, String)> {
    let tree = bench.place.join(format!("tasks-{count}"));
    copy(bench.first()?, &tree)?;
    copy_programs(["/bin/sh", "/usr/bin/sleep"], &tree)?;
    for directory in ["dev", "proc", "opt", "var/log", "etc/dominator/tasks.d"] {
        fs::create_dir_all(tree.join(directory)).context("cannot make a directory")?;
    }
    let program = tree.join("opt/run");
    fs::write(&program, PROGRAM).context("cannot write the program")?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).context("cannot chmod")?;
    let mut triggers = Vec::new();
    for number in 0..count {
        let name = format!("job-{number}");
        let task = serde_json::json!({ "name": name, "argv": ["/opt/run", number.to_string()] });
        fs::write(tree.join(format!("etc/dominator/tasks.d/{name}.json")), task.to_string())
            .context("cannot write a task")?;
        let lines = [format!("/etc/dominator/tasks\\.d/{name}\\.json")];
        triggers.push(serde_json::json!({ "MatchLines": lines, "Service": name, "Kind": "task" }));
    }
    Ok((tree, serde_json::Value::from(triggers).to_string()))
}

fn tasks_of(fleet: &Fleet) -> anyhow::Result<Vec<TaskReport>> {
    Ok(fleet.ask_sub::<GetTasks>(0, &())?.tasks)
}

/// Waits until the tasks are as `wanted`.
fn wait_tasks(fleet: &Fleet, wanted: impl Fn(&[TaskReport]) -> bool) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let tasks = tasks_of(fleet)?;
        if wanted(&tasks) {
            return Ok(());
        }
        if start.elapsed() > LIMIT {
            bail!("the tasks are not as they should be after {LIMIT:?}: {tasks:?}");
        }
        std::thread::sleep(ASK_INTERVAL);
    }
}

fn all_run(tasks: &[TaskReport]) -> bool {
    !tasks.is_empty() && tasks.iter().all(|task| task.state == TaskState::Running)
}

/// Kills the program of the only task.
fn kill_program() -> anyhow::Result<()> {
    let is_it = |pid: i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line == b"sleep\x00100000\x00"
    };
    let entries = fs::read_dir("/proc").context("cannot read /proc")?.filter_map(Result::ok);
    let mut numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let pid = numbers.find(|pid| is_it(*pid)).context("the task has no process")?;
    kill(Pid::from_raw(pid), Signal::SIGKILL).context("cannot kill the task")
}

/// Returns how long after the end of the last update the program of the task ran.
fn start_of(fleet: &Fleet, root: &Path) -> anyhow::Result<f64> {
    let poll = fleet.ask_sub::<Poll>(0, &PollRequest::default())?;
    let ended = poll.last_update.context("there was no update")?.ended;
    let ended = ended.seconds as f64 + f64::from(ended.nanoseconds) / 1e9;
    let started = fs::metadata(root.join("var/log/started-0")).context("the task did not run")?;
    let started = started.modified()?.duration_since(UNIX_EPOCH)?.as_secs_f64();
    Ok((started - ended).max(0.0))
}

/// Measures how soon a task runs and its end is seen, and what many tasks cost.
///
/// # Errors
///
/// If the machine does not do what it should.
pub fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let trees = [tree_with(bench, 0)?, tree_with(bench, 1)?, tree_with(bench, MANY)?];
    let directory = bench.fleet_directory("tasks");
    fs::create_dir_all(directory.join("roots")).context("cannot make a directory")?;
    copy(&trees[0].0, &directory.join("roots/sub-1"))?;
    let flags = vec![("--supervisor", "direct".to_owned())];
    let mut fleet = bench.fleet_at("tasks", Addresses::private()?, flags)?;
    for (name, (tree, triggers)) in ["none", "one", "many"].into_iter().zip(&trees) {
        upload_with(&fleet, name, tree, ["/var/log/.*\n", triggers], &[])?;
    }
    let mut rows = Vec::new();
    let (mut start, mut end, mut record) =
        (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..bench.runs() {
        update_to(&mut fleet, "none")?;
        update_to(&mut fleet, "one")?;
        wait_tasks(&fleet, all_run)?;
        start.add(start_of(&fleet, &fleet.subs[0].root)?);
        let killed = Instant::now();
        kill_program()?;
        wait_tasks(&fleet, |tasks| !all_run(tasks))?;
        end.add(killed.elapsed().as_secs_f64());
        update_to(&mut fleet, "none")?;
        record.add(record_to_running(&mut fleet)?);
    }
    let times = [
        ("an update's end to the task's program running", start, START_WANTED),
        ("a task is killed, until subd tells of it", end, END_WANTED),
        ("a machine is added to the database, until its task runs", record, RECORD_WANTED),
    ];
    rows.extend(times.into_iter().map(|(what, samples, wanted)| Row {
        what: what.to_owned(),
        ours: samples.shown(seconds),
        peer: String::new(),
        ratio: Some(samples.median() / wanted),
        wanted: seconds(wanted),
    }));
    let (before, _) = cost_when_idle(&fleet, SETTLE)?;
    update_to(&mut fleet, "many")?;
    wait_tasks(&fleet, |tasks| tasks.len() == MANY && all_run(tasks))?;
    let (cpu, memory) = cost_when_idle(&fleet, SETTLE)?;
    rows.push(Row {
        what: format!(
            "{MANY} tasks, {} files, idle: CPU of subd, of a core",
            super::fixture::FILES
        ),
        ours: format!("{:.2} %", cpu * 100.0),
        peer: format!("without tasks: {:.2} %", before * 100.0),
        ratio: Some(cpu / CPU_WANTED),
        wanted: format!("{} %", CPU_WANTED * 100.0),
    });
    rows.push(Row {
        what: format!("{MANY} tasks, {} files, idle: memory of subd", super::fixture::FILES),
        ours: mebibytes(memory.now as f64),
        peer: String::new(),
        ratio: Some(memory.now as f64 / MEMORY_WANTED),
        wanted: mebibytes(MEMORY_WANTED),
    });
    update_to(&mut fleet, "none")?;
    wait_tasks(&fleet, <[TaskReport]>::is_empty)?;
    bench.end("tasks", fleet)?;
    Ok(rows)
}

/// Adds the machine to the database, which has the objects of the image with the task but not its
/// files. Returns the seconds until the task runs.
fn record_to_running(fleet: &mut Fleet) -> anyhow::Result<f64> {
    let mut machine = fleet.subs[0].record();
    machine.required_image = "none".to_owned();
    machine.planned_image = "one".to_owned();
    fleet.replace_mdb(&[machine.clone()])?;
    let start = Instant::now();
    let told = "equals none; has all objects of one, which comes next";
    while fleet.statuses()?.iter().all(|sub| sub.status != Status::Synced || sub.detail != told) {
        ensure!(start.elapsed() < LIMIT, "the objects are not fetched: {:?}", fleet.statuses()?);
        std::thread::sleep(ASK_INTERVAL);
    }
    // An empty database would be held.
    let other = Machine { hostname: "other.example".to_owned(), ..Machine::default() };
    fleet.replace_mdb(&[other])?;
    while fleet.statuses()?.iter().any(|sub| sub.hostname == machine.hostname) {
        ensure!(start.elapsed() < LIMIT, "the machine stays in the database");
        std::thread::sleep(ASK_INTERVAL);
    }
    machine.required_image = "one".to_owned();
    machine.planned_image = String::new();
    let start = Instant::now();
    fleet.replace_mdb(&[machine])?;
    wait_tasks(fleet, all_run)?;
    Ok(start.elapsed().as_secs_f64())
}
