//! `dominator`: keeps every machine of a fleet equal to its image.

use std::process::ExitCode;

use daemon::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    dominator::daemon::command::main()
}
