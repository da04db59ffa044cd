//! Runs the command lines of the documents as they are printed, in a copy of this machine's
//! file-system that nobody else sees, with a network of its own, daemons and managed machines.
//!
//! For each document, `executed/DOCUMENT.txt` has all of its command lines in their order, and
//! before each what it must exit with; with `t` after it if SIGTERM has to end the command. `-`
//! stands before what is not run here; a comment says why. Lines with `!` prepare what the next
//! commands need, and those with `=` have a text that the command before them must print.
//! `executed/world.sh` has the machines, and `/place/json.1` is the first block of JSON.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use testing::document::blocks;

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
mount -t sysfs sysfs root/sys
mount --rbind /dev root/dev
mkdir -p root/repository root/place root/usr/local/bin
mount --bind "$REPOSITORY" root/repository
mount -o remount,bind,ro root/repository
mount --bind "$PLACE" root/place
rm -f root/usr/local/bin/localfleet
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
    /// What it must exit with, with or without `t`; or one of `-`, `!` and `=`.
    code: &'a str,
    text: &'a str,
}

impl Row<'_> {
    fn is_of_document(&self) -> bool {
        !["!", "="].contains(&self.code)
    }
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
        let command = row.is_of_document().then(|| commands.next().expect("they were compared"));
        let here_document = command.map_or("", |command| &command.here_document);
        let verb = match row.code {
            "-" => continue,
            "!" => "prepare".to_owned(),
            "=" => "prints".to_owned(),
            code => format!("run {code}"),
        };
        let text = format!("{}\n{here_document}", row.text);
        script.push_str(&format!("{verb} {}\n", quoted(text.trim_end())));
    }
    script + "exit $failed\n"
}

/// Runs the command lines of a document. The exit codes must be the expected ones.
fn run(name: &str) {
    let document = documents().remove(name).unwrap();
    let expected = repository().join(PLACE).join(Path::new(name).file_name().unwrap());
    let expected = fs::read_to_string(expected.with_extension("txt")).unwrap();
    let (rows, lines) = (rows(&expected), shell_lines_of(&document));
    let commands: Vec<&str> =
        rows.iter().filter(|row| row.is_of_document()).map(|row| row.text).collect();
    let printed: Vec<&str> = lines.iter().map(|line| &*line.text).collect();
    assert_eq!(commands, printed, "the command lines of {name}");
    let directory = tempfile::tempdir().unwrap();
    let [place, copy] = ["place", "copy"].map(|name| directory.path().join(name));
    fs::create_dir(&place).unwrap();
    fs::create_dir(&copy).unwrap();
    fs::write(place.join("script"), script(&rows, &lines)).unwrap();
    for (number, text) in (1..).zip(blocks(&document, "json")) {
        fs::write(place.join(format!("json.{number}")), text).unwrap();
    }
    let output = Command::new("timeout")
        .args("--signal=KILL 600 unshare --mount --net --pid --fork --kill-child sh -c".split(' '))
        .arg(ENTER)
        .env("COPY", &copy)
        .env("PLACE", &place)
        .env("REPOSITORY", repository())
        .env("BINARY", env!("CARGO_BIN_EXE_localfleet"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}\n{said}", output.status);
}

/// The documents whose commands are not run here: those of PROTOCOL.md are curl's, which
/// `with_daemons.rs` runs; the others build, measure and test the project itself.
const RUN_ELSEWHERE: [&str; 3] = ["docs/PERFORMANCE.md", "docs/PROTOCOL.md", "docs/TESTING.md"];

/// Makes a test of each document.
macro_rules! run_documents {
    ($($test:ident: $name:literal,)*) => {
        const RUN: &[&str] = &[$($name),*];
        $(
            #[test]
            fn $test() {
                run($name);
            }
        )*
    };
}

run_documents! {
    commands_of_certificates: "docs/CERTIFICATES.md",
    commands_of_image_format: "docs/IMAGE-FORMAT.md",
    commands_of_images: "docs/IMAGES.md",
    commands_of_operating: "docs/OPERATING.md",
    commands_of_provisioning: "docs/PROVISIONING.md",
    commands_of_readme: "README.md",
    commands_of_rollouts: "docs/ROLLOUTS.md",
    commands_of_security: "docs/SECURITY.md",
    commands_of_signing: "docs/SIGNING.md",
    commands_of_tasks: "docs/TASKS.md",
}

#[test]
fn each_document_with_commands_is_run() {
    let documents = documents().into_iter().filter(|(_, text)| !shell_lines_of(text).is_empty());
    let names: BTreeSet<String> = documents.map(|(name, _)| name).collect();
    let run = RUN.iter().chain(&RUN_ELSEWHERE).map(|name| (*name).to_owned());
    assert_eq!(names, run.collect());
}
