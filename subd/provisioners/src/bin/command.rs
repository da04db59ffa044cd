//! `dom-provisioner-command`: see [`provisioners::command`].

use std::process::ExitCode;

fn main() -> ExitCode {
    provisioners::main(&provisioners::command::Commands)
}
