//! Writes the archives of a release: `WRITE_STATE_OF=0.2 cargo test -p localfleet --test it
//! state::make`. Without that variable it does nothing.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;
use std::time::SystemTime;

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use serde_json::{Value, json};
use testing::eventually;

use super::place::{HOSTS, INVENTORY, Place, folder};

/// As long as certificates may last, less what is lost between making the authority and them.
const LIFETIME: &str = "36490d";

/// The content of a file that is packed: it is long, and repeats itself.
const LARGE: usize = 100_000;

/// The times of all files of images.
const MTIME: i64 = 1_600_000_000;

/// Waits for the next second: of two images that are signed in one second neither is newer.
fn next_second() {
    let second = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let now = second();
    eventually("the next second begins", || second() != now);
}

/// Each has a holder, and what is asked for it.
const CERTIFICATES: [(&str, &str); 7] = [
    ("imageserver", "--set imageserver"),
    ("replica", "--set imageserver"),
    ("dominator", "--set dominator"),
    ("subd", "--set subd"),
    ("mdbd", "--set mdbd"),
    ("ann", "--method *.* --group web"),
    ("bob", "--set viewer"),
];

fn certificates(place: &Place) {
    fs::create_dir(place.at("tls")).unwrap();
    place.done("domtool cert ca tls/ca --name fixtures --lifetime 36499d");
    let hosts: Vec<String> = HOSTS.iter().map(|host| format!("--host {host}")).collect();
    for (holder, powers) in CERTIFICATES {
        let issue = format!("domtool cert issue --ca tls/ca --out tls/{holder} --name {holder}");
        let hosts = hosts.join(" ") + " --host sub-1";
        place.done(&format!("{issue} {powers} {hosts} --lifetime {LIFETIME}"));
    }
    place.done("domtool cert revoke --ca tls/ca bob --reason key-compromise");
    for holder in ["imageserver", "replica", "dominator", "subd", "mdbd"] {
        fs::copy(place.at("tls/ca/crl.pem"), place.at(&format!("tls/{holder}/crl.pem"))).unwrap();
    }
}

/// Makes the tree of a version.
fn tree(place: &Place, version: u32) {
    let name = format!("tree-{version}");
    let write = |path: &str, text: &str| place.write(&format!("{name}/{path}"), text);
    write("etc/version", &format!("version {version}\n"));
    write("etc/same", "the same in all versions\n");
    write("usr/large", &"large ".repeat(LARGE / 6));
    write(&format!("opt/only-in-{version}/file"), "of one version\n");
    write("var/log/kept", "");
    std::os::unix::fs::symlink("same", place.at(&format!("{name}/etc/link"))).unwrap();
    for entry in walkdir::WalkDir::new(place.at(&name)) {
        let time = TimeSpec::new(MTIME, 0);
        let path = entry.unwrap().into_path();
        utimensat(AT_FDCWD, &path, &time, &time, UtimensatFlags::NoFollowSymlink).unwrap();
    }
}

fn images(place: &Place) {
    let key = place.at("key");
    let mut command = Command::new("ssh-keygen");
    command.args(["-q", "-t", "ed25519", "-N", "", "-C", "fixtures", "-f"]).arg(&key);
    assert!(command.status().expect("the package openssh-client is installed").success());
    fs::rename(key.with_extension("pub"), place.at("trusted")).unwrap();
    place.write("filter", "/var/log/.*\n/etc/machine-id\n");
    place.write("triggers", r#"[{"MatchLines": ["/etc/.*"], "Service": "settings"}]"#);
    place.write("notes", "what is new\n");
    place.write("log", "how it was made\n");
    place.write("well", r#"{"command": ["/bin/true"], "within_seconds": 60, "undo": true}"#);
    place.write("ill", r#"{"command": ["/bin/false"], "within_seconds": 1, "undo": true}"#);
    place.done("imagetool mkdir web --owner-group web");
    place.done("imagetool mkdir web/made --owner-user ann");
    for version in [1, 2, 3, 4] {
        tree(place, version);
        let health = if version == 2 { "ill" } else { "well" };
        place.done(&format!(
            "imagetool add web/{version} tree-{version} filter triggers --required-paths= \
             --sign key --health-check {health} --tag os=debian --release-notes notes \
             --build-log log"
        ));
        next_second();
    }
    place.done("imagetool copy web/1 base/1");
    place.done("imagetool add old/1 tree-1 - - --required-paths=");
    place.done("imagetool delete --yes old/1");
    place.done("imagetool add soon/1 tree-1 - - --required-paths= --expires-in 30000d");
}

fn require(place: &Place, image: &str) {
    let machines = json!([
        {
            "Hostname": "sub-1", "IpAddress": place.subd.ip(), "SubdPort": place.subd.port(),
            "RequiredImage": image, "Location": "here/there", "Tags": {"tier": "front"},
        },
        {"Hostname": "off-1", "IpAddress": "127.77.0.200", "RequiredImage": "web/1"},
    ]);
    place.write("new.json", &machines.to_string());
    fs::rename(place.at("new.json"), place.at("mdb.json")).unwrap();
}

/// Writes the number and the path of each entry of the root.
fn list_inodes(place: &Place) {
    let mut text = String::new();
    for entry in walkdir::WalkDir::new(place.at("root")).sort_by_file_name() {
        let entry = entry.unwrap();
        let path = entry.path().strip_prefix(place.at("")).unwrap();
        text.push_str(&format!("{} {}\n", entry.metadata().unwrap().ino(), path.display()));
    }
    place.write("inodes", &text);
}

/// Answers requests for the inventory until the process ends.
fn serve(inventory: String) {
    let listener = TcpListener::bind(INVENTORY).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.extend(byte);
            }
            let length = inventory.len();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            stream.write_all((head + &inventory).as_bytes()).unwrap();
        }
    });
}

#[test]
fn writes_the_state_of_this_release() {
    let Ok(release) = std::env::var("WRITE_STATE_OF") else { return };
    let release = release.as_str();
    fs::create_dir(folder(release)).expect("the state of a release is written once");
    let place = Place::new(HOSTS[0]);
    certificates(&place);
    let mut imageserver = place.start_imageserver();
    images(&place);
    let mut replica = place.start_replica();
    let is_level = |value: &Value| value["master"]["is_level"] == true;
    place.wait(&format!("imagetool replication --imageserver {}", place.replica), is_level);
    place.done("imagetool delete --yes base/1");

    place.write("root/etc/machine-id", "0123456789abcdef0123456789abcdef\n");
    let mut subd = place.start_subd();
    require(&place, "web/1");
    let mut dominator = place.start_dominator();
    place.wait_status("synced", "web/1");

    // An image that fails there, and to which updates stop.
    require(&place, "web/2");
    place.wait_status("health-failed", "web/2");
    place.wait("domtool list-stopped", |list| list[0]["image"] == "web/2");

    // Killed in an update, and carried on.
    for (image, verb, archive) in [("web/3", "stop", "stopping"), ("web/4", "start", "starting")] {
        let flag = format!("kill-at-{verb}");
        place.write(&flag, "");
        require(&place, image);
        eventually("subd is killed", || subd.check().is_err());
        list_inodes(&place);
        place.pack(release, archive, &["root", "inodes", "trusted"]);
        fs::remove_file(place.at(&flag)).unwrap();
        drop(subd);
        subd = place.start_subd();
        place.wait_status("synced", image);
    }

    // Orders of all kinds.
    place.done("domtool set-config --fleet network-percent=50 --why slow");
    place.done("domtool set-config --tag tier=front cpu-percent=40 --why busy");
    place.done("domtool set-config --host sub-1 scan-percent=30 --why old");
    place.wait("domtool get-config sub-1", |value| {
        value["machine"]["reported"]["told"]["scan_percent"] == 30
    });
    place.done("domtool set-default-image web/4 --yes --why rescue");
    place.done("domtool pause off-1 --until 300d --why works");
    place.done("domtool disable-updates storm");
    place.done("subtool pause --for 29d --reason by-hand");

    let inventory = json!([{"Hostname": "web1", "RequiredImage": "web/4", "Tags": {"a": "b"}}]);
    serve(inventory.to_string());
    place.write_inventory();
    let mut mdbd = place.start_mdbd();
    eventually("the MDB is written", || {
        mdbd.check().unwrap();
        place.at("made.json").exists()
    });

    for daemon in [&mut dominator, &mut subd, &mut replica, &mut imageserver, &mut mdbd] {
        daemon.stop().unwrap();
    }
    place.pack(release, "tls", &["tls"]);
    place.pack(release, "imageserver", &["imageserver"]);
    place.pack(release, "replica", &["replica"]);
    place.pack(release, "dominator", &["dominator"]);
    place.pack(release, "subd", &["root", "trusted"]);
    place.pack(release, "mdbd", &["mdbd"]);
}
