//! `subd`: the agent on every machine.

use std::process::ExitCode;

use daemon::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    subd::daemon::command_line::main()
}
