//! That a tree that changes under the scan is scanned without harm, and in the end exactly.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// Makes, changes, moves and removes what is below `at` until it is told to end.
fn churn(at: &Path, end: &AtomicBool) {
    let mut round = 0_usize;
    // Each step may meet what another left; only the scanner's view matters here.
    while !end.load(Ordering::Relaxed) {
        round += 1;
        let name = |number: usize| at.join(format!("n{}", number % 17));
        let _ = fs::write(name(round), vec![round.to_le_bytes()[0]; round % 5_000]);
        let _ = fs::rename(name(round + 3), name(round + 5));
        let _ = fs::remove_file(name(round + 7));
        let directory = at.join(format!("d{}", round % 3));
        let _ = fs::create_dir_all(directory.join("x/y"));
        let _ = fs::write(directory.join("x/y/f"), "f");
        let _ = fs::hard_link(directory.join("x/y/f"), at.join(format!("h{}", round % 5)));
        let swapped = at.join(format!("d{}", (round + 1) % 3));
        let _ = fs::remove_dir_all(&swapped);
        let _ = fs::remove_file(&swapped);
        let _ = symlink("/usr", &swapped);
        let _ = fs::remove_file(at.join(format!("h{}", (round + 2) % 5)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_that_changes_all_the_time_harms_nothing() {
    let pace = Pace { content_pause: Duration::ZERO, ..on_demand() };
    let fixture = Fixture::with(ScanSettings::default(), &[], pace, |at| {
        fs::create_dir_all(at.join("still/below")).unwrap();
        fs::write(at.join("still/below/f"), "f").unwrap();
    });
    let still: TreePath = "/still".parse().unwrap();
    let snapshot = fixture.rescan().await;
    let first = tree(&snapshot).get(&still).unwrap();
    let end = Arc::new(AtomicBool::new(false));
    let churner = {
        let (at, end) = (fixture.directory.path().to_owned(), Arc::clone(&end));
        std::thread::spawn(move || churn(&at, &end))
    };
    for _ in 0..100 {
        let snapshot = fixture.rescan().await;
        let found = tree(&snapshot);
        assert_eq!(found.get(&still).unwrap(), first);
        // Whatever is a symlink for a moment, nothing of its target is taken for ours.
        assert!(found.nodes().all(|(path, _)| !path.to_string().contains("/bin")));
    }
    end.store(true, Ordering::Relaxed);
    churner.join().unwrap();
    fixture.settle().await;
    fixture.assert_exact().await;
    let report = fixture.scanner.snapshot().report.clone().unwrap();
    assert_eq!(report.unreadable, []);
    assert_eq!(report.kept_directories, []);
}
