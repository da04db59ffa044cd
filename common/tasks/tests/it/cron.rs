//! Expressions: what they name, and what is refused.

use jiff::ToSpan as _;
use jiff::tz::TimeZone;
use tasks::cron::Cron;

use crate::{at, zone};

#[test]
fn an_expression_fires_or_not() {
    #[rustfmt::skip]
    let table = [
        // Each quarter of an hour, from the hour and from five past.
        ("2012-07-09T15:00", "0/15 * * * *", true),
        ("2012-07-09T15:45", "0/15 * * * *", true),
        ("2012-07-09T15:40", "0/15 * * * *", false),
        ("2012-07-09T15:05", "5/15 * * * *", true),
        ("2012-07-09T15:20", "5/15 * * * *", true),
        ("2012-07-09T15:50", "5/15 * * * *", true),
        ("2012-07-09T15:00", "5/15 * * * *", false),
        // Names.
        ("2012-07-15T15:00", "0/15 * * Jul *", true),
        ("2012-07-15T15:00", "0/15 * * Jun *", false),
        ("2012-07-15T15:00", "0/15 * * JUL sUN", true),
        ("2012-07-15T08:30", "30 08 ? Jul Sun", true),
        ("2012-07-15T08:30", "30 08 15 Jul ?", true),
        ("2012-07-16T08:30", "30 08 ? Jul Sun", false),
        ("2012-07-16T08:30", "30 08 15 Jul ?", false),
        // Short forms.
        ("2012-07-09T15:00", "@hourly", true),
        ("2012-07-09T15:04", "@hourly", false),
        ("2012-07-09T15:00", "@daily", false),
        ("2012-07-09T00:00", "@Daily", true),
        ("2012-07-09T00:00", "@weekly", false),
        ("2012-07-08T00:00", "@weekly", true),
        ("2012-07-08T01:00", "@weekly", false),
        ("2012-07-08T00:00", "@monthly", false),
        ("2012-07-01T00:00", "@monthly", true),
        // Both days are restricted, so that one of them is enough.
        ("2012-07-15T00:00", "* * 1,15 * Sun", true),
        ("2012-06-15T00:00", "* * 1,15 * Sun", true),
        ("2012-08-01T00:00", "* * 1,15 * Sun", true),
        ("2012-08-02T00:00", "* * 1,15 * Sun", false),
        ("2012-07-15T00:00", "* * */10 * Sun", true),
        ("2012-07-11T00:00", "* * */10 * Sun", true),
        ("2012-07-15T00:00", "* * */2 * Sun", true),
        ("2012-07-10T00:00", "* * 1 * */2", true),
        // One of them is a star, so that the other counts.
        ("2012-07-15T00:00", "* * * * Mon", false),
        ("2012-07-15T00:00", "* * */1 * Mon", false),
        ("2012-07-09T00:00", "* * 1,15 * *", false),
        ("2012-07-15T00:00", "* * 1,15 * *", true),
        ("2012-07-11T00:00", "* * 1,* * Sun", false),
    ];
    for (time, text, expected) in table {
        let now = at(&format!("{time}:00Z"));
        let cron: Cron = text.parse().unwrap();
        assert_eq!(cron.fires(&TimeZone::UTC, now), expected, "{text} at {time}");
        // The same by a search.
        let found = cron.previous(&TimeZone::UTC, now) == Some(now);
        assert_eq!(found, expected, "{text} at {time}");
        let before = now.checked_sub(1.second()).unwrap();
        assert_eq!(cron.next(&TimeZone::UTC, before) == Some(now), expected, "{text} at {time}");
        assert!(!cron.fires(&TimeZone::UTC, now.checked_add(1.second()).unwrap()));
    }
}

#[test]
fn the_previous_moment_includes_now() {
    #[rustfmt::skip]
    let table = [
        ("UTC", "2012-07-09T15:15:00Z", "0 0/15 * * * *", "2012-07-09T15:15:00Z"),
        ("UTC", "2012-07-09T15:01:00Z", "0 0/15 * * * *", "2012-07-09T15:00:00Z"),
        ("UTC", "2012-07-09T15:00:01Z", "0 0/15 * * * *", "2012-07-09T15:00:00Z"),
        ("UTC", "2012-07-09T15:00:00.5Z", "0 0/15 * * * *", "2012-07-09T15:00:00Z"),
        // Over hours, days, months and years.
        ("UTC", "2012-07-09T17:05:00Z", "0 20-35/15 * * * *", "2012-07-09T16:35:00Z"),
        ("UTC", "2012-07-10T00:05:00Z", "0 */15 * * * *", "2012-07-10T00:00:00Z"),
        ("UTC", "2012-07-10T00:00:00Z", "0 20-35/15 * * * *", "2012-07-09T23:35:00Z"),
        ("UTC", "2012-07-10T00:00:00Z", "15/35 20-35/15 * * * *", "2012-07-09T23:35:50Z"),
        ("UTC", "2012-07-10T00:00:00Z", "15/35 20-35/15 1/2 * * *", "2012-07-09T23:35:50Z"),
        ("UTC", "2012-07-10T00:00:00Z", "15/35 20-35/15 10-12 * * *", "2012-07-09T12:35:50Z"),
        ("UTC", "2012-07-10T00:00:00Z", "15/35 20-35/15 1/2 */2 * *", "2012-07-09T23:35:50Z"),
        ("UTC", "2012-07-10T00:00:00Z", "15/35 20-35/15 * 1-8 * *", "2012-07-08T23:35:50Z"),
        ("UTC", "2012-07-10T00:00:00Z", "15/35 20-35/15 * 9-20 Jul *", "2012-07-09T23:35:50Z"),
        ("UTC", "2012-07-09T00:00:00Z", "0 0 0 10 Apr-Oct ?", "2012-06-10T00:00:00Z"),
        ("UTC", "2012-07-09T00:00:00Z", "0 0 0 */5 Apr,Aug,Oct Mon", "2012-04-30T00:00:00Z"),
        ("UTC", "2012-07-09T00:00:00Z", "0 0 0 */5 Jan Mon", "2012-01-31T00:00:00Z"),
        ("UTC", "2012-07-09T00:00:00Z", "0 0 0 */7 Jan Tue", "2012-01-31T00:00:00Z"),
        ("UTC", "2012-07-09T00:00:00Z", "0 0 0 * Oct Tue", "2011-10-25T00:00:00Z"),
        ("UTC", "2012-07-09T00:00:00Z", "0 0 0 * Oct Tue/2", "2011-10-29T00:00:00Z"),
        ("UTC", "2017-07-09T23:35:00Z", "0 0 0 29 Feb ?", "2016-02-29T00:00:00Z"),
        ("UTC", "2012-07-09T23:35:00Z", "0 0 0 30 Feb ?", "none"),
        ("UTC", "2012-07-09T23:35:00Z", "0 0 0 31 Apr ?", "none"),
        // The clock goes ahead: a skipped time does not exist.
        ("America/New_York", "2012-03-11T04:00:00-04", "0 0 0 11 Mar ?", "2012-03-11T00:00:00-05"),
        ("America/New_York", "2012-03-11T05:00:00-04", "0 5 * * * ?", "2012-03-11T04:05:00-04"),
        ("America/New_York", "2012-03-11T04:00:00-04", "0 5 * * * ?", "2012-03-11T03:05:00-04"),
        ("America/New_York", "2012-03-11T03:00:00-04", "0 5 * * * ?", "2012-03-11T01:05:00-05"),
        ("America/New_York", "2012-03-11T01:00:00-05", "0 5 * * * ?", "2012-03-11T00:05:00-05"),
        ("America/New_York", "2012-03-11T00:00:00-05", "0 5 * * * ?", "2012-03-10T23:05:00-05"),
        ("America/New_York", "2012-03-12T00:00:00-04", "0 0 1 * * ?", "2012-03-11T01:00:00-05"),
        ("America/New_York", "2012-03-11T00:00:00-05", "0 0 1 * * ?", "2012-03-10T01:00:00-05"),
        ("America/New_York", "2012-03-11T03:00:00-04", "0 0 2 * * ?", "2012-03-10T02:00:00-05"),
        ("America/New_York", "2012-03-11T03:00:00-04", "59 59 2 * * ?", "2012-03-10T02:59:59-05"),
        // The clock goes back: a time that is shown twice counts twice.
        ("America/New_York", "2012-11-04T03:00:00-05", "0 30 2 04 Nov ?", "2012-11-04T02:30:00-05"),
        ("America/New_York", "2012-11-04T01:15:00-05", "0 30 1 04 Nov ?", "2012-11-04T01:30:00-04"),
        ("America/New_York", "2012-11-04T01:30:00-05", "0 30 1 04 Nov ?", "2012-11-04T01:30:00-05"),
        ("America/New_York", "2012-11-04T03:00:00-05", "0 5 * * * ?", "2012-11-04T02:05:00-05"),
        ("America/New_York", "2012-11-04T02:00:00-05", "0 5 * * * ?", "2012-11-04T01:05:00-05"),
        ("America/New_York", "2012-11-04T01:00:00-05", "0 5 * * * ?", "2012-11-04T01:05:00-04"),
        ("America/New_York", "2012-11-04T01:00:00-04", "0 5 1 * * ?", "2012-11-03T01:05:00-04"),
        ("America/New_York", "2012-11-04T01:00:00-05", "0 5 1 * * ?", "2012-11-04T01:05:00-04"),
        ("America/New_York", "2012-11-05T01:00:00-05", "0 5 1 * * ?", "2012-11-04T01:05:00-05"),
        ("America/New_York", "2012-11-04T03:00:00-05", "0 0 2 * * ?", "2012-11-04T02:00:00-05"),
        ("America/New_York", "2012-11-05T01:00:00-05", "0 0 2 * * ?", "2012-11-04T02:00:00-05"),
        ("America/New_York", "2012-11-04T01:00:00-04", "0 5 * * * ?", "2012-11-04T00:05:00-04"),
        ("America/New_York", "2012-11-04T02:00:00-04", "0 5 * * * ?", "2012-11-04T01:05:00-04"),
        ("America/New_York", "2012-11-04T00:05:00-04", "0 0 1 * * ?", "2012-11-03T01:00:00-04"),
        ("America/New_York", "2012-11-04T01:05:00-04", "0 0 1 * * ?", "2012-11-04T01:00:00-04"),
        ("America/New_York", "2012-11-04T01:05:00-05", "0 0 1 * * ?", "2012-11-04T01:00:00-05"),
        ("America/New_York", "2012-11-04T03:00:00-05", "0 5 2 * * ?", "2012-11-04T02:05:00-05"),
        ("America/New_York", "2012-11-04T02:00:00-05", "0 5 2 * * ?", "2012-11-03T02:05:00-04"),
        ("America/New_York", "2012-12-02T00:00:00-05", "0 0 3 3 * ?", "2012-11-03T03:00:00-04"),
        // Midnight is skipped.
        ("America/Sao_Paulo", "2018-11-09T05:00:00-04", "0 0 9 10 * ?", "2018-10-10T08:00:00-04"),
        ("America/Sao_Paulo", "2018-02-23T05:00:00-05", "0 0 9 22 * ?", "2018-02-22T07:00:00-05"),
        ("America/Sao_Paulo", "2018-11-04T12:00:00Z", "0 0 0 * * ?", "2018-11-03T00:00:00-03"),
        // A whole day is skipped.
        ("Pacific/Apia", "2011-12-31T00:00:00+14", "0 0 12 * * ?", "2011-12-29T12:00:00-10"),
        // The clock moves by half an hour.
        ("Australia/Lord_Howe", "2024-04-07T01:50:00+10:30", "0 45 1 * * ?", "2024-04-07T01:45:00+10:30"),
        ("Australia/Lord_Howe", "2024-04-07T01:40:00+10:30", "0 45 1 * * ?", "2024-04-07T01:45:00+11"),
    ];
    for (name, now, text, expected) in table {
        let cron = Cron::with_seconds(text).unwrap();
        let expected = (expected != "none").then(|| at(expected));
        assert_eq!(cron.previous(&zone(name), at(now)), expected, "{text} at {now}");
    }
}

#[test]
fn the_next_moment_excludes_now() {
    #[rustfmt::skip]
    let table = [
        ("UTC", "2012-07-09T15:00:00Z", "0/15 * * * *", "2012-07-09T15:15:00Z"),
        ("UTC", "2012-07-09T14:59:59Z", "0/15 * * * *", "2012-07-09T15:00:00Z"),
        ("UTC", "2012-07-09T14:59:59.9Z", "0/15 * * * *", "2012-07-09T15:00:00Z"),
        ("UTC", "2012-07-09T23:35:50Z", "15/35 20-35/15 * * * *", "2012-07-10T00:20:15Z"),
        ("UTC", "2012-12-31T23:59:00Z", "0 0 1 1 *", "2013-01-01T00:00:00Z"),
        ("UTC", "2016-02-29T00:00:00Z", "0 0 29 2 *", "2020-02-29T00:00:00Z"),
        ("UTC", "2012-07-09T00:00:00Z", "0 0 30 2 *", "none"),
        // 2100 is no leap year: the next is farther away than five years.
        ("UTC", "2096-03-01T00:00:00Z", "0 0 29 2 *", "none"),
        ("UTC", "2099-06-01T00:00:00Z", "0 0 29 2 *", "2104-02-29T00:00:00Z"),
        ("America/New_York", "2012-03-11T01:59:59-05", "30 2 * * *", "2012-03-12T02:30:00-04"),
        ("America/New_York", "2012-03-11T01:30:00-05", "0 * * * *", "2012-03-11T03:00:00-04"),
        ("America/New_York", "2012-03-11T01:30:00-05", "0 2 * * *", "2012-03-12T02:00:00-04"),
        ("America/New_York", "2012-11-04T00:00:00-04", "30 1 * * *", "2012-11-04T01:30:00-04"),
        ("America/New_York", "2012-11-04T01:30:00-04", "30 1 * * *", "2012-11-04T01:30:00-05"),
        ("America/New_York", "2012-11-04T01:30:00-05", "30 1 * * *", "2012-11-05T01:30:00-05"),
        ("America/Sao_Paulo", "2018-11-03T12:00:00Z", "0 0 * * *", "2018-11-05T00:00:00-02"),
        ("Pacific/Apia", "2011-12-29T12:00:00-10", "0 12 * * *", "2011-12-31T12:00:00+14"),
        ("Australia/Lord_Howe", "2024-04-07T01:45:00+11", "45 1 * * *", "2024-04-07T01:45:00+10:30"),
    ];
    for (name, now, text, expected) in table {
        let cron = Cron::with_seconds(text).unwrap();
        let expected = (expected != "none").then(|| at(expected));
        assert_eq!(cron.next(&zone(name), at(now)), expected, "{text} at {now}");
    }
}

#[test]
fn the_ends_of_all_times_are_no_trouble() {
    let cron: Cron = "0 0 29 2 *".parse().unwrap();
    for zone in [TimeZone::UTC, zone("America/New_York"), zone("Pacific/Apia")] {
        assert_eq!(cron.previous(&zone, jiff::Timestamp::MIN), None);
        assert_eq!(cron.next(&zone, jiff::Timestamp::MAX), None);
        assert!(cron.next(&zone, jiff::Timestamp::MIN).is_some());
        assert!(cron.previous(&zone, jiff::Timestamp::MAX).is_some());
    }
}

#[test]
fn an_expression_that_names_no_day_is_found_out() {
    let table = [
        ("0 0 30 2 *", false),
        ("0 0 31 2,4,6,9,11 *", false),
        ("0 0 29 2 *", true),
        ("0 0 31 4,5 *", true),
        ("0 0 30 2 MON", true),
        ("0 0 30 2 */2", true),
        ("* * * * *", true),
    ];
    for (text, expected) in table {
        let cron: Cron = text.parse().unwrap();
        assert_eq!(cron.can_fire(), expected, "{text}");
        let now = at("2012-07-09T00:00:00Z");
        assert_eq!(cron.next(&TimeZone::UTC, now).is_some(), expected, "{text}");
    }
}

#[test]
fn what_is_no_expression_is_refused() {
    #[rustfmt::skip]
    let table = [
        ("", "0 fields, expected 5: minute hour day month weekday"),
        ("I AM INVALID", "3 fields, expected 5: minute hour day month weekday"),
        ("0 0 9 * * MON", "6 fields, expected 5: minute hour day month weekday"),
        ("60 * * * *", "minute: `60` is not in 0-59"),
        ("* 24 * * *", "hour: `24` is not in 0-23"),
        ("* * 0 * *", "day of the month: `0` is not in 1-31"),
        ("* * 32 * *", "day of the month: `32` is not in 1-31"),
        ("* * * 13 *", "month: `13` is not in 1-12"),
        ("* * * * 7", "day of the week: `7` is not in 0-6; Sunday is 0"),
        ("* * * * FRI-MON", "day of the week: the range `FRI-MON` ends before it begins; write two"),
        ("* * * * 5-7", "day of the week: `7` is not in 0-6; Sunday is 0"),
        ("* * * * MONDAY", "day of the week: `MONDAY` is neither a number nor a name"),
        ("* * * jan-feb-mar *", "month: `feb-mar` is neither a number nor a name"),
        ("10-5 * * * *", "minute: the range `10-5` ends before it begins; write two"),
        ("*/0 * * * *", "minute: a step of 0"),
        ("*/ * * * *", "minute: `` is neither a number nor a name"),
        ("*/5/5 * * * *", "minute: `5/5` is neither a number nor a name"),
        ("*-5 * * * *", "minute: `*` is neither a number nor a name"),
        ("1,,2 * * * *", "minute: `` is neither a number nor a name"),
        (", * * * *", "minute: `` is neither a number nor a name"),
        ("+5 * * * *", "minute: `+5` is neither a number nor a name"),
        ("-5 * * * *", "minute: `` is neither a number nor a name"),
        ("99999999999999999999 * * * *", "minute: `99999999999999999999` is neither a number nor a name"),
        ("५ * * * *", "minute: `५` is neither a number nor a name"),
        ("@yearly", "`@yearly` is unknown; there are @hourly, @daily, @weekly, @monthly"),
        ("@every 1h", "`@every 1h` is unknown; there are @hourly, @daily, @weekly, @monthly"),
        ("TZ=UTC 0 9 * * *", "the zone is not a part of the expression; it is given apart"),
        ("CRON_TZ=UTC 0 9 * * *", "the zone is not a part of the expression; it is given apart"),
    ];
    for (text, expected) in table {
        assert_eq!(text.parse::<Cron>().unwrap_err().to_string(), expected, "{text}");
    }
    let long = format!("{} * * * *", "1,".repeat(300));
    let error = long.parse::<Cron>().unwrap_err();
    assert_eq!(error.to_string(), "the expression has more than 512 bytes");
    let error = Cron::with_seconds("60 * * * * *").unwrap_err();
    assert_eq!(error.to_string(), "second: `60` is not in 0-59");
    let error = Cron::with_seconds("* * * *").unwrap_err();
    assert_eq!(error.to_string(), "4 fields, expected 5 or 6: minute hour day month weekday");
}

#[test]
fn a_time_and_days_are_an_expression() {
    let table = [
        ("17:00", "MON-FRI", "0 17 * * 1-5"),
        ("00:05", "sat,Sun", "5 0 * * 0,6"),
        ("23:59", "SUN-SAT", "59 23 * * 0-6"),
        ("09:30", "TUE", "30 9 * * 2"),
    ];
    let start = at("2024-01-01T00:00:00Z");
    for (time, days, same) in table {
        let cron = Cron::daily(time, days).unwrap();
        assert_eq!(cron.to_string(), format!("{time} {days}"));
        let same: Cron = same.parse().unwrap();
        let walk = |cron: &Cron| {
            let next = |now: &jiff::Timestamp| cron.next(&TimeZone::UTC, *now);
            std::iter::successors(Some(start), next).take(30).collect::<Vec<_>>()
        };
        assert_eq!(walk(&cron), walk(&same));
    }
    #[rustfmt::skip]
    let refused = [
        ("INVALID", "MON", "time: `INVALID` is no time of day such as 09:00"),
        ("", "MON", "time: `` is no time of day such as 09:00"),
        ("9:00", "MON", "time: `9:00` is no time of day such as 09:00"),
        ("24:00", "MON", "time: `24:00` is no time of day such as 09:00"),
        ("12:60", "MON", "time: `12:60` is no time of day such as 09:00"),
        ("*2:00", "MON", "time: `*2:00` is no time of day such as 09:00"),
        ("1-2:3", "MON", "time: `1-2:3` is no time of day such as 09:00"),
        ("09:00", "", "days: `` are no days such as MON-FRI or SAT,SUN"),
        ("09:00", "*", "days: `*` are no days such as MON-FRI or SAT,SUN"),
        ("09:00", "1-5", "days: `1-5` are no days such as MON-FRI or SAT,SUN"),
        ("09:00", "FOO", "days: `FOO` is neither a number nor a name"),
        ("09:00", "SAT-MON", "days: the range `SAT-MON` ends before it begins; write two"),
    ];
    for (time, days, expected) in refused {
        let error = Cron::daily(time, days).unwrap_err();
        assert_eq!(error.to_string(), expected, "{time} {days}");
    }
}
