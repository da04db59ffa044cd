//! subd as a service of a real systemd: a Debian tree that is booted in a container, with the units
//! that subd is installed with.
//!
//! `DEBIAN_TREES` names a directory with the tree `systemd`, as `.ci/debian-trees` makes it;
//! without it the test says that it is skipped. It needs systemd-nspawn, which gives the container
//! a boot id of its own and a new one for each boot, so that reboots are real for subd too.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::api::subd::{
    Activity, Commit, CommitRequest, Health, LastUpdate, Outcome, Poll, PollReply, PollRequest,
};
use common::image::HealthCheck;
use common::tree::{File, Leaf, Node, Tree};
use common::trigger::Triggers;
use common::wire::client::{Client, Peer};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fixture::{Edit, Source, Sub, request};

/// How long anything may take: the machine that runs the tests may be busy.
const PATIENCE: Duration = Duration::from_secs(120);

/// What nspawn exits with when the container wants to be booted again.
const REBOOTED: i32 = 133;

/// A program that says in its file what happens to it.
const UNIT: &str = "[Unit]\nDescription=VERSION\n[Service]\nType=exec\n\
    ExecStart=/bin/sh -c 'echo start VERSION >> /var/log/hello; exec sleep infinity'\n\
    ExecReload=/bin/sh -c 'echo reload VERSION >> /var/log/hello'\n\
    ExecStop=/bin/sh -c 'echo stop VERSION >> /var/log/hello'\n";

fn unit(version: &str) -> String {
    UNIT.replace("VERSION", version)
}

/// A machine.
struct Booted {
    root: PathBuf,
    nspawn: Child,
}

impl Booted {
    fn boot(root: &Path) -> Self {
        let path = root.with_extension("console");
        let log = fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        let nspawn = Command::new("systemd-nspawn")
            .args(["--boot", "--register=no", "--keep-unit", "--quiet", "--console=pipe"])
            .arg("--directory")
            .arg(root)
            .arg("systemd.unit=multi-user.target")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { root: root.to_owned(), nspawn }
    }

    /// Waits until the machine has gone down to be booted again, and boots it.
    fn boot_again(mut self) -> Self {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match self.nspawn.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                None => panic!("it does not go down:\n{}", self.console()),
            }
        };
        assert_eq!(status.code(), Some(REBOOTED), "{}", self.console());
        Self::boot(&self.root.clone())
    }

    /// The first process of the machine, as its host numbers it.
    fn init(&self) -> Option<i32> {
        let id = self.nspawn.id();
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    }

    /// What a command says inside the machine.
    fn run(&self, line: &[&str]) -> String {
        let output = Command::new("nsenter")
            .args(["--all", "--target", &self.init().unwrap().to_string(), "--"])
            .args(line)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn console(&self) -> String {
        let bytes = fs::read(self.root.with_extension("console")).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Booted {
    fn drop(&mut self) {
        if !matches!(self.nspawn.try_wait(), Ok(None)) {
            return;
        }
        // All other processes of the machine end with its first one, and so does nspawn.
        match self.init() {
            Some(init) => {
                let _gone = kill(Pid::from_raw(init), Signal::SIGKILL);
            }
            None => {
                let _gone = self.nspawn.kill();
            }
        }
        let _status = self.nspawn.wait();
    }
}

/// Makes the root of a machine that runs subd on `address`.
fn install(tree: &Path, root: &Path, address: &str) {
    // What is copied must never be the tree itself, should it be named by a link.
    let tree = tree.canonicalize().unwrap();
    let copied = Command::new("cp").args(["-a", "--reflink=auto"]).arg(tree).arg(root).status();
    assert!(copied.unwrap().success());
    let at = |path: &str| root.join(path);
    fs::create_dir_all(at("opt/subd")).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_subd"), at("opt/subd/subd")).unwrap();
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let units = at("etc/systemd/system");
    for (name, target) in
        [("subd.service", "multi-user.target"), ("subd-recover.service", "sysinit.target")]
    {
        let text = fs::read_to_string(packaging.join(name)).unwrap();
        fs::write(units.join(name), text.replace("/usr/sbin/subd", "/opt/subd/subd")).unwrap();
        let wants = units.join(format!("{target}.wants"));
        fs::create_dir_all(&wants).unwrap();
        symlink(format!("/etc/systemd/system/{name}"), wants.join(name)).unwrap();
    }
    fs::create_dir_all(at("etc/subd")).unwrap();
    // Only `/etc` and `/opt` are managed here, for the sake of speed.
    let others = "/(bin|boot|dev|home|lib.*|media|mnt|proc|root|run|sbin|srv|sys|tmp|usr|var)";
    let configuration = format!(
        "insecure = true\nlisten = \"{address}\"\nexclude = ['{others}', '/etc/machine-id']\n"
    );
    fs::write(at("etc/subd/config.toml"), configuration).unwrap();
}

/// The machine, its subd, and what it gets objects from.
struct Scenario {
    sub: Sub,
    source: Source,
    next: u64,
}

impl Scenario {
    /// Asks until subd answers.
    async fn answers(&self) -> PollReply {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.sub.client.call::<Poll>(&PollRequest::default()).await {
                Ok(reply) if reply.scanned => return reply,
                Ok(_) | Err(_) => assert!(Instant::now() < deadline, "subd does not answer"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Asks until the reply is `enough`, also over a restart.
    async fn until(&self, enough: impl Fn(&PollReply) -> bool) -> PollReply {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let reply = self.answers().await;
            if enough(&reply) {
                return reply;
            }
            assert!(Instant::now() < deadline, "{:?}", reply.last_update);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Updates the files to these, and waits until that has ended and is verified, or until the
    /// machine goes down.
    async fn update(
        &mut self,
        files: &[(&str, &str)],
        triggers: &str,
        health_check: Option<HealthCheck>,
    ) -> LastUpdate {
        let id = self.next;
        self.next += 1;
        let (_, tree) = self.sub.tree().await;
        let mut edit = Edit::of(&tree, &self.source);
        for (path, content) in files {
            edit = edit.file(path, content);
        }
        self.change(id, edit.done(), triggers, health_check).await
    }

    async fn change(
        &self,
        id: u64,
        want: Tree,
        triggers: &str,
        health_check: Option<HealthCheck>,
    ) -> LastUpdate {
        self.commit(id, want, triggers, health_check).await;
        let over = |reply: &PollReply| {
            let last = reply.last_update.as_ref();
            let verified = |last: &LastUpdate| last.verified_generation.is_some();
            reply.activity == Activity::Idle
                && last.is_some_and(|last| last.update_id == id && verified(last))
        };
        self.until(over).await.last_update.unwrap()
    }

    /// Has an update carried out, and waits for nothing.
    async fn commit(&self, id: u64, want: Tree, triggers: &str, health_check: Option<HealthCheck>) {
        let (_, needs) = self.sub.plan(&want).await;
        self.sub.fetch_for(id, &self.source, &needs).await;
        let (reply, plan) = self.sub.plan(&want).await;
        let mut request = request(id, &reply, &want, plan);
        request.triggers = Triggers::from_json(triggers).unwrap();
        request.health_check = health_check;
        self.sub.prepare(&request).await.unwrap();
        self.sub.client.call::<Commit>(&CommitRequest { update_id: id }).await.unwrap();
    }

    fn log(&self, name: &str) -> String {
        fs::read_to_string(self.sub.at(&format!("/var/log/{name}"))).unwrap_or_default()
    }

    /// Forgets what was logged.
    fn clear(&self, name: &str) {
        fs::write(self.sub.at(&format!("/var/log/{name}")), "").unwrap();
    }
}

const HELLO: &str = r#"[{"MatchLines": ["/etc/systemd/system/hello.service"], "Service": "hello"},
    {"MatchLines": ["/etc/hello.conf"], "Service": "hello", "DoReload": true},
    {"MatchLines": ["/opt/subd/subd"], "Service": "subd"},
    {"MatchLines": ["/etc/broken"], "Service": "broken"},
    {"MatchLines": ["/etc/test-kernel"], "Service": "reboot"}]"#;

const HELLO_UNIT: &str = "/etc/systemd/system/hello.service";

fn health(script: &str, undo: bool) -> Option<HealthCheck> {
    let command = ["/bin/sh", "-c", script].map(str::to_owned).into();
    Some(HealthCheck { command, within_seconds: 3, undo })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_with_systemd_is_updated_with_all_its_services() {
    let Some(trees) = std::env::var_os("DEBIAN_TREES").map(PathBuf::from) else {
        eprintln!("skipped: DEBIAN_TREES is not set; `.ci/debian-trees DIR` makes the trees");
        return;
    };
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("machine");
    // The container has the network of its host.
    let free = std::net::TcpListener::bind("127.0.0.6:0").unwrap().local_addr().unwrap();
    install(&trees.join("systemd"), &root, &free.to_string());
    let mut machine = Booted::boot(&root);
    let client = Client::new(Peer::parse(&free.to_string(), 1).unwrap());
    let sub = Sub::elsewhere(&root, client);
    let mut scenario = Scenario { sub, source: Source::start().await, next: 1 };
    scenario.answers().await;

    restarts_and_reloads(&mut scenario).await;
    undoes_what_is_not_healthy(&mut scenario).await;
    tells_what_fails_over_its_own_upgrade(&mut scenario).await;
    machine = reboots(&mut scenario, machine).await;
    assert!(!machine.console().contains("panicked"), "{}", machine.console());
    scenario.source.stop().await;
}

async fn restarts_and_reloads(scenario: &mut Scenario) {
    // A service that is new: systemd has never heard of it.
    let last = scenario.update(&[(HELLO_UNIT, &unit("1"))], HELLO, None).await;
    assert_eq!((last.outcome, last.trigger_failures), (Outcome::Done, vec![]));
    assert_eq!(scenario.log("hello"), "start 1\n");
    // Its unit changes: the old one is stopped as it was, the new one started as it is.
    let last = scenario.update(&[(HELLO_UNIT, &unit("2"))], HELLO, None).await;
    assert_eq!((last.outcome, last.trigger_failures), (Outcome::Done, vec![]));
    assert_eq!(scenario.log("hello"), "start 1\nstop 1\nstart 2\n");
    let last = scenario.update(&[("/etc/hello.conf", "new")], HELLO, None).await;
    assert_eq!((last.outcome, last.trigger_failures), (Outcome::Done, vec![]));
    assert_eq!(scenario.log("hello"), "start 1\nstop 1\nstart 2\nreload 2\n");
}

async fn undoes_what_is_not_healthy(scenario: &mut Scenario) {
    scenario.clear("hello");
    let script = "cat /proc/self/cgroup /proc/self/oom_score_adj > /var/log/health; \
        ulimit -n >> /var/log/health; ! grep -q 3 /etc/systemd/system/hello.service";
    let last = scenario.update(&[(HELLO_UNIT, &unit("3"))], HELLO, health(script, true)).await;
    let text = "exit status: 1\nit did not pass within 3 s".to_owned();
    assert_eq!(last.health, Some(Health::Failed(text.clone())));
    assert_eq!((last.outcome, last.trigger_failures), (Outcome::Undone(text), vec![]));
    assert_eq!(scenario.log("hello"), "stop 2\nstart 3\nstop 3\nstart 2\n");
    let said = scenario.log("health");
    assert!(said.contains("run-") && !said.contains("subd.service"), "{said}");
    let last = scenario.update(&[(HELLO_UNIT, &unit("4"))], HELLO, health(script, true)).await;
    assert_eq!((last.outcome, last.health), (Outcome::Done, Some(Health::Passed)));
}

async fn tells_what_fails_over_its_own_upgrade(scenario: &mut Scenario) {
    let broken = "[Service]\nType=oneshot\nExecStart=/bin/false\n";
    // A subd that differs from the one that runs, and works all the same.
    let (before, tree) = scenario.sub.tree().await;
    let mut program = fs::read(scenario.sub.at("/opt/subd/subd")).unwrap();
    program.extend_from_slice(b"newer");
    let newer = tree.nodes().find_map(|(path, node)| match node {
        Node::Leaf(Leaf::File(file)) if path.to_string() == "/opt/subd/subd" => Some(File {
            size_bytes: program.len() as u64,
            object: scenario.source.add(&program),
            ..file
        }),
        _ => None,
    });
    let want = Edit::of(&tree, &scenario.source)
        .file("/etc/systemd/system/broken.service", broken)
        .file("/etc/broken", "1")
        .put("/opt/subd/subd", Node::Leaf(Leaf::File(newer.unwrap())))
        .done();
    let id = scenario.next;
    scenario.next += 1;
    scenario.change(id, want, HELLO, None).await;
    let restarted = |reply: &PollReply| reply.version.instance != before.version.instance;
    let after = scenario.until(restarted).await;
    let last = after.last_update.unwrap();
    assert_eq!((last.update_id, last.outcome), (id, Outcome::Done));
    let [failed] = &after.trigger_failures[..] else { panic!("{:?}", after.trigger_failures) };
    assert_eq!((&*failed.service, &*failed.verb), ("broken", "start"));
    assert!(failed.output.contains("Job for broken.service failed"), "{}", failed.output);
    // They are told until the next good update.
    scenario.update(&[("/etc/hello.conf", "newer")], HELLO, None).await;
    assert_eq!(scenario.answers().await.trigger_failures, vec![]);
}

async fn reboots(scenario: &mut Scenario, machine: Booted) -> Booted {
    let check = "cat /proc/sys/kernel/random/boot_id > /var/log/booted; grep -q 1 /etc/test-kernel";
    let machine = boot_with(scenario, machine, "1", health(check, true)).await;
    let checked =
        |reply: &PollReply| reply.last_update.as_ref().is_some_and(|last| last.health.is_some());
    let reply = scenario.until(checked).await;
    let last = reply.last_update.unwrap();
    assert_eq!((last.outcome, last.health), (Outcome::Done, Some(Health::Passed)));
    assert_eq!(scenario.log("booted").trim(), reply.identity.boot_id);
    // The journal was open while it was down: it was looked at before anything else started.
    let show = |property| machine.run(&["systemctl", "show", "-P", property, "subd-recover"]);
    let said = ["ConditionResult", "Result", "ExecMainStatus"].map(&show);
    assert_eq!(said.each_ref().map(|text| text.trim()), ["yes", "success", "0"]);
    let ended: u64 = show("ExecMainExitTimestampMonotonic").trim().parse().unwrap();
    let line = ["systemctl", "show", "-P", "ActiveEnterTimestampMonotonic", "local-fs-pre.target"];
    let mounts: u64 = machine.run(&line).trim().parse().unwrap();
    assert!(0 < ended && ended <= mounts, "{ended} {mounts}");
    let log = machine.run(&["journalctl", "--boot", "--output=cat"]);
    assert!(!log.contains("ordering cycle"), "{log}");
    // What is not healthy after the reboot is undone, and needs one more.
    let machine = boot_with(scenario, machine, "2", health(check, true)).await.boot_again();
    let complete = |reply: &PollReply| {
        let last = reply.last_update.as_ref().unwrap();
        !last.awaits_boot && reply.activity == Activity::Idle
    };
    let last = scenario.until(complete).await.last_update.unwrap();
    assert!(matches!(last.outcome, Outcome::Undone(_)), "{last:?}");
    assert_eq!(fs::read_to_string(scenario.sub.at("/etc/test-kernel")).unwrap(), "1");
    machine
}

/// Has an update carried out that reboots the machine, and boots it.
async fn boot_with(
    scenario: &mut Scenario,
    machine: Booted,
    kernel: &str,
    health_check: Option<HealthCheck>,
) -> Booted {
    let id = scenario.next;
    scenario.next += 1;
    let (_, tree) = scenario.sub.tree().await;
    let want = Edit::of(&tree, &scenario.source).file("/etc/test-kernel", kernel).done();
    scenario.commit(id, want, HELLO, health_check).await;
    machine.boot_again()
}
