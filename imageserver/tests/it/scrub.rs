//! Reading the store in the background, and what comes of what it finds.

use rpc::tls::Security;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::object_server::{AddObjectsReply, GetObjects, GetObjectsRequest};
use api::object_stream::ObjectHead;
use rpc::server::{Router, head_bytes, serve};
use tokio_util::sync::CancellationToken;

use crate::fixture::{
    ALGORITHM, Server, directories, files_in, flip, image_of, stored, tree_of, until,
};

/// Reads all again and again.
const ALWAYS: [&str; 4] = ["--scrub-every", "1s", "--scrub-rate", "1000"];

fn large() -> Vec<u8> {
    (0..2_000_000_u32).map(|index| (index % 249) as u8).collect()
}

async fn with_image(data: &Path, flags: &[&str]) -> Server {
    let server = Server::start_with(data, flags);
    let large = large();
    let tree = tree_of(&[("/etc/small", b"small"), ("/usr/large", &large)]);
    server.upload_tree(&tree, &[b"small", &large]).await;
    server.add(image_of("web/1", &tree)).await.unwrap();
    server
}

fn damage(server: &Server) -> [String; 2] {
    ["dominator_objects_lost", "dominator_images_incomplete"].map(|name| server.metric(name))
}

#[tokio::test]
async fn what_is_corrupt_is_found_named_and_repaired_by_an_upload() {
    let data = tempfile::tempdir().unwrap();
    let server = with_image(data.path(), &ALWAYS).await;
    let large = large();
    let tree = tree_of(&[("/etc/small", b"small"), ("/usr/large", &large)]);
    let ids = [ALGORITHM.digest(&large), ALGORITHM.digest(b"small"), directories(&tree)[1].0];
    assert_eq!(damage(&server), ["0", "0"]);
    for id in &ids {
        flip(&stored(data.path(), id));
    }
    // Nobody asks for them.
    until(async || files_in(data.path().join("quarantine")) == 3).await;
    // What is below a directory that is lost is not known to be needed.
    until(async || damage(&server) == ["2", "1"]).await;
    let page = server.get("/", "").text();
    assert!(page.contains("<h2>Lost objects</h2>"), "{page}");
    assert!(page.contains("which 1 image cannot do without"), "{page}");
    assert!(page.contains("web/1"), "{page}");
    assert_eq!(server.missing(&ids).await, ids);

    let encoding = &directories(&tree)[1].1;
    let reply = server.upload(&[&large, b"small", encoding]).await;
    assert_eq!(reply, AddObjectsReply { added: 3, added_bytes: reply.added_bytes, known: 0 });
    until(async || damage(&server) == ["0", "0"]).await;
    assert!(!server.get("/", "").text().contains("Lost objects"));
    server.stop().await;
}

#[tokio::test]
async fn what_was_put_aside_before_a_restart_is_still_lost_after_it() {
    let data = tempfile::tempdir().unwrap();
    let server = with_image(data.path(), &["--scrub-every", "0s"]).await;
    let small = ALGORITHM.digest(b"small");
    flip(&stored(data.path(), &small));
    assert_eq!(server.fetch(&[small]).await, [(small, None)]);
    until(async || damage(&server) == ["1", "1"]).await;
    server.stop().await;
    let server = Server::start_with(data.path(), &["--scrub-every", "0s"]);
    until(async || damage(&server) == ["1", "1"]).await;
    server.upload(&[b"small"]).await;
    until(async || damage(&server) == ["0", "0"]).await;
    server.stop().await;
    // A quarantine is for people: it is no alarm once the object is back.
    let server = Server::start_with(data.path(), &["--scrub-every", "0s"]);
    assert_eq!(files_in(data.path().join("quarantine")), 1);
    assert_eq!(server.missing(&[small]).await, []);
    assert_eq!(damage(&server), ["0", "0"]);
}

#[tokio::test]
async fn what_is_lost_comes_from_another_server() {
    let (data, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let replica = with_image(other.path(), &["--scrub-every", "0s"]).await;
    let address = replica.address.to_string();
    let flags = [&ALWAYS[..], &["--repair-from", &address]].concat();
    let server = with_image(data.path(), &flags).await;
    let large = large();
    let ids = [ALGORITHM.digest(&large), ALGORITHM.digest(b"small")];
    flip(&stored(data.path(), &ids[0]));
    std::fs::remove_file(stored(data.path(), &ids[1])).unwrap();
    testing::eventually_async("both are repaired", async || {
        match (server.metric("dominator_objects_repaired_total"), damage(&server)) {
            (repaired, damage) if repaired == "2" && damage == ["0", "0"] => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
    let want = [(ids[0], Some(large.clone())), (ids[1], Some(b"small".to_vec()))];
    assert_eq!(server.fetch(&ids).await, want);
    assert_eq!(files_in(data.path().join("quarantine")), 1);
    assert_eq!(files_in(data.path().join("incoming")), 0);
}

#[tokio::test]
async fn a_replica_that_has_not_got_it_repairs_nothing() {
    let (data, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let replica = Server::start(other.path());
    let address = replica.address.to_string();
    let flags = [&ALWAYS[..], &["--repair-from", &address]].concat();
    let server = with_image(data.path(), &flags).await;
    let small = ALGORITHM.digest(b"small");
    flip(&stored(data.path(), &small));
    until(async || replica.metric("dominator_objects_absent_total") == "1").await;
    assert_eq!(damage(&server), ["1", "1"]);
    assert_eq!(server.missing(&[small]).await, [small]);
    server.stop().await;
}

/// A server that answers with another object, and then with other content.
async fn liar() -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let asked = AtomicUsize::new(0);
    let router = Router::new("liar", &Security::Insecure).download::<GetObjects, _, _>(
        move |(), _, request: GetObjectsRequest| {
            let id = match asked.fetch_add(1, Ordering::Relaxed) {
                0 => ALGORITHM.digest(b"lie"),
                _ => request.ids[0],
            };
            let head = head_bytes(&ObjectHead::Object { id, size_bytes: 3 });
            let chunks = [head, "lie".into(), head_bytes(&ObjectHead::End)];
            let stream = futures_util::stream::iter(chunks.map(Ok::<_, std::io::Error>));
            async move { Ok(stream) }
        },
    );
    tokio::spawn(serve(listener, router, CancellationToken::new()));
    address
}

#[tokio::test]
async fn a_replica_that_lies_repairs_nothing_and_stores_nothing() {
    let data = tempfile::tempdir().unwrap();
    let address = liar().await.to_string();
    let server = with_image(data.path(), &["--scrub-every", "0s", "--repair-from", &address]).await;
    let ids = [&large()[..], b"small", b"lie"].map(|content| ALGORITHM.digest(content));
    for (id, lost) in ids.iter().zip(["1", "2"]) {
        flip(&stored(data.path(), id));
        assert_eq!(server.fetch(&[*id]).await, [(*id, None)]);
        until(async || server.metric("dominator_objects_lost") == lost).await;
    }
    until(async || server.logged("was not requested")).await;
    let wrong = format!("the content sent as {} hashes to {}", ids[1], ids[2]);
    until(async || server.logged(&wrong)).await;
    assert_eq!(server.missing(&ids).await, ids);
    assert_eq!(server.metric("dominator_objects_repaired_total"), "0");
    server.stop().await;
    assert_eq!(files_in(data.path().join("incoming")), 0);
}

#[tokio::test]
async fn a_pass_that_is_done_is_not_made_again_after_a_restart() {
    let data = tempfile::tempdir().unwrap();
    let server = with_image(data.path(), &["--scrub-rate", "1000"]).await;
    let completed = "dominator_scrub_completed_timestamp_seconds";
    until(async || server.metric(completed) != "0").await;
    let when = server.metric(completed);
    assert_eq!(server.metric("dominator_scrub_directories"), "512");
    server.stop().await;
    let server = Server::start(data.path());
    until(async || server.metric(completed) == when).await;
    until(async || server.metric("dominator_scrub_directories") == "512").await;
    assert_eq!(server.metric("dominator_scrub_bytes_total"), "0");
    server.stop().await;
}

/// A server that is killed may have left objects that have their length, and not their content.
#[tokio::test]
async fn what_a_killed_server_has_left_is_read_before_it_is_believed() {
    let data = tempfile::tempdir().unwrap();
    let never = ["--scrub-every", "0s"];
    let server = Server::start_with(data.path(), &never);
    let large = large();
    let tree = tree_of(&[("/etc/small", b"small"), ("/usr/large", &large)]);
    server.upload_tree(&tree, &[b"small", &large]).await;
    server.kill();
    let ids = [ALGORITHM.digest(&large), ALGORITHM.digest(b"small")];
    for id in &ids {
        flip(&stored(data.path(), id));
    }
    let server = Server::start_with(data.path(), &never);
    let fault = server.add(image_of("web/1", &tree)).await.unwrap_err();
    assert!(fault.message.contains("is not on this server (1 more are missing)"), "{fault:?}");
    assert_eq!(server.missing(&ids).await, ids);
    assert_eq!(server.upload(&[b"small", &large]).await.added, 2);
    server.add(image_of("web/1", &tree)).await.unwrap();

    // Until all was read once from the beginning.
    server.kill();
    let server = Server::start_with(data.path(), &ALWAYS);
    until(async || server.metric("dominator_scrub_completed_timestamp_seconds") != "0").await;
    server.upload(&[b"more"]).await;
    server.stop().await;
    assert!(!data.path().join("unsynced").exists());
}
