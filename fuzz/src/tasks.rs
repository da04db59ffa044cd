//! Task files, their runs, and cron expressions.

use ::tasks::cron::Cron;
use ::tasks::{Observed, Task, condition, decide};
use jiff::Timestamp;
use jiff::tz::{TimeZone, TimeZoneDatabase};

/// Reads a task file, a zero, and runs of the task; and each of both as an expression.
pub fn task(bytes: &[u8]) {
    let mut parts = bytes.splitn(2, |byte| *byte == 0).map(std::str::from_utf8);
    let Some(Ok(file)) = parts.next() else { return };
    let runs = parts.next().and_then(Result::ok).unwrap_or_default();
    let now = Timestamp::from_second(1_800_000_000).expect("it is in 2027");
    [file, runs].iter().for_each(|text| expression(text, now));
    let observed = Observed::parse(runs).unwrap_or_default();
    let Ok(task) = Task::parse(file, &TimeZoneDatabase::none()) else { return };
    let (moment, template) = (task.moment(now), task.template(&[]));
    let decision = decide(&task, &template, &moment, &observed);
    assert!(decision.create.len() <= 1 && decision.release.len() <= 1, "{decision:?}");
    let condition = condition(&task, &template, &moment, &observed);
    assert!(!condition.running || !observed.runs.is_empty(), "{condition:?}");
    if let Some(schedule) = &task.schedule {
        let events = schedule.upcoming(now, 4);
        assert!(events.windows(2).all(|two| two[0].time < two[1].time), "{events:?}");
    }
}

fn expression(text: &str, now: Timestamp) {
    let Ok(cron) = Cron::with_seconds(text) else { return };
    let (previous, next) = (cron.previous(&TimeZone::UTC, now), cron.next(&TimeZone::UTC, now));
    assert!(previous.is_none_or(|at| at <= now && cron.fires(&TimeZone::UTC, at)), "{cron}");
    assert!(next.is_none_or(|at| at > now && cron.fires(&TimeZone::UTC, at)), "{cron}");
    assert_eq!(cron.can_fire(), next.is_some(), "{cron}");
    assert_eq!(Cron::with_seconds(&cron.to_string()), Ok(cron));
}
