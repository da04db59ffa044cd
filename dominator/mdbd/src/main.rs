//! `mdbd`: makes the machine database out of what several sources say.

use std::process::ExitCode;

use daemon::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    mdbd::main()
}
