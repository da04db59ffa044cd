//! `subtool`: see [`subtool`].

use std::process::ExitCode;

fn main() -> ExitCode {
    subtool::main()
}
