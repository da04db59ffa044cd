//! `mdbd`: makes the machine database out of what several sources say.

use std::process::ExitCode;

fn main() -> ExitCode {
    mdbd::main()
}
