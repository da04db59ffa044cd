//! Daemons that are killed while an image is added or fetched by a tool, or while the machine
//! database changes: nothing is half done, and the next try succeeds.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use localfleet::compare::compare;
use localfleet::fleet::daemon_process::Daemon;
use model::mdb::Machine;
use testing::eventually;

use crate::converges::{CONVERGE_MAX, Scenario, programs};
use crate::image_server::noise;
use crate::trees;
use crate::wire::Wire;

/// Runs imagetool over `wire`, and kills the image server as soon as `has_begun` says so. Fails
/// unless imagetool fails then. Returns what it says.
fn with_kill(
    imagetool: &Path,
    scenario: &mut Scenario,
    wire: &Wire,
    words: &[OsString],
    has_begun: impl Fn() -> bool,
) -> String {
    let server = wire.address.to_string();
    let mut command = Command::new(imagetool);
    command.args(["--insecure", "--imageserver", &server]).args(words);
    let running = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the work has begun", || if has_begun() { Ok(()) } else { Err("not yet") });
    scenario.fleet.imageserver.kill().unwrap();
    wire.lead_to(scenario.fleet.addresses().imageserver);
    let output = running.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    scenario.fleet.imageserver.start_again().unwrap();
    scenario.fleet.wait_ready().unwrap();
    said
}

fn has_entries(directory: &Path, prefix: &str) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| {
        entries.any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with(prefix))
    })
}

#[test]
fn an_image_server_that_is_killed_during_add_and_get_loses_and_invents_nothing() {
    let mut scenario = Scenario::start_insecure(1);
    let wire = Wire::start();
    let imagetool = programs(&scenario.directory.path().join("more")).join("imagetool");
    wire.lead_to(scenario.fleet.addresses().imageserver);
    let directory = scenario.directory.path().to_owned();
    let tree = directory.join("1");
    trees::make(&tree, 1);
    for number in 0..8 {
        fs::write(tree.join(format!("usr/lib/large-{number}")), noise(8 << 20)).unwrap();
    }
    let add = ["add".into(), "test/1".into(), tree.clone().into()];
    let rules = ["filter", "triggers"].map(|file| directory.join(file).into_os_string());
    let add = [&add[..], &rules[..], &["--required-paths=".into()]].concat();
    let incoming = directory.join("imageserver/incoming");
    let said =
        with_kill(&imagetool, &mut scenario, &wire, &add, || has_entries(&incoming, "object-"));
    assert!(said.contains(&wire.address.to_string()), "{said}");
    let listed = scenario.imagetool(&["--format".into(), "json".into(), "list".into()]);
    assert_eq!(listed, serde_json::json!([]));
    scenario.add("test/1", &tree);

    let got = directory.join("got");
    let get = |to: &Path| ["get".into(), "test/1".into(), to.as_os_str().to_owned()];
    wire.hold_after(4 << 20);
    let said = with_kill(&imagetool, &mut scenario, &wire, &get(&got), || wire.holds());
    assert!(said.contains("nothing was left behind") && !got.exists(), "{said}");
    let again = directory.join("again");
    let output = scenario.fleet.imagetool(&get(&again)).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // What its filter keeps is no part of an image.
    let is_kept = |path: &Path| path.starts_with("srv/data");
    assert_eq!(compare(&tree, &again, &is_kept).unwrap(), Vec::<String>::new());
    scenario.converge("test/1");
    scenario.verify(&tree);
    scenario.fleet.stop().unwrap();
}

#[test]
fn an_mdbd_that_is_killed_while_its_source_changes_leaves_machines_as_they_are() {
    let mut scenario = Scenario::start_insecure(1);
    let directory = scenario.directory.path().to_owned();
    let path = |name: &str| directory.join(name);
    let config =
        format!("[[source]]\nname = 'fleet'\nfile = '{}'\n", path("source.json").display());
    fs::write(path("mdbd.toml"), config).unwrap();
    let mut address = scenario.fleet.addresses().imageserver;
    address.set_port(0);
    let free = std::net::TcpListener::bind(address).unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let flags = [
        ("--config", path("mdbd.toml").display().to_string()),
        ("--mdb", scenario.fleet.mdb().display().to_string()),
        ("--state", path("mdbd").display().to_string()),
        ("--listen", address.to_string()),
        ("--interval", "1".to_owned()),
    ];
    let flags = flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
    let flags = ["--insecure".to_owned()].into_iter().chain(flags).map(Into::into).collect();
    let require = |scenario: &Scenario, image: &str| {
        let sub = &scenario.fleet.subs[0];
        let machine = Machine {
            hostname: sub.hostname.clone(),
            ip_address: Some(sub.address.ip()),
            required_image: image.to_owned(),
            ..Machine::default()
        };
        fs::write(path("source.new"), serde_json::to_string(&[machine]).unwrap()).unwrap();
        fs::rename(path("source.new"), path("source.json")).unwrap();
    };
    let trees = [1, 2].map(|version| {
        let tree = path(&version.to_string());
        trees::make(&tree, version);
        scenario.add(&format!("test/{version}"), &tree);
        tree
    });
    require(&scenario, "test/1");
    let program = programs(&path("more")).join("mdbd");
    let mut mdbd = Daemon::start("mdbd", &program, flags, path("log/mdbd.log")).unwrap();
    scenario.fleet.wait_for(address, &mut mdbd, Duration::from_secs(60)).unwrap();
    scenario.fleet.wait_synced("test/1", CONVERGE_MAX, |_| {}).unwrap();
    for (number, image) in [(1, "test/2"), (0, "test/1"), (1, "test/2")] {
        // It is killed at once, or while it reads the source or writes the database.
        require(&scenario, image);
        mdbd.kill().unwrap();
        let status = scenario.fleet.status().unwrap();
        assert_eq!((status.mdb_error, status.mdb_held), (None, None));
        mdbd.start_again().unwrap();
        scenario.fleet.wait_synced(image, CONVERGE_MAX, |_| {}).unwrap();
        scenario.verify(&trees[number]);
    }
    mdbd.stop().unwrap();
    scenario.fleet.stop().unwrap();
}
