//! Changes that a replica is asked for, and that its master makes.

use api::image_server::expiry::{ChangeExpiry, ChangeExpiryRequest};
use api::image_server::notes::{CopyImage, CopyImageRequest};

use super::*;

#[tokio::test]
async fn changes_go_up_two_hops_and_are_seen_where_they_were_asked_for() {
    let data = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    let middle = replica(data[1].path(), &address(&root), &[]);
    let last = replica(data[2].path(), &address(&middle), &[]);
    until_level(&last).await;
    add(&last, "base/1").await.unwrap();
    for server in [&root, &middle, &last] {
        assert_eq!(names(server).await, ["base/1"]);
    }
    let image = get(&root, "base/1").await.unwrap();
    assert_eq!(image.notes.created_by, "127.0.0.1");
    assert_eq!(get(&last, "base/1").await.unwrap(), image);

    // Only what is new travels.
    let sent: u64 = last.metric("dominator_objects_sent_bytes_total").parse().unwrap();
    add(&last, "base/2").await.unwrap();
    let more: u64 = last.metric("dominator_objects_sent_bytes_total").parse().unwrap();
    assert!(more - sent < 10_000, "{}", more - sent);

    set_tag(&last, "base/2", "tested", "yes").await.unwrap();
    let tags = get(&last, "base/2").await.unwrap().notes.tags;
    assert_eq!(tags, [("tested".to_owned(), "yes".to_owned())].into());
    let content = get(&last, "base/2").await.unwrap().content;
    let signature = crate::notes::sign(0, &content, 1);
    crate::notes::change(&last, "base/2", &[signature], &[]).await.unwrap();
    assert_eq!(get(&last, "base/2").await.unwrap().notes.signatures.len(), 1);
    let copy = CopyImageRequest {
        from: name("base/2"),
        to: name("base/3"),
        expires_in_seconds: Some(3_600),
    };
    last.client.call::<CopyImage>(&copy).await.unwrap();
    let longer = ChangeExpiryRequest { name: name("base/3"), expires_in_seconds: None };
    last.client.call::<ChangeExpiry>(&longer).await.unwrap();
    assert_eq!(get(&last, "base/3").await.unwrap().notes.expires_at, None);
    delete(&last, "base/1", false).await.unwrap();
    assert_eq!(names(&last).await, ["base/2", "base/3"]);
    expect_same(&root, &middle).await;
    expect_same(&root, &last).await;

    // The caller gets the master's answer, from wherever it comes.
    let gone = add(&last, "base/1").await.unwrap_err();
    assert_eq!(gone.code, FaultCode::Gone);
    let missing = set_tag(&last, "base/9", "a", "b").await.unwrap_err();
    let text = format!(
        "there is no image base/9 (says {}, the master of this replica) (says {}, the master of \
         this replica)",
        root.address, middle.address
    );
    assert_eq!(missing, Fault::new(FaultCode::NotFound, text));
    // What is not complete is not sent at all.
    let tree = tree_of(&[("/etc/release", b"never uploaded")]);
    let refused = last.add(image_of("base/4", &tree)).await.unwrap_err();
    assert_eq!(refused.code, FaultCode::NotFound);
    assert!(!refused.message.contains("says"), "{}", refused.message);
}

#[tokio::test]
async fn of_two_replicas_that_add_one_name_at_one_time_one_is_refused() {
    let data = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    let [one, two] = [&data[1], &data[2]].map(|data| replica(data.path(), &address(&root), &[]));
    until_level(&one).await;
    until_level(&two).await;
    let (first, second) =
        tokio::join!(add_of(&one, "base/1", b"one"), add_of(&two, "base/1", b"two"));
    let (won, lost) = match (first, second) {
        (Ok(won), Err(lost)) | (Err(lost), Ok(won)) => (won, lost),
        other => panic!("{other:?}"),
    };
    assert_eq!(lost.code, FaultCode::Exists);
    for server in [&root, &one, &two] {
        until_names(server, &["base/1"]).await;
        assert_eq!(get(server, "base/1").await.unwrap().content, won);
    }
}

#[tokio::test]
async fn a_change_is_refused_while_the_master_is_away_and_reading_goes_on() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    add(&root, "base/1").await.unwrap();
    let replica = replica(data[1].path(), &address(&root), &[]);
    until_level(&replica).await;
    let master = address(&root);
    root.kill();
    let refused = add(&replica, "base/2").await.unwrap_err();
    assert_eq!(refused.code, FaultCode::Unavailable);
    let start = format!("this server is a replica of {master}, which decides on changes and ");
    assert!(refused.message.starts_with(&start), "{}", refused.message);
    assert_eq!(names(&replica).await, ["base/1"]);
    assert!(get(&replica, "base/1").await.is_ok());
}
