//! The preview: a metadata pass with other settings, whose result is kept and not published.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use model::display::error_chain;
use model::path::TreePath;
use model::scope::ScanSettings;

use super::Worker;
use crate::limits::memory::available_memory;
use crate::scan::coverage::PathCoverage;
use crate::scan::pace::PassKind;
use crate::scan::pass::{self, PassContext, PassError};
use crate::scan::preview::is_memory_scarce;

/// How often the memory is checked while a preview is made.
const MEMORY_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Worker<'_> {
    /// Makes the preview by `settings`, or continues with it, until it ends or is interrupted.
    pub(super) fn run_preview(&mut self, settings: &Arc<ScanSettings>) {
        let left = self.preview.take().filter(|(left, _)| Arc::ptr_eq(left, settings));
        let mut memory = left.map_or_else(|| self.memory.copy(), |(_, memory)| memory);
        let coverage = PathCoverage::new(Arc::clone(settings), self.shared.exclusions.clone());
        let (shared, metadata_due) = (self.shared, self.metadata_due);
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
                shared.throttle_preview(&mut taken.borrow_mut(), settings, metadata_due);
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
                self.preview = Some((Arc::clone(settings), memory));
                return;
            }
            Err(error) => Err(error_chain(&error)),
        };
        drop(memory);
        shared.mailbox().preview.end(settings, result, shared.progress.elapsed());
        shared.preview_ended.notify_waiters();
    }
}
