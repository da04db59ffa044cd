//! Scans for a preview, made by subd as a process: what is in force stays.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use api::fault::FaultCode;
use api::subd::{
    GetConfiguration, PollReply, PreviewScan, PreviewScanReply, PreviewScanRequest, ScanNow,
    ScanNowRequest, SetConfiguration, UpdateOutcome,
};
use model::filter::Filter;
use model::object::Algorithm;
use model::scope::{Coverage, ScanSettings, Scope};
use model::tree::text::to_text;
use rpc::client::CallError;
use testing::eventually_async;

use crate::fixture::{Edit, PATIENCE, Source, Sub, scan_by};
use crate::process::Process;

/// How long one call waits for the end of the scan.
const WAIT_MS: u32 = 1_000;

fn without(lines: &[&str]) -> ScanSettings {
    let coverage = Coverage::Full(Filter::new(lines).unwrap());
    ScanSettings { coverage, ..ScanSettings::default() }
}

/// Settings by which every file has to be read again.
fn in_sha512() -> ScanSettings {
    ScanSettings { algorithm: Algorithm::Sha512, ..ScanSettings::default() }
}

async fn ask(sub: &Sub, scan: &ScanSettings) -> Result<PreviewScanReply, CallError> {
    let request = PreviewScanRequest { scan: scan.clone(), wait_ms: WAIT_MS };
    sub.client.call::<PreviewScan>(&request).await
}

/// Asks until the scan has ended.
async fn preview(sub: &Sub, scan: &ScanSettings) -> PreviewScanReply {
    let start = Instant::now();
    loop {
        let reply = ask(sub, scan).await.unwrap();
        if reply.scan.is_some() {
            return reply;
        }
        assert!(start.elapsed() < PATIENCE, "the preview does not end");
    }
}

/// All below `directory` but the log, with what tells a file from one that was written since.
fn files(directory: &Path) -> Vec<(PathBuf, u64, i64, i64)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let data = path.symlink_metadata().unwrap();
        if data.is_dir() {
            found.extend(files(&path));
        }
        if !path.to_string_lossy().contains("audit") {
            found.push((path, data.ino(), data.ctime(), data.ctime_nsec()));
        }
    }
    found.sort();
    found
}

/// What polls report of the tree and of what was ordered.
fn in_force(reply: &PollReply) -> impl PartialEq + std::fmt::Debug + use<> {
    (reply.version.generation, reply.scope, reply.scan.clone(), reply.scanned)
}

/// Starts on a root with a file that takes minutes to hash, as a processor may be used.
fn start_slow(place: &Path) -> Process {
    let file = std::fs::File::create(place.join("huge")).unwrap();
    file.set_len(2 << 30).unwrap();
    std::fs::write(place.join("f"), "f").unwrap();
    Process::start_with(place, &["--insecure", "--cpu-percent", "1"])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preview_finds_what_a_scan_would_find_and_changes_nothing() {
    let place = tempfile::tempdir().unwrap();
    for directory in ["etc", "home/ann"] {
        std::fs::create_dir_all(place.path().join(directory)).unwrap();
        std::fs::write(place.path().join(directory).join("f"), directory).unwrap();
    }
    let process = Process::start_with(place.path(), &["--insecure", "--exclude", "/never"]);
    let sub = Sub::elsewhere(place.path(), process.client.clone());
    let (before, tree) = sub.tree().await;
    // What subd writes at its start is written.
    eventually_async("the files come to rest", async || {
        let seen = files(place.path());
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        files(place.path()) == seen
    })
    .await;
    let files_before = files(place.path());
    let settings = without(&["/home/.*"]);
    let first = ask(&sub, &settings).await.unwrap();
    let found = preview(&sub, &settings).await;
    assert!(first.hashed_bytes == 0, "every file was known: {first:?}");
    let report = found.scan.unwrap();
    assert_eq!(report.scope, Scope::of(&settings, &["/never".to_owned()]));
    assert_eq!(report.kept_directories, ["/home".parse().unwrap()]);
    let previewed = sub.tree_of(report.root).await;
    let lines: Vec<String> = to_text(&tree).lines().map(str::to_owned).collect();
    let kept: Vec<&String> = lines.iter().filter(|line| !line.contains("/home/")).collect();
    assert_eq!(to_text(&previewed).lines().collect::<Vec<_>>(), kept);

    let after = sub.poll().await;
    assert_eq!(in_force(&after), in_force(&before));
    assert_eq!(sub.client.call::<GetConfiguration>(&()).await.unwrap().scan, Default::default());
    assert_eq!(files(place.path()), files_before);
    // Settings in force find the same.
    sub.client.call::<SetConfiguration>(&scan_by(settings.clone())).await.unwrap();
    assert_eq!(sub.tree().await.0.scan.unwrap(), report);

    // What was found is kept, until somebody has the machine look again.
    std::fs::write(place.path().join("etc/g"), "g").unwrap();
    assert_eq!(preview(&sub, &settings).await.scan.unwrap(), report);
    sub.client.call::<ScanNow>(&ScanNowRequest::default()).await.unwrap();
    assert_ne!(preview(&sub, &settings).await.scan.unwrap(), report);
    assert_eq!(process.stop(), Some(0));
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_callers_share_a_preview_and_a_third_with_other_settings_is_told_to_wait() {
    let place = tempfile::tempdir().unwrap();
    let process = start_slow(place.path());
    let sub = Sub::elsewhere(place.path(), process.client.clone());
    let (before, _) = sub.tree().await;
    let settings = in_sha512();
    let (one, other) = tokio::join!(ask(&sub, &settings), ask(&sub, &settings));
    assert_eq!((one.unwrap().scan, other.unwrap().scan), (None, None));
    let third = ask(&sub, &without(&["/home"])).await.unwrap_err();
    assert_eq!(third.code(), Some(FaultCode::Busy), "{third}");
    eventually_async("it hashes within its share", async || {
        ask(&sub, &settings).await.unwrap().hashed_bytes > 0
    })
    .await;
    // Updates and metadata passes come first.
    let source = Source::start().await;
    let (_, tree) = sub.tree().await;
    let want = Edit::of(&tree, &source).file("/f", "changed").done();
    assert_eq!(sub.converge(1, &source, &want).await.outcome, UpdateOutcome::Done);
    assert_eq!(ask(&sub, &settings).await.unwrap().scan, None);
    let after = sub.poll().await;
    assert_eq!((after.scope, after.scan.unwrap().root), (before.scope, want.digest()));

    // A caller that waits is told when subd ends, which does not wait for the scan.
    let client = process.client.clone();
    let waiting = tokio::spawn(async move {
        let request = PreviewScanRequest { scan: settings, wait_ms: 60_000 };
        client.call::<PreviewScan>(&request).await
    });
    tokio::task::yield_now().await;
    assert_eq!(tokio::task::spawn_blocking(|| process.stop()).await.unwrap(), Some(0));
    let told = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap();
    assert!(told.is_err(), "{told:?}");
    let again = Process::start_with(place.path(), &["--insecure"]);
    let sub = Sub::elsewhere(place.path(), again.client.clone());
    assert_eq!(sub.tree().await.0.scope, before.scope);
    assert_eq!(again.stop(), Some(0));
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_requested_content_pass_is_made_while_a_preview_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let process = start_slow(place.path());
    let sub = Sub::elsewhere(place.path(), process.client.clone());
    sub.tree().await;
    let settings = in_sha512();
    assert_eq!(ask(&sub, &settings).await.unwrap().scan, None);
    let before = sub.poll().await.counters.content_passes;
    let request = ScanNowRequest { content: true, media: false };
    sub.client.call::<ScanNow>(&request).await.unwrap();
    eventually_async("the content pass ends", async || {
        // Asked all the time, so that the preview is wanted.
        assert_eq!(ask(&sub, &settings).await.unwrap().scan, None);
        sub.poll().await.counters.content_passes > before
    })
    .await;
    assert_eq!(process.stop(), Some(0));
    sub.stop().await;
}
