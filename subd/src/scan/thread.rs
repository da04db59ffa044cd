//! The mailbox through which other threads control the scanning thread.
//!
//! The mailbox holds requests. The thread reads it between two pieces of work. Requests that must
//! not wait for the end of a pass (settings, a pause, the end) also set the interrupt.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use api::fault::{Fault, FaultCode};
use model::filter::Patterns;
use model::lock::locked;
use model::path::TreePath;
use model::scope::{ScanSettings, Scope};
use tokio::sync::{Notify, Semaphore, oneshot, watch};

use crate::limits::memory::available_memory;
use crate::limits::{Budgets, Usage};
use crate::scan::pace::REST_MIN;
use crate::scan::preview::{Preview, PreviewState, check_memory};
use crate::scan::progress::{Counters, Progress};
use crate::state::Snapshot;

/// The most paths that are marked to be read again at once. The content pass finds the others
/// again.
const REREAD_PATHS_MAX: usize = 1_000_000;

/// The scanner has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the scanner has ended")]
pub struct Stopped;

/// The requests to the thread.
#[derive(Debug)]
pub(super) struct Mailbox {
    pub(super) settings: Arc<ScanSettings>,
    /// Paths to be read whatever their metadata says.
    pub(super) reread_paths: BTreeSet<TreePath>,
    /// The callers that wait for the next metadata pass.
    pub(super) waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    /// The number of existing [`Pause`]s.
    pub(super) pauses: usize,
    /// The callers that wait until the thread has closed all of the tree.
    pub(super) leaving: Vec<oneshot::Sender<()>>,
    /// The passes that were requested, without limits.
    pub(super) boost: Boost,
    pub(super) preview: Preview,
    pub(super) stop: bool,
}

/// The passes that were requested.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Boost {
    pub(super) metadata: bool,
    pub(super) content: bool,
    pub(super) media: bool,
}

impl Mailbox {
    /// Requests a pass that reads `paths`. The answer is its snapshot.
    pub(super) fn request(
        &mut self,
        paths: BTreeSet<TreePath>,
    ) -> oneshot::Receiver<Arc<Snapshot>> {
        let (sender, receiver) = oneshot::channel();
        if !self.stop {
            self.preview.invalidate();
            self.waiting.retain(|waiting| !waiting.is_closed());
            self.waiting.push(sender);
            self.request_reread(paths);
        }
        receiver
    }

    /// True if a caller waits for the end of the next pass.
    fn is_urgent(&self) -> bool {
        !self.waiting.is_empty() || self.boost.metadata
    }

    pub(super) fn request_reread(&mut self, paths: impl IntoIterator<Item = TreePath>) {
        let room = REREAD_PATHS_MAX.saturating_sub(self.reread_paths.len());
        self.reread_paths.extend(paths.into_iter().take(room));
    }
}

/// The state that the thread and its handles share.
#[derive(Debug)]
pub(super) struct ScanControl {
    pub(super) exclusions: Patterns,
    mailbox: Mutex<Mailbox>,
    pub(super) wakeup: Condvar,
    pub(super) interrupt: AtomicBool,
    pub(super) counters: Counters,
    pub(super) budgets: Arc<Budgets>,
    pub(super) progress: Progress,
    /// The permit of the one count of owners that may run.
    pub(super) counting: Arc<Semaphore>,
    /// Notified when a preview ends.
    pub(super) preview_ended: Notify,
    snapshots: watch::Sender<Arc<Snapshot>>,
}

impl ScanControl {
    pub(super) fn new(exclusions: Patterns, settings: ScanSettings, budgets: Arc<Budgets>) -> Self {
        let settings = Arc::new(settings);
        let scope = Scope::of(&settings, exclusions.lines());
        let first = Snapshot {
            settings: Arc::clone(&settings),
            scope,
            revision: 1,
            tree: None,
            report: None,
            left_alone: Vec::new(),
            index: OnceLock::new(),
        };
        Self {
            exclusions,
            mailbox: Mutex::new(Mailbox {
                settings,
                reread_paths: BTreeSet::new(),
                waiting: Vec::new(),
                pauses: 0,
                leaving: Vec::new(),
                boost: Boost::default(),
                preview: Preview::default(),
                stop: false,
            }),
            wakeup: Condvar::new(),
            interrupt: AtomicBool::new(false),
            counters: Counters::default(),
            budgets,
            progress: Progress::default(),
            counting: Arc::new(Semaphore::new(1)),
            preview_ended: Notify::new(),
            snapshots: watch::Sender::new(Arc::new(first)),
        }
    }

    pub(super) fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshots.borrow())
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.subscribe()
    }

    pub(super) fn boost(&self, content: bool, media: bool) {
        self.change(|mailbox| {
            mailbox.preview.invalidate();
            mailbox.boost.metadata = true;
            mailbox.boost.content |= content;
            mailbox.boost.media |= media;
        });
    }

    /// Charges what a metadata pass has used, and sleeps until it may continue. Reading metadata
    /// costs little processor time, and changed files must be hashed at once: only its reads are
    /// limited, and not even those if a caller waits for it.
    pub(super) fn throttle(&self, taken: &mut Usage, urgent: bool) {
        self.progress.moved();
        let step = taken.step();
        self.budgets.cpu.note(step.cpu_us());
        if urgent {
            self.budgets.scan.note(step.read_bytes);
            return;
        }
        let mut rest = self.budgets.scan.charge(step.read_bytes).filter(|rest| *rest >= REST_MIN);
        while let Some(time) = rest {
            let mailbox = self.mailbox();
            if self.interrupt.load(Ordering::Acquire) || mailbox.is_urgent() {
                return;
            }
            drop(self.wakeup.wait_timeout(mailbox, time).unwrap_or_else(PoisonError::into_inner));
            self.progress.moved();
            rest = self.budgets.scan.charge(0);
        }
    }

    /// As [`ScanControl::throttle`], for a preview by `settings`: all that it uses is limited, and
    /// it gives way to the metadata pass that is due at `end`.
    pub(super) fn throttle_preview(
        &self,
        taken: &mut Usage,
        settings: &Arc<ScanSettings>,
        end: Instant,
    ) {
        self.progress.moved();
        let Budgets { cpu, scan, .. } = &*self.budgets;
        let charge = |cpu_us, read_bytes| {
            let rest = cpu.charge(cpu_us).max(scan.charge(read_bytes));
            rest.filter(|rest| *rest >= REST_MIN)
        };
        let step = taken.step();
        let mut rest = charge(step.cpu_us(), step.read_bytes);
        loop {
            let mut mailbox = self.mailbox();
            mailbox.preview.forget_old(self.progress.elapsed());
            let is_wanted =
                mailbox.preview.wanted().is_some_and(|wanted| Arc::ptr_eq(wanted, settings));
            if !is_wanted || mailbox.is_urgent() || end <= Instant::now() {
                self.interrupt.store(true, Ordering::Release);
            }
            let Some(time) = rest.filter(|_| !self.interrupt.load(Ordering::Acquire)) else {
                return;
            };
            drop(self.wakeup.wait_timeout(mailbox, time).unwrap_or_else(PoisonError::into_inner));
            self.progress.moved();
            rest = charge(0, 0);
        }
    }

    /// As [`ScanControl::throttle`], for a count of owners by another thread: all that it uses is
    /// limited.
    ///
    /// # Errors
    ///
    /// Why the count must end.
    pub(super) fn throttle_count(
        &self,
        taken: &mut Usage,
        end: Instant,
        is_wanted: impl Fn() -> bool,
    ) -> Result<(), String> {
        let Budgets { cpu, scan, .. } = &*self.budgets;
        let step = taken.step();
        let mut rest = cpu.charge(step.cpu_us()).max(scan.charge(step.read_bytes));
        loop {
            let mailbox = self.mailbox();
            if mailbox.stop || mailbox.pauses > 0 {
                return Err("the machine stopped to scan, as for an update".to_owned());
            }
            if !is_wanted() {
                return Err("nobody waits for it".to_owned());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err("it would take too long within the limits of the machine".to_owned());
            }
            let Some(time) = rest.filter(|rest| *rest >= REST_MIN) else { return Ok(()) };
            let wait = self.wakeup.wait_timeout(mailbox, time.min(left));
            drop(wait.unwrap_or_else(PoisonError::into_inner));
            rest = cpu.charge(0).max(scan.charge(0));
        }
    }

    /// Asks what a scan by `settings` finds, and has it made if that is not known.
    pub(super) fn ask_preview(&self, settings: &ScanSettings) -> Result<PreviewState, Fault> {
        let report = self.snapshot().report.clone();
        let entries = report.map_or(0, |report| report.totals.entries);
        let (now, hashed) = (self.progress.elapsed(), self.counters.read().hashed_bytes);
        // Read here, because the scanner waits for the mailbox.
        let available = available_memory();
        self.change(|mailbox| match mailbox.stop {
            true => Err(Fault::new(FaultCode::Unavailable, "the scanner has ended")),
            false => {
                mailbox.preview.ask(settings, now, hashed, || check_memory(entries, available))
            }
        })
    }

    pub(super) fn mailbox(&self) -> MutexGuard<'_, Mailbox> {
        // Every change is complete before a panic can occur.
        locked(&self.mailbox)
    }

    /// Changes the mailbox and wakes the thread.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Mailbox) -> T) -> T {
        let changed = change(&mut self.mailbox());
        self.wakeup.notify_all();
        changed
    }

    /// As [`ScanControl::change`], and interrupts the pass.
    fn interrupt<T>(&self, change: impl FnOnce(&mut Mailbox) -> T) -> T {
        self.change(|mailbox| {
            self.interrupt.store(true, Ordering::Release);
            change(mailbox)
        })
    }

    pub(super) fn set_settings(&self, settings: ScanSettings) {
        let mut mailbox = self.mailbox();
        if *mailbox.settings == settings {
            return;
        }
        mailbox.settings = Arc::new(settings);
        self.interrupt.store(true, Ordering::Release);
        // Here and not by the thread, so that the caller sees no tree of the former settings any
        // more.
        let settings = Arc::clone(&mailbox.settings);
        let scope = Scope::of(&settings, self.exclusions.lines());
        self.publish(|_| {
            Some(Snapshot {
                settings,
                scope,
                revision: 0,
                tree: None,
                report: None,
                left_alone: Vec::new(),
                index: OnceLock::new(),
            })
        });
        drop(mailbox);
        self.wakeup.notify_all();
    }

    /// Replaces the last snapshot by what `make` returns, as the next revision. Called with the
    /// mailbox locked.
    pub(super) fn publish(&self, make: impl FnOnce(&Snapshot) -> Option<Snapshot>) {
        self.snapshots.send_if_modified(|current| match make(current) {
            Some(next) => {
                *current = Arc::new(Snapshot { revision: current.revision + 1, ..next });
                true
            }
            None => false,
        });
    }

    pub(super) fn pause(shared: &Arc<Self>) -> (Pause, oneshot::Receiver<()>) {
        let (sender, receiver) = oneshot::channel();
        shared.interrupt(|mailbox| {
            mailbox.pauses += 1;
            if !mailbox.stop {
                mailbox.leaving.retain(|leaving| !leaving.is_closed());
                mailbox.leaving.push(sender);
            }
        });
        (Pause { shared: Arc::clone(shared), held: true }, receiver)
    }

    pub(super) fn stop(&self) {
        self.interrupt(|mailbox| {
            mailbox.stop = true;
            mailbox.waiting.clear();
            mailbox.leaving.clear();
        });
    }
}

/// Stops the scanner until it is dropped.
#[derive(Debug)]
#[must_use = "the scanner goes on when this is dropped"]
pub struct Pause {
    shared: Arc<ScanControl>,
    held: bool,
}

impl Pause {
    /// Lets the scanner continue, and reads `paths` in the next pass as
    /// [`crate::scan::Scanner::scan_touched`] does. The future ends when its snapshot is published.
    pub fn scan_touched(
        mut self,
        paths: BTreeSet<TreePath>,
    ) -> impl Future<Output = Result<Arc<Snapshot>, Stopped>> + Send + use<> {
        self.held = false;
        let answer = self.shared.change(|mailbox| {
            mailbox.pauses -= 1;
            mailbox.request(paths)
        });
        async move { answer.await.map_err(|_| Stopped) }
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        if self.held {
            self.shared.change(|mailbox| mailbox.pauses -= 1);
        }
    }
}
