//! Every minute of four years in six zones, against a computation that knows nothing of days,
//! offsets and masks: it asks for the wall clock at each minute.

use jiff::civil::{DateTime, Weekday};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan as _};
use tasks::cron::Cron;

use crate::{at, schedule, task, zone};

const FIRST: &str = "2016-01-01T00:00:00Z";
const END: &str = "2020-01-01T00:00:00Z";

/// What an expression means, said in another way.
type Meaning = fn(DateTime) -> bool;

fn night(clock: DateTime) -> bool {
    clock.hour() < 4 && clock.minute() % 20 == 10
}

fn thirteenth(clock: DateTime) -> bool {
    let day = clock.day() == 13 || clock.weekday() == Weekday::Friday;
    day && (clock.hour(), clock.minute()) == (0, 0)
}

/// Each minute as its time and the wall clock.
fn minutes(zone: &TimeZone) -> Vec<(Timestamp, DateTime)> {
    let (first, end) = (at(FIRST).as_second(), at(END).as_second());
    let times = (first..end).step_by(60).map(|second| Timestamp::from_second(second).unwrap());
    times.map(|time| (time, zone.to_datetime(time))).collect()
}

/// Asks each minute whether the expression fires, and at one of `searches` minutes, and around each
/// moment at which it fires, when it does. Before the first such moment and after the last only the
/// evaluator knows.
fn compare(
    zone: &TimeZone,
    minutes: &[(Timestamp, DateTime)],
    (text, meaning): (&str, Meaning),
    searches: usize,
) {
    let cron: Cron = text.parse().unwrap();
    let fires: Vec<bool> = minutes.iter().map(|(_, clock)| meaning(*clock)).collect();
    assert!(fires.iter().filter(|fires| **fires).count() > 40, "{text}");
    let around = |index: usize| fires[index.saturating_sub(1)..].iter().take(3).any(|fires| *fires);
    let is_asked = |index: usize| index.is_multiple_of(searches) || around(index);
    let mut previous = None;
    for (index, (time, clock)) in minutes.iter().enumerate() {
        assert_eq!(cron.fires(zone, *time), fires[index], "{text} at {time}, {clock}");
        previous = if fires[index] { Some(*time) } else { previous };
        if previous.is_some() && is_asked(index) {
            assert_eq!(cron.previous(zone, *time), previous, "{text} at {time}, {clock}");
        }
    }
    let mut next = None;
    for (index, (time, clock)) in minutes.iter().enumerate().rev() {
        if next.is_some() && is_asked(index) {
            assert_eq!(cron.next(zone, *time), next, "{text} at {time}, {clock}");
        }
        next = if fires[index] { Some(*time) } else { next };
    }
}

/// Asks a schedule for the minutes around each change of the clock, and for some of the others.
fn compare_schedule(zone: &TimeZone, name: &str, minutes: &[(Timestamp, DateTime)]) {
    let task = task(&schedule(name, "start 10 0-3 * * *; stop 50 1 * * *; start 30 2 * * *"));
    let (mut runs, mut last_stop, mut period_start) = (false, None, None);
    for (index, (time, clock)) in minutes.iter().enumerate() {
        let hour_and_minute = (clock.hour(), clock.minute());
        if hour_and_minute == (1, 50) {
            (runs, last_stop, period_start) = (false, Some(*time), None);
        } else if hour_and_minute == (2, 30) || (clock.hour() < 4 && clock.minute() == 10) {
            (runs, period_start) = (true, period_start.or(Some(*time)));
        }
        let day = 24.hours();
        let near = zone.to_offset(time.checked_sub(day).unwrap())
            != zone.to_offset(time.checked_add(day).unwrap());
        if last_stop.is_none() || !(near && clock.hour() < 6 || index % 997 == 0) {
            continue;
        }
        let moment = task.moment(*time);
        assert_eq!((moment.should_run, moment.last_stop), (runs, last_stop), "{time}, {clock}");
        if period_start.is_some() {
            assert_eq!(moment.period_start, period_start, "{time}, {clock}");
        } else {
            assert!(moment.period_start.is_some_and(|start| start > *time), "{time}, {clock}");
        }
    }
}

fn check(name: &str) {
    let zone = zone(name);
    let minutes = minutes(&zone);
    compare(&zone, &minutes, ("10/20 0-3 * * *", night), 1);
    compare(&zone, &minutes, ("0 0 13 * FRI", thirteenth), 97);
    compare_schedule(&zone, name, &minutes);
}

#[test]
fn new_york_changes_at_two() {
    check("America/New_York");
}

#[test]
fn sao_paulo_changes_at_midnight_in_the_southern_summer() {
    check("America/Sao_Paulo");
}

#[test]
fn lord_howe_changes_by_half_an_hour() {
    check("Australia/Lord_Howe");
}

#[test]
fn casablanca_changes_four_times_a_year() {
    check("Africa/Casablanca");
}

#[test]
fn kolkata_is_half_an_hour_apart_and_never_changes() {
    check("Asia/Kolkata");
}

#[test]
fn utc_never_changes() {
    check("UTC");
}
