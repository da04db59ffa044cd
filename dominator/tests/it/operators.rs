//! What operators meet on the command line: one way to say why, hints, news as they come.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};

use api::dominator::Status;
use api::dominator::events::{EventDetails, HistoryEvent};

use crate::fake::{FakeSub, file, tree};
use crate::stage::{PATIENCE, Stage};

fn exit_and_stderr(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8(output.stderr.clone()).unwrap())
}

/// The orders about machines that are asked for: verb, about and why of each.
async fn audit(stage: &Stage, words: &[&str]) -> Vec<[String; 3]> {
    let words = [&["audit", "--format", "json"], words].concat();
    let output = stage.domtool(&words).await;
    let complaints = exit_and_stderr(&output).1;
    let events: Vec<HistoryEvent> = serde_json::from_slice(&output.stdout).expect(&complaints);
    let order = |event: HistoryEvent| match event.what {
        EventDetails::Order { verb, why, .. } => [verb, event.about, why],
        other => panic!("{other:?}"),
    };
    events.into_iter().map(order).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_takes_its_reason_in_the_same_way_and_is_found_by_its_machines() {
    let stage = Stage::new("[{\"Hostname\": \"web1\"}, {\"Hostname\": \"db1\"}]").await;
    stage.wait("web1", Status::Unreachable, "").await;
    #[rustfmt::skip]
    let orders = [
        &["disable-updates", "--why", "a"][..],
        &["disable-updates", "--reason", "b"],
        &["enable-updates", "--why", "c"],
        &["enable-updates", "--reason", "d"],
        &["enable-updates", "e"],
        &["pause", "web*", "--until", "1h", "--why", "f"],
        &["pause", "web1", "db1", "--until", "1h", "--reason", "g"],
        &["resume", "web?", "--why", "h"],
        &["resume", "db1", "--reason", "i"],
        &["set-config", "--host", "web1", "cpu-percent=5", "--why", "j"],
        &["set-config", "--fleet", "cpu-percent=5", "--reason", "k"],
        &["set-default-image", "--none", "--reason", "l"],
    ];
    for order in orders {
        let given = stage.domtool(order).await;
        assert!(given.status.success(), "{order:?}: {given:?}");
    }
    let reasons: Vec<String> =
        audit(&stage, &[]).await.into_iter().map(|[_, _, why]| why).collect();
    // A pause has its end before the reason.
    assert!(reasons[5].starts_with("until 2") && reasons[5].ends_with("Z; f"), "{}", reasons[5]);
    let reasons = reasons.iter().map(|why| why.rsplit("; ").next().unwrap_or_default());
    assert_eq!(reasons.collect::<String>(), "abcdefghijkl");
    let about = async |host: &str| -> Vec<String> {
        audit(&stage, &["--host", host]).await.into_iter().map(|[verb, ..]| verb).collect()
    };
    assert_eq!(about("web1").await, ["pause", "pause", "resume", "set-config"]);
    assert_eq!(about("db1").await, ["pause", "resume"]);
    assert_eq!(about("db2").await, Vec::<String>::new());
    for bad in [&["disable-updates"][..], &["disable-updates", "a", "--why", "b"]] {
        assert_eq!(stage.domtool(bad).await.status.code(), Some(2), "{bad:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_orders_about_machines_point_to_the_list_of_machines() {
    let stage = Stage::new("[{\"Hostname\": \"web1\"}]").await;
    let hint = "hint: domtool list-subs";
    for (words, is_hinted) in [
        (&["show-sub", "nobody"][..], true),
        (&["retry", "nobody"], true),
        (&["explain", "nobody"], true),
        (&["plan", "nobody"], true),
        (&["get-config", "nobody"], true),
        (&["resume-image", "web/7", "--why", "x"], false),
        (&["mdb", "accept"], false),
        (&["mdb", "show", "--held"], false),
    ] {
        let (code, talk) = exit_and_stderr(&stage.domtool(words).await);
        assert_eq!((code, talk.contains(hint)), (Some(1), is_hinted), "{words:?}: {talk}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_update_of_a_machine_that_is_away_says_what_it_waits_for() {
    let stage = Stage::new("[{\"Hostname\": \"web1\"}]").await;
    stage.wait("web1", Status::Unreachable, "").await;
    let late = stage.domtool(&["fast-update", "web1", "--timeout", "1s"]).await;
    let (code, talk) = exit_and_stderr(&late);
    assert_eq!(code, Some(1), "{talk}");
    let waits = "web1 does not answer yet. Waiting for at most ";
    assert_eq!(talk.matches(waits).count(), 1, "{talk}");
    assert!(talk.contains(" unreachable: "), "{talk}");
    assert!(talk.contains("error: web1 is not synced yet, and goes on"), "{talk}");
}

/// `domtool events --follow`, and the lines that it prints.
struct Follower {
    process: Child,
    lines: Receiver<String>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Follower {
    fn start(stage: &Stage, words: &[&str]) -> Self {
        let mut command = Command::new(testing::program("domtool"));
        command.args(["--insecure", "--dominator"]).arg(format!("127.0.0.1:{}", stage.port));
        command.args(words).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines() {
                if sender.send(line.unwrap()).is_err() {
                    return;
                }
            }
        });
        Self { process, lines }
    }

    fn line(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("the next event is told")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_told_as_they_come_each_once_and_over_a_restart() {
    let mut stage = Stage::new("[]").await;
    let order = async |stage: &Stage, why: &str| {
        let given = stage.domtool(&["enable-updates", why]).await;
        assert!(given.status.success(), "{given:?}");
    };
    order(&stage, "one").await;
    order(&stage, "two").await;
    let words = ["events", "--kind", "order", "--follow", "--limit", "1"];
    let follower = Follower::start(&stage, &words);
    let json = Follower::start(&stage, &["audit", "--follow", "--format", "json"]);
    let why = |follower: &Follower| {
        let event: HistoryEvent = serde_json::from_str(&follower.line()).unwrap();
        match event.what {
            EventDetails::Order { why, .. } => why,
            other => panic!("{other:?}"),
        }
    };
    assert!(follower.line().ends_with(": two"));
    assert_eq!([why(&json), why(&json)], ["one", "two"]);
    for text in ["three", "four"] {
        order(&stage, text).await;
        assert!(follower.line().ends_with(&format!(": {text}")));
        assert_eq!(why(&json), text);
    }
    stage.kill();
    stage.start().await;
    order(&stage, "five").await;
    let line = follower.line();
    assert!(line.contains(" order : enable-updates by ") && line.ends_with(": five"), "{line}");
    assert_eq!(why(&json), "five");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_of_events_takes_all_that_domtool_takes() {
    let stage = Stage::new("[]").await;
    for why in ["one", "two", "three"] {
        let given = stage.domtool(&["enable-updates", why]).await;
        assert!(given.status.success(), "{given:?}");
    }
    let machines = ["retry", "nobody"];
    assert_eq!(stage.domtool(&machines).await.status.code(), Some(1));
    for (query, code, parts) in [
        ("", 200, &["three", "two", "one"][..]),
        ("?kind=order&kind=update", 200, &["three", "kind\" value=\"order\" checked"]),
        ("?host=&path=&who=&since=&until=&image=", 200, &["three"]),
        ("?host=web1&host=db*", 200, &["value=\"web1\"", "value=\"db*\""]),
        ("?who=%3Cb%3E&who=ann", 200, &["value=\"&#60;b&#62;\"", "value=\"ann\""]),
        ("?since=1d&until=0s", 200, &["three", "value=\"1d\""]),
        ("?since=noon", 400, &["`noon` is no time"]),
        ("?kind=x", 400, &["the kinds are status, update, change and order"]),
        ("?reason=x", 400, &["the reasons are drift, image and computed"]),
        ("?before=x", 400, &["`x` is no place"]),
        ("?before=2-0", 200, &["one"]),
    ] {
        let (status, body) = stage.client.get(&format!("/events{query}")).await.unwrap();
        let body = String::from_utf8(body.to_vec()).unwrap();
        assert_eq!(status, code, "{query}: {body}");
        for part in parts {
            assert!(body.contains(part), "{query}: {part} in {body}");
        }
    }
    for (query, part) in
        [("?since=2100-01-01", "three"), ("?host=web1&host=db*", "three"), ("?before=2-0", "two")]
    {
        let (_, body) = stage.client.get(&format!("/events{query}")).await.unwrap();
        let body = String::from_utf8(body.to_vec()).unwrap();
        assert!(!body.contains(part), "{query}: {part} in {body}");
    }
}

/// Runs domtool on a terminal of its own, with this as what somebody types.
fn on_a_terminal(stage: &Stage, words: &str, typed: &str) -> (Option<i32>, String) {
    let domtool = testing::program("domtool");
    let line = format!("{domtool} --insecure --dominator 127.0.0.1:{} {words}", stage.port);
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    let mut process =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut input = process.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, typed.as_bytes()).unwrap();
    let output = process.wait_with_output().unwrap();
    drop(input);
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_destroy_much_is_asked_for_on_a_terminal_and_shown_everywhere() {
    let mut stage = Stage::new("[]").await;
    let full = |count: u32| {
        let files: Vec<String> =
            (0..count).map(|number| file(&format!("/f{number:03}"), "1")).collect();
        tree(&files.concat())
    };
    stage.images.add("small", &tree(&file("/f000", "1")), Some(&[]));
    let sub = FakeSub::new(full(200));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"small\"}}]"));
    stage.wait("host", Status::UnsafeUpdate, "small").await;
    let danger = "DANGER: it would remove ";

    for typed in ["n\n", "\n", "\u{4}"] {
        let (code, talk) = on_a_terminal(&stage, "clear-safety-shutoff host", typed);
        assert_eq!(code, Some(1), "{typed:?}: {talk}");
        for part in [danger, "Allow this update? [y/N]", "not confirmed: "] {
            assert!(talk.contains(part), "{typed:?}: {part} in {talk}");
        }
    }
    stage.wait("host", Status::UnsafeUpdate, "small").await;
    let (code, talk) = on_a_terminal(&stage, "clear-safety-shutoff host", "y\n");
    assert!(code == Some(0) && talk.contains("The pending update of host is allowed."), "{talk}");
    stage.wait("host", Status::Synced, "small").await;

    // Nobody is asked who said so, or cannot answer.
    sub.change(full(201));
    stage.wait("host", Status::UnsafeUpdate, "small").await;
    let (code, talk) = on_a_terminal(&stage, "clear-safety-shutoff host --yes", "");
    assert!(code == Some(0) && !talk.contains("[y/N]") && talk.contains(danger), "{talk}");
    stage.wait("host", Status::Synced, "small").await;
    sub.change(full(202));
    stage.wait("host", Status::UnsafeUpdate, "small").await;
    let given = stage.domtool(&["clear-safety-shutoff", "host", "meant"]).await;
    let (code, talk) = exit_and_stderr(&given);
    assert!(code == Some(0) && !talk.contains("[y/N]") && talk.contains(danger), "{talk}");
    stage.wait("host", Status::Synced, "small").await;
}
