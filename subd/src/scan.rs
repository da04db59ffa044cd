//! The scanner: keeps an up-to-date tree of the managed root, at a negligible cost.
//!
//! One thread scans all the time. The *metadata pass* reads the status of every entry and hashes
//! each file whose inode, size, time of modification or time of change differs; it runs as often as
//! half a per cent of a core allows, and at once on request. The *content pass* hashes every file
//! whatever its metadata says, through the page cache; the *media pass* does so around it, because
//! the cache hides damage of the medium. Both work chunk by chunk, so that they delay neither a
//! metadata pass nor a request. A file whose content differs from the tree is then read again by a
//! metadata pass, which is the only pass that changes the tree.
//!
//! A *preview* is a metadata pass with other settings, whose result is not published. It starts
//! from a copy of what the last pass has left, so that only unknown files are hashed. It takes
//! turns with the passes over all files, and gives way at once to passes that somebody waits for.
//!
//! A *count of owners* walks what scans leave out, in a thread of its own that is charged the same
//! budgets; it ends when the scanner pauses.
//!
//! [`Pace`] says how often passes come, [`Budgets`] how much they take meanwhile. No pass leaves
//! anything in the page cache that was not there before.
//!
//! # Invariants
//!
//! * A [`Snapshot`] is immutable, and complete for its settings or empty.
//! * Directories that did not change are the same `Arc` in one snapshot and the next.
//! * While a [`Pause`] exists nothing of the tree is open or read.
//! * `/.subd` is never read.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use api::fault::{Fault, FaultCode};
use api::subd::{Alarm, CountOwnersReply, CountOwnersRequest, ScanCounters};
use model::filter::Patterns;
use model::lock::locked;
use model::path::TreePath;
use model::scope::ScanSettings;
use thread::{Mailbox, ScanControl};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::limits::Budgets;
use crate::scan::pace::{Pace, StallDetector};
use crate::state::{ReportState, Snapshot};

mod content;
pub mod coverage;
pub mod known_entries;
mod owner_count;
pub mod pace;
pub mod pass;
mod preview;
pub mod progress;
pub mod reading;
mod thread;
mod worker;

pub use preview::PreviewState;
pub use thread::{Pause, Stopped};

/// The stack of the thread: what is known of a deep tree is copied for a preview.
const STACK_BYTES: usize = 32 << 20;

/// The handle of the scanning thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct Scanner {
    shared: Arc<ScanControl>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Scanner {
    /// Starts to scan `root`: what `settings` cover without the local `exclusions`, at `pace` and
    /// within `budgets`.
    pub fn start(
        root: Arc<crate::root::Root>,
        exclusions: Patterns,
        settings: ScanSettings,
        pace: Pace,
        budgets: Arc<Budgets>,
    ) -> io::Result<Self> {
        let shared = Arc::new(ScanControl::new(exclusions, settings, budgets));
        let worker = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("scan".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || worker::run(&worker, &root, pace))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Returns the latest snapshot.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared.snapshot()
    }

    /// Returns a receiver of each new snapshot.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.shared.subscribe()
    }

    /// Returns the counters since the start. A change of counters alone makes no new snapshot.
    pub fn counters(&self) -> ScanCounters {
        self.shared.counters.read()
    }

    /// Returns how many files the last media pass could not read around the page cache.
    pub fn media_skipped(&self) -> u64 {
        self.shared.counters.media_skipped()
    }

    /// Runs a metadata pass now, and the requested passes over all files from their beginning. Each
    /// has no limits until it ends.
    pub fn boost(&self, content: bool, media: bool) {
        self.shared.boost(content, media);
    }

    /// Returns what the thread works on if it is stalled. `watch` is the state of the caller
    /// between calls.
    pub fn stalled(&self, watch: &mut StallDetector) -> Option<String> {
        self.shared.progress.stalled_work(watch)
    }

    /// Scans by other settings from now on. The snapshot is empty until the first pass under them
    /// is complete; hashes of the same algorithm are used again. Equal settings change nothing.
    pub fn set_settings(&self, settings: ScanSettings) {
        self.shared.set_settings(settings);
    }

    /// Runs a metadata pass that starts after this call, and waits for its snapshot.
    pub async fn rescan_now(&self) -> Result<Arc<Snapshot>, Stopped> {
        self.scan_touched(BTreeSet::new()).await
    }

    /// As [`Scanner::rescan_now`], and reads `paths` even if their metadata is unchanged. What lies
    /// below a path is read only if its metadata has changed.
    pub async fn scan_touched(&self, paths: BTreeSet<TreePath>) -> Result<Arc<Snapshot>, Stopped> {
        let answer = self.shared.change(|mailbox: &mut Mailbox| mailbox.request(paths));
        answer.await.map_err(|_| Stopped)
    }

    /// Returns what a scan by `settings` finds beside the one in force. Has it made if that is not
    /// known, and waits `wait` for its end.
    ///
    /// # Errors
    ///
    /// A fault that says why it is not made, or has failed.
    pub async fn preview(
        &self,
        settings: &ScanSettings,
        wait: Duration,
    ) -> Result<PreviewState, Fault> {
        let deadline = Instant::now() + wait;
        loop {
            let ended = self.shared.preview_ended.notified();
            let state = self.shared.ask_preview(settings)?;
            let is_done = matches!(state, PreviewState::Done(..));
            if is_done || timeout_at(deadline, ended).await.is_err() {
                return Ok(state);
            }
        }
    }

    /// Returns what the last preview found, as long as it is kept.
    pub fn previewed(&self) -> Option<Arc<Snapshot>> {
        self.shared.mailbox().preview.found().cloned()
    }

    /// Counts the entries that a scan leaves out by their owners.
    ///
    /// # Errors
    ///
    /// A fault that says why nothing is counted.
    pub async fn count_owners(
        &self,
        root: Arc<crate::root::Root>,
        request: CountOwnersRequest,
    ) -> Result<CountOwnersReply, Fault> {
        let answer = owner_count::start(&self.shared, root, request)?;
        answer.await.map_err(|_| Fault::new(FaultCode::Internal, "the count ended by a panic"))
    }

    /// Waits until the scanner has closed all of the tree, and stops it until the returned value is
    /// dropped. A pass that is under way is aborted; what it has read is not lost. A pass that a
    /// caller waits for runs after that.
    pub async fn pause(&self) -> Result<Pause, Stopped> {
        let (guard, out) = ScanControl::pause(&self.shared);
        out.await.map_err(|_| Stopped)?;
        Ok(guard)
    }

    /// Ends the thread and waits for it, for the time of one chunk of a file.
    pub fn stop(&self) {
        self.shared.stop();
        let thread = locked(&self.thread).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the scanner ended by a panic");
        }
    }
}

impl Drop for Scanner {
    fn drop(&mut self) {
        self.stop();
    }
}

/// How often [`watch_for_stalls`] checks.
const STALL_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Raises [`Alarm::ScannerStalled`] while the scanner makes no progress, until `stop` is cancelled.
/// It is a task of its own, because a scanner that hangs cannot report that.
pub async fn watch_for_stalls(
    scanner: Arc<Scanner>,
    report_state: Arc<ReportState>,
    stop: CancellationToken,
) {
    let mut ticks = tokio::time::interval(STALL_CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watch = StallDetector::default();
    let mut raised: Option<String> = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => return,
        }
        let stalled = scanner.stalled(&mut watch);
        if stalled == raised {
            continue;
        }
        match &stalled {
            Some(what) => {
                tracing::warn!("the scanner is stalled: {what}");
                report_state.raise(Alarm::ScannerStalled(what.clone()));
            }
            None => {
                tracing::info!("the scanner makes progress again");
                report_state.clear(|alarm| matches!(alarm, Alarm::ScannerStalled(_)));
            }
        }
        raised = stalled;
    }
}
