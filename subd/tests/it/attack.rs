//! What somebody may do to a subd, or to the tree while it is changed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::api::subd::{
    Activity, CacheReport, Cleanup, CleanupRequest, Commit, CommitRequest, Configuration,
    FetchFailure, FetchObject, Outcome, Poll, PollRequest, SetConfiguration,
};
use common::filter::Filter;
use common::object::Algorithm;
use common::scope::{Coverage, ScanSettings};
use common::tree::text::to_text;
use common::wire::FaultCode;
use nix::mount::{MsFlags, mount, umount};

use crate::fixture::{Edit, PATIENCE, Source, Sub, request};

/// Swaps the directory `at` with a symlink to `outside`, all the time.
fn swap_all_the_time(at: PathBuf, outside: &Path, stop: Arc<AtomicBool>) -> impl FnOnce() + use<> {
    let (aside, link) = (at.with_extension("aside"), at.with_extension("link"));
    std::os::unix::fs::symlink(outside, &link).unwrap();
    move || {
        while !stop.load(Ordering::Relaxed) {
            std::fs::rename(&at, &aside).unwrap();
            std::fs::rename(&link, &at).unwrap();
            std::fs::rename(&at, &link).unwrap();
            std::fs::rename(&aside, &at).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_swaps_directories_for_symlinks_gains_nothing_outside_the_root() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let outside = tempfile::tempdir().unwrap();
    let (_, empty) = sub.tree().await;
    let mut edit = Edit::of(&empty, &source).directory("/user", 0o755).directory("/user/d", 0o755);
    for number in 0..20 {
        edit = edit.file(&format!("/user/d/f{number}"), "old");
        std::fs::write(outside.path().join(format!("f{number}")), "old").unwrap();
    }
    let first = edit.done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, Outcome::Done);
    let mut edit = Edit::of(&first, &source);
    for number in 0..20 {
        edit = edit
            .file(&format!("/user/d/f{number}"), "new")
            .file(&format!("/user/d/n{number}"), "n");
    }
    let second = edit.done();
    let mut outcomes = Vec::new();
    for id in 2..4 {
        let want = if id % 2 == 0 { &second } else { &first };
        let (_, plan) = sub.plan(want).await;
        sub.fetch_for(id, &source, &plan).await;
        let (reply, plan) = sub.plan(want).await;
        sub.prepare(&request(id, &reply, want, plan)).await.unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let swapping = swap_all_the_time(sub.at("/user/d"), outside.path(), Arc::clone(&stop));
        let swapping = std::thread::spawn(swapping);
        let last = sub.commit(id).await;
        stop.store(true, Ordering::Relaxed);
        swapping.join().unwrap();
        std::fs::remove_file(sub.at("/user/d.link")).unwrap();
        outcomes.push(last.outcome);
        // Nobody swaps any more: it converges.
        sub.rescanned().await;
        let last = sub.converge(100 + id, &source, want).await;
        assert_eq!(last.outcome, Outcome::Done, "{outcomes:?}");
        assert_eq!(to_text(&sub.tree().await.1), to_text(want));
    }
    let names = std::fs::read_dir(outside.path()).unwrap().count();
    assert_eq!(names, 20, "{outcomes:?}");
    for number in 0..20 {
        let content = std::fs::read(outside.path().join(format!("f{number}"))).unwrap();
        assert_eq!(content, b"old", "{outcomes:?}");
    }
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_ask_meanwhile_does_not_spoil_a_staged_update() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let want = Edit::of(&empty, &source).file("/f", "f").file("/g", "f").done();
    let (_, plan) = sub.plan(&want).await;
    sub.fetch_for(1, &source, &plan).await;
    let (reply, plan) = sub.plan(&want).await;
    sub.prepare(&request(1, &reply, &want, plan.clone())).await.unwrap();
    let object = Algorithm::Blake3.digest(b"f");
    sub.client.call::<Cleanup>(&CleanupRequest { objects: vec![object] }).await.unwrap();
    assert_eq!(sub.poll().await.cache, Some(CacheReport::Full(vec![object])));
    let one = FetchObject { id: object, size_bytes: 1 };
    assert_eq!(sub.fetch(2, &[&source], &[one]).await.objects, 0);
    assert_eq!(sub.commit(1).await.outcome, Outcome::Done);
    assert_eq!(sub.poll().await.cache, Some(CacheReport::Full(Vec::new())));
    // Other settings make the plan a thing of the past; the former ones make it valid again.
    let (_, plan) = sub.plan(&empty).await;
    let reply = sub.poll().await;
    sub.prepare(&request(3, &reply, &empty, plan)).await.unwrap();
    let settings = ScanSettings {
        coverage: Coverage::Full(Filter::new(["/kept"]).unwrap()),
        ..ScanSettings::default()
    };
    let configure = async |scan: ScanSettings| {
        sub.client.call::<SetConfiguration>(&Configuration { scan }).await.unwrap();
    };
    configure(settings).await;
    let refused = sub.client.call::<Commit>(&CommitRequest { update_id: 3 }).await;
    assert_eq!(refused.unwrap_err().code(), Some(FaultCode::Stale));
    configure(ScanSettings::default()).await;
    assert_eq!(sub.commit(3).await.outcome, Outcome::Done);
    assert_eq!(sub.tree().await.1.digest(), empty.digest());
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_waiting_polls_ends_at_once_when_subd_stops() {
    let sub = Sub::start().await;
    sub.tree().await;
    let have = Some(sub.poll().await.version);
    let request = PollRequest { have, wait_ms: 60_000 };
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    for _ in 0..1_000 {
        sub.poll().await;
    }
    assert!(descriptors() < before + 50, "{before} and then {}", descriptors());
    let polls: Vec<_> = (0..100)
        .map(|_| {
            let (client, request) = (sub.client.clone(), request.clone());
            tokio::spawn(async move { client.call::<Poll>(&request).await.map(|_| ()) })
        })
        .collect();
    std::fs::write(sub.at("/new"), "new").unwrap();
    // All of them hear of the drift; those who ask again hear of the end.
    for poll in polls {
        tokio::time::timeout(PATIENCE, poll).await.unwrap().unwrap().unwrap();
    }
    let request = PollRequest { have: Some(sub.poll().await.version), wait_ms: 60_000 };
    let polls: Vec<_> = (0..100)
        .map(|_| {
            let (client, request) = (sub.client.clone(), request.clone());
            tokio::spawn(async move { client.call::<Poll>(&request).await.map(|_| ()) })
        })
        .collect();
    sub.poll().await;
    let started = Instant::now();
    sub.stop().await;
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    for poll in polls {
        // Those that had not yet come may find nobody.
        let _answer = tokio::time::timeout(PATIENCE, poll).await.unwrap().unwrap();
    }
}

/// A small file-system of its own.
struct Disk(tempfile::TempDir);

impl Disk {
    /// `None` where nothing may be mounted.
    fn of(options: &str) -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let tmpfs = Some("tmpfs");
        mount(tmpfs, place.path(), tmpfs, MsFlags::empty(), Some(options)).ok()?;
        Some(Self(place))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _unmounted = umount(self.0.path());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_told_and_loses_nothing() {
    let Some(disk) = Disk::of("size=4m,mode=755") else { return };
    let (sub, source) = (Sub::start_on(disk.0.path(), &[]).await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let large = "x".repeat(700 << 10);
    let base = || Edit::of(&empty, &source).file("/a", "a").file("/filler", &"y".repeat(1 << 20));
    let first = base().done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, Outcome::Done);
    // Too large to be fetched at all.
    let huge = FetchObject { id: source.add(&[1; 5 << 20]), size_bytes: 5 << 20 };
    let last = sub.fetch(2, &[&source], &[huge]).await;
    assert!(matches!(last.error, Some(FetchFailure::InsufficientSpace { .. })), "{last:?}");
    // One object fits; what is staged of it does not.
    let names = ["/f1", "/f2", "/f3", "/f4", "/f5"];
    let second = names.iter().fold(base(), |edit, name| edit.file(name, &large)).file("/a", "b");
    let second = second.done();
    let (_, plan) = sub.plan(&second).await;
    sub.fetch_for(3, &source, &plan).await;
    let before = sub.poll().await.cache;
    let (reply, plan) = sub.plan(&second).await;
    let reply = sub.prepare(&request(4, &reply, &second, plan)).await.unwrap();
    let Outcome::NotPrepared(why) = reply.last_update.unwrap().outcome else { panic!() };
    assert!(why.contains("bytes are needed for copies"), "{why}");
    let after = sub.poll().await;
    assert_eq!((after.activity, after.cache), (Activity::Idle, before));
    assert_eq!(to_text(&sub.tree().await.1), to_text(&first));
    // It goes on.
    let third = Edit::of(&first, &source).remove("/filler").done();
    assert_eq!(sub.converge(5, &source, &third).await.outcome, Outcome::Done);
    // Filled to the brim between the two calls, and while it changes.
    let fourth = Edit::of(&third, &source).file("/a", "c").directory("/d", 0o755).done();
    let (_, plan) = sub.plan(&fourth).await;
    sub.fetch_for(6, &source, &plan).await;
    let (reply, plan) = sub.plan(&fourth).await;
    sub.prepare(&request(6, &reply, &fourth, plan)).await.unwrap();
    let brim = std::fs::write(sub.at("/.subd/brim"), vec![0; 4 << 20]);
    assert_eq!(brim.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    let last = sub.commit(6).await;
    assert_eq!(last.outcome, Outcome::Done);
    std::fs::remove_file(sub.at("/.subd/brim")).unwrap();
    assert_eq!(to_text(&sub.rescanned().await), to_text(&fourth));
    source.stop().await;
    sub.stop().await;
}
