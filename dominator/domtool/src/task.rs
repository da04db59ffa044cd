//! `domtool task`: asks about daemon tasks, by a task file or of the dominator.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Subcommand;
use jiff::Timestamp;
use jiff::tz::TimeZone;
use model::json::KeyError;
use serde::Serialize;
use tasks::file::FILE_BYTES_MAX;
use tasks::schedule::Action;
use tasks::{Condition, Decision, Moment, Observed, Occurrence, Task, Template};
use tool::{Format, PlacedError};

use crate::input_file::read;
use crate::wall_clock::{both, now, parse_moment, print};
use crate::{columns, fleet_tasks, text_of};

/// The longest file of runs, in bytes.
const RUNS_BYTES_MAX: usize = 16 << 20;

/// Questions about daemon tasks, and orders.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    #[command(flatten)]
    Fleet(fleet_tasks::Command),
    #[command(flatten)]
    File(FileCommand),
}

/// Questions that need no dominator.
#[derive(Debug, Subcommand)]
pub(super) enum FileCommand {
    /// Say when a task runs, what would be done about its runs at a moment, and why
    ///
    /// FILE is a task file, as images have it in /etc/dominator/tasks.d. The answer is that of a
    /// machine: it needs neither a dominator nor a certificate, and changes nothing.
    ///
    /// --runs FILE says what is there: {"suspended": false, "permit": true, "runs": [{"name":
    /// "logd-1795701600-0", "run_id": 0, "scheduled_at": "2026-11-26T14:00:00Z",
    /// "template": "same", "state": "running", "held": false, "held_by": null, "manual": false,
    /// "deleting": false}]}. Only the name of a run must be given. A run without a readable
    /// scheduled_at belongs to no period, and is deleted. The template is same, other, or the
    /// digest that the answer shows.
    #[command(after_help = "Examples:\n  \
        domtool task schedule logd.json\n  \
        domtool task schedule logd.json --at 2026-11-26T08:00:00Z --count 10\n  \
        domtool task schedule - --runs runs.json --format json <logd.json\n\n\
        docs/TASKS.md explains the file and the answer.")]
    Schedule {
        /// The task file; - for stdin
        file: PathBuf,
        /// The moment asked about; default: now
        #[arg(long, value_name = "TIME", value_parser = parse_moment)]
        at: Option<Timestamp>,
        /// How many events to list
        #[arg(long, value_name = "N", default_value_t = 5)]
        #[arg(value_parser = clap::value_parser!(u16).range(0..=1_000))]
        count: u16,
        /// The runs that are there; default: none
        #[arg(long, value_name = "FILE")]
        runs: Option<PathBuf>,
    },
}

/// The answer.
#[derive(Debug, Serialize)]
struct Answer {
    task: String,
    zone: Option<String>,
    /// The moment asked about.
    time: Timestamp,
    #[serde(flatten)]
    moment: Moment,
    template: Template,
    decision: Decision,
    condition: Condition,
    upcoming: Vec<Occurrence>,
}

pub(super) fn run(format: Format, command: &FileCommand) -> ExitCode {
    let FileCommand::Schedule { file, at, count, runs } = command;
    let time = at.unwrap_or_else(now);
    print(format, schedule(format, file, time, *count, runs.as_deref()))
}

fn schedule(
    format: Format,
    file: &Path,
    time: Timestamp,
    count: u16,
    runs: Option<&Path>,
) -> Result<String, PlacedError> {
    let fault = |error: KeyError| PlacedError::new(error.at, error.problem);
    let task = Task::parse(&read(file, FILE_BYTES_MAX)?, jiff::tz::db()).map_err(fault)?;
    let observed = match runs {
        Some(path) => Observed::parse(&read(path, RUNS_BYTES_MAX)?).map_err(|error| {
            PlacedError::new(format!("{}: {}", path.display(), error.at), error.problem)
        })?,
        None => Observed::default(),
    };
    let (moment, template) = (task.moment(time), task.template(&[]));
    let schedule = task.schedule.as_ref();
    let answer = Answer {
        task: task.name.clone(),
        zone: schedule.map(|schedule| schedule.zone_name.clone()),
        time,
        decision: tasks::decide(&task, &template, &moment, &observed),
        condition: tasks::condition(&task, &template, &moment, &observed),
        upcoming: schedule.map_or_else(Vec::new, |hours| hours.upcoming(time, count.into())),
        moment,
        template,
    };
    let zone = schedule.map(|schedule| schedule.zone());
    Ok(format.render(&answer, |answer| text(answer, zone)))
}

fn text(answer: &Answer, zone: Option<&TimeZone>) -> String {
    let Answer { moment, decision, condition, .. } = answer;
    let mut text = match zone {
        Some(zone) => moments(answer, zone),
        None => format!("{} has no schedule: it runs always\n", answer.task),
    };
    let should = if moment.should_run { "yes" } else { "no" };
    let running = if condition.running { "running" } else { "not running" };
    let expected = if condition.expected { "expected" } else { "not expected" };
    let since = condition.since.map(|since| format!(" since {since}")).unwrap_or_default();
    let reason = &condition.reason;
    text.push_str(&format!("should run: {should}\n"));
    text.push_str(&format!("condition: {running}{since}, which is {expected}: {reason}\n"));
    let created = decision.create.iter().map(|new| ("create", &new.name, &new.reason));
    let deleted = decision.delete.iter().map(|run| ("delete", &run.name, &run.reason));
    let released = decision.release.iter().map(|run| ("release", &run.name, &run.reason));
    for (what, name, reason) in created.chain(deleted).chain(released) {
        text.push_str(&format!("{what} {name}: {reason}\n"));
    }
    if let Some(refused) = &decision.refused {
        text.push_str(&format!("refuse a run: {}\n", refused.reason));
    }
    if decision.is_idle() && decision.refused.is_none() {
        text.push_str("nothing to do\n");
    }
    text
}

/// Returns the table of the moments of the schedule.
fn moments(answer: &Answer, zone: &TimeZone) -> String {
    let moment = &answer.moment;
    let zone_name = answer.zone.as_deref().unwrap_or_default();
    let mut table = columns(&["", "UTC", &format!("IN {zone_name}"), "EVENT"]);
    let mut row = |name: &str, time: Option<Timestamp>, event: Option<&Occurrence>| {
        let [utc, local] = both(time, zone);
        let event = event.map(|event| format!("{}: {}", action(event.action), event.matched));
        table.add_row([name.to_owned(), utc, local, event.unwrap_or_default()]);
    };
    let (previous, next) = (moment.previous.as_ref(), moment.next.as_ref());
    row("asked about", Some(answer.time), None);
    row("previous event", previous.map(|event| event.time), previous);
    row("last stop", moment.last_stop, None);
    row("period start", moment.period_start, None);
    match answer.upcoming.is_empty() {
        true => row("next event", next.map(|event| event.time), next),
        false => answer.upcoming.iter().enumerate().for_each(|(index, event)| {
            let name = if index == 0 { "next event" } else { "" };
            row(name, Some(event.time), Some(event));
        }),
    }
    text_of(&table)
}

fn action(action: Action) -> &'static str {
    match action {
        Action::Start => "start",
        Action::Stop => "stop",
    }
}
