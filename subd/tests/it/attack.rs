//! What somebody may do to a subd, or to the tree while it is changed.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use api::fault::FaultCode;
use api::subd::{
    Activity, CacheReport, Cleanup, CleanupRequest, Commit, CommitRequest, FetchFailure,
    FetchObject, Poll, PollRequest, ScanNow, ScanNowRequest, SetConfiguration, UpdateOutcome,
};
use bytes::Bytes;
use futures_util::StreamExt as _;
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use model::filter::Filter;
use model::object::Algorithm;
use model::scope::{Coverage, ScanSettings};
use model::tree::text::to_text;
use model::tree::{Leaf, Metadata, Node};
use nix::mount::{MsFlags, mount, umount};
use nix::unistd::{Uid, setfsuid};
use rpc::client::{Client, Peer};
use rpc::tls::Security;
use subd::root::Root;
use subd::scan::pace::Pace;

use crate::fixture::{Edit, PATIENCE, Source, Sub, path, request, scan_by};
use crate::process::Process;
use crate::scan::start_on;

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
    let place = tempfile::tempdir().unwrap();
    let started = Sub::start_on(place.path(), &["--retry-after", "1"]).await;
    let (sub, source) = (started.owning(place), Source::start().await);
    let outside = tempfile::tempdir().unwrap();
    let (_, empty) = sub.tree().await;
    let mut edit = Edit::of(&empty, &source).directory("/user", 0o755).directory("/user/d", 0o755);
    for number in 0..20 {
        edit = edit.file(&format!("/user/d/f{number}"), "old");
        std::fs::write(outside.path().join(format!("f{number}")), "old").unwrap();
    }
    let first = edit.done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
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
        // Nobody swaps any more: what could not be put back is, and it converges.
        sub.poll_until(|reply| reply.alarms.is_empty()).await;
        sub.client.call::<ScanNow>(&ScanNowRequest::default()).await.unwrap();
        sub.rescanned().await;
        let last = sub.converge(100 + id, &source, want).await;
        assert_eq!(last.outcome, UpdateOutcome::Done, "{outcomes:?}");
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

/// Swaps `one` and `other` all the time, in three renames that a user may make, as a user who owns
/// the directory they are in and nothing else.
fn swap_as_user(one: PathBuf, other: PathBuf, stop: Arc<AtomicBool>) -> impl FnOnce() -> u64 {
    let aside = one.with_extension("aside");
    move || {
        setfsuid(Uid::from_raw(USER));
        let mut swaps = 0;
        let swap = || {
            std::fs::rename(&one, &aside)?;
            std::fs::rename(&other, &one)?;
            std::fs::rename(&aside, &other)
        };
        while !stop.load(Ordering::Relaxed) {
            // Root may have taken something away: then it is put back by whoever needs it.
            swaps += u64::from(swap().is_ok());
        }
        swaps
    }
}

/// A user without any power.
const USER: u32 = 65_534;

/// Name, content, mode, owner and time of a file.
type Valuable = (String, String, u32, u32, i64);

/// What an unprivileged user would like to have changed: files in a directory of somebody else.
fn valuables() -> (tempfile::TempDir, impl Fn() -> Vec<Valuable>) {
    let place = tempfile::tempdir().unwrap();
    for number in 0..8 {
        let at = place.path().join(format!("f{number}"));
        std::fs::write(&at, format!("secret {number}")).unwrap();
        std::fs::set_permissions(&at, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let at = place.path().to_owned();
    let look = move || {
        let mut all: Vec<_> = std::fs::read_dir(&at)
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let (name, metadata) = (entry.file_name(), entry.metadata().unwrap());
                let content = std::fs::read_to_string(entry.path()).unwrap();
                let name = name.into_string().unwrap();
                (name, content, metadata.mode(), metadata.uid(), metadata.mtime())
            })
            .collect();
        all.sort();
        all
    };
    (place, look)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_swaps_what_is_staged_committed_or_taken_back_gains_nothing() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (outside, look) = valuables();
    let before = look();
    let (_, empty) = sub.tree().await;
    let owned = |metadata: &mut Metadata| (metadata.uid, metadata.gid) = (USER, USER);
    let version = |text: &str, mode: u32| {
        let mut edit = Edit::of(&empty, &source).directory("/user", 0o755);
        edit = edit.metadata("/user", owned).directory("/user/d", 0o755);
        edit = edit.metadata("/user/d", owned);
        for number in 0..8 {
            let (file, new) = (format!("/user/d/f{number}"), format!("/user/d/{text}{number}"));
            edit = edit.file(&file, if number % 2 == 0 { text } else { "same" });
            edit = edit.metadata(&file, |metadata| metadata.mode = mode).file(&new, text);
        }
        edit.file("/user/file", text).file("/z", text).done()
    };
    let versions = [version("one", 0o644), version("two", 0o640)];
    assert_eq!(sub.converge(1, &source, &versions[0]).await.outcome, UpdateOutcome::Done);
    let mut outcomes = Vec::new();
    for round in 0..6_u64 {
        let (id, want) = (10 + round, &versions[usize::try_from(round + 1).unwrap() % 2]);
        let (_, plan) = sub.plan(want).await;
        sub.fetch_for(id, &source, &plan).await;
        let (reply, plan) = sub.plan(want).await;
        let request = request(id, &reply, want, plan);
        // In two of three rounds it is staged in peace, in one of them it is taken back.
        let early = round % 3 == 2;
        let mut prepared = !early && sub.prepare(&request).await.is_ok();
        if round % 3 == 1 {
            std::fs::write(sub.at("/z"), "an edit that the plan does not know").unwrap();
        }
        let stop = Arc::new(AtomicBool::new(false));
        let start = |name: &str, target: PathBuf| {
            let (one, other) = (sub.at(name), sub.at(&format!("{name}.link")));
            std::os::unix::fs::symlink(target, &other).unwrap();
            std::os::unix::fs::lchown(&other, Some(USER), Some(USER)).unwrap();
            std::thread::spawn(swap_as_user(one, other, Arc::clone(&stop)))
        };
        let swapping = [
            start("/user/d", outside.path().to_owned()),
            start("/user/file", outside.path().join("f0")),
        ];
        if early {
            let reply = sub.prepare(&request).await;
            let staged = Activity::Prepared { update_id: id };
            prepared = reply.is_ok_and(|reply| reply.activity == staged);
        }
        if prepared {
            outcomes.push(format!("{:?}", sub.commit(id).await.outcome));
        }
        stop.store(true, Ordering::Relaxed);
        let swaps = swapping.map(|thread| thread.join().unwrap());
        outcomes.push(format!("{swaps:?} swaps"));
        assert_eq!(look(), before, "{outcomes:?}");
        // What the user has left in the way is his own loss.
        std::fs::remove_dir_all(sub.at("/user")).unwrap();
        // An operator looks again: what was swapped is not left out any longer.
        sub.client.call::<ScanNow>(&ScanNowRequest::default()).await.unwrap();
        sub.rescanned().await;
        let last = sub.converge(100 + round, &source, want).await;
        assert_eq!(last.outcome, UpdateOutcome::Done, "{outcomes:?}");
        assert_eq!(to_text(&sub.tree().await.1), to_text(want), "{outcomes:?}");
    }
    assert_eq!(look(), before, "{outcomes:?}");
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_swaps_directories_for_symlinks_has_nothing_read_from_outside() {
    let place = tempfile::tempdir().unwrap();
    let (outside, _) = valuables();
    let at = |name: &str| place.path().join(name);
    std::fs::create_dir(at("d")).unwrap();
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    for number in 0..8 {
        std::fs::write(at(&format!("d/f{number}")), "harmless").unwrap();
    }
    std::fs::write(at("file"), "harmless").unwrap();
    std::os::unix::fs::symlink(outside.path(), at("d.link")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("f0"), at("file.link")).unwrap();
    let root = Arc::new(Root::open(place.path()).unwrap());
    let settings = ScanSettings::default();
    let scanner = start_on(Arc::clone(&root), settings, &[], Pace::default());
    let stop = Arc::new(AtomicBool::new(false));
    let start = |name: &str| {
        let (one, other) = (at(name), at(&format!("{name}.link")));
        std::thread::spawn(swap_as_user(one, other, Arc::clone(&stop)))
    };
    let swapping = [start("d"), start("file")];
    let secrets: Vec<_> = (0..8)
        .map(|number| Algorithm::Blake3.digest(format!("secret {number}").as_bytes()))
        .collect();
    let touched = || ["/d", "/d/f0", "/d/f1", "/file"].map(path).into();
    for _ in 0..100 {
        let snapshot = scanner.scan_touched(touched()).await.unwrap();
        for (path, node) in snapshot.tree.as_ref().unwrap().nodes() {
            if let Node::Leaf(Leaf::File(file)) = node {
                assert!(!secrets.contains(&file.object.id()), "{path}");
            }
        }
        // Reads by path, as callers ask for them.
        for text in ["/d/f0", "/file"] {
            let text = path(text);
            let opened = root.parent(&text).and_then(|(parent, name)| parent.open_file(name));
            let mut content = String::new();
            if let Ok(mut file) = opened {
                std::io::Read::read_to_string(&mut file, &mut content).unwrap();
                assert_eq!(content, "harmless");
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    let swaps = swapping.map(|thread| thread.join().unwrap());
    assert!(swaps.iter().all(|swaps| *swaps > 0), "{swaps:?}");
    scanner.stop();
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
    assert_eq!(sub.commit(1).await.outcome, UpdateOutcome::Done);
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
        sub.client.call::<SetConfiguration>(&scan_by(scan)).await.unwrap();
    };
    configure(settings).await;
    let refused = sub.client.call::<Commit>(&CommitRequest { update_id: 3 }).await;
    assert_eq!(refused.unwrap_err().code(), Some(FaultCode::Stale));
    configure(ScanSettings::default()).await;
    assert_eq!(sub.commit(3).await.outcome, UpdateOutcome::Done);
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
    // The polls above take every stream of their connection, so this one has another.
    let other = Client::new(sub.client.peer().clone(), &Security::Insecure);
    other.call::<Poll>(&PollRequest::default()).await.unwrap();
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

/// Sends most of a request to `sub` on each of so many streams of one connection, and no more.
/// Returns what keeps them open.
async fn stall(sub: &Peer, streams: usize) -> Option<impl Sized + use<>> {
    let stream = tokio::net::TcpStream::connect(sub.authority()).await.ok()?;
    let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let shake = builder.handshake(TokioIo::new(stream));
    let (sender, connection) =
        tokio::time::timeout(Duration::from_secs(2), shake).await.ok()?.ok()?;
    let connection = tokio::spawn(connection);
    let mut calls = Vec::new();
    for _ in 0..streams {
        let first = futures_util::stream::iter([Ok::<_, std::io::Error>(Frame::data(
            Bytes::from(vec![0; 60_000]),
        ))]);
        let body = StreamBody::new(first.chain(futures_util::stream::pending()));
        let request = hyper::Request::post("http://x/rpc/Subd.SetConfiguration")
            .header("dominator-protocol", "1")
            .header("content-length", "65000")
            .body(body);
        let mut sender = sender.clone();
        calls.push(tokio::spawn(async move { sender.send_request(request.unwrap()).await }));
    }
    Some((connection, calls))
}

/// The most memory that a process ever had, in MiB.
pub fn peak_mib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_who_send_slowly_take_little_memory_together() {
    let place = tempfile::tempdir().unwrap();
    let process = Process::start_with(place.path(), &["--insecure"]);
    let before = peak_mib(process.child.id());
    let mut open = Vec::new();
    // 1.2 GB if all of it was held.
    for _ in 0..100 {
        open.push(stall(process.client.peer(), 200).await);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let grown = peak_mib(process.child.id()) - before;
    assert!(grown < 96, "it has grown by {grown} MiB");
    drop(open);
    let client = &process.client;
    testing::eventually_async("it answers again", async || {
        client.call::<Poll>(&PollRequest::default()).await.is_ok()
    })
    .await;
    assert_eq!(process.stop(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_told_and_loses_nothing() {
    let Some(disk) = Disk::of("size=4m,mode=755") else { return };
    // What cannot be recorded is not begun: the log is on another disk.
    let elsewhere = tempfile::tempdir().unwrap();
    let log = elsewhere.path().join("audit.log").display().to_string();
    let flags = ["--retry-after", "1", "--audit-log", &log];
    let (sub, source) = (Sub::start_on(disk.0.path(), &flags).await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let large = "x".repeat(700 << 10);
    let base = || Edit::of(&empty, &source).file("/a", "a").file("/filler", &"y".repeat(1 << 20));
    let first = base().done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
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
    let UpdateOutcome::NotPrepared(why) = reply.last_update.unwrap().outcome else { panic!() };
    assert!(why.contains("bytes are needed for copies"), "{why}");
    let after = sub.poll().await;
    assert_eq!((after.activity, after.cache), (Activity::Idle, before));
    assert_eq!(to_text(&sub.tree().await.1), to_text(&first));
    // It goes on.
    let third = Edit::of(&first, &source).remove("/filler").done();
    assert_eq!(sub.converge(5, &source, &third).await.outcome, UpdateOutcome::Done);
    // Filled to the brim between the two calls, and no reserve: without journal nothing is begun.
    let fourth = Edit::of(&third, &source).file("/a", "c").directory("/d", 0o755).done();
    let (_, plan) = sub.plan(&fourth).await;
    sub.fetch_for(6, &source, &plan).await;
    let (reply, plan) = sub.plan(&fourth).await;
    sub.prepare(&request(6, &reply, &fourth, plan)).await.unwrap();
    for reserved in std::fs::read_dir(sub.at("/.subd/reserve")).unwrap() {
        let path = reserved.unwrap().path();
        std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir(&path)).unwrap();
    }
    let fill = || {
        let brim = std::fs::write(sub.at("/.subd/brim"), vec![0; 4 << 20]);
        assert_eq!(brim.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
    };
    fill();
    let UpdateOutcome::RolledBack(why) = sub.commit(6).await.outcome else { panic!() };
    assert!(why.starts_with("cannot write the journal: No space left"), "{why}");
    assert_eq!(to_text(&sub.rescanned().await), to_text(&third));
    std::fs::remove_file(sub.at("/.subd/brim")).unwrap();
    sub.poll_until(|reply| reply.alarms.is_empty()).await;
    assert_eq!(sub.converge(7, &source, &fourth).await.outcome, UpdateOutcome::Done);
    assert_eq!(to_text(&sub.rescanned().await), to_text(&fourth));
    // With the reserve it is carried out.
    let fifth = Edit::of(&fourth, &source).file("/a", "d").remove("/d").done();
    let (_, plan) = sub.plan(&fifth).await;
    sub.fetch_for(8, &source, &plan).await;
    let (reply, plan) = sub.plan(&fifth).await;
    sub.prepare(&request(8, &reply, &fifth, plan)).await.unwrap();
    fill();
    assert_eq!(sub.commit(8).await.outcome, UpdateOutcome::Done);
    assert_eq!(to_text(&sub.rescanned().await), to_text(&fifth));
    source.stop().await;
    sub.stop().await;
}
