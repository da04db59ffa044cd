//! `domtool`: asks the dominator what the machines are doing, and gives it orders.

use std::process::ExitCode;

fn main() -> ExitCode {
    domtool::main()
}
