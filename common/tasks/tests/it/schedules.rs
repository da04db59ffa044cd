//! Where a moment lies in a schedule.

use tasks::schedule::Action;

use crate::{at, schedule, task};

/// Writes a moment in one line: previous, next, last stop, start of the period, whether to run.
fn moment(fields: &str, now: &str) -> String {
    let moment = task(fields).moment(at(now));
    let time = |time: Option<jiff::Timestamp>| time.map_or("-".to_owned(), |time| time.to_string());
    let event = |event: &Option<tasks::Occurrence>| match event {
        Some(event) if event.action == Action::Start => format!("start {}", event.time),
        Some(event) => format!("stop {}", event.time),
        None => "-".to_owned(),
    };
    let (previous, next) = (event(&moment.previous), event(&moment.next));
    let (stop, start) = (time(moment.last_stop), time(moment.period_start));
    let runs = if moment.should_run { "run" } else { "rest" };
    format!("{previous} | {next} | {stop} | {start} | {runs}")
}

/// A schedule moved by `offset_s`.
fn moved(zone: &str, offset_s: i64, events: &str) -> String {
    schedule(zone, events).replace(r#""events""#, &format!(r#""offset_s": {offset_s}, "events""#))
}

#[test]
fn the_nearest_events_are_found() {
    let weekdays = "start 0 9 * * MON-FRI; stop 0 17 * * MON-FRI";
    let morning = "start 0 9 * * MON-FRI; stop 0 12 * * MON-FRI";
    #[rustfmt::skip]
    let table = [
        ("no events", schedule("UTC", ""), "2022-01-19T12:00:00Z",
         "- | - | - | - | rest"),
        ("within", schedule("UTC", weekdays), "2022-01-19T12:00:00Z",
         "start 2022-01-19T09:00:00Z | stop 2022-01-19T17:00:00Z | 2022-01-18T17:00:00Z | 2022-01-19T09:00:00Z | run"),
        ("outside", schedule("UTC", weekdays), "2022-01-19T20:00:00Z",
         "stop 2022-01-19T17:00:00Z | start 2022-01-20T09:00:00Z | 2022-01-19T17:00:00Z | 2022-01-20T09:00:00Z | rest"),
        ("at the start", schedule("UTC", weekdays), "2022-01-19T09:00:00Z",
         "start 2022-01-19T09:00:00Z | stop 2022-01-19T17:00:00Z | 2022-01-18T17:00:00Z | 2022-01-19T09:00:00Z | run"),
        ("at the stop", schedule("UTC", weekdays), "2022-01-19T17:00:00Z",
         "stop 2022-01-19T17:00:00Z | start 2022-01-20T09:00:00Z | 2022-01-19T17:00:00Z | 2022-01-20T09:00:00Z | rest"),
        ("within, west", schedule("EST", weekdays), "2022-01-19T17:00:00Z",
         "start 2022-01-19T14:00:00Z | stop 2022-01-19T22:00:00Z | 2022-01-18T22:00:00Z | 2022-01-19T14:00:00Z | run"),
        ("outside, west", schedule("EST", weekdays), "2022-01-20T01:00:00Z",
         "stop 2022-01-19T22:00:00Z | start 2022-01-20T14:00:00Z | 2022-01-19T22:00:00Z | 2022-01-20T14:00:00Z | rest"),
        ("after the stop in UTC only", schedule("EST", morning), "2022-01-19T14:05:00Z",
         "start 2022-01-19T14:00:00Z | stop 2022-01-19T17:00:00Z | 2022-01-18T17:00:00Z | 2022-01-19T14:00:00Z | run"),
        ("six minutes later", moved("EST", -360, morning), "2022-01-19T14:05:00Z",
         "stop 2022-01-18T17:06:00Z | start 2022-01-19T14:06:00Z | 2022-01-18T17:06:00Z | 2022-01-19T14:06:00Z | rest"),
        ("over a weekend", schedule("UTC", weekdays), "2022-01-22T12:00:00Z",
         "stop 2022-01-21T17:00:00Z | start 2022-01-24T09:00:00Z | 2022-01-21T17:00:00Z | 2022-01-24T09:00:00Z | rest"),
        // Etc/GMT+1 is an hour behind UTC.
        ("a minute earlier, before", moved("Etc/GMT+1", 60, "start 09:00 SUN-SAT; stop 09:30 SUN"), "2022-01-01T09:58:00Z",
         "start 2021-12-31T09:59:00Z | start 2022-01-01T09:59:00Z | 2021-12-26T10:29:00Z | 2021-12-27T09:59:00Z | run"),
        ("a minute earlier, at", moved("Etc/GMT+1", 60, "start 09:00 SUN-SAT; stop 09:30 SUN"), "2022-01-01T09:59:00Z",
         "start 2022-01-01T09:59:00Z | start 2022-01-02T09:59:00Z | 2021-12-26T10:29:00Z | 2021-12-27T09:59:00Z | run"),
        ("a minute later, before", moved("Etc/GMT+1", -60, "start 09:00 SUN-SAT; stop 09:30 SUN"), "2022-01-01T10:00:00Z",
         "start 2021-12-31T10:01:00Z | start 2022-01-01T10:01:00Z | 2021-12-26T10:31:00Z | 2021-12-27T10:01:00Z | run"),
        ("a minute later, at", moved("Etc/GMT+1", -60, "start 09:00 SUN-SAT; stop 09:30 SUN"), "2022-01-01T10:01:00Z",
         "start 2022-01-01T10:01:00Z | start 2022-01-02T10:01:00Z | 2021-12-26T10:31:00Z | 2021-12-27T10:01:00Z | run"),
        // 02:30 does not exist: the last event is yesterday's stop.
        ("a start that is skipped", schedule("America/New_York", "start 02:30 SUN-SAT; stop 09:00 SUN-SAT"), "2022-03-13T08:00:00Z",
         "stop 2022-03-12T14:00:00Z | stop 2022-03-13T13:00:00Z | 2022-03-12T14:00:00Z | 2022-03-14T06:30:00Z | rest"),
        // 01:30 comes twice: the second from behind, the first from ahead.
        ("a start that comes twice, after", schedule("America/New_York", "start 01:30 SUN-SAT; stop 09:00 SUN-SAT"), "2022-11-06T08:00:00Z",
         "start 2022-11-06T06:30:00Z | stop 2022-11-06T14:00:00Z | 2022-11-05T13:00:00Z | 2022-11-06T05:30:00Z | run"),
        ("a start that comes twice, before", schedule("America/New_York", "start 01:30 SUN-SAT; stop 09:00 SUN-SAT"), "2022-11-06T04:00:00Z",
         "stop 2022-11-05T13:00:00Z | start 2022-11-06T05:30:00Z | 2022-11-05T13:00:00Z | 2022-11-06T05:30:00Z | rest"),
    ];
    for (name, fields, now, expected) in table {
        assert_eq!(moment(&fields, now), expected, "{name}");
    }
}

#[test]
fn a_period_starts_with_the_first_start_after_the_last_stop() {
    #[rustfmt::skip]
    let table = [
        ("stops only", "UTC", "stop 0 1 * * *", "2022-02-04T01:30:00Z", "-", "rest"),
        ("no events", "UTC", "", "2022-02-04T01:00:00Z", "-", "rest"),
        ("at the stop", "UTC", "stop 0 1 * * *; start 0 2 * * *", "2022-02-04T01:00:00Z", "2022-02-04T02:00:00Z", "rest"),
        ("at the start", "UTC", "stop 0 1 * * *; start 0 2 * * *", "2022-02-04T02:00:00Z", "2022-02-04T02:00:00Z", "run"),
        ("between", "UTC", "stop 0 1 * * *; start 0 3 * * *", "2022-02-04T02:00:00Z", "2022-02-04T03:00:00Z", "rest"),
        ("running", "UTC", "start 0 3 * * *; stop 0 5 * * *", "2022-02-04T04:00:00Z", "2022-02-04T03:00:00Z", "run"),
        ("two of each", "UTC", "stop 0 1 * * *; stop 0 2 * * *; start 0 3 * * *; start 0 4 * * *", "2022-02-04T05:00:00Z",
         "2022-02-04T03:00:00Z", "run"),
        ("before the stop in the west", "America/New_York", "start 0 1 * * *; stop 0 5 * * *", "2022-02-04T07:00:00Z",
         "2022-02-04T06:00:00Z", "run"),
        ("in the west", "America/New_York", "start 0 3 * * *; stop 0 5 * * *", "2022-02-04T09:00:00Z",
         "2022-02-04T08:00:00Z", "run"),
        // Of two events at once the stop counts, in any order.
        ("at once", "UTC", "stop 0 9 * * *; start 0 9 * * *", "2022-02-04T12:00:00Z", "2022-02-05T09:00:00Z", "rest"),
        ("at once, start first", "UTC", "start 0 * * * *; stop 0 17 * * *", "2022-02-04T17:30:00Z", "2022-02-04T18:00:00Z", "rest"),
        ("an hour later", "UTC", "start 0 * * * *; stop 0 17 * * *", "2022-02-04T18:00:00Z", "2022-02-04T18:00:00Z", "run"),
        // The last stop is farther away than five years: the last start begins the period.
        ("no stop in reach", "UTC", "start 0 9 * * *; stop 0 0 29 2 *", "2103-06-01T12:00:00Z", "2103-06-01T09:00:00Z", "run"),
    ];
    for (name, zone, events, now, start, runs) in table {
        let told = moment(&schedule(zone, events), now);
        let parts: Vec<&str> = told.split(" | ").collect();
        assert_eq!((parts[3], parts[4]), (start, runs), "{name}");
    }
    assert_eq!(moment("", "2022-02-04T01:00:00Z"), "- | - | - | - | run");
}

#[test]
fn events_say_what_matched_and_follow_each_other() {
    for events in ["start 0 9 * * *; stop 0 9 * * *", "stop 0 9 * * *; start 0 9 * * *"] {
        let task = task(&schedule("UTC", events));
        let at_nine = task.moment(at("2022-01-20T09:00:00Z")).previous;
        let before = task.moment(at("2022-01-20T08:00:00Z")).next;
        assert_eq!([at_nine, before].map(|event| event.unwrap().action), [Action::Stop; 2]);
    }
    let fields = schedule("UTC", "start 0 9 * * 1-5; stop 17:00 MON-FRI; start 0 9 * * FRI");
    let schedule = task(&fields).schedule.unwrap();
    let told: Vec<String> = schedule
        .upcoming(at("2022-01-20T12:00:00Z"), 4)
        .iter()
        .map(|event| format!("{} {:?} {}", event.time, event.action, event.matched))
        .collect();
    assert_eq!(
        told,
        [
            "2022-01-20T17:00:00Z Stop 17:00 MON-FRI",
            "2022-01-21T09:00:00Z Start 0 9 * * 1-5",
            "2022-01-21T17:00:00Z Stop 17:00 MON-FRI",
            "2022-01-24T09:00:00Z Start 0 9 * * 1-5",
        ]
    );
}
