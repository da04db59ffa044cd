//! `filegen-server`: makes the content of computed files, for each machine.

use std::process::ExitCode;

fn main() -> ExitCode {
    filegen::main()
}
