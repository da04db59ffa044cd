//! Moments that operators ask about, and answers in the wall clock of a zone.

use std::process::ExitCode;

use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use model::time_parse;
use tool::{Format, Output, PlacedError};

/// Prints an answer or an error, and returns the exit code.
pub(super) fn print(format: Format, answer: Result<String, PlacedError>) -> ExitCode {
    match answer {
        Ok(text) => Output::from(text).print(),
        Err(error) => error.exit(format),
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
