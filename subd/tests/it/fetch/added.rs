//! Objects that a caller sends.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use api::fault::FaultCode;
use api::file_generator::{CONTENT_BYTES_MAX, ComputedContent};
use api::subd::{AddObjects, AddObjectsRequest, Pause, Paused};
use model::escape::ByteText;
use model::tree::{Metadata, Time};
use model::trigger::Triggers;
use rpc::client::CallError;

use super::*;
use crate::fixture::{file, request};
use crate::process::Process;

fn sent(content: &[u8]) -> ComputedContent {
    ComputedContent { id: object(content).id, bytes: ByteText(content.to_vec()) }
}

async fn add(sub: &Sub, contents: &[ComputedContent]) -> Result<(), CallError> {
    let request = AddObjectsRequest { contents: contents.to_vec() };
    sub.client.call::<AddObjects>(&request).await.map(|_| ())
}

/// Why it was refused.
fn why(refused: Result<(), CallError>) -> (FaultCode, String) {
    let error = refused.unwrap_err();
    let fault = error.fault().unwrap();
    (fault.code, fault.message.clone())
}

fn sorted(contents: &[ComputedContent]) -> Vec<ObjectId> {
    let mut ids: Vec<ObjectId> = contents.iter().map(|one| one.id).collect();
    ids.sort();
    ids
}

/// The owners and modes of the cache and of all that is in it, without repetition.
fn rights(root: &Path) -> Vec<(u32, u32, u32)> {
    let directory = root.join(".subd/objects");
    let inside = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let mut rights: Vec<_> = [root.join(".subd"), directory]
        .into_iter()
        .chain(inside)
        .map(|path| {
            let status = std::fs::symlink_metadata(path).unwrap();
            (status.uid(), status.gid(), status.mode())
        })
        .collect();
    rights.sort_unstable();
    rights.dedup();
    rights
}

/// For root alone.
const DIRECTORY: (u32, u32, u32) = (0, 0, 0o40_700);
const FILE: (u32, u32, u32) = (0, 0, 0o100_600);

#[tokio::test(flavor = "multi_thread")]
async fn what_was_sent_is_in_the_cache_and_an_update_uses_it() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let contents = [sent(b"password = secret"), sent(b""), sent(&content(1, 3 * MIB))];
    let before = sub.poll().await.version;
    add(&sub, &contents).await.unwrap();
    let after = sub.poll().await.version;
    assert_eq!(after.generation, before.generation + 1);
    assert_eq!(cached(&sub).await, sorted(&contents));
    assert_eq!(rights(&sub.root), [DIRECTORY, FILE]);
    // What is there is not written again.
    let inode = || {
        let name = format!("/.subd/objects/{}", contents[0].id);
        std::fs::metadata(sub.at(&name)).unwrap().ino()
    };
    let first = inode();
    add(&sub, &contents).await.unwrap();
    assert_eq!((inode(), sub.poll().await.version), (first, after));

    let want = Edit::of(&empty, &source)
        .put("/secret", file(&source, "password = secret", Metadata::new(0o640, 7, 8)))
        .file("/empty", "")
        .done();
    let (reply, plan) = sub.plan(&want).await;
    sub.prepare(&request(1, &reply, &want, plan)).await.unwrap();
    assert_eq!(sub.commit(1).await.outcome, UpdateOutcome::Done);
    assert_eq!(sub.tree().await.1.digest(), want.digest());
    assert_eq!(cached(&sub).await, [contents[2].id]);
    let status = std::fs::metadata(sub.at("/secret")).unwrap();
    assert_eq!((status.uid(), status.gid(), status.mode()), (7, 8, 0o100_640));
    let log = std::fs::read_to_string(sub.at("/.subd/audit/audit.log")).unwrap();
    assert!(log.contains(&format!("objects={},", contents[0].id)), "{log}");
    assert!(!log.contains("password"), "{log}");
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn content_with_another_digest_is_refused_with_all_after_it() {
    let sub = Sub::start().await;
    let known = sent(b"known");
    add(&sub, std::slice::from_ref(&known)).await.unwrap();
    let wrong = Algorithm::Blake3.digest(b"wrong");
    for (id, length) in [(object(b"right").id, "5"), (known.id, "5")] {
        let bad = ComputedContent { id, bytes: ByteText(b"wrong".to_vec()) };
        let refused = add(&sub, &[sent(b"first"), bad, sent(b"last")]).await;
        let text =
            format!("{length} bytes that hash to {wrong} came for object {id} of {length} bytes");
        assert_eq!(why(refused), (FaultCode::BadRequest, text));
        assert_eq!(cached(&sub).await, sorted(&[known.clone(), sent(b"first")]));
        assert_eq!(partials(&sub), [""; 0]);
    }
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn content_that_is_too_long_is_refused_with_the_whole_request() {
    let sub = Sub::start().await;
    let (largest, larger) = (content(1, CONTENT_BYTES_MAX), content(2, CONTENT_BYTES_MAX + 1));
    let refused = add(&sub, &[sent(b"first"), sent(&larger)]).await;
    let id = object(&larger).id;
    let text = format!("object {id} has 4194305 bytes: at most 4194304 are accepted");
    assert_eq!(why(refused), (FaultCode::TooLarge, text));
    assert_eq!(cached(&sub).await, []);
    // The largest request: a batch that ends with the largest content.
    let contents = [sent(&largest), sent(&larger[..CONTENT_BYTES_MAX - 1]), sent(&larger[1..])];
    add(&sub, &contents).await.unwrap();
    assert_eq!(cached(&sub).await, sorted(&contents));
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_full_disk_nothing_is_left_of_what_does_not_fit() {
    let disk = Disk::tmpfs("size=16m,mode=755");
    let sub = Sub::start_on(disk.0.path(), &[]).await;
    // Room is left for the record of the call.
    std::fs::write(sub.at("/.subd/brim"), vec![0; 12 * MIB]).unwrap();
    let large = sent(&content(1, CONTENT_BYTES_MAX));
    let (code, text) = why(add(&sub, &[sent(b"first"), large.clone()]).await);
    assert_eq!(code, FaultCode::NoSpace);
    assert!(text.starts_with("the objects need 4.2 MB, "), "{text}");
    assert_eq!((cached(&sub).await, partials(&sub)), (Vec::new(), Vec::new()));
    std::fs::remove_file(sub.at("/.subd/brim")).unwrap();
    add(&sub, &[sent(b"first"), large.clone()]).await.unwrap();
    assert_eq!(cached(&sub).await, sorted(&[sent(b"first"), large]));
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn is_refused_during_an_update_and_not_during_a_pause() {
    let place = tempfile::tempdir().unwrap();
    let (root, wait) = (place.path().join("root"), place.path().join("wait"));
    std::fs::create_dir(&root).unwrap();
    let command = place.path().join("service");
    let script = format!("#!/bin/sh\nwhile test -e {}; do sleep 0.02; done\n", wait.display());
    std::fs::write(&command, script).unwrap();
    std::fs::set_permissions(&command, PermissionsExt::from_mode(0o755)).unwrap();
    let flags = ["--service-command", command.to_str().unwrap()];
    let (sub, source) = (Sub::start_on(&root, &flags).await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let want = Edit::of(&empty, &source).file("/version", "1").done();
    add(&sub, &[sent(b"1")]).await.unwrap();
    std::fs::write(&wait, "").unwrap();
    let (reply, plan) = sub.plan(&want).await;
    let mut update = request(1, &reply, &want, plan);
    update.triggers =
        Triggers::from_json(r#"[{"MatchLines": ["/version"], "Service": "web"}]"#).unwrap();
    sub.prepare(&update).await.unwrap();
    add(&sub, &[sent(b"2")]).await.unwrap();
    sub.client.call::<Commit>(&CommitRequest { update_id: 1 }).await.unwrap();
    let refused = add(&sub, &[sent(b"3")]).await;
    assert_eq!(why(refused), (FaultCode::Busy, "update 1 is under way".to_owned()));
    std::fs::remove_file(&wait).unwrap();
    let ended = |reply: &PollReply| reply.activity == Activity::Idle;
    let reply = sub.poll_until(ended).await;
    assert_eq!(reply.last_update.unwrap().outcome, UpdateOutcome::Done);
    assert_eq!(cached(&sub).await, [object(b"2").id]);

    let until = Time { seconds: reply.clock.seconds + 3_600, ..reply.clock };
    let paused = Paused { until, reason: "disk swap".to_owned() };
    sub.client.call::<Pause>(&paused).await.unwrap();
    add(&sub, &[sent(b"3")]).await.unwrap();
    assert_eq!(cached(&sub).await, sorted(&[sent(b"2"), sent(b"3")]));
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_while_it_writes_it_has_whole_objects_that_only_root_may_read() {
    let place = tempfile::tempdir().unwrap();
    let objects = place.path().join(".subd/objects");
    let mut process = Process::start_with(place.path(), &["--insecure"]);
    for round in 0..9_u8 {
        let contents: Vec<ComputedContent> =
            (0..3).map(|number| sent(&content(9 * number + round, CONTENT_BYTES_MAX))).collect();
        let request = AddObjectsRequest { contents: contents.clone() };
        let client = process.client.clone();
        let adding = tokio::spawn(async move { client.call::<AddObjects>(&request).await });
        // Killed as soon as one, two or three files are there, the last of them incomplete.
        let known = 3 * usize::from(round);
        let enough = known + usize::from(round % 3) + 1;
        while std::fs::read_dir(&objects).unwrap().count() < enough {
            std::thread::sleep(Duration::from_micros(100));
        }
        process.child.kill().unwrap();
        process.child.wait().unwrap();
        let _cut = adding.await.unwrap();
        assert_eq!(rights(place.path()), [DIRECTORY, FILE]);
        process = Process::start_with(place.path(), &["--insecure"]);
        let sub = Sub::elsewhere(place.path(), process.client.clone());
        let left = cached(&sub).await.len() - known;
        println!("round {round}: {left} objects are there");
        assert_eq!(partials(&sub), [""; 0]);
        add(&sub, &contents).await.unwrap();
        let all = cached(&sub).await;
        assert!(sorted(&contents).iter().all(|id| all.contains(id)));
        assert_eq!(all.len(), known + 3);
        sub.stop().await;
    }
    assert_eq!(process.stop(), Some(0));
}
