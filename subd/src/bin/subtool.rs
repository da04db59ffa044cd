//! `subtool`: see [`subd::subtool`].

use std::process::ExitCode;

fn main() -> ExitCode {
    subd::subtool::main()
}
