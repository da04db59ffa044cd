//! Servers that are killed, uploads that are cut, and two servers on one directory.

use api::image_server::{ListImages, ListImagesRequest};
use api::object_server::{AddObjects, AddObjectsReply};
use api::object_stream::ObjectHead;
use bytes::Bytes;
use rpc::server::head_bytes;
use tokio::sync::mpsc;

use crate::fixture::{
    ALGORITHM, Server, command, directories, files_in, image_of, object, tree_of, until,
};

/// Starts an upload of `complete` objects and the beginning of one more, and waits until the
/// server has kept the complete ones. The upload then waits for more.
async fn begin_upload(
    server: &Server,
    complete: &[Vec<u8>],
    partial: &[u8],
) -> (mpsc::Sender<Result<Bytes, std::io::Error>>, tokio::task::JoinHandle<()>) {
    let (sender, mut receiver) = mpsc::channel(1);
    let body = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
    let client = server.client.clone();
    let upload = tokio::spawn(async move {
        client.upload::<AddObjects>(body).await.unwrap_err();
    });
    for content in complete {
        for chunk in object(content) {
            sender.send(Ok(chunk)).await.unwrap();
        }
    }
    let id = ALGORITHM.digest(partial);
    let head = ObjectHead::Object { id, size_bytes: partial.len() as u64 };
    sender.send(Ok(head_bytes(&head))).await.unwrap();
    let half = Bytes::copy_from_slice(&partial[..partial.len() / 2]);
    sender.send(Ok(half)).await.unwrap();
    let ids: Vec<_> = complete.iter().map(|content| ALGORITHM.digest(content)).collect();
    until(async || server.missing(&ids).await.is_empty()).await;
    (sender, upload)
}

fn contents() -> Vec<Vec<u8>> {
    (0..20u8).map(|seed| vec![seed; 1_000 + usize::from(seed) * 10_000]).collect()
}

#[tokio::test]
async fn an_upload_whose_server_is_killed_leaves_nothing_but_complete_objects() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let contents = contents();
    let partial = vec![99; 3_000_000];
    let (sender, upload) = begin_upload(&server, &contents[..10], &partial).await;
    until(async || files_in(data.path().join("incoming")) == 1).await;
    server.kill();
    upload.await.unwrap();
    drop(sender);
    assert_eq!(files_in(data.path().join("incoming")), 1);

    let server = Server::start(data.path());
    assert_eq!(files_in(data.path().join("incoming")), 0);
    let mut ids: Vec<_> = contents.iter().map(|content| ALGORITHM.digest(content)).collect();
    ids.push(ALGORITHM.digest(&partial));
    let missing = server.missing(&ids).await;
    assert_eq!(missing, ids[10..]);

    let rest: Vec<&[u8]> =
        contents[10..].iter().map(|content| &content[..]).chain([&partial[..]]).collect();
    let added_bytes = rest.iter().map(|content| content.len() as u64).sum();
    assert_eq!(server.upload(&rest).await, AddObjectsReply { added: 11, added_bytes, known: 0 });
    assert!(server.fetch(&ids).await.iter().all(|(_, content)| content.is_some()));
}

#[tokio::test]
async fn an_upload_whose_connection_breaks_leaves_nothing_but_complete_objects() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let contents = contents();
    let partial = vec![99; 3_000_000];
    let (sender, upload) = begin_upload(&server, &contents, &partial).await;
    until(async || files_in(data.path().join("incoming")) == 1).await;
    sender.send(Err(std::io::Error::other("the disk broke"))).await.unwrap();
    upload.await.unwrap();
    until(async || files_in(data.path().join("incoming")) == 0).await;
    let mut ids: Vec<_> = contents.iter().map(|content| ALGORITHM.digest(content)).collect();
    ids.push(ALGORITHM.digest(&partial));
    assert_eq!(server.missing(&ids).await, ids[20..]);
    server.stop().await;
}

#[tokio::test]
async fn a_server_killed_before_the_image_is_added_shows_no_image_and_needs_no_upload() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[("/etc/passwd", b"root"), ("/bin/sh", b"elf")]);
    server.upload_tree(&tree, &[b"root", b"elf"]).await;
    server.kill();
    let server = Server::start(data.path());
    let list = ListImagesRequest::default();
    assert_eq!(server.client.call::<ListImages>(&list).await.unwrap().images, []);
    let mut ids: Vec<_> = directories(&tree).into_iter().map(|(id, _)| id).collect();
    ids.extend([ALGORITHM.digest(b"root"), ALGORITHM.digest(b"elf")]);
    assert_eq!(server.missing(&ids).await, []);
    server.add(image_of("base", &tree)).await.unwrap();
    server.kill();
    let server = Server::start(data.path());
    assert_eq!(server.client.call::<ListImages>(&list).await.unwrap().images.len(), 1);
}

#[tokio::test]
async fn a_server_stops_well_in_the_middle_of_an_upload() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let (_sender, upload) = begin_upload(&server, &contents(), &[99; 3_000_000]).await;
    server.stop().await;
    upload.await.unwrap();
    assert_eq!(files_in(data.path().join("incoming")), 0);
}

#[tokio::test]
async fn two_servers_never_share_a_directory() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let output = command(data.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    let error = format!("error: another imageserver is running on `{}`", data.path().display());
    assert!(text.contains(&error), "{text}");
    // The first one is not disturbed.
    server.upload(&[b"still here"]).await;
    server.kill();
    Server::start(data.path());
}

#[test]
fn a_server_does_not_start_unprotected_by_itself() {
    let data = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_imageserver"));
    command.args(["--tls", "/nonexistent", "--data"]).arg(data.path());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("imageserver does not run unprotected by itself"), "{text}");
    assert!(text.contains("hint:   domtool cert ca ./ca\n"), "{text}");
    assert_eq!(files_in(data.path().to_owned()), 0);
}
