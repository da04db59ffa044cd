//! `dom-provisioner-file`: see [`provisioners::file`].

use std::process::ExitCode;

fn main() -> ExitCode {
    provisioners::main(&provisioners::file::Files)
}
