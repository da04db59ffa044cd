//! Servers that follow each other: what travels, what never does, and what outlasts what.

mod links;
mod owners;
mod rules;
mod space;
mod writes;

use std::path::Path;

use api::Done;
use api::fault::{Fault, FaultCode};
use api::image_server::notes::{ChangeTags, ChangeTagsRequest};
use api::image_server::replication::{
    GetReplication, GetReplicationReply, MasterState, ReplicationTrouble,
};
use api::image_server::{
    DeleteImage, DeleteImageRequest, GetImage, GetImageRequest, ListImages, ListImagesRequest,
};
use model::image::{Content, Image};

use crate::fixture::{
    ALGORITHM, Server, directories, fault, image_of, name, tree_of, tree_with_computed, until,
};

/// What the file of an image holds that no other has.
fn own(image: &str) -> Vec<u8> {
    format!("this is {image}\n").into_bytes()
}

/// A large file that all images have.
fn shared() -> Vec<u8> {
    (0..1_000_000_u32).map(|index| (index % 251) as u8).collect()
}

/// Uploads and adds an image of two files.
async fn add(server: &Server, image: &str) -> Result<Content, Fault> {
    add_of(server, image, &own(image)).await
}

async fn add_of(server: &Server, image: &str, content: &[u8]) -> Result<Content, Fault> {
    let shared = shared();
    let tree = tree_of(&[("/etc/release", content), ("/usr/lib/shared", &shared)]);
    server.upload_tree(&tree, &[content, &shared]).await;
    let content = image_of(image, &tree);
    server.add(content.clone()).await.map(|_| content)
}

async fn delete(server: &Server, image: &str, force: bool) -> Result<(), Fault> {
    let request = DeleteImageRequest { name: name(image), force };
    server.client.call::<DeleteImage>(&request).await.map(drop).map_err(fault)
}

async fn set_tag(server: &Server, image: &str, tag: &str, value: &str) -> Result<(), Fault> {
    let set = [(tag.to_owned(), value.to_owned())].into();
    let request = ChangeTagsRequest { name: name(image), set, remove: [].into() };
    server.client.call::<ChangeTags>(&request).await.map(drop).map_err(fault)
}

async fn names(server: &Server) -> Vec<String> {
    let list = server.client.call::<ListImages>(&ListImagesRequest::default()).await.unwrap();
    list.images.into_iter().map(|image| image.name.to_string()).collect()
}

async fn get(server: &Server, image: &str) -> Result<Image, FaultCode> {
    let request = GetImageRequest { name: name(image), wait_ms: 0 };
    server.client.call::<GetImage>(&request).await.map_err(|error| fault(error).code)
}

async fn state(server: &Server) -> GetReplicationReply {
    server.client.call::<GetReplication>(&Done {}).await.unwrap()
}

async fn master_of(server: &Server) -> MasterState {
    state(server).await.master.unwrap()
}

async fn troubles(server: &Server) -> Vec<(String, ReplicationTrouble)> {
    let troubles = master_of(server).await.troubles.into_iter();
    troubles.map(|image| (image.name.to_string(), image.trouble)).collect()
}

/// A replica of `master`, with more flags.
fn replica(data: &Path, master: &str, flags: &[&str]) -> Server {
    Server::start_with(data, &[&["--replicate-from", master], flags].concat())
}

fn address(server: &Server) -> String {
    server.address.to_string()
}

async fn until_level(server: &Server) {
    until(async || master_of(server).await.is_level).await;
}

async fn until_names(server: &Server, expected: &[&str]) {
    until(async || names(server).await == expected).await;
}

/// All of a store, which no server uses, is whole.
fn expect_clean(data: &Path) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_imageserver"));
    let output = command.arg("check").arg("--data").arg(data).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Both servers give the same images, with the same notes, and all their objects.
async fn expect_same(one: &Server, two: &Server) {
    let list = names(one).await;
    assert_eq!(list, names(two).await);
    for image in list {
        assert_eq!(get(one, &image).await, get(two, &image).await);
    }
}

#[tokio::test]
async fn a_chain_has_what_its_master_has_and_only_new_objects_travel() {
    let data = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    for image in ["base/1", "base/2", "old/1"] {
        add(&root, image).await.unwrap();
    }
    delete(&root, "old/1", false).await.unwrap();
    let middle = replica(data[1].path(), &address(&root), &[]);
    let last = replica(data[2].path(), &address(&middle), &[]);
    until_names(&last, &["base/1", "base/2"]).await;
    until_level(&last).await;
    expect_same(&root, &middle).await;
    expect_same(&root, &last).await;
    // The name of what was deleted before there was a replica is not given again.
    until(async || get(&last, "old/1").await == Err(FaultCode::Gone)).await;

    // The shared file came once.
    let added = |server: &Server| server.metric("dominator_objects_added_bytes_total");
    let before: u64 = added(&last).parse().unwrap();
    assert!((1_000_000..1_100_000).contains(&before), "{before}");
    add(&root, "base/3").await.unwrap();
    until_names(&last, &["base/1", "base/2", "base/3"]).await;
    let after: u64 = added(&last).parse().unwrap();
    assert!(after - before < 10_000, "{}", after - before);

    // Notes and ends follow.
    set_tag(&root, "base/1", "tested", "yes").await.unwrap();
    until(async || get(&last, "base/1").await == get(&root, "base/1").await).await;
    delete(&root, "base/2", false).await.unwrap();
    until_names(&last, &["base/1", "base/3"]).await;
    assert_eq!(get(&last, "base/2").await, Err(FaultCode::Gone));
    until_level(&last).await;
    expect_same(&root, &last).await;

    // Each knows its replicas, and the tree above it.
    let [of_root, of_middle, of_last] =
        [state(&root).await, state(&middle).await, state(&last).await];
    assert_eq!(of_root.master, None);
    let servers: Vec<_> = of_root.replicas.iter().map(|replica| &replica.server).collect();
    assert_eq!(servers, [&of_middle.server]);
    let master = of_last.master.unwrap();
    assert_eq!(master.server, Some(of_middle.server));
    until(async || master_of(&last).await.upstream == [of_root.server.clone()]).await;
    assert_eq!((master.images_behind, master.bytes_left), (0, 0));
    assert_eq!(last.metric("dominator_replication_level"), "1");
    assert_eq!(root.metric("dominator_replicas_connected"), "1");
    let page = last.get("/", "").text();
    assert!(page.contains("<h2>Master</h2>"), "{page}");
    assert!(root.get("/", "").text().contains("<h2>Replicas</h2>"));

    for server in [root, middle, last] {
        server.stop().await;
    }
    data.iter().for_each(|data| expect_clean(data.path()));
}

#[tokio::test]
async fn an_image_with_computed_files_is_replicated() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let root = Server::start(data[0].path());
    let last = replica(data[1].path(), &address(&root), &[]);
    let tree = tree_with_computed();
    root.upload_tree(&tree, &[b"a"]).await;
    root.add(image_of("base/1", &tree)).await.unwrap();
    until_names(&last, &["base/1"]).await;
    until_level(&last).await;
    expect_same(&root, &last).await;
    assert_eq!(get(&last, "base/1").await.unwrap().content, image_of("base/1", &tree));
    let mut ids: Vec<_> = directories(&tree).into_iter().map(|(id, _)| id).collect();
    ids.push(ALGORITHM.digest(b"a"));
    assert_eq!(last.missing(&ids).await, []);
    let list = last.client.call::<ListImages>(&ListImagesRequest::default()).await.unwrap();
    assert_eq!(list.images[0].totals, tree.root().totals());
    assert_eq!(list.images[0].totals.computed, 1);
    root.stop().await;
    last.stop().await;
    data.iter().for_each(|data| expect_clean(data.path()));
}
