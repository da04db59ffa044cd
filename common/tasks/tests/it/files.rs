//! Task files: what they may say, and what is refused.

use expect_test::{expect, expect_file};
use tasks::file::OnTemplateChange;

use crate::{parse, schedule, task};

#[test]
fn a_file_may_say_little_or_all() {
    expect![[r#"
        Task {
            name: "job",
            argv: [
                "/bin/job",
            ],
            user: "root",
            groups: [],
            environment: {},
            working_directory: "/",
            limits: Limits {
                memory_mib: None,
                cpu_percent: None,
                processes: None,
                open_files: None,
            },
            stop_signal: Term,
            stop_timeout_s: 30,
            output: Output {
                to: Log,
                rotate_kib: 10240,
                keep: 3,
            },
            restart: Restart {
                policy: Always,
                backoff_s: [
                    1,
                    60,
                ],
            },
            health: None,
            on_template_change: None,
            exclusive: false,
            schedule: None,
            canonical: "{\"argv\":[\"/bin/job\"],\"name\":\"job\"}",
        }
    "#]]
    .assert_debug_eq(&task(""));
    let all = r#"
        // A collector of logs.
        {"name": "logd", "argv": ["/opt/logd/bin/logd", "--verbose"], "user": "logd",
         "groups": ["adm"], "environment": {"LANG": "C.UTF-8"},
         "working_directory": "/var/lib/logd",
         "limits": {"memory_mib": 512, "cpu_percent": 150, "processes": 100, "open_files": 4096},
         "stop_signal": "INT", "stop_timeout_s": 60,
         "output": {"to": "log", "rotate_kib": 1024, "keep": 0},
         "restart": {"policy": "on-failure", "backoff_s": [2, 120]},
         "health": {"argv": ["/opt/logd/bin/check"], "interval_s": 5, "timeout_s": 3,
                    "min_up_s": 10},
         "on_template_change": "recreate", "exclusive": true,
         "schedule": {"zone": "America/Toronto", "offset_s": -60, "start_deadline_s": 1800,
          "events": [
            {"action": "start", "cron": "0 9 * * MON-FRI"},
            {"action": "stop", "time": "17:00", "days": "MON-FRI"}]}}"#;
    let task = parse(all).unwrap();
    assert_eq!(task.on_template_change(), OnTemplateChange::Recreate);
    let schedule = task.schedule.unwrap();
    assert_eq!((schedule.offset_s, schedule.start_deadline_s), (-60, Some(1_800)));
    assert_eq!(schedule.events[1].cron.to_string(), "17:00 MON-FRI");
}

#[test]
fn a_new_version_replaces_runs_by_default_if_there_are_no_hours() {
    let hours = schedule("UTC", "start 0 9 * * *; stop 0 17 * * *");
    let recreate = r#""on_template_change": "recreate""#;
    let table = [
        (String::new(), OnTemplateChange::Recreate),
        (hours.clone(), OnTemplateChange::Ignore),
        (format!("{recreate}, {hours}"), OnTemplateChange::Recreate),
        (r#""on_template_change": "ignore""#.to_owned(), OnTemplateChange::Ignore),
    ];
    for (fields, expected) in table {
        assert_eq!(task(&fields).on_template_change(), expected, "{fields}");
    }
}

#[test]
fn the_version_is_that_of_the_file_without_its_hours_and_of_its_programs() {
    let hours = schedule("UTC", "start 0 9 * * *; stop 0 17 * * *");
    let later = schedule("UTC", "start 0 10 * * *; stop 0 17 * * *");
    let version = |fields: &str| task(fields).template(&[]);
    assert_eq!(version(&hours), version(&later));
    assert_eq!(version(&hours), version(""));
    let reordered = parse("# c\n{ \"argv\":\n [\"/bin/job\"], \"name\" : \"j\\u006fb\" }").unwrap();
    assert_eq!(reordered.template(&[]), version(""));
    // What is said is part of the version, also if it is the default.
    assert_ne!(version(r#""user": "root""#), version(""));
    let one = model::object::Algorithm::Blake3.digest(b"1");
    let two = model::object::Algorithm::Blake3.digest(b"2");
    let of = |programs: &[_]| task("").template(programs);
    assert_eq!(of(&[one, two]), of(&[two, one]));
    assert_ne!(of(&[one]), of(&[two]));
    assert_ne!(of(&[one]), of(&[]));
    // It is told from machine to machine, so that it must never change.
    expect!["902469b7b25fdb95b69ae1ab2329eadbe3a59a1d6f87d7a60fa95cd2ae5981ce"]
        .assert_eq(&version("").0);
}

#[test]
fn what_is_no_task_file_is_refused() {
    let file = |fields: &str| format!("{{\"name\": \"job\", \"argv\": [\"/bin/job\"],\n{fields}}}");
    let events =
        |events: &str| file(&format!(r#""schedule": {{"zone": "UTC", "events": [{events}]}}"#));
    let hours = |fields: &str| {
        let text = schedule("UTC", "start 0 9 * * *; stop 0 17 * * *");
        file(&text.replace(r#""zone": "UTC""#, fields))
    };
    let stop = r#"{"action": "stop", "cron": "0 17 * * *"}"#;
    #[rustfmt::skip]
    let table = [
        String::new(),
        "[]".to_owned(),
        format!(
            r#"["job", ["/bin/job"], "root", [], {{}}, "/", {{}}, "TERM", 30, {{}}, {{}}, {{}}, "ignore", true, {}]"#,
            schedule("UTC", "").trim_start_matches(r#""schedule": "#)
        ),
        "{}".to_owned(),
        "{\n\"name\": \"a\",,".to_owned(),
        r#"{"name": "a"}"#.to_owned(),
        r#"{"name": "../a", "argv": ["/bin/a"]}"#.to_owned(),
        r#"{"name": "", "argv": ["/bin/a"]}"#.to_owned(),
        format!(r#"{{"name": "{}", "argv": ["/bin/a"]}}"#, "a".repeat(65)),
        r#"{"name": "a", "argv": []}"#.to_owned(),
        r#"{"name": "a", "argv": ["job"]}"#.to_owned(),
        r#"{"name": "a", "argv": ["/bin/a\u0000"]}"#.to_owned(),
        r#"{"name": "a", "name": "b", "argv": ["/bin/a"]}"#.to_owned(),
        format!("{} x", file(r#""exclusive": true"#)),
        file(r#""scheduel": {}"#),
        file(r#""colour": "red""#),
        file(r#""\u001b[2J": 1"#),
        file(r#""user": "a b""#),
        file(r#""groups": ["adm", "-x"]"#),
        file(r#""environment": {"1A": "x"}"#),
        file(r#""environment": {"A=B": "x"}"#),
        file(r#""environment": {"A": "x\u0000"}"#),
        file(r#""working_directory": "var""#),
        file(r#""limits": {"memory_mb": 5}"#),
        file(r#""limits": {"memory_mib": 0}"#),
        file(r#""limits": {"cpu_percent": -1}"#),
        file(r#""limits": {"processes": 99999999999}"#),
        file(r#""stop_signal": "SIGTERM""#),
        file(r#""stop_timeout_s": 0"#),
        file(r#""stop_timeout_s": "30""#),
        file(r#""output": {"keep": 101}"#),
        file(r#""restart": {"policy": "sometimes"}"#),
        file(r#""restart": {"backoff_s": [60, 1]}"#),
        file(r#""restart": {"backoff_s": [1]}"#),
        file(r#""health": {"argv": ["check"]}"#),
        file(r#""health": {"interval": 5}"#),
        file(r#""on_template_change": "restart""#),
        file(r#""schedule": null"#),
        file(r#""schedule": {"zone": "UTC"}"#),
        hours(r#""zone": "America/Atlantis""#),
        hours(r#""zone": "Etc/Unknown""#),
        hours(r#""zone": "../../etc/passwd""#),
        hours(r#""zone": """#),
        hours(r#""zone": "UTC", "offset_s": 9999999"#),
        hours(r#""zone": "UTC", "start_deadline_s": 0"#),
        hours(r#""zome": "UTC""#),
        events(r#"{"action": "start", "cron": "0 9 * * *"}"#),
        events(
            r#"{"action": "start", "cron": "0 9 * * *"}, {"action": "stop", "cron": "0 9 30 2 *"}"#,
        ),
        events(&format!(r#"{stop}, {{"action": "start", "cron": "60 9 * * *"}}"#)),
        events(&format!(r#"{stop}, {{"action": "start", "cron": "0 0 9 * * *"}}"#)),
        events(&format!(r#"{stop}, {{"action": "start", "time": "25:00", "days": "MON"}}"#)),
        events(&format!(r#"{stop}, {{"action": "start", "time": "09:00", "days": "FRI-MON"}}"#)),
        events(&format!(r#"{stop}, {{"action": "start", "time": "09:00"}}"#)),
        events(&format!(r#"{stop}, {{"action": "start", "days": "MON"}}"#)),
        events(&format!(r#"{stop}, {{"action": "start"}}"#)),
        events(&format!(r#"{stop}, {{"action": "restart", "cron": "0 9 * * *"}}"#)),
        events(&vec![stop; 65].join(",")),
        " ".repeat(70_000),
    ];
    let told: Vec<String> =
        table.iter().map(|text| format!("{}\n", parse(text).unwrap_err())).collect();
    expect_file!["refused_files.txt"].assert_eq(&told.concat());
}
