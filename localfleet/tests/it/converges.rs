//! A fleet converges, is updated, goes back, is repaired, and survives kills: one scenario, with
//! small trees and with real Debian trees.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use api::dominator::{Status, SubSummary};
use localfleet::compare::compare;
use localfleet::demo::make_drift::make_drift;
use localfleet::fleet::{Addresses, Fleet, Options, Sub};
use localfleet::programs::install;
use testing::eventually;

use crate::trees;

/// How long a fleet may take to converge; only a fleet that hangs takes so long.
pub const CONVERGE_MAX: Duration = Duration::from_secs(240);

const FILTER: &str = "/var/log/.*\n/srv/data$\n/proc/.*\n/sys/.*\n/tmp/.*\n";
const TRIGGERS: &str = r#"[
    {"MatchLines": ["/etc/.*"], "Service": "settings"},
    {"MatchLines": ["/usr/.*"], "Service": "programs"}
]"#;

/// True for paths, relative to a root, that are subd's or that [`FILTER`] keeps.
fn is_kept(path: &Path) -> bool {
    let kept = ["var/log", "proc", "sys", "tmp"];
    path.starts_with(".subd")
        || path.starts_with("srv/data")
        || kept.iter().any(|kept| path.starts_with(kept) && path != Path::new(kept))
}

/// A fleet in a directory of its own, with the two trees it is to converge to.
pub struct Scenario {
    pub directory: tempfile::TempDir,
    pub fleet: Fleet,
}

impl Scenario {
    pub fn start(subs: usize) -> Self {
        Self::start_with(subs, &[])
    }

    /// With more flags for the dominator.
    pub fn start_with(subs: usize, dominator_flags: &[(&'static str, &str)]) -> Self {
        Self::make(subs, dominator_flags, &[], false)
    }

    /// Without certificates, for tests that speak HTTP by hand.
    pub fn start_insecure(subs: usize) -> Self {
        Self::start_insecure_with(subs, &[])
    }

    /// Without certificates, with more flags for the dominator.
    pub fn start_insecure_with(subs: usize, dominator_flags: &[(&'static str, &str)]) -> Self {
        Self::make(subs, dominator_flags, &[], true)
    }

    /// With subds that run tasks in their roots.
    pub fn start_with_tasks(subs: usize) -> Self {
        Self::start_with_tasks_and(subs, &[])
    }

    /// The same, with resources that are checked each second.
    pub fn start_with_tasks_and_checks(subs: usize) -> Self {
        let flags = [("--supervisor", "direct"), ("--resource-check-every", "1s")];
        Self::make(subs, &[], &flags, false)
    }

    /// The same, with more flags for the dominator.
    pub fn start_with_tasks_and(subs: usize, dominator_flags: &[(&'static str, &str)]) -> Self {
        Self::make(subs, dominator_flags, &[("--supervisor", "direct")], false)
    }

    fn make(
        subs: usize,
        dominator_flags: &[(&'static str, &str)],
        subd_flags: &[(&'static str, &str)],
        insecure: bool,
    ) -> Self {
        let owned = |flags: &[(&'static str, &str)]| {
            flags.iter().map(|(flag, value)| (*flag, (*value).to_owned())).collect()
        };
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("filter"), FILTER).unwrap();
        fs::write(directory.path().join("triggers"), TRIGGERS).unwrap();
        let fleet = Fleet::start(Options {
            programs: programs(directory.path()),
            directory: directory.path().to_owned(),
            subs,
            subd_flags: owned(subd_flags),
            dominator_flags: owned(dominator_flags),
            insecure,
            addresses: Addresses::private().unwrap(),
            stop: Arc::new(AtomicBool::new(false)),
        })
        .unwrap();
        for sub in &fleet.subs {
            for kept in ["var/log", "srv/data/deep"] {
                fs::create_dir_all(sub.root.join(kept)).unwrap();
                fs::write(sub.root.join(kept).join("own"), &sub.hostname).unwrap();
            }
        }
        Self { directory, fleet }
    }

    /// Uploads `tree`; returns what imagetool said of it in JSON.
    pub fn add(&self, name: &str, tree: &Path) -> serde_json::Value {
        let rules = |file: &str| self.directory.path().join(file).into_os_string();
        self.imagetool(&[
            "--format".into(),
            "json".into(),
            "add".into(),
            name.into(),
            tree.as_os_str().to_owned(),
            rules("filter"),
            rules("triggers"),
            // Some of the trees are no systems.
            "--required-paths=".into(),
        ])
    }

    pub fn imagetool(&self, words: &[std::ffi::OsString]) -> serde_json::Value {
        let output = self.fleet.imagetool(words).unwrap();
        let (out, said) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{words:?}: {said}");
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    pub fn converge(&mut self, image: &str) {
        self.fleet.require(Some(image)).unwrap();
        self.fleet.wait_synced(image, CONVERGE_MAX, |_| {}).unwrap();
    }

    /// Fails unless each machine is equal to `tree`, and has what it keeps.
    pub fn verify(&self, tree: &Path) {
        self.fleet.subs.iter().for_each(|sub| Self::verify_one(sub, tree));
    }

    /// Fails unless a machine is equal to `tree`, and has what it keeps.
    pub fn verify_one(sub: &Sub, tree: &Path) {
        let differences = compare(tree, &sub.root, &is_kept).unwrap();
        assert_eq!(differences, Vec::<String>::new(), "{}", sub.hostname);
        if let Some(differences) = rsync(tree, &sub.root) {
            assert_eq!(differences, "", "{}: rsync", sub.hostname);
        }
        for kept in ["var/log/own", "srv/data/deep/own"] {
            assert_eq!(fs::read_to_string(sub.root.join(kept)).unwrap(), sub.hostname);
        }
    }

    /// Waits until `is_so` is true of what the dominator says of its machines, sorted by name;
    /// `what` says what is waited for. Fails if a daemon that was not stopped has ended.
    #[track_caller]
    pub fn wait_until(
        &mut self,
        what: &str,
        is_so: impl Fn(&[SubSummary]) -> bool,
    ) -> Vec<SubSummary> {
        eventually(what, || {
            self.fleet.check().unwrap();
            // A dominator that is just being started again does not answer.
            let subs = self.fleet.statuses().unwrap_or_default();
            if !subs.is_empty() && is_so(&subs) { Ok(subs) } else { Err(subs) }
        })
    }

    /// Waits until any machine does what `is_so` says.
    #[track_caller]
    pub fn wait_for_any(&mut self, what: &str, is_so: impl Fn(Status) -> bool) {
        self.wait_until(what, |subs| subs.iter().any(|sub| is_so(sub.status)));
    }

    /// The lines that services got since the last call.
    pub fn services(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for sub in &self.fleet.subs {
            let text = fs::read_to_string(&sub.services).unwrap_or_default();
            lines.extend(text.lines().map(|line| format!("{} {line}", sub.hostname)));
            if sub.services.exists() {
                fs::remove_file(&sub.services).unwrap();
            }
        }
        lines
    }
}

/// The directory of the programs: that of `DOMINATOR_PROGRAMS`, to test installed ones, or one
/// with this build's.
pub fn programs(directory: &Path) -> PathBuf {
    if let Some(installed) = std::env::var_os("DOMINATOR_PROGRAMS") {
        return PathBuf::from(installed);
    }
    let programs = directory.join("bin");
    install(Path::new(env!("CARGO_BIN_EXE_localfleet")), &programs).unwrap();
    programs
}

/// What rsync would change to make `copy` equal to `tree`; `None` where there is no rsync.
fn rsync(tree: &Path, copy: &Path) -> Option<String> {
    let with_slash = |path: &Path| format!("{}/", path.display());
    let mut command = Command::new("rsync");
    command.args(["-aHAXOJ", "--checksum", "--dry-run", "--itemize-changes", "--delete"]);
    for kept in ["/.subd", "/var/log/*", "/srv/data", "/proc/*", "/sys/*", "/tmp/*"] {
        command.arg(format!("--exclude={kept}"));
    }
    let output = command.arg(with_slash(tree)).arg(with_slash(copy)).output();
    let output = match output {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("note: there is no rsync here, so trees are compared by this crate alone");
            return None;
        }
        other => other.unwrap(),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The whole story, with two versions of an image.
pub fn converges_and_stays(first: &Path, second: &Path) {
    let mut scenario = Scenario::start(3);
    scenario.add("test/1", first);
    scenario.converge("test/1");
    scenario.verify(first);
    scenario.services();

    let added = scenario.add("test/2", second);
    let (sent, all) = (added["sent_objects"].as_u64(), added["objects"].as_u64());
    assert!(sent.unwrap() < all.unwrap() / 2, "only what is new should be sent: {added}");
    scenario.converge("test/2");
    scenario.verify(second);
    let services = scenario.services();
    for sub in &scenario.fleet.subs {
        for line in ["settings stop", "settings start", "programs stop", "programs start"] {
            let line = format!("{} {line}", sub.hostname);
            assert!(services.contains(&line), "{line} is not in {services:?}");
        }
    }

    scenario.converge("test/1");
    scenario.verify(first);

    // The same tree under another name: nothing changes but what the machines know of it.
    scenario.add("test/1-again", first);
    scenario.services();
    scenario.converge("test/1-again");
    scenario.verify(first);
    assert_eq!(scenario.services(), Vec::<String>::new());
    scenario.converge("test/1");

    repairs_every_kind_of_drift(&mut scenario, first);
    a_sparse_image_removes_nothing(&mut scenario, first);
    survives_kills(&mut scenario, first, second);
    scenario.fleet.stop().unwrap();
}

fn repairs_every_kind_of_drift(scenario: &mut Scenario, tree: &Path) {
    for sub in &scenario.fleet.subs {
        make_drift(&sub.root, &is_kept).unwrap();
    }
    wait_equal(scenario, tree);
    scenario.fleet.wait_synced("test/1", CONVERGE_MAX, |_| {}).unwrap();
    scenario.verify(tree);
}

fn wait_equal(scenario: &mut Scenario, tree: &Path) {
    eventually("all trees are equal", || {
        scenario.fleet.check().unwrap();
        // A tree that changes while it is compared is not equal yet.
        let differences = |sub: &Sub| {
            compare(tree, &sub.root, &is_kept).unwrap_or_else(|error| vec![format!("{error:#}")])
        };
        let differences: Vec<String> = scenario.fleet.subs.iter().flat_map(differences).collect();
        if differences.is_empty() { Ok(()) } else { Err(differences) }
    });
}

fn a_sparse_image_removes_nothing(scenario: &mut Scenario, tree: &Path) {
    let overlay = scenario.directory.path().join("overlay");
    fs::create_dir_all(overlay.join("etc")).unwrap();
    fs::write(overlay.join("etc/sparse"), "from a sparse image\n").unwrap();
    let expected = scenario.directory.path().join("expected");
    localfleet::source_trees::copy(tree, &expected).unwrap();
    localfleet::source_trees::copy(&overlay.join("etc/sparse"), &expected.join("etc/sparse"))
        .unwrap();
    // The overlay brings its own directories' owners and modes, which are those of the tree.
    for directory in ["", "etc"] {
        let metadata = fs::metadata(tree.join(directory)).unwrap();
        fs::set_permissions(overlay.join(directory), metadata.permissions()).unwrap();
    }
    scenario.imagetool(&[
        "--format".into(),
        "json".into(),
        "add".into(),
        "test/sparse".into(),
        overlay.into_os_string(),
        "-".into(),
        "-".into(),
    ]);
    scenario.converge("test/sparse");
    scenario.verify(&expected);
    scenario.converge("test/1");
    scenario.verify(tree);
}

fn survives_kills(scenario: &mut Scenario, first: &Path, second: &Path) {
    let under_way = |status| !matches!(status, Status::Synced | Status::Connecting);
    scenario.fleet.require(Some("test/2")).unwrap();
    scenario.wait_for_any("an update is under way", under_way);
    scenario.fleet.dominator.kill().unwrap();
    scenario.fleet.dominator.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    scenario.converge("test/2");
    scenario.verify(second);

    scenario.fleet.require(Some("test/1")).unwrap();
    scenario.wait_for_any("an update is under way", under_way);
    scenario.fleet.imageserver.kill().unwrap();
    scenario.fleet.imageserver.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    scenario.converge("test/1");
    scenario.verify(first);

    // A sub that is killed while nothing is under way comes back as it was.
    scenario.fleet.subs[0].daemon.kill().unwrap();
    scenario.fleet.require(Some("test/2")).unwrap();
    scenario.wait_for_any("one is not reached", |status| status == Status::Unreachable);
    scenario.fleet.subs[0].daemon.start_again().unwrap();
    scenario.converge("test/2");
    scenario.verify(second);
}

#[test]
fn a_fleet_of_small_trees_converges_and_stays() {
    let directory = tempfile::tempdir().unwrap();
    let (first, second) = (directory.path().join("1"), directory.path().join("2"));
    trees::make(&first, 1);
    trees::make(&second, 2);
    converges_and_stays(&first, &second);
}

#[test]
fn a_machine_that_is_off_or_talks_garbage_delays_nobody() {
    let tree = tempfile::tempdir().unwrap();
    trees::make(tree.path(), 1);
    let mut scenario = Scenario::start(3);
    scenario.add("test/1", tree.path());
    let off = scenario.fleet.subs.pop().unwrap();
    let garbage = scenario.fleet.subs.pop().unwrap();
    for mut sub in [off, garbage] {
        sub.daemon.stop().unwrap();
    }
    let good = scenario.fleet.subs[0].address.ip();
    let port = scenario.fleet.addresses().subd_port;
    let [first, second, third] = scenario.fleet.addresses().subs;
    let listener =
        std::net::TcpListener::bind((std::net::Ipv4Addr::new(first, second, third, 12), port))
            .unwrap();
    let babble = std::thread::spawn(move || {
        // Ends when the test's own connection comes.
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            if stream.peer_addr().unwrap().ip() == std::net::Ipv4Addr::new(127, 0, 0, 99) {
                return;
            }
            let _gone = std::io::Write::write_all(&mut stream, &[0xff; 4_096]);
        }
    });
    let address = |last: u8| format!("{first}.{second}.{third}.{last}");
    let mdb = format!(
        r#"[{{"Hostname": "sub-1", "IpAddress": "{good}", "RequiredImage": "test/1"}},
            {{"Hostname": "garbage", "IpAddress": "{}", "RequiredImage": "test/1"}},
            {{"Hostname": "off", "IpAddress": "{}", "RequiredImage": "test/1"}}]"#,
        address(12),
        address(13),
    );
    fs::write(scenario.fleet.mdb(), mdb).unwrap();
    let subs = scenario.wait_until("each has settled, and one is synced", |subs| {
        subs.len() == 3
            && subs.iter().all(|sub| sub.status != Status::Connecting)
            && subs.iter().any(|sub| sub.status == Status::Synced)
    });
    let statuses: Vec<(String, Status)> =
        subs.into_iter().map(|sub| (sub.hostname, sub.status)).collect();
    assert_eq!(statuses[2], ("sub-1".to_owned(), Status::Synced));
    assert_eq!(statuses[1], ("off".to_owned(), Status::Unreachable));
    assert!(matches!(statuses[0].1, Status::Unreachable | Status::PollFailed), "{statuses:?}");
    scenario.verify(tree.path());
    let from = std::net::SocketAddr::from(([127, 0, 0, 99], 0));
    let to = std::net::SocketAddr::from(([first, second, third, 12], port));
    connect_from(from, to);
    babble.join().unwrap();
}

/// Connects to `to` from the address `from`.
fn connect_from(from: std::net::SocketAddr, to: std::net::SocketAddr) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(from).unwrap();
        socket.connect(to).await.unwrap();
    });
}

/// `DEBIAN_TREES` names a directory with the trees `minbase` and `packages`, which
/// `.ci/debian-trees` makes with debootstrap.
#[test]
fn a_fleet_of_debian_machines_converges_and_stays() {
    let Some(trees) = std::env::var_os("DEBIAN_TREES").map(PathBuf::from) else {
        eprintln!("skipped: DEBIAN_TREES is not set; `.ci/debian-trees DIR` makes the trees");
        return;
    };
    converges_and_stays(&trees.join("minbase"), &trees.join("packages"));
}
