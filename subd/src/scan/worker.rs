//! The worker: decides what the scanning thread does next, within its budgets.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::mem;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use api::subd::ScanReport;
use model::display::error_chain;
use model::path::TreePath;
use model::scope::{ScanSettings, Scope};
use model::tree::{Child, Leaf, Tree};
use tokio::sync::oneshot;

use crate::limits::Usage;
use crate::root::AlignedBuffer;
use crate::root::Root;
use crate::scan::content::{ChunkContext, ChunkResult, FilePass};
use crate::scan::coverage::PathCoverage;
use crate::scan::known_entries::DamagedFiles;
use crate::scan::pace::Pace;
use crate::scan::pace::PassKind;
use crate::scan::pace::REST_MIN;
use crate::scan::pass::{self, PassContext, PassError, PassMemory, PassResult};
use crate::scan::preview::PreviewTurn;
use crate::scan::reading::{CHUNK_BYTES, ReadFrom};
use crate::scan::thread::{Mailbox, ScanControl};
use crate::state::Snapshot;

mod preview_pass;

/// The priority of the thread (`nice`).
const NICENESS: i32 = 15;

/// Scans until it is stopped.
pub(super) fn run(shared: &ScanControl, root: &Root, pace: Pace) {
    lower_priority();
    let now = Instant::now();
    Worker {
        shared,
        root,
        pace,
        buffer: AlignedBuffer::new(CHUNK_BYTES),
        memory: PassMemory::default(),
        preview: None,
        settings: None,
        metadata_due: now,
        not_before: now,
        stall_limit: pace.stall_limit(pace.metadata_interval_max, Duration::ZERO),
        first: true,
        urgent: false,
        // The first metadata pass reads every file already.
        content: PassSchedule::new(ReadFrom::Cache, now + pace.content_pause),
        media: PassSchedule::new(ReadFrom::Medium, now + pace.media_pause),
        last: ReadFrom::Medium,
        medium: DamagedFiles::default(),
        taken: Usage::now(),
        resting: false,
    }
    .run();
}

/// Gives the thread low priority for the processor and the disk.
pub(super) fn lower_priority() {
    // Without a process, Linux sets the priority of the calling thread alone.
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::warn!("the scanner runs with normal priority: {error}");
    }
    // No safe library sets the I/O class of a thread, and util-linux is everywhere.
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

/// The next work of the thread.
enum NextWork {
    Stop,
    Metadata(PathCoverage, BTreeSet<TreePath>, Vec<oneshot::Sender<Arc<Snapshot>>>),
    Files(ReadFrom, Tree),
    Preview(Arc<ScanSettings>),
}

/// What a preview that was interrupted has left.
struct InterruptedPreview {
    settings: Arc<ScanSettings>,
    memory: PassMemory,
    turn: PreviewTurn,
}

/// The schedule of one kind of pass over all files.
struct PassSchedule {
    via: ReadFrom,
    pass: Option<FilePass>,
    /// When the next one may start.
    due: Instant,
    /// True if the pass that is under way has no limits.
    boosted: bool,
}

impl PassSchedule {
    fn new(via: ReadFrom, due: Instant) -> Self {
        Self { via, pass: None, due, boosted: false }
    }

    /// Starts again, and without limits.
    fn boost(&mut self) {
        *self = Self { boosted: true, ..Self::new(self.via, Instant::now()) };
    }

    /// True if it has something to do, once it may.
    fn is_due(&self, now: Instant) -> bool {
        self.pass.is_some() || self.due <= now
    }

    fn leave(&mut self) {
        if let Some(pass) = &mut self.pass {
            pass.leave();
        }
    }

    /// Returns when it may continue, if limited passes may continue at `paid`.
    fn ready(&self, paid: Instant) -> Instant {
        match (self.boosted, &self.pass) {
            (true, _) => self.due,
            (false, Some(_)) => paid,
            (false, None) => self.due.max(paid),
        }
    }
}

struct Worker<'worker> {
    shared: &'worker ScanControl,
    root: &'worker Root,
    pace: Pace,
    buffer: AlignedBuffer,
    memory: PassMemory,
    preview: Option<InterruptedPreview>,
    /// The settings of the last metadata pass that was started.
    settings: Option<Arc<ScanSettings>>,
    metadata_due: Instant,
    /// The earliest start of a pass, after one that failed.
    not_before: Instant,
    /// How long a metadata pass may take, and anything that delays it.
    stall_limit: Duration,
    /// True until a metadata pass under these settings is complete.
    first: bool,
    /// True if the next metadata pass was requested and has no limits.
    urgent: bool,
    content: PassSchedule,
    media: PassSchedule,
    /// Which of the two ran last.
    last: ReadFrom,
    medium: DamagedFiles,
    taken: Usage,
    /// True while the worker sleeps to pay its debt.
    resting: bool,
}

impl Worker<'_> {
    fn run(mut self) {
        loop {
            match self.next_work() {
                NextWork::Stop => return,
                NextWork::Metadata(coverage, reread_paths, waiting) => {
                    self.run_metadata_pass(&coverage, reread_paths, waiting);
                }
                NextWork::Files(via, tree) => self.scan_chunk(via, &tree),
                NextWork::Preview(settings) => self.run_preview(&settings),
            }
        }
    }

    /// Waits for work. Nothing of the tree is open while it waits for the end of a pause.
    fn next_work(&mut self) -> NextWork {
        let mut mailbox = self.shared.mailbox();
        loop {
            self.shared.interrupt.store(false, Ordering::Release);
            if mailbox.stop {
                return NextWork::Stop;
            }
            self.take_boost(&mut mailbox);
            if mailbox.pauses > 0 {
                self.content.leave();
                self.media.leave();
                for leaving in mailbox.leaving.drain(..) {
                    // A caller that no longer waits has dropped its pause as well.
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
                let reread_paths = mem::take(&mut mailbox.reread_paths);
                return NextWork::Metadata(coverage, reread_paths, mem::take(&mut mailbox.waiting));
            }
            let elapsed = self.shared.progress.elapsed();
            let dropped = mailbox.preview.forget_old(elapsed).map(|at| now + (at - elapsed));
            let until = match &self.shared.snapshot().tree {
                Some(tree) => {
                    let turn = self.next_preview(mailbox.preview.wanted(), now, elapsed);
                    if let Some(settings) = mailbox.preview.wanted()
                        && turn.is_some_and(|turn| turn <= now)
                    {
                        return NextWork::Preview(Arc::clone(settings));
                    }
                    let (via, ready) = self.next_file_pass(now);
                    if ready <= now {
                        return NextWork::Files(via, tree.clone());
                    }
                    turn.map_or(ready, |turn| turn.min(ready)).min(metadata_due)
                }
                None => metadata_due,
            };
            mailbox = self.wait(mailbox, Some(dropped.map_or(until, |at| at.min(until))));
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

    /// Returns which of the passes over all files may continue first, and when.
    fn next_file_pass(&mut self, now: Instant) -> (ReadFrom, Instant) {
        let budgets = &self.shared.budgets;
        let debt = budgets.cpu.charge(0).max(budgets.scan.charge(0));
        let debt = debt.filter(|debt| self.resting || *debt >= REST_MIN);
        self.resting = debt.is_some();
        let paid = debt.map_or(now, |debt| now + debt);
        let (content, media) = (self.content.ready(paid), self.media.ready(paid));
        let both = content <= now && media <= now;
        let content_first = if both { self.last == ReadFrom::Medium } else { content <= media };
        if content_first { (ReadFrom::Cache, content) } else { (ReadFrom::Medium, media) }
    }

    fn wait<'guard>(
        &self,
        mailbox: MutexGuard<'guard, Mailbox>,
        until: Option<Instant>,
    ) -> MutexGuard<'guard, Mailbox> {
        match until {
            None => self.shared.wakeup.wait(mailbox).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let limit = until.saturating_duration_since(Instant::now());
                let waited = self.shared.wakeup.wait_timeout(mailbox, limit);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    fn run_metadata_pass(
        &mut self,
        coverage: &PathCoverage,
        mut reread_paths: BTreeSet<TreePath>,
        waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    ) {
        let start = Instant::now();
        if let Some(tree) = &self.shared.snapshot().tree {
            add_carriers(tree, &mut reread_paths);
        }
        let urgent = self.urgent || !waiting.is_empty();
        let progress = &self.shared.progress;
        progress.begin(PassKind::Metadata, TreePath::root(), self.stall_limit, self.first);
        let taken = RefCell::new(&mut self.taken);
        let task = PassContext {
            root: self.root,
            coverage,
            reread_paths: &reread_paths,
            medium: &self.medium,
            reading_max: self.pace.reading_max(self.first),
            reading_min: self.pace.reading_min,
            directory_entries_max: self.pace.directory_entries_max,
            interrupt: &self.shared.interrupt,
            counters: &self.shared.counters,
            progress,
            throttle: &|| self.shared.throttle(&mut taken.borrow_mut(), urgent),
        };
        let result = pass::run(&task, &mut self.memory, self.buffer.bytes());
        self.shared.throttle(&mut self.taken, true);
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
                self.publish(coverage, found, reread_paths, waiting);
            }
            Err(PassError::Interrupted) => {
                self.metadata_due = Instant::now();
                self.request_again(reread_paths, waiting);
            }
            Err(error) => {
                tracing::error!("{}", error_chain(&error));
                self.request_again(reread_paths, waiting);
                self.not_before = Instant::now() + self.pace.metadata_interval_min;
                self.metadata_due = self.not_before;
            }
        }
    }

    /// Requests again for the next pass what was requested of this pass.
    fn request_again(
        &self,
        reread_paths: BTreeSet<TreePath>,
        waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    ) {
        let mut mailbox = self.shared.mailbox();
        if !mailbox.stop {
            mailbox.request_reread(reread_paths);
            mailbox.waiting.extend(waiting);
        }
    }

    /// Publishes what a pass found, unless the settings have changed in the meantime.
    fn publish(
        &self,
        coverage: &PathCoverage,
        found: PassResult,
        reread_paths: BTreeSet<TreePath>,
        waiting: Vec<oneshot::Sender<Arc<Snapshot>>>,
    ) {
        let mailbox = self.shared.mailbox();
        if *mailbox.settings != *coverage.settings() {
            drop(mailbox);
            return self.request_again(reread_paths, waiting);
        }
        self.shared.publish(|current| {
            let next = self.snapshot_of(Arc::clone(&current.settings), found);
            let is_same = current.report == next.report && current.left_alone == next.left_alone;
            (!is_same).then_some(next)
        });
        drop(mailbox);
        let snapshot = self.shared.snapshot();
        for waiting in waiting {
            // The receiver may have stopped waiting.
            let _gone = waiting.send(Arc::clone(&snapshot));
        }
    }

    /// Returns what a pass by `settings` found.
    fn snapshot_of(&self, settings: Arc<ScanSettings>, found: PassResult) -> Snapshot {
        let scope = Scope::of(&settings, self.shared.exclusions.lines());
        let report = ScanReport {
            kept_directories: found.kept_directories,
            externally_linked: found.externally_linked,
            unreadable: found.unreadable,
            occupied: found.occupied,
            times: self.root.times(),
            ..ScanReport::of(scope, &found.tree)
        };
        Snapshot {
            settings,
            scope,
            revision: 0,
            tree: Some(found.tree),
            report: Some(report),
            left_alone: found.left_alone,
            index: OnceLock::new(),
        }
    }

    /// Does one chunk of a pass over all files.
    fn scan_chunk(&mut self, via: ReadFrom, tree: &Tree) {
        let (round, kind) = match via {
            ReadFrom::Cache => (&mut self.content, PassKind::Content),
            ReadFrom::Medium => (&mut self.media, PassKind::Media),
        };
        self.last = via;
        let pass = round.pass.get_or_insert_with(|| FilePass::new(via));
        let place = pass.place().cloned().unwrap_or_else(TreePath::root);
        self.shared.progress.begin(kind, place, self.stall_limit, false);
        let step = pass.step(&mut ChunkContext {
            root: self.root,
            tree,
            medium: &self.medium,
            unfinished: &self.memory.unfinished,
            buffer: self.buffer.bytes(),
            counters: &self.shared.counters,
        });
        self.shared.progress.rest();
        let (taken, budgets) = (self.taken.step(), &self.shared.budgets);
        if round.boosted {
            budgets.cpu.note(taken.cpu_us());
            budgets.scan.note(taken.read_bytes);
        } else {
            // The wait is computed before the next chunk.
            let _rest = budgets.cpu.charge(taken.cpu_us());
            let _rest = budgets.scan.charge(taken.read_bytes);
        }
        match step {
            ChunkResult::More => {}
            ChunkResult::Differs(path) => {
                tracing::debug!("{path} differs from the tree: reading it again");
                self.read_again(path);
            }
            ChunkResult::Decayed(path, status) => {
                tracing::warn!("{path} differs between its medium and the page cache");
                self.medium.add(path.clone(), &status);
                self.read_again(path);
            }
            ChunkResult::End { took, skipped } => self.end_file_pass(via, took, skipped, tree),
        }
    }

    /// Has a metadata pass read `path` at once.
    fn read_again(&mut self, path: TreePath) {
        self.shared.mailbox().request_reread([path]);
        self.metadata_due = Instant::now();
    }

    fn end_file_pass(&mut self, via: ReadFrom, took: Duration, skipped: u64, tree: &Tree) {
        let now = Instant::now();
        match via {
            ReadFrom::Cache => {
                self.content = PassSchedule::new(via, now + self.pace.content_pause);
                self.shared.counters.end_content_pass(took);
            }
            ReadFrom::Medium => {
                self.media = PassSchedule::new(via, now + self.pace.media_pause);
                self.medium.retain(|path| tree.file(path).is_some());
                self.shared.counters.end_media_pass(took, skipped);
                if skipped > 0 {
                    tracing::info!("{skipped} files cannot be read around the page cache");
                }
            }
        }
    }
}

/// Adds the carriers of the hard links among `paths`: a pass reads a file by the name that carries
/// it.
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
