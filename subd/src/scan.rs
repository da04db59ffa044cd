//! The scanner: knows at any time what the managed tree holds, at a negligible cost.
//!
//! One thread of its own scans for ever. The *metadata pass* looks at every entry and hashes each
//! file whose inode, size, time of modification or of change has moved; it runs as often as half a
//! per cent of a core allows, and at once when asked. The *content pass* hashes every file
//! whatever its metadata says, through the page cache; the *media pass* does so around it, because
//! the cache hides what happened to the medium. Both go a chunk at a time, so that they hold up
//! neither a metadata pass nor a command. A file whose content is not what the tree says is then
//! read again by a metadata pass, which is the only one that changes the tree.
//!
//! [`Pace`] says how often passes come, [`Budgets`] how much they take meanwhile. No pass leaves
//! anything in the page cache that was not there before.
//!
//! # Invariants
//!
//! * A [`Snapshot`] is immutable, and complete for its settings or empty.
//! * Directories that did not change are the same `Arc` in one snapshot and the next.
//! * While a [`Pause`] is held nothing of the tree is open or looked at.
//! * `/.subd` is never looked at.

mod content;
pub mod counters;
pub mod coverage;
pub mod file_order;
pub mod links;
pub mod medium;
pub mod memory;
pub mod pace;
pub mod pass;
pub mod progress;
pub mod reading;
pub mod stall;
mod thread;
pub mod watchdog;
mod worker;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::thread::JoinHandle;

use api::subd::ScanCounters;
use model::filter::Patterns;
use model::path::TreePath;
use model::scope::ScanSettings;
use tokio::sync::watch;

use crate::limits::Budgets;
use crate::state::snapshot::Snapshot;

pub use pace::Pace;
use stall::StallDetector;
use thread::{Mailbox, Shared};
pub use thread::{Pause, Stopped};

/// A handle of the scanning thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct Scanner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Scanner {
    /// Starts to scan `root`: what `settings` cover, less the local `exclusions`. Passes come at
    /// `pace`, and take no more of the machine than `budgets` allow.
    ///
    /// # Errors
    ///
    /// If the system gives no thread.
    pub fn start(
        root: Arc<crate::root::Root>,
        exclusions: Patterns,
        settings: ScanSettings,
        pace: Pace,
        budgets: Arc<Budgets>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(exclusions, settings, budgets));
        let worker = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("scan".to_owned())
            .spawn(move || worker::run(&worker, &root, pace))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// What is known now.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared.snapshot()
    }

    /// Follows what is known: the receiver sees each new snapshot.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.shared.subscribe()
    }

    /// What was counted since the start. Counters alone make no new snapshot.
    #[must_use]
    pub fn counters(&self) -> ScanCounters {
        self.shared.counters.read()
    }

    /// How many files the last media pass could not read around the page cache.
    #[must_use]
    pub fn media_skipped(&self) -> u64 {
        self.shared.counters.media_skipped()
    }

    /// Makes a metadata pass now, and the passes over all files that are asked for from their
    /// beginning, without limits until each has come to its end.
    pub fn boost(&self, content: bool, media: bool) {
        self.shared.boost(content, media);
    }

    /// Looks whether the thread stands still, and says what it is at if it does. `watch` is what
    /// the same watcher used before.
    #[must_use]
    pub fn stalled(&self, watch: &mut StallDetector) -> Option<String> {
        self.shared.progress.look(watch)
    }

    /// Scans by other settings from now on. The snapshot is empty at once, until the first pass
    /// under them is complete; hashes of the same algorithm are used again. Equal settings change
    /// nothing.
    pub fn set_settings(&self, settings: ScanSettings) {
        self.shared.set_settings(settings);
    }

    /// Runs a metadata pass that starts after this call, and waits for its snapshot.
    ///
    /// # Errors
    ///
    /// [`Stopped`] if the scanner ends first.
    pub async fn rescan_now(&self) -> Result<Arc<Snapshot>, Stopped> {
        self.scan_touched(BTreeSet::new()).await
    }

    /// As [`Scanner::rescan_now`], and reads `paths` whatever their metadata says. What lies below
    /// a path is read only where it has moved.
    ///
    /// # Errors
    ///
    /// [`Stopped`] if the scanner ends first.
    pub async fn scan_touched(&self, paths: BTreeSet<TreePath>) -> Result<Arc<Snapshot>, Stopped> {
        let answer = self.shared.change(|mailbox: &mut Mailbox| mailbox.request(paths));
        answer.await.map_err(|_| Stopped)
    }

    /// Waits until the scanner is out of the tree, and keeps it out until the guard is dropped. A
    /// pass that is under way is given up; what it has read is not lost. A pass that is waited for
    /// meanwhile comes after the guard is gone.
    ///
    /// # Errors
    ///
    /// [`Stopped`] if the scanner has ended.
    pub async fn pause(&self) -> Result<Pause, Stopped> {
        let (guard, out) = Shared::pause(&self.shared);
        out.await.map_err(|_| Stopped)?;
        Ok(guard)
    }

    /// Ends the thread and waits for it: for a chunk of a file at most.
    pub fn stop(&self) {
        self.shared.stop();
        let thread = self.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
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
