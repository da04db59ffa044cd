//! Paths that cannot be changed: each is found before anything is disturbed where that is possible,
//! is reported, and the rest is changed without it.

use std::os::unix::fs::{MetadataExt, chown};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use api::subd::{Activity, GetRefusedChanges, UpdateOutcome};
use model::plan::{Blocked, Obstacle, RefusedKind};
use model::tree::text::to_text;
use model::tree::{Device, Leaf, Metadata, Node, Special, Time, Tree, Xattrs};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::kinds::Disk;
use super::{in_own_mounts, mount_tmpfs, run, unmount};
use crate::fixture::{Edit, Source, Sub, file, path, request};
use crate::process::Process;

/// Makes the tree equal to what `edit` gives, from an empty one.
async fn start(sub: &Sub, source: &Source, edit: impl Fn(Edit<'_>) -> Edit<'_>) -> Tree {
    let (_, empty) = sub.tree().await;
    let first = edit(Edit::of(&empty, source)).done();
    assert_eq!(sub.converge(1, source, &first).await.outcome, UpdateOutcome::Done);
    first
}

/// Stages an update to `want`. Returns why it cannot be staged; nothing if it can.
async fn staging_failure(sub: &Sub, id: u64, source: &Source, want: &Tree) -> String {
    let (_, plan) = sub.plan(want).await;
    sub.fetch_for(id, source, &plan).await;
    let (reply, plan) = sub.plan(want).await;
    let reply = sub.prepare(&request(id, &reply, want, plan.without_blocked())).await.unwrap();
    if reply.activity == (Activity::Prepared { update_id: id }) {
        return String::new();
    }
    match reply.last_update.unwrap().outcome {
        UpdateOutcome::NotPrepared(why) => why,
        other => panic!("{other:?}"),
    }
}

/// The refused changes: path and kind.
async fn refused(sub: &Sub) -> Vec<String> {
    let reply = sub.client.call::<GetRefusedChanges>(&()).await.unwrap();
    let shown = reply.changes.iter().map(|refused| {
        let kind = match &refused.kind {
            RefusedKind::Any => "any",
            RefusedKind::Become(_) => "become",
            RefusedKind::Removal => "removal",
            RefusedKind::Below => "below",
            RefusedKind::Boundary => "boundary",
            RefusedKind::LeftAlone => "left alone",
        };
        format!("{kind} {}", refused.path)
    });
    shown.collect()
}

async fn blocked(sub: &Sub, want: &Tree) -> Vec<String> {
    let (_, plan) = sub.plan(want).await;
    plan.blocked.iter().map(|blocked| blocked.path.to_string()).collect()
}

fn large_attribute(metadata: &mut Metadata) {
    let attribute = (b"user.large".to_vec(), vec![b'x'; 8_000]);
    metadata.xattrs = Xattrs::from_iter([attribute]);
}

#[test]
fn attributes_that_the_file_system_does_not_take_are_left_out_with_all_that_needs_them() {
    in_own_mounts(async || {
        let disk = Disk::new("ext4", "mkfs.ext4 -q -O ^ea_inode", 64);
        let (sub, source) = (Sub::start_on(disk.path(), &[]).await, Source::start().await);
        let first = start(&sub, &source, |edit| edit.directory("/d", 0o755).file("/ok", "1")).await;
        let mut large = Metadata::new(0o644, 0, 0);
        large_attribute(&mut large);
        let want = Edit::of(&first, &source)
            .put("/big", file(&source, "big", large.clone()))
            .link("/linked", "/big")
            .metadata("/d", large_attribute)
            .directory("/new", 0o755)
            .put("/new/big", file(&source, "big", large))
            .file("/new/file", "new")
            .file("/ok", "2")
            .done();
        let why = staging_failure(&sub, 2, &source, &want).await;
        assert!(why.starts_with("/big cannot be changed: cannot set an extended attr"), "{why}");
        assert!(why.ends_with("(and 2 other paths)"), "{why}");
        assert_eq!(refused(&sub).await, ["become /big", "become /d", "become /new/big"]);
        assert_eq!(blocked(&sub, &want).await, ["/big", "/d", "/linked", "/new/big"]);
        let unreadable = sub.poll().await.scan.unwrap().unreadable;
        assert_eq!(unreadable.len(), 3);
        assert!(unreadable[0].1.starts_with("not changed: cannot set"), "{unreadable:?}");
        assert_eq!(sub.converge(3, &source, &want).await.outcome, UpdateOutcome::Done);
        let (_, left) = sub.plan(&want).await;
        assert_eq!(left.operations, []);
        let content = |path| std::fs::read_to_string(sub.at(path)).unwrap();
        assert_eq!((content("/ok"), content("/new/file")), ("2".to_owned(), "new".to_owned()));
        assert!(!sub.at("/big").exists() && !sub.at("/new/big").exists());
        // Another image may require what the file-system takes.
        let next = Edit::of(&want, &source)
            .file("/big", "big")
            .metadata("/d", |metadata| metadata.xattrs = Xattrs::default())
            .file("/new/big", "big")
            .done();
        assert_eq!(sub.converge(4, &source, &next).await.outcome, UpdateOutcome::Done);
        assert_eq!(to_text(&sub.tree().await.1), to_text(&next));
        source.stop().await;
        sub.stop().await;
    });
}

#[test]
fn directories_that_an_overlay_does_not_move_are_removed_entry_by_entry() {
    in_own_mounts(async || {
        let place = tempfile::tempdir().unwrap();
        mount_tmpfs(place.path());
        let shown = place.path().display();
        run(&format!(
            "cd {shown}; mkdir -p lower/becomes/e lower/gone/e upper work root; \
             echo f > lower/becomes/e/f; echo g > lower/gone/e/g; chmod 2751 lower/gone/e; \
             mount -t overlay none root \
             -o redirect_dir=off,lowerdir=lower,upperdir=upper,workdir=work"
        ));
        let root = place.path().join("root");
        let (sub, source) = (Sub::start_on(&root, &[]).await, Source::start().await);
        let (_, first) = sub.tree().await;
        for path in ["/becomes/e/f", "/gone/e/g"] {
            let content = std::fs::read(sub.at(path)).unwrap();
            source.add(&content);
        }
        let want =
            Edit::of(&first, &source).remove("/gone").remove("/becomes").file("/becomes", "file");
        let want = want.done();
        // The last step fails: all is as it was, the removed directories included.
        assert_eq!(staging_failure(&sub, 1, &source, &want).await, "");
        std::fs::write(sub.at("/gone/unexpected"), "precious").unwrap();
        let last = sub.commit(1).await;
        let why = "/gone changed since it was scanned: it holds something that is not in the scan";
        assert_eq!(last.outcome, UpdateOutcome::RolledBack(why.to_owned()));
        std::fs::remove_file(sub.at("/gone/unexpected")).unwrap();
        assert_eq!(to_text(&sub.rescanned().await), to_text(&first));
        for (id, tree) in [(2, &want), (3, &first), (4, &want)] {
            assert_eq!(sub.converge(id, &source, tree).await.outcome, UpdateOutcome::Done);
            assert_eq!(to_text(&sub.tree().await.1), to_text(tree));
        }
        source.stop().await;
        sub.stop().await;
        unmount(&root);
    });
}

#[test]
fn what_is_in_a_directory_with_a_project_id_is_left_out() {
    in_own_mounts(async || {
        let disk = Disk::new("xfs", "mkfs.xfs -q", 320);
        let (sub, source) = (Sub::start_on(disk.path(), &[]).await, Source::start().await);
        let first = start(&sub, &source, |edit| {
            edit.directory("/p", 0o755).file("/p/f", "1").file("/p/g", "1").file("/q", "1")
        });
        let first = first.await;
        run(&format!("chattr -p 42 +P {}", sub.at("/p").display()));
        let want = Edit::of(&first, &source).file("/p/f", "2").file("/p/g", "2").file("/q", "2");
        let want = want.done();
        let why = staging_failure(&sub, 2, &source, &want).await;
        let expected = "/p cannot be changed: its directory has a project id, and nothing can be \
                        moved into it (and 1 other paths)";
        assert_eq!(why, expected);
        assert_eq!(refused(&sub).await, ["below /p"]);
        assert_eq!(sub.converge(3, &source, &want).await.outcome, UpdateOutcome::Done);
        assert_eq!(blocked(&sub, &want).await, ["/p/f", "/p/g"]);
        assert_eq!(std::fs::read(sub.at("/q")).unwrap(), b"2");
        source.stop().await;
        sub.stop().await;
    });
}

/// Sets a policy of encryption on a new directory, with a key that goes with the file-system.
const ENCRYPT: &str = "
import fcntl, os, struct, sys
os.mkdir(sys.argv[1], 0o755)
directory = os.open(sys.argv[1], os.O_RDONLY)
key = bytearray(struct.pack('II32sII32s', 2, 0, b'', 64, 0, b'') + b'k' * 64)
fcntl.ioctl(directory, 0xc0506617, key)
policy = struct.pack('BBBBB3s', 2, 1, 4, 3, 0, b'') + bytes(key[8:24])
fcntl.ioctl(directory, 0x800c6613, policy)
";

#[test]
fn what_is_in_an_encrypted_directory_is_left_out() {
    in_own_mounts(async || {
        let disk = Disk::new("ext4", "mkfs.ext4 -q -O encrypt", 64);
        run(&format!("python3 -c \"{ENCRYPT}\" {}/e", disk.path().display()));
        std::fs::write(disk.path().join("e/f"), "1").unwrap();
        std::fs::write(disk.path().join("e/gone"), "1").unwrap();
        let (sub, source) = (Sub::start_on(disk.path(), &[]).await, Source::start().await);
        let (_, first) = sub.tree().await;
        source.add(b"1");
        let want = Edit::of(&first, &source)
            .file("/e/f", "2")
            .file("/e/new", "2")
            .remove("/e/gone")
            .file("/ok", "2")
            .done();
        let why = staging_failure(&sub, 1, &source, &want).await;
        let expected =
            "/e cannot be changed: its directory is encrypted, and nothing can be moved into it";
        assert!(why.starts_with(expected), "{why}");
        assert_eq!(refused(&sub).await, ["below /e"]);
        assert_eq!(sub.converge(2, &source, &want).await.outcome, UpdateOutcome::Done);
        assert_eq!(blocked(&sub, &want).await, ["/e/f", "/e/gone", "/e/new"]);
        assert_eq!(std::fs::read(sub.at("/ok")).unwrap(), b"2");
        assert_eq!(std::fs::read(sub.at("/e/f")).unwrap(), b"1");
        source.stop().await;
        sub.stop().await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn owners_outside_of_the_user_namespace_are_left_out() {
    let place = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new("unshare");
    // Only root is mapped.
    command.args(["--user", "--map-root-user", "--mount", "--"]);
    command.arg(env!("CARGO_BIN_EXE_subd"));
    let process = Process::run(command, place.path());
    let sub = Sub::elsewhere(place.path(), process.client.clone());
    let source = Source::start().await;
    let (_, empty) = sub.tree().await;
    let foreign = file(&source, "owned", Metadata::new(0o644, 5_000, 0));
    let want = Edit::of(&empty, &source).put("/foreign", foreign).file("/ok", "1").done();
    let why = staging_failure(&sub, 1, &source, &want).await;
    assert!(why.starts_with("/foreign cannot be changed: cannot change the owner of"), "{why}");
    assert_eq!(refused(&sub).await, ["become /foreign"]);
    assert_eq!(sub.converge(2, &source, &want).await.outcome, UpdateOutcome::Done);
    assert_eq!(blocked(&sub, &want).await, ["/foreign"]);
    assert_eq!(std::fs::read(sub.at("/ok")).unwrap(), b"1");
    source.stop().await;
    assert_eq!(process.stop(), Some(0));
}

#[test]
fn a_directory_of_the_image_that_is_a_subvolume_is_a_boundary() {
    in_own_mounts(async || {
        // As systemd-tmpfiles makes /var/lib/machines and /var/lib/portables.
        let disk = Disk::new("btrfs", "mkfs.btrfs -q", 128);
        let (sub, source) = (Sub::start_on(disk.path(), &[]).await, Source::start().await);
        let first = start(&sub, &source, |edit| edit.directory("/lib", 0o755)).await;
        run(&format!("btrfs subvolume create {} >/dev/null", sub.at("/lib/machines").display()));
        sub.rescanned().await;
        let want = Edit::of(&first, &source).directory("/lib/machines", 0o700).file("/ok", "1");
        let want = want.done();
        for id in 2..5 {
            let (_, plan) = sub.plan(&want).await;
            if plan.operations.is_empty() {
                break;
            }
            sub.fetch_for(id, &source, &plan).await;
            if staging_failure(&sub, id, &source, &want).await.is_empty() {
                assert_eq!(sub.commit(id).await.outcome, UpdateOutcome::Done);
            }
        }
        assert_eq!(std::fs::read(sub.at("/ok")).unwrap(), b"1");
        // It holds no image back: `model::plan::first_that_holds`.
        let (_, plan) = sub.plan(&want).await;
        let boundary = Blocked { path: path("/lib/machines"), why: Obstacle::Boundary };
        assert_eq!((plan.operations, plan.blocked), (Vec::new(), vec![boundary]));
        source.stop().await;
        sub.stop().await;
    });
}

#[test]
fn subvolumes_and_sockets_are_left_as_they_are() {
    in_own_mounts(async || {
        let disk = Disk::new("btrfs", "mkfs.btrfs -q", 128);
        let (sub, source) = (Sub::start_on(disk.path(), &[]).await, Source::start().await);
        let first = start(&sub, &source, |edit| edit.file("/ok", "1")).await;
        run(&format!("btrfs subvolume create {} >/dev/null", sub.at("/volume").display()));
        let _socket = std::os::unix::net::UnixListener::bind(sub.at("/socket")).unwrap();
        let want = Edit::of(&first, &source)
            .file("/ok", "2")
            .file("/socket", "no socket")
            .directory("/volume", 0o755)
            .file("/volume/file", "in it")
            .done();
        sub.rescanned().await;
        let why = staging_failure(&sub, 2, &source, &want).await;
        let expected = "/socket cannot be changed: it changed since it was scanned: something is \
                        there now (and 1 other paths)";
        assert_eq!(why, expected);
        // The socket may have been made a moment ago.
        assert_eq!(refused(&sub).await, ["boundary /volume"]);
        let why = staging_failure(&sub, 3, &source, &want).await;
        assert_eq!(why, expected.trim_end_matches(" (and 1 other paths)"));
        assert_eq!(refused(&sub).await, ["any /socket", "boundary /volume"]);
        assert_eq!(sub.converge(4, &source, &want).await.outcome, UpdateOutcome::Done);
        assert_eq!(blocked(&sub, &want).await, ["/socket", "/volume", "/volume/file"]);
        assert_eq!(std::fs::read(sub.at("/ok")).unwrap(), b"2");
        source.stop().await;
        sub.stop().await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_that_subd_may_not_make_are_left_out() {
    let place = tempfile::tempdir().unwrap();
    let process = Process::start_without("mknod", place.path());
    let sub = Sub::elsewhere(place.path(), process.client.clone());
    let source = Source::start().await;
    let (_, empty) = sub.tree().await;
    let device = Special {
        metadata: Metadata::new(0o600, 0, 0),
        mtime: Time { seconds: 1_600_000_000, nanoseconds: 0 },
        device: Device::Character { major: 1, minor: 3 },
    };
    let want = Edit::of(&empty, &source)
        .put("/null", Node::Leaf(Leaf::Special(device)))
        .file("/ok", "1")
        .done();
    let why = staging_failure(&sub, 1, &source, &want).await;
    assert!(why.starts_with("/null cannot be changed: cannot make the special file"), "{why}");
    assert_eq!(sub.converge(2, &source, &want).await.outcome, UpdateOutcome::Done);
    assert_eq!(blocked(&sub, &want).await, ["/null"]);
    source.stop().await;
    assert_eq!(process.stop(), Some(0));
}

#[test]
fn subd_does_not_start_if_its_own_directory_is_a_subvolume() {
    in_own_mounts(async || {
        let disk = Disk::new("btrfs", "mkfs.btrfs -q", 128);
        let own = disk.path().join(".subd");
        run(&format!("btrfs subvolume create {} >/dev/null", own.display()));
        let output = crate::process::output(disk.path(), &["--insecure"]);
        let said = String::from_utf8(output.stderr).unwrap();
        let why = "/.subd is on another file-system than the root, such as a btrfs subvolume";
        assert!(output.status.code() == Some(1) && said.contains(why), "{said}");
    });
}

/// Repeats `act` in a thread until the returned value is dropped.
struct Busy(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Busy {
    fn start(mut act: impl FnMut(u64) + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let acting = std::thread::spawn(move || {
            let mut number = 0;
            while !is_over.load(Ordering::Relaxed) {
                act(number);
                number += 1;
            }
        });
        Self(stop, Some(acting))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.take().unwrap().join().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_written_all_the_time_is_replaced() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let first = start(&sub, &source, |edit| edit.file("/busy", "1").file("/ok", "1")).await;
    let before = std::fs::metadata(sub.at("/busy")).unwrap().ino();
    let at = sub.at("/busy");
    let writing = Busy::start(move |number| {
        // Not `write`: it would make the file anew.
        let file = std::fs::OpenOptions::new().write(true).open(&at).unwrap();
        std::os::unix::fs::FileExt::write_at(&file, number.to_string().as_bytes(), 0).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1));
    });
    let want = Edit::of(&first, &source).file("/busy", "2").file("/ok", "2").done();
    assert_eq!(staging_failure(&sub, 2, &source, &want).await, "");
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(sub.commit(2).await.outcome, UpdateOutcome::Done);
    assert_ne!(std::fs::metadata(sub.at("/busy")).unwrap().ino(), before);
    drop(writing);
    // What was written after the update is known once it was scanned.
    sub.rescanned().await;
    assert_eq!(sub.converge(3, &source, &want).await.outcome, UpdateOutcome::Done);
    assert_eq!(to_text(&sub.rescanned().await), to_text(&want));
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_swaps_entries_holds_back_his_own_directory_only() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let first = start(&sub, &source, |edit| {
        edit.put("/home", Node::Directory(Metadata::new(0o755, 1_000, 1_000)))
            .file("/home/a", "1")
            .directory("/home/b", 0o755)
            .file("/etc", "1")
    });
    let first = first.await;
    chown(sub.at("/home/a"), Some(1_000), Some(1_000)).unwrap();
    let (a, b) = (sub.at("/home/a"), sub.at("/home/b"));
    let swapping = Busy::start(move |_| {
        let exchange = RenameFlags::RENAME_EXCHANGE;
        let _may_be_gone = renameat2(AT_FDCWD, &a, AT_FDCWD, &b, exchange);
    });
    let want = Edit::of(&first, &source).file("/home/a", "2").file("/etc", "2").done();
    let mut outcomes = Vec::new();
    for id in 2..100 {
        if staging_failure(&sub, id, &source, &want).await.is_empty() {
            outcomes.push(sub.commit(id).await.outcome);
        }
        if std::fs::read(sub.at("/etc")).unwrap() == b"2" {
            break;
        }
    }
    drop(swapping);
    assert_eq!(outcomes.pop(), Some(UpdateOutcome::Done), "{outcomes:?}");
    source.stop().await;
    sub.stop().await;
}

/// Changes of files that are in the lower layer of an overlay, some with other names or an ACL.
async fn change_lower_layer(root: &std::path::Path) {
    let (sub, source) = (Sub::start_on(root, &[]).await, Source::start().await);
    let (_, first) = sub.tree().await;
    let want = Edit::of(&first, &source)
        .metadata("/acl", |metadata| metadata.uid = 7)
        .metadata("/changed", |metadata| metadata.mode = 0o600)
        .file("/linked-1", "replaced")
        .remove("/linked-2")
        .metadata("/other-1", |metadata| metadata.mode = 0o600)
        .link("/other-3", "/other-1")
        .file("/replaced", "new")
        .remove("/removed")
        .done();
    assert_eq!(sub.converge(1, &source, &want).await.outcome, UpdateOutcome::Done);
    assert_eq!(to_text(&sub.rescanned().await), to_text(&want));
    source.stop().await;
    sub.stop().await;
}

const LOWER_LAYER: &str = "echo 1 > acl; setfacl -m u:7:r acl; echo 2 > changed; \
                           echo 3 > linked-1; ln linked-1 linked-2; ln linked-1 linked-3; \
                           echo 4 > other-1; \
                           ln other-1 other-2; echo 5 > replaced; echo 6 > removed";

#[test]
fn the_root_may_be_a_live_system_with_hard_links_and_acls_in_its_image() {
    in_own_mounts(async || {
        let place = tempfile::tempdir().unwrap();
        mount_tmpfs(place.path());
        let shown = place.path().display();
        run(&format!(
            "cd {shown}; mkdir files lower upper work root; cd files; {LOWER_LAYER}; cd ..; \
             mksquashfs files image -quiet -no-progress >/dev/null; \
             mount -t squashfs -o loop image lower; \
             mount -t overlay none root -o lowerdir=lower,upperdir=upper,workdir=work"
        ));
        change_lower_layer(&place.path().join("root")).await;
    });
}

#[test]
fn the_root_may_be_fuse_overlay() {
    in_own_mounts(async || {
        let place = tempfile::tempdir().unwrap();
        mount_tmpfs(place.path());
        let shown = place.path().display();
        run(&format!(
            "cd {shown}; mkdir lower upper work root; cd lower; {LOWER_LAYER}; cd ..; \
             fuse-overlayfs -o lowerdir=lower,upperdir=upper,workdir=work root"
        ));
        change_lower_layer(&place.path().join("root")).await;
    });
}
