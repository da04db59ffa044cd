//! `subtool` as a process.

use std::process::Command;

#[test]
fn it_tells_its_version_and_refuses_unknown_flags() {
    let run = |flag: &str| Command::new(env!("CARGO_BIN_EXE_subtool")).arg(flag).output().unwrap();
    let output = run("--version");
    let expected = format!("subtool {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!((output.status.code(), output.stdout), (Some(0), expected.into_bytes()));
    let output = run("--no-such-flag");
    assert_eq!((output.status.code(), output.stdout), (Some(2), Vec::new()));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--no-such-flag"));
}
