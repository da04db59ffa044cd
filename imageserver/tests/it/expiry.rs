//! Images that go by themselves, and images that are in use.

use std::path::Path;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::image_server::expiry::{
    AcceptClock, AcceptClockReply, ChangeExpiry, ChangeExpiryReply, ChangeExpiryRequest,
    HoldImages, HoldImagesRequest,
};
use api::image_server::{
    AddImage, AddImageRequest, DeleteImage, DeleteImageRequest, GetImage, GetImageRequest,
};
use model::image::{Image, Notes};
use model::tree::Time;

use crate::fixture::{Server, expected, fault, image_of, name, tree_of, until};

const SETTLED: [&str; 2] = ["--clock-settle", "0s"];

fn now() -> i64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_secs().cast_signed()
}

/// Adds an image that goes in so many seconds.
async fn add(server: &Server, image: &str, expires_in: Option<i64>) {
    let tree = tree_of(&[("/etc/a", b"a")]);
    server.upload_tree(&tree, &[b"a"]).await;
    let at = |seconds| Time { seconds: now() + seconds, nanoseconds: 0 };
    let notes = Notes { expires_at: expires_in.map(at), ..Notes::default() };
    let request = AddImageRequest { content: image_of(image, &tree), notes };
    server.client.call::<AddImage>(&request).await.unwrap();
}

async fn get(server: &Server, image: &str) -> Result<Image, Fault> {
    let request = GetImageRequest { name: name(image), wait_ms: 0 };
    server.client.call::<GetImage>(&request).await.map_err(fault)
}

async fn change(server: &Server, image: &str, seconds: Option<u32>) -> Result<Option<Time>, Fault> {
    let request = ChangeExpiryRequest { name: name(image), expires_in_seconds: seconds };
    let reply = server.client.call::<ChangeExpiry>(&request).await.map_err(fault);
    reply.map(|ChangeExpiryReply { expires_at }| expires_at)
}

async fn hold(server: &Server, holder: &str, images: &[&str], seconds: u32) {
    let names = images.iter().map(|image| name(image)).collect();
    let request = HoldImagesRequest { holder: holder.to_owned(), names, seconds };
    assert_eq!(server.client.call::<HoldImages>(&request).await.unwrap(), Done {});
}

async fn delete(server: &Server, image: &str, force: bool) -> Result<Done, Fault> {
    let request = DeleteImageRequest { name: name(image), force };
    server.client.call::<DeleteImage>(&request).await.map_err(fault)
}

#[tokio::test]
async fn an_image_goes_when_its_time_has_come_and_its_name_is_not_used_again() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &SETTLED);
    add(&server, "stays", None).await;
    add(&server, "later", Some(3_600)).await;
    add(&server, "goes", Some(1)).await;
    until(async || get(&server, "goes").await.is_err()).await;
    let text = "image goes has expired; a name is never used again, so take another";
    let gone = expected(FaultCode::Gone, text);
    assert_eq!(get(&server, "goes").await, Err(gone.clone()));
    let mark = std::fs::read_to_string(data.path().join("images/goes.deleted")).unwrap();
    assert!(mark.starts_with("expired at 2"), "{mark}");
    until(async || server.metric("dominator_images_expired_total") == "1").await;
    assert_eq!(server.metric("dominator_images_expiring"), "1");
    server.kill();

    let server = Server::start_with(data.path(), &SETTLED);
    let tree = tree_of(&[("/etc/a", b"a")]);
    assert_eq!(server.add(image_of("goes", &tree)).await, Err(gone));
    assert!(get(&server, "stays").await.is_ok() && get(&server, "later").await.is_ok());
}

#[tokio::test]
async fn an_expiry_is_put_off_durably_and_never_shortened() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &SETTLED);
    add(&server, "a/b", Some(3_600)).await;
    let former = get(&server, "a/b").await.unwrap();
    let extend_expiry = change(&server, "a/b", Some(7_200)).await.unwrap();
    assert!(
        (now() + 7_100..=now() + 7_200).contains(&extend_expiry.unwrap().seconds),
        "{extend_expiry:?}"
    );
    let refused = change(&server, "a/b", Some(60)).await.unwrap_err();
    assert_eq!(refused.code, FaultCode::BadRequest);
    let start = "the expiry of image a/b is not changed: it expires 2";
    assert!(refused.message.starts_with(start), "{}", refused.message);
    server.kill();

    let server = Server::start_with(data.path(), &SETTLED);
    let notes = Notes { expires_at: extend_expiry, ..former.notes };
    assert_eq!(get(&server, "a/b").await, Ok(Image { notes, content: former.content }));
    assert_eq!(change(&server, "a/b", None).await, Ok(None));
    let text = "the expiry of image a/b is not changed: it never expires, and what somebody may \
                rely on is not taken back: delete it when nobody needs it";
    let refused = expected(FaultCode::BadRequest, text);
    assert_eq!(change(&server, "a/b", Some(60)).await, Err(refused));
    let missing = expected(FaultCode::NotFound, "there is no image none");
    assert_eq!(change(&server, "none", None).await, Err(missing));
    assert_eq!(std::fs::read_dir(data.path().join("incoming")).unwrap().count(), 0);
}

/// Writes what a server kept whose clock was so many seconds ahead of the present one.
fn was_ahead(data: &Path, seconds: i64) {
    let text = std::fs::read_to_string(data.join("clock")).unwrap();
    let (before, offset) = text.trim_end().trim_end_matches('}').rsplit_once(':').unwrap();
    let offset: i64 = offset.parse().unwrap();
    std::fs::write(data.join("clock"), format!("{before}:{}}}\n", offset + seconds)).unwrap();
}

#[tokio::test]
async fn nothing_expires_after_the_clock_jumped_until_an_operator_says_that_it_is_right() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &SETTLED);
    until(async || data.path().join("clock").exists()).await;
    server.stop().await;
    was_ahead(data.path(), -86_400);
    let server = Server::start_with(data.path(), &SETTLED);
    until(async || server.metric("dominator_clock_jumped") == "1").await;
    add(&server, "goes", Some(1)).await;
    let page = server.get("/", "").text();
    assert!(page.contains("The clock jumped by 86"), "{page}");
    until(async || {
        now() > get(&server, "goes").await.unwrap().notes.expires_at.unwrap().seconds + 4
    })
    .await;
    assert!(get(&server, "goes").await.is_ok());

    let AcceptClockReply { jumped_seconds, .. } =
        server.client.call::<AcceptClock>(&Done {}).await.unwrap();
    assert!((86_340..=86_460).contains(&jumped_seconds), "{jumped_seconds}");
    until(async || get(&server, "goes").await.is_err()).await;
    assert_eq!(server.metric("dominator_clock_jumped"), "0");
    assert!(!server.get("/", "").text().contains("The clock jumped"));
    // What was accepted is so after a restart too.
    server.stop().await;
    let server = Server::start_with(data.path(), &SETTLED);
    add(&server, "goes/too", Some(1)).await;
    until(async || get(&server, "goes/too").await.is_err()).await;
}

#[tokio::test]
async fn an_image_in_use_is_deleted_only_by_force_and_does_not_expire() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &SETTLED);
    add(&server, "web/1", None).await;
    add(&server, "web/2", Some(1)).await;
    hold(&server, "dominator dom1:6970", &["web/1", "web/2"], 900).await;
    hold(&server, "dominator dom2:6970", &["web/2"], 900).await;
    let text = "image web/1 is in use: machines must have it or will get it next, says dominator \
                dom1:6970 (127.0.0.1)";
    let held = expected(FaultCode::Held, text);
    assert_eq!(delete(&server, "web/1", false).await, Err(held.clone()));
    until(async || server.metric("dominator_images_overdue") == "1").await;
    assert!(get(&server, "web/2").await.is_ok());
    assert!(server.get("/", "").text().contains("web/2 has expired, but it is in use"));
    assert_eq!(server.metric("dominator_images_held"), "2");
    server.kill();

    // A server that was restarted waits for what dominators say.
    let server = Server::start_with(data.path(), &SETTLED);
    let fault = delete(&server, "web/1", false).await.unwrap_err();
    let start = "image web/1 was in use before the image server was restarted, by dominator \
                 dom1:6970 (127.0.0.1): whether it still is will be known in ";
    assert_eq!(fault.code, FaultCode::Held);
    assert!(fault.message.starts_with(start), "{}", fault.message);
    hold(&server, "dominator dom1:6970", &["web/1"], 900).await;
    assert_eq!(delete(&server, "web/1", false).await, Err(held));
    hold(&server, "dominator dom1:6970", &["web/3"], 900).await;
    assert_eq!(delete(&server, "web/1", false).await, Ok(Done {}));
    hold(&server, "dominator dom2:6970", &[], 900).await;
    until(async || get(&server, "web/2").await.is_err()).await;
    add(&server, "web/3", None).await;
    assert_eq!(delete(&server, "web/3", true).await, Ok(Done {}));
}
