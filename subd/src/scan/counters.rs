//! The counters of the scanner.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use api::subd::ScanCounters;

/// Counts since subd started.
#[derive(Debug, Default)]
pub struct Counters {
    metadata_passes: AtomicU64,
    content_passes: AtomicU64,
    metadata_pass_ms: AtomicU64,
    content_pass_ms: AtomicU64,
    media_passes: AtomicU64,
    media_pass_ms: AtomicU64,
    media_skipped: AtomicU64,
    hashed_bytes: AtomicU64,
}

impl Counters {
    /// Counts bytes that were hashed.
    pub fn add_hashed(&self, bytes: usize) {
        self.hashed_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a metadata pass that was completed.
    pub fn end_metadata_pass(&self, took: Duration) {
        self.metadata_passes.fetch_add(1, Ordering::Relaxed);
        self.metadata_pass_ms.store(milliseconds(took), Ordering::Relaxed);
    }

    /// Counts a content pass that was completed.
    pub fn end_content_pass(&self, took: Duration) {
        self.content_passes.fetch_add(1, Ordering::Relaxed);
        self.content_pass_ms.store(milliseconds(took), Ordering::Relaxed);
    }

    /// Counts a media pass that was completed, but for the `skipped` files that their file-system
    /// does not let read around the page cache.
    pub fn end_media_pass(&self, took: Duration, skipped: u64) {
        self.media_passes.fetch_add(1, Ordering::Relaxed);
        self.media_pass_ms.store(milliseconds(took), Ordering::Relaxed);
        self.media_skipped.store(skipped, Ordering::Relaxed);
    }

    /// How many files the last media pass could not read around the page cache.
    pub fn media_skipped(&self) -> u64 {
        self.media_skipped.load(Ordering::Relaxed)
    }

    /// The counts as they are now; what is fetched is counted elsewhere, and zero here.
    pub fn read(&self) -> ScanCounters {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ScanCounters {
            metadata_passes: load(&self.metadata_passes),
            content_passes: load(&self.content_passes),
            metadata_pass_ms: load(&self.metadata_pass_ms),
            content_pass_ms: load(&self.content_pass_ms),
            media_passes: load(&self.media_passes),
            media_pass_ms: load(&self.media_pass_ms),
            hashed_bytes: load(&self.hashed_bytes),
            fetched_bytes: 0,
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
