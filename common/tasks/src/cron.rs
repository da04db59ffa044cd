//! Cron expressions: which moments of a zone's wall clock they name, and the nearest such moment.
//!
//! An expression fires at each instant at which the wall clock shows what it names. A time that a
//! change of the clock skips does not exist, so nothing fires; a time that the clock shows twice
//! fires twice. Between two changes of the clock the local time is the time in UTC plus a constant.
//! So a search walks from change to change, and in between over days, and asks three bit masks
//! for the time of day. It takes two thousand steps at most, even if nothing is found.

use std::fmt;
use std::str::FromStr;

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan as _};

/// How far a search looks: five years.
const SEARCH_DAYS: i64 = 5 * 365 + 2;

/// The longest expression, in bytes. Each list of all minutes is shorter.
const TEXT_BYTES_MAX: usize = 512;

/// A field of an expression.
struct FieldKind {
    name: &'static str,
    min: u8,
    max: u8,
    /// Names of the values from `min` on.
    names: &'static [&'static str],
}

const DAY_NAMES: &[&str] = &["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

const MONTH_NAMES: &[&str] =
    &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];

const SECOND: FieldKind = FieldKind { name: "second", min: 0, max: 59, names: &[] };
const MINUTE: FieldKind = FieldKind { name: "minute", min: 0, max: 59, names: &[] };
const HOUR: FieldKind = FieldKind { name: "hour", min: 0, max: 23, names: &[] };
const DAY: FieldKind = FieldKind { name: "day of the month", min: 1, max: 31, names: &[] };
const MONTH: FieldKind = FieldKind { name: "month", min: 1, max: 12, names: MONTH_NAMES };
const WEEKDAY: FieldKind = FieldKind { name: "day of the week", min: 0, max: 6, names: DAY_NAMES };

/// What the short forms stand for.
const SHORT_FORMS: [(&str, &str); 4] = [
    ("@hourly", "0 * * * *"),
    ("@daily", "0 0 * * *"),
    ("@weekly", "0 0 * * 0"),
    ("@monthly", "0 0 1 * *"),
];

/// The values that a field names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Values {
    /// A bit for each value.
    bits: u64,
    /// True if the field is a plain `*` or `?`, so that it restricts nothing.
    is_star: bool,
}

impl Values {
    fn has(self, value: i8) -> bool {
        self.at_or_after(value) == Some(value)
    }

    fn at_or_after(self, value: i8) -> Option<i8> {
        let rest = u32::try_from(value).ok().and_then(|value| self.bits.checked_shr(value))?;
        (rest != 0).then(|| value + rest.trailing_zeros() as i8)
    }

    fn at_or_before(self, value: i8) -> Option<i8> {
        let above = u32::try_from(value).ok().and_then(|value| 63_u32.checked_sub(value))?;
        let rest = self.bits << above;
        (rest != 0).then(|| value - rest.leading_zeros() as i8)
    }

    fn nearest(self, value: i8, direction: Direction) -> Option<i8> {
        match direction {
            Direction::Back => self.at_or_before(value),
            Direction::Ahead => self.at_or_after(value),
        }
    }
}

/// Where a search goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Back,
    Ahead,
}

impl Direction {
    fn step(self) -> i8 {
        match self {
            Self::Back => -1,
            Self::Ahead => 1,
        }
    }

    /// True if a search that has come to `value` has left `last` behind.
    fn passes<T: PartialOrd>(self, value: T, last: T) -> bool {
        match self {
            Self::Back => value < last,
            Self::Ahead => value > last,
        }
    }

    /// The value that this direction meets first.
    fn first<T>(self, earliest: T, latest: T) -> T {
        match self {
            Self::Back => latest,
            Self::Ahead => earliest,
        }
    }
}

/// A cron expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cron {
    text: String,
    second: Values,
    minute: Values,
    hour: Values,
    day: Values,
    month: Values,
    weekday: Values,
}

/// An expression that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{problem}", field.map(|field| format!("{field}: ")).unwrap_or_default())]
pub struct CronError {
    /// The field that is wrong, if it is one.
    pub field: Option<&'static str>,
    pub problem: String,
}

impl CronError {
    fn whole(problem: impl Into<String>) -> Self {
        Self { field: None, problem: problem.into() }
    }
}

impl fmt::Display for Cron {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl FromStr for Cron {
    type Err = CronError;

    /// Parses five fields: minute, hour, day of the month, month, day of the week.
    fn from_str(text: &str) -> Result<Self, CronError> {
        parse(text, false)
    }
}

impl Cron {
    /// Parses five fields, or six with the second first.
    ///
    /// # Errors
    ///
    /// [`CronError`] names the field.
    pub fn with_seconds(text: &str) -> Result<Self, CronError> {
        parse(text, true)
    }

    /// Makes the expression of a time of day, as `17:00`, on days, as `MON-FRI` or `SAT,SUN`.
    ///
    /// # Errors
    ///
    /// [`CronError`] names the field.
    pub fn daily(time: &str, days: &str) -> Result<Self, CronError> {
        let time_error = || CronError {
            field: Some("time"),
            problem: format!("`{}` is no time of day such as 09:00", shown(time)),
        };
        let bytes = time.as_bytes();
        if bytes.len() != 5 || bytes[2] != b':' {
            return Err(time_error());
        }
        let (hour, minute) = time.split_once(':').ok_or_else(time_error)?;
        let number = |text, kind| values(text, kind).map_err(|_| time_error());
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if !plain(hour) || !plain(minute) {
            return Err(time_error());
        }
        let days_error = |problem| CronError { field: Some("days"), problem };
        if days.is_empty()
            || !days.bytes().all(|byte| byte.is_ascii_alphabetic() || b",-".contains(&byte))
        {
            let days = shown(days);
            return Err(days_error(format!("`{days}` are no days such as MON-FRI or SAT,SUN")));
        }
        let every = Values { bits: !0, is_star: true };
        Ok(Self {
            text: format!("{time} {days}"),
            second: Values { bits: 1, is_star: false },
            minute: number(minute, &MINUTE)?,
            hour: number(hour, &HOUR)?,
            day: every,
            month: every,
            weekday: values(days, &WEEKDAY).map_err(|error| days_error(error.problem))?,
        })
    }

    /// Returns the last instant at or before `now` at which it fires, within five years.
    #[must_use]
    pub fn previous(&self, zone: &TimeZone, now: Timestamp) -> Option<Timestamp> {
        let mut at = whole_second(now).filter(|_| self.can_fire())?;
        let limit = bound(at, -SEARCH_DAYS);
        loop {
            // The offset holds since the last change, which is at or before `at`.
            let offset = zone.to_offset(at);
            let after = at.checked_add(1.second()).unwrap_or(at);
            let since = zone.preceding(after).next().map_or(limit, |change| change.timestamp());
            let since = since.max(limit);
            let span = (offset.to_datetime(at), offset.to_datetime(since));
            if let Some(found) = self.nearest(span.0, span.1, Direction::Back) {
                return offset.to_timestamp(found).ok();
            }
            at = since.checked_sub(1.second()).ok()?;
            if at < limit {
                return None;
            }
        }
    }

    /// Returns the first instant after `now` at which it fires, within five years.
    #[must_use]
    pub fn next(&self, zone: &TimeZone, now: Timestamp) -> Option<Timestamp> {
        let mut at = whole_second(now).filter(|_| self.can_fire())?;
        at = at.checked_add(1.second()).ok()?;
        let limit = bound(at, SEARCH_DAYS);
        while at <= limit {
            let offset = zone.to_offset(at);
            let change = zone.following(at).next().map(|change| change.timestamp());
            // The last second before the next change.
            let until = change.and_then(|change| change.checked_sub(1.second()).ok());
            let until = until.map_or(limit, |until| until.min(limit));
            let span = (offset.to_datetime(at), offset.to_datetime(until));
            if let Some(found) = self.nearest(span.0, span.1, Direction::Ahead) {
                return offset.to_timestamp(found).ok();
            }
            at = until.checked_add(1.second()).ok()?;
        }
        None
    }

    /// True if it fires in the second of `now`.
    #[must_use]
    pub fn fires(&self, zone: &TimeZone, now: Timestamp) -> bool {
        let local = zone.to_datetime(now);
        self.has_day(local.date())
            && self.hour.has(local.hour())
            && self.minute.has(local.minute())
            && self.second.has(local.second())
    }

    /// False if no year has a day that it names, such as 30 February.
    #[must_use]
    pub fn can_fire(&self) -> bool {
        // A leap year has all days, and with every weekday in some year.
        let days = [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let exists = (1..).zip(days).any(|(month, days)| {
            self.month.has(month) && self.day.at_or_after(1).is_some_and(|first| first <= days)
        });
        exists || self.either_day()
    }

    /// True if one of day of the month and day of the week is enough. It is if both are restricted.
    fn either_day(&self) -> bool {
        !self.day.is_star && !self.weekday.is_star
    }

    fn has_day(&self, date: Date) -> bool {
        let day = self.day.has(date.day());
        let weekday = self.weekday.has(date.weekday().to_sunday_zero_offset());
        self.month.has(date.month())
            && if self.either_day() { day || weekday } else { day && weekday }
    }

    /// Returns the first match from `from` on that does not pass `until`.
    fn nearest(&self, from: DateTime, until: DateTime, direction: Direction) -> Option<DateTime> {
        let (mut date, mut time) = (from.date(), from.time());
        while !direction.passes(date, until.date()) {
            if self.has_day(date)
                && let Some(time) = self.time_of_day(time, direction)
            {
                let found = date.to_datetime(time);
                return (!direction.passes(found, until)).then_some(found);
            }
            // A month that is not named is left as a whole.
            let is_named = self.month.has(date.month());
            date = match direction {
                Direction::Back if is_named => date.yesterday().ok()?,
                Direction::Back => date.first_of_month().yesterday().ok()?,
                Direction::Ahead if is_named => date.tomorrow().ok()?,
                Direction::Ahead => date.last_of_month().tomorrow().ok()?,
            };
            time = direction.first(Time::MIN, Time::constant(23, 59, 59, 0));
        }
        None
    }

    /// Returns the first time of a day that is `from` or lies behind it.
    fn time_of_day(&self, from: Time, direction: Direction) -> Option<Time> {
        let step = direction.step();
        let first_second = self.second.nearest(direction.first(0, 59), direction)?;
        let first_minute = self.minute.nearest(direction.first(0, 59), direction)?;
        if self.hour.has(from.hour()) {
            let same_minute = self.minute.has(from.minute());
            let second = self.second.nearest(from.second(), direction);
            if let (true, Some(second)) = (same_minute, second) {
                return Time::new(from.hour(), from.minute(), second, 0).ok();
            }
            if let Some(minute) = self.minute.nearest(from.minute() + step, direction) {
                return Time::new(from.hour(), minute, first_second, 0).ok();
            }
        }
        let hour = self.hour.nearest(from.hour() + step, direction)?;
        Time::new(hour, first_minute, first_second, 0).ok()
    }
}

fn whole_second(at: Timestamp) -> Option<Timestamp> {
    let seconds = at.as_second() - i64::from(at.subsec_nanosecond() < 0);
    Timestamp::from_second(seconds).ok()
}

/// Returns the time `days` after `at`, or the end of all times.
fn bound(at: Timestamp, days: i64) -> Timestamp {
    let end = if days < 0 { Timestamp::MIN } else { Timestamp::MAX };
    at.checked_add((days * 24).hours()).unwrap_or(end)
}

fn parse(text: &str, may_have_seconds: bool) -> Result<Cron, CronError> {
    if text.len() > TEXT_BYTES_MAX {
        let problem = format!("the expression has more than {TEXT_BYTES_MAX} bytes");
        return Err(CronError::whole(problem));
    }
    let lower = text.trim().to_ascii_lowercase();
    if lower.starts_with("tz=") || lower.starts_with("cron_tz=") {
        return Err(CronError::whole(
            "the zone is not a part of the expression; it is given apart",
        ));
    }
    let expanded = SHORT_FORMS.iter().find(|(short, _)| *short == lower);
    if lower.starts_with('@') && expanded.is_none() {
        let known = SHORT_FORMS.map(|(short, _)| short).join(", ");
        return Err(CronError::whole(format!("`{}` is unknown; there are {known}", shown(&lower))));
    }
    let fields: Vec<&str> =
        expanded.map_or(text, |(_, long)| long).split_ascii_whitespace().collect();
    let (second, fields) = match (fields.len(), may_have_seconds) {
        (5, _) => ("0", &fields[..]),
        (6, true) => (fields[0], &fields[1..]),
        (count, _) => {
            let expected = if may_have_seconds { "5 or 6" } else { "5" };
            let problem =
                format!("{count} fields, expected {expected}: minute hour day month weekday");
            return Err(CronError::whole(problem));
        }
    };
    Ok(Cron {
        text: text.trim().to_owned(),
        second: values(second, &SECOND)?,
        minute: values(fields[0], &MINUTE)?,
        hour: values(fields[1], &HOUR)?,
        day: values(fields[2], &DAY)?,
        month: values(fields[3], &MONTH)?,
        weekday: values(fields[4], &WEEKDAY)?,
    })
}

/// Parses a field: a list of `*`, `?`, values and ranges, each with a step if need be.
fn values(text: &str, kind: &FieldKind) -> Result<Values, CronError> {
    let fault = |problem| CronError { field: Some(kind.name), problem };
    let mut all = Values { bits: 0, is_star: false };
    for part in text.split(',') {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => (range, Some(number(step).map_err(fault)?)),
            None => (part, None),
        };
        let (first, last, is_star) = if range == "*" || range == "?" {
            (kind.min, kind.max, step.is_none_or(|step| step == 1))
        } else if let Some((first, last)) = range.split_once('-') {
            (value(first, kind).map_err(fault)?, value(last, kind).map_err(fault)?, false)
        } else {
            let first = value(range, kind).map_err(fault)?;
            (first, if step.is_some() { kind.max } else { first }, false)
        };
        if step == Some(0) {
            return Err(fault("a step of 0".to_owned()));
        }
        if first > last {
            let text = shown(range);
            return Err(fault(format!("the range `{text}` ends before it begins; write two")));
        }
        let step = usize::from(step.unwrap_or(1));
        all.bits |= (first..=last).step_by(step).fold(0, |bits, value| bits | 1 << value);
        all.is_star |= is_star;
    }
    Ok(all)
}

/// Parses a value of a field: a number or a name.
fn value(text: &str, kind: &FieldKind) -> Result<u8, String> {
    let named = kind.names.iter().position(|name| name.eq_ignore_ascii_case(text));
    let value = match named.and_then(|at| u8::try_from(at).ok()) {
        Some(at) => kind.min + at,
        None => u8::try_from(number(text)?).unwrap_or(u8::MAX),
    };
    if (kind.min..=kind.max).contains(&value) {
        return Ok(value);
    }
    let sunday = if kind.name == WEEKDAY.name && value == 7 { "; Sunday is 0" } else { "" };
    Err(format!("`{}` is not in {}-{}{sunday}", shown(text), kind.min, kind.max))
}

fn number(text: &str) -> Result<u16, String> {
    // `parse` would take a sign.
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| digits);
    number.ok_or_else(|| format!("`{}` is neither a number nor a name", shown(text)))
}

/// Returns `text` for an error message.
fn shown(text: &str) -> String {
    model::display::safe_text(text, 40)
}
