//! What is refused, what fails, and that then nothing is changed.

use std::sync::Arc;

use api::fault::FaultCode;
use api::subd::{
    Activity, CacheReport, Cleanup, CleanupRequest, Commit, CommitRequest, FetchFailure,
    FetchObject, Prepare, PrepareRequest, UpdateOutcome,
};
use model::object::{Algorithm, ObjectId};
use model::plan::{Action, Blocked, Difference, Obstacle, Operation, Plan};
use model::tree::text::to_text;
use model::tree::{Metadata, Node, Tree};

use crate::fixture::{Edit, Source, Sub, path, request};

/// A sub that has `first`, with `second` staged as update 2.
async fn staged(
    first: impl Fn(Edit<'_>) -> Edit<'_>,
    second: impl Fn(Edit<'_>) -> Edit<'_>,
) -> (Sub, Source, Tree) {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let first = first(Edit::of(&empty, &source)).done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
    let second = second(Edit::of(&first, &source)).done();
    let (_, plan) = sub.plan(&second).await;
    sub.fetch_for(2, &source, &plan).await;
    let (reply, plan) = sub.plan(&second).await;
    let staged = sub.prepare(&request(2, &reply, &second, plan)).await.unwrap();
    assert_eq!(staged.activity, Activity::Prepared { update_id: 2 });
    assert_eq!(to_text(&sub.tree().await.1), to_text(&first));
    (sub, source, first)
}

async fn code_of_prepare(sub: &Sub, request: &PrepareRequest) -> Option<FaultCode> {
    let result = sub.client.call::<Prepare>(request).await;
    result.err().and_then(|error| error.code())
}

async fn code_of_commit(sub: &Sub, update_id: u64) -> Option<FaultCode> {
    let result = sub.client.call::<Commit>(&CommitRequest { update_id }).await;
    result.err().and_then(|error| error.code())
}

fn rolled_back(outcome: &UpdateOutcome) -> &str {
    let UpdateOutcome::RolledBack(why) = outcome else { panic!("{outcome:?}") };
    why
}

fn cached(reply: &api::subd::PollReply) -> Vec<ObjectId> {
    match &reply.cache {
        Some(CacheReport::Full(objects)) => objects.clone(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_that_fails_at_its_end_leaves_everything_as_it_was() {
    let (sub, source, first) = staged(
        |edit| {
            edit.directory("/becomes-file", 0o755)
                .file("/becomes-file/x", "x")
                .file("/becomes-directory", "y")
                .file("/content", "old")
                .directory("/goes", 0o2751)
                .file("/goes/too", "z")
                .file("/mode", "mode")
                .symlink("/symlink", "a")
                .file("/carrier", "carrier")
        },
        |edit| {
            edit.remove("/becomes-file")
                .file("/becomes-file", "file")
                .directory("/becomes-directory", 0o700)
                .file("/becomes-directory/new", "new")
                .file("/content", "new content")
                .remove("/goes")
                .metadata("/mode", |metadata| (metadata.mode, metadata.uid) = (0o4711, 5))
                .metadata("/", |metadata| metadata.mode = 0o700)
                .symlink("/symlink", "b")
                .link("/linked", "/carrier")
                .directory("/new", 0o755)
                .file("/new/file", "new")
        },
    )
    .await;
    // The last step removes this directory.
    std::fs::write(sub.at("/goes/unexpected"), "precious").unwrap();
    let last = sub.commit(2).await;
    let why = "/goes changed since it was scanned: it holds something that is not in the scan";
    assert_eq!(rolled_back(&last.outcome), why);
    std::fs::remove_file(sub.at("/goes/unexpected")).unwrap();
    assert_eq!(to_text(&sub.rescanned().await), to_text(&first));
    assert_eq!(std::fs::metadata(sub.at("/carrier")).unwrap().modified().unwrap(), {
        let since = std::time::Duration::new(1_600_000_000, 123_456_789);
        std::time::SystemTime::UNIX_EPOCH + since
    });
    let reply = sub.poll().await;
    // Not `mode`: its owner may have opened it while it was there.
    let mut objects: Vec<ObjectId> = ["file", "new", "new content"]
        .map(|content| Algorithm::Blake3.digest(content.as_bytes()))
        .into();
    objects.sort();
    assert_eq!(cached(&reply), objects, "the objects are there for the next try");
    assert_eq!(reply.last_image.unwrap().as_str(), "test/1");
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_goes_with_a_directory_that_the_scan_did_not_see() {
    let (sub, source, first) = staged(
        |edit| edit.directory("/d", 0o755).directory("/d/e", 0o755).file("/d/e/x", "x"),
        |edit| edit.remove("/d").file("/d", "now a file").file("/a-before", "a"),
    )
    .await;
    std::fs::write(sub.at("/d/e/precious"), "precious").unwrap();
    let last = sub.commit(2).await;
    let why = "/d/e/precious changed since it was scanned: it is not in the scan";
    assert_eq!(rolled_back(&last.outcome), why);
    assert_eq!(std::fs::read(sub.at("/d/e/precious")).unwrap(), b"precious");
    std::fs::remove_file(sub.at("/d/e/precious")).unwrap();
    assert_eq!(to_text(&sub.rescanned().await), to_text(&first));
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_appeared_meanwhile_is_not_overwritten() {
    let (sub, source, _) = staged(|edit| edit, |edit| edit.file("/a", "a").file("/new", "b")).await;
    std::fs::write(sub.at("/new"), "precious").unwrap();
    let last = sub.commit(2).await;
    let why = "/new changed since it was scanned: something is there now";
    assert_eq!(rolled_back(&last.outcome), why);
    assert_eq!(std::fs::read(sub.at("/new")).unwrap(), b"precious");
    assert!(!sub.at("/a").exists());
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_may_be_repeated() {
    let (sub, source, first) = staged(|edit| edit, |edit| edit.file("/f", "f")).await;
    let (reply, plan) = sub.plan(&first).await;
    let again = request(2, &reply, &first, plan);
    assert_eq!(code_of_prepare(&sub, &again).await, None);
    assert_eq!(sub.poll().await.activity, Activity::Prepared { update_id: 2 });
    assert_eq!(code_of_commit(&sub, 3).await, Some(FaultCode::NotFound));
    assert_eq!(sub.commit(2).await.outcome, UpdateOutcome::Done);
    let before = sub.poll().await.version;
    assert_eq!(code_of_commit(&sub, 2).await, None);
    assert_eq!(code_of_prepare(&sub, &again).await, None);
    assert_eq!(sub.fetch(2, &[&source], &[]).await.objects, 1);
    assert_eq!(sub.poll().await.version, before);
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_staged_update_is_replaced_or_expires() {
    let (sub, source, first) = staged(
        |edit| edit,
        |edit| edit.directory("/d", 0o755).file("/d/f", "f").link("/h", "/d/f"),
    )
    .await;
    let object = Algorithm::Blake3.digest(b"f");
    assert_eq!(cached(&sub.poll().await), [object]);
    let third = Edit::of(&first, &source).file("/g", "f").done();
    let (reply, plan) = sub.plan(&third).await;
    let request = PrepareRequest { expires_seconds: 1, ..request(3, &reply, &third, plan) };
    sub.prepare(&request).await.unwrap();
    assert_eq!(code_of_commit(&sub, 2).await, Some(FaultCode::NotFound));
    let idle = sub.poll_until(|reply| reply.activity == Activity::Idle).await;
    assert_eq!(cached(&idle), [object]);
    assert_eq!(code_of_commit(&sub, 3).await, Some(FaultCode::NotFound));
    assert_eq!(std::fs::read_dir(sub.at("/.subd/staging")).unwrap().count(), 0);
    sub.client.call::<Cleanup>(&CleanupRequest { objects: vec![object] }).await.unwrap();
    assert_eq!(cached(&sub.poll().await), []);
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_plans_that_do_not_fit() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (reply, empty) = sub.tree().await;
    let create = |text: &str, node: Node| Plan {
        operations: vec![Operation {
            path: path(text),
            action: Action::Create(node),
            reason: vec![Difference::Missing],
        }],
        blocked: Vec::new(),
    };
    let directory = || Node::Directory(Metadata::new(0o755, 0, 0));
    let good = request(1, &reply, &empty, create("/d", directory()));
    let mut other_instance = good.clone();
    other_instance.expects.instance += 1;
    let mut other_root = good.clone();
    other_root.expects.root = Algorithm::Blake3.digest(b"other");
    let mut other_scope = good.clone();
    other_scope.expects.scope.0 = Algorithm::Blake3.digest(b"other");
    let object = crate::fixture::file(&source, "not fetched", Metadata::new(0o644, 0, 0));
    let absent = request(1, &reply, &empty, create("/f", object));
    let mut blocked = good.clone();
    let path = path("/m");
    Arc::make_mut(&mut blocked.plan).blocked = vec![Blocked { path, why: Obstacle::MountPoint }];
    let own = request(1, &reply, &empty, create("/.subd/x", directory()));
    let table = [
        (&other_instance, FaultCode::Stale),
        (&other_root, FaultCode::Stale),
        (&other_scope, FaultCode::Stale),
        (&absent, FaultCode::Stale),
        (&blocked, FaultCode::BadRequest),
        (&own, FaultCode::BadRequest),
    ];
    for (request, code) in table {
        assert_eq!(code_of_prepare(&sub, request).await, Some(code), "{request:?}");
    }
    assert_eq!(sub.poll().await.last_update, None);
    // What only the disk knows is told by the outcome.
    std::fs::create_dir(sub.at("/d")).unwrap();
    let staged = sub.prepare(&good).await.map(|reply| reply.last_update.unwrap().outcome);
    match staged {
        Ok(UpdateOutcome::NotPrepared(why)) => {
            let expected = "/d cannot be changed: it changed since it was scanned: something is \
                            there now";
            assert_eq!(why, expected);
        }
        Err(error) => assert_eq!(error.code(), Some(FaultCode::Stale), "the scan saw it already"),
        other => panic!("{other:?}"),
    }
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_content_is_not_kept_and_asked_for_elsewhere() {
    let sub = Sub::start().await;
    let (bad, good) = (Source::start().await, Source::start().await);
    let object = |content: &str| FetchObject {
        id: Algorithm::Blake3.digest(content.as_bytes()),
        size_bytes: content.len() as u64,
    };
    let (right, other) = (object("right"), object("other"));
    good.add(b"right");
    bad.add(b"other");
    bad.objects.lock().unwrap().insert(right.id, "wrong".into());
    let last = sub.fetch(1, &[&bad], &[right, other]).await;
    let Some(FetchFailure::Sources(why)) = last.error else { panic!("{last:?}") };
    let wrong = Algorithm::Blake3.digest(b"wrong");
    let expected = format!(
        "1 objects missing ({}...): {}: 5 bytes that hash to {wrong} came for object {} of 5 bytes",
        right.id, bad.address, right.id
    );
    assert_eq!(why, expected);
    assert_eq!((last.objects, last.bytes), (1, 5), "what was right stays");
    assert_eq!(cached(&sub.poll().await), [other.id]);
    let last = sub.fetch(2, &[&bad, &good], &[right, other]).await;
    assert_eq!((last.error, last.objects), (None, 1));
    let both = {
        let mut both = vec![right.id, other.id];
        both.sort();
        both
    };
    assert_eq!(cached(&sub.poll().await), both);
    let last = sub.fetch(3, &[&good, &bad], &[object("nowhere")]).await;
    let Some(FetchFailure::Sources(why)) = last.error else { panic!("{last:?}") };
    assert!(why.contains(&format!("{}: it lacks objects; ", good.address)), "{why}");
    let huge = FetchObject { size_bytes: 1 << 60, ..object("huge") };
    let last = sub.fetch(4, &[&good], &[huge]).await;
    assert!(matches!(last.error, Some(FetchFailure::InsufficientSpace { .. })), "{last:?}");
    let address = good.address.clone();
    good.stop().await;
    let mut nobody = Source::start().await;
    nobody.address = address;
    let last = sub.fetch(5, &[&nobody], &[object("nobody")]).await;
    assert!(matches!(last.error, Some(FetchFailure::Sources(_))), "{last:?}");
    nobody.stop().await;
    bad.stop().await;
    sub.stop().await;
}
