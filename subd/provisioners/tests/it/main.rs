//! The plugins that ship with the project, those of the documents, and a real example.
#![expect(clippy::unwrap_used, reason = "a test that fails panics")]

mod command;
mod document;
mod file;
mod postgres;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// Makes a directory that all may enter.
fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    directory
}

/// Runs a plugin, or another program, with an input.
fn run(mut command: Command, input: &[u8]) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // It need not read it.
    let _closed = stdin.write_all(input);
    drop(stdin);
    child.wait_with_output().unwrap()
}

/// Asks a plugin about resources, each with its id and specification; returns its answer.
fn ask(plugin: &Path, verb: &str, desired: &[(&str, Value)], previous: &[(&str, Value)]) -> Value {
    let item = |(id, spec): &(&str, Value)| json!({"id": id, "key": "0a", "spec": spec});
    let items = |list: &[(&str, Value)]| list.iter().map(item).collect::<Vec<_>>();
    let request = json!({"key": "0a", "desired": items(desired), "previous": items(previous)});
    let mut command = Command::new(plugin);
    command.arg(verb);
    let output = run(command, request.to_string().as_bytes());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Writes a program. A child does: a file that this process had open for writing could not be run
/// while another thread forks.
fn install(path: &Path, text: &str) {
    let mut command = Command::new("install");
    command.args(["-m", "755", "/dev/stdin"]).arg(path);
    assert!(run(command, text.as_bytes()).status.success());
}

fn made(id: &str, outputs: &Value) -> Value {
    json!({"ids": [id], "success": {"outputs": {id: outputs}}})
}

fn destroyed(id: &str) -> Value {
    json!({"ids": [id], "success": {"outputs": {}}})
}

fn failed(id: &str, error: &str) -> Value {
    json!({"ids": [id], "failed": {"error": error}})
}
