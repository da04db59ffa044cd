//! That the scanner does as it is told, and at once.

use std::collections::BTreeSet;
use std::fs;

use model::filter::Filter;
use model::scope::{Coverage, Scope};
use subd::scan::Stopped;

use super::*;

fn fill(at: &Path) {
    fs::create_dir_all(at.join("a/b")).unwrap();
    fs::write(at.join("a/f"), "12345").unwrap();
    fs::write(at.join("a/b/g"), "1234567").unwrap();
    fs::hard_link(at.join("a/b/g"), at.join("z")).unwrap();
}

#[tokio::test]
async fn touched_paths_are_read_whatever_their_metadata_says() {
    let fixture = Fixture::new(fill);
    let first = fixture.settle().await;
    let table: [(&[&str], u64); 4] = [(&["/a/f"], 5), (&["/z"], 7), (&["/a"], 0), (&["/none"], 0)];
    for (touched, bytes) in table {
        let before = fixture.scanner.counters().hashed_bytes;
        let touched: BTreeSet<TreePath> = paths(touched).into_iter().collect();
        let snapshot = fixture.scanner.scan_touched(touched.clone()).await.unwrap();
        assert_eq!(fixture.scanner.counters().hashed_bytes - before, bytes, "{touched:?}");
        assert!(Arc::ptr_eq(&snapshot, &first));
    }
}

#[tokio::test]
async fn nothing_is_scanned_during_a_pause() {
    let fixture = Fixture::new(fill);
    let first = fixture.rescan().await;
    let pause = fixture.scanner.pause().await.unwrap();
    let second = fixture.scanner.pause().await.unwrap();
    let passes = fixture.scanner.counters().metadata_passes;
    fs::write(fixture.at("new"), "n").unwrap();
    {
        let scan = fixture.scanner.rescan_now();
        let limit = Duration::from_millis(50);
        assert!(tokio::time::timeout(limit, scan).await.is_err(), "it was to wait");
    }
    drop(pause);
    assert_eq!(fixture.scanner.counters().metadata_passes, passes);
    assert!(Arc::ptr_eq(&fixture.scanner.snapshot(), &first));
    let touched = paths(&["/new"]).into_iter().collect();
    let next = second.scan_touched(touched).await.unwrap();
    assert_same(tree(&next), &independent(fixture.directory.path(), Algorithm::Blake3));
    assert_eq!(fixture.scanner.counters().metadata_passes, passes + 1);
}

#[tokio::test]
async fn a_pause_and_the_end_do_not_wait_for_a_large_file() {
    let fixture = Fixture::new(|at| {
        // Holes are read fast, and yet this takes seconds.
        fs::File::create(at.join("huge")).unwrap().set_len(16 << 30).unwrap();
        fs::write(at.join("before"), "12345").unwrap();
    });
    while fixture.scanner.counters().hashed_bytes < 1 << 20 {
        tokio::task::yield_now().await;
    }
    let start = Instant::now();
    let pause = fixture.scanner.pause().await.unwrap();
    fs::remove_file(fixture.at("huge")).unwrap();
    let snapshot = pause.scan_touched(BTreeSet::new()).await.unwrap();
    assert_same(tree(&snapshot), &independent(fixture.directory.path(), Algorithm::Blake3));
    fs::File::create(fixture.at("huge")).unwrap().set_len(16 << 30).unwrap();
    let hashed = fixture.scanner.counters().hashed_bytes;
    let scan = fixture.scanner.rescan_now();
    let stop = async {
        while fixture.scanner.counters().hashed_bytes < hashed + (1 << 20) {
            tokio::task::yield_now().await;
        }
        fixture.scanner.stop();
    };
    let (answer, ()) = tokio::join!(scan, stop);
    assert_eq!(answer.unwrap_err(), Stopped);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(fixture.scanner.pause().await.unwrap_err(), Stopped);
    assert_eq!(fixture.scanner.rescan_now().await.unwrap_err(), Stopped);
}

#[tokio::test]
async fn new_settings_are_scanned_by_at_once() {
    let fixture = Fixture::new(fill);
    let first = fixture.settle().await;
    let hashed = fixture.scanner.counters().hashed_bytes;

    let sha512 = ScanSettings { algorithm: Algorithm::Sha512, ..ScanSettings::default() };
    fixture.scanner.set_settings(sha512.clone());
    let empty = fixture.scanner.snapshot();
    assert_eq!(empty.scope, Scope::of(&sha512, &[]));
    let mut snapshots = fixture.scanner.subscribe();
    let second = snapshots.wait_for(|snapshot| snapshot.tree.is_some()).await.unwrap().clone();
    assert_same(tree(&second), &independent(fixture.directory.path(), Algorithm::Sha512));
    assert_eq!(fixture.scanner.counters().hashed_bytes, hashed + 12);

    // Another coverage of the same algorithm reads nothing.
    let filter = Filter::new(["/a/b"]).unwrap();
    let narrow = ScanSettings { coverage: Coverage::Full(filter), ..sha512 };
    fixture.settle().await;
    let hashed = fixture.scanner.counters().hashed_bytes;
    fixture.scanner.set_settings(narrow.clone());
    assert!(fixture.scanner.snapshot().tree.is_none() || fixture.scanner.snapshot().revision > 3);
    let third = fixture.rescan().await;
    assert_eq!(tree(&third).root().totals().entries, 3);
    assert_eq!(fixture.scanner.counters().hashed_bytes, hashed + 7, "`/z` carries the file now");
    let revision = third.revision;
    fixture.scanner.set_settings(narrow);
    assert_eq!(fixture.rescan().await.revision, revision, "equal settings are no change");

    fixture.scanner.set_settings(ScanSettings::default());
    let last = fixture.rescan().await;
    assert_eq!(tree(&last).digest(), tree(&first).digest());
}

#[tokio::test]
async fn labels_are_read_when_they_are_wanted() {
    let fixture = Fixture::new(fill);
    let label = b"system_u:object_r:etc_t:s0\0";
    // Without a policy the kernel stores any label; some systems refuse even root.
    if xattr::set(fixture.at("a/f"), "security.selinux", label).is_err() {
        return;
    }
    fixture.settle().await;
    let hashed = fixture.scanner.counters().hashed_bytes;
    let labels = ScanSettings { attributes: Attributes::Labels, ..ScanSettings::default() };
    fixture.scanner.set_settings(labels);
    let snapshot = fixture.rescan().await;
    let file = tree(&snapshot).file(&"/a/f".parse().unwrap()).unwrap();
    assert_eq!(file.metadata.xattrs.get(b"security.selinux"), Some(&label[..]));
    assert_eq!(fixture.scanner.counters().hashed_bytes, hashed, "only attributes were read");
}

#[tokio::test]
async fn a_scanner_that_is_dropped_ends() {
    let fixture = Fixture::new(fill);
    let mut snapshots = fixture.scanner.subscribe();
    let Fixture { directory, scanner } = fixture;
    drop(scanner);
    while snapshots.changed().await.is_ok() {}
    drop(directory);
}

#[tokio::test]
async fn the_scanner_alone_has_low_priority() {
    let fixture = Fixture::new(fill);
    fixture.rescan().await;
    let niceness = |task: &str| {
        let stat = fs::read_to_string(format!("/proc/{task}/stat")).ok()?;
        // After the name in parentheses, the seventeenth field.
        let (_, fields) = stat.rsplit_once(") ")?;
        fields.split(' ').nth(16).map(str::to_owned)
    };
    let own = niceness("thread-self");
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let scanners: Vec<String> = tasks
        .filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "scan\n"))
        .map(|task| format!("self/task/{}", task.file_name().unwrap().to_str().unwrap()))
        .collect();
    assert!(!scanners.is_empty());
    assert_ne!(own.unwrap(), "15");
    // Scanners of other tests may end at any moment, or only just have begun.
    let mut found = scanners.iter().filter_map(|task| niceness(task));
    assert!(found.any(|niceness| niceness == "15"));
    let mut classes = scanners.iter().filter_map(|task| {
        let thread = task.rsplit('/').next()?;
        let output = std::process::Command::new("ionice").args(["-p", thread]).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    });
    assert!(classes.any(|class| class == "idle"));
}
