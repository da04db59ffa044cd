//! `imagetool`: makes, shows and fetches images.

use std::process::ExitCode;

fn main() -> ExitCode {
    imagetool::command::main()
}
