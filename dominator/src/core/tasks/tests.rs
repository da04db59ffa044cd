//! Troubles of tasks, counts and explanations.

use api::subd::PermitReport;
use model::boot_time::BootTime;
use model::task_order::TaskOrder;

use super::*;

fn at(seconds: u64) -> Now {
    let wall = Time { seconds: i64::try_from(seconds).unwrap(), nanoseconds: 0 };
    Now { elapsed: Duration::from_secs(seconds), wall }
}

fn task(name: &str, state: TaskState) -> TaskReport {
    TaskReport {
        name: name.to_owned(),
        state,
        detail: "the task is wanted always".to_owned(),
        run: None,
        started: None,
        starts: 0,
        last_end: None,
        health: None,
        next_at: None,
        again_at: None,
        permit: None,
        order_number: 0,
        not_restarted: None,
    }
}

/// Follows a task through states at some seconds. Returns the events with their seconds, and
/// whether an alarm is raised at the end.
fn follow(states: &[(u64, TaskState)], until: u64) -> (Vec<(u64, String)>, bool) {
    let mut troubles = Troubles::default();
    let mut events = Vec::new();
    for second in 0..=until {
        let told = match states.iter().find(|(at, _)| *at == second) {
            Some((_, state)) => troubles.take(&[task("logd", *state)], None, at(second)),
            None if troubles.next().is_some_and(|due| due.as_secs() <= second) => {
                troubles.look(at(second))
            }
            None => Vec::new(),
        };
        events.extend(told.into_iter().map(|event| (second, event.name)));
    }
    (events, troubles.raised().next().is_some())
}

#[test]
fn operators_are_told_of_trouble_that_lasts_and_of_its_end() {
    use TaskState::{Failed, Held, Idle, Running, Starting, Unhealthy, Waiting};
    type Told<'a> = (&'a [(u64, &'a str)], bool);
    let table: [(&[(u64, TaskState)], Told<'_>); 8] = [
        (&[(0, Starting), (1, Running), (9, Idle)], (&[], false)),
        // It is over before anybody is told.
        (&[(0, Unhealthy), (59, Running)], (&[], false)),
        (
            &[(0, Unhealthy), (80, Running)],
            (&[(60, "task-unhealthy"), (140, "task-running")], false),
        ),
        (&[(5, Failed)], (&[(5, "task-failed")], true)),
        // It dies again and again.
        (
            &[
                (0, Waiting),
                (1, Starting),
                (2, Running),
                (3, Waiting),
                (40, Running),
                (70, Waiting),
            ],
            (&[(70, "task-back-off")], true),
        ),
        (
            &[(0, Waiting), (70, Running), (90, Held)],
            (&[(60, "task-back-off"), (90, "task-held")], false),
        ),
        (&[(0, Unhealthy), (30, Running), (50, Unhealthy)], (&[(60, "task-unhealthy")], true)),
        (
            &[(0, Waiting), (61, Failed), (70, Running)],
            (&[(60, "task-back-off"), (61, "task-failed"), (130, "task-running")], false),
        ),
    ];
    for (states, (events, is_raised)) in table {
        let events: Vec<(u64, String)> =
            events.iter().map(|(second, name)| (*second, (*name).to_owned())).collect();
        assert_eq!(follow(states, 200), (events, is_raised), "{states:?}");
    }
}

#[test]
fn trouble_says_what_is_known_of_it() {
    let mut troubles = Troubles::default();
    let last_end = Some("exited with 3 at 2026-11-26T12:00:00Z".to_owned());
    let health = Some(Health::Failed("port 80 is closed\n".to_owned()));
    let tasks = [
        TaskReport { last_end, ..task("dies", TaskState::Failed) },
        TaskReport { health, ..task("ill", TaskState::Unhealthy) },
        TaskReport { detail: "no cgroup".to_owned(), ..task("odd", TaskState::Refused) },
        task("well", TaskState::Running),
    ];
    let events = troubles.take(&tasks, None, at(7));
    let event = |name: &str, text: &str| TaskEvent { name: name.to_owned(), text: text.to_owned() };
    let died = "dies: failed: it exited with 3 at 2026-11-26T12:00:00Z";
    assert_eq!(
        events,
        [event("task-failed", died), event("task-failed", "odd: refused: no cgroup")]
    );
    assert_eq!(troubles.next(), Some(Duration::from_secs(67)));
    let ill = "ill: unhealthy: port 80 is closed";
    assert_eq!(troubles.look(at(67)), [event("task-unhealthy", ill)]);
    let raised: Vec<(&str, &str)> =
        troubles.raised().map(|trouble| (&*trouble.name, trouble.kind.name())).collect();
    assert_eq!(
        raised,
        [("dies", "task-failed"), ("ill", "task-unhealthy"), ("odd", "task-failed")]
    );
    // The image has them no more.
    assert_eq!(troubles.take(&[], None, at(70)), []);
    assert_eq!(troubles, Troubles::default());
}

#[test]
fn an_image_that_is_ill_for_a_while_is_told_too() {
    let mut troubles = Troubles::default();
    let image = ImageName::new("logd").unwrap();
    let failed = Health::Failed("exit status: 7\n".to_owned());
    let tasks = [task("logd", TaskState::Running)];
    let mut take = |health: &Health, second| {
        let events = troubles.take(&tasks, Some((&image, health)), at(second));
        let events = events.into_iter().map(|event| (event.name, event.text)).collect::<Vec<_>>();
        (events, troubles.raised().map(|trouble| trouble.about("web1")).collect::<Vec<_>>())
    };
    let event = |name: &str, text: &str| vec![(name.to_owned(), text.to_owned())];
    assert_eq!(take(&failed, 10), (vec![], vec![]));
    let ill = event("image-unhealthy", "logd: exit status: 7");
    assert_eq!(take(&failed, 70), (ill, vec!["web1".to_owned()]));
    assert_eq!(take(&Health::Passed, 130), (vec![], vec!["web1".to_owned()]));
    let over = event("image-healthy", "logd: it was image-unhealthy since 1970-01-01T00:00:10Z");
    assert_eq!(take(&Health::Passed, 190), (over, vec![]));
}

#[test]
fn counts_begin_with_what_is_usual() {
    let counts: TaskCounts = [
        (TaskState::Held, 4),
        (TaskState::Starting, 3),
        (TaskState::Unhealthy, 1),
        (TaskState::Running, 2),
    ]
    .into();
    assert_eq!(counts_text(&counts), "2 active, 3 launching, 4 held, 1 unhealthy");
    assert_eq!(counts_text(&TaskCounts::default()), "");
}

#[test]
fn an_explanation_says_why_and_when() {
    let time = |seconds| Some(Time { seconds, nanoseconds: 0 });
    let explained = |report: &TaskReport| {
        let now = Time { seconds: 1_000, nanoseconds: 0 };
        let (wanted, refused, away, seen) = (&[][..], None, None, None);
        explain(&Known { hostname: "web1", report, wanted, refused, away, seen, now })
    };
    let report =
        |state, detail: &str| TaskReport { detail: detail.to_owned(), ..task("logd", state) };
    let waiting = TaskReport {
        again_at: time(1_016),
        last_end: Some("exited with 3 at 1970-01-01T00:16:30Z".to_owned()),
        ..report(TaskState::Waiting, "logd-1-0 is starting")
    };
    let running = TaskReport {
        started: time(700),
        starts: 2,
        next_at: time(2_000),
        health: Some(Health::Passed),
        ..report(TaskState::Running, "logd-1-0 is running")
    };
    let permit = PermitReport { number: 1, until: None, is_wanted: true, is_live: false };
    let without = TaskReport {
        permit: Some(permit.clone()),
        ..report(TaskState::Held, "logd-1-0 waits for the permit of this machine")
    };
    let until = Some(BootTime::default());
    let held = TaskReport {
        permit: Some(PermitReport { until, ..permit }),
        ..report(TaskState::Held, "held: disk swap")
    };
    let table: [(TaskReport, &[&str]); 7] = [
        (
            waiting,
            &[
                "logd on web1 is waiting: logd-1-0 is starting",
                "before, it exited with 3 at 1970-01-01T00:16:30Z",
                "it is started again at 1970-01-01T00:16:56Z; to start it now: domtool task \
                 restart web1 logd",
            ],
        ),
        (
            running,
            &[
                "logd on web1 is running: logd-1-0 is running",
                "its program was started 5 min ago, 1970-01-01T00:11:40Z; 2 starts of the run",
                "its health command passes",
                "the next event of its schedule is at 1970-01-01T00:33:20Z",
            ],
        ),
        (
            without,
            &[
                "logd on web1 is held: logd-1-0 waits for the permit of this machine",
                "it runs when this machine has the permit, which one machine has at a time",
            ],
        ),
        (
            held,
            &[
                "logd on web1 is held: disk swap",
                "it runs again after: domtool task release web1 logd",
            ],
        ),
        (
            report(TaskState::Idle, "the task is outside of its hours"),
            &[
                "logd on web1 is idle: the task is outside of its hours",
                "its schedule starts it never; to run it now: domtool task start web1 logd",
            ],
        ),
        (
            report(TaskState::NotRestarted, "logd-1-0 was killed, and is not started again: why"),
            &[
                "logd on web1 is not-restarted: logd-1-0 was killed, and is not started again: why",
                "it is started again when its environment is active; to start it now: domtool task \
                 restart web1 logd",
            ],
        ),
        (
            report(TaskState::Failed, "logd-1-0 has failed"),
            &[
                "logd on web1 is failed: logd-1-0 has failed",
                "it is not started again by itself before its next version; to run it now: \
                 domtool task restart web1 logd",
            ],
        ),
    ];
    for (report, expected) in table {
        assert_eq!(explained(&report), expected);
    }
    let order = WantedTaskOrder {
        task: "logd".to_owned(),
        order: TaskOrder::Hold,
        why: "disk swap".to_owned(),
        who: "ann".to_owned(),
        since: Time { seconds: 940, nanoseconds: 0 },
        number: 4,
    };
    let known = Known {
        hostname: "web1",
        report: &report(TaskState::Starting, "logd-1-0 is starting"),
        wanted: &[order],
        refused: Some("the machine refused to start it: no"),
        away: Some("connection refused"),
        seen: time(880),
        now: Time { seconds: 1_000, nanoseconds: 0 },
    };
    let expected = [
        "logd on web1 is starting: logd-1-0 is starting",
        "that is what the machine has said last, 2 min ago; now: connection refused",
        "it is started at once",
        "the machine has not taken the order to hold it, given by ann 60 s ago: disk swap",
        "the machine refused to start it: no",
    ];
    assert_eq!(explain(&known), expected);
}
