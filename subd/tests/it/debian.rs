//! A machine made from a Debian tree, which runs in a container of its own, and the updates that
//! its subd is told to make.

use rpc::tls::Security;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use api::subd::{Activity, Commit, CommitRequest, LastUpdate, Poll, PollReply, PollRequest};
use model::image::HealthCheck;
use model::tree::{File, Leaf, Node, Tree};
use model::trigger::Triggers;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rpc::client::{Client, Peer};
use testing::eventually_async;

use crate::fixture::{Edit, Source, Sub, request};

/// How long anything may take: the machine that runs the tests may be busy.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Where the tree of this name is; `None`, which is said, if no trees were made.
pub fn tree(name: &str) -> Option<PathBuf> {
    let Some(trees) = std::env::var_os("DEBIAN_TREES").map(PathBuf::from) else {
        eprintln!("skipped: DEBIAN_TREES is not set; `.ci/debian-trees DIR` makes the trees");
        return None;
    };
    // What is copied must never be the tree itself, should it be named by a link.
    Some(trees.join(name).canonicalize().unwrap())
}

/// An address that nobody listens on: the container has the network of its host.
pub fn free_address(host: &str) -> String {
    std::net::TcpListener::bind((host, 0)).unwrap().local_addr().unwrap().to_string()
}

/// Makes the root of a machine that has subd, which is to listen on `address`.
pub fn install(tree: &Path, root: &Path, address: &str) {
    let copied = Command::new("cp").args(["-a", "--reflink=auto"]).arg(tree).arg(root).status();
    assert!(copied.unwrap().success());
    fs::create_dir_all(root.join("opt/subd")).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_subd"), root.join("opt/subd/subd")).unwrap();
    fs::create_dir_all(root.join("etc/subd")).unwrap();
    fs::write(root.join("etc/subd/config.toml"), configuration(address)).unwrap();
}

/// What is not managed: all but `/etc` and `/opt`, for the sake of speed.
pub const EXCLUDED: &str =
    "/(bin|boot|dev|home|lib.*|media|mnt|proc|root|run|sbin|srv|sys|tmp|usr|var|etc/machine-id)";

/// The configuration of its subd.
pub fn configuration(address: &str) -> String {
    format!("insecure = true\nlisten = \"{address}\"\nexclude = ['{EXCLUDED}']\n")
}

/// A machine that runs.
pub struct Booted {
    pub root: PathBuf,
    pub container: Child,
}

impl Booted {
    /// Starts the container, whose first process is a child of `command`.
    pub fn start(root: &Path, command: &mut Command) -> Self {
        let path = root.with_extension("console");
        let log = fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        let command = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        Self { root: root.to_owned(), container: command.spawn().unwrap() }
    }

    /// The first process of the machine, as its host numbers it.
    fn init(&self) -> Option<i32> {
        let id = self.container.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }

    /// What a command says inside the machine.
    pub fn run(&self, line: &[impl AsRef<OsStr>]) -> String {
        let output = Command::new("nsenter")
            .args(["--all", "--target", &self.init().unwrap().to_string(), "--"])
            .args(line)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn console(&self) -> String {
        let bytes = fs::read(self.root.with_extension("console")).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Booted {
    fn drop(&mut self) {
        if !matches!(self.container.try_wait(), Ok(None)) {
            return;
        }
        // All other processes of the machine end with its first one, and so does the container.
        match self.init() {
            Some(init) => {
                let _gone = kill(Pid::from_raw(init), Signal::SIGKILL);
            }
            None => {
                let _gone = self.container.kill();
            }
        }
        let _status = self.container.wait();
    }
}

/// The subd of a machine that was booted.
fn booted(root: &Path, address: &str) -> Sub {
    Sub::elsewhere(root, Client::new(Peer::parse(address, 1).unwrap(), &Security::Insecure))
}

/// The subd of a machine, and what it gets objects from.
pub struct Scenario {
    pub sub: Sub,
    pub source: Source,
    next: u64,
}

impl Scenario {
    /// Waits until the subd of the machine answers.
    pub async fn start(root: &Path, address: &str) -> Self {
        Self::with(root, address, Source::start().await).await
    }

    /// As [`Scenario::start`], for a machine that gets objects from `source`.
    pub async fn with(root: &Path, address: &str, source: Source) -> Self {
        Self { sub: booted(root, address), source, next: 1 }.scanned().await
    }

    /// As [`Scenario::start`], for a machine that does not run: the test runs subd for its root.
    pub async fn from_outside(root: &Path) -> Self {
        let sub = Sub::start_on(root, &["--exclude", EXCLUDED]).await;
        Self { sub, source: Source::start().await, next: 1 }.scanned().await
    }

    /// Continues with the subd of the machine, which was booted by `boot`.
    pub async fn booted<T>(self, address: &str, boot: impl FnOnce(&Path) -> T) -> (Self, T) {
        let root = self.sub.root.clone();
        self.sub.stop().await;
        let machine = boot(&root);
        let scenario = Self { sub: booted(&root, address), ..self };
        (scenario.scanned().await, machine)
    }

    async fn scanned(self) -> Self {
        self.answers().await;
        self
    }

    /// Asks until subd answers.
    pub async fn answers(&self) -> PollReply {
        eventually_async("subd has scanned", async || {
            let reply = self.sub.client.call::<Poll>(&PollRequest::default()).await;
            reply.ok().filter(|reply| reply.scanned)
        })
        .await
    }

    /// Asks until the reply is `enough`, also over a restart.
    pub async fn until(&self, enough: impl Fn(&PollReply) -> bool) -> PollReply {
        eventually_async("the poll has the wanted reply", async || {
            let reply = self.answers().await;
            if enough(&reply) { Ok(reply) } else { Err(reply.last_update) }
        })
        .await
    }

    /// Updates the machine as `edit` says, and waits until that has ended and is verified.
    pub async fn update(
        &mut self,
        edit: impl FnOnce(Edit<'_>) -> Edit<'_>,
        triggers: &str,
        health_check: Option<HealthCheck>,
    ) -> LastUpdate {
        let id = self.commit(edit, triggers, health_check).await;
        let over = |reply: &PollReply| {
            let last = reply.last_update.as_ref();
            let verified = |last: &LastUpdate| last.verified_generation.is_some();
            reply.activity == Activity::Idle
                && last.is_some_and(|last| last.update_id == id && verified(last))
        };
        self.until(over).await.last_update.unwrap()
    }

    /// Has an update carried out, and waits for nothing.
    pub async fn commit(
        &mut self,
        edit: impl FnOnce(Edit<'_>) -> Edit<'_>,
        triggers: &str,
        health_check: Option<HealthCheck>,
    ) -> u64 {
        let id = self.next;
        self.next += 1;
        let (_, tree) = self.sub.tree().await;
        let want: Tree = edit(Edit::of(&tree, &self.source)).done();
        let (_, needs) = self.sub.plan(&want).await;
        self.sub.fetch_for(id, &self.source, &needs).await;
        let (reply, plan) = self.sub.plan(&want).await;
        let mut request = request(id, &reply, &want, plan);
        request.triggers = Triggers::from_json(triggers).unwrap();
        request.health_check = health_check;
        self.sub.prepare(&request).await.unwrap();
        self.sub.client.call::<Commit>(&CommitRequest { update_id: id }).await.unwrap();
        id
    }

    /// A program of subd that differs from the one that runs, and works all the same.
    pub async fn newer_subd(&self) -> Node {
        let (_, tree) = self.sub.tree().await;
        let mut program = fs::read(self.sub.at("/opt/subd/subd")).unwrap();
        program.extend_from_slice(b"newer");
        let (size_bytes, object) = (program.len() as u64, self.source.add(&program));
        let newer = tree.nodes().find_map(|(path, node)| match node {
            Node::Leaf(Leaf::File(file)) if path.to_string() == "/opt/subd/subd" => {
                Some(File { size_bytes, object: object.into(), ..file })
            }
            _ => None,
        });
        Node::Leaf(Leaf::File(newer.unwrap()))
    }

    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.sub.at(&format!("/var/log/{name}"))).unwrap_or_default()
    }

    /// Forgets what was logged.
    pub fn clear(&self, name: &str) {
        fs::write(self.sub.at(&format!("/var/log/{name}")), "").unwrap();
    }
}
