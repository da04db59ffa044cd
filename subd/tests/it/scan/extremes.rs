//! What no tree should be, and some are: huge files, full directories, bottomless ones.
//!
//! `SUBD_ENTRIES=1000000 SUBD_SPARSE_BYTES=100000000000 cargo test -p subd --test it extremes --
//! --nocapture` makes the directory and the file larger, and prints how long they take.

use std::io;
use std::os::fd::OwnedFd;

use model::filter::Filter;
use model::plan::{RefusedChange, RefusedKind};
use model::scope::Coverage;
use model::tree::Child;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};

use subd::scan::PreviewState;
use subd::scan::reading::CHUNK_BYTES;

use super::*;
use crate::disk::{Disk, cached_bytes, run};

/// How many entries the directory of the normal run has.
const ENTRIES: usize = 100_000;

/// How long the sparse file of the normal run is.
const SPARSE_BYTES: u64 = 256 << 20;

/// Where there is no medium to wait for.
fn in_memory() -> TempDir {
    TempDir::new_in("/dev/shm").unwrap()
}

#[tokio::test]
async fn a_directory_with_very_many_entries_is_scanned() {
    let entries = match std::env::var("SUBD_ENTRIES") {
        Ok(number) => number.parse().unwrap(),
        Err(_) => ENTRIES,
    };
    let place = in_memory();
    for number in 0..entries {
        fs::File::create(place.path().join(format!("{number:07}"))).unwrap();
    }
    let begun = Instant::now();
    let scanner = start(place.path(), ScanSettings::default(), &[], on_demand());
    let snapshot = scanner.rescan_now().await.unwrap();
    let report = snapshot.report.as_ref().unwrap();
    assert_eq!(report.totals.entries, u64::try_from(entries).unwrap());
    assert_eq!((report.unreadable.len(), report.kept_directories.len()), (0, 0));
    let first = begun.elapsed();
    scanner.rescan_now().await.unwrap();
    eprintln!("{entries} entries: {first:.1?} at first, then {:.1?}", begun.elapsed() - first);
}

#[tokio::test]
async fn a_directory_with_too_many_entries_is_left_alone_and_the_rest_is_scanned() {
    let filter = Filter::new(["/kept/log.*"]).unwrap();
    let settings = ScanSettings { coverage: Coverage::Full(filter), ..ScanSettings::default() };
    let pace = Pace { directory_entries_max: 10, ..on_demand() };
    let fixture = Fixture::with(settings, &[], pace, |at| {
        for (directory, files) in [("full", 11), ("ten", 10), ("kept", 3), ("full/below", 1)] {
            fs::create_dir(at.join(directory)).unwrap();
            for number in 0..files {
                fs::write(at.join(directory).join(number.to_string()), "1").unwrap();
            }
        }
        for number in 0..30 {
            fs::write(at.join(format!("kept/log{number}")), "1").unwrap();
        }
    });
    let full: TreePath = "/full".parse().unwrap();
    let snapshot = fixture.rescan().await;
    let count = |snapshot: &Snapshot, path: &str| match tree(snapshot).get(&path.parse().unwrap()) {
        Some(Child::Directory(directory)) => directory.entries().len(),
        other => panic!("{path} is {other:?}"),
    };
    assert_eq!([&"/full", &"/ten", &"/kept"].map(|path| count(&snapshot, path)), [0, 10, 3]);
    let report = snapshot.report.as_ref().unwrap();
    let why = "it has more than 10 entries, and is left as it is".to_owned();
    assert_eq!(report.unreadable, [(full.clone(), why.clone())]);
    assert_eq!(report.kept_directories, [full.clone(), "/kept".parse().unwrap()]);
    let left_alone = RefusedChange { path: full, kind: RefusedKind::LeftAlone, why };
    assert_eq!(snapshot.left_alone, [left_alone]);

    for name in ["0", "1"] {
        fs::remove_file(fixture.at("full").join(name)).unwrap();
    }
    let next = fixture.rescan().await;
    assert_eq!((count(&next, "/full"), next.left_alone.len()), (10, 0));
    assert_eq!(next.report.as_ref().unwrap().unreadable, []);
}

#[tokio::test]
async fn a_tree_ten_thousand_levels_deep_is_scanned_as_far_as_a_tree_may_go() {
    let place = in_memory();
    let top = place.path().join("top");
    fs::create_dir(&top).unwrap();
    let mut at: OwnedFd = fs::File::open(&top).unwrap().into();
    for _ in 0..10_000 {
        mkdirat(&at, "d", Mode::S_IRWXU).unwrap();
        at = openat(&at, "d", OFlag::O_DIRECTORY, Mode::empty()).unwrap();
    }
    fs::write(place.path().join("beside"), "b").unwrap();
    let scanner = start(place.path(), ScanSettings::default(), &[], on_demand());
    let snapshot = scanner.rescan_now().await.unwrap();
    let report = snapshot.report.as_ref().unwrap();
    // `/beside`, and directories down to where a tree ends, of which `/` is one and not counted.
    let depth = u64::try_from(model::path::DEPTH_MAX).unwrap();
    assert_eq!(report.totals.entries, depth);
    assert_eq!((report.unreadable.len(), report.kept_directories.len()), (1, 1));
    assert!(report.unreadable[0].1.contains("it is deeper than"), "{:?}", report.unreadable);
    assert!(tree(&snapshot).file(&"/beside".parse().unwrap()).is_some());
    // What is known of it is copied for a preview.
    let filter = Filter::new(["/beside"]).unwrap();
    let other = ScanSettings { coverage: Coverage::Full(filter), ..ScanSettings::default() };
    let state = scanner.preview(&other, Duration::from_secs(60)).await.unwrap();
    let PreviewState::Done(previewed, _) = state else { panic!("{state:?}") };
    assert_eq!(previewed.report.as_ref().unwrap().totals.entries, depth - 1);
    scanner.stop();
    run("rm", &["-r", top.to_str().unwrap()]);
}

#[tokio::test]
async fn of_a_huge_sparse_file_nothing_but_its_data_is_read() {
    let bytes = match std::env::var("SUBD_SPARSE_BYTES") {
        Ok(number) => number.parse().unwrap(),
        Err(_) => SPARSE_BYTES,
    };
    let disk = Disk::new(32 << 20);
    let file = fs::File::create(disk.at("sparse")).unwrap();
    file.set_len(bytes).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"data", bytes / 2).unwrap();
    disk.sync();
    let begun = Instant::now();
    let scanner = start(&disk.root(), ScanSettings::default(), &[], on_demand());
    let snapshot = scanner.rescan_now().await.unwrap();
    eprintln!("a sparse file of {bytes} bytes: {:.1?}", begun.elapsed());
    assert_eq!(tree(&snapshot).file(&"/sparse".parse().unwrap()).unwrap().size_bytes, bytes);
    // The page that was just written was in the cache; a hole that is read would be as well.
    assert!(cached_bytes(&disk.at("sparse")) <= 4_096);
    let before = scanner.counters().hashed_bytes;
    let waiting = scanner.scan_touched(paths(&["/sparse"]).into_iter().collect());
    let pausing = async {
        while scanner.counters().hashed_bytes == before {
            tokio::task::yield_now().await;
        }
        let pause = scanner.pause().await.unwrap();
        fs::remove_file(disk.at("sparse")).unwrap();
        drop(pause);
    };
    let (snapshot, ()) = tokio::join!(waiting, pausing);
    assert_eq!(tree(&snapshot.unwrap()).file(&"/sparse".parse().unwrap()), None);
}

#[tokio::test]
async fn a_full_disk_is_scanned_like_any_other() {
    let disk = Disk::new(16 << 20);
    let mut number = 0;
    while fs::write(disk.at(&format!("f{number}")), vec![b'x'; 1 << 20]).is_ok() {
        number += 1;
    }
    assert!(number > 4);
    let scanner = start(&disk.root(), ScanSettings::default(), &[], on_demand());
    let snapshot = scanner.rescan_now().await.unwrap();
    assert_same(tree(&snapshot), &independent(&disk.root(), Algorithm::Blake3));
}

/// Appends to a file.
fn append(to: &Path, bytes: &[u8]) {
    let mut file = fs::OpenOptions::new().append(true).open(to).unwrap();
    io::Write::write_all(&mut file, bytes).unwrap();
}

#[tokio::test]
async fn a_file_that_takes_too_long_is_read_on_by_later_passes_and_holds_none_of_them_up() {
    // One chunk of each file is read in a pass.
    let none = Duration::ZERO;
    let pace = Pace { reading_max: none, reading_min: none, ..on_demand() };
    let place = in_memory();
    let scanner = start(place.path(), ScanSettings::default(), &[], pace);
    scanner.rescan_now().await.unwrap();

    let content: Vec<u8> = (0..2_000_000_u32).map(|number| (number % 251) as u8).collect();
    let chunks = content.len().div_ceil(CHUNK_BYTES);
    for name in ["grows", "huge"] {
        fs::write(place.path().join(name), &content).unwrap();
    }
    let hashed = scanner.counters().hashed_bytes;
    let huge: TreePath = "/huge".parse().unwrap();
    let why = "it takes too long to read: it counts as different from any image until later \
               passes have read the rest";
    let late = |path: &str| -> (TreePath, String) { (path.parse().unwrap(), why.to_owned()) };
    let (grows, is_late) = (late("/grows"), late("/huge"));
    let mut unknown = None;
    for pass in 1..=chunks {
        append(&place.path().join("grows"), b"more");
        fs::write(place.path().join("small"), format!("{pass}")).unwrap();
        let snapshot = scanner.rescan_now().await.unwrap();
        let small = tree(&snapshot).file(&"/small".parse().unwrap()).unwrap().object.id();
        assert_eq!(small, Algorithm::Blake3.digest(format!("{pass}").as_bytes()));
        let report = snapshot.report.as_ref().unwrap();
        let found = tree(&snapshot).file(&huge).unwrap().object.id();
        if pass < chunks {
            assert_eq!(report.unreadable, [grows.clone(), is_late.clone()], "pass {pass}");
            assert_ne!(found, Algorithm::Blake3.digest(&content));
            assert_eq!(*unknown.get_or_insert(found), found, "it has not changed");
        } else {
            assert_eq!(report.unreadable, std::slice::from_ref(&grows));
            assert_eq!(found, Algorithm::Blake3.digest(&content));
        }
    }
    // Of the huge file each byte was hashed once, of the other the first chunk in each pass.
    let passes = u64::try_from(chunks).unwrap();
    let chunk = u64::try_from(CHUNK_BYTES).unwrap();
    let smalls: u64 = (1..=passes).map(|pass| pass.to_string().len() as u64).sum();
    let expected = content.len() as u64 + passes * chunk + smalls;
    assert_eq!(scanner.counters().hashed_bytes - hashed, expected);
}
