//! Orders about machines over the wire, and what of them outlives the dominator.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use api::dominator::Status;
use api::dominator::explain::{Explain, ExplainRequest, Explanation, ImageSource};
use api::dominator::orders::{
    PauseEnd, PauseUpdates, PauseUpdatesReply, PauseUpdatesRequest, WatchSub, WatchSubRequest,
};
use api::fault::FaultCode;
use model::tree::Time;
use testing::{eventually_async, exit_and_output};

use crate::fake::{FakeSub, file, tree};
use crate::stage::{Stage, wait_until};

async fn explain(stage: &Stage, hostname: &str) -> Explanation {
    let request = ExplainRequest { hostname: hostname.to_owned() };
    stage.client.call::<Explain>(&request).await.unwrap()
}

fn count(sub: &FakeSub, name: &str) -> usize {
    sub.calls.lock().unwrap().iter().filter(|call| **call == name).count()
}

/// Waits until the detail of a machine with this status has `part`.
async fn wait_for_detail(stage: &Stage, hostname: &str, status: Status, image: &str, part: &str) {
    eventually_async(&format!("the detail of {hostname} has `{part}`"), async || {
        let summary = stage.wait(hostname, status, image).await;
        if summary.detail.contains(part) { Ok(()) } else { Err(summary.detail) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_reads_the_signatures_of_the_image_at_once() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let web = FakeSub::new(want);
    let record = stage.sub("web1", &web).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    stage.wait("web1", Status::Synced, "base").await;
    let start = Instant::now();
    for _ in 0..10 {
        let before = stage.images.requests.load(Ordering::Relaxed);
        stage.domtool(&["retry", "web1"]).await;
        eventually_async("the image server is asked", async || {
            let requests = stage.images.requests.load(Ordering::Relaxed);
            if requests > before { Ok(()) } else { Err(requests) }
        })
        .await;
    }
    // By itself the dominator asks every 12 s at the most often.
    assert!(start.elapsed() < Duration::from_secs(110), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_machine_is_left_alone_also_after_a_kill_and_others_are_not() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let (web, db) = (FakeSub::new(tree("")), FakeSub::new(tree("")));
    let records = [stage.sub("web1", &web).await, stage.sub("db1", &db).await];
    let database = |image: &str| {
        let record = |record| format!("{{{record}, \"RequiredImage\": \"{image}\"}}");
        format!("[{}]", records.iter().map(record).collect::<Vec<_>>().join(","))
    };
    stage.write_mdb(&database(""));
    stage.wait("web1", Status::ImageUndefined, "").await;
    stage.wait("db1", Status::ImageUndefined, "").await;

    let paused = stage.domtool(&["pause", "web*", "--until", "2h", "--reason", "moving"]).await;
    let (code, out, talk) = exit_and_output(&paused);
    assert_eq!((code, out.as_str()), (Some(0), "web1\n"), "{talk}");
    assert!(talk.starts_with("Updates of 1 machine (web1) are paused until "), "{talk}");
    stage.kill();
    stage.start().await;
    stage.write_mdb(&database("base"));
    stage.wait("db1", Status::Synced, "base").await;
    wait_for_detail(&stage, "web1", Status::Paused, "base", "all objects are there").await;
    assert_eq!((count(&web, "prepare"), count(&web, "commit")), (0, 0));
    assert_eq!(web.model.lock().unwrap().sub.tree, tree(""));

    // It is shown wherever one looks.
    let why = explain(&stage, "web1").await;
    let pause = why.paused.expect("it is paused");
    assert_eq!((why.status, pause.reason.as_str()), (Status::Paused, "moving"));
    assert_eq!(why.next_at, Some(pause.until));
    assert_eq!(stage.show("web1").await.pause, Some(pause));
    assert_eq!(stage.status().await.paused, 1);
    let listed = stage.domtool(&["list-subs", "--status", "paused", "--format", "json"]).await;
    assert!(
        exit_and_output(&listed).1.contains("\"web1\"")
            && !exit_and_output(&listed).1.contains("\"db1\"")
    );
    let status = exit_and_output(&stage.domtool(&["status"]).await).1;
    assert!(status.contains("paused: 1 machine by operators"), "{status}");
    let (_, page) = stage.client.get("/").await.unwrap();
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains("Operators have paused the updates of 1 machine"), "{page}");
    let text = exit_and_output(&stage.domtool(&["explain", "web1"]).await).1;
    assert!(text.contains("you may      domtool resume web1: ends the pause now"), "{text}");
    let (_, page) = stage.client.get("/sub?host=web1").await.unwrap();
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains("you may      domtool resume web1: ends the pause now"), "{page}");

    let resumed = stage.domtool(&["resume", "*"]).await;
    assert_eq!(exit_and_output(&resumed).1, "web1\n", "{resumed:?}");
    stage.wait("web1", Status::Synced, "base").await;
    assert_eq!(web.model.lock().unwrap().sub.tree, want);
    let (code, _, talk) = exit_and_output(&stage.domtool(&["resume", "web1"]).await);
    assert_eq!(code, Some(1));
    assert!(talk.contains("no operator has paused web1"), "{talk}");
    stage.kill();
    stage.start().await;
    assert_eq!(stage.status().await.paused, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_drops_a_commit_on_its_way_before_it_returns() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let sub = FakeSub::new(tree(""));
    sub.ignores_commit.store(true, Ordering::SeqCst);
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    stage.wait("host", Status::Updating, "base").await;

    let request = |end| PauseUpdatesRequest {
        hosts: vec!["host".to_owned()],
        end,
        reason: "works".to_owned(),
        who: "me".to_owned(),
    };
    let over = PauseEnd::At(Time::default());
    let refused = stage.client.call::<PauseUpdates>(&request(over)).await.unwrap_err();
    assert_eq!(refused.code(), Some(FaultCode::BadRequest));
    let hour = PauseEnd::After(3_600);
    let paused = stage.client.call::<PauseUpdates>(&request(hour)).await.unwrap();
    let PauseUpdatesReply { hostnames, .. } = paused;
    assert_eq!(hostnames, ["host"]);
    sub.ignores_commit.store(false, Ordering::SeqCst);
    let before = count(&sub, "commit");
    stage.wait("host", Status::Paused, "base").await;
    assert_eq!(count(&sub, "commit"), before, "a Commit was sent after the pause");
    assert_eq!(sub.model.lock().unwrap().sub.tree, tree(""));
    // It ends by itself.
    let soon = stage.client.call::<PauseUpdates>(&request(PauseEnd::After(1))).await.unwrap();
    stage.wait("host", Status::Synced, "base").await;
    assert!(system::clock::wall() >= soon.until);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_machines_of_the_database_are_paused_and_those_that_leave_it_are_forgotten() {
    let mut stage = Stage::new("[{\"Hostname\": \"a\"}, {\"Hostname\": \"b\"}]").await;
    stage.wait("b", Status::Unreachable, "").await;
    let pause = ["pause", "a", "nobody", "--until", "1h", "--reason", "x"];
    let (code, _, talk) = exit_and_output(&stage.domtool(&pause).await);
    assert_eq!(code, Some(1));
    assert!(talk.contains("no machine of the machine database is called nobody"), "{talk}");
    assert_eq!(stage.status().await.paused, 0, "all or nothing");
    for bad in ["noon", "400d", "2020-01-01T00:00:00Z"] {
        let refused = stage.domtool(&["pause", "a", "--until", bad, "--reason", "x"]).await;
        assert!(!refused.status.success(), "{bad}: {refused:?}");
    }
    let paused = stage.domtool(&["pause", "?", "--until", "1h", "--reason", "x"]).await;
    assert_eq!(exit_and_output(&paused).1, "a\nb\n");
    stage.write_mdb("[{\"Hostname\": \"a\"}]");
    let paused = async || stage.status().await.paused;
    wait_until("the pause is forgotten", async || paused().await == 1).await;
    // Those that leave while the dominator is down, too.
    stage.kill();
    stage.write_mdb("[{\"Hostname\": \"b\"}]");
    stage.start().await;
    stage.wait("b", Status::Unreachable, "").await;
    wait_until("the other is forgotten", async || stage.status().await.paused == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_kept_is_not_done() {
    let mut stage = Stage::new("[{\"Hostname\": \"a\"}]").await;
    stage.kill();
    stage.start_for_limits().await;
    stage.wait("a", Status::Unreachable, "").await;
    stage.limit_files("4096");
    let (code, _, talk) =
        exit_and_output(&stage.domtool(&["pause", "a", "--until", "1h", "--reason", "x"]).await);
    assert_eq!(code, Some(1));
    assert!(talk.contains("the order was not carried out"), "{talk}");
    let refused = stage.domtool(&["set-default-image", "base", "--yes"]).await;
    assert!(!refused.status.success(), "{refused:?}");
    let status = stage.status().await;
    assert_eq!((status.paused, status.default_image), (0, None));

    stage.limit_files("unlimited");
    let paused = stage.domtool(&["pause", "a", "--until", "1h", "--reason", "x"]).await;
    assert!(paused.status.success(), "{paused:?}");
    stage.limit_files("4096");
    let resumed = stage.domtool(&["resume", "a"]).await;
    assert!(!resumed.status.success(), "a kept pause would come back: {resumed:?}");
    assert_eq!(stage.status().await.paused, 1);
    stage.kill();
    stage.start().await;
    assert_eq!(stage.status().await.paused, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_default_image_is_for_machines_without_one_and_outlives_a_kill() {
    let mut stage = Stage::new("[]").await;
    let (rescue, own) = (tree(&file("/rescue", "1")), tree(&file("/own", "1")));
    stage.images.add("rescue", &rescue, Some(&[]));
    stage.images.add("own", &own, Some(&[]));
    let (bare, other) = (FakeSub::new(tree("")), FakeSub::new(tree("")));
    let (bare_record, other_record) =
        (stage.sub("bare", &bare).await, stage.sub("other", &other).await);
    stage.write_mdb(&format!(
        "[{{{bare_record}}}, {{{other_record}, \"RequiredImage\": \"own\"}},
          {{\"Hostname\": \"watched\", \"DisableUpdates\": true}}]"
    ));
    stage.wait("other", Status::Synced, "own").await;
    stage.wait("bare", Status::ImageUndefined, "").await;

    let (code, _, talk) = exit_and_output(&stage.domtool(&["set-default-image", "rescue"]).await);
    assert_eq!(code, Some(1));
    let expected = "rescue would be the image of 1 machine from now on";
    assert!(talk.contains(expected) && talk.contains("--yes"), "{talk}");
    assert_eq!(stage.status().await.default_image, None);
    let (code, _, talk) =
        exit_and_output(&stage.domtool(&["set-default-image", "rescue", "--yes"]).await);
    assert_eq!(code, Some(0), "{talk}");
    assert!(talk.contains("without a RequiredImage: 2 machines now"), "{talk}");
    stage.wait("bare", Status::Synced, "rescue").await;
    assert_eq!(bare.model.lock().unwrap().sub.tree, rescue);
    stage.kill();
    stage.start().await;
    stage.wait("bare", Status::Synced, "rescue").await;
    stage.wait("other", Status::Synced, "own").await;
    let default = stage.status().await.default_image.expect("it was kept");
    let why = explain(&stage, "bare").await;
    assert_eq!(why.must_have.source, ImageSource::Default(default.clone()));
    let text = exit_and_output(&stage.domtool(&["explain", "bare"]).await).1;
    assert!(text.contains("rescue, by default, because its record names none"), "{text}");
    let listed = stage.domtool(&["list-subs", "--image", "rescue", "--status", "synced"]).await;
    assert!(
        exit_and_output(&listed).1.contains("bare")
            && !exit_and_output(&listed).1.contains("other")
    );
    // The same again moves nobody.
    let again = stage.domtool(&["set-default-image", "rescue"]).await;
    assert!(again.status.success(), "{again:?}");

    let (code, _, talk) =
        exit_and_output(&stage.domtool(&["set-default-image", "nope", "--yes"]).await);
    let warning = "warning: nope, for 2 machines: the image server has no image nope yet\n";
    assert!(code == Some(0) && talk.ends_with(warning), "{talk}");

    let none = stage.domtool(&["set-default-image", "--none"]).await;
    assert!(none.status.success(), "{none:?}");
    stage.wait("bare", Status::ImageUndefined, "").await;
    assert_eq!(bare.model.lock().unwrap().sub.tree, rescue, "it is left as it is");
    stage.kill();
    stage.start().await;
    assert_eq!(stage.status().await.default_image, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_update_finds_drift_and_shows_how_it_goes_to_the_end() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let sub = FakeSub::new(tree(""));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    stage.wait("host", Status::Synced, "base").await;

    // Nobody has seen this yet, and the next pass may be far.
    sub.model.lock().unwrap().sub.tree = tree(&file("/one", "2"));
    let (code, out, talk) = exit_and_output(&stage.domtool(&["fast-update", "host"]).await);
    assert_eq!((code, out.as_str()), (Some(0), "host: synced: equals base\n"), "{talk}");
    // That it scans at once may be over before it is asked for the first time.
    assert!(talk.contains("rescanning: "), "{talk}");
    assert_eq!(sub.model.lock().unwrap().sub.tree, want);
    assert_eq!((count(&sub, "hurry"), count(&sub, "scan-now")), (1, 2));

    // What it may not pass ends it, and is told.
    let disabled = stage.domtool(&["disable-updates", "storm"]).await;
    assert!(disabled.status.success(), "{disabled:?}");
    sub.model.lock().unwrap().sub.tree = tree(&file("/one", "3"));
    let fast = stage.domtool(&["fast-update", "host", "--format", "json"]).await;
    let (code, out, talk) = exit_and_output(&fast);
    assert_eq!(code, Some(1), "{talk}");
    let reply: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(reply["status"], "updates-disabled");
    assert!(talk.contains("error: host is not synced: it is updates-disabled:"), "{talk}");
    assert!(talk.contains("hint: domtool explain host"), "{talk}");
    let enabled = stage.domtool(&["enable-updates"]).await;
    assert!(enabled.status.success(), "{enabled:?}");
    stage.wait("host", Status::Synced, "base").await;

    // A machine that hangs is watched until the time is over.
    sub.ignores_commit.store(true, Ordering::SeqCst);
    sub.model.lock().unwrap().sub.tree = tree(&file("/one", "4"));
    let late = stage.domtool(&["fast-update", "host", "--timeout", "3s"]).await;
    let (code, _, talk) = exit_and_output(&late);
    assert_eq!(code, Some(1), "{talk}");
    assert!(talk.contains("error: host is not synced yet, and goes on: it is "), "{talk}");
    let nobody = stage.domtool(&["fast-update", "nobody"]).await;
    assert!(exit_and_output(&nobody).2.contains("there is no machine nobody"), "{nobody:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_is_watched_by_versions() {
    let stage = Stage::new("[{\"Hostname\": \"a\"}]").await;
    stage.wait("a", Status::Unreachable, "").await;
    let watch = |have, wait_ms| WatchSubRequest { hostname: "a".to_owned(), have, wait_ms };
    let first = stage.client.call::<WatchSub>(&watch(0, 60_000)).await.unwrap();
    let same = stage.client.call::<WatchSub>(&watch(first.version, 0)).await.unwrap();
    assert_eq!((same.status, same.is_current), (Status::Unreachable, true));
    let disabled = stage.domtool(&["force-disruptive", "a", "--reason", "x"]).await;
    let (code, _, talk) = exit_and_output(&disabled);
    assert_eq!(code, Some(1));
    assert!(talk.contains("no update of a is pending that could be forced"), "{talk}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_says_no_is_disturbed_all_the_same_if_that_is_forced() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let sub = FakeSub::new(tree(""));
    sub.model.lock().unwrap().guarded = true;
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    stage.wait("host", Status::Held, "base").await;
    let text = exit_and_output(&stage.domtool(&["explain", "host"]).await).1;
    assert!(text.contains("domtool force-disruptive host --why TEXT: has this"), "{text}");
    let forced = stage.domtool(&["force-disruptive", "host", "--reason", "hole in ssh"]).await;
    assert!(forced.status.success(), "{forced:?}");
    stage.wait("host", Status::Synced, "base").await;
    assert_eq!(sub.model.lock().unwrap().sub.tree, want);
    // Once.
    sub.change(tree(""));
    stage.wait("host", Status::Held, "base").await;
}
