//! SIGTERM is obeyed soon, whatever subd does: 5 seconds are promised, and a machine that is busy
//! with other tests gets more.

use std::fs;
use std::time::Duration;

use api::subd::{Activity, Fetch, FetchObject, FetchRequest, Prepare};
use model::object::Algorithm;

use crate::disk::Disk;
use crate::fixture::{Edit, Source, Sub, request};
use crate::process::Process;

const TIME_MAX: Duration = Duration::from_secs(15);

/// Stops the process, which must end by itself without a fault.
async fn stop_in_time(process: Process) {
    let stopping = tokio::task::spawn_blocking(move || process.stop());
    let code = tokio::time::timeout(TIME_MAX, stopping).await.expect("it does not stop").unwrap();
    assert_eq!(code, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_file_is_read_as_slowly_as_it_may_be() {
    let disk = Disk::new(64 << 20);
    fs::write(disk.at("large"), vec![7; 16 << 20]).unwrap();
    disk.remount();
    // A thousand bytes a second.
    let flags = ["--insecure", "--device-speed", "100000", "--scan-percent", "1"];
    let process = Process::start_with(&disk.root(), &flags);
    let sub = Sub::elsewhere(&disk.root(), process.client.clone());
    sub.poll_until(|reply| reply.counters.hashed_bytes > 0).await;
    assert!(!sub.poll().await.scanned);
    stop_in_time(process).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_directory_of_very_many_entries_is_read() {
    let place = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let (file, many) = (place.path().join("f"), place.path().join("many"));
    fs::write(&file, "f").unwrap();
    fs::create_dir(&many).unwrap();
    for number in 0..200_000 {
        fs::hard_link(&file, many.join(format!("{number:07}"))).unwrap();
    }
    let process = Process::start_with(place.path(), &["--insecure"]);
    stop_in_time(process).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_a_source_gives_no_answer() {
    let place = tempfile::tempdir().unwrap();
    let process = Process::start_with(place.path(), &["--insecure"]);
    let sub = Sub::elsewhere(place.path(), process.client.clone());
    let silent = tokio::net::TcpListener::bind("127.0.0.3:0").await.unwrap();
    let object = FetchObject { id: Algorithm::Blake3.digest(b"x"), size_bytes: 1 };
    let sources = vec![silent.local_addr().unwrap().to_string()];
    let fetch = FetchRequest { fetch_id: 1, sources, objects: [object].into(), ahead: false };
    sub.client.call::<Fetch>(&fetch).await.unwrap();
    let _connection = silent.accept().await.unwrap();
    stop_in_time(process).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_an_update_is_staged() {
    let (place, source) = (tempfile::tempdir().unwrap(), Source::start().await);
    let process = Process::start_with(place.path(), &["--insecure"]);
    let sub = Sub::elsewhere(place.path(), process.client.clone());
    let (_, empty) = sub.tree().await;
    let many = (0..20_000).fold(Edit::of(&empty, &source), |edit, number| {
        edit.symlink(&format!("/l{number}"), "target")
    });
    let want = many.done();
    let (reply, plan) = sub.plan(&want).await;
    sub.client.call::<Prepare>(&request(1, &reply, &want, plan)).await.unwrap();
    assert_eq!(sub.poll().await.activity, Activity::Preparing { update_id: 1 });
    stop_in_time(process).await;
    // Nothing of it is left, and it has not failed.
    let process = Process::start_with(place.path(), &["--insecure"]);
    let sub = Sub::elsewhere(place.path(), process.client.clone());
    let (reply, tree) = sub.tree().await;
    assert_eq!((tree, reply.last_update), (empty, None));
    assert_eq!(fs::read_dir(place.path().join(".subd/staging")).unwrap().count(), 0);
    stop_in_time(process).await;
    source.stop().await;
}
