//! What the scanner counts, to be read at any time by others.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::api::subd::ScanCounters;
use nix::time::{ClockId, clock_gettime};

/// Counts since subd started.
#[derive(Debug, Default)]
pub struct Counters {
    metadata_passes: AtomicU64,
    content_passes: AtomicU64,
    metadata_pass_ms: AtomicU64,
    content_pass_ms: AtomicU64,
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

    /// The counts as they are now; what is fetched is counted elsewhere, and zero here.
    #[must_use]
    pub fn read(&self) -> ScanCounters {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ScanCounters {
            metadata_passes: load(&self.metadata_passes),
            content_passes: load(&self.content_passes),
            metadata_pass_ms: load(&self.metadata_pass_ms),
            content_pass_ms: load(&self.content_pass_ms),
            hashed_bytes: load(&self.hashed_bytes),
            fetched_bytes: 0,
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The processor time that this thread has used.
#[must_use]
pub fn cpu_time() -> Duration {
    // The clock of the calling thread is always there on Linux; without it passes cost nothing,
    // and run as often as the shortest interval allows.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
