//! Waiting for a condition.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// The timeout of a wait: only a test that hangs reaches it.
const TIMEOUT: Duration = Duration::from_secs(240);

/// The shortest pause between two checks. Some states last no longer.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// The longest pause between two checks.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Returns the pause after a check that began at `start`: as long as the check, so that checks take
/// half of the time.
fn pause(start: Instant) -> Duration {
    start.elapsed().clamp(PAUSE_MIN, PAUSE_MAX)
}

/// The result of one check of a condition.
pub trait Check {
    /// What a condition gives that holds.
    type Value;

    /// Returns the value, or why the condition does not hold.
    ///
    /// # Errors
    ///
    /// If the condition does not hold.
    fn result(self) -> Result<Self::Value, String>;
}

impl Check for bool {
    type Value = ();

    fn result(self) -> Result<(), String> {
        if self { Ok(()) } else { Err("false".to_owned()) }
    }
}

impl<T> Check for Option<T> {
    type Value = T;

    fn result(self) -> Result<T, String> {
        self.ok_or_else(|| "none".to_owned())
    }
}

impl<T, E: Debug> Check for Result<T, E> {
    type Value = T;

    fn result(self) -> Result<T, String> {
        self.map_err(|error| format!("{error:#?}"))
    }
}

/// Calls `check` until its condition holds, and returns its value.
///
/// # Panics
///
/// After four minutes, with the condition `what` and the result of the last check.
#[track_caller]
pub fn eventually<C: Check>(what: &str, mut check: impl FnMut() -> C) -> C::Value {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let start = Instant::now();
        match check().result() {
            Ok(value) => return value,
            Err(why) => assert!(Instant::now() < deadline, "not in {TIMEOUT:?}: {what}: {why}"),
        }
        std::thread::sleep(pause(start));
    }
}

/// Like [`eventually`], in a task. Uses the real clock for the timeout, also if tokio's is paused.
///
/// # Panics
///
/// As [`eventually`].
pub async fn eventually_async<C: Check>(what: &str, mut check: impl AsyncFnMut() -> C) -> C::Value {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let start = Instant::now();
        match check().await.result() {
            Ok(value) => return value,
            Err(why) => assert!(Instant::now() < deadline, "not in {TIMEOUT:?}: {what}: {why}"),
        }
        tokio::time::sleep(pause(start)).await;
    }
}
