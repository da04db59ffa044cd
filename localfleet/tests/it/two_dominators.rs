//! Two dominators that want different images on one machine.

use std::fs;
use std::net::SocketAddr;
use std::process::{Command, Output};

use api::dominator::Status;
use localfleet::fleet::daemon_process::Daemon;
use testing::eventually;

use crate::converges::{Scenario, programs};
use crate::trees;

/// A second dominator of the fleet, which wants another image.
struct Other {
    programs: std::path::PathBuf,
    address: SocketAddr,
    daemon: Daemon,
}

impl Other {
    fn start(scenario: &Scenario, from: &str, to: &str) -> Self {
        let fleet = &scenario.fleet;
        let directory = scenario.directory.path();
        let programs = programs(&directory.join("other-programs"));
        let mdb = directory.join("other.json");
        let text = fs::read_to_string(fleet.mdb()).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(&mdb, text.replace(from, to)).unwrap();
        let addresses = fleet.addresses();
        let mut address = addresses.imageserver;
        address.set_port(0);
        let free = std::net::TcpListener::bind(address).unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let arguments = [
            ("--listen", address.to_string()),
            ("--imageserver", addresses.imageserver.to_string()),
            ("--mdb", mdb.display().to_string()),
            ("--state", directory.join("other").display().to_string()),
            ("--subd-port", addresses.subd_port.to_string()),
        ];
        let arguments = arguments.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
        let arguments = ["--insecure".to_owned()].into_iter().chain(arguments);
        let daemon = Daemon::start(
            "other",
            &programs.join("dominator"),
            arguments.map(Into::into).collect(),
            directory.join("log/other"),
        );
        Self { programs, address, daemon: daemon.unwrap() }
    }

    fn domtool(&self, words: &[&str]) -> Output {
        let mut command = Command::new(self.programs.join("domtool"));
        command.args(["--insecure", "--dominator", &self.address.to_string()]);
        command.args(words).output().unwrap()
    }

    /// What it says of the only machine.
    fn machine(&self) -> Option<serde_json::Value> {
        let output = self.domtool(&["--format", "json", "list-subs"]);
        let subs: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        subs.get(0).cloned()
    }

    /// Waits for this status; gives its detail.
    fn wait(&self, status: &str, image: &str) -> String {
        eventually(&format!("it is {status} with {image}"), || {
            let machine = self.machine().ok_or("no answer")?;
            let is_so = machine["status"] == status && machine["last_image"] == image;
            is_so.then(|| machine["detail"].as_str().unwrap().to_owned()).ok_or("another status")
        })
    }
}

#[test]
fn only_one_of_two_dominators_gives_orders_and_an_operator_decides_which() {
    let mut scenario = Scenario::start_insecure(1);
    let trees = [1, 2].map(|number| scenario.directory.path().join(number.to_string()));
    for (number, tree) in (1..).zip(&trees) {
        trees::make(tree, number);
        scenario.add(&format!("test/{number}"), tree);
    }
    scenario.converge("test/1");
    let mut other = Other::start(&scenario, "test/1", "test/2");
    let why = other.wait("held", "test/1");
    assert!(why.contains(": it takes orders from the dominator "), "{why}");
    scenario.verify(&trees[0]);

    let (_, name) = why.split_once("take-over --dominator ").unwrap();
    let output = scenario
        .fleet
        .subtool(scenario.fleet.subs[0].address, &["take-over", "--dominator", name])
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.starts_with("Until now "), "{said}");
    // It would ask again within a minute.
    assert!(other.domtool(&["retry", "sub-1"]).status.success());
    other.wait("synced", "test/2");
    scenario.wait_until("the first dominator gives no orders", |subs| {
        subs.iter().all(|sub| sub.status == Status::Held && sub.last_image == "test/2")
    });
    scenario.verify(&trees[1]);
    other.daemon.stop().unwrap();
}
