//! The audit log of a real server: whatever happens to it, what was done is on record.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use api::Done;
use api::audit::record::{AuditEvent, AuditRecord, CallOutcome, check_line};
use api::audit::verify::{ChainReport, Verifier};
use api::dominator::{DisableUpdates, DisableUpdatesRequest};
use api::fault::FaultCode;
use api::image_server::{DeleteImage, DeleteImageRequest};
use api::subd::{Commit, CommitRequest, GetConfiguration};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rpc::audit_log::{AuditError, AuditLog, AuditSettings, Retention, files_of};
use rpc::server::Router;
use rpc::tls::Security;

use crate::wire::{Server, raw, router};

fn settings(directory: &Path) -> AuditSettings {
    let path = directory.join("audit/audit.log");
    AuditSettings { path, bytes_max: 1 << 20, keep: Retention::Files(20) }
}

async fn opened(settings: &AuditSettings) -> AuditLog {
    AuditLog::open(settings.clone(), "testd").await.unwrap()
}

/// The lines of all files of a log.
fn lines(settings: &AuditSettings) -> Vec<(PathBuf, Vec<Vec<u8>>)> {
    let read = |path: PathBuf| {
        let bytes = fs::read(&path).unwrap();
        let lines = bytes.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
        (path, lines)
    };
    files_of(&settings.path).unwrap().into_iter().map(read).collect()
}

fn verify(settings: &AuditSettings) -> ChainReport {
    let mut verifier = Verifier::new(Vec::new());
    for (path, lines) in lines(settings) {
        verifier.file(&path.file_name().unwrap().to_string_lossy());
        lines.iter().for_each(|line| verifier.line(line));
    }
    verifier.finish()
}

fn assert_whole(settings: &AuditSettings) -> ChainReport {
    let report = verify(settings);
    assert!(report.is_whole(), "{report:?}");
    report
}

/// What the log tells, without when.
fn events(settings: &AuditSettings) -> Vec<AuditEvent> {
    let lines = lines(settings).into_iter().flat_map(|(_, lines)| lines);
    let records = lines.filter_map(|line| check_line(line.strip_suffix(b"\n")?).ok()?.record);
    records.map(|AuditRecord { event, .. }| event).collect()
}

/// As [`events`], in one word each.
fn words(settings: &AuditSettings) -> Vec<String> {
    let word = |event: AuditEvent| match event {
        AuditEvent::File { file } => format!("file {file}"),
        AuditEvent::Started { .. } => "started".to_owned(),
        AuditEvent::Torn { bytes, .. } => format!("torn {bytes}"),
        AuditEvent::Begun(act) => {
            format!("begun {} {}", act.method, act.arguments).trim().to_owned()
        }
        AuditEvent::Ended { of, outcome, text, .. } => {
            format!("ended {of} {outcome:?} {text}").trim().to_owned()
        }
        AuditEvent::Denied { act, text } => format!("denied {} {text}", act.method),
        AuditEvent::DeniedMore { caller, count } => format!("more {caller} {count}"),
        AuditEvent::Decided { decision, .. } => decision,
        AuditEvent::Missed { count, .. } => format!("missed {count}"),
    };
    events(settings).into_iter().map(word).collect()
}

async fn get(address: SocketAddr, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    raw(address, request.as_bytes()).await
}

fn commit(update_id: u64) -> CommitRequest {
    CommitRequest { update_id }
}

#[tokio::test]
async fn calls_that_change_something_are_recorded_and_no_others() {
    let directory = tempfile::tempdir().unwrap();
    let settings = settings(directory.path());
    let log = opened(&settings).await;
    // Methods may be there before the log is.
    let server = Server::start(router().audit(&log)).await;
    let client = server.client();
    client.call::<Commit>(&commit(7)).await.unwrap();
    client.call::<Commit>(&commit(0)).await.unwrap_err();
    client.call::<Commit>(&commit(1)).await.unwrap_err();
    client.call::<GetConfiguration>(&()).await.unwrap();
    server.stop().await;
    log.close().await;
    let expected = [
        "file 1",
        "started",
        "begun Subd.Commit update=7",
        "ended 3 Done",
        "begun Subd.Commit update=0",
        "ended 5 Failed update 0 is not staged",
        "begun Subd.Commit update=1",
        "ended 7 Left the handler panicked",
    ];
    assert_eq!(words(&settings), expected);
    assert_whole(&settings);
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_an_open_end() {
    let directory = tempfile::tempdir().unwrap();
    let settings = settings(directory.path());
    let log = opened(&settings).await;
    // Its handler never ends.
    let server = Server::start(router().audit(&log)).await;
    let name = "web/7".parse().unwrap();
    let request = DeleteImageRequest { name, force: false };
    {
        let client = server.client();
        let call = client.call::<DeleteImage>(&request);
        let mut call = std::pin::pin!(call);
        while log.status().unwrap().head.unwrap().sequence < 3 {
            tokio::select! {
                _ = call.as_mut() => panic!("it has no end"),
                () = tokio::task::yield_now() => {}
            }
        }
    }
    while log.status().unwrap().head.unwrap().sequence < 4 {
        tokio::task::yield_now().await;
    }
    server.stop().await;
    log.close().await;
    let text = "the caller went away, or the daemon stopped: it may have been done or not";
    let expected = [
        "begun ImageServer.DeleteImage image=web/7 force=false".to_owned(),
        format!("ended 3 Left {text}"),
    ];
    assert_eq!(words(&settings)[2..], expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_callers_at_once_make_one_chain_over_files() {
    const CALLS: u64 = 600;
    let directory = tempfile::tempdir().unwrap();
    let mut settings = settings(directory.path());
    settings.bytes_max = 40_000;
    let log = opened(&settings).await;
    let server = Server::start(router().audit(&log)).await;
    let client = Arc::new(server.client());
    let mut calls = tokio::task::JoinSet::new();
    for update_id in 10..10 + CALLS {
        let client = Arc::clone(&client);
        calls.spawn(async move { client.call::<Commit>(&commit(update_id)).await.is_ok() });
    }
    assert!(calls.join_all().await.into_iter().all(|done| done));
    server.stop().await;
    log.close().await;
    let report = assert_whole(&settings);
    assert!(report.files > 3, "{report:?}");
    let done = events(&settings).into_iter();
    let done =
        done.filter(|event| matches!(event, AuditEvent::Ended { outcome: CallOutcome::Done, .. }));
    assert_eq!(done.count() as u64, CALLS);

    // It goes on where it was, and forgets the oldest files.
    settings.keep = Retention::Files(1);
    let log = opened(&settings).await;
    assert!(log.status().unwrap().head.unwrap().sequence > report.head.unwrap().sequence);
    let before = report.files;
    while log.status().unwrap().file < before + 2 {
        log.record(AuditEvent::Started { version: "x".repeat(1_000) }).await.unwrap();
    }
    log.close().await;
    let report = assert_whole(&settings);
    assert_eq!((report.files, report.remarks.len()), (2, 1), "{report:?}");
    assert!(words(&settings).contains(&"remove-audit-file".to_owned()));
}

#[tokio::test]
async fn a_clock_that_jumps_does_not_empty_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let year = Duration::from_secs(365 * 86_400);
    let settings =
        AuditSettings { bytes_max: 1, keep: Retention::For(year), ..settings(directory.path()) };
    let event = || AuditEvent::Started { version: String::new() };
    let log = opened(&settings).await;
    for _ in 0..9 {
        log.record(event()).await.unwrap();
    }
    let before = files_of(&settings.path).unwrap();
    assert_eq!(before.len(), 11, "nothing is old");
    // All of them are as old as they are for a clock that is ten years ahead.
    for path in &before {
        let old = std::time::SystemTime::now() - 10 * year;
        fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    log.record(event()).await.unwrap();
    log.close().await;
    // Another file was begun, and two are gone.
    let after = files_of(&settings.path).unwrap();
    assert_eq!(after.len(), before.len() + 1 - 2, "{after:?}");
    let gone = words(&settings).into_iter().filter(|word| word == "remove-audit-file");
    assert_eq!(gone.count(), 2);
    assert_whole(&settings);
}

#[tokio::test]
async fn what_a_crash_left_is_kept_and_told() {
    let directory = tempfile::tempdir().unwrap();
    let settings = settings(directory.path());
    let log = opened(&settings).await;
    log.record(AuditEvent::Started { version: "1".to_owned() }).await.unwrap();
    log.close().await;
    let whole = fs::read(&settings.path).unwrap();
    let last = whole.split_inclusive(|byte| *byte == b'\n').next_back().unwrap().to_vec();
    let kept = whole.len() - last.len();
    // Wherever the last line is cut.
    for length in [1, 40, last.len() - 2] {
        fs::write(&settings.path, &whole[..kept + length]).unwrap();
        opened(&settings).await.close().await;
        let report = assert_whole(&settings);
        let torn = format!("torn {}", length + 1);
        assert_eq!(words(&settings), ["file 1", "started", &torn, "started"]);
        assert_eq!(report.remarks.len(), 1, "{report:?}");
        let bytes = fs::read(&settings.path).unwrap();
        assert!(bytes.starts_with(&whole[..kept + length]), "the evidence stays");
    }
    // Of the last record, whatever was whole counts.
    fs::write(&settings.path, &whole[..whole.len() - 1]).unwrap();
    opened(&settings).await.close().await;
    assert_eq!(assert_whole(&settings).remarks, []);
    assert_eq!(words(&settings), ["file 1", "started", "started", "started"]);
    // A crash between two files, and one while a file is made.
    let full = settings.path.with_extension("log.0000001");
    fs::write(&settings.path, &whole).unwrap();
    fs::rename(&settings.path, &full).unwrap();
    fs::write(settings.path.with_extension("log.new"), "{\"sequ").unwrap();
    opened(&settings).await.close().await;
    assert_whole(&settings);
    assert_eq!(words(&settings), ["file 1", "started", "started", "file 2", "started"]);
    // Somebody emptied the file, or overwrote it.
    for content in ["", "nothing\n", "nothing"] {
        fs::write(&settings.path, content).unwrap();
        opened(&settings).await.close().await;
        let words = words(&settings);
        assert_eq!(words[..3], ["file 1", "started", "started"], "{words:?}");
        assert_eq!(words.last().unwrap(), "started");
    }
    let mut changed = whole.clone();
    changed[whole.len() - 100] ^= 1;
    fs::remove_file(&full).unwrap();
    fs::write(&settings.path, &changed).unwrap();
    opened(&settings).await.close().await;
    // One or two, by whether what was changed still has the form of a hash.
    assert_ne!(verify(&settings).troubles, [], "what was changed is no trace of a crash");
}

#[tokio::test]
async fn a_log_has_one_writer_and_only_its_user_reads_it() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let settings = settings(directory.path());
    let log = opened(&settings).await;
    let second = AuditLog::open(settings.clone(), "testd").await;
    assert!(matches!(second, Err(AuditError::Locked { .. })), "{second:?}");
    assert_eq!(fs::metadata(&settings.path).unwrap().permissions().mode() & 0o777, 0o600);
    log.close().await;
    let closed = log.record(AuditEvent::Started { version: String::new() }).await;
    assert!(matches!(closed, Err(AuditError::Closed)), "{closed:?}");
    let again = opened(&settings).await;
    again.close().await;
    assert_whole(&settings);
}

#[tokio::test]
async fn a_log_that_cannot_be_opened_is_tried_again() {
    let event = || AuditEvent::Started { version: String::new() };
    // A file where its directory should be.
    let directory = tempfile::tempdir().unwrap();
    let settings = settings(directory.path());
    fs::write(directory.path().join("audit"), "").unwrap();
    let error = AuditLog::open(settings.clone(), "testd").await.unwrap_err();
    assert!(matches!(error, AuditError::Open { .. }), "{error}");
    let log = AuditLog::open_or_retry(settings.clone(), "testd").await;
    let error = log.record(event()).await.unwrap_err();
    assert!(matches!(error, AuditError::Write { is_full: false, .. }), "{error}");
    fs::remove_file(directory.path().join("audit")).unwrap();
    log.record(event()).await.unwrap();
    log.close().await;
    assert_eq!(words(&settings), ["file 1", "started", "missed 1", "started"]);
    assert_whole(&settings);
}

#[tokio::test]
async fn a_daemon_starts_on_a_full_disk_and_on_one_that_is_read_only() {
    for is_full in [true, false] {
        let small = Small::new();
        let settings = settings(small.0.path());
        match is_full {
            true => small.fill(),
            false => small.remount(MsFlags::MS_RDONLY),
        }
        let log = opened(&settings).await;
        assert!(log.status().unwrap().error.is_some(), "full: {is_full}");
        let event = || AuditEvent::Started { version: String::new() };
        let error = log.record(event()).await.unwrap_err();
        assert!(
            matches!(error, AuditError::Write { is_full: full, .. } if full == is_full),
            "{error}"
        );
        match is_full {
            true => fs::remove_file(small.filler()).unwrap(),
            false => small.remount(MsFlags::empty()),
        }
        log.record(event()).await.unwrap();
        log.close().await;
        assert_eq!(words(&settings), ["file 1", "started", "missed 1", "started"]);
        assert_whole(&settings);
    }
}

/// A file-system that is small and soon full; gone with this.
struct Small(tempfile::TempDir);

impl Small {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mounted = mount(
            Some("tmpfs"),
            directory.path(),
            Some("tmpfs"),
            MsFlags::empty(),
            Some("size=256k"),
        );
        mounted.expect("only root can mount a small file-system for this test");
        Self(directory)
    }

    /// As `mount -o remount`, which the kernel refuses while a file is open for writing.
    fn remount(&self, flags: MsFlags) {
        let none: Option<&str> = None;
        mount(none, self.0.path(), none, flags | MsFlags::MS_REMOUNT, none).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.0.path().join("filler")
    }

    /// Takes all space there is.
    fn fill(&self) {
        use std::io::Write as _;
        let mut file = fs::File::create(self.filler()).unwrap();
        while file.write_all(&[0; 512]).is_ok() {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        if let Err(error) = umount2(self.0.path(), MntFlags::MNT_DETACH) {
            eprintln!("cannot unmount: {error}");
        }
    }
}

#[tokio::test]
async fn on_a_full_disk_nothing_is_done_unseen_and_the_brake_works() {
    let small = Small::new();
    let settings = settings(small.0.path());
    let log = opened(&settings).await;
    let done = Arc::new(AtomicU32::new(0));
    let (commits, brakes) = (Arc::clone(&done), Arc::clone(&done));
    let router = Router::new("testd", &Security::Insecure)
        .method::<Commit, _>(move |(), _, _| {
            commits.fetch_add(1, Ordering::SeqCst);
            async { Ok(Done {}) }
        })
        .method::<DisableUpdates, _>(move |(), _, _| {
            brakes.fetch_add(100, Ordering::SeqCst);
            async { Ok(Done {}) }
        });
    let server = Server::start(router.audit(&log)).await;
    let client = server.client();
    client.call::<Commit>(&commit(1)).await.unwrap();
    small.fill();
    // The last page of the file has space until it is full.
    let mut answered = 1;
    let error = loop {
        match client.call::<Commit>(&commit(2)).await {
            Ok(_) => answered += 1,
            Err(error) => break error,
        }
        assert!(answered < 1_000);
    };
    assert_eq!(error.code(), Some(FaultCode::NoSpace), "{error}");
    let text = model::display::error_chain(&error);
    assert!(text.contains("Subd.Commit was not carried out, because it cannot be recorded"));
    let before = done.load(Ordering::SeqCst);
    client.call::<Commit>(&commit(3)).await.unwrap_err();
    assert_eq!((before, done.load(Ordering::SeqCst)), (answered, answered));
    let brake = DisableUpdatesRequest { reason: "full".to_owned(), who: "me".to_owned() };
    client.call::<DisableUpdates>(&brake).await.unwrap();
    assert_eq!(done.load(Ordering::SeqCst), answered + 100);
    let status = log.status().unwrap();
    assert!(status.error.is_some() && status.missed >= 3, "{status:?}");
    let page = get(server.address, "/audit").await;
    assert!(page.contains("NOT WRITTEN, and most changes are refused"), "{page}");
    assert!(get(server.address, "/metrics").await.contains("dominator_audit_failing 1"));

    fs::remove_file(small.filler()).unwrap();
    client.call::<Commit>(&commit(4)).await.unwrap();
    server.stop().await;
    log.close().await;
    let report = assert_whole(&settings);
    let missed = format!("missed {}", status.missed);
    let words = words(&settings);
    assert_eq!(words.iter().filter(|word| **word == missed).count(), 1, "{words:?}");
    let end = &words[words.len() - 2..];
    assert_eq!(end[0], "begun Subd.Commit update=4");
    assert_eq!(report.remarks.len(), 1, "{report:?}");
}

#[tokio::test]
async fn a_file_system_with_a_log_can_be_remounted_read_only_and_back() {
    let small = Small::new();
    let settings = AuditSettings { bytes_max: 2_000, ..settings(small.0.path()) };
    let log = opened(&settings).await;
    let decided = |decision: &str| AuditEvent::Decided {
        decision: decision.to_owned(),
        arguments: "x".repeat(600),
        why: String::new(),
    };
    let mut expected = vec!["file 1".to_owned(), "started".to_owned()];
    // Before and after another file is begun.
    for round in 0..4 {
        let name = format!("round-{round}");
        small.remount(MsFlags::MS_RDONLY);
        let error = log.record(decided("lost")).await.unwrap_err();
        let text = format!(
            "cannot write the audit log `{}`: Read-only file system (os error 30)",
            settings.path.display()
        );
        assert_eq!(error.to_string(), text);
        small.remount(MsFlags::empty());
        log.record(decided(&name)).await.unwrap();
        expected.extend(["missed 1".to_owned(), name]);
    }
    log.close().await;
    let words = words(&settings);
    assert!(words.contains(&"file 2".to_owned()), "{words:?}");
    let told: Vec<_> = words.into_iter().filter(|word| word != "file 2").collect();
    assert_eq!(told, expected);
    assert_whole(&settings);
}

#[tokio::test]
async fn nothing_is_written_into_a_file_that_took_the_place_of_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let settings = settings(directory.path());
    let log = opened(&settings).await;
    let aside = directory.path().join("aside");
    fs::rename(&settings.path, &aside).unwrap();
    let event = || AuditEvent::Started { version: String::new() };
    let gone = log.record(event()).await.unwrap_err().to_string();
    assert!(gone.ends_with("No such file or directory (os error 2)"), "{gone}");
    fs::write(&settings.path, "").unwrap();
    let other = log.record(event()).await.unwrap_err().to_string();
    let why = "another file has taken its place since the start: put it back, or restart";
    assert!(other.ends_with(why), "{other}");
    assert_eq!(fs::read(&settings.path).unwrap(), b"");
    fs::rename(&aside, &settings.path).unwrap();
    log.record(event()).await.unwrap();
    log.close().await;
    assert_eq!(words(&settings), ["file 1", "started", "missed 2", "started"]);
    assert_whole(&settings);
}
