//! The program itself: how it starts, stops, and what it remembers.

use rpc::tls::Security;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use api::subd::{
    Activity, CacheReport, Commit, CommitRequest, Fetch, FetchObject, FetchRequest,
    GetConfiguration, Poll, PollRequest, Prepare, ScanNow, ScanNowRequest, SetConfiguration,
    UpdateOutcome,
};
use model::filter::Filter;
use model::scope::{Coverage, ScanSettings};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rpc::client::{Client, Peer};

use crate::fixture::{Edit, Source, Sub, request, scan_by};

fn command(root: &Path, flags: &[&str]) -> Command {
    with_flags(Command::new(env!("CARGO_BIN_EXE_subd")), root, flags)
}

fn with_flags(mut command: Command, root: &Path, flags: &[&str]) -> Command {
    command.args(["--listen", "127.0.0.5:0", "--config", "/dev/null", "--root"]);
    command.arg(root).args(flags).stderr(Stdio::piped()).stdout(Stdio::piped());
    command
}

pub fn output(root: &Path, flags: &[&str]) -> Output {
    command(root, flags).output().unwrap()
}

/// A subd that runs.
pub struct Process {
    pub child: Child,
    stderr: BufReader<ChildStderr>,
    pub client: Client,
}

impl Process {
    fn start(root: &Path) -> Self {
        Self::start_with(root, &["--insecure"])
    }

    pub fn start_with(root: &Path, flags: &[&str]) -> Self {
        Self::of(command(root, flags))
    }

    /// Starts as root without this capability.
    pub fn start_without(capability: &str, root: &Path) -> Self {
        let mut command = Command::new("setpriv");
        command.args([&format!("--bounding-set=-{capability}"), "--"]);
        command.arg(env!("CARGO_BIN_EXE_subd"));
        Self::run(command, root)
    }

    /// Starts a command that becomes subd with the flags after its own.
    pub fn run(command: Command, root: &Path) -> Self {
        Self::of(with_flags(command, root, &["--insecure"]))
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "it has ended");
            if let Some((_, url)) = line.split_once("listening on http") {
                let address = url.trim_start_matches('s').trim_start_matches("://");
                break address.trim().to_owned();
            }
        };
        Self {
            child,
            stderr,
            client: Client::new(Peer::parse(&address, 1).unwrap(), &Security::Insecure),
        }
    }

    pub fn stop(mut self) -> Option<i32> {
        let process = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(process, Signal::SIGTERM).unwrap();
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        assert!(!rest.contains("panicked"), "{rest}");
        self.child.wait().unwrap().code()
    }
}

impl Drop for Process {
    /// Ends a process that a failed test leaves behind.
    fn drop(&mut self) {
        let _gone_already = self.child.kill();
        let _waited = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_on_sigterm_and_lets_no_second_one_in() {
    let place = tempfile::tempdir().unwrap();
    let first = Process::start(place.path());
    let second = output(place.path(), &["--insecure"]);
    assert_eq!(second.status.code(), Some(1));
    let text = String::from_utf8(second.stderr).unwrap();
    assert!(text.contains("error: cannot manage `"), "{text}");
    assert!(text.contains("another subd manages this root already"), "{text}");
    assert!(text.contains("\nhint: stop the other subd first"), "{text}");
    let (page, metrics) = first.client.get("/metrics").await.unwrap();
    let metrics = String::from_utf8(metrics.to_vec()).unwrap();
    assert!(page == 200 && metrics.contains("subd_cached_objects 0"), "{metrics}");
    assert_eq!(first.client.get("/healthz").await.unwrap().0, 200);
    assert_eq!(first.stop(), Some(0));
    assert_eq!(Process::start(place.path()).stop(), Some(0));
}

#[test]
fn logs_one_json_object_per_line_if_asked() {
    let flags = ["--insecure", "--log-format", "json", "--root", "/nonexistent/root"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_subd"));
    let output = command.args(["--config", "/dev/null"]).args(flags).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let message = first["message"].as_str().unwrap();
    assert!(message.starts_with("INSECURE: subd runs with --insecure"), "{text}");
    assert_eq!(first["level"], "WARN");
    assert!(first["timestamp"].is_string(), "{text}");
}

#[test]
fn refuses_to_start_unprotected_or_with_bad_flags() {
    let place = tempfile::tempdir().unwrap();
    let table: [(&[&str], i32, &str); 4] = [
        (&["--tls", "/nonexistent"], 2, "error: subd does not run unprotected by itself"),
        (&["--insecure", "--exclude", "("], 2, "error: invalid --exclude: line 1"),
        (&["--insecure", "--root", "/nonexistent"], 2, "cannot be used multiple times"),
        (&["--insecure", "--listen", "nonsense:x"], 2, "cannot be used multiple times"),
    ];
    for (flags, code, text) in table {
        let output = output(place.path(), flags);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(text), "{stderr}");
    }
    let output = output(&place.path().join("absent"), &["--insecure"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr.contains("absent`: "), "{stderr}");
    assert!(!place.path().join(".subd").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn remembers_over_restarts_and_trusts_no_object_of_before() {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (reply, empty) = sub.tree().await;
    let want = Edit::of(&empty, &source).file("/f", "f").done();
    sub.converge(7, &source, &want).await;
    let object = |content: &[u8]| api::subd::FetchObject {
        id: source.add(content),
        size_bytes: content.len() as u64,
    };
    let (good, bad) = (object(b"good"), object(b"bad"));
    sub.fetch(8, &[&source], &[good, bad]).await;
    let settings = ScanSettings {
        coverage: Coverage::Full(Filter::new(["/kept"]).unwrap()),
        ..ScanSettings::default()
    };
    sub.client.call::<SetConfiguration>(&scan_by(settings.clone())).await.unwrap();
    let changed = sub.poll_until(|reply| reply.scanned).await;
    assert_ne!(changed.scope, reply.scope);
    assert_eq!(changed.scan.as_ref().unwrap().scope, changed.scope);
    let root = sub.root.clone();
    let _place = sub.stop().await;
    std::fs::write(root.join(format!(".subd/objects/{}", bad.id)), "evil").unwrap();
    let process = Process::start(&root);
    let again = process.client.call::<Poll>(&PollRequest::default()).await.unwrap();
    assert_ne!(again.version.instance, reply.version.instance);
    assert_eq!(again.scope, changed.scope);
    assert_eq!(again.last_image.unwrap().as_str(), "test/7");
    assert_eq!(again.last_update, changed.last_update);
    assert_eq!(again.cache, Some(CacheReport::Full(vec![good.id])));
    let kept = process.client.call::<GetConfiguration>(&()).await.unwrap();
    assert_eq!(kept.scan, settings);
    assert_eq!(process.stop(), Some(0));
    source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_anywhere_it_converges_again_and_keeps_what_is_not_its_business() {
    let (place, source) = (tempfile::tempdir().unwrap(), Source::start().await);
    let root = place.path();
    std::fs::create_dir(root.join("kept")).unwrap();
    std::fs::write(root.join("kept/x"), "precious").unwrap();
    let mut process = Process::start(root);
    let sub = Sub::elsewhere(root, process.client.clone());
    let settings = ScanSettings {
        coverage: Coverage::Full(Filter::new(["/kept"]).unwrap()),
        ..ScanSettings::default()
    };
    sub.client.call::<SetConfiguration>(&scan_by(settings)).await.unwrap();
    let (_, empty) = sub.tree().await;
    let version = |number: u64| {
        let mut edit = Edit::of(&empty, &source).directory(&format!("/d{number}"), 0o755);
        for file in 0..200 {
            let content = format!("{file} of {number}");
            edit = edit.file(&format!("/f{file}"), &content);
            edit = edit.file(&format!("/d{number}/f{file}"), &content);
        }
        edit.done()
    };
    for round in 1..=12 {
        let want = version(round);
        let sub = Sub::elsewhere(root, process.client.clone());
        let (reply, plan) = sub.plan(&want).await;
        // Killed a moment after the call, wherever that is.
        let moment = std::time::Duration::from_millis(round);
        if round % 4 == 0 {
            let scan = ScanNowRequest { content: true, media: true };
            sub.client.call::<ScanNow>(&scan).await.unwrap();
        } else if round % 4 == 3 {
            let objects = plan.objects().into_iter();
            let objects = objects.map(|(id, need)| FetchObject { id, size_bytes: need.size_bytes });
            let sources = vec![source.address.clone()];
            let fetch =
                FetchRequest { fetch_id: round, sources, objects: objects.collect(), ahead: false };
            sub.client.call::<Fetch>(&fetch).await.unwrap();
        } else {
            sub.fetch_for(round, &source, &plan).await;
            let request = request(round, &reply, &want, plan);
            if round % 4 == 1 {
                sub.client.call::<Prepare>(&request).await.unwrap();
            } else {
                sub.prepare(&request).await.unwrap();
                sub.client.call::<Commit>(&CommitRequest { update_id: round }).await.unwrap();
            }
        }
        std::thread::sleep(moment);
        process.child.kill().unwrap();
        process.child.wait().unwrap();
        sub.stop().await;
        process = Process::start(root);
        let sub = Sub::elsewhere(root, process.client.clone());
        sub.poll_until(|reply| reply.activity == Activity::Idle).await;
        let last = sub.converge(100 + round, &source, &want).await;
        assert_eq!(last.outcome, UpdateOutcome::Done, "round {round}");
        assert_eq!(sub.tree().await.1.digest(), want.digest(), "round {round}");
        assert_eq!(std::fs::read(root.join("kept/x")).unwrap(), b"precious");
        sub.stop().await;
    }
    assert_eq!(process.stop(), Some(0));
    source.stop().await;
}
