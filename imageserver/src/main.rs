//! `imageserver`: keeps images and serves them.

use std::process::ExitCode;

fn main() -> ExitCode {
    imageserver::daemon::command::main()
}
