//! Tests that an interrupted change of a store is made as a whole or not at all.
//!
//! The store's own code makes one change in a program of one thread. At each of its calls that
//! change something, the program is killed, the call fails, or the power is cut; then the store is
//! opened again and checked as a whole. All points are tried by
//!
//! ```text
//! CRASH_POINTS=all cargo test --release -p imageserver --test crash -- --nocapture
//! ```
//!
//! and without the variable some points; see [`testing::crash_points`]. The changes are listed in
//! [`change`]. Needs root, strace, e2fsprogs, perl and loop devices.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod change;
mod power;
mod trial;

use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::change::CHANGES;
use crate::trial::Lab;

fn main() -> ExitCode {
    if let Some(directory) = std::env::var_os(trial::DIRECTORY_VARIABLE) {
        return change::act(Path::new(&directory));
    }
    let mut arguments = Arguments::from_args();
    // Each test has threads of its own.
    arguments.test_threads = Some(1);
    let mut tests = Vec::new();
    for change in CHANGES {
        let lab: Arc<OnceLock<Lab>> = Arc::default();
        let mut test = |name: &str, run: fn(&Lab) -> Result<(), String>| {
            let lab = Arc::clone(&lab);
            let run = move || run(lab.get_or_init(|| Lab::open(change))).map_err(Failed::from);
            tests.push(Trial::test(format!("{}::{name}", change.name), run));
        };
        test("a_kill_at_any_call_leaves_all_or_nothing", trial::kill);
        test("an_io_error_at_any_call_leaves_all_or_nothing", trial::io_error);
        test("a_full_disk_at_any_call_leaves_all_or_nothing", trial::full_disk);
        test("an_io_error_at_any_look_leaves_all_or_nothing", trial::io_error_of_a_look);
        test("a_power_cut_at_any_call_leaves_all_or_nothing", power::power_cut);
        if change.is_synced {
            test("a_power_cut_without_syncs_is_seen", power::power_cut_without_syncs);
        }
    }
    libtest_mimic::run(&arguments, tests).exit_code()
}
