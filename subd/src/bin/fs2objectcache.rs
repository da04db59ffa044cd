//! `fs2objectcache`: see [`subd::fs2objectcache`].

use std::process::ExitCode;

fn main() -> ExitCode {
    subd::fs2objectcache::main()
}
