//! The preview: a metadata pass with other settings, whose result is kept and not published.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use model::display::error_chain;
use model::path::TreePath;
use model::scope::ScanSettings;

use super::{InterruptedPreview, Worker};
use crate::limits::memory::available_memory;
use crate::scan::coverage::PathCoverage;
use crate::scan::pace::PassKind;
use crate::scan::pass::{self, PassContext, PassError};
use crate::scan::preview::{PreviewTurn, is_memory_scarce};

/// How often the memory is checked while a preview is made.
const MEMORY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Worker<'_> {
    /// Returns when the preview that is `wanted` may run, if one is. It takes turns with the passes
    /// over all files, and gives way to those that were requested.
    pub(super) fn next_preview(
        &mut self,
        wanted: Option<&Arc<ScanSettings>>,
        now: Instant,
        elapsed: Duration,
    ) -> Option<Instant> {
        let Some(wanted) = wanted else {
            self.preview = None;
            return None;
        };
        let passes = [&self.content, &self.media];
        if passes.iter().any(|pass| pass.boosted && pass.is_due(now)) {
            return None;
        }
        match &self.preview {
            Some(left)
                if left.settings == *wanted && passes.iter().any(|pass| pass.is_due(now)) =>
            {
                Some(now + left.turn.next.saturating_sub(elapsed))
            }
            _ => Some(now),
        }
    }

    /// Makes the preview by `settings`, or continues with it, until it ends or is interrupted.
    pub(super) fn run_preview(&mut self, settings: &Arc<ScanSettings>) {
        let left = self.preview.take().filter(|left| Arc::ptr_eq(&left.settings, settings));
        let (mut memory, turn) = left.map_or_else(
            || (self.memory.copy(), PreviewTurn::default()),
            |left| (left.memory, left.turn),
        );
        let start = Instant::now();
        let coverage = PathCoverage::new(Arc::clone(settings), self.shared.exclusions.clone());
        let (shared, end) = (self.shared, self.metadata_due.max(start + turn.slice));
        shared.progress.begin(PassKind::Preview, TreePath::root(), self.stall_limit, true);
        let taken = RefCell::new(&mut self.taken);
        let (checked, is_scarce) = (Cell::new(Instant::now()), Cell::new(false));
        let task = PassContext {
            root: self.root,
            coverage: &coverage,
            reread_paths: &BTreeSet::new(),
            medium: &self.medium,
            reading_max: self.pace.reading_max(true),
            reading_min: self.pace.reading_min,
            directory_entries_max: self.pace.directory_entries_max,
            interrupt: &shared.interrupt,
            counters: &shared.counters,
            progress: &shared.progress,
            throttle: &|| {
                if checked.get().elapsed() > MEMORY_CHECK_INTERVAL {
                    checked.set(Instant::now());
                    is_scarce.set(is_memory_scarce(available_memory()));
                }
                if is_scarce.get() {
                    shared.interrupt.store(true, Ordering::Release);
                }
                shared.throttle_preview(&mut taken.borrow_mut(), settings, end);
            },
        };
        let result = pass::run(&task, &mut memory, self.buffer.bytes());
        shared.throttle(&mut self.taken, true);
        shared.progress.rest();
        let result = match result {
            Ok(found) => Ok(Arc::new(self.snapshot_of(Arc::clone(settings), found))),
            Err(PassError::Interrupted) if is_scarce.get() => {
                Err("the scan for a preview was left: memory has become scarce".to_owned())
            }
            Err(PassError::Interrupted) => {
                let turn = turn.after(start.elapsed(), shared.progress.elapsed());
                let settings = Arc::clone(settings);
                self.preview = Some(InterruptedPreview { settings, memory, turn });
                return;
            }
            Err(error) => Err(error_chain(&error)),
        };
        drop(memory);
        shared.mailbox().preview.end(settings, result, shared.progress.elapsed());
        shared.preview_ended.notify_waiters();
    }
}
