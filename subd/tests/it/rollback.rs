//! Updates that fail in the middle because the machine is not as it was: all else is put back.

use api::subd::UpdateOutcome;
use model::tree::Tree;
use model::tree::text::to_text;

use crate::fixture::{Edit, Source, Sub, set_immutable};

/// Stages an update that changes `/a`, `/d/f`, `/gone` and `/mode`, lets `spoil` happen, commits,
/// and gives why it was rolled back.
async fn spoilt(spoil: impl FnOnce(&Sub)) -> (Sub, Source, Tree, String) {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let first = Edit::of(&empty, &source)
        .file("/a", "a")
        .directory("/d", 0o755)
        .file("/d/f", "f")
        .file("/gone", "gone")
        .file("/mode", "mode")
        .done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
    let second = Edit::of(&first, &source)
        .file("/a", "a of the second")
        .file("/d/f", "f of the second")
        .remove("/gone")
        .metadata("/mode", |metadata| metadata.mode = 0o600)
        .file("/new", "new")
        .done();
    let (_, plan) = sub.plan(&second).await;
    sub.fetch_for(2, &source, &plan).await;
    let (reply, plan) = sub.plan(&second).await;
    sub.prepare(&crate::fixture::request(2, &reply, &second, plan)).await.unwrap();
    spoil(&sub);
    let last = sub.commit(2).await;
    let UpdateOutcome::RolledBack(why) = last.outcome else { panic!("{last:?}") };
    assert_eq!(std::fs::read(sub.at("/a")).unwrap(), b"a");
    assert!(!sub.at("/new").exists());
    (sub, source, first, why)
}

async fn stop(sub: Sub, source: Source) {
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_removed_does_not_keep_the_rest_from_being_put_back() {
    let (sub, source, _, why) = spoilt(|sub| std::fs::remove_file(sub.at("/gone")).unwrap()).await;
    assert_eq!(why, "/gone changed since it was scanned: it was removed");
    stop(sub, source).await;
    let (sub, source, _, why) = spoilt(|sub| std::fs::remove_dir_all(sub.at("/d")).unwrap()).await;
    assert!(why.contains("/d"), "{why}");
    assert_eq!(std::fs::metadata(sub.at("/gone")).unwrap().len(), 4);
    stop(sub, source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_symlink_in_the_place_of_a_directory_leads_nowhere() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("f"), "f").unwrap();
    let target = outside.path().to_owned();
    let (sub, source, ..) = spoilt(|sub| {
        std::fs::rename(sub.at("/d"), sub.at("/moved")).unwrap();
        std::os::unix::fs::symlink(&target, sub.at("/d")).unwrap();
    })
    .await;
    assert_eq!(std::fs::read(outside.path().join("f")).unwrap(), b"f");
    assert_eq!(std::fs::read(sub.at("/moved/f")).unwrap(), b"f");
    stop(sub, source).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_immutable_file_is_named_and_the_rest_is_put_back() {
    for (path, operation) in [("/d/f", "rename"), ("/mode", "change the mode of")] {
        let mut known = false;
        let spoil = |sub: &Sub| {
            known = set_immutable(&sub.at(path), true);
            if !known {
                std::fs::remove_file(sub.at(path)).unwrap();
            }
        };
        let (sub, source, first, why) = spoilt(spoil).await;
        if known {
            assert!(set_immutable(&sub.at(path), false));
            let expected = format!("{path} cannot be changed: cannot {operation} ");
            assert!(why.starts_with(&expected) && why.contains("EPERM"), "{why}");
            assert_eq!(to_text(&sub.rescanned().await), to_text(&first));
        }
        stop(sub, source).await;
    }
}
