//! Waiting for something to become true.

use std::time::{Duration, Instant};

/// How long a test waits at most: only something that hangs takes so long.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often a test looks.
const INTERVAL: Duration = Duration::from_millis(10);

/// Waits until `look` returns a value, and returns that.
///
/// # Panics
///
/// If it takes longer than two minutes, with `what` was waited for.
#[track_caller]
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(INTERVAL);
    }
}
