//! Programs of other crates of the workspace, and their output.

use std::path::Path;
use std::process::Output;

/// Returns the path of the program `name`, which another crate of the workspace builds. It lies
/// beside the test: `cargo test --release --workspace` builds all programs.
///
/// # Panics
///
/// If the program is missing or older than its sources, with the command that builds it.
#[must_use]
pub fn program(name: &str) -> String {
    let test = std::env::current_exe().expect("a test knows its program");
    // target/PROFILE/deps/TEST
    let directory = test.ancestors().nth(2).expect("a test is below target/PROFILE");
    let program = directory.join(name);
    let profile = if directory.ends_with("release") { "--release " } else { "" };
    let hint = format!("run `cargo build {profile}-p {name}` first");
    let changed = |path: &Path| path.metadata().and_then(|metadata| metadata.modified());
    let built = changed(&program).unwrap_or_else(|_| panic!("{name} is not built: {hint}"));
    let sources = std::fs::read_to_string(program.with_extension("d")).unwrap_or_default();
    let newer = sources
        .split_whitespace()
        .skip(1)
        .find(|source| changed(Path::new(source)).is_ok_and(|changed| changed > built));
    if let Some(newer) = newer {
        panic!("{name} is older than {newer}: {hint}");
    }
    program.into_os_string().into_string().expect("the path of the tree is UTF-8")
}

/// Returns the exit code, the stdout and the stderr of a program.
#[must_use]
pub fn exit_and_output(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("programs print UTF-8");
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}
