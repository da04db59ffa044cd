//! The time of day.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use model::time_parse;
use model::tree::Time;

/// Returns the time since 1970 by the wall clock; zero if it stands before 1970.
#[must_use]
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the time of day; the epoch if the clock stands before 1970.
#[must_use]
pub fn wall() -> Time {
    let since = since_epoch();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    Time { seconds, nanoseconds: since.subsec_nanos() }
}

/// Reads a time in the past, such as `12h` (ago) or `2030-01-31T18:30`; see [`time_parse::past`].
///
/// # Errors
///
/// Names the accepted forms.
pub fn parse_past(text: &str) -> Result<Time, String> {
    time_parse::past(text, &jiff::Zoned::now())
}
