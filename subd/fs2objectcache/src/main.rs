//! `fs2objectcache`: see [`fs2objectcache`].

use std::process::ExitCode;

fn main() -> ExitCode {
    fs2objectcache::main()
}
