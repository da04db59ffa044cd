//! Runs the command lines of the documents as they are printed, in a copy of this machine's
//! file-system that nobody else sees, with a network of its own, daemons and managed machines.
//!
//! For each document, `executed/DOCUMENT.txt` has all of its command lines in their order, and
//! before each what it must exit with. `-` stands before what is not run here; a comment says why.
//! Lines with `!` prepare what the next commands need. `executed/world.sh` has the machines.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::command_lines::{ShellLine, shell_lines_of};
use super::{documents, repository};

/// Makes the copy of the file-system, and goes into it. `COPY` names an empty directory.
const ENTER: &str = r#"set -e
ip link set lo up
mount -t tmpfs none "$COPY"
cd "$COPY"
mkdir upper work root
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount --rbind /sys root/sys
mkdir root/repository root/place
mount --bind "$REPOSITORY" root/repository
mount --bind "$PLACE" root/place
touch root/usr/local/bin/localfleet
mount --bind "$BINARY" root/usr/local/bin/localfleet
exec chroot root env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    HOME=/home/ann USER=ann bash /place/script
"#;

/// The directory of what commands must exit with, in the repository.
const PLACE: &str = "localfleet/tests/it/documents/executed";

/// A line of a file with what commands must exit with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row<'a> {
    /// What it must exit with; `-` if it is not run, and `!` for what only prepares.
    code: &'a str,
    text: &'a str,
}

fn rows(expected: &str) -> Vec<Row<'_>> {
    let lines = expected.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.split_once(' ').unwrap()).map(|(code, text)| Row { code, text }).collect()
}

/// Returns the script that runs `rows`, whose commands are those of `lines`.
fn script(rows: &[Row<'_>], lines: &[ShellLine]) -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let mut commands = lines.iter();
    let mut script = format!(". /repository/{PLACE}/world.sh\n");
    for row in rows {
        if row.code == "!" {
            script.push_str(&format!("prepare {}\n", quoted(row.text)));
            continue;
        }
        let command = commands.next().expect("the commands were compared");
        if row.code != "-" {
            let text = format!("{}\n{}", command.text, command.here_document);
            script.push_str(&format!("run {} {}\n", row.code, quoted(text.trim_end())));
        }
    }
    script + "exit $failed\n"
}

/// Runs the command lines of a document. The exit codes must be the expected ones.
fn run(name: &str) {
    let document = documents().remove(&format!("{name}.md")).unwrap();
    let file = Path::new(name).file_name().unwrap();
    let expected = repository().join(PLACE).join(file);
    let expected = fs::read_to_string(expected.with_extension("txt")).unwrap();
    let (rows, lines) = (rows(&expected), shell_lines_of(&document));
    let commands: Vec<&str> =
        rows.iter().filter(|row| row.code != "!").map(|row| row.text).collect();
    let printed: Vec<&str> = lines.iter().map(|line| &*line.text).collect();
    assert_eq!(commands, printed, "the command lines of {name}.md and their exit codes");
    let directory = tempfile::tempdir().unwrap();
    let [place, copy] = ["place", "copy"].map(|name| directory.path().join(name));
    fs::create_dir(&place).unwrap();
    fs::create_dir(&copy).unwrap();
    fs::write(place.join("script"), script(&rows, &lines)).unwrap();
    let output = Command::new("timeout")
        .args(["300", "unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"])
        .args(["sh", "-c", ENTER])
        .env("COPY", &copy)
        .env("PLACE", &place)
        .env("REPOSITORY", repository())
        .env("BINARY", env!("CARGO_BIN_EXE_localfleet"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {}\n{said}", name, output.status);
}

/// The documents whose commands are not run here: those of PROTOCOL.md are curl's, which
/// `with_daemons.rs` runs; the others build, measure and test the project itself.
const RUN_ELSEWHERE: [&str; 3] = ["docs/PERFORMANCE.md", "docs/PROTOCOL.md", "docs/TESTING.md"];

#[test]
fn each_document_with_commands_is_run() {
    let documents = documents().into_iter().filter(|(name, text)| {
        !shell_lines_of(text).is_empty() && !RUN_ELSEWHERE.contains(&&**name)
    });
    let names = documents.map(|(name, _)| name.rsplit('/').next().unwrap().to_owned());
    let files = fs::read_dir(repository().join(PLACE)).unwrap();
    let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let files = files.filter_map(|file| Some(format!("{}.md", file.strip_suffix(".txt")?)));
    assert_eq!(names.collect::<BTreeSet<_>>(), files.collect::<BTreeSet<_>>());
}

#[test]
fn the_commands_of_certificates() {
    run("docs/CERTIFICATES");
}

#[test]
fn the_commands_of_image_format() {
    run("docs/IMAGE-FORMAT");
}

#[test]
fn the_commands_of_images() {
    run("docs/IMAGES");
}

#[test]
fn the_commands_of_operating() {
    run("docs/OPERATING");
}

#[test]
fn the_commands_of_provisioning() {
    run("docs/PROVISIONING");
}

#[test]
fn the_commands_of_the_readme() {
    run("README");
}

#[test]
fn the_commands_of_rollouts() {
    run("docs/ROLLOUTS");
}

#[test]
fn the_commands_of_security() {
    run("docs/SECURITY");
}

#[test]
fn the_commands_of_signing() {
    run("docs/SIGNING");
}

#[test]
fn the_commands_of_tasks() {
    run("docs/TASKS");
}
