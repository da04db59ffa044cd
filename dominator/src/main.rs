//! `dominator`: keeps every machine of a fleet equal to its image.

use std::process::ExitCode;

fn main() -> ExitCode {
    dominator::daemon::command::main()
}
