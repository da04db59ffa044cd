//! Whether a task runs, and whether that is expected.

use tasks::condition;

use crate::{at, observed, present, schedule, task};

/// The condition in one line.
fn told(fields: &str, now: &str, seen: &str) -> String {
    let task = task(fields);
    let condition = condition(&task, &present(), &task.moment(at(now)), &observed(seen));
    let running = if condition.running { "running" } else { "not running" };
    let expected = if condition.expected { "expected" } else { "unexpected" };
    let since = condition.since.map_or("-".to_owned(), |since| since.to_string());
    format!("{running}, {expected} since {since}: {}", condition.reason)
}

#[test]
fn a_task_runs_or_not_and_that_is_expected_or_not() {
    let daily = schedule("UTC", "start 0 9 * * *; stop 0 17 * * *");
    let exclusive = format!(r#""exclusive": true, {daily}"#);
    let (early, noon) = ("2022-12-12T08:30:00Z", "2022-12-12T12:00:00Z");
    let run = |fields: &str| format!(r#""runs": [{{"name": "job-0", "run_id": 0, {fields}}}]"#);
    let bare = |state: &str| run(&format!(r#""state": "{state}""#));
    let due = |fields: &str| run(&format!(r#""scheduled_at": "2022-12-12T07:00:00Z", {fields}"#));
    #[rustfmt::skip]
    let table = [
        // No run, and one in each state, outside and inside of the hours.
        (&daily, early, String::new(), "not running, expected since 2022-12-11T17:00:00Z: the task is outside of its hours"),
        (&daily, noon, String::new(), "not running, unexpected since 2022-12-12T09:00:00Z: the task is in its hours, and no run is there"),
        (&daily, early, bare("starting"), "running, unexpected since 2022-12-11T17:00:00Z: job-0 is starting; the task is outside of its hours"),
        (&daily, noon, bare("starting"), "running, expected since -: job-0 is starting; the task is in its hours"),
        (&daily, early, bare("running"), "running, unexpected since 2022-12-11T17:00:00Z: job-0 is running; the task is outside of its hours"),
        (&daily, noon, bare("running"), "running, expected since -: job-0 is running; the task is in its hours"),
        (&daily, early, bare("succeeded"), "running, unexpected since 2022-12-11T17:00:00Z: job-0 has succeeded; the task is outside of its hours"),
        (&daily, noon, bare("succeeded"), "running, expected since -: job-0 has succeeded; the task is in its hours"),
        (&daily, early, bare("failed"), "not running, expected since 2022-12-11T17:00:00Z: the task is outside of its hours"),
        (&daily, noon, bare("failed"), "not running, unexpected since 2022-12-12T09:00:00Z: job-0 has failed"),
        // Operators.
        (&daily, early, due(r#""manual": true, "state": "running""#), "running, expected since 2022-12-12T07:00:00Z: job-0 is running; the task is started by an operator"),
        (&daily, early, due(r#""manual": true, "state": "failed""#), "not running, unexpected since 2022-12-12T07:00:00Z: job-0 has failed"),
        (&daily, "2022-12-12T18:00:00Z", due(r#""manual": true, "state": "running""#), "running, unexpected since 2022-12-12T17:00:00Z: job-0 is running; the task is outside of its hours"),
        (&daily, noon, due(r#""held_by": "alice", "held": true"#), "not running, expected since 2022-12-12T09:00:00Z: job-0 is held by alice"),
        (&daily, noon, r#""suspended": true"#.to_owned(), "not running, expected since 2022-12-11T17:00:00Z: the task is suspended"),
        (&daily, noon, due(r#""state": "running""#).replace(r#""runs""#, r#""suspended": true, "runs""#), "running, unexpected since 2022-12-12T07:00:00Z: job-0 is running; the task is suspended"),
        // Held runs wait.
        (&daily, noon, due(r#""held": true"#), "not running, unexpected since 2022-12-12T09:00:00Z: job-0 waits until no other run can be live"),
        (&exclusive, noon, due(r#""held": true"#), "not running, expected since 2022-12-12T09:00:00Z: job-0 waits for the permit of this machine"),
        // Always.
        (&String::new(), noon, due(r#""state": "running""#), "running, expected since 2022-12-12T07:00:00Z: job-0 is running; the task is wanted always"),
        (&String::new(), noon, String::new(), "not running, unexpected since -: the task is wanted always, and no run is there"),
        (&String::new(), noon, due(r#""state": "gone""#), "not running, unexpected since -: the task is wanted always, and no run is there"),
    ];
    for (fields, now, seen, expected) in table {
        assert_eq!(told(fields, now, &seen), expected, "{fields} at {now}: {seen}");
    }
}
