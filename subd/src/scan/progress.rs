//! What the scanning thread is at, for those who watch that it moves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use model::path::TreePath;

use super::stall::{CurrentWork, Pass, StallDetector};

/// What the thread is at. It says so before it asks the kernel for anything that may hang.
#[derive(Debug)]
pub struct Progress {
    start: Instant,
    moves: AtomicU64,
    work: Mutex<Option<CurrentWork>>,
}

impl Default for Progress {
    fn default() -> Self {
        Self { start: Instant::now(), moves: AtomicU64::new(0), work: Mutex::new(None) }
    }
}

impl Progress {
    fn work(&self) -> MutexGuard<'_, Option<CurrentWork>> {
        // Each change is one assignment: there is nothing that a panic could leave half done.
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to work on `path` in a pass that may take `limit`, or longer if it moves.
    pub fn begin(&self, pass: Pass, path: TreePath, limit: Duration, may_be_long: bool) {
        let began = self.start.elapsed();
        *self.work() = Some(CurrentWork { pass, path, began, limit, may_be_long });
        self.moved();
    }

    /// Goes on to `path` in the same pass.
    pub fn at(&self, path: &TreePath) {
        if let Some(work) = &mut *self.work() {
            work.path.clone_from(path);
        }
        self.moved();
    }

    /// Notes that the thread has got on.
    pub fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// Has nothing to do for now.
    pub fn rest(&self) {
        *self.work() = None;
        self.moved();
    }

    /// Lets `watch` look; says what the thread is at if it stands still.
    pub fn look(&self, watch: &mut StallDetector) -> Option<String> {
        let work = self.work();
        watch.look(self.start.elapsed(), self.moves.load(Ordering::Relaxed), work.as_ref())
    }
}
