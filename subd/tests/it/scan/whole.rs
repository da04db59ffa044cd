//! That a scan records exactly what is there.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use model::path::DEPTH_MAX;
use model::scope::SUBD_DIRECTORY;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::*;

/// `cap_net_raw+ep`, as `setcap` writes it.
const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// `u::rw-,u:1234:rw-,g::r--,m::rw-,o::r--`, as `setfacl` writes it.
const ACL: &[u8] = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x02\0\x06\0\xd2\x04\0\0\
                     \x04\0\x04\0\xff\xff\xff\xff\x10\0\x06\0\xff\xff\xff\xff\
                     \x20\0\x04\0\xff\xff\xff\xff";

fn fill_with_every_kind(at: &Path) {
    fs::write(at.join("empty"), "").unwrap();
    fs::write(at.join("large"), vec![7; 3_000_000]).unwrap();
    fs::write(at.join("setuid"), "x").unwrap();
    chown(at.join("setuid"), Some(12), Some(34)).unwrap();
    fs::set_permissions(at.join("setuid"), Permissions::from_mode(0o6751)).unwrap();
    fs::create_dir_all(at.join("d/e/f")).unwrap();
    fs::set_permissions(at.join("d/e"), Permissions::from_mode(0o1777)).unwrap();
    fs::write(at.join("d-sorts-after-what-d-holds"), "1").unwrap();
    fs::write(at.join(OsStr::from_bytes(b"odd \xff\n\\")), "2").unwrap();
    fs::create_dir(at.join(OsStr::from_bytes(b"d/\xfe"))).unwrap();
    symlink(OsStr::from_bytes(b"/nowhere/\xfd"), at.join("d/dangling")).unwrap();
    symlink("d", at.join("link")).unwrap();
    lchown(at.join("link"), Some(5), Some(6)).unwrap();
    let mode = Mode::from_bits_truncate(0o620);
    mknod(&at.join("d/fifo"), SFlag::S_IFIFO, mode, 0).unwrap();
    mknod(&at.join("d/null"), SFlag::S_IFCHR, mode, makedev(1, 3)).unwrap();
    mknod(&at.join("d/disk"), SFlag::S_IFBLK, mode, makedev(300, 70_000)).unwrap();
    fs::write(at.join("d/z"), "linked").unwrap();
    fs::hard_link(at.join("d/z"), at.join("d/e/y")).unwrap();
    fs::hard_link(at.join("d/z"), at.join("zz")).unwrap();
    for (name, value) in
        [("user.origin", &b"here"[..]), ("user.bytes", b"\0\xff"), ("user.none", b"")]
    {
        xattr::set(at.join("large"), name, value).unwrap();
    }
    xattr::set(at.join("large"), "trusted.other", b"not managed").unwrap();
    xattr::set(at.join("d/e"), "user.directory", b"1").unwrap();
    xattr::set(at, "user.root", b"1").unwrap();
    xattr::set(at.join("empty"), "security.capability", CAPABILITY).unwrap();
    xattr::set(at.join("d-sorts-after-what-d-holds"), "system.posix_acl_access", ACL).unwrap();
    xattr::set(at.join("d"), "system.posix_acl_default", ACL).unwrap();
    let time = "1960-01-02 03:04:05.678";
    assert!(
        Command::new("touch").arg("-d").arg(time).arg(at.join("zz")).status().unwrap().success()
    );
}

#[tokio::test]
async fn records_every_kind_of_entry() {
    for algorithm in [Algorithm::Blake3, Algorithm::Sha512] {
        let settings = ScanSettings { algorithm, ..ScanSettings::default() };
        let fixture = Fixture::with(settings, &[], on_demand(), fill_with_every_kind);
        let snapshot = fixture.rescan().await;
        let found = tree(&snapshot);
        assert_same(found, &independent(fixture.directory.path(), algorithm));
        let report = snapshot.report.as_ref().unwrap();
        assert_eq!(report.kept_directories, []);
        assert_eq!(report.externally_linked, []);
        assert_eq!(report.unreadable, []);
        let text = to_text(found);
        for shown in ["security.capability=", "user.none=", "posix_acl_access=", "acl_default="] {
            assert!(text.contains(shown), "{shown} is missing in:\n{text}");
        }
    }
}

#[tokio::test]
async fn never_looks_at_its_own_directory() {
    let fixture = Fixture::new(|at| {
        fs::create_dir_all(at.join("a").join(&SUBD_DIRECTORY[1..])).unwrap();
        fs::create_dir_all(at.join(&SUBD_DIRECTORY[1..]).join("objects")).unwrap();
        fs::write(at.join(".subd/objects/x"), "x").unwrap();
    });
    let snapshot = fixture.rescan().await;
    assert_eq!(tree(&snapshot).get(&SUBD_DIRECTORY.parse().unwrap()), None);
    assert!(tree(&snapshot).get(&"/a/.subd".parse().unwrap()).is_some());
    assert_eq!(snapshot.report.as_ref().unwrap().kept_directories, []);
}

#[tokio::test]
async fn a_socket_is_reported_and_its_directory_kept() {
    let mut listener = None;
    let fixture = Fixture::new(|at| {
        fs::create_dir(at.join("run")).unwrap();
        listener = Some(UnixListener::bind(at.join("run/socket")).unwrap());
        fs::write(at.join("run/pid"), "1").unwrap();
    });
    let snapshot = fixture.rescan().await;
    assert_eq!(tree(&snapshot).root().totals().entries, 2);
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.kept_directories, paths(&["/run"]));
    let text = "a socket cannot be part of an image".to_owned();
    assert_eq!(report.unreadable, [("/run/socket".parse().unwrap(), text)]);
}

#[tokio::test]
async fn a_deep_tree_is_scanned_and_one_too_deep_is_reported() {
    let directory = TempDir::new().unwrap();
    let root = Root::open(directory.path()).unwrap();
    let mut place = root.directory(&TreePath::root()).unwrap();
    for level in 0..DEPTH_MAX + 50 {
        if level == 500 || level == DEPTH_MAX - 1 {
            std::io::Write::write_all(&mut place.create_file(b"f", 0o644).unwrap(), b"x").unwrap();
        }
        place.make_directory(b"d", 0o755).unwrap();
        place = place.open_child(b"d").unwrap();
    }
    let scanner = start(directory.path(), ScanSettings::default(), &[], on_demand());
    let snapshot = scanner.rescan_now().await.unwrap();
    let found = tree(&snapshot);
    let deepest = TreePath::new("/d".repeat(DEPTH_MAX - 1)).unwrap();
    assert!(found.file(&TreePath::new("/d".repeat(500) + "/f").unwrap()).is_some());
    assert!(found.file(&deepest.join(b"f").unwrap()).is_some());
    assert_eq!(found.root().totals().directories, DEPTH_MAX as u64 - 1);
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.kept_directories, std::slice::from_ref(&deepest));
    let why = "it is deeper than 1024 directories".to_owned();
    assert_eq!(report.unreadable, [(deepest.join(b"d").unwrap(), why)]);
    scanner.stop();
    // A recursive removal by the standard library needs a descriptor for each level.
    assert!(Command::new("rm").arg("-rf").arg(directory.keep()).status().unwrap().success());
}

#[tokio::test]
async fn files_of_nothing_but_holes_do_not_hold_up_the_pass() {
    let sparse = |at: &Path, name: &str, size_bytes: u64| {
        fs::File::create(at.join(name)).unwrap().set_len(size_bytes).unwrap();
    };
    let fixture = Fixture::new(|at| {
        sparse(at, "days", 8 << 40);
        sparse(at, "first", 9 << 30);
        sparse(at, "second", 9 << 30);
        sparse(at, "small", 1 << 20);
        fs::write(at.join("z"), "after them").unwrap();
    });
    let at = fixture.directory.path();
    let object = |snapshot: &Snapshot, name: &str| {
        let file = tree(snapshot).file(&format!("/{name}").parse().unwrap()).unwrap();
        (file.object.id(), file.size_bytes)
    };
    let first = fixture.rescan().await;
    assert_eq!(object(&first, "days").1, 8 << 40);
    assert_eq!(object(&first, "small").0, Algorithm::Blake3.digest(&vec![0; 1 << 20]));
    assert_eq!(object(&first, "z").0, Algorithm::Blake3.digest(b"after them"));
    // One of them is read in each pass.
    assert_ne!(object(&first, "first").0, object(&first, "second").0);
    let mut second = fixture.rescan().await;
    // A file that has just changed is read again, and leaves no room for the other.
    while object(&second, "first").0 != object(&second, "second").0 {
        second = fixture.rescan().await;
    }
    assert_eq!(object(&second, "days"), object(&first, "days"));
    assert_eq!(second.report.as_ref().unwrap().unreadable, []);
    fs::remove_file(at.join("days")).unwrap();
    let third = fixture.rescan().await;
    assert_eq!(tree(&third).get(&"/days".parse().unwrap()), None);
}
