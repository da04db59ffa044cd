//! Tests that an update which is interrupted anywhere leaves the old tree or the new one.
//!
//! subd's own code makes an update with every kind of operation in a program of one thread. Each of
//! its calls that change something kills the program, or fails; then subd starts on what is left.
//! All points are tried by
//!
//! ```text
//! CRASH_POINTS=all cargo test --release -p subd --test crash
//! ```
//!
//! and without the variable some points of each family; see [`testing::crash_points`]. Needs root,
//! strace, e2fsprogs, perl and loop devices.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod actor;
mod fixture;
mod interrupted;
mod lab;
mod listing;
mod machine;
mod provisioning;
mod tasks;
mod trial;

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::lab::Lab;

fn main() -> ExitCode {
    if let Some(directory) = std::env::var_os(machine::DIRECTORY_VARIABLE) {
        return actor::update(Path::new(&directory));
    }
    if let Some(directory) = std::env::var_os(provisioning::DIRECTORY_VARIABLE) {
        return provisioning::provision(Path::new(&directory));
    }
    if let Some(directory) = std::env::var_os(tasks::DIRECTORY_VARIABLE) {
        return tasks::run(Path::new(&directory));
    }
    let mut arguments = Arguments::from_args();
    // Each test has threads of its own.
    arguments.test_threads = Some(1);
    let lab: Arc<OnceLock<Lab>> = Arc::default();
    let test = |name: &str, run: fn(&Lab) -> Result<(), String>| {
        let lab = Arc::clone(&lab);
        Trial::test(name, move || run(lab.get_or_init(Lab::open)).map_err(Failed::from))
    };
    let tests = vec![
        test("an_undisturbed_update_arrives", lab::arrives),
        test("a_kill_at_any_call_leaves_old_or_new", trial::kill),
        test("an_io_error_at_any_call_leaves_old_or_new", trial::io_error),
        test("a_full_disk_at_any_call_leaves_old_or_new", trial::full_disk),
        test("an_io_error_at_any_look_leaves_old_or_new", trial::io_error_of_a_look),
        test("a_rollback_that_is_cut_short_is_recovered_from", trial::broken_rollback),
        test("a_recovery_that_is_cut_short_is_recovered_from", trial::broken_recovery),
        test("a_power_cut_at_any_call_leaves_old_or_new", trial::power_cut),
        test("a_power_cut_without_syncs_is_seen", trial::power_cut_without_sync),
        Trial::test("provisioning_that_is_cut_short_anywhere_goes_on", || {
            provisioning::at_any_call().map_err(Failed::from)
        }),
        Trial::test("tasks_that_are_cut_short_anywhere_go_on", || {
            tasks::at_any_call().map_err(Failed::from)
        }),
    ];
    let conclusion = libtest_mimic::run(&arguments, tests);
    if let Some(lab) = Arc::into_inner(lab).and_then(OnceLock::into_inner) {
        lab.close();
    }
    conclusion.exit_code()
}
