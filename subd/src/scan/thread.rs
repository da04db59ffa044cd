//! The mailbox through which others steer the thread that scans, and what both share.
//!
//! The mailbox holds what others want; the thread looks into it between two pieces of work. What
//! must not wait for the end of a pass (settings, a pause, the end) also raises the interrupt.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use model::filter::Patterns;
use model::path::TreePath;
use model::scope::{ScanSettings, Scope};
use tokio::sync::{oneshot, watch};

use super::counters::Counters;
use super::pace::REST_MIN;
use crate::limits::Budgets;
use crate::limits::usage::Usage;
use crate::scan::progress::Progress;
use crate::state::snapshot::Snapshot;

/// The most paths that are distrusted at once; beyond that all that matters is that they are many,
/// and the content pass finds the rest again.
const DISTRUSTED_MAX: usize = 1_000_000;

/// The scanner has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the scanner has ended")]
pub struct Stopped;

/// What others want of the thread.
#[derive(Debug)]
pub(super) struct Mailbox {
    pub(super) settings: Arc<ScanSettings>,
    /// Paths to be read whatever their metadata says.
    pub(super) distrusted: BTreeSet<TreePath>,
    /// Who waits for the next metadata pass.
    pub(super) waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    /// How many guards keep the thread out of the tree.
    pub(super) pauses: usize,
    /// Who waits for the thread to be out.
    pub(super) leaving: Vec<oneshot::Sender<()>>,
    /// The passes to be made now, without limits.
    pub(super) boost: Boost,
    pub(super) stop: bool,
}

/// Which passes are to be made now.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Boost {
    pub(super) metadata: bool,
    pub(super) content: bool,
    pub(super) media: bool,
}

impl Mailbox {
    /// Asks for a pass that reads `paths`; the answer is its snapshot.
    pub(super) fn request(
        &mut self,
        paths: BTreeSet<TreePath>,
    ) -> oneshot::Receiver<Arc<Snapshot>> {
        let (sender, receiver) = oneshot::channel();
        if !self.stop {
            self.waiting.retain(|waiting| !waiting.is_closed());
            self.waiting.push(sender);
            self.distrust(paths);
        }
        receiver
    }

    /// True if somebody waits for the end of the next pass.
    fn is_urgent(&self) -> bool {
        !self.waiting.is_empty() || self.boost.metadata
    }

    pub(super) fn distrust(&mut self, paths: impl IntoIterator<Item = TreePath>) {
        let room = DISTRUSTED_MAX.saturating_sub(self.distrusted.len());
        self.distrusted.extend(paths.into_iter().take(room));
    }
}

/// What the thread and its handles share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) exclusions: Patterns,
    mailbox: Mutex<Mailbox>,
    pub(super) news: Condvar,
    pub(super) interrupt: AtomicBool,
    pub(super) counters: Counters,
    pub(super) budgets: Arc<Budgets>,
    pub(super) progress: Progress,
    snapshots: watch::Sender<Arc<Snapshot>>,
}

impl Shared {
    pub(super) fn new(exclusions: Patterns, settings: ScanSettings, budgets: Arc<Budgets>) -> Self {
        let settings = Arc::new(settings);
        let scope = Scope::of(&settings, exclusions.lines());
        let first = Snapshot {
            settings: Arc::clone(&settings),
            scope,
            revision: 1,
            tree: None,
            report: None,
        };
        Self {
            exclusions,
            mailbox: Mutex::new(Mailbox {
                settings,
                distrusted: BTreeSet::new(),
                waiting: Vec::new(),
                pauses: 0,
                leaving: Vec::new(),
                boost: Boost::default(),
                stop: false,
            }),
            news: Condvar::new(),
            interrupt: AtomicBool::new(false),
            counters: Counters::default(),
            budgets,
            progress: Progress::default(),
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
            mailbox.boost.metadata = true;
            mailbox.boost.content |= content;
            mailbox.boost.media |= media;
        });
    }

    /// Charges what a metadata pass has taken of the machine, and rests until it may read on. What
    /// it looks at costs little processor time, and what has changed is to be hashed at once: only
    /// its reads are limited, and not even those if somebody waits for it.
    pub(super) fn brake(&self, taken: &mut Usage, urgent: bool) {
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
            drop(self.news.wait_timeout(mailbox, time).unwrap_or_else(PoisonError::into_inner));
            self.progress.moved();
            rest = self.budgets.scan.charge(0);
        }
    }

    pub(super) fn mailbox(&self) -> MutexGuard<'_, Mailbox> {
        // Every change of the mailbox is complete before anything in it can panic.
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the mailbox and lets the thread know.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut Mailbox) -> T) -> T {
        let changed = change(&mut self.mailbox());
        self.news.notify_all();
        changed
    }

    /// As [`Shared::change`], and does not wait for the end of a pass.
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
        // Here and not by the thread, so that whoever changed the settings sees no tree of the
        // former ones any more.
        let settings = Arc::clone(&mailbox.settings);
        let scope = Scope::of(&settings, self.exclusions.lines());
        self.publish(|_| Some(Snapshot { settings, scope, revision: 0, tree: None, report: None }));
        drop(mailbox);
        self.news.notify_all();
    }

    /// Puts what `make` gives in the place of the last snapshot, as the next revision. Called
    /// with the mailbox locked.
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

/// Keeps the scanner out of the tree until it is dropped.
#[derive(Debug)]
#[must_use = "the scanner goes on when this is dropped"]
pub struct Pause {
    shared: Arc<Shared>,
    held: bool,
}

impl Pause {
    /// Lets the scanner go on, with `paths` as [`super::Scanner::scan_touched`] takes them: the
    /// very next pass reads them. The answer comes when its snapshot is published.
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
