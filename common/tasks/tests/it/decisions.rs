//! What is to be done about runs.

use std::fmt::Write as _;

use tasks::{Decision, Observed, Task, decide};

use crate::{at, observed, present, schedule, task};

/// Starts at 09:00 and stops at 17:00, each day.
fn daily() -> String {
    schedule("UTC", "start 0 9 * * *; stop 0 17 * * *")
}

fn recreate() -> String {
    format!(r#""on_template_change": "recreate", {}"#, daily())
}

/// Writes a run: its name, when it is due, and its further fields as `key`, or `key=value`.
fn run(text: &str) -> String {
    let mut words = text.split_whitespace();
    let (name, due) = (words.next().unwrap(), words.next().unwrap());
    let id = name.rsplit('-').next().unwrap();
    let mut json =
        format!(r#"{{"name": "{name}", "run_id": {id}, "scheduled_at": "2022-12-{due}:00Z""#);
    for word in words {
        match word.split_once('=') {
            Some((key, value)) => write!(json, r#", "{key}": "{value}""#),
            None => write!(json, r#", "{word}": true"#),
        }
        .unwrap();
    }
    json + "}"
}

fn runs(texts: &[&str]) -> Observed {
    let runs: Vec<String> = texts.iter().map(|text| run(text)).collect();
    observed(&format!(r#""runs": [{}]"#, runs.join(", ")))
}

fn decided(task: &Task, now: &str, observed: &Observed) -> Decision {
    decide(task, &present(), &task.moment(at(now)), observed)
}

/// Writes a decision in one line, without reasons.
fn told(decision: &Decision) -> String {
    let mut parts = Vec::new();
    for new in &decision.create {
        let held = if new.held { "held" } else { "free" };
        let manual = if new.manual { " manual" } else { "" };
        parts.push(format!("create {} at {} {held}{manual}", new.run_id, new.scheduled_at));
    }
    parts.extend(decision.delete.iter().map(|run| format!("delete {}", run.name)));
    parts.extend(decision.release.iter().map(|run| format!("release {}", run.name)));
    parts.extend(decision.refused.iter().map(|late| format!("refuse {}", late.scheduled_at)));
    if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") }
}

#[track_caller]
fn check(fields: &str, now: &str, observed: &Observed, expected: &str) {
    let decision = decided(&task(fields), now, observed);
    assert_eq!(told(&decision), expected, "{fields} at {now}: {observed:#?}");
}

const EARLY: &str = "2022-12-12T07:12:00Z";
const NOON: &str = "2022-12-12T12:12:00Z";

#[test]
fn runs_come_and_go_with_the_hours() {
    let late = daily().replace(r#""events""#, r#""start_deadline_s": 30, "events""#);
    #[rustfmt::skip]
    let table: &[(&str, &str, &[&str], &str)] = &[
        (&daily(), EARLY, &[], "nothing"),
        (&daily(), EARLY, &["old-0 11T12:12", "between-1 11T19:12", "manual-2 11T19:12 manual"],
         "delete old-0, delete between-1"),
        (&daily(), "2022-12-12T09:00:00Z", &[], "create 0 at 2022-12-12T09:00:00Z free"),
        (&daily(), "2022-12-12T08:59:59Z", &[], "nothing"),
        (&daily(), "2022-12-12T17:00:00Z", &["job-0 12T09:00 state=running"], "delete job-0"),
        (&daily(), "2022-12-12T16:59:59Z", &["job-0 12T09:00 state=running"], "nothing"),
        // However many events were missed.
        (&daily(), NOON, &["job-0 01T09:00 state=running"], "create 0 at 2022-12-12T09:00:00Z held, delete job-0"),
        (&daily(), NOON, &["job-0 01T09:00 state=succeeded"], "create 0 at 2022-12-12T09:00:00Z free, delete job-0"),
        (&daily(), NOON, &["job-0 01T09:00 deleting"], "create 0 at 2022-12-12T09:00:00Z held"),
        // A deadline.
        (&late, "2022-12-12T09:00:15Z", &[], "create 0 at 2022-12-12T09:00:00Z free"),
        (&late, "2022-12-12T09:00:30Z", &[], "create 0 at 2022-12-12T09:00:00Z free"),
        (&late, "2022-12-12T09:00:31Z", &[], "refuse 2022-12-12T09:00:00Z"),
        (&late, NOON, &["old-0 11T09:00"], "delete old-0, refuse 2022-12-12T09:00:00Z"),
        (&late, NOON, &["job-0 12T09:00 state=failed"], "nothing"),
        (&late, EARLY, &[], "nothing"),
        // How a run fares does not matter.
        (&daily(), NOON, &["job-0 12T09:00"], "nothing"),
        (&daily(), NOON, &["job-0 12T09:00 state=starting"], "nothing"),
        (&daily(), NOON, &["job-0 12T09:00 state=succeeded"], "nothing"),
        (&daily(), NOON, &["job-0 12T09:00 state=failed"], "nothing"),
        (&daily(), NOON, &["job-0 12T09:00 state=gone"], "create 0 at 2022-12-12T09:00:00Z free"),
        (&daily(), NOON, &["job-0 12T09:00 state=stopping"], "nothing"),
        (&daily(), "2022-12-12T18:00:00Z", &["job-0 12T09:00 state=succeeded"], "delete job-0"),
        (&daily(), EARLY, &["job-0 11T19:00 state=succeeded"], "nothing"),
    ];
    for (fields, now, texts, expected) in table {
        check(fields, now, &runs(texts), expected);
    }
}

#[test]
fn manual_runs_live_outside_of_the_hours_until_the_next_stop() {
    let never = schedule("UTC", "");
    let stops = schedule("UTC", "stop 17:00 MON-FRI");
    #[rustfmt::skip]
    let table: &[(&str, &str, &[&str], &str)] = &[
        // 12 December is a Monday.
        (&never, "2022-12-12T09:00:00Z", &["job-1 12T00:00"], "delete job-1"),
        (&never, "2022-12-12T09:00:00Z", &["job-1 12T00:00 manual"], "nothing"),
        (&stops, "2022-12-12T09:00:00Z", &["job-1 12T00:00"], "delete job-1"),
        (&stops, "2022-12-12T09:00:00Z", &["job-1 12T00:00 manual"], "nothing"),
        (&stops, "2022-12-13T00:00:00Z", &["job-1 12T00:00 manual"], "delete job-1"),
        (&stops, "2022-12-12T09:00:00Z", &["job-1 12T00:00 manual held"], "release job-1"),
        (&stops, "2022-12-12T09:00:00Z", &["job-1 12T00:00 manual", "job-2 12T00:00"], "delete job-2"),
        (&stops, "2022-12-12T09:00:00Z", &["job-1 12T00:00 manual", "job-2 12T00:00 state=failed"], "nothing"),
        // Ahead of the start: it is the run of the day.
        (&daily(), "2022-12-12T08:00:00Z", &["job-0 12T07:00 manual"], "nothing"),
        (&daily(), NOON, &["job-0 12T07:00 manual"], "nothing"),
        (&daily(), "2022-12-12T17:00:00Z", &["job-0 12T07:00 manual"], "delete job-0"),
        // Started at the moment of the stop: it is after it.
        (&daily(), "2022-12-12T17:00:00Z", &["job-0 12T17:00 manual"], "nothing"),
        (&daily(), "2022-12-12T17:00:00Z", &["job-0 12T16:59 manual"], "delete job-0"),
    ];
    for (fields, now, texts, expected) in table {
        check(fields, now, &runs(texts), expected);
    }
}

#[test]
fn one_run_is_kept_and_only_the_last_is_released() {
    #[rustfmt::skip]
    let table: &[(&str, &[&str], &str)] = &[
        (&daily(), &["job-0 12T09:00 held"], "release job-0"),
        (&daily(), &["job-0 12T09:00 state=held"], "release job-0"),
        (&daily(), &["job-0 12T09:00 held template=other"], "release job-0"),
        (&recreate(), &["job-0 12T09:00 held template=other"], "create 1 at 2022-12-12T09:00:00Z held, delete job-0"),
        (&recreate(), &["job-0 12T09:00 deleting"], "nothing"),
        (&recreate(), &["job-0 12T09:00 held deleting"], "nothing"),
        // An operator holds it.
        (&recreate(), &["job-0 12T09:00 held_by=user"], "nothing"),
        (&recreate(), &["job-0 12T09:00 held held_by=user"], "nothing"),
        (&recreate(), &["job-0 12T09:00 held held_by=user template=other"], "nothing"),
        // All of former periods go, in whatever state.
        (&daily(), &["job-0 11T12:12 held template=other", "job-1 11T12:12 template=other", "job-2 11T12:12 template=other state=succeeded"],
         "create 0 at 2022-12-12T09:00:00Z held, delete job-0, delete job-1, delete job-2"),
        // Which one is kept.
        (&daily(), &["job-0 12T09:00", "job-1 12T09:00 deleting"], "nothing"),
        (&daily(), &["job-0 12T09:00", "job-1 12T09:00 template=other"], "delete job-1"),
        (&daily(), &["job-0 12T09:00 template=other", "job-1 12T09:00 deleting"], "nothing"),
        (&daily(), &["job-0 12T09:00 template=other", "job-1 12T09:00 deleting", "job-2 12T09:00", "job-3 12T09:00",
                     "job-4 12T09:00", "job-5 12T09:00 template=other"],
         "delete job-0, delete job-2, delete job-3, delete job-5"),
        (&daily(), &["job-9 12T09:00", "job-10 12T09:00"], "delete job-9"),
        (&daily(), &["job-0 12T09:00 state=failed", "job-1 12T09:00 held"], "release job-1"),
        (&daily(), &["job-0 12T09:00 state=running", "job-1 12T09:00 held"], "delete job-0"),
        (&daily(), &["job-0 12T09:00 deleting", "job-1 12T09:00 held"], "nothing"),
        (&daily(), &["job-0 12T09:00 state=gone", "job-1 12T09:00 held"], "release job-1"),
        (&daily(), &["old-0 11T09:00 state=succeeded", "job-1 12T09:00 held"], "delete old-0, release job-1"),
        (&daily(), &["old-0 11T09:00", "job-1 12T09:00 held"], "delete old-0"),
        // A finished run of the period is history.
        (&daily(), &["job-0 12T09:00 state=failed", "job-1 12T09:00 state=running"], "nothing"),
    ];
    for (fields, texts, expected) in table {
        check(fields, NOON, &runs(texts), expected);
    }
}

#[test]
fn a_new_version_replaces_what_may_be_live() {
    let ignore = format!(r#""on_template_change": "ignore", {}"#, daily());
    let present = format!("job-1 12T09:00 state=running template={}", "ab".repeat(32));
    let former = format!("job-1 12T09:00 state=running template={}", "cd".repeat(32));
    #[rustfmt::skip]
    let table: &[(&str, &[&str], &str)] = &[
        (&recreate(), &["job-1 12T09:00 state=running"], "nothing"),
        (&recreate(), &[&present], "nothing"),
        (&recreate(), &[&former], "create 2 at 2022-12-12T09:00:00Z held, delete job-1"),
        (&recreate(), &["job-1 12T09:00 state=running template=other"], "create 2 at 2022-12-12T09:00:00Z held, delete job-1"),
        (&recreate(), &["job-1 12T09:00 manual template=other"], "create 2 at 2022-12-12T09:00:00Z held manual, delete job-1"),
        (&recreate(), &["job-1 12T09:00 template=other state=succeeded"], "nothing"),
        (&recreate(), &["job-1 12T09:00 template=other state=failed"], "nothing"),
        (&recreate(), &["job-1 12T09:00 template=other deleting"], "nothing"),
        (&ignore, &["job-1 12T09:00 state=running"], "nothing"),
        (&ignore, &["job-1 12T09:00 state=running template=other"], "nothing"),
        (&ignore, &["job-1 12T09:00 state=succeeded template=other"], "nothing"),
        (&daily(), &["job-1 12T09:00 state=running template=other"], "nothing"),
        (&recreate(), &["job-4294967295 12T09:00 template=other"],
         "create 4294967295 at 2022-12-12T09:00:00Z held, delete job-4294967295"),
    ];
    for (fields, texts, expected) in table {
        check(fields, NOON, &runs(texts), expected);
    }
}

#[test]
fn a_task_without_hours_runs_always_or_once_for_each_version() {
    let once = r#""restart": {"policy": "never"}"#;
    let new = "create 0 at 2022-12-12T12:12:00Z free";
    #[rustfmt::skip]
    let table: &[(&str, &[&str], &str)] = &[
        ("", &[], new),
        ("", &["job-0 01T09:00 state=running"], "nothing"),
        ("", &["job-0 01T09:00 state=running template=other"], "create 1 at 2022-12-01T09:00:00Z held, delete job-0"),
        ("", &["job-0 01T09:00 state=failed"], "nothing"),
        (once, &[], new),
        (once, &["job-0 01T09:00 state=succeeded"], "nothing"),
        (once, &["job-0 01T09:00 state=failed"], "nothing"),
        (once, &["job-0 01T09:00 state=succeeded template=other"], &format!("{new}, delete job-0")),
        (once, &["job-0 01T09:00 state=succeeded template=other", "job-0 12T12:00 state=succeeded"], "delete job-0"),
        (r#""on_template_change": "ignore""#, &["job-0 01T09:00 state=running template=other"], "nothing"),
        (r#""on_template_change": "ignore""#, &["job-0 01T09:00 state=failed template=other"], &format!("{new}, delete job-0")),
    ];
    for (fields, texts, expected) in table {
        check(fields, NOON, &runs(texts), expected);
    }
}

#[test]
fn a_suspended_task_has_no_runs_and_one_without_a_permit_none_that_is_released() {
    let with = |fields: &str, texts: &[&str]| {
        let runs: Vec<String> = texts.iter().map(|text| run(text)).collect();
        observed(&format!(r#"{fields}, "runs": [{}]"#, runs.join(", ")))
    };
    let exclusive = format!(r#""exclusive": true, {}"#, daily());
    let suspended = r#""suspended": true"#;
    #[rustfmt::skip]
    let table: &[(&str, Observed, &str)] = &[
        (&daily(), with(suspended, &[]), "nothing"),
        (&daily(), with(suspended, &["job-0 12T09:00", "job-1 12T09:00 state=failed", "job-2 12T09:00 manual", "job-3 12T09:00 deleting"]),
         "delete job-0, delete job-1, delete job-2"),
        (&daily(), with(r#""permit": false"#, &["job-0 12T09:00 held"]), "nothing"),
        (&daily(), with(r#""permit": false"#, &[]), "create 0 at 2022-12-12T09:00:00Z held"),
        (&daily(), with(r#""permit": true"#, &["job-0 12T09:00 held"]), "release job-0"),
        (&exclusive, runs(&["job-0 12T09:00 held"]), "nothing"),
        (&exclusive, with(r#""permit": null"#, &[]), "create 0 at 2022-12-12T09:00:00Z held"),
        (&exclusive, with(r#""permit": true"#, &["job-0 12T09:00 held"]), "release job-0"),
        (&exclusive, with(r#""permit": true"#, &[]), "create 0 at 2022-12-12T09:00:00Z free"),
    ];
    for (fields, observed, expected) in table {
        check(fields, NOON, observed, expected);
    }
    let decision = decided(&task(&daily()), NOON, &with(suspended, &[]));
    assert_eq!(decision, Decision::default());
}

#[test]
fn a_run_whose_record_cannot_be_read_is_deleted() {
    let unreadable =
        ["", r#", "scheduled_at": null"#, r#", "scheduled_at": "soon""#, r#", "scheduled_at": 7"#];
    for fields in unreadable {
        let runs = observed(&format!(r#""runs": [{{"name": "job-0", "run_id": 0{fields}}}]"#));
        check(&daily(), NOON, &runs, "create 0 at 2022-12-12T09:00:00Z held, delete job-0");
        check(&daily(), EARLY, &runs, "delete job-0");
        check("", NOON, &runs, "create 0 at 2022-12-12T12:12:00Z held, delete job-0");
    }
    // No other run gets its name.
    let name = format!("job-{}-0", at("2022-12-12T09:00:00Z").as_second());
    let runs = observed(&format!(r#""runs": [{{"name": "{name}", "run_id": "x"}}]"#));
    check(&daily(), NOON, &runs, &format!("create 1 at 2022-12-12T09:00:00Z held, delete {name}"));
}

#[test]
fn it_wakes_at_the_next_event_in_the_zone() {
    let weekdays = schedule("America/Toronto", "start 09:00 Mon-Fri; stop 17:00 Mon-Fri");
    let later = weekdays.replace(r#""events""#, r#""offset_s": -120, "events""#);
    let now = "2022-04-22T13:01:00Z";
    let none = Observed::default();
    let wake = |fields: &str| decided(&task(fields), now, &none).wake_at;
    check(&weekdays, now, &none, "create 0 at 2022-04-22T13:00:00Z free");
    assert_eq!(wake(&weekdays), Some(at("2022-04-22T21:00:00Z")));
    check(&later, now, &none, "nothing");
    assert_eq!(wake(&later), Some(at("2022-04-22T13:02:00Z")));
    assert_eq!(wake(""), None);
}

#[test]
fn each_step_says_why() {
    let all = runs(&[
        "old-0 11T09:00 state=running",
        "job-0 12T09:00 state=failed",
        "job-1 12T09:00 state=running",
        "job-2 12T09:00 state=running template=other",
    ]);
    let late = daily().replace(r#""events""#, r#""start_deadline_s": 30, "events""#);
    let decisions = [
        decided(&task(&daily()), NOON, &Observed::default()),
        decided(&task(&daily()), NOON, &all),
        decided(&task(&recreate()), NOON, &runs(&["job-2 12T09:00 template=other"])),
        decided(&task(&daily()), NOON, &runs(&["job-0 12T09:00 held"])),
        decided(&task(&daily()), EARLY, &runs(&["job-0 11T19:00"])),
        decided(&task(&late), NOON, &Observed::default()),
        decided(&task(""), NOON, &observed(r#""permit": false, "suspended": false"#)),
        decided(
            &task(&daily()),
            NOON,
            &observed(&format!(r#""suspended": true, "runs": [{}]"#, run("job-0 12T09:00"))),
        ),
    ];
    let mut text = String::new();
    for decision in decisions {
        let Decision { create, delete, release, refused, .. } = decision;
        let created = create.into_iter().map(|new| format!("create {}: {}", new.name, new.reason));
        let deleted = delete.into_iter().map(|run| format!("delete {}: {}", run.name, run.reason));
        let released =
            release.into_iter().map(|run| format!("release {}: {}", run.name, run.reason));
        let late = refused.into_iter().map(|late| format!("refuse: {}", late.reason));
        for line in created.chain(deleted).chain(released).chain(late) {
            writeln!(text, "{line}").unwrap();
        }
        text.push('\n');
    }
    expect_test::expect_file!["reasons.txt"].assert_eq(&text);
}

#[test]
fn what_are_no_runs_is_refused() {
    let table = [
        "",
        "[]",
        r#"{"runs": [{"run_id": 0}]}"#,
        r#"{"suspend": true}"#,
        r#"{"runs": [{"name": "a", "shceduled_at": null}]}"#,
        r#"{"runs": [{"name": "a", "state": "dead"}]}"#,
        r#"{"runs": [{"name": "a", "template": "new"}]}"#,
        r#"{"permit": "yes"}"#,
        r#"{} {}"#,
    ];
    let told: Vec<String> =
        table.iter().map(|text| format!("{}\n", Observed::parse(text).unwrap_err())).collect();
    expect_test::expect_file!["refused_runs.txt"].assert_eq(&told.concat());
}
