//! `filegen-client`: shows what a filegen-server makes, and checks it before it is used.

use std::process::ExitCode;

fn main() -> ExitCode {
    filegen_client::main()
}
