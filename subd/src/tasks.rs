//! Daemon tasks: runs the tasks of the image that was activated last.
//!
//! Each attempt to run a task has a process of its own that watches it, the *guard*, which is
//! subd's program with other arguments. So a task runs on when subd stops, is killed or is updated,
//! and a later subd finds it: nothing of a live task is only in subd's memory.
//!
//! | module | what |
//! |---|---|
//! | [`runner`] | the thread that carries out what [`tasks::supervise`] decides |
//! | [`records`] | what is recorded of tasks |
//! | [`report`] | what is told of tasks |
//! | [`health`] | asks health commands |
//! | [`staged`] | which tasks an update stops, and which it brings |
//! | [`supervisor`] | starts, observes and stops attempts |
//! | [`guard`] | the process that watches an attempt |
//! | [`stage`] | becomes the program: its user, limits and root |
//! | [`deadline_timers`] | wakes the guard when the attempt must stop |
//! | [`attempt`] | the files of an attempt, and the lock of a task |
//! | [`cgroup`], [`processes`] | what belongs to an attempt |
//! | [`log_files`] | the output of tasks where there is no journal |
//!
//! # Never two
//!
//! * The file `lock` of a task is locked by its guard as long as a process of the attempt may live.
//!   The kernel gives the lock to one process only.
//! * Who has the lock may write `attempt.json`. A guard that gets the lock and finds another
//!   attempt there, or that its own was given up, ends without starting anything.
//! * When a guard is gone and has not said how its attempt ended, what it left is killed first, and
//!   the lock is held until all of that is gone.

pub mod attempt;
pub mod cgroup;
pub mod deadline_timers;
pub mod guard;
pub mod health;
pub mod log_files;
pub mod processes;
pub mod records;
pub mod report;
pub mod runner;
pub mod stage;
pub mod staged;
pub mod supervisor;

use std::process::ExitCode;

/// The first argument of a guard.
pub const GUARD: &str = "task-guard";

/// The first argument of the first process of a task with process numbers of its own.
pub const INIT: &str = "task-init";

/// The first argument of what becomes the program.
pub const STAGE: &str = "task-stage";

/// Runs this process as part of a task, if it was started as one.
#[must_use]
pub fn dispatch() -> Option<ExitCode> {
    let words: Vec<String> = std::env::args().skip(1).take(4).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match *words {
        [GUARD, directory, attempt] => Some(guard::main(directory.as_ref(), attempt)),
        [INIT, directory] => Some(stage::init(directory.as_ref())),
        [STAGE, directory] => Some(stage::become_program(directory.as_ref(), stage::Part::Program)),
        [STAGE, directory, "health"] => {
            Some(stage::become_program(directory.as_ref(), stage::Part::HealthCheck))
        }
        _ => None,
    }
}
