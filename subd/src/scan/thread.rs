//! The thread that scans, and the mailbox through which others steer it.
//!
//! The mailbox holds what others want; the thread looks into it between two pieces of work. What
//! must not wait for the end of a pass (settings, a pause, the end) also raises the interrupt.

use std::collections::BTreeSet;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::api::subd::ScanReport;
use common::filter::Patterns;
use common::path::TreePath;
use common::report::report;
use common::scope::{ScanSettings, Scope};
use common::tree::{Child, Leaf, Tree};
use tokio::sync::{oneshot, watch};

use super::content::{ContentPass, Step};
use super::counters::Counters;
use super::memory::DirectoryMemory;
use super::pass::{self, Found, PassError, Task};
use super::reading::CHUNK_BYTES;
use super::sight::Sight;
use super::{Pace, Snapshot};
use crate::root::Root;

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
    settings: Arc<ScanSettings>,
    /// Paths to be read whatever their metadata says.
    distrusted: BTreeSet<TreePath>,
    /// Who waits for the next metadata pass.
    waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    /// How many guards keep the thread out of the tree.
    pauses: usize,
    /// Who waits for the thread to be out.
    leaving: Vec<oneshot::Sender<()>>,
    stop: bool,
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

    fn distrust(&mut self, paths: impl IntoIterator<Item = TreePath>) {
        let room = DISTRUSTED_MAX.saturating_sub(self.distrusted.len());
        self.distrusted.extend(paths.into_iter().take(room));
    }
}

/// What the thread and its handles share.
#[derive(Debug)]
pub(super) struct Shared {
    exclusions: Patterns,
    mailbox: Mutex<Mailbox>,
    news: Condvar,
    interrupt: AtomicBool,
    counters: Counters,
    snapshots: watch::Sender<Arc<Snapshot>>,
}

impl Shared {
    pub(super) fn new(exclusions: Patterns, settings: ScanSettings) -> Self {
        let settings = Arc::new(settings);
        let scope = Scope::of(&settings, &exclusions);
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
                stop: false,
            }),
            news: Condvar::new(),
            interrupt: AtomicBool::new(false),
            counters: Counters::default(),
            snapshots: watch::Sender::new(Arc::new(first)),
        }
    }

    pub(super) fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshots.borrow())
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.subscribe()
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    fn mailbox(&self) -> MutexGuard<'_, Mailbox> {
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
        let scope = Scope::of(&settings, &self.exclusions);
        self.publish(|_| Some(Snapshot { settings, scope, revision: 0, tree: None, report: None }));
        drop(mailbox);
        self.news.notify_all();
    }

    /// Puts what `make` gives in the place of the last snapshot, as the next revision. Called
    /// with the mailbox locked.
    fn publish(&self, make: impl FnOnce(&Snapshot) -> Option<Snapshot>) {
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

/// How far the thread steps back behind others (`nice`). The kernel derives from it the lowest
/// priority of disk access, short of the idle class.
const NICENESS: i32 = 15;

/// Scans until it is told to stop.
pub(super) fn run(shared: &Shared, root: &Root, pace: Pace) {
    // No process is named: Linux takes that for the calling thread alone.
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::warn!("the scanner runs with normal priority: {error}");
    }
    Worker {
        shared,
        root,
        pace,
        buffer: vec![0; CHUNK_BYTES].into_boxed_slice(),
        memory: None,
        settings: None,
        metadata_due: Instant::now(),
        not_before: Instant::now(),
        content: None,
        // The first metadata pass reads every file already.
        content_due: Instant::now() + pace.content_pause,
        worked: Duration::ZERO,
    }
    .run();
}

/// What the thread does next.
enum Work {
    Stop,
    Metadata(Sight, BTreeSet<TreePath>, Vec<oneshot::Sender<Arc<Snapshot>>>),
    Content(Tree),
}

struct Worker<'worker> {
    shared: &'worker Shared,
    root: &'worker Root,
    pace: Pace,
    buffer: Box<[u8]>,
    memory: Option<DirectoryMemory>,
    /// The settings of the last metadata pass that was started.
    settings: Option<Arc<ScanSettings>>,
    metadata_due: Instant,
    /// When a pass may start at all, after one that found no root.
    not_before: Instant,
    content: Option<ContentPass>,
    /// When the content pass may go on, or the next one start.
    content_due: Instant,
    /// For how long the content pass has worked since its last rest.
    worked: Duration,
}

impl Worker<'_> {
    fn run(mut self) {
        loop {
            match self.next() {
                Work::Stop => return,
                Work::Metadata(sight, distrusted, waiting) => {
                    self.metadata(&sight, distrusted, waiting);
                }
                Work::Content(tree) => self.content(&tree),
            }
        }
    }

    /// Waits for something to do. Nothing of the tree is open while it waits for the end of a
    /// pause.
    fn next(&mut self) -> Work {
        let mut mailbox = self.shared.mailbox();
        loop {
            self.shared.interrupt.store(false, Ordering::Release);
            if mailbox.stop {
                return Work::Stop;
            }
            if mailbox.pauses > 0 {
                if let Some(content) = &mut self.content {
                    content.leave();
                }
                for leaving in mailbox.leaving.drain(..) {
                    // Whoever does not wait any more has dropped the guard as well.
                    let _gone = leaving.send(());
                }
                mailbox = self.wait(mailbox, None);
                continue;
            }
            let now = Instant::now();
            let asked = !mailbox.waiting.is_empty()
                || self.settings.as_ref().is_none_or(|last| !Arc::ptr_eq(last, &mailbox.settings));
            let metadata_due = if asked { self.not_before } else { self.metadata_due };
            if metadata_due <= now {
                let settings = Arc::clone(&mailbox.settings);
                self.settings = Some(Arc::clone(&settings));
                let sight = Sight::new(settings, self.shared.exclusions.clone());
                let distrusted = mem::take(&mut mailbox.distrusted);
                return Work::Metadata(sight, distrusted, mem::take(&mut mailbox.waiting));
            }
            let until = match &self.shared.snapshot().tree {
                Some(tree) if self.content_due <= now => return Work::Content(tree.clone()),
                Some(_) => self.content_due.min(metadata_due),
                None => metadata_due,
            };
            mailbox = self.wait(mailbox, Some(until));
        }
    }

    fn wait<'guard>(
        &self,
        mailbox: MutexGuard<'guard, Mailbox>,
        until: Option<Instant>,
    ) -> MutexGuard<'guard, Mailbox> {
        match until {
            None => self.shared.news.wait(mailbox).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let limit = until.saturating_duration_since(Instant::now());
                let waited = self.shared.news.wait_timeout(mailbox, limit);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    fn metadata(
        &mut self,
        sight: &Sight,
        mut distrusted: BTreeSet<TreePath>,
        waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    ) {
        let start = Instant::now();
        if let Some(tree) = &self.shared.snapshot().tree {
            add_carriers(tree, &mut distrusted);
        }
        let task = Task {
            root: self.root,
            sight,
            distrusted: &distrusted,
            interrupt: &self.shared.interrupt,
            counters: &self.shared.counters,
        };
        match pass::run(&task, &mut self.memory, &mut self.buffer) {
            Ok(found) => {
                self.shared.counters.end_metadata_pass(start.elapsed());
                self.metadata_due = Instant::now() + self.pace.metadata_interval(found.cpu);
                self.publish(sight, found, distrusted, waiting);
            }
            Err(PassError::Interrupted) => {
                self.metadata_due = Instant::now();
                self.put_back(distrusted, waiting);
            }
            Err(error) => {
                tracing::error!("{}", report(&error));
                self.put_back(distrusted, waiting);
                self.not_before = Instant::now() + self.pace.metadata_interval_min;
                self.metadata_due = self.not_before;
            }
        }
    }

    /// Keeps for the next pass what this one was asked for.
    fn put_back(
        &self,
        distrusted: BTreeSet<TreePath>,
        waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    ) {
        let mut mailbox = self.shared.mailbox();
        if !mailbox.stop {
            mailbox.distrust(distrusted);
            mailbox.waiting.extend(waiting);
        }
    }

    /// Publishes what a pass found, unless the settings have changed meanwhile.
    fn publish(
        &self,
        sight: &Sight,
        found: Found,
        distrusted: BTreeSet<TreePath>,
        waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    ) {
        let mailbox = self.shared.mailbox();
        if *mailbox.settings != *sight.settings() {
            drop(mailbox);
            return self.put_back(distrusted, waiting);
        }
        self.shared.publish(|current| {
            let report = ScanReport {
                scope: current.scope,
                root: found.tree.digest(),
                totals: found.tree.root().totals(),
                kept_directories: found.kept_directories,
                externally_linked: found.externally_linked,
                unreadable: found.unreadable,
            };
            (current.report.as_ref() != Some(&report)).then(|| Snapshot {
                settings: Arc::clone(&current.settings),
                scope: current.scope,
                revision: 0,
                tree: Some(found.tree),
                report: Some(report),
            })
        });
        drop(mailbox);
        let snapshot = self.shared.snapshot();
        for waiting in waiting {
            // Whoever does not wait any more misses nothing.
            let _gone = waiting.send(Arc::clone(&snapshot));
        }
    }

    /// Does one chunk of the content pass.
    fn content(&mut self, tree: &Tree) {
        let start = Instant::now();
        let pass = self.content.get_or_insert_with(ContentPass::default);
        match pass.step(self.root, tree, &mut self.buffer, &self.shared.counters) {
            Step::More => {
                self.worked += start.elapsed();
                if let Some(rest) = self.pace.content_rest(self.worked) {
                    self.worked = Duration::ZERO;
                    self.content_due = Instant::now() + rest;
                }
            }
            Step::Differs(path) => {
                tracing::debug!("{path} does not hold what the tree says: it is read again");
                self.shared.mailbox().distrust([path]);
                self.metadata_due = Instant::now();
            }
            Step::End(took) => {
                self.content = None;
                self.shared.counters.end_content_pass(took);
                self.content_due = Instant::now() + self.pace.content_pause;
            }
        }
    }
}

/// Adds the files that the hard links among `paths` are names of: a pass reads a file by the name
/// that carries it.
fn add_carriers(tree: &Tree, paths: &mut BTreeSet<TreePath>) {
    let carriers: Vec<TreePath> = paths
        .iter()
        .filter_map(|path| match tree.get(path) {
            Some(Child::Leaf(Leaf::HardLink(carrier))) => Some(carrier),
            _ => None,
        })
        .collect();
    paths.extend(carriers);
}
