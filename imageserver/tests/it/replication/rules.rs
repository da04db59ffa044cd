//! What a replica takes, and what it never does: lose an image.

use api::image_server::expiry::{ChangeExpiry, ChangeExpiryRequest, HoldImages, HoldImagesRequest};
use api::image_server::notes::{CopyImage, CopyImageRequest};
use api::image_server::replication::{DropCopy, DropCopyRequest};

use super::*;

async fn drop_copy(server: &Server, image: &str) -> Result<(), Fault> {
    let request = DropCopyRequest { name: name(image), force: false };
    server.client.call::<DropCopy>(&request).await.map(drop).map_err(fault)
}

async fn hold(server: &Server, names: &[&str]) {
    let names = names.iter().map(|text| name(text)).collect();
    let request = HoldImagesRequest { holder: "dom1".to_owned(), names, seconds: 600 };
    server.client.call::<HoldImages>(&request).await.unwrap();
}

#[tokio::test]
async fn an_empty_master_and_one_that_lost_its_images_cost_nothing() {
    let data = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    add(&root, "base/1").await.unwrap();
    add(&root, "base/2").await.unwrap();
    let old = replica(data[1].path(), &address(&root), &[]);
    until_level(&old).await;
    old.stop().await;
    root.stop().await;

    let empty = Server::start(data[2].path());
    let old = replica(data[1].path(), &address(&empty), &[]);
    until_level(&old).await;
    assert_eq!(names(&old).await, ["base/1", "base/2"]);
    let master = master_of(&old).await;
    assert_eq!(master.only_here, [name("base/1"), name("base/2")]);
    until(async || old.logged("the master lacks images that are here")).await;
    assert_eq!(old.metric("dominator_replication_only_here"), "2");

    // The same image can be given to the new master, over the replica that has it.
    add(&old, "base/1").await.unwrap();
    assert_eq!(names(&empty).await, ["base/1"]);
    until(async || master_of(&old).await.only_here == [name("base/2")]).await;
    // Another of the name cannot.
    let refused = add_of(&old, "base/2", b"another").await.unwrap_err();
    assert_eq!(refused.code, FaultCode::Exists);
    assert_eq!(names(&empty).await, ["base/1"]);
}

#[tokio::test]
async fn names_that_mean_different_images_are_told_and_nothing_is_overwritten() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mine = Server::start(data[1].path());
    let kept = add_of(&mine, "both/1", b"mine").await.unwrap();
    let kept_2 = add_of(&mine, "both/2", b"mine too").await.unwrap();
    add_of(&mine, "gone/1", b"mine").await.unwrap();
    delete(&mine, "gone/1", false).await.unwrap();
    mine.stop().await;
    let root = Server::start(data[0].path());
    let theirs = add_of(&root, "both/1", b"theirs").await.unwrap();
    add_of(&root, "both/2", b"theirs too").await.unwrap();
    delete(&root, "both/2", false).await.unwrap();
    add_of(&root, "gone/1", b"theirs").await.unwrap();
    let replica = replica(data[1].path(), &address(&root), &[]);
    until_level(&replica).await;
    let expected = [
        ("both/1".to_owned(), ReplicationTrouble::Conflict),
        ("both/2".to_owned(), ReplicationTrouble::EndedOther),
        ("gone/1".to_owned(), ReplicationTrouble::EndedHere),
    ];
    until(async || troubles(&replica).await == expected).await;
    assert_eq!(get(&replica, "both/1").await.unwrap().content, kept);
    assert_eq!(get(&replica, "both/2").await.unwrap().content, kept_2);
    assert_eq!(replica.metric("dominator_replication_conflicts"), "3");
    until(async || replica.logged("both/1 is another image here than on the master")).await;
    assert!(replica.get("/", "").text().contains("Images that are not as on the master"));

    // An operator drops the copy: then that of the master comes.
    drop_copy(&replica, "both/1").await.unwrap();
    until(async || get(&replica, "both/1").await.is_ok_and(|image| image.content == theirs)).await;
    until(async || troubles(&replica).await == expected[1..]).await;
    // What would come again at once is not dropped.
    let refused = drop_copy(&replica, "both/1").await.unwrap_err();
    assert_eq!(refused.code, FaultCode::BadRequest);
    let refused = drop_copy(&root, "both/1").await.unwrap_err();
    assert!(refused.message.starts_with("this server is no replica"), "{}", refused.message);
}

#[tokio::test]
async fn patterns_say_what_is_followed_and_what_is_not_stays() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    for image in ["base/1", "base/debug-1", "web/1"] {
        add(&root, image).await.unwrap();
    }
    let flags = ["--replicate-include", "base/*", "--replicate-exclude", "**/debug*"];
    let some = replica(data[1].path(), &address(&root), &flags);
    until_level(&some).await;
    assert_eq!(names(&some).await, ["base/1"]);
    some.stop().await;
    let all = replica(data[1].path(), &address(&root), &[]);
    until_names(&all, &["base/1", "base/debug-1", "web/1"]).await;
    all.stop().await;
    // A pattern more deletes nothing, and what is not followed does not change.
    delete(&root, "web/1", false).await.unwrap();
    let some = replica(data[1].path(), &address(&root), &flags);
    until_level(&some).await;
    assert_eq!(names(&some).await, ["base/1", "base/debug-1", "web/1"]);
    assert_eq!(master_of(&some).await.not_followed, 2);
    drop_copy(&some, "web/1").await.unwrap();
    assert_eq!(names(&some).await, ["base/1", "base/debug-1"]);
    // What is added here and not followed is on the master alone.
    add(&some, "web/2").await.unwrap();
    assert_eq!(names(&root).await, ["base/1", "base/debug-1", "web/2"]);
    assert_eq!(names(&some).await, ["base/1", "base/debug-1"]);
}

#[tokio::test]
async fn an_archive_keeps_what_ends_and_stays_an_archive() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start_with(data[0].path(), &["--clock-settle", "0s"]);
    add(&root, "base/1").await.unwrap();
    add(&root, "base/2").await.unwrap();
    let copy =
        CopyImageRequest { from: name("base/1"), to: name("short/1"), expires_in_seconds: Some(3) };
    root.client.call::<CopyImage>(&copy).await.unwrap();
    let archive = replica(data[1].path(), &address(&root), &["--replicate-archive"]);
    until_names(&archive, &["base/1", "base/2", "short/1"]).await;
    assert_eq!(get(&archive, "short/1").await.unwrap().notes.expires_at, None);
    delete(&root, "base/2", false).await.unwrap();
    until(async || get(&root, "short/1").await == Err(FaultCode::Gone)).await;
    add(&root, "base/3").await.unwrap();
    until_names(&archive, &["base/1", "base/2", "base/3", "short/1"]).await;
    until_level(&archive).await;
    archive.stop().await;

    let mut command = crate::fixture::command(data[1].path());
    let output = command.args(["--replicate-from", &address(&root)]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("is that of an archive"), "{text}");
    let archive = replica(data[1].path(), &address(&root), &["--replicate-archive"]);
    until_level(&archive).await;
    assert_eq!(names(&archive).await, ["base/1", "base/2", "base/3", "short/1"]);
}

#[tokio::test]
async fn what_expires_on_the_master_ends_on_the_replica_and_its_own_clock_ends_nothing() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start_with(data[0].path(), &["--clock-settle", "0s"]);
    let link = links::Proxy::to(root.address).await;
    add(&root, "base/1").await.unwrap();
    let copy = |to: &str, seconds| {
        let to = name(to);
        CopyImageRequest { from: name("base/1"), to, expires_in_seconds: Some(seconds) }
    };
    root.client.call::<CopyImage>(&copy("short/1", 3)).await.unwrap();
    root.client.call::<CopyImage>(&copy("short/2", 3)).await.unwrap();
    let replica = replica(data[1].path(), &link.text(), &["--clock-settle", "0s"]);
    until_names(&replica, &["base/1", "short/1", "short/2"]).await;
    link.cut();
    let extend_expiry = ChangeExpiryRequest { name: name("short/2"), expires_in_seconds: None };
    root.client.call::<ChangeExpiry>(&extend_expiry).await.unwrap();
    until(async || get(&root, "short/1").await == Err(FaultCode::Gone)).await;
    // By its clock both should have gone.
    assert_eq!(names(&replica).await, ["base/1", "short/1", "short/2"]);
    link.mark_repaired(root.address).await;
    until_names(&replica, &["base/1", "short/2"]).await;
    until(async || {
        get(&replica, "short/2").await.is_ok_and(|image| image.notes.expires_at.is_none())
    })
    .await;
    assert_eq!(get(&replica, "short/1").await, Err(FaultCode::Gone));
}

#[tokio::test]
async fn what_is_in_use_on_a_replica_stays_there_until_it_is_not() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    add(&root, "base/1").await.unwrap();
    let replica = replica(data[1].path(), &address(&root), &[]);
    until_level(&replica).await;
    hold(&replica, &["base/1"]).await;
    // Over the replica it is refused, as it knows who uses it.
    let refused = delete(&replica, "base/1", false).await.unwrap_err();
    assert_eq!(refused.code, FaultCode::Held);
    delete(&root, "base/1", false).await.unwrap();
    until(async || troubles(&replica).await == [("base/1".to_owned(), ReplicationTrouble::Held)])
        .await;
    assert_eq!(names(&replica).await, ["base/1"]);
    hold(&replica, &[]).await;
    until_names(&replica, &[]).await;
    assert_eq!(get(&replica, "base/1").await, Err(FaultCode::Gone));
    until(async || troubles(&replica).await.is_empty()).await;

    // Who means it asks the replica that knows.
    add(&replica, "base/2").await.unwrap();
    hold(&replica, &["base/2"]).await;
    delete(&replica, "base/2", true).await.unwrap();
    assert_eq!(names(&replica).await, Vec::<String>::new());
    assert_eq!(get(&root, "base/2").await, Err(FaultCode::Gone));
}

#[tokio::test]
async fn servers_that_follow_each_other_in_a_circle_say_so_and_change_nothing() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let link = links::Proxy::to("127.0.0.1:1".parse().unwrap()).await;
    let one = replica(data[0].path(), &link.text(), &[]);
    let two = replica(data[1].path(), &address(&one), &[]);
    link.mark_repaired(two.address).await;
    for server in [&one, &two] {
        until(async || master_of(server).await.link.name() == "loop").await;
        let (_, why) = master_of(server).await.last_error.unwrap();
        assert!(why.contains("is its own master"), "{why}");
    }
    let refused = add(&one, "base/1").await.unwrap_err();
    assert_eq!(refused.code, FaultCode::Unavailable);
    assert!(refused.message.starts_with("nothing can be changed"), "{}", refused.message);
    // One of them follows no more.
    two.stop().await;
    let two = Server::start(data[1].path());
    link.mark_repaired(two.address).await;
    until(async || master_of(&one).await.is_level).await;
    add(&one, "base/1").await.unwrap();
    assert_eq!(names(&two).await, ["base/1"]);
}
