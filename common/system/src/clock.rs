//! The time of day, and that since the boot.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use model::boot_time::BootTime;
use model::time_parse;
use model::tree::Time;
use rustix::time::{ClockId, clock_gettime};

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

/// Returns the time since the boot of the machine, sleep included.
#[must_use]
pub fn since_boot() -> Duration {
    // The clock counts from zero.
    clock_gettime(ClockId::Boottime).try_into().unwrap_or_default()
}

/// Returns the same as a moment of the boot with this name.
#[must_use]
pub fn boot_now(boot_id: &str) -> BootTime {
    let ms = u64::try_from(since_boot().as_millis()).unwrap_or(u64::MAX);
    BootTime { boot_id: boot_id.to_owned(), ms }
}

/// Reads a time in the past, such as `12h` (ago) or `2030-01-31T18:30`; see [`time_parse::past`].
///
/// # Errors
///
/// Names the accepted forms.
pub fn parse_past(text: &str) -> Result<Time, String> {
    time_parse::past(text, &jiff::Zoned::now())
}
