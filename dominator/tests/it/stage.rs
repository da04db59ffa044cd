//! The real dominator as a process, with all that it talks to.

use rpc::tls::Security;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use api::dominator::{
    GetStatus, ListSubs, ListSubsRequest, ShowSub, ShowSubRequest, Status, SubDetail, SubSummary,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rpc::client::{Client, Peer};
use rpc::server::Router;
use tempfile::TempDir;
use tokio_util::sync::DropGuard;

use crate::fake::{FakeSub, ImageServer, start};

/// How long anything may take here.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Stage {
    pub directory: TempDir,
    pub images: ImageServer,
    pub client: Client,
    pub port: u16,
    image_server: SocketAddr,
    guards: Vec<DropGuard>,
    process: Option<Child>,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port that nobody listens on, most likely for a while.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Stage {
    /// An image server and a dominator with this machine database.
    pub async fn new(mdb: &str) -> Self {
        let images = ImageServer::default();
        let router = images.router();
        Self::served(mdb, images, router).await
    }

    /// As [`Stage::new`], with an image server that answers as `router` does.
    pub async fn served(mdb: &str, images: ImageServer, router: Router) -> Self {
        let (image_server, guard) = start(router).await;
        let port = free_port();
        let client =
            Client::new(Peer::parse(&format!("127.0.0.1:{port}"), 0).unwrap(), &Security::Insecure);
        let mut stage = Self {
            directory: tempfile::tempdir().unwrap(),
            images,
            client,
            port,
            image_server,
            guards: vec![guard],
            process: None,
        };
        stage.write_mdb(mdb);
        stage.start().await;
        stage
    }

    /// A sub on a port of its own, and the machine's record without braces.
    pub async fn sub(&mut self, hostname: &str, sub: &FakeSub) -> String {
        let (address, guard) = start(sub.router()).await;
        self.guards.push(guard);
        record(hostname, address.port())
    }

    pub fn mdb(&self) -> PathBuf {
        self.directory.path().join("mdb.json")
    }

    /// Replaces the machine database.
    pub fn write_mdb(&self, text: &str) {
        let new = self.directory.path().join("mdb.new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, self.mdb()).unwrap();
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dominator"));
        command
            .args(["--insecure", "--log", "warn", "--listen"])
            .arg(format!("127.0.0.1:{}", self.port))
            .arg("--imageserver")
            .arg(self.image_server.to_string())
            .arg("--mdb")
            .arg(self.mdb())
            .arg("--state")
            .arg(self.directory.path().join("state"));
        command
    }

    pub async fn start(&mut self) {
        self.start_as(self.command()).await;
    }

    /// Starts the dominator by another command than [`Stage::command`].
    pub async fn start_as(&mut self, mut command: Command) {
        let process = self.process.insert(command.stdin(Stdio::null()).spawn().unwrap());
        wait_until_up("the dominator", &self.client, process).await;
    }

    /// Starts the dominator so that [`Stage::limit_files`] does not end it.
    pub async fn start_for_limits(&mut self) {
        // Without this the signal that tells of a file that gets too long ends the process.
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]);
        command.arg(self.command().get_program()).args(self.command().get_args());
        self.start_as(command).await;
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// SIGTERM; gives how it ended.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        end_of("the dominator", self.process.take().unwrap())
    }

    /// SIGHUP, which has it read its configuration again.
    pub fn hang_up(&self) {
        self.signal(Signal::SIGHUP);
    }

    fn signal(&self, signal: Signal) {
        let id = self.process.as_ref().unwrap().id();
        kill(Pid::from_raw(i32::try_from(id).unwrap()), signal).unwrap();
    }

    /// Lets the dominator write no file longer than that, which is like a full disk.
    pub fn limit_files(&self, bytes: &str) {
        let process = self.process.as_ref().unwrap().id();
        let mut command = Command::new("prlimit");
        command.arg(format!("--fsize={bytes}:unlimited")).arg(format!("--pid={process}"));
        assert!(command.status().unwrap().success());
    }

    pub async fn show(&self, hostname: &str) -> SubDetail {
        let request = ShowSubRequest { hostname: hostname.to_owned() };
        self.client.call::<ShowSub>(&request).await.unwrap()
    }

    pub async fn list(&self) -> Vec<SubSummary> {
        self.client.call::<ListSubs>(&ListSubsRequest::default()).await.unwrap().subs
    }

    pub async fn status(&self) -> api::dominator::DominatorStatus {
        self.client.call::<GetStatus>(&()).await.unwrap()
    }

    /// Waits until the machine has that status with that required image, and gives the machine.
    pub async fn wait(&self, hostname: &str, status: Status, image: &str) -> SubSummary {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let subs = self.list().await;
            let sub = subs.iter().find(|sub| sub.hostname == hostname);
            if let Some(sub) = sub
                && sub.status == status
                && sub.required_image == image
            {
                return sub.clone();
            }
            assert!(Instant::now() < deadline, "{hostname} does not get {status}: {sub:#?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Runs domtool.
    pub async fn domtool(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(testing::program("domtool"));
        command.args(["--insecure", "--dominator"]).arg(format!("127.0.0.1:{}", self.port));
        command.args(arguments).stdin(Stdio::null());
        tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
    }
}

/// Waits until it is so; `what` says what is waited for.
#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    let place = std::panic::Location::caller();
    async move {
        let what = format!("{what}, at {place}");
        testing::eventually_async(&what, async || is_so().await.then_some(())).await;
    }
}

/// Waits until a daemon that was started answers at `/healthz`.
pub async fn wait_until_up(name: &str, client: &Client, process: &mut Child) {
    let deadline = Instant::now() + PATIENCE;
    while client.get("/healthz").await.is_err() {
        if let Some(status) = process.try_wait().unwrap() {
            panic!("{name} ended while it was to come up: {status}");
        }
        assert!(Instant::now() < deadline, "{name} does not come up");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// How a daemon that was told to stop has ended.
pub fn end_of(name: &str, mut process: Child) -> ExitStatus {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        if Instant::now() >= deadline {
            process.kill().unwrap();
            process.wait().unwrap();
            panic!("{name} does not stop");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The exit code of a program, what it gave, and what it said.
pub fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// The fields of a machine that all tests need.
pub fn record(hostname: &str, port: u16) -> String {
    format!("\"Hostname\": \"{hostname}\", \"IpAddress\": \"127.0.0.1\", \"SubdPort\": {port}")
}
