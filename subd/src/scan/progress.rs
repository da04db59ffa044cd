//! The progress and the counters of the scanning thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use api::subd::ScanCounters;
use model::lock::locked;
use model::path::TreePath;

use crate::scan::pace::{CurrentWork, PassKind, StallDetector};

/// What the thread works on, recorded before each system call that may hang.
#[derive(Debug)]
pub struct Progress {
    start: Instant,
    moves: AtomicU64,
    work: Mutex<Option<CurrentWork>>,
}

impl Default for Progress {
    fn default() -> Self {
        Self { start: Instant::now(), moves: AtomicU64::new(0), work: Mutex::new(None) }
    }
}

impl Progress {
    fn work(&self) -> MutexGuard<'_, Option<CurrentWork>> {
        // Each change is one assignment, so a panic cannot leave it half done.
        locked(&self.work)
    }

    /// The time since the start of the scanner.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Records the start of work on `path` in a pass that may take `limit`, or longer while it
    /// makes progress.
    pub fn begin(&self, pass: PassKind, path: TreePath, limit: Duration, may_be_long: bool) {
        let began = self.start.elapsed();
        *self.work() = Some(CurrentWork { pass, path, began, limit, may_be_long });
        self.moved();
    }

    /// Records that the pass works on `path` now.
    pub fn at(&self, path: &TreePath) {
        if let Some(work) = &mut *self.work() {
            work.path.clone_from(path);
        }
        self.moved();
    }

    /// Counts a unit of progress.
    pub fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that there is nothing to do.
    pub fn rest(&self) {
        *self.work() = None;
        self.moved();
    }

    /// Returns what the thread works on, if it is stalled by the decision of `watch`.
    pub fn stalled_work(&self, watch: &mut StallDetector) -> Option<String> {
        let work = self.work();
        watch.check(self.start.elapsed(), self.moves.load(Ordering::Relaxed), work.as_ref())
    }
}

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

    /// Counts a completed media pass. `skipped` files could not be read around the page cache.
    pub fn end_media_pass(&self, took: Duration, skipped: u64) {
        self.media_passes.fetch_add(1, Ordering::Relaxed);
        self.media_pass_ms.store(milliseconds(took), Ordering::Relaxed);
        self.media_skipped.store(skipped, Ordering::Relaxed);
    }

    /// How many files the last media pass could not read around the page cache.
    pub fn media_skipped(&self) -> u64 {
        self.media_skipped.load(Ordering::Relaxed)
    }

    /// Returns the counts. Fetched bytes are counted elsewhere, and 0 here.
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
