//! Several servers on one bucket, as processes.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use api::fault::{Fault, FaultCode};
use api::image_server::collection::{Collect, CollectReply, CollectRequest};
use api::image_server::directories::{MakeDirectory, MakeDirectoryRequest};
use api::image_server::expiry::{HoldImages, HoldImagesRequest};
use api::image_server::{
    DeleteImage, DeleteImageRequest, GetImage, GetImageRequest, ListImages, ListImagesRequest,
};
use api::object_server::AddObjectsReply;
use model::image::Image;
use model::object::ObjectId;
use model::tree::Tree;

use crate::bucket::{Gate, Moto, SILENCE};
use crate::fixture::{
    ALGORITHM, Server, command, directories, fault, image_of, name, stream_of, tree_of, until,
};

/// A bucket, and directories for servers.
struct Site {
    moto: Moto,
    directory: tempfile::TempDir,
}

impl Site {
    fn new() -> Self {
        let moto = Moto::start();
        moto.make_bucket("images");
        let directory = tempfile::tempdir().unwrap();
        let text = "aws_access_key_id = test\naws_secret_access_key = test\n";
        std::fs::write(directory.path().join("credentials"), text).unwrap();
        Self { moto, directory }
    }

    /// Starts a server that reaches the bucket only through `gate`.
    fn server_behind(&self, gate: &Gate) -> Server {
        let (bucket, gate) = (self.moto.address.to_string(), gate.address.to_string());
        let flags = self.flags(&[]).into_iter().map(|flag| flag.replace(&bucket, &gate));
        Server::run(command(&self.path("one")).args(flags))
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    fn flags(&self, more: &[&str]) -> Vec<String> {
        let endpoint = format!("http://{}", self.moto.address);
        let credentials = self.path("credentials").display().to_string();
        #[rustfmt::skip]
        let flags = [
            "--bucket", "s3://images/prod", "--bucket-endpoint", &endpoint,
            "--bucket-region", "us-east-1", "--bucket-credentials", &credentials,
        ];
        flags.iter().chain(more).map(|&flag| flag.to_owned()).collect()
    }

    fn server(&self, data: &str, more: &[&str]) -> Server {
        Server::run(command(&self.path(data)).args(self.flags(more)))
    }
}

async fn collect(server: &Server) -> Result<CollectReply, Fault> {
    let request = CollectRequest { dry_run: false, bytes: 0 };
    server.client.call::<Collect>(&request).await.map_err(fault)
}

async fn delete(server: &Server, image: &str, force: bool) -> Result<(), Fault> {
    let request = DeleteImageRequest { name: name(image), force };
    server.client.call::<DeleteImage>(&request).await.map(drop).map_err(fault)
}

async fn get(server: &Server, image: &str) -> Result<Image, Fault> {
    let request = GetImageRequest { name: name(image), wait_ms: 0 };
    server.client.call::<GetImage>(&request).await.map_err(fault)
}

async fn list(server: &Server) -> Vec<String> {
    let list = server.client.call::<ListImages>(&ListImagesRequest::default()).await.unwrap();
    list.images.into_iter().map(|image| image.name.to_string()).collect()
}

async fn add(server: &Server, image: &str, content: &[u8]) -> Tree {
    let tree = tree_of(&[("/etc/file", content), ("/etc/shared", b"shared")]);
    server.upload_tree(&tree, &[content, b"shared"]).await;
    server.add(image_of(image, &tree)).await.unwrap();
    tree
}

fn ids_of(tree: &Tree, contents: &[&[u8]]) -> Vec<ObjectId> {
    let directories = directories(tree).into_iter().map(|(id, _)| id);
    directories.chain(contents.iter().map(|content| ALGORITHM.digest(content))).collect()
}

#[tokio::test]
async fn what_one_server_adds_the_other_has() {
    let site = Site::new();
    let (one, two) = (site.server("one", &[]), site.server("two", &[]));
    let large = vec![7; 20 << 20];
    let tree = add(&one, "base/1", &large).await;
    // At once, and then in the list.
    assert_eq!(get(&two, "base/1").await.unwrap().content.root, tree.digest());
    until(async || list(&two).await == ["base/1"]).await;
    let id = ALGORITHM.digest(&large);
    assert_eq!(two.fetch(&[id]).await, [(id, Some(large))]);
    assert_eq!(two.expect_whole().await, 1);
    assert_eq!(two.missing(&ids_of(&tree, &[b"shared"])).await, []);
    // What the other has is not uploaded again.
    let reply = two.upload(&[b"shared"]).await;
    assert_eq!(reply, AddObjectsReply { added: 0, added_bytes: 0, known: 1 });

    // A dominator that asks one of them is heard by the other.
    let uses =
        HoldImagesRequest { holder: "dom".to_owned(), names: vec![name("base/1")], seconds: 600 };
    two.client.call::<HoldImages>(&uses).await.unwrap();
    let refused = delete(&one, "base/1", false).await.unwrap_err();
    assert_eq!(refused.code, FaultCode::Held, "{refused}");
    delete(&one, "base/1", true).await.unwrap();
    assert_eq!(get(&two, "base/1").await.unwrap_err().code, FaultCode::Gone);
    until(async || list(&two).await.is_empty()).await;
    let again = two.add(image_of("base/1", &tree)).await.unwrap_err();
    assert_eq!(again.code, FaultCode::Gone, "{again}");
    one.stop().await;
    two.stop().await;
    // Nothing was theirs alone.
    let three = site.server("three", &[]);
    assert_eq!(get(&three, "base/1").await.unwrap_err().code, FaultCode::Gone);
    let got = three.fetch(&[ALGORITHM.digest(b"shared")]).await;
    assert_eq!(got[0].1.as_deref(), Some(&b"shared"[..]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_several_that_take_a_name_one_gets_it() {
    let site = Site::new();
    let servers = [site.server("one", &[]), site.server("two", &[])];
    let trees: Vec<Tree> =
        ["a", "b"].iter().map(|content| tree_of(&[("/etc/file", content.as_bytes())])).collect();
    for (server, (tree, content)) in servers.iter().zip(trees.iter().zip([b"a", b"b"])) {
        server.upload_tree(tree, &[content]).await;
    }
    for round in 0..10 {
        let image = format!("race/{round}");
        let takes =
            servers.iter().zip(&trees).map(|(server, tree)| server.add(image_of(&image, tree)));
        let ends = futures_util::future::join_all(takes).await;
        let won: Vec<usize> = (0..2).filter(|&at| ends[at].is_ok()).collect();
        assert_eq!(won.len(), 1, "{ends:?}");
        let lost = ends[1 - won[0]].as_ref().unwrap_err();
        assert_eq!(lost.code, FaultCode::Exists, "{lost}");
        for server in &servers {
            let root = get(server, &image).await.unwrap().content.root;
            assert_eq!(root, trees[won[0]].digest());
        }
        // One of both deletes it; nobody gets the name after that.
        let deletions = servers.iter().map(|server| delete(server, &image, false));
        let ends = futures_util::future::join_all(deletions).await;
        assert_eq!(ends.iter().filter(|end| end.is_ok()).count(), 1, "{ends:?}");
        let again = servers[0].add(image_of(&image, &trees[0])).await.unwrap_err();
        assert_eq!(again.code, FaultCode::Gone, "{again}");
    }
}

/// Images come and go through two servers, of contents that come and go, while both remove objects
/// all the time; and one is killed.
async fn churn(site: &Site, flags: &[&str], may_refuse: bool) {
    let (one, two) = (site.server("one", flags), site.server("two", flags));
    let is_over = AtomicBool::new(false);
    let collecting = async |server: &Server| {
        let mut removed = 0;
        while !is_over.load(Ordering::Relaxed) {
            match collect(server).await {
                Ok(reply) => removed += reply.removed.objects,
                // The other one does, or this one has stood still for longer than its lease.
                Err(fault) => {
                    let is_late = fault.message.contains("was not renewed in time");
                    assert!(fault.code == FaultCode::Busy || is_late, "{fault}");
                }
            }
        }
        removed
    };
    let adding = async |server: &Server, own: &str| {
        let (mut added, mut refused) = (0, 0);
        for number in 0..15_u32 {
            let (image, content) = (format!("{own}/{number}"), (number % 3).to_string());
            let path = format!("/d{}/f", number % 2);
            let tree = tree_of(&[(&path, content.as_bytes()), ("/etc/a", b"a")]);
            let ids = ids_of(&tree, &[content.as_bytes(), b"a"]);
            if !server.missing(&ids).await.is_empty() {
                server.upload_tree(&tree, &[content.as_bytes(), b"a"]).await;
            }
            match server.add(image_of(&image, &tree)).await {
                Ok(_) => added += 1,
                Err(fault) => {
                    assert!(may_refuse && fault.code == FaultCode::NotFound, "{fault}");
                    refused += 1;
                    continue;
                }
            }
            delete(server, &image, false).await.unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        (added, refused)
    };
    let keeping = add(&one, "kept/1", b"kept").await;
    let (removed_one, removed_two, own, other) = tokio::join!(
        collecting(&one),
        collecting(&two),
        adding(&one, "own"),
        adding(&two, "other"),
    );
    println!("removed {removed_one} and {removed_two} objects; {own:?}, {other:?}");
    assert!(own.0 + other.0 > 0);
    one.kill();
    until(async || list(&two).await == ["kept/1"]).await;
    assert_eq!(two.expect_whole().await, 1);
    assert_eq!(two.missing(&ids_of(&keeping, &[b"kept", b"shared"])).await, []);
    two.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_that_are_added_while_both_servers_collect_are_whole() {
    let site = Site::new();
    churn(&site, &["--bucket-unneeded", "0s", "--lease-max", "0s"], true).await;
    // A cache may hold what the bucket has not: without it all is there too.
    for data in ["one", "two"] {
        std::fs::remove_dir_all(site.path(data)).unwrap();
    }
    assert_eq!(site.server("new", &[]).expect_whole().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_leased_stays_whichever_server_collects() {
    let site = Site::new();
    churn(&site, &["--bucket-unneeded", "0s"], false).await;
}

#[tokio::test]
async fn what_no_image_needs_stays_for_its_time() {
    let site = Site::new();
    let one = site.server("one", &["--lease-max", "0s"]);
    let kept = add(&one, "kept", b"kept").await;
    one.upload(&[b"garbage"]).await;
    let reply = collect(&one).await.unwrap();
    assert_eq!((reply.unneeded.objects, reply.removed.objects), (1, 0));
    one.stop().await;
    // Nor does another server remove it, before it was without use for a day.
    let two = site.server("two", &["--lease-max", "0s"]);
    assert_eq!(collect(&two).await.unwrap().removed.objects, 0);
    let garbage = ALGORITHM.digest(b"garbage");
    assert_eq!(two.missing(&[garbage]).await, []);
    two.stop().await;
    let two = site.server("two", &["--lease-max", "0s", "--bucket-unneeded", "0s"]);
    assert_eq!(collect(&two).await.unwrap().removed.objects, 1);
    assert_eq!(two.missing(&[garbage]).await, [garbage]);
    assert_eq!(two.missing(&ids_of(&kept, &[b"kept", b"shared"])).await, []);
}

#[tokio::test]
async fn without_the_bucket_what_is_near_is_still_served() {
    let site = Site::new();
    let server = site.server("one", &[]);
    let tree = add(&server, "base", b"near").await;
    let Site { moto, directory: _kept } = site;
    drop(moto);
    let id = ALGORITHM.digest(b"near");
    assert_eq!(server.fetch(&[id]).await, [(id, Some(b"near".to_vec()))]);
    assert_eq!(list(&server).await, ["base"]);
    assert_eq!(server.get("/healthz", "").status, 200);
    // What is far is refused, with the reason, and the others are not kept waiting for it.
    let asked = get(&server, "base");
    let near = [id];
    let other = server.fetch(&near);
    let (asked, other) = tokio::join!(asked, other);
    let refused = asked.unwrap_err();
    assert_eq!(refused.code, FaultCode::Unavailable, "{refused}");
    assert!(refused.message.contains("the bucket s3://images/prod is unavailable"), "{refused}");
    assert_eq!(other.len(), 1);
    let refused = server.add(image_of("other", &tree)).await.unwrap_err();
    assert_eq!(refused.code, FaultCode::Unavailable, "{refused}");
}

#[tokio::test]
async fn what_the_bucket_cannot_do_now_is_tried_again_and_then_told() {
    let site = Site::new();
    let gate = Gate::before(site.moto.address);
    let server = site.server_behind(&gate);
    let tree = tree_of(&[("/etc/file", b"content")]);
    gate.answer("503 Slow Down", 3);
    server.upload_tree(&tree, &[b"content"]).await;
    server.add(image_of("base", &tree)).await.unwrap();
    assert_eq!(server.expect_whole().await, 1);
    #[rustfmt::skip]
    let table = [
        ("403 Forbidden",            FaultCode::Internal,    "denies access (403 Forbidden)"),
        ("507 Insufficient Storage", FaultCode::NoSpace,     "is full (507 Insufficient Storage)"),
        ("503 Slow Down",            FaultCode::Unavailable, "is unavailable (503"),
    ];
    for (number, (status, code, text)) in table.into_iter().enumerate() {
        gate.answer(status, u32::MAX);
        let content = format!("refused {number}");
        let refused =
            fault(server.upload_chunks(stream_of(&[content.as_bytes()])).await.unwrap_err());
        assert_eq!(refused.code, code, "{refused}");
        assert!(refused.message.contains(text), "{refused}");
        gate.answer(status, 0);
        let reply = server.upload(&[content.as_bytes()]).await;
        assert_eq!(reply.added, 1, "{status}");
    }
}

#[tokio::test]
async fn a_bucket_that_is_silent_is_named_before_the_caller_gives_up() {
    let site = Site::new();
    let gate = Gate::before(site.moto.address);
    let server = site.server_behind(&gate);
    gate.answer(SILENCE, u32::MAX);
    let request = MakeDirectoryRequest { name: name("web"), parents: false, owners: None };
    let refused = fault(server.client.call::<MakeDirectory>(&request).await.unwrap_err());
    assert_eq!(refused.code, FaultCode::Unavailable, "{refused}");
    assert!(refused.message.contains("the bucket s3://images/prod is unavailable"), "{refused}");
    gate.answer(SILENCE, 0);
    server.client.call::<MakeDirectory>(&request).await.unwrap();
}

/// What a server says that does not start.
fn refusal(data: &Path, flags: &[String]) -> String {
    let output = command(data).args(flags).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    text.lines().find(|line| line.starts_with("error: ")).unwrap_or(&text).to_owned()
}

#[tokio::test]
async fn what_cannot_be_used_is_refused_at_start() {
    let site = Site::new();
    let flags = site.flags(&[]);
    let absent: Vec<String> =
        flags.iter().map(|flag| flag.replace("s3://images/prod", "s3://absent/prod")).collect();
    let text = refusal(&site.path("data"), &absent);
    assert!(text.contains("the bucket s3://absent/prod refuses"), "{text}");
    let text = refusal(&site.path("data"), &{
        let mut flags = flags.clone();
        flags[7] = site.path("none").display().to_string();
        flags
    });
    assert!(text.contains("cannot read the credentials of the bucket"), "{text}");
    // Somebody else's.
    site.moto.put("images", "prod/format", b"something else\n");
    let text = refusal(&site.path("data"), &flags);
    assert!(text.contains("was written by another program, or a later release"), "{text}");
    site.moto.put("images", "prod/format", b"dominator-bucket 1\n");
    site.server("data", &[]).stop().await;
    // The directory of one kind is not that of the other.
    let text = refusal(&site.path("data"), &[]);
    assert!(text.contains("is what a server with a --bucket keeps"), "{text}");
    Server::start(&site.path("local")).stop().await;
    let text = refusal(&site.path("local"), &flags);
    assert!(text.contains("holds the images of a server without a bucket"), "{text}");
}

#[tokio::test]
async fn a_cache_can_be_thrown_away() {
    let site = Site::new();
    let data = site.path("one");
    let server = site.server("one", &[]);
    let contents: Vec<Vec<u8>> = (0..4_u8).map(|seed| vec![seed; 300_000]).collect();
    let slices: Vec<&[u8]> = contents.iter().map(|content| &content[..]).collect();
    server.upload(&slices).await;
    let ids: BTreeSet<ObjectId> =
        contents.iter().map(|content| ALGORITHM.digest(content)).collect();
    server.stop().await;
    std::fs::remove_dir_all(data.join("objects")).unwrap();
    let server = site.server("one", &[]);
    for id in ids {
        assert!(server.fetch(&[id]).await[0].1.is_some());
    }
}
