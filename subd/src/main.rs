//! `subd`: the agent on every machine.

use std::process::ExitCode;

fn main() -> ExitCode {
    subd::daemon::command_line::main()
}
