//! `domtool cron`: says when a cron expression fires.

use std::process::ExitCode;

use clap::Args;
use jiff::Timestamp;
use serde::Serialize;
use tasks::cron::Cron;
use tool::{Format, PlacedError};

use crate::wall_clock::{both, now, parse_moment, print};
use crate::{columns, text_of};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The expression: 5 fields; 6 with the second first; or @hourly, @daily, @weekly, @monthly
    #[arg(value_name = "EXPR")]
    expression: String,
    /// Zone whose wall clock counts
    #[arg(long, value_name = "ZONE", default_value = "UTC")]
    zone: String,
    /// The moment asked about; default: now
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    at: Option<Timestamp>,
    /// Show only the last time at or before the moment, with other such flags
    #[arg(long)]
    prev: bool,
    /// Show only the first time after the moment, with other such flags
    #[arg(long)]
    next: bool,
    /// Show only whether it fires in the second of the moment, with other such flags
    #[arg(long)]
    fires: bool,
}

/// The answer. What was not asked is left out.
#[derive(Debug, Serialize)]
struct Answer<'a> {
    expression: String,
    zone: &'a str,
    /// The moment asked about.
    time: Timestamp,
    #[serde(skip_serializing_if = "Option::is_none")]
    previous: Option<Option<Timestamp>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<Option<Timestamp>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fires: Option<bool>,
}

pub(super) fn run(format: Format, arguments: &Arguments) -> ExitCode {
    print(format, answer(format, arguments))
}

fn answer(format: Format, arguments: &Arguments) -> Result<String, PlacedError> {
    let cron = Cron::with_seconds(&arguments.expression)
        .map_err(|error| PlacedError::new(error.field.unwrap_or("expression"), error.problem))?;
    let zone = tasks::zone::find(&arguments.zone, jiff::tz::db())
        .map_err(|error| PlacedError::new("--zone", error))?;
    let time = arguments.at.unwrap_or_else(now);
    let all = !(arguments.prev || arguments.next || arguments.fires);
    let answer = Answer {
        expression: cron.to_string(),
        zone: &arguments.zone,
        time,
        previous: (all || arguments.prev).then(|| cron.previous(&zone, time)),
        next: (all || arguments.next).then(|| cron.next(&zone, time)),
        fires: (all || arguments.fires).then(|| cron.fires(&zone, time)),
    };
    Ok(format.render(&answer, |answer| {
        let mut table = columns(&["", "UTC", &format!("IN {}", answer.zone)]);
        let [utc, local] = both(Some(time), &zone);
        table.add_row(["asked about".to_owned(), utc, local]);
        for (name, found) in [("previous", answer.previous), ("next", answer.next)] {
            if let Some(found) = found {
                let [utc, local] = both(found, &zone);
                table.add_row([name.to_owned(), utc, local]);
            }
        }
        let fires = answer.fires.map(|fires| if fires { "fires: yes\n" } else { "fires: no\n" });
        format!("{}{}", text_of(&table), fires.unwrap_or_default())
    }))
}
