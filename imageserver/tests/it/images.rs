//! Adding, getting, listing and deleting images.

use std::time::{Duration, Instant};

use api::Done;
use api::fault::{Fault, FaultCode};
use api::image_server::{
    AddImage, AddImageRequest, DeleteImage, DeleteImageRequest, GetImage, GetImageRequest,
    ImageSummary, ListImages, ListImagesReply, ListImagesRequest,
};
use model::filter::Filter;
use model::image::{Image, Notes};
use model::path::TreePath;
use model::tree::{Metadata, Time, TreeBuilder};

use crate::fixture::{
    ALGORITHM, Server, directories, expected, fault, file, image_of, name, rename_stored, stored,
    tree_of, tree_with_computed,
};

const PASSWD: &[u8] = b"root:x:0:0::/root:/bin/sh\n";

async fn get(server: &Server, image: &str, wait_ms: u32) -> Result<Image, Fault> {
    let request = GetImageRequest { name: name(image), wait_ms };
    server.client.call::<GetImage>(&request).await.map_err(fault)
}

async fn list(server: &Server) -> Vec<String> {
    let reply = server.client.call::<ListImages>(&ListImagesRequest { after: None }).await.unwrap();
    assert!(!reply.more);
    reply.images.into_iter().map(|image| image.name.to_string()).collect()
}

async fn delete(server: &Server, image: &str) -> Result<Done, Fault> {
    let request = DeleteImageRequest { name: name(image), force: false };
    server.client.call::<DeleteImage>(&request).await.map_err(fault)
}

#[tokio::test]
async fn an_image_is_added_got_listed_and_survives_a_restart() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[("/etc/passwd", PASSWD), ("/etc/deep/er", b"x")]);
    server.upload_tree(&tree, &[PASSWD, b"x"]).await;
    let content = image_of("base/debian", &tree);
    let notes = Notes {
        created_by: "somebody else".to_owned(),
        created_for: "tests".to_owned(),
        ..Notes::default()
    };
    let request = AddImageRequest { content: content.clone(), notes: notes.clone() };
    let reply = server.client.call::<AddImage>(&request).await.unwrap();
    assert_eq!(reply.digest, content.digest());

    let image = get(&server, "base/debian", 0).await.unwrap();
    let created_on = image.notes.created_on;
    assert!(created_on.seconds > 1_700_000_000);
    let notes = Notes { created_by: "127.0.0.1".to_owned(), created_on, ..notes };
    assert_eq!(image, Image { content: content.clone(), notes });
    server.stop().await;

    let server = Server::start(data.path());
    assert_eq!(get(&server, "base/debian", 0).await.unwrap(), image);
    let summary = ImageSummary {
        name: name("base/debian"),
        digest: content.digest(),
        root: tree.digest(),
        totals: tree.root().totals(),
        filter_lines: Some(0),
        triggers: 0,
        created_on,
        expires_at: None,
        tags: Default::default(),
        signatures: 0,
    };
    let reply = server.client.call::<ListImages>(&ListImagesRequest { after: None }).await.unwrap();
    assert_eq!(reply, ListImagesReply { images: vec![summary], more: false });
}

#[tokio::test]
async fn names_that_look_like_others_are_different_images() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[]);
    server.upload_tree(&tree, &[]).await;
    let mut names = vec!["a", "a/b", "a.d/b", "a.image", "a.image/b", "%2e%2e", "...", "\u{fc}x"];
    for image in &names {
        server.add(image_of(image, &tree)).await.unwrap();
    }
    names.sort_unstable();
    assert_eq!(list(&server).await, names);
    // Earlier releases took these too.
    let refused = [("minus", "-rf"), ("blank", "\u{fc} x"), ("star", "*")];
    for (plain, refused) in refused {
        let error = server.add(image_of(refused, &tree)).await.unwrap_err();
        assert_eq!(error.code, FaultCode::BadRequest, "{error}");
        server.add(image_of(plain, &tree)).await.unwrap();
    }
    server.kill();
    for (plain, refused) in refused {
        rename_stored(data.path(), plain, refused);
        names.push(refused);
    }
    names.sort_unstable();
    let server = Server::start(data.path());
    assert_eq!(list(&server).await, names);
    for image in &names {
        assert_eq!(get(&server, image, 0).await.unwrap().content.name, name(image));
    }
    for (_, refused) in refused {
        delete(&server, refused).await.unwrap();
    }
}

#[tokio::test]
async fn lists_come_in_pages() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[]);
    server.upload_tree(&tree, &[]).await;
    server.add(image_of("n/0000", &tree)).await.unwrap();
    server.stop().await;
    // The records are made here: a thousand durable additions take their time.
    let record = std::fs::read(data.path().join("images/n.d/0000.image")).unwrap();
    let body = String::from_utf8(record).unwrap().split_once('\n').unwrap().1.to_owned();
    for number in 1..=1_000 {
        let body = body.replace("n/0000", &format!("n/{number:04}"));
        let digest = ALGORITHM.digest(body.as_bytes());
        let record = format!("dominator-image 1 {digest}\n{body}");
        std::fs::write(data.path().join(format!("images/n.d/{number:04}.image")), record).unwrap();
    }
    let server = Server::start(data.path());
    let first = server.client.call::<ListImages>(&ListImagesRequest { after: None }).await.unwrap();
    assert_eq!((first.images.len(), first.more), (1_000, true));
    let after = first.images.last().map(|image| image.name.clone());
    assert_eq!(after, Some(name("n/0999")));
    let second = server.client.call::<ListImages>(&ListImagesRequest { after }).await.unwrap();
    let names: Vec<_> = second.images.iter().map(|image| image.name.as_str()).collect();
    assert_eq!((names, second.more), (vec!["n/1000"], false));
}

#[tokio::test]
async fn a_name_is_used_once_even_over_restarts() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[]);
    server.upload_tree(&tree, &[]).await;
    assert_eq!(
        delete(&server, "a").await.unwrap_err(),
        expected(FaultCode::NotFound, "there is no image a")
    );
    server.add(image_of("a", &tree)).await.unwrap();
    let exists = "image a exists already; an image never changes, so add it under another name";
    assert_eq!(
        server.add(image_of("a", &tree)).await.unwrap_err(),
        expected(FaultCode::Exists, exists)
    );
    delete(&server, "a").await.unwrap();
    let gone = expected(
        FaultCode::Gone,
        "image a was deleted; a name is never used again, so take another",
    );
    let check = async |server: &Server| {
        assert_eq!(server.add(image_of("a", &tree)).await.unwrap_err(), gone);
        assert_eq!(get(server, "a", 0).await.unwrap_err(), gone);
        assert_eq!(delete(server, "a").await.unwrap_err(), gone);
        assert_eq!(list(server).await, [""; 0]);
        assert_eq!(server.missing(&[tree.digest()]).await, []);
    };
    check(&server).await;
    server.kill();
    check(&Server::start(data.path())).await;
}

#[tokio::test]
async fn a_deletion_that_was_cut_is_finished_at_the_next_start() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[]);
    server.upload_tree(&tree, &[]).await;
    server.add(image_of("x/a", &tree)).await.unwrap();
    server.kill();
    let record = data.path().join("images/x.d/a.image");
    std::fs::write(record.with_extension("deleted"), "deleted\n").unwrap();
    let server = Server::start(data.path());
    assert_eq!(list(&server).await, [""; 0]);
    assert_eq!(get(&server, "x/a", 0).await.unwrap_err().code, FaultCode::Gone);
    assert!(!record.exists());
}

#[tokio::test]
async fn a_damaged_record_is_reported_and_harms_no_other_image() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[]);
    server.upload_tree(&tree, &[]).await;
    for image in ["bad", "copied", "good"] {
        server.add(image_of(image, &tree)).await.unwrap();
    }
    server.kill();
    let path = |image: &str| data.path().join(format!("images/{image}.image"));
    let mut bytes = std::fs::read(path("bad")).unwrap();
    let last = bytes.len() - 4;
    bytes[last] ^= 1;
    std::fs::write(path("bad"), bytes).unwrap();
    std::fs::copy(path("good"), path("copied")).unwrap();

    let server = Server::start(data.path());
    assert_eq!(list(&server).await, ["good"]);
    let why = "it was changed or cut short after it was written";
    for image in ["bad", "copied"] {
        let text = format!("the record of image {image} cannot be used: {why}");
        assert_eq!(get(&server, image, 0).await.unwrap_err(), expected(FaultCode::Internal, text));
        let code = server.add(image_of(image, &tree)).await.unwrap_err().code;
        assert_eq!(code, FaultCode::Exists);
    }
    assert!(server.get("/", "").text().contains(why));
    delete(&server, "bad").await.unwrap();
    assert_eq!(get(&server, "bad", 0).await.unwrap_err().code, FaultCode::Gone);
}

#[tokio::test]
async fn a_record_that_is_not_listed_is_not_given() {
    let (data, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start(data.path());
    let tree = tree_of(&[("/a", b"a")]);
    server.upload_tree(&tree, &[b"a"]).await;
    server.add(image_of("a", &tree)).await.unwrap();
    // As it looks while a record is being made durable.
    let observer = Server::start(other.path());
    let record = "images/a.image";
    std::fs::copy(data.path().join(record), other.path().join(record)).unwrap();
    assert_eq!(get(&observer, "a", 0).await.unwrap_err().code, FaultCode::NotFound);
    assert_eq!(list(&observer).await, [""; 0]);
    observer.stop().await;
    server.stop().await;
}

#[tokio::test]
async fn a_caller_waits_for_an_image() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[]);
    server.upload_tree(&tree, &[]).await;
    let begun = Instant::now();
    let fault = get(&server, "late", 100).await.unwrap_err();
    assert_eq!(fault, expected(FaultCode::NotFound, "there is no image late"));
    assert!(begun.elapsed() >= Duration::from_millis(100));

    let waiting = get(&server, "late", 20_000);
    let adding = async {
        server.add(image_of("other", &tree)).await.unwrap();
        server.add(image_of("late", &tree)).await.unwrap();
    };
    let (got, ()) = tokio::join!(waiting, adding);
    assert_eq!(got.unwrap().content.name, name("late"));
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn an_image_needs_every_directory_and_every_object() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[("/etc/passwd", PASSWD), ("/etc/shadow", b"secret"), ("/srv/x", b"x")]);
    let content = image_of("base", &tree);
    let directories = directories(&tree);
    let missing = |text: String| {
        expected(FaultCode::NotFound, format!("{text}: upload it, then add the image again"))
    };
    let no_directory = |digest, more| {
        let what = format!("directory {digest} of the tree is not on this server");
        missing(format!("{what} ({more} more are missing)"))
    };
    assert_eq!(server.add(content.clone()).await.unwrap_err(), no_directory(tree.digest(), 0));

    server.upload(&[&directories[0].1]).await;
    let below = directories[1].0.min(directories[2].0);
    assert_eq!(server.add(content.clone()).await.unwrap_err(), no_directory(below, 1));

    server.upload(&[&directories[1].1, &directories[2].1, PASSWD]).await;
    let shadow = ALGORITHM.digest(b"secret");
    let text = format!("object {shadow} of /etc/shadow is not on this server (1 more are missing)");
    assert_eq!(server.add(content.clone()).await.unwrap_err(), missing(text));

    server.upload(&[b"secret", b"x"]).await;
    server.add(content).await.unwrap();
}

#[tokio::test]
async fn an_image_that_no_machine_can_equal_is_refused_by_path() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());

    let mut builder = TreeBuilder::new(ALGORITHM);
    let path: TreePath = "/big".parse().unwrap();
    builder.insert(path, file(PASSWD, 5_000)).unwrap();
    let tree = builder.finish().unwrap();
    server.upload_tree(&tree, &[PASSWD]).await;
    let id = ALGORITHM.digest(PASSWD);
    let text = format!("/big has 5000 bytes in the tree, but its object {id} has 26");
    let fault = server.add(image_of("a", &tree)).await.unwrap_err();
    assert_eq!(fault, expected(FaultCode::BadRequest, text));

    let tree = tree_of(&[("/var/log/syslog", PASSWD)]);
    server.upload_tree(&tree, &[]).await;
    let mut content = image_of("a", &tree);
    content.filter = Some(Filter::new(["/var/log/.*"]).unwrap());
    let text = "the image cannot be added: /var/log/syslog is in the image, but its filter leaves \
                that path to the machines";
    let fault = server.add(content).await.unwrap_err();
    assert_eq!(fault, expected(FaultCode::BadRequest, text));

    let tree = tree_of(&[("/.subd/x", PASSWD)]);
    server.upload_tree(&tree, &[]).await;
    let fault = server.add(image_of("a", &tree)).await.unwrap_err();
    assert_eq!(fault.code, FaultCode::BadRequest);
    assert!(fault.message.contains("/.subd is in the image"), "{fault}");

    let mut content = image_of("a", &tree);
    content.root = id;
    let fault = server.add(content).await.unwrap_err();
    assert_eq!(fault.code, FaultCode::BadRequest);
    let text =
        format!("object {id}, which the tree names as a directory, is not a valid directory");
    assert!(fault.message.starts_with(&text), "{fault}");
    assert_eq!(list(&server).await, [""; 0]);
}

#[tokio::test]
async fn a_bomb_of_directories_is_refused_at_once() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    // Forty directories, each with all of the one below twice, make a tera of paths. No honest
    // encoder makes them, so the digest of the one below is put into the bytes.
    let below = tree_of(&[("/a", PASSWD)]);
    let entries = [b"a", b"b"].map(|name| model::tree::Entry {
        name: model::tree::Name::new(name).unwrap(),
        child: model::tree::Child::Directory(below.root().clone()),
    });
    let metadata = Metadata::new(0o755, 0, 0);
    let twice = model::tree::Directory::new(ALGORITHM, metadata, entries.into()).unwrap();
    let mut encodings = vec![below.root().encode(), twice.encode()];
    let places: Vec<usize> = (0..encodings[1].len())
        .filter(|&at| encodings[1][at..].starts_with(below.digest().digest()))
        .collect();
    assert_eq!(places.len(), 2);
    for _ in 0..40 {
        let mut next = encodings[encodings.len() - 1].clone();
        let id = ALGORITHM.digest(&next);
        for &at in &places {
            next[at..at + id.digest().len()].copy_from_slice(id.digest());
        }
        encodings.push(next);
    }
    let root = ALGORITHM.digest(&encodings[encodings.len() - 1]);
    let encodings: Vec<&[u8]> = encodings.iter().map(|bytes| &bytes[..]).collect();
    server.upload(&encodings).await;
    let begun = Instant::now();
    let mut content = image_of("bomb", &tree_of(&[]));
    content.root = root;
    let fault = server.add(content).await.unwrap_err();
    assert_eq!(fault.code, FaultCode::TooLarge, "{fault}");
    assert!(begun.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn an_object_with_the_wrong_length_on_disk_is_put_aside_when_an_image_needs_it() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[("/etc/passwd", PASSWD)]);
    server.upload_tree(&tree, &[PASSWD]).await;
    let id = ALGORITHM.digest(PASSWD);
    let path = stored(data.path(), &id);
    // What a power failure may leave of a file that was not yet made durable.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, &PASSWD[..10]).unwrap();
    let fault = server.add(image_of("a", &tree)).await.unwrap_err();
    assert_eq!(fault.code, FaultCode::NotFound, "{fault}");
    assert!(fault.message.contains("of /etc/passwd"), "{fault}");
    assert_eq!(server.missing(&[id]).await, [id]);
    server.upload(&[PASSWD]).await;
    server.add(image_of("a", &tree)).await.unwrap();
}

#[tokio::test]
async fn an_image_that_has_expired_is_not_added() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[]);
    server.upload_tree(&tree, &[]).await;
    let expires_at = Some(Time { seconds: 1_000, nanoseconds: 0 });
    let notes = Notes { expires_at, ..Notes::default() };
    let request = AddImageRequest { content: image_of("a", &tree), notes };
    let fault = fault(server.client.call::<AddImage>(&request).await.unwrap_err());
    let text = "image a would have expired before it was added";
    assert_eq!(fault, expected(FaultCode::BadRequest, text));
}

#[tokio::test]
async fn of_many_that_add_one_name_one_succeeds() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_of(&[]);
    server.upload_tree(&tree, &[]).await;
    let adds = (0..8).map(|_| server.add(image_of("one", &tree)));
    let results = futures_util::future::join_all(adds).await;
    let added = results.iter().filter(|result| result.is_ok()).count();
    let exists = |fault: &Fault| fault.code == FaultCode::Exists;
    let refused = results.iter().filter(|result| result.as_ref().is_err_and(exists)).count();
    assert_eq!((added, refused), (1, 7));
}

#[tokio::test]
async fn a_computed_file_must_be_listed() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path());
    let tree = tree_with_computed();
    server.upload_tree(&tree, &[b"a"]).await;
    let mut content = image_of("a", &tree);
    content.computed.clear();
    let fault = server.add(content).await.unwrap_err();
    assert_eq!(fault.code, FaultCode::BadRequest);
    assert!(fault.message.ends_with("see /etc/issue"), "{fault}");
    server.add(image_of("a", &tree)).await.unwrap();
}
