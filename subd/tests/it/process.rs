//! The program itself: how it starts, stops, and what it remembers.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use common::api::subd::{
    CacheReport, Configuration, GetConfiguration, Poll, PollRequest, SetConfiguration,
};
use common::filter::Filter;
use common::scope::{Coverage, ScanSettings};
use common::wire::client::{Client, Peer};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fixture::{Edit, Source, Sub};

fn command(root: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_subd"));
    command.args(["--listen", "127.0.0.5:0", "--config", "/dev/null", "--root"]);
    command.arg(root).args(flags).stderr(Stdio::piped()).stdout(Stdio::piped());
    command
}

fn output(root: &Path, flags: &[&str]) -> Output {
    command(root, flags).output().unwrap()
}

struct Process {
    child: Child,
    stderr: BufReader<ChildStderr>,
    client: Client,
}

impl Process {
    fn start(root: &Path) -> Self {
        let mut child = command(root, &["--insecure"]).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "it has ended");
            if let Some((_, address)) = line.split_once("listening on http://") {
                break address.trim().to_owned();
            }
        };
        Self { child, stderr, client: Client::new(Peer::parse(&address, 1).unwrap()) }
    }

    fn stop(mut self) -> Option<i32> {
        let process = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(process, Signal::SIGTERM).unwrap();
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        assert!(!rest.contains("panicked"), "{rest}");
        self.child.wait().unwrap().code()
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
fn refuses_to_start_unprotected_or_with_bad_flags() {
    let place = tempfile::tempdir().unwrap();
    let table: [(&[&str], i32, &str); 4] = [
        (&[], 2, "error: TLS is not available in this release"),
        (&["--insecure", "--exclude", "("], 2, "error: bad --exclude: line 1"),
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
    let object = |content: &[u8]| common::api::subd::FetchObject {
        id: source.add(content),
        size_bytes: content.len() as u64,
    };
    let (good, bad) = (object(b"good"), object(b"bad"));
    sub.fetch(8, &[&source], &[good, bad]).await;
    let settings = ScanSettings {
        coverage: Coverage::Full(Filter::new(["/kept"]).unwrap()),
        ..ScanSettings::default()
    };
    let configuration = Configuration { scan: settings };
    sub.client.call::<SetConfiguration>(&configuration).await.unwrap();
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
    assert_eq!(kept, configuration);
    assert_eq!(process.stop(), Some(0));
    source.stop().await;
}
