//! `filegen-server`: makes the content of computed files, for each machine.

use std::process::ExitCode;

use daemon::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    filegen::main()
}
