//! Roots on file-systems of every kind: overlay, tmpfs, btrfs, xfs, ext4 with coarse times.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use api::subd::UpdateOutcome;
use model::scope::ScanSettings;
use model::tree::text::to_text;
use model::tree::{Metadata, TimePrecision, Tree};
use subd::root::Root;
use subd::state::directories::Directories;

use super::{in_own_mounts, mount_tmpfs, run, unmount};
use crate::fixture::{Edit, Source, Sub, file, path};
use crate::process::Process;
use crate::scan::{on_demand, start_on};

/// A file-system of its own; taken away in the end.
pub struct Disk {
    at: std::path::PathBuf,
    _place: tempfile::TempDir,
}

impl Disk {
    /// Makes one with `make`, of `megabytes`, in a sparse file.
    pub fn new(kind: &str, make: &str, megabytes: u64) -> Self {
        let place = tempfile::tempdir().unwrap();
        let (image, at) = (place.path().join("image"), place.path().join("root"));
        std::fs::create_dir(&at).unwrap();
        let (image, shown) = (image.display(), at.display());
        run(&format!(
            "truncate -s {megabytes}M {image}; {make} {image} >/dev/null; \
             mount -t {kind} -o loop {image} {shown}; rm -rf {shown}/lost+found"
        ));
        Self { at, _place: place }
    }

    pub fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let flags = nix::mount::MntFlags::MNT_DETACH;
        let _unmounted = nix::mount::umount2(&self.at, flags);
    }
}

/// Changes of every kind, there and back; gives the last tree.
async fn story(at: &Path) -> (Tree, TimePrecision) {
    story_of(Sub::start_on(at, &[]).await).await
}

/// The same of a subd that runs on an empty root.
async fn story_of(sub: Sub) -> (Tree, TimePrecision) {
    let source = Source::start().await;
    let (reply, empty) = sub.tree().await;
    let first = Edit::of(&empty, &source)
        .directory("/d", 0o755)
        .directory("/empty", 0o700)
        .file("/d/f", "one")
        .file("/d/same", "same")
        .link("/d/z", "/d/same")
        .put("/setuid", file(&source, "setuid", Metadata::new(0o4755, 0, 7)))
        .symlink("/link", "d/f")
        .file("/becomes", "a directory")
        .done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
    assert_eq!(sub.plan(&first).await.1.operations, []);
    let second = Edit::of(&first, &source)
        .file("/d/f", "two")
        .remove("/d/z")
        .remove("/empty")
        .metadata("/d/same", |metadata| metadata.uid = 5)
        .symlink("/link", "d/same")
        .remove("/becomes")
        .directory("/becomes", 0o755)
        .file("/becomes/f", "f")
        .remove("/setuid")
        .done();
    assert_eq!(sub.converge(2, &source, &second).await.outcome, UpdateOutcome::Done);
    assert_eq!(sub.converge(3, &source, &first).await.outcome, UpdateOutcome::Done);
    let (_, plan) = sub.plan(&first).await;
    assert_eq!((plan.operations, plan.blocked), (Vec::new(), Vec::new()));
    let found = sub.rescanned().await;
    if reply.scan.as_ref().unwrap().times == TimePrecision::default() {
        assert_eq!(to_text(&found), to_text(&first));
    }
    source.stop().await;
    sub.stop().await;
    (found, reply.scan.unwrap().times)
}

#[test]
fn the_root_may_be_an_overlay_or_in_memory() {
    in_own_mounts(async || {
        let place = tempfile::tempdir().unwrap();
        mount_tmpfs(place.path());
        assert_eq!(story(place.path()).await.1.granularity_ns, 1);
        for below in ["lower/d", "upper", "work", "root"] {
            std::fs::create_dir_all(place.path().join(below)).unwrap();
        }
        std::fs::write(place.path().join("lower/d/f"), "from below").unwrap();
        std::fs::write(place.path().join("lower/becomes"), "from below").unwrap();
        run(&format!(
            "cd {}; rm -rf .subd; \
             mount -t overlay none -o lowerdir=lower,upperdir=upper,workdir=work root",
            place.path().display()
        ));
        story(&place.path().join("root")).await;
        assert_eq!(std::fs::read(place.path().join("lower/d/f")).unwrap(), b"from below");
        unmount(&place.path().join("root"));
        unmount(place.path());
    });
}

#[test]
fn the_root_may_be_on_btrfs_and_its_subvolumes_are_kept() {
    in_own_mounts(async || {
        let disk = Disk::new("btrfs", "mkfs.btrfs -q", 128);
        story(disk.path()).await;
        let shown = disk.path().display();
        run(&format!(
            "btrfs subvolume create {shown}/volume >/dev/null; echo x > {shown}/volume/x"
        ));
        let sub = Sub::start_on(disk.path(), &[]).await;
        let (reply, tree) = sub.tree().await;
        assert!(tree.get(&path("/volume")).is_none());
        assert_eq!(reply.scan.unwrap().kept_directories, [path("/")]);
        sub.stop().await;
    });
}

#[test]
fn the_root_may_be_on_xfs() {
    in_own_mounts(async || {
        story(Disk::new("xfs", "mkfs.xfs -q", 320).path()).await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn the_root_may_be_on_a_file_system_that_neither_exchanges_nor_refuses_to_replace() {
    let place = tempfile::tempdir().unwrap();
    // As NFS, ZFS before 2.2 and many of FUSE, for which no flag of rename is valid. The server is
    // the child, and strace that of the server.
    let mut command = Command::new("strace");
    command.args(["-D", "-f", "-q", "-o", "/dev/null", "-e", "trace=renameat2"]);
    command.args(["-e", "inject=renameat2:error=EINVAL", "--", env!("CARGO_BIN_EXE_subd")]);
    let process = Process::run(command, place.path());
    story_of(Sub::elsewhere(place.path(), process.client.clone())).await;
    let files = std::fs::read_dir(place.path().join(".subd/undo")).unwrap().count();
    assert_eq!((files, process.stop()), (0, Some(0)));
}

#[test]
fn times_that_the_file_system_rounds_do_not_make_an_endless_update() {
    in_own_mounts(async || {
        let disk = Disk::new("ext4", "mkfs.ext4 -q -I 128", 16);
        let (_, times) = story(disk.path()).await;
        let (first_seconds, last_seconds) = (-(1 << 31), (1 << 31) - 1);
        let expected = TimePrecision { granularity_ns: 1_000_000_000, first_seconds, last_seconds };
        assert_eq!(times, expected);
    });
}

#[test]
fn a_change_in_the_same_second_is_noticed_where_times_have_no_parts_of_seconds() {
    in_own_mounts(async || {
        let disk = Disk::new("ext4", "mkfs.ext4 -q -I 128", 16);
        let root = Root::open(disk.path()).unwrap();
        Directories::open(&root).unwrap();
        let at = disk.path().join("f");
        std::fs::write(&at, "one").unwrap();
        let settings = ScanSettings::default();
        let scanner = start_on(Arc::new(root), settings, &[], on_demand());
        let mut before = scanner.rescan_now().await.unwrap().report.clone().unwrap().root;
        // Long enough that a pass which forgot the second would take the file for settled.
        for content in ["two", "six", "ten"] {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let settling = scanner.rescan_now().await.unwrap().report.clone().unwrap().root;
            assert_eq!(settling, before);
            std::fs::write(&at, content).unwrap();
            let after = scanner.rescan_now().await.unwrap().report.clone().unwrap().root;
            assert_ne!(after, before, "{content}");
            before = after;
        }
        scanner.stop();
    });
}
