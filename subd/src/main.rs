//! `subd`: the agent on every machine.

use std::process::ExitCode;

fn main() -> ExitCode {
    subd::command::main()
}
