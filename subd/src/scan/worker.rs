//! The worker: what the scanning thread does next, and how much it takes for it.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::mem;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::subd::ScanReport;
use model::path::TreePath;
use model::report::report;
use model::scope::ScanSettings;
use model::tree::{Child, Leaf, Tree};
use tokio::sync::oneshot;

use super::Pace;
use super::content::{FilePass, Means, Step};
use super::medium::OnMedium;
use super::memory::DirectoryMemory;
use super::pace::REST_MIN;
use super::pass::{self, Found, PassError, Task};
use super::reading::{CHUNK_BYTES, Via};
use super::stall::Pass;
use super::thread::{Mailbox, Shared};
use crate::limits::usage::Usage;
use crate::root::Root;
use crate::root::aligned_buffer::AlignedBuffer;
use crate::scan::coverage::PathCoverage;
use crate::state::snapshot::Snapshot;

/// How far the thread steps back behind others (`nice`).
const NICENESS: i32 = 15;

/// Scans until it is told to stop.
pub(super) fn run(shared: &Shared, root: &Root, pace: Pace) {
    step_back();
    let now = Instant::now();
    Worker {
        shared,
        root,
        pace,
        buffer: AlignedBuffer::new(CHUNK_BYTES),
        memory: None,
        settings: None,
        metadata_due: now,
        not_before: now,
        stall_limit: pace.stall_limit(pace.metadata_interval_max, Duration::ZERO),
        first: true,
        urgent: false,
        // The first metadata pass reads every file already.
        content: Round::new(Via::Cache, now + pace.content_pause),
        media: Round::new(Via::Medium, now + pace.media_pause),
        last: Via::Medium,
        medium: OnMedium::default(),
        taken: Usage::now(),
        resting: false,
    }
    .run();
}

/// Lets all others go first: with the processor, and with the disk.
fn step_back() {
    // No process is named: Linux takes that for the calling thread alone.
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::warn!("the scanner runs with normal priority: {error}");
    }
    // No safe library has the call that sets the class of a thread, and util-linux is everywhere.
    let thread = nix::unistd::gettid().to_string();
    let ionice = Command::new("ionice")
        .args(["-c", "3", "-p", &thread])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match ionice {
        Ok(status) if status.success() => {}
        Ok(status) => tracing::warn!("the scanner's disk access is not idle: ionice: {status}"),
        Err(error) => tracing::warn!("the scanner's disk access is not idle: ionice: {error}"),
    }
}

/// What the thread does next.
enum CurrentWork {
    Stop,
    Metadata(PathCoverage, BTreeSet<TreePath>, Vec<oneshot::Sender<Arc<Snapshot>>>),
    Files(Via, Tree),
}

/// The passes of one kind over all files.
struct Round {
    via: Via,
    pass: Option<FilePass>,
    /// When the next one may start.
    due: Instant,
    /// True if the one that is under way has no limits.
    boosted: bool,
}

impl Round {
    fn new(via: Via, due: Instant) -> Self {
        Self { via, pass: None, due, boosted: false }
    }

    /// Starts anew, and without limits.
    fn boost(&mut self) {
        *self = Self { boosted: true, ..Self::new(self.via, Instant::now()) };
    }

    fn leave(&mut self) {
        if let Some(pass) = &mut self.pass {
            pass.leave();
        }
    }

    /// When it may go on, if what is limited may go on at `paid`.
    fn ready(&self, paid: Instant) -> Instant {
        match (self.boosted, &self.pass) {
            (true, _) => self.due,
            (false, Some(_)) => paid,
            (false, None) => self.due.max(paid),
        }
    }
}

struct Worker<'worker> {
    shared: &'worker Shared,
    root: &'worker Root,
    pace: Pace,
    buffer: AlignedBuffer,
    memory: Option<DirectoryMemory>,
    /// The settings of the last metadata pass that was started.
    settings: Option<Arc<ScanSettings>>,
    metadata_due: Instant,
    /// When a pass may start at all, after one that found no root.
    not_before: Instant,
    /// How long a metadata pass may take, and anything that holds it up.
    stall_limit: Duration,
    /// True until a metadata pass under these settings is complete.
    first: bool,
    /// True if the next metadata pass was asked for and has no limits.
    urgent: bool,
    content: Round,
    media: Round,
    /// Which of the two had its turn last.
    last: Via,
    medium: OnMedium,
    taken: Usage,
    /// True while what was taken is paid for.
    resting: bool,
}

impl Worker<'_> {
    fn run(mut self) {
        loop {
            match self.next() {
                CurrentWork::Stop => return,
                CurrentWork::Metadata(coverage, distrusted, waiting) => {
                    self.metadata(&coverage, distrusted, waiting);
                }
                CurrentWork::Files(via, tree) => self.files(via, &tree),
            }
        }
    }

    /// Waits for something to do. Nothing of the tree is open while it waits for the end of a
    /// pause.
    fn next(&mut self) -> CurrentWork {
        let mut mailbox = self.shared.mailbox();
        loop {
            self.shared.interrupt.store(false, Ordering::Release);
            if mailbox.stop {
                return CurrentWork::Stop;
            }
            self.take_boost(&mut mailbox);
            if mailbox.pauses > 0 {
                self.content.leave();
                self.media.leave();
                for leaving in mailbox.leaving.drain(..) {
                    // Whoever does not wait any more has dropped the guard as well.
                    let _gone = leaving.send(());
                }
                mailbox = self.wait(mailbox, None);
                continue;
            }
            let now = Instant::now();
            let changed =
                self.settings.as_ref().is_none_or(|last| !Arc::ptr_eq(last, &mailbox.settings));
            let asked = changed || self.urgent || !mailbox.waiting.is_empty();
            let metadata_due = if asked { self.not_before } else { self.metadata_due };
            if metadata_due <= now {
                self.first |= changed;
                let settings = Arc::clone(&mailbox.settings);
                self.settings = Some(Arc::clone(&settings));
                let coverage = PathCoverage::new(settings, self.shared.exclusions.clone());
                let distrusted = mem::take(&mut mailbox.distrusted);
                return CurrentWork::Metadata(
                    coverage,
                    distrusted,
                    mem::take(&mut mailbox.waiting),
                );
            }
            let until = match &self.shared.snapshot().tree {
                Some(tree) => {
                    let (via, ready) = self.turn(now);
                    if ready <= now {
                        return CurrentWork::Files(via, tree.clone());
                    }
                    ready.min(metadata_due)
                }
                None => metadata_due,
            };
            mailbox = self.wait(mailbox, Some(until));
        }
    }

    fn take_boost(&mut self, mailbox: &mut Mailbox) {
        let boost = mem::take(&mut mailbox.boost);
        self.urgent |= boost.metadata;
        if boost.content {
            self.content.boost();
        }
        if boost.media {
            self.media.boost();
        }
    }

    /// Which of the passes over all files may go on first, and when.
    fn turn(&mut self, now: Instant) -> (Via, Instant) {
        let budgets = &self.shared.budgets;
        let debt = budgets.cpu.charge(0).max(budgets.scan.charge(0));
        let debt = debt.filter(|debt| self.resting || *debt >= REST_MIN);
        self.resting = debt.is_some();
        let paid = debt.map_or(now, |debt| now + debt);
        let (content, media) = (self.content.ready(paid), self.media.ready(paid));
        let both = content <= now && media <= now;
        let content_first = if both { self.last == Via::Medium } else { content <= media };
        if content_first { (Via::Cache, content) } else { (Via::Medium, media) }
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
        coverage: &PathCoverage,
        mut distrusted: BTreeSet<TreePath>,
        waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    ) {
        let start = Instant::now();
        if let Some(tree) = &self.shared.snapshot().tree {
            add_carriers(tree, &mut distrusted);
        }
        let urgent = self.urgent || !waiting.is_empty();
        let progress = &self.shared.progress;
        progress.begin(Pass::Metadata, TreePath::root(), self.stall_limit, self.first);
        let taken = RefCell::new(&mut self.taken);
        let task = Task {
            root: self.root,
            coverage,
            distrusted: &distrusted,
            medium: &self.medium,
            interrupt: &self.shared.interrupt,
            counters: &self.shared.counters,
            progress,
            brake: &|| self.shared.brake(&mut taken.borrow_mut(), urgent),
        };
        let result = pass::run(&task, &mut self.memory, self.buffer.bytes());
        self.shared.brake(&mut self.taken, true);
        self.shared.progress.rest();
        match result {
            Ok(found) => {
                let took = start.elapsed();
                self.shared.counters.end_metadata_pass(took);
                let interval = self.pace.metadata_interval(found.cpu);
                self.stall_limit = self.pace.stall_limit(interval, took);
                self.metadata_due = Instant::now() + interval;
                self.urgent = false;
                self.first = false;
                self.publish(coverage, found, distrusted, waiting);
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
        coverage: &PathCoverage,
        found: Found,
        distrusted: BTreeSet<TreePath>,
        waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    ) {
        let mailbox = self.shared.mailbox();
        if *mailbox.settings != *coverage.settings() {
            drop(mailbox);
            return self.put_back(distrusted, waiting);
        }
        self.shared.publish(|current| {
            let report = ScanReport {
                kept_directories: found.kept_directories,
                externally_linked: found.externally_linked,
                unreadable: found.unreadable,
                occupied: found.occupied,
                times: self.root.times(),
                ..ScanReport::of(current.scope, &found.tree)
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

    /// Does one chunk of a pass over all files.
    fn files(&mut self, via: Via, tree: &Tree) {
        let (round, kind) = match via {
            Via::Cache => (&mut self.content, Pass::Content),
            Via::Medium => (&mut self.media, Pass::Media),
        };
        self.last = via;
        let pass = round.pass.get_or_insert_with(|| FilePass::new(via));
        let place = pass.place().cloned().unwrap_or_else(TreePath::root);
        self.shared.progress.begin(kind, place, self.stall_limit, false);
        let step = pass.step(&mut Means {
            root: self.root,
            tree,
            medium: &self.medium,
            buffer: self.buffer.bytes(),
            counters: &self.shared.counters,
        });
        self.shared.progress.rest();
        let (taken, budgets) = (self.taken.step(), &self.shared.budgets);
        if round.boosted {
            budgets.cpu.note(taken.cpu_us());
            budgets.scan.note(taken.read_bytes);
        } else {
            // How long to rest is asked before the next chunk.
            let _rest = budgets.cpu.charge(taken.cpu_us());
            let _rest = budgets.scan.charge(taken.read_bytes);
        }
        match step {
            Step::More => {}
            Step::Differs(path) => {
                tracing::debug!("{path} does not hold what the tree says: it is read again");
                self.read_again(path);
            }
            Step::Decayed(path, status) => {
                tracing::warn!("{path} holds something else on its medium than in the page cache");
                self.medium.add(path.clone(), &status);
                self.read_again(path);
            }
            Step::End { took, skipped } => self.end(via, took, skipped, tree),
        }
    }

    /// Has the next metadata pass read `path`, at once.
    fn read_again(&mut self, path: TreePath) {
        self.shared.mailbox().distrust([path]);
        self.metadata_due = Instant::now();
    }

    fn end(&mut self, via: Via, took: Duration, skipped: u64, tree: &Tree) {
        let now = Instant::now();
        match via {
            Via::Cache => {
                self.content = Round::new(via, now + self.pace.content_pause);
                self.shared.counters.end_content_pass(took);
            }
            Via::Medium => {
                self.media = Round::new(via, now + self.pace.media_pause);
                self.medium.retain(|path| tree.file(path).is_some());
                self.shared.counters.end_media_pass(took, skipped);
                if skipped > 0 {
                    tracing::info!("{skipped} files cannot be read around the page cache");
                }
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
