//! The commands of the document on images, from debootstrap to `synced`: they are taken from the
//! document and run, with a real systemd in a container, and with the filter for Debian.
//!
//! `DEBIAN_TREES` names a directory with the tree `systemd`, as `.ci/debian-trees` makes it: a
//! stand-in for debootstrap copies it. Without it the test says that it is skipped.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use localfleet::programs;

/// The section whose commands are run.
const SECTION: &str = "## From debootstrap to `synced`\n";

/// An address on which nothing else listens.
const ADDRESS: &str = "127.21.0.1";

/// Ends all that was started. A container shuts down in good order.
const START: &str = "set -e\ntrap 'kill $(jobs -p); wait' EXIT\n";

/// What the machine says of itself, when it has started everything.
const END: &str = r#"
set -- $(jobs -p)
children=/proc/$2/task/$2/children
inside() { nsenter --all --target $(cat $children) -- "$@"; }
exec 3> said
inside systemctl is-system-running --wait >&3
inside systemctl is-enabled subd subd-recover >&3
domtool --insecure fast-update web1 >&3
domtool --insecure events | sed -n 's/.* update  web1 *//p' >&3
ls machine/var/log/journal/*/system.journal >&3
"#;

/// The commands of the section, in their order.
fn commands(document: &str) -> String {
    let (_, section) = document.split_once(SECTION).unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let blocks = section.split("```sh\n").skip(1);
    blocks.map(|block| block.split_once("```").unwrap().0).collect()
}

/// Makes the programs of the fleet, and one that copies `tree` as debootstrap would make it.
fn install(place: &Path, tree: &Path) {
    let bin = place.join("target/dist");
    fs::create_dir(place.join("target")).unwrap();
    programs::install(Path::new(env!("CARGO_BIN_EXE_localfleet")), &bin).unwrap();
    let copies =
        format!("#!/bin/sh -e\ntest $# = 4\ncp -a --reflink=auto '{}' $4\n", tree.display());
    let debootstrap = bin.join("debootstrap");
    fs::write(&debootstrap, copies).unwrap();
    fs::set_permissions(&debootstrap, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_commands_of_the_document_lead_to_a_machine_that_is_synced() {
    let Some(trees) = std::env::var_os("DEBIAN_TREES") else {
        eprintln!("skipped: DEBIAN_TREES is not set; `.ci/debian-trees DIR` makes the trees");
        return;
    };
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let document = fs::read_to_string(sources.join("docs/IMAGES.md")).unwrap();
    let place = tempfile::tempdir().unwrap();
    install(place.path(), &Path::new(&trees).join("systemd").canonicalize().unwrap());
    symlink(sources.join("packaging"), place.path().join("packaging")).unwrap();
    let script = commands(&document).replace("127.0.0.1", ADDRESS);
    let path = format!(
        "{}:{}",
        place.path().join("target/dist").display(),
        std::env::var("PATH").unwrap()
    );
    let log = fs::File::create(place.path().join("log")).unwrap();
    let status = Command::new("timeout")
        .args(["300", "bash", "-c", &format!("{START}{script}{END}")])
        .current_dir(place.path())
        .env("PATH", path)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .status()
        .unwrap();
    let read = |name: &str| fs::read_to_string(place.path().join(name)).unwrap_or_default();
    let log = read("log");
    assert!(status.success(), "{status}\n{log}\n{}\n{}", read("console"), read("said"));
    assert!(!log.contains("warning: "), "{log}");
    let said = read("said");
    let (before, journal) = said.trim_end().rsplit_once('\n').unwrap();
    // Nothing that the machine wrote while it started was taken back.
    let expected = "running\nenabled\nenabled\nweb1: synced: equals base/debian-12.2\n\
        to base/debian-12.1: no changes: done\n\
        to base/debian-12.2 from base/debian-12.1: 1 path (image): done";
    assert_eq!(before, expected);
    assert!(journal.starts_with("machine/var/log/journal/"), "{journal}");
}
