//! A program of this test that is interrupted, and then run again to its end.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The environment variable with how many seconds the program waits for what comes next.
const PATIENCE_VARIABLE: &str = "CRASH_PATIENCE_S";

/// For a program that is disturbed, which may wait for minutes then, and for others.
pub const IMPATIENT: &str = "8";
pub const PATIENT: &str = "60";

/// Returns the program that `variable` chooses, for a directory.
pub fn program(variable: &str, directory: &Path, patience: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(variable, directory).env(PATIENCE_VARIABLE, patience);
    command
}

/// Returns how long this program waits for what comes next.
pub fn patience() -> Duration {
    Duration::from_secs(std::env::var(PATIENCE_VARIABLE).unwrap().parse().unwrap())
}
