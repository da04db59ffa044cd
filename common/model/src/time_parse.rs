//! Parses durations and times of operators.

use core::time::Duration;

use jiff::civil::DateTime;
use jiff::{Timestamp, Zoned};

use crate::tree::Time;

/// The forms of a duration, for error messages.
const DURATION_FORMS: &str = "expected seconds, or numbers with units such as 90s, 15m or 1h30m";

/// The forms of a duration whose plain numbers are days, for error messages.
const DAYS_FORMS: &str = "expected days, or numbers with units such as 30d, 12h or 1d12h";

/// The forms of a time, for error messages.
const TIME_FORMS: &str = "expected a time such as 18:30, 2030-01-31T18:30 or 2030-01-31T18:30:00Z";

/// The forms of a time in the past, for error messages.
const PAST_FORMS: &str =
    "expected a duration such as 12h or 1d, or a time such as 18:30 or 2030-01-31T18:30";

/// Parses `90s`, `15m`, `2h`, `3d`, several in a row such as `1h30m`, or seconds without a unit.
pub fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is no duration: {DURATION_FORMS}");
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().map(Duration::from_secs).map_err(|_| bad());
    }
    let mut seconds: u64 = 0;
    let mut number = String::new();
    for character in text.chars() {
        let unit = match character {
            '0'..='9' => {
                number.push(character);
                continue;
            }
            's' => 1,
            'm' => 60,
            'h' => 3_600,
            'd' => 86_400,
            _ => return Err(bad()),
        };
        let count: u64 = number.parse().map_err(|_| bad())?;
        let part = count.checked_mul(unit).ok_or_else(bad)?;
        seconds = seconds.checked_add(part).ok_or_else(bad)?;
        number.clear();
    }
    match (text.is_empty(), number.is_empty()) {
        (false, true) => Ok(Duration::from_secs(seconds)),
        _ => Err(bad()),
    }
}

/// Parses a [`duration`] that is not zero.
pub fn positive_duration(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    if duration.is_zero() { Err("must not be zero".to_owned()) } else { Ok(duration) }
}

/// Parses a [`duration`], except that a number without a unit is days: some flags were days only.
pub fn duration_or_days(text: &str) -> Result<Duration, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = if is_number { duration(&format!("{text}d")) } else { duration(text) };
    parsed.map_err(|_| format!("`{text}` is no duration: {DAYS_FORMS}"))
}

/// Parses a time: RFC 3339 with a zone, a date and time in the zone of `now`, or a time of day,
/// which is the next one after `now`.
pub fn time(text: &str, now: &Zoned) -> Result<Time, String> {
    let bad = || format!("`{text}` is no time: {TIME_FORMS}");
    let of = |stamp: Timestamp| {
        let nanoseconds = u32::try_from(stamp.subsec_nanosecond()).map_err(|_| bad())?;
        Ok(Time { seconds: stamp.as_second(), nanoseconds })
    };
    if let Ok(stamp) = text.parse::<Timestamp>() {
        return of(stamp);
    }
    let zoned = |civil: DateTime| civil.to_zoned(now.time_zone().clone()).map_err(|_| bad());
    if let Ok(time) = jiff::civil::Time::strptime("%H:%M", text) {
        let today = zoned(now.date().to_datetime(time))?;
        if today > *now {
            return of(today.timestamp());
        }
        let tomorrow = now.date().tomorrow().map_err(|_| bad())?;
        return of(zoned(tomorrow.to_datetime(time))?.timestamp());
    }
    let civil: DateTime = text.parse().map_err(|_| bad())?;
    of(zoned(civil)?.timestamp())
}

/// Parses a time in the past: a duration before `now`, or a time as by [`time()`], except that a
/// time of day is the last one until `now`.
pub fn past(text: &str, now: &Zoned) -> Result<Time, String> {
    let bad = || format!("`{text}` is no time: {PAST_FORMS}");
    if let Ok(before) = duration(text) {
        let then = now.timestamp().checked_sub(before).map_err(|_| bad())?;
        let nanoseconds = u32::try_from(then.subsec_nanosecond()).map_err(|_| bad())?;
        return Ok(Time { seconds: then.as_second(), nanoseconds });
    }
    // The next time of day after this time of yesterday is the last one until now.
    let yesterday = now.yesterday().map_err(|_| bad())?;
    time(text, &yesterday).map_err(|_| bad())
}

/// Returns the time `more` after `time`.
#[must_use]
pub fn later(time: Time, more: Duration) -> Time {
    let more = more.saturating_add(Duration::new(0, time.nanoseconds.min(999_999_999)));
    let seconds = i64::try_from(more.as_secs()).unwrap_or(i64::MAX);
    Time { seconds: time.seconds.saturating_add(seconds), nanoseconds: more.subsec_nanos() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units_or_are_seconds() {
        let table = [
            ("90s", 90),
            ("15m", 900),
            ("2h", 7_200),
            ("3d", 259_200),
            ("1h30m", 5_400),
            ("90", 90),
            ("0", 0),
        ];
        for (text, seconds) in table {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        assert_eq!(positive_duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(positive_duration("0m"), Err("must not be zero".to_owned()));
        for text in [
            "",
            "1h30",
            "+5",
            "99999999999999999999",
            "h",
            "1x",
            "-1s",
            "1.5h",
            "99999999999999999999s",
            "9e9d",
        ] {
            let error = duration(text).unwrap_err();
            assert_eq!(error, format!("`{text}` is no duration: {DURATION_FORMS}"));
        }
    }

    #[test]
    fn plain_numbers_are_days_where_a_flag_was_days_only() {
        let table = [
            ("365", 31_536_000),
            ("0", 0),
            ("30d", 2_592_000),
            ("1d12h", 129_600),
            ("90s", 90),
            ("0s", 0),
        ];
        for (text, seconds) in table {
            assert_eq!(duration_or_days(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "+5", "1.5", "30 d", "d", "999999999999999", "99999999999999999999d"] {
            let error = duration_or_days(text).unwrap_err();
            assert_eq!(error, format!("`{text}` is no duration: {DAYS_FORMS}"));
        }
    }

    #[test]
    fn what_lies_behind_is_a_duration_or_the_last_time_of_day() {
        let now: Zoned = "2030-01-31T12:00:00.5+02:00[+02:00]".parse().unwrap();
        let table = [
            ("1d", "2030-01-30T10:00:00Z"),
            ("12h", "2030-01-30T22:00:00Z"),
            ("1d12h", "2030-01-29T22:00:00Z"),
            ("90s", "2030-01-31T09:58:30Z"),
            ("0s", "2030-01-31T10:00:00Z"),
            ("90", "2030-01-31T09:58:30Z"),
            ("2030-01-31T18:30:00Z", "2030-01-31T18:30:00Z"),
            ("2030-01-30T18:30", "2030-01-30T16:30:00Z"),
            ("2030-01-30", "2030-01-29T22:00:00Z"),
            ("11:59", "2030-01-31T09:59:00Z"),
            ("12:00", "2030-01-31T10:00:00Z"),
            ("12:01", "2030-01-30T10:01:00Z"),
        ];
        for (text, expected) in table {
            let got = past(text, &now).map(crate::display::utc);
            assert_eq!(got.as_deref(), Ok(expected), "{text}");
        }
        for text in ["", "noon", "1x", "2030-02-30", "25:00", "99999999d"] {
            let error = past(text, &now).unwrap_err();
            assert_eq!(error, format!("`{text}` is no time: {PAST_FORMS}"));
        }
    }

    #[test]
    fn times_are_absolute_or_the_next_of_the_day() {
        let now: Zoned = "2030-01-31T12:00:00+02:00[+02:00]".parse().unwrap();
        let table = [
            ("2030-01-31T18:30:00Z", "2030-01-31T18:30:00Z"),
            ("2030-01-31T18:30:00+01:00", "2030-01-31T17:30:00Z"),
            ("2030-01-31T18:30", "2030-01-31T16:30:00Z"),
            ("2030-01-31 18:30:15", "2030-01-31T16:30:15Z"),
            ("2030-02-01", "2030-01-31T22:00:00Z"),
            ("18:30", "2030-01-31T16:30:00Z"),
            ("11:59", "2030-02-01T09:59:00Z"),
            ("12:00", "2030-02-01T10:00:00Z"),
        ];
        for (text, expected) in table {
            let got = time(text, &now).map(crate::display::utc);
            assert_eq!(got.as_deref(), Ok(expected), "{text}");
        }
        for text in ["", "noon", "25:00", "2030-02-30T00:00"] {
            assert!(time(text, &now).unwrap_err().contains("is no time"), "{text}");
        }
    }
}
