//! What an image says of tasks, and which of them an update stops.

use expect_test::expect_file;
use jiff::tz::TimeZoneDatabase;
use model::object::{Algorithm, ObjectId};
use model::path::TreePath;
use model::tree::Tree;
use model::tree::text::from_text;
use model::trigger::Triggers;
use tasks::image::{Definition, ImageTaskError, ImageTasks, pairs, stopped_by_update};
use tasks::planned::{PlannedTask, planned_tasks};

/// A tree with these entries: their kind and path, and `=NAME` for the content of a file.
fn tree(entries: &[&str]) -> Tree {
    let line = |entry: &&str| match entry.split_once(' ').unwrap() {
        ("d", path) => format!("d 755 0:0 {path}\n"),
        ("f", file) => {
            let (path, content) = file.split_once('=').unwrap_or((file, ""));
            format!("f 644 0:0 0.000000000 9 {} {path}\n", object(content))
        }
        ("big", path) => format!("f 644 0:0 0.000000000 65537 {} {path}\n", object("")),
        ("g", path) => format!("g 644 0:0 files:6972 {path}\n"),
        ("l", path) => format!("l 0:0 {path} -> /x\n"),
        (kind, _) => panic!("{kind}"),
    };
    let text: String = entries.iter().map(line).collect();
    from_text(Algorithm::Blake3, &text).unwrap()
}

fn object(content: &str) -> ObjectId {
    Algorithm::Blake3.digest(content.as_bytes())
}

fn trigger(name: &str, lines: &str, more: &str) -> String {
    format!(r#"{{"MatchLines": [{lines}], "Service": "{name}", "Kind": "task"{more}}}"#)
}

fn triggers(all: &[String]) -> Triggers {
    Triggers::from_json(&format!("[{}]", all.join(","))).unwrap()
}

const DIRECTORIES: [&str; 3] = ["d /etc", "d /etc/dominator", "d /etc/dominator/tasks.d"];

/// The lines of a trigger that matches a task file and a program.
const LINES: &str = r#""/etc/dominator/tasks.d/a.json", "/opt/a.*""#;

#[test]
fn each_trigger_has_its_file_and_each_file_its_trigger() {
    let a = "f /etc/dominator/tasks.d/a.json";
    let plain = trigger("a", LINES, "");
    let alone = std::slice::from_ref(&plain);
    let table: &[(&[String], &[&str])] = &[
        (alone, &[a]),
        (&[], &[]),
        // What is not named as a task file is none.
        (&[], &["f /etc/dominator/tasks.d/README", "d /etc/dominator/tasks.d/old"]),
        (alone, &[]),
        (&[], &[a]),
        (alone, &["g /etc/dominator/tasks.d/a.json"]),
        (alone, &["l /etc/dominator/tasks.d/a.json"]),
        (alone, &["d /etc/dominator/tasks.d/a.json"]),
        (alone, &["big /etc/dominator/tasks.d/a.json"]),
        (&[trigger("a", r#""/opt/a""#, "")], &[a]),
        (&[plain.clone(), plain.clone()], &[a]),
        (&[trigger("a", LINES, r#", "DoReload": true"#)], &[a]),
        (&[trigger("a", LINES, r#", "DoReboot": true"#)], &[a]),
        // A service of that name does not run it.
        (&[plain.replace("\"task\"", "\"service\"")], &[a]),
    ];
    let mut said = String::new();
    for (all, files) in table {
        let entries: Vec<&str> = DIRECTORIES.iter().chain(*files).copied().collect();
        let (found, errors) = pairs(&triggers(all), &tree(&entries));
        let names: Vec<String> = found.into_iter().map(|pair| pair.name).collect();
        let errors: Vec<String> = errors.iter().map(ImageTaskError::to_string).collect();
        said += &format!("{}: {}.\n", names.join(" "), errors.join("; "));
    }
    expect_file!["refused_images.txt"].assert_eq(&said);
}

#[test]
fn the_programs_of_a_task_are_what_its_trigger_matches() {
    let entries = [
        "f /etc/dominator/tasks.d/a.json=file",
        "d /opt",
        "d /opt/a",
        "f /opt/a/bin=one",
        "f /opt/a/copy=one",
        "f /opt/a/lib=two",
        "f /opt/b=three",
    ];
    let entries: Vec<&str> = DIRECTORIES.iter().chain(&entries).copied().collect();
    let (found, errors) = pairs(&triggers(&[trigger("a", LINES, "")]), &tree(&entries));
    assert_eq!(errors, []);
    let mut programs = vec![object("one"), object("two")];
    programs.sort_unstable();
    assert_eq!((found[0].file, &found[0].programs), (object("file"), &programs));

    let zones = TimeZoneDatabase::none();
    let read = |text: &[u8]| {
        let read = found[0].task(text, &zones).map(|task| task.name);
        read.map_err(|error| model::display::error_chain(&error))
    };
    assert_eq!(read(br#"{"name": "a", "argv": ["/opt/a/bin"]}"#), Ok("a".to_owned()));
    let path = "/etc/dominator/tasks.d/a.json";
    let other = read(br#"{"name": "b", "argv": ["/opt/a/bin"]}"#).unwrap_err();
    assert_eq!(other, format!("{path} has the name `b`: that of a task is the name of its file"));
    assert_eq!(read(b"\xff").unwrap_err(), format!("{path} is not text"));
    let missing = read(b"{\"name\": \"a\"\n}").unwrap_err();
    assert_eq!(missing, format!("{path}: file: missing field `argv` at line 2 column 1"));
}

const FILE: &str = "/etc/dominator/tasks.d/a.json";

const PROGRAM: &str = "/opt/a";

fn definition(fields: &str, program: &str) -> Definition {
    let text = format!(r#"{{"name": "a", "argv": ["/opt/a"]{fields}}}"#);
    Definition { text, programs: vec![object(program)] }
}

fn tasks(definition: Option<Definition>) -> ImageTasks {
    ImageTasks(definition.map(|one| ("a".to_owned(), one)).into_iter().collect())
}

/// The task before and after an update, the paths that change, and whether it is stopped.
type UpdateRow<'a> = (Option<Definition>, Option<Definition>, &'a [&'a str], bool);

#[test]
fn an_update_stops_what_it_drops_or_changes_and_nothing_else() {
    let hours = r#", "schedule": {"zone": "UTC", "events": [
        {"action": "start", "cron": "0 9 * * *"}, {"action": "stop", "cron": "0 17 * * *"}]}"#;
    let ignore = r#", "on_template_change": "ignore""#;
    let recreate = format!(r#"{hours}, "on_template_change": "recreate""#);
    let user = r#", "user": "nobody""#;
    let same = || Some(definition("", "1"));
    let table: Vec<UpdateRow<'_>> = vec![
        (same(), same(), &["/etc/other"], false),
        // A file that somebody edited is repaired, and says nothing new.
        (same(), same(), &[FILE], false),
        // A program that somebody edited may run.
        (same(), same(), &[PROGRAM], true),
        (same(), None, &[], true),
        (None, same(), &[FILE, PROGRAM], false),
        (same(), Some(definition("", "2")), &[PROGRAM], true),
        (same(), Some(definition(user, "1")), &[FILE], true),
        (same(), Some(definition(ignore, "2")), &[FILE, PROGRAM], false),
        // Other hours are no other version, and with hours the default is to go on.
        (
            Some(definition(&recreate, "1")),
            Some(definition(&recreate.replace("9", "8"), "1")),
            &[FILE],
            false,
        ),
        (Some(definition(hours, "1")), Some(definition(hours, "2")), &[PROGRAM], false),
        (Some(definition(&recreate, "1")), Some(definition(&recreate, "2")), &[PROGRAM], true),
        // What cannot be read is not left to itself.
        (Some(definition("x", "1")), same(), &[], true),
    ];
    let old = triggers(&[trigger("a", LINES, "")]);
    for (number, (before, after, changed, stops)) in table.into_iter().enumerate() {
        let changed: Vec<TreePath> = changed.iter().map(|path| path.parse().unwrap()).collect();
        let new = if after.is_some() { old.clone() } else { Triggers::default() };
        let zones = TimeZoneDatabase::none();
        let (before, after) = (tasks(before), tasks(after));
        let stopped = stopped_by_update(&before, &after, [&old, &new], &changed, &zones);
        assert_eq!(!stopped.is_empty(), stops, "row {number}");
    }
}

#[test]
fn a_plan_tells_which_tasks_an_update_starts_and_stops() {
    let a = || triggers(&[trigger("a", LINES, "")]);
    let b = triggers(&[trigger("b", r#""/etc/dominator/tasks.d/b.json""#, "")]);
    let service = Triggers::from_json(r#"[{"MatchLines": ["/opt/a"], "Service": "a"}]"#).unwrap();
    let (file, program) = ("/etc/dominator/tasks.d/a.json", "/opt/a/bin");
    let (start, stop, restart) = (PlannedTask::Start, PlannedTask::Stop, PlannedTask::Restart);
    // Before, after, what changes, whether the image stays; and the effects.
    type Row<'a> = (Triggers, Triggers, &'a [&'a str], bool, &'a [(&'a str, PlannedTask)]);
    let table: [Row<'_>; 9] = [
        (a(), a(), &["/etc/motd"], false, &[]),
        (a(), a(), &[file], false, &[("a", restart)]),
        (a(), a(), &[program], false, &[("a", restart)]),
        (a(), a(), &[program], true, &[("a", restart)]),
        // An edited task file is repaired, and its task goes on.
        (a(), a(), &[file], true, &[]),
        (a(), b, &[], false, &[("a", stop), ("b", start)]),
        (service.clone(), service.clone(), &[program], false, &[]),
        (service.clone(), a(), &[], false, &[("a", start)]),
        (a(), service, &[], false, &[("a", stop)]),
    ];
    for (number, (old, new, changed, is_repair, expected)) in table.into_iter().enumerate() {
        let changed: Vec<TreePath> = changed.iter().map(|path| path.parse().unwrap()).collect();
        let got = planned_tasks(&old, &new, changed.iter(), is_repair);
        let expected = expected.iter().map(|(name, effect)| ((*name).to_owned(), *effect));
        assert_eq!(got, expected.collect(), "row {number}");
    }
}
