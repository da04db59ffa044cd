//! That scanning leaves the page cache as it was, and looks under it when it is asked to.

use super::*;
use crate::disk::{Disk, cached_bytes};

const FILE_BYTES: usize = 3 << 20;

/// Two files on a medium of their own; the one called `warm` is in the page cache.
fn warm_and_cold() -> Disk {
    let disk = Disk::new(64 << 20);
    for name in ["warm", "cold"] {
        fs::write(disk.at(name), name.repeat(FILE_BYTES / 4)).unwrap();
    }
    disk.remount();
    fs::read(disk.at("warm")).unwrap();
    disk
}

async fn ended(scanner: &Scanner, content: u64, media: u64) {
    testing::eventually_async("the passes have ended", async || {
        let counters = scanner.counters();
        counters.content_passes >= content && counters.media_passes >= media
    })
    .await;
}

/// What is in the page cache after each kind of pass, of the file that was in it and of the other.
async fn cached_after_passes() -> [[u64; 2]; 3] {
    let disk = warm_and_cold();
    let scanner = start(&disk.root(), ScanSettings::default(), &[], on_demand());
    let cached = || ["warm", "cold"].map(|name| cached_bytes(&disk.at(name)));
    let first = scanner.rescan_now().await.unwrap();
    let after_metadata = cached();
    scanner.boost(true, false);
    ended(&scanner, 1, 0).await;
    let after_content = cached();
    scanner.boost(false, true);
    ended(&scanner, 1, 1).await;
    let after_media = cached();
    assert_eq!(scanner.media_skipped(), 0);
    let last = scanner.rescan_now().await.unwrap();
    assert!(Arc::ptr_eq(&first, &last), "all say the same");
    assert_same(tree(&last), &independent(&disk.root(), Algorithm::Blake3));
    [after_metadata, after_content, after_media]
}

#[tokio::test]
async fn no_pass_puts_anything_into_the_page_cache_or_takes_it_out() {
    let mut seen = Vec::new();
    // The kernel may take pages out by itself, though hardly each time.
    for _ in 0..5 {
        let cached = cached_after_passes().await;
        assert_eq!(cached.map(|[_, cold]| cold), [0; 3]);
        if cached.iter().all(|[warm, _]| *warm == FILE_BYTES as u64) {
            return;
        }
        seen.push(cached);
    }
    panic!("pages were taken out each time: {seen:?}");
}

#[tokio::test]
async fn what_the_cache_hides_is_seen_by_the_media_pass_alone_until_it_is_repaired() {
    let disk = warm_and_cold();
    let scanner = start(&disk.root(), ScanSettings::default(), &[], on_demand());
    let first = scanner.rescan_now().await.unwrap();
    // The medium has one block of the file that says `warm` all the time.
    let image = fs::read(disk.root().parent().unwrap().join("image")).unwrap();
    let block = image.chunks(4_096).position(|block| block.starts_with(b"warmwarm")).unwrap();
    disk.spoil(4_096 * u64::try_from(block).unwrap());

    scanner.boost(true, false);
    ended(&scanner, 1, 0).await;
    let same = scanner.rescan_now().await.unwrap();
    assert!(Arc::ptr_eq(&first, &same), "the content pass sees the cache");

    scanner.boost(false, true);
    ended(&scanner, 1, 1).await;
    let found = scanner.rescan_now().await.unwrap();
    let object = |snapshot: &Snapshot, path: &str| {
        tree(snapshot).file(&path.parse().unwrap()).unwrap().object.id()
    };
    assert_ne!(object(&found, "/warm"), object(&first, "/warm"));
    assert_eq!(object(&found, "/cold"), object(&first, "/cold"));
    scanner.boost(true, true);
    ended(&scanner, 2, 2).await;
    let again = scanner.rescan_now().await.unwrap();
    assert!(Arc::ptr_eq(&found, &again), "the cache is not believed again");

    // As an update repairs it: another file takes its place.
    fs::write(disk.at("new"), "warm".repeat(FILE_BYTES / 4)).unwrap();
    fs::rename(disk.at("new"), disk.at("warm")).unwrap();
    scanner.boost(true, true);
    ended(&scanner, 3, 3).await;
    let repaired = scanner.rescan_now().await.unwrap();
    assert_eq!(object(&repaired, "/warm"), object(&first, "/warm"));
    assert_same(tree(&repaired), &independent(&disk.root(), Algorithm::Blake3));
}

#[tokio::test]
async fn files_of_any_size_and_with_holes_are_read_exactly_by_all_passes() {
    let disk = Disk::new(64 << 20);
    let sizes = [1, 511, 512, 4_095, 4_096, 4_097, 262_143, 262_144, 262_145, 1_000_001];
    for size in sizes {
        fs::write(disk.at(&format!("full-{size}")), vec![b'x'; size]).unwrap();
        // A hole before, between and after.
        let file = fs::File::create(disk.at(&format!("holes-{size}"))).unwrap();
        let size = u64::try_from(size).unwrap();
        for at in [5_000 * size, 9_000 * size] {
            std::os::unix::fs::FileExt::write_all_at(&file, b"data", at).unwrap();
        }
        file.set_len(10_001 * size).unwrap();
        if size > 10_000 {
            file.set_len(size).unwrap();
        }
    }
    disk.remount();
    let scanner = start(&disk.root(), ScanSettings::default(), &[], on_demand());
    let first = scanner.rescan_now().await.unwrap();
    assert_same(tree(&first), &independent(&disk.root(), Algorithm::Blake3));
    scanner.boost(true, true);
    ended(&scanner, 1, 1).await;
    let last = scanner.rescan_now().await.unwrap();
    assert!(Arc::ptr_eq(&first, &last), "all say the same");
    assert_eq!(scanner.media_skipped(), 0);
}
