//! The root handle on a real file-system: what it can do, and that nothing leads out of it.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use model::path::TreePath;
use model::scope::Attributes;
use model::tree::{Device, Time};
use nix::errno::Errno;
use subd::root::{Kind, Root, RootError};
use tempfile::TempDir;

fn root() -> (TempDir, Root) {
    let directory = TempDir::new().unwrap();
    let root = Root::open(directory.path()).unwrap();
    (directory, root)
}

fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

fn errno<T: std::fmt::Debug>(result: Result<T, RootError>) -> Errno {
    result.unwrap_err().errno().unwrap()
}

#[test]
fn symlinks_and_dots_lead_nowhere() {
    let (directory, root) = root();
    let at = directory.path();
    fs::create_dir_all(at.join("a/b")).unwrap();
    symlink("/etc", at.join("absolute")).unwrap();
    symlink("..", at.join("a/up")).unwrap();
    symlink("b", at.join("a/inside")).unwrap();
    symlink("/etc/passwd", at.join("file")).unwrap();
    #[rustfmt::skip]
    let table = [
        ("/absolute", Errno::ELOOP), ("/absolute/ssl", Errno::ELOOP), ("/a/up", Errno::ELOOP),
        ("/a/up/a", Errno::ELOOP), ("/a/inside", Errno::ELOOP), ("/nothing", Errno::ENOENT),
    ];
    for (text, expected) in table {
        assert_eq!(errno(root.directory(&path(text))), expected, "{text}");
    }
    let top = root.directory(&TreePath::root()).unwrap();
    assert_eq!(errno(top.open_child(b"absolute")), Errno::ELOOP);
    assert_eq!(errno(top.open_file(b"file")), Errno::ELOOP);
    assert_eq!(errno(root.parent(&TreePath::root()).map(|(_, name)| name)), Errno::EINVAL);
    for name in [&b".."[..], b".", b"", b"a/b", b"a\0b", &[b'n'; 256]] {
        assert!(matches!(top.open_child(name), Err(RootError::BadName { .. })), "{name:?}");
        assert!(matches!(top.unlink(name), Err(RootError::BadName { .. })), "{name:?}");
        assert!(matches!(top.exchange(b"a", &top, name), Err(RootError::BadName { .. })));
    }
    assert!(at.join("a/b").is_dir());
}

#[test]
fn an_error_names_what_and_where() {
    let (_directory, root) = root();
    let top = root.directory(&TreePath::root()).unwrap();
    let shown = |error: RootError| model::display::error_chain(&error);
    let error = root.directory(&path("/a/b")).unwrap_err();
    assert_eq!(shown(error), "cannot open the directory /a/b: ENOENT: No such file or directory");
    let error = top.stat(b"odd\n\xff").unwrap_err();
    assert_eq!(
        shown(error),
        "cannot read the status of /odd\\n\\xff: ENOENT: No such file or directory"
    );
    let error = top.unlink(b"../x").unwrap_err();
    assert_eq!(shown(error), "cannot remove `../x` in /: it holds a slash");
    let error = Root::open(Path::new("/nonexistent/root")).unwrap_err();
    assert_eq!(
        shown(error),
        "cannot open the root `/nonexistent/root`: ENOENT: No such file or directory"
    );
}

#[test]
fn makes_and_changes_entries_of_every_kind() {
    let (_directory, root) = root();
    let top = root.directory(&TreePath::root()).unwrap();
    let name = b"new\nline \xff";
    top.make_directory(b"d", 0o700).unwrap();
    top.create_file(name, 0o600).unwrap().write_all(b"content").unwrap();
    assert_eq!(errno(top.create_file(name, 0o600)), Errno::EEXIST);
    top.make_symlink(b"s", b"/target\xfe").unwrap();
    top.make_special(b"fifo", Device::Fifo, 0o600).unwrap();
    let zero = Device::Character { major: 1, minor: 5 };
    top.make_special(b"zero", zero, 0o600).unwrap();
    let block = Device::Block { major: 259, minor: 70_000 };
    top.make_special(b"block", block, 0o600).unwrap();
    let expected: Vec<Box<[u8]>> =
        [&b"block"[..], b"d", b"fifo", name, b"s", b"zero"].into_iter().map(Box::from).collect();
    assert_eq!(top.names().unwrap(), expected);
    assert_eq!(top.names().unwrap(), expected, "a second listing starts over");
    let kind = |name: &[u8]| top.stat(name).unwrap().kind;
    assert_eq!(kind(b"d"), Kind::Directory);
    assert_eq!(kind(name), Kind::File);
    assert_eq!(kind(b"s"), Kind::Symlink);
    assert_eq!(kind(b"fifo"), Kind::Special(Device::Fifo));
    assert_eq!(kind(b"zero"), Kind::Special(zero));
    assert_eq!(kind(b"block"), Kind::Special(block));
    assert_eq!(top.read_link(b"s").unwrap(), b"/target\xfe");
    assert_eq!(errno(top.read_link(b"d")), Errno::EINVAL);
    assert_eq!(top.open_file(b"fifo").unwrap_err(), RootError::NotRegular { path: path("/fifo") });

    let inside = top.open_child(b"d").unwrap();
    top.link(name, &inside, b"other").unwrap();
    assert_eq!(inside.stat(b"other").unwrap().links, 2);
    assert_eq!(errno(top.rename_noreplace(b"s", &inside, b"other")), Errno::EEXIST);
    top.exchange(b"s", &inside, b"other").unwrap();
    assert_eq!(inside.stat(b"other").unwrap().kind, Kind::Symlink);
    top.exchange(b"d", &top, b"fifo").unwrap();
    assert_eq!(top.stat(b"fifo").unwrap().kind, Kind::Directory);
    assert_eq!(errno(top.remove_directory(b"fifo")), Errno::ENOTEMPTY);
    inside.rename_noreplace(b"other", &top, b"moved").unwrap();
    top.remove_directory(b"fifo").unwrap();
    assert_eq!(errno(top.remove_directory(b"moved")), Errno::ENOTDIR);
    top.rename_over(b"moved", &top, b"zero").unwrap();
    top.unlink(b"zero").unwrap();
    top.sync().unwrap();
    root.sync_filesystem().unwrap();
    let left: Vec<Box<[u8]>> =
        [&b"block"[..], b"d", name, b"s"].into_iter().map(Box::from).collect();
    assert_eq!(top.names().unwrap(), left);
    assert!(root.space().unwrap().free_bytes > 0);
    assert!(root.space().unwrap().free_inodes > 0);
}

#[test]
fn changes_attributes_and_never_those_of_a_target() {
    let (directory, root) = root();
    let at = directory.path();
    fs::write(at.join("f"), "content").unwrap();
    symlink("f", at.join("s")).unwrap();
    let top = root.directory(&TreePath::root()).unwrap();
    let target = top.stat(b"f").unwrap();

    top.set_owner(b"s", 7, 8).unwrap();
    top.set_mtime(b"s", Time { seconds: -5, nanoseconds: 3 }).unwrap();
    assert_eq!(errno(top.set_mode(b"s", 0o600)), Errno::EOPNOTSUPP);
    let link = top.stat(b"s").unwrap();
    assert_eq!((link.uid, link.gid), (7, 8));
    assert_eq!(link.mtime, Time { seconds: -5, nanoseconds: 3 });
    assert_eq!(top.stat(b"f").unwrap(), target);

    let atime = fs::metadata(at.join("f")).unwrap().atime();
    top.set_owner(b"f", 7, 8).unwrap();
    top.set_mode(b"f", 0o4751).unwrap();
    top.set_mtime(b"f", Time { seconds: 1_000, nanoseconds: 999_999_999 }).unwrap();
    let status = top.stat(b"f").unwrap();
    assert_eq!((status.mode, status.uid, status.gid), (0o4751, 7, 8));
    assert_eq!(status.mtime, Time { seconds: 1_000, nanoseconds: 999_999_999 });
    assert_eq!(fs::metadata(at.join("f")).unwrap().atime(), atime);
    top.make_special(b"fifo", Device::Fifo, 0o600).unwrap();
    top.set_mode(b"fifo", 0o622).unwrap();
    assert_eq!(top.stat(b"fifo").unwrap().mode, 0o622);

    top.set_xattr(b"f", b"user.b", b"\0\xff").unwrap();
    top.set_xattr(b"f", b"user.a", b"").unwrap();
    top.set_xattr(b"f", b"trusted.ours", b"not managed").unwrap();
    let found = top.xattrs(b"f", Attributes::Basic).unwrap();
    let pair = |name: &[u8], value: &[u8]| (name.to_vec(), value.to_vec());
    assert_eq!(found, [pair(b"user.a", b""), pair(b"user.b", b"\0\xff")]);
    assert_eq!(top.xattrs(b"s", Attributes::Basic).unwrap(), []);
    top.remove_xattr(b"f", b"user.b").unwrap();
    top.remove_xattr(b"f", b"user.b").unwrap();
    assert_eq!(top.xattrs(b"f", Attributes::Basic).unwrap(), [pair(b"user.a", b"")]);
    xattr::set(at, "user.top", b"1").unwrap();
    assert_eq!(top.own_xattrs(Attributes::Basic).unwrap(), [pair(b"user.top", b"1")]);
}

#[test]
fn reaches_paths_that_are_longer_than_the_kernel_takes_at_once() {
    let (directory, root) = root();
    let name = [b'n'; 200];
    let mut place = root.directory(&TreePath::root()).unwrap();
    for _ in 0..100 {
        place.make_directory(&name, 0o755).unwrap();
        place = place.open_child(&name).unwrap();
    }
    place.create_file(b"end", 0o644).unwrap();
    let end = place.path().join(b"end").unwrap();
    assert!(end.as_bytes().len() > 20_000);
    let (reached, last) = root.parent(&end).unwrap();
    assert_eq!(reached.status().unwrap().inode, place.status().unwrap().inode);
    assert_eq!(reached.stat(last).unwrap().kind, Kind::File);
    drop(directory);
}

#[test]
fn what_is_held_stays_the_same_whatever_takes_its_place() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    std::fs::write(at("f"), "mine").unwrap();
    std::os::unix::fs::symlink("/nowhere", at("link")).unwrap();
    let root = Root::open(place.path()).unwrap();
    let top = root.directory(&TreePath::root()).unwrap();
    let (file, link) = (top.open_entry(b"f").unwrap(), top.open_entry(b"link").unwrap());
    std::fs::rename(at("f"), at("moved")).unwrap();
    std::fs::write(at("f"), "another").unwrap();
    let another = std::fs::metadata(at("f")).unwrap();
    let mtime = Time { seconds: 5, nanoseconds: 7 };
    file.set_owner(3, 4).unwrap();
    file.set_mode(0o4751).unwrap();
    file.set_mtime(mtime).unwrap();
    file.set_xattr(b"user.a", b"b").unwrap();
    let list = file.xattrs(Attributes::Basic).unwrap();
    assert_eq!(list, [(b"user.a".to_vec(), b"b".to_vec())]);
    let status = top.stat(b"moved").unwrap();
    assert_eq!((status.uid, status.gid, status.mode, status.mtime), (3, 4, 0o4751, mtime));
    file.remove_xattr(b"user.a").unwrap();
    file.remove_xattr(b"user.a").unwrap();
    assert_eq!(top.xattrs(b"moved", Attributes::Basic).unwrap(), []);
    let after = std::fs::metadata(at("f")).unwrap();
    assert_eq!((after.mode(), after.uid(), after.ctime_nsec()), {
        (another.mode(), another.uid(), another.ctime_nsec())
    });
    link.set_owner(5, 6).unwrap();
    link.set_mtime(mtime).unwrap();
    assert_eq!(link.set_mode(0o600).unwrap_err().errno(), Some(Errno::EOPNOTSUPP));
    assert_eq!(link.xattrs(Attributes::Basic).unwrap(), []);
    let status = top.stat(b"link").unwrap();
    assert_eq!((status.kind, status.uid, status.mtime), (Kind::Symlink, 5, mtime));
    assert_eq!(top.open_entry(b"absent").unwrap_err().errno(), Some(Errno::ENOENT));
}
