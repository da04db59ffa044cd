//! Copies, tags, and the latest image of a directory.

use std::collections::BTreeSet;

use api::fault::{Fault, FaultCode};
use api::image_server::notes::{
    ChangeSignatures, ChangeSignaturesRequest, ChangeTags, ChangeTagsReply, ChangeTagsRequest,
    CopyImage, CopyImageRequest, FindLatestImage, FindLatestImageRequest,
};
use api::image_server::{
    AddImage, AddImageRequest, DeleteImage, DeleteImageRequest, GetImage, GetImageRequest,
};
use certs::signing_key::SigningKey;
use model::image::tags::Tags;
use model::image::{ComputedRule, Content, Image, Notes};
use model::signing::{Signature, Statement};

use crate::fixture::{
    ALGORITHM, Server, expected, fault, image_of, name, tree_of, tree_with_computed,
};

async fn add(server: &Server, image: &str, notes: Notes) -> Content {
    let tree = tree_of(&[("/etc/a", b"a")]);
    server.upload_tree(&tree, &[b"a"]).await;
    let content = image_of(image, &tree);
    let request = AddImageRequest { content: content.clone(), notes };
    server.client.call::<AddImage>(&request).await.unwrap();
    content
}

async fn get(server: &Server, image: &str) -> Image {
    let request = GetImageRequest { name: name(image), wait_ms: 0 };
    server.client.call::<GetImage>(&request).await.unwrap()
}

async fn copy(server: &Server, from: &str, to: &str) -> Result<(), Fault> {
    let (from, to) = (name(from), name(to));
    let request = CopyImageRequest { from, to, expires_in_seconds: None };
    server.client.call::<CopyImage>(&request).await.map(|_| ()).map_err(fault)
}

fn tags(tags: &[(&str, &str)]) -> Tags {
    tags.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

async fn tag(server: &Server, image: &str, set: Tags, remove: &[&str]) -> Result<Tags, Fault> {
    let remove: BTreeSet<String> = remove.iter().map(|name| (*name).to_owned()).collect();
    let request = ChangeTagsRequest { name: name(image), set, remove };
    let reply = server.client.call::<ChangeTags>(&request).await.map_err(fault);
    reply.map(|ChangeTagsReply { tags }| tags)
}

async fn latest(server: &Server, directory: &str, tags: Tags) -> Option<String> {
    let request = FindLatestImageRequest { directory: name(directory), tags };
    let reply = server.client.call::<FindLatestImage>(&request).await.unwrap();
    reply.name.map(|name| name.to_string())
}

#[tokio::test]
async fn a_copy_has_the_same_computed_files() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_with_computed();
    server.upload_tree(&tree, &[b"a"]).await;
    server.add(image_of("test/1", &tree)).await.unwrap();
    copy(&server, "test/1", "base/1").await.unwrap();
    let content = get(&server, "base/1").await.content;
    assert_eq!(content, image_of("base/1", &tree));
    let (path, source) = ("/etc/issue".parse().unwrap(), "filegen:6972".to_owned());
    assert_eq!(content.computed, [ComputedRule { path, source }]);
}

#[tokio::test]
async fn a_copy_outlives_what_it_was_made_of() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &["--lease-max", "0s"]);
    server.upload(&[b"log"]).await;
    let notes = Notes {
        owner_groups: vec!["testers".to_owned()],
        tags: tags(&[("deprecated", ""), ("os", "debian")]),
        release_notes: Some("New.".to_owned()),
        build_log: Some(ALGORITHM.digest(b"log")),
        ..Notes::default()
    };
    let content = add(&server, "test/1", notes.clone()).await;
    copy(&server, "test/1", "base/1").await.unwrap();
    let got = get(&server, "base/1").await;
    let notes = Notes {
        owner_groups: Vec::new(),
        tags: tags(&[("os", "debian")]),
        source_image: Some(name("test/1")),
        created_by: "127.0.0.1".to_owned(),
        created_on: got.notes.created_on,
        ..notes
    };
    let content = Content { name: name("base/1"), ..content };
    assert_eq!(got, Image { content, notes });

    let exists =
        "image base/1 exists already; an image never changes, so add it under another name";
    assert_eq!(copy(&server, "test/1", "base/1").await, Err(expected(FaultCode::Exists, exists)));
    let request = DeleteImageRequest { name: name("test/1"), force: false };
    server.client.call::<DeleteImage>(&request).await.unwrap();
    assert_eq!(copy(&server, "test/1", "base/2").await.unwrap_err().code, FaultCode::Gone);
    assert_eq!(copy(&server, "base/1", "test/1").await.unwrap_err().code, FaultCode::Gone);
    // All that the copy needs is needed: its build log too.
    let collect = api::image_server::collection::CollectRequest::default();
    let reply =
        server.client.call::<api::image_server::collection::Collect>(&collect).await.unwrap();
    assert_eq!(reply.removed.objects, 0);
    assert_eq!(server.missing(&[ALGORITHM.digest(b"log"), ALGORITHM.digest(b"a")]).await, []);
    server.kill();
    let server = Server::start(data.path());
    assert_eq!(get(&server, "base/1").await, got);
}

#[tokio::test]
async fn tags_are_changed_durably_and_find_the_latest_image() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    for image in ["a/1", "a/2", "a/b/3", "a2/4", "a-b/5"] {
        add(&server, image, Notes::default()).await;
    }
    let set = tags(&[("tested", "yes"), ("os", "debian")]);
    assert_eq!(tag(&server, "a/1", set.clone(), &[]).await, Ok(set));
    let left = tags(&[("tested", "yes")]);
    assert_eq!(tag(&server, "a/1", tags(&[]), &["os"]).await, Ok(left.clone()));
    let refused = tag(&server, "a/1", tags(&[]), &["os"]).await;
    let text = "the tags of image a/1 are not changed: there is no tag `os`";
    assert_eq!(refused, Err(expected(FaultCode::BadRequest, text)));
    let long = tags(&[("x", &"x".repeat(5_000))]);
    assert_eq!(tag(&server, "a/1", long, &[]).await.unwrap_err().code, FaultCode::BadRequest);
    server.kill();

    let server = Server::start(data.path());
    assert_eq!(get(&server, "a/1").await.notes.tags, left);
    let none = || tags(&[]);
    #[rustfmt::skip]
    let table = [
        ("a", none(), Some("a/2")), ("a", left, Some("a/1")), ("a/b", none(), Some("a/b/3")),
        ("a", tags(&[("tested", "no")]), None), ("a/1", none(), None), ("b", none(), None),
    ];
    for (directory, tags, image) in table {
        assert_eq!(latest(&server, directory, tags).await.as_deref(), image, "{directory}");
    }
}

/// Made by `ssh-keygen`; nobody uses them.
const KEYS: [&str; 2] = [
    include_str!("../../../common/certs/tests/keys/alice"),
    include_str!("../../../common/certs/tests/keys/bob"),
];

pub fn sign(who: usize, content: &Content, signed: u64) -> Signature {
    let (image, digest) = (content.name.clone(), content.digest());
    let key = SigningKey::read(KEYS[who], None).unwrap();
    key.sign(&Statement { image, digest, signed, expires: None }).unwrap()
}

pub async fn change(
    server: &Server,
    image: &str,
    add: &[Signature],
    remove: &[&str],
) -> Result<Vec<Signature>, Fault> {
    let remove = remove.iter().map(|key| (*key).to_owned()).collect();
    let request = ChangeSignaturesRequest { name: name(image), add: add.to_vec(), remove };
    let reply = server.client.call::<ChangeSignatures>(&request).await.map_err(fault);
    reply.map(|reply| reply.signatures)
}

#[tokio::test]
async fn signatures_are_kept_if_they_are_about_the_image() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let other = add(&server, "web/7", Notes::default()).await;
    let content = Content { name: name("web/8"), ..other.clone() };
    // With the image itself, or later.
    let notes = |signature| Notes { signatures: vec![signature], ..Notes::default() };
    let request = AddImageRequest { content: content.clone(), notes: notes(sign(0, &other, 1)) };
    let refused = server.client.call::<AddImage>(&request).await.map_err(fault).unwrap_err();
    let text = format!(
        "signature 1 is refused: it is about the image web/7 with the digest {}",
        other.digest()
    );
    assert_eq!(refused, Fault::new(FaultCode::BadRequest, text));
    let first = sign(0, &content, 1);
    add(&server, "web/8", notes(first.clone())).await;
    assert_eq!(get(&server, "web/8").await.notes.signatures, std::slice::from_ref(&first));

    let (second, third) = (sign(1, &content, 1), sign(0, &content, 2));
    let both = Ok(vec![third.clone(), second.clone()]);
    assert_eq!(change(&server, "web/8", &[second.clone(), third.clone()], &[]).await, both);
    let refused = change(&server, "web/8", &[first], &[]).await.unwrap_err();
    assert_eq!(refused.code, FaultCode::BadRequest);
    let refused = change(&server, "web/8", &[sign(0, &other, 3)], &[]).await.unwrap_err();
    assert_eq!(refused.code, FaultCode::BadRequest);
    let absent = change(&server, "web/9", std::slice::from_ref(&third), &[]).await.unwrap_err();
    assert_eq!(absent.code, FaultCode::NotFound);
    server.kill();

    let server = Server::start(data.path());
    assert_eq!(get(&server, "web/8").await.notes.signatures, [third.clone(), second.clone()]);
    let key = third.check().unwrap().fingerprint();
    assert_eq!(change(&server, "web/8", &[], &[&key]).await, Ok(vec![second]));
    // Another name is another image.
    copy(&server, "web/8", "web/10").await.unwrap();
    assert_eq!(get(&server, "web/10").await.notes.signatures, []);
}
