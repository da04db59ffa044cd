//! An image server that is killed, hangs, is replaced or cannot be reached while it is needed: it
//! is named, and all goes on when it is back.

use std::fs;
use std::io::Read as _;
use std::path::PathBuf;
use std::process::Command;

use api::dominator::Status;
use localfleet::fleet::client_of;
use nix::sys::signal::Signal;
use testing::eventually;

use crate::converges::Scenario;
use crate::faults::signal;
use crate::trees;
use crate::wire::Wire;

/// How much of an image has come when it stops coming: less than its large file.
const PART_BYTES: usize = 2 << 20;

/// A machine that gets images over a wire, and has half of the image test/2.
struct Half {
    scenario: Scenario,
    wire: Wire,
    second: PathBuf,
}

impl Half {
    fn start() -> Self {
        let wire = Wire::start();
        let flags = [("--imageserver-for-subs", &*wire.address.to_string())];
        let mut scenario = Scenario::start_insecure_with(1, &flags);
        wire.lead_to(scenario.fleet.addresses().imageserver);
        let trees = [1, 2].map(|version| {
            let tree = scenario.directory.path().join(version.to_string());
            trees::make(&tree, version);
            tree
        });
        let [first, second] = trees;
        fs::write(second.join("usr/lib/large"), noise(8 << 20)).unwrap();
        scenario.add("test/1", &first);
        scenario.add("test/2", &second);
        scenario.converge("test/1");
        wire.hold_after(PART_BYTES);
        scenario.fleet.require(Some("test/2")).unwrap();
        eventually("a part has come", || if wire.holds() { Ok(()) } else { Err("not yet") });
        Self { scenario, wire, second }
    }

    /// Waits until the machine says that it could not fetch from the image server, and why.
    fn wait_failed(&mut self) {
        let address = self.wire.address.to_string();
        self.scenario.wait_until("the machine names the image server", |subs| {
            subs[0].status == Status::FetchFailed && subs[0].detail.contains(&address)
        });
    }

    /// Waits until `domtool status` and the page of the dominator say that the image server fails,
    /// or that it does not.
    fn wait_told(&mut self, is_failing: bool) {
        let fleet = &self.scenario.fleet;
        let server = fleet.addresses().imageserver.to_string();
        let dominator = client_of(fleet.addresses().dominator, fleet.security());
        eventually("the dominator says how the image server is", || {
            let told = String::from_utf8(fleet.domtool(&["status"]).unwrap().stdout).unwrap();
            let (_, page) = fleet.get(&dominator, "/").unwrap();
            let page = String::from_utf8(page).unwrap();
            let (_, metrics) = fleet.get(&dominator, "/metrics").unwrap();
            let metrics = String::from_utf8(metrics).unwrap();
            let line = told.lines().find(|line| line.starts_with("image server: ")).unwrap();
            let is_named = line.contains(&server) && page.contains("The image server: ");
            let is_well = line == "image server: ok" && !page.contains("The image server: ");
            let metric = format!("dominator_image_server_failing {}\n", u8::from(is_failing));
            let is_so = if is_failing { is_named } else { is_well };
            if is_so && metrics.contains(&metric) { Ok(()) } else { Err(line.to_owned()) }
        });
    }

    /// The machine gets the rest.
    fn finish(mut self) {
        let _output = self.scenario.fleet.domtool(&["retry", "sub-1"]).unwrap();
        self.scenario.converge("test/2");
        self.scenario.verify(&self.second);
        self.scenario.fleet.stop().unwrap();
    }
}

/// Bytes that cannot be packed.
pub fn noise(length: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    fs::File::open("/dev/urandom").unwrap().take(length).read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_killed_image_server_is_named_and_another_with_its_data_takes_its_place() {
    let mut half = Half::start();
    half.scenario.fleet.imageserver.kill().unwrap();
    half.wire.lead_to(half.scenario.fleet.addresses().imageserver);
    half.wait_failed();
    half.wait_told(true);
    let data = half.scenario.directory.path().join("imageserver");
    let former = data.with_file_name("former");
    fs::rename(&data, &former).unwrap();
    let copied = Command::new("cp").arg("-a").args([&former, &data]).status().unwrap();
    assert!(copied.success());
    for own in ["server-id", "leases", "holds", "scrub"] {
        let _had_one = fs::remove_file(data.join(own));
    }
    fs::remove_dir_all(&former).unwrap();
    half.scenario.fleet.imageserver.start_again().unwrap();
    half.wait_told(false);
    half.finish();
}

#[test]
fn an_image_server_that_hangs_is_named_and_goes_on() {
    let mut half = Half::start();
    signal(&half.scenario.fleet.imageserver, Signal::SIGSTOP);
    half.wire.lead_to(half.scenario.fleet.addresses().imageserver);
    half.wait_told(true);
    signal(&half.scenario.fleet.imageserver, Signal::SIGCONT);
    half.finish();
}

#[test]
fn a_network_that_is_lost_in_the_middle_of_a_fetch_is_named_and_the_rest_comes_later() {
    let mut half = Half::start();
    half.wire.cut();
    half.wait_failed();
    // The dominator has another way to it.
    half.wait_told(false);
    half.wire.lead_to(half.scenario.fleet.addresses().imageserver);
    half.finish();
}
