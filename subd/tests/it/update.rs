//! Updates that succeed: every kind of operation, and what is seen of it.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use api::subd::{Activity, UpdateOutcome};
use model::path::TreePath;
use model::tree::{Device, Leaf, Metadata, Node, Special, Time, Tree, Xattrs};

use crate::fixture::{Edit, Source, Sub, file, path};

/// Converges to `want`; the sub itself must see it, and an own look too.
async fn converge(sub: &Sub, id: u64, source: &Source, want: &Tree) {
    let last = sub.converge(id, source, want).await;
    assert_eq!(last.outcome, UpdateOutcome::Done);
    let reply = sub.poll().await;
    assert!(last.verified_generation.is_some_and(|at| at <= reply.version.generation));
    let (reply, have) = sub.tree().await;
    if have.digest() != want.digest() {
        assert_eq!(model::tree::text::to_text(&have), model::tree::text::to_text(want));
    }
    assert_eq!(reply.activity, Activity::Idle);
    assert_eq!(reply.last_image.unwrap().as_str(), format!("test/{id}"));
    let undo = sub.at("/.subd/staging");
    assert_eq!(std::fs::read_dir(undo).unwrap().count(), 0);
}

fn metadata(mode: u32, uid: u32, gid: u32, xattrs: &[(&str, &[u8])]) -> Metadata {
    let xattrs = xattrs.iter().map(|(key, value)| (key.as_bytes().to_vec(), value.to_vec()));
    Metadata { mode, uid, gid, xattrs: xattrs.collect::<Xattrs>() }
}

/// `cap_net_raw+ep`.
const CAPABILITY: &[u8] = &[1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// `user::rw-,user:1:r--,group::r--,mask::r--,other::---`.
const ACL: &[u8] = &[
    2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 1, 0, 0, 0, 4, 0, 4, 0, 255, 255, 255,
    255, 16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
];

#[tokio::test(flavor = "multi_thread")]
async fn installs_every_kind_of_entry_and_takes_it_away_again() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let special = |device, mode| {
        let mtime = Time { seconds: 1, nanoseconds: 2 };
        Node::Leaf(Leaf::Special(Special { metadata: Metadata::new(mode, 3, 4), mtime, device }))
    };
    let odd = TreePath::new(b"/d/\xff\xfe\n").unwrap();
    let want = Edit::of(&empty, &source)
        .directory("/d", 0o1777)
        .directory("/d/deep", 0o700)
        .file("/d/deep/file", "one")
        .file("/same", "one")
        .file("/empty", "")
        .symlink("/link", "/nowhere")
        .put("/fifo", special(Device::Fifo, 0o640))
        .put("/null", special(Device::Character { major: 1, minor: 3 }, 0o666))
        .put("/disk", special(Device::Block { major: 7, minor: 9 }, 0o660))
        .put("/suid", file(&source, "suid", metadata(0o6755, 5, 6, &[])))
        .put(
            "/caps",
            file(&source, "caps", metadata(0o755, 0, 7, &[("security.capability", CAPABILITY)])),
        )
        .put(
            "/acl",
            file(
                &source,
                "acl",
                metadata(
                    0o640,
                    0,
                    0,
                    &[("system.posix_acl_access", ACL), ("user.origin", b"\x00\xff")],
                ),
            ),
        )
        .put_at(odd, file(&source, "odd", Metadata::new(0o600, 0, 0)))
        .link("/z-linked", "/same")
        .link("/d/also", "/same")
        .done();
    converge(&sub, 1, &source, &want).await;
    assert_eq!(std::fs::read(sub.at("/d/deep/file")).unwrap(), b"one");
    assert!(std::fs::symlink_metadata(sub.at("/fifo")).unwrap().file_type().is_fifo());
    assert_eq!(std::fs::metadata(sub.at("/suid")).unwrap().mode(), 0o106_755);
    let inode = |name: &str| std::fs::metadata(sub.at(name)).unwrap().ino();
    assert_eq!([inode("/same"), inode("/same")], [inode("/z-linked"), inode("/d/also")]);
    let name = std::ffi::OsStr::from_bytes(b"\xff\xfe\n");
    assert_eq!(std::fs::read(sub.at("/d").join(name)).unwrap(), b"odd");
    let reply = sub.poll().await;
    assert_eq!(reply.cache, Some(api::subd::CacheReport::Full(Vec::new())));
    converge(&sub, 2, &source, &empty).await;
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_every_kind_of_entry_into_another() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let first = Edit::of(&empty, &source)
        .directory("/becomes-file", 0o755)
        .directory("/becomes-file/below", 0o755)
        .file("/becomes-file/below/x", "x")
        .file("/becomes-directory", "y")
        .symlink("/becomes-symlink", "a")
        .file("/content", "old")
        .file("/mode", "mode")
        .file("/owner", "owner")
        .file("/mtime", "mtime")
        .put("/privileged", file(&source, "p", metadata(0o4755, 1, 1, &[])))
        .directory("/goes", 0o755)
        .file("/goes/too", "z")
        .directory("/stays", 0o755)
        .done();
    converge(&sub, 1, &source, &first).await;
    let second = Edit::of(&first, &source)
        .remove("/becomes-file")
        .file("/becomes-file", "now a file")
        .directory("/becomes-directory", 0o750)
        .file("/becomes-directory/new", "new")
        .symlink("/becomes-symlink", "b")
        .file("/content", "new content")
        .metadata("/mode", |metadata| metadata.mode = 0o4711)
        .metadata("/owner", |metadata| (metadata.uid, metadata.gid) = (8, 9))
        .metadata("/privileged", |metadata| metadata.uid = 2)
        .metadata("/stays", |found| {
            *found = metadata(0o2750, 3, 4, &[("user.a", b"b")]);
        })
        .metadata("/", |found| {
            *found = metadata(0o711, 0, 5, &[("user.root", b"r")]);
        })
        .remove("/goes")
        .done();
    converge(&sub, 2, &source, &second).await;
    converge(&sub, 3, &source, &first).await;
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn regroups_hard_links() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let base = Edit::of(&empty, &source).directory("/d", 0o755).file("/a", "A").file("/n", "N");
    let first = base.link("/b", "/a").link("/c", "/a").link("/m", "/n").done();
    converge(&sub, 1, &source, &first).await;
    let second = Edit::of(&empty, &source)
        .directory("/d", 0o755)
        .file("/a", "A")
        .file("/n", "N")
        .link("/b", "/n")
        .link("/c", "/n")
        .link("/d/a", "/a")
        .file("/m", "A")
        .directory("/new", 0o755)
        .link("/new/link", "/a")
        .done();
    converge(&sub, 2, &source, &second).await;
    converge(&sub, 3, &source, &first).await;
    let inode = |name: &str| std::fs::metadata(sub.at(name)).unwrap().ino();
    assert_eq!([inode("/a"), inode("/a")], [inode("/b"), inode("/c")]);
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn repairs_drift_of_every_kind() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let want = Edit::of(&empty, &source)
        .directory("/d", 0o755)
        .file("/d/content", "content")
        .file("/d/mode", "mode")
        .file("/d/deleted", "deleted")
        .symlink("/d/symlink", "right")
        .done();
    converge(&sub, 1, &source, &want).await;
    std::fs::write(sub.at("/d/content"), "tampered").unwrap();
    std::fs::remove_file(sub.at("/d/deleted")).unwrap();
    std::fs::write(sub.at("/d/added"), "added").unwrap();
    std::fs::remove_file(sub.at("/d/symlink")).unwrap();
    std::os::unix::fs::symlink("wrong", sub.at("/d/symlink")).unwrap();
    std::os::unix::fs::chown(sub.at("/d/mode"), Some(1), Some(1)).unwrap();
    let drifted = sub.rescanned().await;
    assert_ne!(drifted.digest(), want.digest());
    converge(&sub, 2, &source, &want).await;
    assert_eq!(path("/d/added").parent(), Some(path("/d")));
    assert!(!sub.at("/d/added").exists());
    source.stop().await;
    sub.stop().await;
}
