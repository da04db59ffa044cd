//! The brake: nothing passes while it is on, and it outlives the dominator.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use api::dominator::{
    DisableUpdates, DisableUpdatesRequest, EnableUpdates, EnableUpdatesRequest, Status,
};
use testing::{eventually_async, exit_and_output};

use crate::fake::{FakeSub, file, tree};
use crate::stage::Stage;

#[tokio::test(flavor = "multi_thread")]
async fn a_reason_moves_nothing_on_a_terminal() {
    let stage = Stage::new("[]").await;
    let reason = "moving\u{1b}[2J \u{202e}esuoh";
    let pulled = stage.domtool(&["disable-updates", reason]).await;
    assert!(pulled.status.success(), "{pulled:?}");
    let shown = exit_and_output(&stage.domtool(&["status"]).await).1;
    assert!(shown.contains("moving [2J  esuoh"), "{shown}");
    // Scripts get what was given.
    let shown = exit_and_output(&stage.domtool(&["status", "--format", "json"]).await).1;
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["brake"]["reason"], reason);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_brake_outlives_a_kill_and_holds_until_it_is_released() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let sub = FakeSub::new(tree(""));
    let record = stage.sub("host", &sub).await;

    let nameless = DisableUpdatesRequest { reason: " ".into(), who: "me".into() };
    let refused = stage.client.call::<DisableUpdates>(&nameless).await.unwrap_err();
    assert_eq!(refused.fault().unwrap().message, "say why updates are to be disabled");

    let pulled = stage.domtool(&["disable-updates", "moving house"]).await;
    assert!(pulled.status.success(), "{pulled:?}");
    stage.kill();
    stage.start().await;
    let brake = stage.status().await.brake.expect("the brake was kept");
    assert_eq!(brake.reason, "moving house");

    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    let detail = eventually_async("all objects are there", async || {
        let summary = stage.wait("host", Status::UpdatesDisabled, "base").await;
        let is_there = summary.detail.contains("all objects are there");
        if is_there { Ok(summary.detail) } else { Err(summary.detail) }
    })
    .await;
    assert_eq!(
        detail,
        "1 change: /one (missing), all objects are there; updates of all machines are disabled: \
         moving house"
    );
    let calls = sub.calls.lock().unwrap().clone();
    assert!(!calls.contains(&"prepare") && !calls.contains(&"commit"), "{calls:?}");
    assert_eq!(sub.model.lock().unwrap().sub.tree, tree(""));

    let released = stage.domtool(&["enable-updates", "moved"]).await;
    assert!(released.status.success(), "{released:?}");
    stage.wait("host", Status::Synced, "base").await;
    assert_eq!(sub.model.lock().unwrap().sub.tree, want);
    stage.kill();
    stage.start().await;
    assert_eq!(stage.status().await.brake, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_dominator_on_the_same_state_does_not_start() {
    let stage = Stage::new("[]").await;
    let mut command = stage.command();
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let (_, _, talk) = exit_and_output(&output);
    assert!(talk.contains("another dominator runs with this state directory"), "{talk}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_brake_does_not_wait_for_a_machine_that_does_not_answer() {
    let mut stage = Stage::new("[]").await;
    let want = tree(&file("/one", "1"));
    stage.images.add("base", &want, Some(&[]));
    let sub = FakeSub::new(tree(""));
    sub.ignores_commit.store(true, Ordering::SeqCst);
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"base\"}}]"));
    stage.wait("host", Status::Updating, "base").await;

    let started = Instant::now();
    let order = DisableUpdatesRequest { reason: "stop".into(), who: "me".into() };
    stage.client.call::<DisableUpdates>(&order).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    sub.ignores_commit.store(false, Ordering::SeqCst);
    let sent = || sub.calls.lock().unwrap().iter().filter(|call| **call == "commit").count();
    let before = sent();
    stage.wait("host", Status::UpdatesDisabled, "base").await;
    assert_eq!(sent(), before, "a Commit was sent after the brake was pulled");
    assert_eq!(sub.model.lock().unwrap().sub.tree, tree(""));

    let order = EnableUpdatesRequest { who: "me".into(), why: String::new() };
    stage.client.call::<EnableUpdates>(&order).await.unwrap();
    stage.wait("host", Status::Synced, "base").await;
    assert_eq!(sub.model.lock().unwrap().sub.tree, want);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_brake_can_be_pulled_on_a_full_disk_and_is_kept_once_there_is_room() {
    let mut stage = Stage::new("[]").await;
    stage.kill();
    stage.start_for_limits().await;

    let pulled = stage.domtool(&["disable-updates", "kept"]).await;
    assert!(pulled.status.success(), "{pulled:?}");
    stage.limit_files("4096");
    for reason in ["first", "second"] {
        let pulled = stage.domtool(&["disable-updates", reason]).await;
        let (_, _, talk) = exit_and_output(&pulled);
        assert!(talk.contains("updates are disabled, but only until"), "{talk}");
        assert!(talk.contains("File too large"), "{talk}");
        assert_eq!(stage.status().await.brake.unwrap().reason, reason);
    }
    let released = stage.domtool(&["enable-updates"]).await;
    assert!(!released.status.success(), "a kept brake would come back: {released:?}");
    assert_eq!(stage.status().await.brake.unwrap().reason, "second");

    stage.limit_files("unlimited");
    let pulled = stage.domtool(&["disable-updates", "third"]).await;
    assert!(pulled.status.success(), "{pulled:?}");
    stage.kill();
    stage.start().await;
    assert_eq!(stage.status().await.brake.unwrap().reason, "third");
}
