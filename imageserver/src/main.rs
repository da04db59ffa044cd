//! `imageserver`: keeps images and serves them.

use std::process::ExitCode;

use daemon::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    imageserver::daemon::command::main()
}
