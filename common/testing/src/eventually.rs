//! Waiting for a condition.

use std::time::{Duration, Instant};

/// The timeout of a wait: only a test that hangs reaches it.
const TIMEOUT: Duration = Duration::from_secs(120);

/// How often a condition is checked.
const INTERVAL: Duration = Duration::from_millis(10);

/// Calls `look` until it returns a value, and returns that.
///
/// # Panics
///
/// After two minutes, with `what` was waited for.
#[track_caller]
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(INTERVAL);
    }
}

/// Like [`eventually`], in a task. Uses the real clock for the timeout, also if tokio's is paused.
///
/// # Panics
///
/// After two minutes, with `what` was waited for.
pub async fn eventually_async<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(value) = look().await {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {TIMEOUT:?}: {what}");
        tokio::time::sleep(INTERVAL).await;
    }
}
