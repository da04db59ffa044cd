//! The time of day.

use std::time::{SystemTime, UNIX_EPOCH};

use model::tree::Time;
use model::when::written;

/// Returns the time of day; the epoch if the clock stands before 1970.
#[must_use]
pub fn wall() -> Time {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(since) => Time {
            seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: since.subsec_nanos(),
        },
        Err(_) => Time::default(),
    }
}

/// Reads a moment in the past, such as `12h` (ago) or `2030-01-31T18:30`; see [`written::past`].
///
/// # Errors
///
/// A text for people that says which forms are understood.
pub fn past(text: &str) -> Result<Time, String> {
    written::past(text, &jiff::Zoned::now())
}
