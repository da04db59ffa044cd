//! That changes are noticed, and that what has not changed costs nothing.

use std::fs::{self, FileTimes, Permissions};
use std::os::unix::fs::{PermissionsExt, lchown, symlink};

use model::tree::Child;

use super::*;

/// Writes other content of the same length, and sets the time of modification back.
fn change_in_secret(file: &Path) {
    let mtime = fs::metadata(file).unwrap().modified().unwrap();
    let content: Vec<u8> = fs::read(file).unwrap().iter().map(|byte| !byte).collect();
    fs::write(file, content).unwrap();
    let open = fs::File::options().write(true).open(file).unwrap();
    open.set_times(FileTimes::new().set_modified(mtime)).unwrap();
}

fn fill(at: &Path) {
    for directory in ["a/b", "c"] {
        fs::create_dir_all(at.join(directory)).unwrap();
    }
    for file in ["a/f", "a/b/g", "c/h"] {
        fs::write(at.join(file), file).unwrap();
    }
    symlink("f", at.join("a/s")).unwrap();
}

#[tokio::test]
async fn every_kind_of_drift_is_noticed() {
    let fixture = Fixture::new(fill);
    let mut last = fixture.settle().await;
    let drifts: [(&str, &dyn Fn()); 10] = [
        ("content", &|| fs::write(fixture.at("a/f"), "longer than before").unwrap()),
        ("secret", &|| change_in_secret(&fixture.at("c/h"))),
        ("mode", &|| {
            fs::set_permissions(fixture.at("a/f"), Permissions::from_mode(0o600)).unwrap();
        }),
        ("owner", &|| lchown(fixture.at("a/s"), Some(9), None).unwrap()),
        ("xattr", &|| xattr::set(fixture.at("a/b/g"), "user.x", b"1").unwrap()),
        ("xattr of a directory", &|| xattr::set(fixture.at("a/b"), "user.x", b"1").unwrap()),
        ("symlink", &|| {
            fs::remove_file(fixture.at("a/s")).unwrap();
            symlink("g", fixture.at("a/s")).unwrap();
        }),
        ("added", &|| fs::write(fixture.at("c/new"), "n").unwrap()),
        ("removed", &|| fs::remove_file(fixture.at("a/b/g")).unwrap()),
        ("kind", &|| {
            fs::remove_dir(fixture.at("a/b")).unwrap();
            symlink("/etc", fixture.at("a/b")).unwrap();
        }),
    ];
    for (what, drift) in drifts {
        drift();
        let next = fixture.rescan().await;
        assert_ne!(tree(&next).digest(), tree(&last).digest(), "{what}");
        assert_eq!(next.revision, last.revision + 1, "{what}");
        fixture.assert_exact().await;
        last = next;
    }
}

#[tokio::test]
async fn what_has_not_changed_is_shared_and_not_read() {
    let fixture = Fixture::new(fill);
    let first = fixture.settle().await;
    let hashed = fixture.scanner.counters().hashed_bytes;
    let same = fixture.rescan().await;
    assert!(Arc::ptr_eq(&same, &first), "no new snapshot without news");
    fs::write(fixture.at("c/new"), "12345").unwrap();
    let next = fixture.rescan().await;
    assert_eq!(fixture.scanner.counters().hashed_bytes, hashed + 5);
    let child = |snapshot: &Snapshot, name: &[u8]| match tree(snapshot).root().get(name) {
        Some(Child::Directory(directory)) => Arc::clone(directory),
        _ => panic!("no directory"),
    };
    assert!(Arc::ptr_eq(&child(&first, b"a"), &child(&next, b"a")));
    assert!(!Arc::ptr_eq(&child(&first, b"c"), &child(&next, b"c")));
}

#[tokio::test]
async fn the_content_pass_finds_what_metadata_does_not_tell() {
    // No metadata pass comes by itself; the content pass goes round without rest.
    let pace = Pace { content_pause: Duration::ZERO, ..on_demand() };
    let fixture = Fixture::with(ScanSettings::default(), &[], pace, fill);
    let first = fixture.rescan().await;
    let mut snapshots = fixture.scanner.subscribe();
    // In one step, as far as the scanner can see.
    let pause = fixture.scanner.pause().await.unwrap();
    change_in_secret(&fixture.at("a/b/g"));
    drop(pause);
    let expected = independent(fixture.directory.path(), Algorithm::Blake3);
    assert_ne!(expected.digest(), tree(&first).digest());
    let found = snapshots.wait_for(|snapshot| tree(snapshot).digest() == expected.digest());
    tokio::time::timeout(Duration::from_secs(10), found).await.unwrap().unwrap();
    let all_read = async {
        while fixture.scanner.counters().content_passes == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), all_read).await.unwrap();
}

#[tokio::test]
async fn metadata_passes_come_by_themselves() {
    let pace = Pace { metadata_interval_min: Duration::from_millis(5), ..Pace::default() };
    let fixture = Fixture::with(ScanSettings::default(), &[], pace, fill);
    fixture.rescan().await;
    let mut snapshots = fixture.scanner.subscribe();
    fs::remove_dir_all(fixture.at("a")).unwrap();
    let gone = snapshots.wait_for(|snapshot| tree(snapshot).root().totals().entries == 2);
    tokio::time::timeout(Duration::from_secs(10), gone).await.unwrap().unwrap();
}
