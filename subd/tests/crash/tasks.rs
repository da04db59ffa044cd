//! Tasks whose subd is cut short anywhere: never do two run at once, and in the end there is what
//! the image has.
//!
//! subd's own code starts a task, replaces it by another version, and stops that, on a thread that
//! runs tasks and nothing else. Each of its calls that change something, or start a process, kills
//! the program, or fails; then the program is run again, and goes on where it was. What it has
//! started runs meanwhile.

use std::error::Error;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ::tasks::image::{Definition, ImageTasks};
use api::subd::TaskState;
use serde_json::json;
use subd::machine::command_runner::CommandRunner;
use subd::root::Root;
use subd::state::directories::Directories;
use subd::state::persisted_state::StateDirectory;
use subd::tasks::records;
use subd::tasks::runner::Tasks;
use subd::tasks::supervisor::{Backend, Supervisor, SupervisorChoice};
use testing::crash_points::{Sample, Scratch, entries, in_one_line};
use testing::strace::{Call, Class, Fault, Faults, MARK, Point, calls, points};

use crate::interrupted::{IMPATIENT, PATIENT, patience, program};
use crate::machine::wait_for_children;

/// The environment variable with the directory, for the program that is killed.
pub const DIRECTORY_VARIABLE: &str = "CRASH_TASKS";

/// Locks a file, records if it is locked already, and its version.
const RUN: &str = "exec 9>>DIRECTORY/lock; flock -n 9 || echo two >> DIRECTORY/overlaps\n\
    echo $1 >> DIRECTORY/starts\nsleep 1000 & wait\n";

/// The task in its first and its second version; and then none.
const STAGES: usize = 3;

fn defined(directory: &Path, stage: usize) -> ImageTasks {
    if stage == STAGES {
        return ImageTasks::default();
    }
    let run = directory.join("run");
    let argv = ["/bin/sh", run.to_str().unwrap(), &stage.to_string()];
    let text = json!({"name": "job", "argv": argv, "stop_timeout_s": 1}).to_string();
    ImageTasks([("job".to_owned(), Definition { text, programs: Vec::new() })].into())
}

/// Runs tasks in `directory`, from the stage on that is recorded there.
pub fn run(directory: &Path) -> ExitCode {
    match run_all(directory) {
        Ok(()) => println!("done"),
        Err(error) => println!("failed {error}"),
    }
    ExitCode::SUCCESS
}

fn run_all(directory: &Path) -> Result<(), Box<dyn Error>> {
    let root = Root::open(&directory.join("root"))?;
    let state = StateDirectory::lock(Directories::state(&root, None)?)?;
    let records = records::load(&state)?;
    let backend = Backend::choose(SupervisorChoice::Direct, Path::new("/"), true, false)?;
    let program = env!("CARGO_BIN_EXE_subd").into();
    let supervisor = Supervisor::new(directory.join("tasks"), backend, "boot", program)?;
    let stage = std::fs::read_to_string(directory.join("stage"))?.parse()?;
    let (definitions, commands) = (defined(directory, stage), CommandRunner::choose(true, false));
    let (tasks, runner) =
        Tasks::prepare(Arc::new(supervisor), records, definitions, commands, || ())?;
    let directory = directory.to_owned();
    let orders = std::thread::spawn(move || {
        let ordered = give_orders(&directory, &tasks, stage).map_err(|error| error.to_string());
        tasks.end();
        ordered
    });
    // The calls from here on are counted, of this thread.
    assert!(std::fs::metadata(MARK).is_err());
    runner.run();
    Ok(orders.join().map_err(|_| "the orders have panicked")??)
}

/// Defines one stage after the other, each when that before has taken effect.
fn give_orders(directory: &Path, tasks: &Tasks, first: usize) -> Result<(), Box<dyn Error>> {
    let patience = patience();
    for stage in first..=STAGES {
        std::fs::write(directory.join("stage.new"), stage.to_string())?;
        std::fs::rename(directory.join("stage.new"), directory.join("stage"))?;
        tasks.define(&defined(directory, stage));
        let deadline = Instant::now() + patience;
        while !has_taken_effect(directory, tasks, stage) {
            if Instant::now() > deadline {
                return Err(format!("stage {stage}: {:?}", tasks.reports()).into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

fn has_taken_effect(directory: &Path, tasks: &Tasks, stage: usize) -> bool {
    let starts = std::fs::read_to_string(directory.join("starts")).unwrap_or_default();
    let (reports, last) = (tasks.reports(), starts.lines().last());
    match &reports[..] {
        [] => stage == STAGES && tasks.supervisor.known().is_ok_and(|known| known.is_empty()),
        [one] => one.state == TaskState::Running && last == Some(&*stage.to_string()),
        _ => false,
    }
}

/// What is there after all.
#[derive(Debug, PartialEq)]
struct Outcome {
    starts: Vec<String>,
    overlaps: String,
    records: String,
    left: usize,
}

fn command(directory: &Path, patience: &str) -> Command {
    program(DIRECTORY_VARIABLE, directory, patience)
}

/// Runs a command to its end. What it has started runs on, and would hold a pipe.
fn run_to_end(mut command: Command, directory: &Path) -> Output {
    let log = directory.join("output");
    let file = File::create(&log).unwrap();
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
    let status = command.status().unwrap();
    Output { status, stdout: std::fs::read(&log).unwrap(), stderr: Vec::new() }
}

fn make(directory: &Path) {
    std::fs::create_dir_all(directory.join("root/.subd/state")).unwrap();
    let run = RUN.replace("DIRECTORY", &directory.display().to_string());
    std::fs::write(directory.join("run"), run).unwrap();
    std::fs::write(directory.join("stage"), "1").unwrap();
}

/// Reads what is there after `output`, of a program that must have done all.
fn outcome(directory: &Path, output: &Output) -> Result<Outcome, String> {
    if !String::from_utf8_lossy(&output.stdout).lines().any(|line| line == "done") {
        return Err(in_one_line(output));
    }
    // Nothing of a task is left.
    wait_for_children(directory);
    let read = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap_or_default();
    Ok(Outcome {
        starts: read("starts").lines().map(str::to_owned).collect(),
        overlaps: read("overlaps"),
        records: read("root/.subd/state/tasks.json"),
        left: entries(&directory.join("tasks")).len(),
    })
}

/// Interrupts it at each call.
pub fn at_any_call() -> Result<(), String> {
    let (scratch, sample) = (Scratch::new(), Sample::from_environment());
    let directory = scratch.free_path();
    make(&directory);
    let log = directory.join("strace.log");
    let output =
        run_to_end(Faults::default().trace(&command(&directory, PATIENT), &log), &directory);
    let want = outcome(&directory, &output)?;
    if want.starts != ["1", "2"] || !want.overlaps.is_empty() || want.left != 0 {
        return Err(format!("{want:?}"));
    }
    let all = calls(&log, &directory);
    let first = all.iter().position(|call| call.class == Class::Mark).unwrap();
    // How often it looks whether a guard has ended is not the same each time.
    let is_steady = |call: &&Call| !call.name.starts_with("wait");
    let all: Vec<Call> = all[first..].iter().filter(is_steady).cloned().collect();
    let changes = |class| class == Class::Change;
    let mut tried = points(&all, |class| changes(class) || class == Class::Process, Fault::Kill);
    for fault in [Fault::Io, Fault::Space] {
        tried.extend(points(&all, changes, fault));
    }
    let (count, unreached) = (tried.len(), AtomicUsize::new(0));
    let survive = |point: &Point, _| {
        let directory = scratch.free_path();
        make(&directory);
        let log = directory.join("strace.log");
        let faults = Faults { leaves_children: true, ..Faults::from(point) };
        let output = run_to_end(faults.inject(&command(&directory, IMPATIENT), &log), &directory);
        if !faults.happened(&log) {
            // It looks for guards once more or less often than when the calls were counted.
            unreached.fetch_add(1, Ordering::Relaxed);
            let said = in_one_line(&output);
            outcome(&directory, &output).map_err(|_| format!("it was not disturbed: {said}"))?;
        }
        let again = run_to_end(command(&directory, PATIENT), &directory);
        let got = outcome(&directory, &again)?;
        if got != want {
            return Err(format!("{got:?} instead of {want:?}"));
        }
        std::fs::remove_dir_all(&directory).unwrap();
        Ok(())
    };
    sample.enumerate("tasks", tried, survive, |_| String::new())?;
    let (unreached, most) = (unreached.into_inner(), sample.points.unwrap_or(count) / 4);
    if unreached > most {
        return Err(format!("{unreached} points were not reached"));
    }
    Ok(())
}
