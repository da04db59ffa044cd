//! The whole loop between the real dominator and subs behind sockets.

use std::time::{Duration, Instant};

use api::dominator::Status;
use testing::eventually_async;

use crate::fake::{FakeSub, file, tree};
use crate::stage::{Stage, wait_until};

/// A tree of two hundred files, `changed` of which have another content.
fn numbered(changed: usize) -> model::tree::Tree {
    let mut text = String::from("d 755 0:0 /d\n");
    for number in 0..200 {
        let content = if number < changed { "new" } else { "old" };
        text.push_str(&file(&format!("/d/f{number:03}"), content));
    }
    tree(&text)
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_follow_the_database_and_drift_is_repaired() {
    let mut stage = Stage::new("[]").await;
    stage.images.add("base/1", &numbered(0), Some(&[]));
    stage.images.add("base/2", &numbered(50), Some(&[]));
    let subs: Vec<FakeSub> = (0..3).map(|_| FakeSub::new(tree(""))).collect();
    let mut records = Vec::new();
    for (number, sub) in subs.iter().enumerate() {
        records.push(stage.sub(&format!("host{number}"), sub).await);
    }
    let mdb = |image: &str| {
        let machines: Vec<String> = records
            .iter()
            .map(|record| format!("{{{record}, \"RequiredImage\": \"{image}\"}}"))
            .collect();
        format!("[{}]", machines.join(",\n"))
    };

    stage.write_mdb(&mdb("base/1"));
    for (number, sub) in subs.iter().enumerate() {
        let summary = stage.wait(&format!("host{number}"), Status::Synced, "base/1").await;
        assert_eq!(summary.last_image, "base/1");
        assert_eq!(summary.detail, "equals base/1");
        assert_eq!(sub.model.lock().unwrap().sub.tree, numbered(0));
    }

    let started = Instant::now();
    stage.write_mdb(&mdb("base/2"));
    for number in 0..3 {
        stage.wait(&format!("host{number}"), Status::Synced, "base/2").await;
    }
    let took = started.elapsed();
    println!("50 files, from the edit to synced: {took:?}");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert!(subs.iter().all(|sub| sub.model.lock().unwrap().sub.tree == numbered(50)));

    // Someone changes a file, and it is put right.
    subs[1].change(numbered(51));
    let is_repaired = async || subs[1].model.lock().unwrap().sub.tree == numbered(50);
    wait_until("the drift is repaired", is_repaired).await;
    stage.wait("host1", Status::Synced, "base/2").await;
    let calls = subs[1].calls.lock().unwrap().clone();
    let updates = calls.iter().filter(|call| **call == "commit").count();
    assert_eq!(updates, 3, "one for each image and one for the drift: {calls:?}");
    assert!(stage.terminate().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_comes_later_is_waited_for() {
    let mut stage = Stage::new("[]").await;
    let sub = FakeSub::new(tree(""));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"late\"}}]"));
    // First it is asked for.
    let not_there = "the image server has no image late yet";
    let is_missed =
        async || stage.wait("host", Status::ImageNotReady, "late").await.detail == not_there;
    wait_until("the image is missed", is_missed).await;
    stage.images.add("late", &numbered(1), Some(&[]));
    stage.wait("host", Status::Synced, "late").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_deleted_goes_to_no_other_machine() {
    let mut stage = Stage::new("[]").await;
    let subs: Vec<FakeSub> = (0..4).map(|_| FakeSub::new(tree(""))).collect();
    let mut records = Vec::new();
    for (number, sub) in subs.iter().enumerate() {
        let image = ["bad", "lost"][number % 2];
        let record = stage.sub(&format!("host{number}"), sub).await;
        records.push(format!("{{{record}, \"RequiredImage\": \"{image}\"}}"));
    }
    for image in ["bad", "lost"] {
        stage.images.add(image, &numbered(1), Some(&[]));
    }
    stage.write_mdb(&format!("[{}]", records[..2].join(",")));
    stage.wait("host0", Status::Synced, "bad").await;
    stage.wait("host1", Status::Synced, "lost").await;
    stage.images.delete("bad");
    // As if another server were in its place.
    stage.images.lose("lost");
    let deleted = "the image bad was deleted: its name is never used again";
    let summary = stage.wait("host0", Status::ImageNotReady, "bad").await;
    assert_eq!(summary.detail, deleted);
    let remark = "lost, for 1 machine: is not on the image server, which may be the wrong one or \
                  empty: machines that lack files of the image cannot be updated to it";
    let remarks = [format!("bad, for 1 machine: {deleted}"), remark.to_owned()];
    eventually_async("both are told", async || {
        let told = stage.status().await.image_remarks;
        if told == remarks { Ok(()) } else { Err(told) }
    })
    .await;
    stage.write_mdb(&format!("[{}]", records.join(",")));
    stage.wait("host2", Status::ImageNotReady, "bad").await;
    stage.wait("host3", Status::Synced, "lost").await;
    assert!(!subs[2].calls.lock().unwrap().contains(&"commit"));
    stage.wait("host1", Status::Synced, "lost").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_with_another_content_than_before_is_not_used_until_it_is_accepted() {
    let mut stage = Stage::new("[]").await;
    let subs: Vec<FakeSub> = (0..2).map(|_| FakeSub::new(tree(""))).collect();
    let mut records = Vec::new();
    for (number, sub) in subs.iter().enumerate() {
        let record = stage.sub(&format!("host{number}"), sub).await;
        records.push(format!("{{{record}, \"RequiredImage\": \"web/1\"}}"));
    }
    stage.images.add("web/1", &numbered(1), Some(&[]));
    stage.write_mdb(&format!("[{}]", records[0]));
    stage.wait("host0", Status::Synced, "web/1").await;
    let first = stage.images.image("web/1").unwrap().content.digest();
    // Restored from an older backup, and the name is used again.
    stage.images.lose("web/1");
    stage.images.add("web/1", &numbered(2), Some(&[]));
    let second = stage.images.image("web/1").unwrap().content.digest();
    let changed = format!(
        "image-changed: the image server has the content {second} under the name web/1, which was \
         used with {first}; no machine gets it before an operator says that it is right: domtool \
         accept-image web/1 --why TEXT"
    );
    let is_told = async |stage: &Stage, machines: &str| {
        let wanted = [format!("web/1, for {machines}: {changed}")];
        eventually_async("it is told", async || {
            let told = stage.status().await.image_remarks;
            if told == wanted { Ok(()) } else { Err(told) }
        })
        .await;
    };
    is_told(&stage, "1 machine").await;
    // What runs goes on with what it has.
    stage.write_mdb(&format!("[{}]", records.join(",")));
    stage.wait("host1", Status::Synced, "web/1").await;
    is_told(&stage, "2 machines").await;
    let commits = || subs.iter().map(|sub| sub.commits.lock().unwrap().len()).sum::<usize>();
    assert_eq!(commits(), 2);

    assert!(stage.terminate().success());
    stage.start().await;
    is_told(&stage, "2 machines").await;
    let summary = stage.wait("host0", Status::ImageNotReady, "web/1").await;
    assert_eq!(summary.detail, changed);
    let refused = stage.domtool(&["accept-image", "web/2", "--why", "right"]).await;
    assert!(String::from_utf8_lossy(&refused.stderr).contains("web/2 has not changed"));
    assert_eq!(commits(), 2);
    let accepted = stage.domtool(&["accept-image", "web/1", "--why", "right"]).await;
    assert!(accepted.status.success(), "{accepted:?}");
    for (number, sub) in subs.iter().enumerate() {
        wait_until("it gets the new content", async || sub.commits.lock().unwrap().len() == 2)
            .await;
        stage.wait(&format!("host{number}"), Status::Synced, "web/1").await;
    }
    // That is known after a kill, too.
    stage.kill();
    stage.start().await;
    stage.wait("host0", Status::Synced, "web/1").await;
    assert_eq!(stage.status().await.image_remarks, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_without_an_image_is_only_watched() {
    let mut stage = Stage::new("[]").await;
    let sub = FakeSub::new(numbered(0));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"PlannedImage\": \"next\"}}]"));
    let summary = stage.wait("host", Status::ImageUndefined, "").await;
    assert_eq!(summary.planned_image, "next");
    assert_eq!(*sub.calls.lock().unwrap(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unsafe_update_waits_for_an_operator() {
    let mut stage = Stage::new("[]").await;
    stage.images.add("small", &tree(&file("/one", "1")), Some(&[]));
    let sub = FakeSub::new(numbered(0));
    let record = stage.sub("host", &sub).await;
    stage.write_mdb(&format!("[{{{record}, \"RequiredImage\": \"small\"}}]"));
    let summary = stage.wait("host", Status::UnsafeUpdate, "small").await;
    assert_eq!(
        summary.detail,
        "it would remove 201 of 201 entries, the image has 1 entries, the machine 201; if that is \
         intended: domtool clear-safety-shutoff host"
    );
    let detail = stage.show("host").await;
    assert_eq!(detail.plan_operations, 202);
    let refused = stage.domtool(&["clear-safety-shutoff", "nobody"]).await;
    assert_eq!(refused.status.code(), Some(1));
    let cleared = stage.domtool(&["clear-safety-shutoff", "host"]).await;
    assert!(cleared.status.success(), "{cleared:?}");
    stage.wait("host", Status::Synced, "small").await;
    assert_eq!(sub.model.lock().unwrap().sub.tree, tree(&file("/one", "1")));
    let again = stage.domtool(&["clear-safety-shutoff", "host"]).await;
    assert_eq!(again.status.code(), Some(1), "{again:?}");
}
