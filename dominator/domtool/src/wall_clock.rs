//! Moments that operators ask about, and answers in the wall clock of a zone.

use std::process::ExitCode;

use daemon::{EXIT_FAILED, exit};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use model::time_parse;
use serde::Serialize;
use tool::{Format, Output, json};

/// A question that cannot be answered.
#[derive(Debug, Serialize)]
pub(super) struct Unanswered {
    error: String,
    /// The key of the file, the field of the expression, or the argument.
    at: String,
}

impl Unanswered {
    pub(super) fn new(at: impl Into<String>, error: impl ToString) -> Self {
        Self { error: error.to_string(), at: at.into() }
    }
}

/// Prints an answer; or says why there is none, for scripts on stdout.
pub(super) fn print(format: Format, answer: Result<String, Unanswered>) -> ExitCode {
    match (answer, format) {
        (Ok(text), _) => Output::from(text).print(),
        (Err(fault), Format::Json) => Output { text: json(&fault), code: EXIT_FAILED }.print(),
        (Err(fault), Format::Table) => {
            exit(EXIT_FAILED, &format!("{}: {}", fault.at, fault.error), &[])
        }
    }
}

/// Returns the present second.
pub(super) fn now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

/// Parses the moment that is asked about.
pub(super) fn parse_moment(text: &str) -> Result<Timestamp, String> {
    let time = time_parse::time(text, &Zoned::now())?;
    let nanoseconds = i32::try_from(time.nanoseconds).map_err(|error| error.to_string())?;
    Timestamp::new(time.seconds, nanoseconds).map_err(|error| error.to_string())
}

/// Returns a moment in UTC and by the wall clock of `zone`, for a table.
pub(super) fn both(time: Option<Timestamp>, zone: &TimeZone) -> [String; 2] {
    let Some(time) = time else { return ["none within 5 years".to_owned(), String::new()] };
    let local = time.to_zoned(zone.clone()).strftime("%a %Y-%m-%d %H:%M:%S %Z").to_string();
    [time.to_string(), local]
}
