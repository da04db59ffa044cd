//! The real dominator as a process, with a fake image server and fake subs.

use rpc::tls::Security;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use api::dominator::{
    GetStatus, ListSubs, ListSubsRequest, ShowSub, ShowSubRequest, Status, SubDetail, SubSummary,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rpc::client::{Client, Peer};
use rpc::server::Router;
use tempfile::TempDir;
use testing::{eventually, eventually_async};
use tokio_util::sync::DropGuard;

use crate::fake::{FakeSub, ImageServer, start};

/// The timeout of the tests.
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

/// Returns a free port.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Stage {
    /// Starts an image server and a dominator with a machine database.
    pub async fn new(mdb: &str) -> Self {
        let images = ImageServer::default();
        let router = images.router();
        Self::served(mdb, images, router).await
    }

    /// As [`Stage::new`], with another image server.
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

    /// Serves a sub at its own port. Returns the machine's record without braces.
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

    /// Starts the dominator with another command than [`Stage::command`].
    pub async fn start_as(&mut self, mut command: Command) {
        let process = self.process.insert(command.stdin(Stdio::null()).spawn().unwrap());
        wait_until_up("the dominator", &self.client, process).await;
    }

    /// Starts the dominator so that [`Stage::limit_files`] does not end it.
    pub async fn start_for_limits(&mut self) {
        // Otherwise SIGXFSZ ends the process when a file becomes too long.
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]);
        command.arg(self.command().get_program()).args(self.command().get_args());
        self.start_as(command).await;
    }

    /// The most memory that the dominator ever had, in MiB.
    pub fn peak_mib(&self) -> u64 {
        let process = self.id();
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }

    /// Returns the number of the process.
    pub fn id(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Sends SIGTERM. Returns the exit status.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        end_of("the dominator", self.process.take().unwrap())
    }

    /// Sends SIGHUP, after which it reads its configuration again.
    pub fn hang_up(&self) {
        self.signal(Signal::SIGHUP);
    }

    fn signal(&self, signal: Signal) {
        let id = self.id();
        kill(Pid::from_raw(i32::try_from(id).unwrap()), signal).unwrap();
    }

    /// Limits the size of files that the dominator writes, like a full disk.
    pub fn limit_files(&self, bytes: &str) {
        let process = self.id();
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

    /// Waits until the machine has this status and this required image.
    pub async fn wait(&self, hostname: &str, status: Status, image: &str) -> SubSummary {
        eventually_async(&format!("{hostname} is {status}"), async || {
            let subs = self.list().await;
            let sub = subs.into_iter().find(|sub| sub.hostname == hostname).ok_or(None)?;
            let is_so = sub.status == status && sub.required_image == image;
            if is_so { Ok(sub) } else { Err(Some(sub)) }
        })
        .await
    }

    /// Runs domtool.
    pub async fn domtool(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(testing::program("domtool"));
        command.args(["--insecure", "--dominator"]).arg(format!("127.0.0.1:{}", self.port));
        command.args(arguments).stdin(Stdio::null());
        tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
    }
}

/// Waits until the condition `what` holds.
#[track_caller]
pub fn wait_until(what: &str, is_so: impl AsyncFnMut() -> bool) -> impl Future<Output = ()> {
    let place = std::panic::Location::caller();
    async move {
        let what = format!("{what}, at {place}");
        eventually_async(&what, is_so).await;
    }
}

/// Waits until a daemon that was started answers at `/healthz`.
pub async fn wait_until_up(name: &str, client: &Client, process: &mut Child) {
    eventually_async(&format!("{name} answers"), async || {
        if let Some(status) = process.try_wait().unwrap() {
            panic!("{name} ended while it was to come up: {status}");
        }
        client.get("/healthz").await
    })
    .await;
}

/// Waits until a daemon that was told to stop has ended. Returns its exit status.
pub fn end_of(name: &str, mut process: Child) -> ExitStatus {
    eventually(&format!("{name} stops"), || process.try_wait().unwrap())
}

/// Returns the fields of a machine's record, without braces.
pub fn record(hostname: &str, port: u16) -> String {
    format!("\"Hostname\": \"{hostname}\", \"IpAddress\": \"127.0.0.1\", \"SubdPort\": {port}")
}
