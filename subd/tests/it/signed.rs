//! A subd that takes only signed images, at a server whose objects somebody has exchanged.

use std::path::Path;

use api::fault::{Fault, FaultCode};
use api::subd::{OfferImage, OfferImageRequest, PollReply, PrepareRequest, SetConfiguration};
use bytes::Bytes;
use certs::signing_key::SigningKey;
use model::image::{Content, FORMAT, HealthCheck};
use model::plan::Plan;
use model::signing::Statement;
use model::tree::Tree;
use model::trigger::Triggers;
use rpc::client::CallError;

use crate::fixture::{Edit, Source, Sub, request, scan_by};

/// Made by `ssh-keygen`; nobody uses it.
const KEY: &str = include_str!("../../../common/certs/tests/keys/alice");

fn fault_of(error: CallError) -> Fault {
    match error {
        CallError::Fault { source, .. } => source,
        other => panic!("{other:?}"),
    }
}

pub fn key() -> SigningKey {
    SigningKey::read(KEY, None).unwrap()
}

fn offer(image: u64, want: &Tree, signed: u64, sources: &[&Source]) -> OfferImageRequest {
    let content = Content {
        format: FORMAT,
        name: format!("test/{image}").parse().unwrap(),
        root: want.digest(),
        filter: Some(model::filter::Filter::new::<&str>([]).unwrap()),
        triggers: Triggers::default(),
        computed: Vec::new(),
        health_check: None::<HealthCheck>,
        signers: Vec::new(),
    };
    let (image, digest) = (content.name.clone(), content.digest());
    let statement = Statement { image, digest, signed, expires: None };
    let signatures = vec![key().sign(&statement).unwrap()];
    let sources = sources.iter().map(|source| source.address.clone()).collect();
    OfferImageRequest { content, signatures, sources }
}

/// Gives `source` all directories of `tree`.
fn add_directories(source: &Source, tree: &Tree) {
    let mut stack = vec![std::sync::Arc::clone(tree.root())];
    while let Some(directory) = stack.pop() {
        source.add(&directory.encode());
        for entry in directory.entries() {
            if let model::tree::Child::Directory(below) = &entry.child {
                stack.push(std::sync::Arc::clone(below));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_are_what_their_digests_say_or_nothing_is_accepted() {
    let place = tempfile::tempdir().unwrap();
    let (root, keys) = (place.path().join("root"), place.path().join("keys"));
    std::fs::create_dir(&root).unwrap();
    std::fs::write(&keys, key().public_line().unwrap()).unwrap();
    let flags = ["--trusted-keys", keys.to_str().unwrap()];
    let (sub, source) = (Sub::start_on(&root, &flags).await, Source::start().await);
    let want = {
        let (_, empty) = sub.tree().await;
        Edit::of(&empty, &source).directory("/d", 0o755).file("/d/f", "f").done()
    };
    sub.client.call::<SetConfiguration>(&scan_by(Default::default())).await.unwrap();
    let give = |request: OfferImageRequest| {
        let client = sub.client.clone();
        async move { client.call::<OfferImage>(&request).await.map_err(fault_of) }
    };
    // Nobody has the tree; somebody has another one under its name; somebody has it.
    let nobody = give(offer(1, &want, 100, &[&source])).await.unwrap_err();
    assert_eq!(nobody.code, FaultCode::Unavailable, "{nobody}");
    let evil = Edit::of(&want, &source).file("/d/f", "evil").done();
    let lie = Bytes::from(evil.root().encode());
    source.objects.lock().unwrap().insert(want.digest(), lie);
    let lied = give(offer(1, &want, 100, &[&source])).await.unwrap_err();
    assert_eq!(lied.code, FaultCode::Unavailable, "{lied}");
    let (reply, plan) = sub.plan(&want).await;
    sub.fetch_for(1, &source, &plan).await;
    let digest = offer(1, &want, 100, &[]).content.digest();
    let order = |reply: &PollReply, plan: Plan| PrepareRequest {
        image_digest: digest,
        ..request(1, reply, &want, plan)
    };
    let refused = sub.prepare(&order(&reply, plan)).await.map_err(fault_of).unwrap_err();
    assert_eq!(refused.code, FaultCode::Untrusted, "{refused}");

    add_directories(&source, &want);
    give(offer(1, &want, 100, &[&source])).await.unwrap();
    // The list of keys is read anew each time.
    let line = std::fs::read(&keys).unwrap();
    for (text, why) in [(&b""[..], "only 0 are trusted"), (b"nonsense", "line 1: ")] {
        std::fs::write(&keys, text).unwrap();
        let (reply, plan) = sub.plan(&want).await;
        let refused = sub.prepare(&order(&reply, plan)).await.map_err(fault_of).unwrap_err();
        assert_eq!(refused.code, FaultCode::Untrusted);
        assert!(refused.message.contains(why), "{refused}");
    }
    std::fs::write(&keys, line).unwrap();
    let (reply, plan) = sub.plan(&want).await;
    sub.prepare(&order(&reply, plan)).await.unwrap();
    // What is staged is not what is accepted.
    let record = root.join(".subd/state/accepted.json");
    assert_eq!(std::fs::read(&record).unwrap(), b"null");
    sub.commit(1).await;
    let accepted: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
    assert_eq!(accepted["signed"], 100);
    assert_eq!(std::fs::read(root.join("d/f")).unwrap(), b"f");

    sub.stop().await;
    older_images_are_refused_after_a_restart(&root, &flags, &want, &source).await;
    source.stop().await;
}

/// The accepted image is remembered over a restart. If it cannot be read, no image is accepted.
async fn older_images_are_refused_after_a_restart(
    root: &Path,
    flags: &[&str],
    want: &Tree,
    source: &Source,
) {
    let record = root.join(".subd/state/accepted.json");
    let sub = Sub::start_on(root, flags).await;
    let again = |signed| {
        let (client, request) = (sub.client.clone(), offer(2, want, signed, &[source]));
        async move { client.call::<OfferImage>(&request).await.map_err(fault_of) }
    };
    let older = again(99).await.unwrap_err();
    assert!(older.message.contains("a newer one was accepted before (test/1"), "{older}");
    again(101).await.unwrap();
    std::fs::write(&record, b"{").unwrap();
    let damaged = again(101).await.unwrap_err();
    assert_eq!(damaged.code, FaultCode::Untrusted);
    assert!(damaged.message.starts_with("accepted.json in the state directory"), "{damaged}");
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_was_told_to_take_only_signed_images_does_so_without_its_configuration() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    let (root, keys) = (at("root"), at("keys"));
    std::fs::create_dir(&root).unwrap();
    std::fs::write(&keys, key().public_line().unwrap()).unwrap();
    let source = Source::start().await;
    let own = root.join(".subd/state/accepted.json");
    let elsewhere = at("state").join("state/accepted.json");
    let trusted = ["--trusted-keys", keys.to_str().unwrap()];
    let (state, name) = (at("state"), "--state");
    let there = [name, state.to_str().unwrap()];
    // The state may be where the flags say, or where they said before.
    let table = [
        (trusted.to_vec(), vec![], vec![&own]),
        ([trusted, there].concat(), there.to_vec(), vec![&elsewhere, &own]),
        ([trusted, there].concat(), vec![], vec![&own, &elsewhere]),
    ];
    for (told, flags, marks) in table {
        // It has taken no image yet.
        Sub::start_on(&root, &told).await.stop().await;
        for text in ["null", "{"] {
            marks.iter().for_each(|mark| assert_eq!(std::fs::read(mark).unwrap(), b"null"));
            std::fs::write(marks[0], text).unwrap();
            let sub = Sub::start_on(&root, &flags).await;
            let (reply, tree) = sub.tree().await;
            let want = Edit::of(&tree, &source).directory("/d", 0o755).done();
            let offer = offer(1, &want, 100, &[&source]);
            let offered = sub.client.call::<OfferImage>(&offer).await.map_err(fault_of);
            let prepared = sub.prepare(&request(1, &reply, &want, sub.plan(&want).await.1)).await;
            for fault in [offered.unwrap_err(), prepared.map_err(fault_of).unwrap_err()] {
                assert_eq!(fault.code, FaultCode::Untrusted, "{fault}");
                assert!(fault.message.contains("started without --trusted-keys"), "{fault}");
            }
            sub.stop().await;
            std::fs::write(marks[0], "null").unwrap();
        }
        // Whoever ends that on the machine itself has every image taken.
        marks.iter().for_each(|mark| std::fs::remove_file(mark).unwrap());
        let sub = Sub::start_on(&root, &flags).await;
        let (reply, tree) = sub.tree().await;
        let want = Edit::of(&tree, &source).directory("/d", 0o755).done();
        let plan = sub.plan(&want).await.1;
        sub.prepare(&request(1, &reply, &want, plan)).await.unwrap();
        sub.stop().await;
    }
    source.stop().await;
}
