//! `subtool` as a process, against a real subd.

use std::path::Path;
use std::process::{Command, Output};

use api::subd::{
    CheckHealthReply, Health, Poll, PollReply, PollRequest, PrepareRequest, ScanCounters,
    UpdateOutcome,
};
use model::image::HealthCheck;
use model::tree::text::to_text;

use crate::fixture::{Edit, PATIENCE, Source, Sub, path, request};

/// What a run of the tool gave.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    code: i32,
    out: String,
    err: String,
}

fn subtool(sub: &Sub, words: &[&str]) -> Run {
    run(command(words).env("DOMINATOR_SUBD", sub.client.peer().authority()))
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(testing::program("subtool"));
    // No file of the one who runs the tests counts.
    command.env("HOME", "/nonexistent").arg("--insecure").args(words);
    command
}

fn run(command: &mut Command) -> Run {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { code: status.code().unwrap(), out: text(stdout), err: text(stderr) }
}

fn done(out: &str, err: &str) -> Run {
    Run { code: 0, out: out.to_owned(), err: err.to_owned() }
}

#[tokio::test(flavor = "multi_thread")]
async fn shows_what_the_machine_reports_and_what_it_scanned() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let want = Edit::of(&empty, &source).file("/a b", "f").directory("/d", 0o750).done();
    sub.converge(7, &source, &want).await;
    assert_eq!(subtool(&sub, &["show"]), done(&to_text(&want), ""));
    let nodes = subtool(&sub, &["show", "--format", "json"]).out;
    let nodes: Vec<(model::path::TreePath, model::tree::Node)> =
        serde_json::from_str(&nodes).unwrap();
    assert_eq!(nodes, want.nodes().collect::<Vec<_>>());
    let json = subtool(&sub, &["--format", "json", "poll"]);
    let reply: PollReply = serde_json::from_str(&json.out).unwrap();
    assert_eq!(reply.scan.unwrap().root, want.digest());
    let table = subtool(&sub, &["poll"]).out;
    for expected in [
        "calls itself",
        "updates         allowed\n",
        "last image      test/7\n",
        "to test/7: done; 2 operations within ",
        "holds           2 paths, 1 byte\n",
        "cached objects  0\n",
    ] {
        let line = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let found = table.lines().any(|text| line(text).contains(&line(expected)));
        assert!(found, "{expected}: {table}");
    }
    let wait = subtool(&sub, &["wait-for-image", "test/7"]);
    assert_eq!(wait, done("", "Waiting for test/7.\n"));
    let late = subtool(&sub, &["wait-for-image", "test/8", "--timeout", "1s"]);
    let gave_up = "error: gave up after 1 s: the machine does not have test/8\n";
    assert_eq!((late.code, late.err.as_str()), (1, &*format!("Waiting for test/8.\n{gave_up}")));
    sub.stop().await;
    source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waits_for_news_and_shows_a_pause() {
    let sub = Sub::start().await;
    sub.tree().await;
    let address = sub.client.peer().authority();
    let waiting = tokio::task::spawn_blocking(move || {
        run(command(&["poll", "--wait"]).env("DOMINATOR_SUBD", address))
    });
    let paused = subtool(&sub, &["pause", "--for", "2h", "--reason", "disk\nswap"]);
    let until = sub.poll().await.paused.unwrap().until;
    let until = model::display::utc(until);
    let said = format!("No update is made until {until}. One that had begun is finished.\n");
    assert_eq!(paused, done("", &said));
    // It was asked before or after the pause; if after, the end of it is the news.
    assert_eq!(subtool(&sub, &["resume"]), done("", "Updates go on.\n"));
    let err = "error: updates of the machine are not paused\n".to_owned();
    assert_eq!(subtool(&sub, &["resume"]), Run { code: 1, out: String::new(), err });
    let news = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap();
    assert_eq!((news.code, news.err.as_str()), (0, ""), "{news:?}");
    let paused = subtool(&sub, &["pause", "--until", "2000-01-01T00:00Z", "--reason", "past"]);
    let said = "error: Subd.Pause at ";
    assert!(paused.code == 1 && paused.err.starts_with(said), "{paused:?}");
    assert!(paused.err.contains("2000-01-01T00:00:00Z is over: the machine's"), "{paused:?}");
    assert_eq!(sub.poll().await.paused, None);
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scans_now_and_waits_for_the_end_of_each_pass() {
    let sub = Sub::start().await;
    let file = sub.at("/f");
    std::fs::write(&file, "before").unwrap();
    sub.rescanned().await;
    let before = sub.poll().await;
    let scanned = subtool(&sub, &["scan", "--content", "--media", "--format", "json"]);
    assert_eq!((scanned.code, scanned.err.as_str()), (0, "Scanning.\n"), "{scanned:?}");
    let counters: ScanCounters = serde_json::from_str(&scanned.out).unwrap();
    assert!(counters.content_passes > before.counters.content_passes, "{counters:?}");
    assert!(counters.media_passes > before.counters.media_passes, "{counters:?}");
    std::fs::write(sub.at("/g"), "new").unwrap();
    let scanned = subtool(&sub, &["scan"]);
    assert_eq!(scanned.code, 0, "{scanned:?}");
    let tree = sub.tree().await.1;
    assert!(tree.get(&path("/g")).is_some(), "{}", to_text(&tree));
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_are_set_kept_and_forgotten() {
    let sub = Sub::start().await;
    let ceiling = "What the machine's own configuration sets is a ceiling: a higher limit changes \
                   nothing.\n";
    let set = subtool(&sub, &["set-config", "cpu-percent=3", "scan-percent=1"]);
    assert_eq!((set.code, set.err.as_str()), (0, ceiling));
    let former = subtool(&sub, &["set-config", "--network-percent", "5", "write-percent="]);
    let warning =
        "warning: the next release has no --network-percent: write network-percent=PERCENT\n";
    assert_eq!((former.code, former.err), (0, format!("{warning}{ceiling}")));
    let shown = subtool(&sub, &["get-config"]).out;
    let shown: Vec<String> =
        shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    // The speed of the network depends on the machine.
    let (network, others) = shown.split_last().unwrap();
    assert!(network.contains("5 % ") && network.contains("as set by a dominator"), "{network}");
    assert_eq!(
        others,
        [
            "digest blake3",
            "scans everything",
            "attributes without labels",
            "cpu limit 3 % of a core as set by a dominator or subtool",
            "scan limit 10.0 MB/s: 1 % as set by a dominator or subtool, of 1.0 GB/s as configured",
            "write limit none: this is an installation",
        ]
    );
    let reset = subtool(&sub, &["set-config", "--reset", "--format", "json"]);
    let reset: serde_json::Value = serde_json::from_str(&reset.out).unwrap();
    let none = serde_json::Value::Null;
    assert_eq!(reset["limits"]["cpu_percent"], none);
    for words in [&["set-config"][..], &["set-config", "cpu-percent=0"]] {
        assert_eq!(subtool(&sub, words).code, 2, "{words:?}");
    }
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_a_file_of_the_machine_and_nothing_else() {
    let sub = Sub::start().await;
    let content: Vec<u8> = (0..10_000_000_u32).map(|number| (number % 251) as u8).collect();
    std::fs::write(sub.at("/large"), &content).unwrap();
    std::fs::write(sub.at("/empty"), "").unwrap();
    std::os::unix::fs::symlink("large", sub.at("/link")).unwrap();
    let here = tempfile::tempdir().unwrap();
    let to = here.path().join("copy");
    let get = |from: &str, to: &Path| subtool(&sub, &["get-file", from, to.to_str().unwrap()]);
    assert_eq!(get("/large", &to), done("", ""));
    assert_eq!(std::fs::read(&to).unwrap(), content);
    let refused = get("/link", &to);
    assert_eq!((refused.code, &*refused.err), (1, "error: /link is not a regular file\n"));
    assert_eq!(std::fs::read(&to).unwrap(), content);
    assert_eq!(get("/empty", &to), done("", ""));
    assert_eq!(std::fs::read(&to).unwrap(), b"");
    assert_eq!(std::fs::read_dir(here.path()).unwrap().count(), 1);
    std::fs::write(sub.at("/small"), "small").unwrap();
    assert_eq!(subtool(&sub, &["get-file", "/small"]), done("small", ""));
    let nowhere = get("/small", &here.path().join("absent/copy"));
    assert!(nowhere.code == 1 && nowhere.err.contains("cannot write `"), "{nowhere:?}");
    assert_eq!(subtool(&sub, &["get-file", "no-path"]).code, 2);
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cleans_the_cache() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let object = |content: &[u8]| api::subd::FetchObject {
        id: source.add(content),
        size_bytes: content.len() as u64,
    };
    sub.fetch(1, &[&source], &[object(b"one"), object(b"two")]).await;
    let no_image = subtool(&sub, &["cleanup"]);
    let said = "error: the machine was never updated to an image\n\
                hint: subtool cleanup --all removes all objects\n";
    assert_eq!((no_image.code, &*no_image.err), (1, said));
    assert_eq!(subtool(&sub, &["cleanup", "--all"]), done("", "Removed 2 objects, kept 0.\n"));
    let left = std::fs::read_dir(sub.at("/.subd/objects")).unwrap().count();
    assert_eq!(left, 0);
    sub.stop().await;
    source.stop().await;
}

/// Updates the machine to an image that is checked by this script.
async fn update_with_check(sub: &Sub, source: &Source, id: u64, script: &str, within: u32) {
    let (_, have) = sub.tree().await;
    let want = Edit::of(&have, source).file("/version", &id.to_string()).done();
    let (_, needs) = sub.plan(&want).await;
    sub.fetch_for(id, source, &needs).await;
    let (reply, plan) = sub.plan(&want).await;
    let command = ["sh", "-c", script].map(str::to_owned).into();
    let check = HealthCheck { command, within_seconds: within, undo: false };
    let request = PrepareRequest { health_check: Some(check), ..request(id, &reply, &want, plan) };
    sub.prepare(&request).await.unwrap();
    assert_eq!(sub.commit(id).await.outcome, UpdateOutcome::Done);
}

#[tokio::test(flavor = "multi_thread")]
async fn has_the_health_checked_and_tells_what_the_check_said() {
    let place = tempfile::tempdir().unwrap();
    let sub = Sub::start_on(place.path(), &["--health-command", "env"]).await;
    let source = Source::start().await;
    let as_json = |health: Option<Health>| {
        serde_json::to_string_pretty(&CheckHealthReply { health }).unwrap() + "\n"
    };
    let json = || subtool(&sub, &["check-health", "--format", "json"]);
    assert_eq!(subtool(&sub, &["check-health"]), done("its image names no health check\n", ""));
    assert_eq!(json(), done(&as_json(None), ""));
    update_with_check(&sub, &source, 1, "echo fine", 60).await;
    assert_eq!(subtool(&sub, &["check-health"]), done("passed\n", ""));
    assert_eq!(json(), done(&as_json(Some(Health::Passed)), ""));
    let table = [
        ("echo the disk is full; exit 4", "the disk is full\nexit status: 4"),
        ("echo waiting; sleep 1000", "waiting\nkilled after 1 s"),
    ];
    for (id, (script, said)) in (2..).zip(table) {
        update_with_check(&sub, &source, id, script, 1).await;
        let why = format!("{said}\nit did not pass within 1 s");
        let err = format!("error: the health check failed: {why}\n");
        let failed = subtool(&sub, &["check-health"]);
        assert_eq!(failed, Run { code: 1, out: String::new(), err });
        let out = as_json(Some(Health::Failed(why)));
        assert_eq!(json(), Run { code: 1, out, err: String::new() });
    }
    // It was looked at, and nothing else.
    assert_eq!(sub.poll().await.last_image.unwrap().as_str(), "test/3");
    sub.stop().await;
    source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn says_what_is_wrong_and_what_to_do() {
    let nobody = run(command(&["poll"]).env("DOMINATOR_SUBD", "127.0.0.5:1"));
    let hint = "hint: is subd running there? say where: --subd HOST:PORT, or DOMINATOR_SUBD\n";
    assert!(nobody.err.starts_with("error: cannot connect to 127.0.0.5:1: "), "{nobody:?}");
    assert!(nobody.code == 1 && nobody.err.ends_with(hint), "{nobody:?}");
    let table: [(&[&str], &str); 5] = [
        (&["poll", "--subd", "x:y"], "error: invalid address: `x:y` is not HOST or HOST:PORT"),
        (&["pause", "--for", "2x", "--reason", "x"], "error: invalid value '2x' for '--for"),
        (&["pause", "--reason", "x"], "error: the following required arguments"),
        (&["pause", "--until", "noon", "--reason", "x"], "error: `noon` is no time: expected"),
        (&["push-image", "../x"], "error: invalid value '../x' for '<IMAGE>'"),
    ];
    for (words, expected) in table {
        let got = run(&mut command(words));
        assert!(got.code == 2 && got.err.starts_with(expected), "{words:?}: {got:?}");
    }
    let mut unsafely = Command::new(testing::program("subtool"));
    let unsafely = run(unsafely.args(["--tls", "/nonexistent", "poll"]));
    let refused = "error: subtool does not run unprotected by itself";
    assert!(unsafely.code == 2 && unsafely.err.starts_with(refused), "{unsafely:?}");
    let sub = Sub::start().await;
    let words = ["push-image", "test/1", "--imageserver", "127.0.0.5:1"];
    let no_images = subtool(&sub, &words);
    let hint = "hint: is the imageserver running? say where: --imageserver HOST:PORT\n";
    assert!(no_images.code == 1 && no_images.err.ends_with(hint), "{no_images:?}");
    assert_eq!(sub.client.call::<Poll>(&PollRequest::default()).await.unwrap().last_update, None);
    assert!(!sub.at("/f").exists() && path("/f").name() == b"f");
    sub.stop().await;
}
