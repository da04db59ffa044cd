//! Output for people: numbers, sizes, times, entries, failures and progress.
// tidy: core

pub mod entry;
pub mod failure;
pub mod progress;

use model::display::grouped;
use model::tree::Time;

/// `bytes` in the largest decimal unit that gives at least one, with one decimal.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if bytes < 1_000 {
        return format!("{bytes} B");
    }
    // In tenths, rounded, so that no unit shows a thousand.
    let mut tenths = (u128::from(bytes) + 50) / 100;
    let mut unit = 0;
    while tenths >= 10_000 && unit + 1 < UNITS.len() {
        tenths = (tenths + 500) / 1_000;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// `number` of `what`, with an `s` unless it is one.
pub fn plural(number: u64, what: &str) -> String {
    let ending = if number == 1 { "" } else { "s" };
    format!("{} {what}{ending}", grouped(number))
}

/// Returns the number of entries of a tree.
pub fn plural_entries(entries: u64) -> String {
    format!("{} {}", grouped(entries), if entries == 1 { "entry" } else { "entries" })
}

/// `time` as date and time of day, UTC, to the second.
pub fn time(time: Time) -> String {
    match jiff::Timestamp::from_second(time.seconds) {
        Ok(timestamp) => timestamp.strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
        Err(_) => format!("{} s", time.seconds),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded() {
        let sizes = [
            (0, "0 B"),
            (999, "999 B"),
            (1_000, "1.0 kB"),
            (1_250, "1.3 kB"),
            (999_949, "999.9 kB"),
            (999_950, "1.0 MB"),
            (142_123_456, "142.1 MB"),
            (u64::MAX, "18.4 EB"),
        ];
        for (bytes, text) in sizes {
            assert_eq!(size(bytes), text, "{bytes}");
        }
        assert_eq!(plural(1, "object"), "1 object");
        assert_eq!(plural(2_000, "object"), "2,000 objects");
        let at = Time { seconds: 1_700_000_000, nanoseconds: 5 };
        assert_eq!(time(at), "2023-11-14 22:13:20 UTC");
        assert_eq!(time(Time { seconds: i64::MAX, nanoseconds: 0 }), "9223372036854775807 s");
    }
}
