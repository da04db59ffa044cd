//! Who is stopped and started, in tables.

use super::*;

/// Triggers from words like `ssh`, `ssh:reload`, `db:reboot`, `db:high` or `db:sort=9`; each fires
/// on `/SERVICE`, or on `/never` if the word ends in `-`.
fn triggers(words: &str) -> Triggers {
    let trigger = |word: &str| {
        let (word, fires) = word.strip_suffix('-').map_or((word, true), |word| (word, false));
        let (service, flag) = word.split_once(':').unwrap_or((word, ""));
        let line = if fires { format!("/{service}$") } else { "/never$".to_owned() };
        format!(
            r#"{{"MatchLines": ["{line}"], "Service": "{service}", "SortName": "{}",
            "DoReload": {}, "DoReboot": {}, "HighImpact": {}}}"#,
            flag.strip_prefix("sort=").unwrap_or(""),
            flag == "reload",
            flag == "reboot",
            flag == "high",
        )
    };
    let all: Vec<String> = words.split_whitespace().map(trigger).collect();
    Triggers::from_json(&format!("[{}]", all.join(","))).unwrap()
}

fn calls_of(old: &str, new: &str) -> ServiceCalls {
    let paths = ["/a", "/b", "/s9", "/s10", "/subd", "/reboot"].map(|path| path.parse().unwrap());
    service_calls(&triggers(old), &triggers(new), paths.iter(), "subd")
}

/// The calls as words: `-a` stop, `?a` stop if it is there, `+a` start, `~a` reload.
fn words(calls: &[ServiceCall]) -> String {
    let mark = |call: &ServiceCall| match (call.verb, call.may_fail) {
        (ServiceVerb::Stop, true) => "?",
        (ServiceVerb::Stop, false) => "-",
        (ServiceVerb::Start, _) => "+",
        (ServiceVerb::Reload, _) => "~",
        (ServiceVerb::Restart, _) => "*",
        (ServiceVerb::Reboot, _) => "!",
    };
    let word = |call: &ServiceCall| format!("{}{}", mark(call), call.service);
    calls.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// As [`words`], with what comes last: `*` restarts subd, `!` reboots, `^` is of high impact.
fn after(calls: &ServiceCalls) -> String {
    let mut text = words(&calls.after);
    for (is, mark) in [(calls.own, " *"), (calls.reboot, " !"), (calls.high_impact, " ^")] {
        if is {
            text.push_str(mark);
        }
    }
    text.trim_start().to_owned()
}

#[test]
fn decides_who_is_stopped_and_started() {
    #[rustfmt::skip]
    let table = [
        // name                       old              new               before      after
        ("same on both sides",        "b a",           "b a",            "-a -b",    "+a +b"),
        ("no triggers",               "",              "",               "",         ""),
        ("only the new image has it", "",              "a",              "?a",       "+a"),
        ("only the old image has it", "a",             "",               "-a",       ""),
        ("the new one does not fire", "a",             "a-",             "-a",       "+a"),
        ("the old one does not fire", "a-",            "a",              "-a",       "+a"),
        ("reload",                    "a:reload",      "a:reload",       "",         "~a"),
        ("reload, new",               "",              "a:reload",       "",         "~a"),
        ("reload of the old image",   "a:reload",      "",               "",         ""),
        ("reload becomes restart",    "a:reload",      "a",              "-a",       "+a"),
        ("restart becomes reload",    "a",             "a:reload",       "-a",       "+a"),
        ("reload and restart",        "a:reload a",    "a:reload a",     "-a",       "+a"),
        ("only reload fires",         "a:reload a-",   "a:reload a-",    "",         "~a"),
        ("a reboot starts it again",  "a reboot",      "a reboot",       "-a",       "! ^"),
        ("reboot, only the new image has it", "",      "a reboot",       "",         "! ^"),
        ("reboot, reload",            "a:reload",      "a:reload reboot", "",        "! ^"),
        ("reboot of the old image",   "a reboot",      "a",              "-a",       "+a"),
        ("started before the reboot", "a b",           "a b:reboot",     "-a -b",    "+b ! ^"),
        ("reboot that does not fire", "a",             "a reboot-",      "-a",       "+a"),
        ("numbers sort as such",      "s10 s9",        "s10 s9",         "-s9 -s10", "+s9 +s10"),
        ("sort names, also for stop", "a:sort=x10 b:sort=x9", "a:sort=x10 b:sort=x9",
                                                                         "-b -a",    "+b +a"),
        ("the new sort name counts",  "a:sort=1 b:sort=2", "a:sort=2 b:sort=1",
                                                                         "-b -a",    "+b +a"),
        ("the old sort name counts",  "a:sort=z b",    "b",              "-b -a",    "+b"),
        ("high impact",               "a",             "a:high",         "-a",       "+a ^"),
        ("high impact of the old",    "a:high",        "a",              "-a",       "+a ^"),
        ("high impact does not fire", "a",             "a a:high-",      "-a",       "+a"),
        ("subd is never stopped",     "subd a",        "subd a",         "-a",       "+a *"),
        ("subd by its unit's name",   "",              "subd",           "",         "*"),
        ("subd with a reboot",        "subd",          "subd reboot",    "",         "! ^"),
        ("subd that asks for reboot", "",              "subd:reboot",    "",         "! ^"),
    ];
    for (name, old, new, before, expected) in table {
        let calls = calls_of(old, new);
        assert_eq!((&*words(&calls.before), &*after(&calls)), (before, expected), "{name}");
    }
    let unit = triggers("subd");
    let paths = ["/subd".parse().unwrap()];
    assert!(service_calls(&unit, &unit, paths.iter(), "subd.service").own);
    assert_eq!(words(&service_calls(&unit, &unit, paths.iter(), "agent").before), "-subd");
}

#[test]
fn knows_the_way_back() {
    #[rustfmt::skip]
    let table = [
        // name                     old         new          before    after
        ("restart",                 "a",        "a",         "-a",     "+a"),
        ("reload",                  "a:reload", "a:reload",  "",       "~a"),
        ("only the new one has it", "",         "a",         "-a",     "+a"),
        ("only the old one has it", "a",        "",          "",       "+a"),
        ("subd itself",             "subd",     "subd",      "",       "*"),
        ("reboot",                  "a reboot", "a reboot",  "-a",     "+a ! ^"),
        ("high impact",             "a:high",   "a:high",    "-a",     "+a ^"),
    ];
    for (name, old, new, before, expected) in table {
        let undo = calls_of(old, new).undo();
        assert_eq!((&*words(&undo.before), &*after(&undo)), (before, expected), "{name}");
    }
}

#[test]
fn knows_how_to_run_again_what_failed() {
    #[rustfmt::skip]
    let table = [
        // name                            failed                  before    after
        ("start",                          "a.start b.start",      "",       "+a +b"),
        ("reload",                         "a.reload",             "",       "~a"),
        ("stop",                           "a.stop",               "-a",     "+a"),
        ("stop and start",                 "a.stop a.start",       "-a",     "+a"),
        ("stop, the image has it no more", "b.stop",               "-b",     ""),
        ("subd itself",                    "subd.restart a.start", "",       "+a *"),
        ("reboot",                         "reboot.reboot",        "",       "!"),
        ("a verb of a later release",      "a.dance",              "",       ""),
    ];
    for (name, failed, before, expected) in table {
        let failed = || failed.split(' ').map(|word| word.split_once('.').unwrap());
        let calls = retry_calls(failed(), &triggers("a"), true);
        assert_eq!((&*words(&calls.before), &*after(&calls)), (before, expected), "{name}");
        assert!(!retry_calls(failed(), &triggers("a"), false).reboot);
    }
}

#[test]
fn knows_what_a_reboot_would_have_started() {
    let calls = calls_of("a b s9", "a b:reboot reboot");
    assert_eq!((&*words(&calls.before), &*after(&calls)), ("-a -b -s9", "+b ! ^"));
    // The new image does not name s9 any more, and b is started already.
    assert_eq!(words(&calls.instead_of_reboot(&triggers("a b:reboot reboot"))), "+a");
}

#[test]
fn a_task_is_no_service_even_if_it_has_the_name_of_one() {
    let task = |words: &str| {
        let mut tasks = triggers(words);
        tasks.0.iter_mut().for_each(|trigger| trigger.kind = Kind::Task);
        tasks
    };
    let path: TreePath = "/a".parse().unwrap();
    let with = |tasks: &Triggers, services: &str| {
        let all = Triggers([&tasks.0[..], &triggers(services).0[..]].concat());
        let calls = service_calls(&all, &all, std::iter::once(&path), "subd");
        (words(&calls.before), after(&calls))
    };
    let told = |before: &str, after: &str| (before.to_owned(), after.to_owned());
    assert_eq!(with(&task("a"), "b"), told("", ""));
    assert_eq!(with(&task("a"), "a"), told("-a", "+a"));
    assert_eq!(with(&task("a:high"), ""), told("", "^"));
    let path: TreePath = "/reboot".parse().unwrap();
    let all = task("reboot");
    let calls = service_calls(&all, &all, std::iter::once(&path), "subd");
    assert_eq!(calls, ServiceCalls::default());
}
