//! Tests of task files, schedules and decisions.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod conditions;
mod cron;
mod decisions;
mod files;
mod images;
mod minutes;
mod properties;
mod schedules;
mod supervision;

use jiff::Timestamp;
use jiff::tz::{TimeZone, TimeZoneDatabase};
use tasks::{Observed, Task, Template};

/// Reads a time: RFC 3339.
fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// Returns a zone of the copy that is built in.
fn zone(name: &str) -> TimeZone {
    tasks::zone::find(name, &TimeZoneDatabase::none()).unwrap()
}

fn parse(text: &str) -> Result<Task, model::json::KeyError> {
    Task::parse(text, &TimeZoneDatabase::none())
}

/// Returns a task with further fields.
fn task(fields: &str) -> Task {
    let comma = if fields.is_empty() { "" } else { ", " };
    parse(&format!(r#"{{"name": "job", "argv": ["/bin/job"]{comma}{fields}}}"#)).unwrap()
}

/// Returns the field `schedule` in `zone`, with events as `start 0 9 * * *; stop 17:00 MON-FRI`.
fn schedule(zone: &str, events: &str) -> String {
    let event = |text: &str| {
        let (action, when) = text.trim().split_once(' ').unwrap();
        match when.split_once(' ').unwrap() {
            (time, days) if time.contains(':') => {
                format!(r#"{{"action": "{action}", "time": "{time}", "days": "{days}"}}"#)
            }
            _ => format!(r#"{{"action": "{action}", "cron": "{when}"}}"#),
        }
    };
    let events: Vec<String> =
        events.split(';').filter(|text| !text.trim().is_empty()).map(event).collect();
    format!(r#""schedule": {{"zone": "{zone}", "events": [{}]}}"#, events.join(", "))
}

/// The present version in tests.
fn present() -> Template {
    Template("ab".repeat(32))
}

/// Reads runs as `--runs` does, without the braces around.
fn observed(fields: &str) -> Observed {
    Observed::parse(&format!("{{{fields}}}")).unwrap()
}
