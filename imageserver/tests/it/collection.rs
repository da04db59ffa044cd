//! What no image needs is removed, what one needs or somebody was promised is not.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use api::fault::{Fault, FaultCode};
use api::image_server::collection::{Collect, CollectReply, CollectRequest, ObjectTotals};
use api::image_server::{DeleteImage, DeleteImageRequest};
use model::object::ObjectId;
use model::tree::Tree;

use crate::fixture::{
    ALGORITHM, Server, directories, fault, files_in, image_of, name, stored, tree_of, until,
};
use crate::space::Mount;

const NO_LEASES: [&str; 2] = ["--lease-max", "0s"];

async fn collect(server: &Server, dry_run: bool, bytes: u64) -> Result<CollectReply, Fault> {
    let request = CollectRequest { dry_run, bytes };
    server.client.call::<Collect>(&request).await.map_err(fault)
}

async fn delete(server: &Server, image: &str) {
    let request = DeleteImageRequest { name: name(image), force: false };
    server.client.call::<DeleteImage>(&request).await.unwrap();
}

async fn add(server: &Server, image: &str, files: &[(&str, &[u8])]) -> Tree {
    let tree = tree_of(files);
    let contents: Vec<&[u8]> = files.iter().map(|(_, content)| *content).collect();
    server.upload_tree(&tree, &contents).await;
    server.add(image_of(image, &tree)).await.unwrap();
    tree
}

fn ids_of(tree: &Tree, contents: &[&[u8]]) -> Vec<ObjectId> {
    let directories = directories(tree).into_iter().map(|(id, _)| id);
    directories.chain(contents.iter().map(|content| ALGORITHM.digest(content))).collect()
}

/// The space that objects take.
fn amount(data: &Path, ids: &[ObjectId]) -> ObjectTotals {
    use std::os::unix::fs::MetadataExt as _;
    let mut amount = ObjectTotals::default();
    for id in ids.iter().collect::<BTreeSet<_>>() {
        amount.count(std::fs::metadata(stored(data, id)).unwrap().blocks() * 512);
    }
    amount
}

#[tokio::test]
async fn what_no_image_needs_goes_and_what_one_needs_stays() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &NO_LEASES);
    let old = add(&server, "old", &[("/etc/a", b"shared"), ("/etc/deep/er", b"only old")]).await;
    let new = add(&server, "new", &[("/etc/a", b"shared"), ("/etc/b", b"only new")]).await;
    server.upload(&[b"never in an image"]).await;
    let first = CollectReply { images: 2, ..CollectReply::default() };
    let garbage = amount(data.path(), &[ALGORITHM.digest(b"never in an image")]);
    let reply = CollectReply { unneeded: garbage, removed: garbage, ..first };
    assert_eq!(collect(&server, true, 0).await, Ok(reply));
    assert_eq!(server.metric("dominator_objects_unneeded"), "1");
    assert_eq!(collect(&server, false, 0).await, Ok(reply));
    assert_eq!(collect(&server, false, 0).await, Ok(first));

    delete(&server, "old").await;
    let gone = ids_of(&old, &[b"only old"]);
    let unneeded = amount(data.path(), &gone);
    let reply = CollectReply { images: 1, unneeded, removed: unneeded, ..reply };
    assert_eq!(collect(&server, false, 0).await, Ok(reply));
    assert_eq!(server.missing(&gone).await, gone);
    assert_eq!(server.missing(&ids_of(&new, &[b"shared", b"only new"])).await, []);
    assert_eq!(server.metric("dominator_objects_collected_total"), "5");
    assert_eq!(server.metric("dominator_objects_unneeded"), "0");
    assert_eq!(server.metric("dominator_collection_failed"), "0");
    assert!(server.get("/", "").text().contains("removed 4 objects"));
    assert_eq!(files_in(data.path().join("incoming")), 0);

    // They can come again.
    add(&server, "again", &[("/etc/a", b"shared"), ("/etc/deep/er", b"only old")]).await;
    assert_eq!(server.missing(&gone).await, []);
}

#[tokio::test]
async fn the_oldest_go_first_until_there_is_enough_space() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &NO_LEASES);
    let contents: [&[u8]; 3] = [&[1; 10_000], &[2; 10_000], &[3; 10_000]];
    server.upload(&contents).await;
    let ids = contents.map(|content| ALGORITHM.digest(content));
    for (id, age) in ids.iter().zip([10, 30, 20]) {
        let stored = std::fs::File::open(stored(data.path(), id)).unwrap();
        stored.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }
    let one = amount(data.path(), &ids[..1]);
    let two = ObjectTotals { objects: 2, bytes: 2 * one.bytes };
    let reply = CollectReply { unneeded: amount(data.path(), &ids), ..CollectReply::default() };
    for dry_run in [true, false] {
        let got = collect(&server, dry_run, one.bytes + 1).await;
        assert_eq!(got, Ok(CollectReply { removed: two, ..reply }));
    }
    assert_eq!(server.missing(&ids).await, ids[1..]);
}

#[tokio::test]
async fn what_was_promised_stays_over_a_restart_too() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    server.upload(&[b"uploaded"]).await;
    let id = ALGORITHM.digest(b"uploaded");
    let leased = amount(data.path(), &[id]);
    let reply = CollectReply { unneeded: leased, leased, ..CollectReply::default() };
    assert_eq!(collect(&server, false, 0).await, Ok(reply));
    assert_eq!(server.metric("dominator_leases"), "1");
    server.stop().await;

    let server = Server::start(data.path());
    assert_eq!(server.metric("dominator_leases"), "1");
    assert_eq!(collect(&server, false, 0).await, Ok(reply));
    server.kill();

    let server = Server::start_with(data.path(), &NO_LEASES);
    let held = collect(&server, false, 0).await.unwrap_err();
    assert_eq!(held.code, FaultCode::Held);
    let start = "nothing is collected for another 25 h: ";
    assert!(held.message.starts_with(start), "{}", held.message);
    assert!(server.get("/", "").text().contains("nothing is removed for another 25 h"));
    let held_seconds = collect(&server, true, 0).await.unwrap().held_seconds;
    assert!(held_seconds > 24 * 3_600, "{held_seconds}");
    assert_eq!(server.missing(&[id]).await, []);
}

#[tokio::test]
async fn nothing_is_removed_while_an_image_cannot_be_looked_through() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start_with(data.path(), &NO_LEASES);
    let tree = add(&server, "web/1", &[("/etc/a", b"a"), ("/srv/b", b"b")]).await;
    let other = add(&server, "web/2", &[("/etc/a", b"a")]).await;
    server.upload(&[b"garbage"]).await;
    let below = directories(&tree)
        .into_iter()
        .map(|(id, _)| id)
        .find(|id| *id != tree.digest() && !ids_of(&other, &[]).contains(id));
    let below = below.unwrap();
    std::fs::remove_file(stored(data.path(), &below)).unwrap();
    let error = collect(&server, false, 0).await.unwrap_err();
    assert_eq!(error.code, FaultCode::Internal);
    let text = format!(
        "nothing is collected, because the needs of an image are unknown: upload its missing \
         objects, or delete it: cannot look through image web/1: directory {below} of the tree is \
         not on this server (0 more are missing)"
    );
    assert_eq!(error.message, text);
    assert_eq!(server.metric("dominator_collection_failed"), "1");
    delete(&server, "web/1").await;
    assert_eq!(collect(&server, false, 0).await.unwrap().removed.objects, 3);

    // So it is with a record that is damaged.
    server.stop().await;
    std::fs::write(data.path().join("images/web.d/2.image"), "cut").unwrap();
    let server = Server::start_with(data.path(), &NO_LEASES);
    let error = collect(&server, false, 0).await.unwrap_err();
    let start = "nothing is collected, because the record of image web/2 is damaged";
    assert!(error.message.starts_with(start), "{}", error.message);
    assert_eq!(server.missing(&ids_of(&other, &[b"a"])).await, []);
    delete(&server, "web/2").await;
    assert_eq!(collect(&server, false, 0).await.unwrap().removed.objects, 3);
}

#[tokio::test]
async fn a_disk_that_is_nearly_full_is_relieved() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mount) = Mount::new(directory.path()) else {
        eprintln!("skipped: this needs the right to mount");
        return;
    };
    let data = mount.path().join("data");
    let flags = ["--lease-max", "0s", "--collect-above", "60", "--collect-down-to", "30"];
    let server = Server::start_with(&data, &flags);
    let tree = add(&server, "base", &[("/etc/a", b"a")]).await;
    let garbage: Vec<Vec<u8>> = (0..8).map(|seed| vec![seed; 400_000]).collect();
    let slices: Vec<&[u8]> = garbage.iter().map(|content| &content[..]).collect();
    server.upload(&slices).await;
    until(async || server.metric("dominator_objects_collected_total") != "0").await;
    assert_eq!(server.missing(&ids_of(&tree, &[b"a"])).await, []);
    drop(server);
}

/// Images come and go, of contents that come and go, while objects are removed all the time and
/// no lease holds anything; and then the server is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_that_are_added_while_objects_are_removed_are_whole() {
    let data = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let server = Server::start_with(data.path(), &NO_LEASES);
        let is_over = AtomicBool::new(false);
        let collecting = async {
            let mut removed = 0;
            while !is_over.load(Ordering::Relaxed) {
                removed += collect(&server, false, 0).await.unwrap().removed.objects;
            }
            removed
        };
        let adding = async {
            let (mut added, mut refused) = (0, 0);
            for number in 0..40_u32 {
                let (image, content) = (format!("r{round}/{number}"), (number % 5).to_string());
                let path = format!("/d{}/f", number % 3);
                let tree = tree_of(&[(&path, content.as_bytes()), ("/etc/a", b"a")]);
                server.upload_tree(&tree, &[content.as_bytes(), b"a"]).await;
                match server.add(image_of(&image, &tree)).await {
                    Ok(_) => added += 1,
                    // What was uploaded is gone again, as no lease held it.
                    Err(fault) => {
                        assert_eq!(fault.code, FaultCode::NotFound, "{fault}");
                        refused += 1;
                        continue;
                    }
                }
                if number % 2 == 0 {
                    delete(&server, &image).await;
                }
            }
            is_over.store(true, Ordering::Relaxed);
            (added, refused)
        };
        let (removed, (added, refused)) = tokio::join!(collecting, adding);
        println!("removed {removed} objects; added {added} images, {refused} refused");
        let images = server.expect_whole().await;
        server.kill();
        let server = Server::start_with(data.path(), &NO_LEASES);
        assert_eq!(server.expect_whole().await, images);
        collect(&server, false, 0).await.unwrap();
        assert_eq!(server.expect_whole().await, images);
    }
}
