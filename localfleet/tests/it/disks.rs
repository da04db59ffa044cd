//! Machines whose disk is full, read-only or broken: the status says so, and what can be repaired
//! is.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use api::dominator::{Status, SubSummary};
use api::subd::{Alarm, Poll, PollRequest};
use testing::eventually;

use crate::converges::Scenario;
use crate::trees;

fn run(command: &str) {
    let status = Command::new("sh").args(["-ec", command]).status().unwrap();
    assert!(status.success(), "{command}");
}

/// One machine with the image test/1, whose root is an ext4 file-system of its own of 24 MiB, and
/// an image test/2 that needs 3 MiB more.
struct SmallDisk {
    scenario: Scenario,
    root: PathBuf,
    first: PathBuf,
}

impl SmallDisk {
    fn new() -> Self {
        let mut scenario = Scenario::start(1);
        let directory = scenario.directory.path().to_owned();
        let (first, second) = (directory.join("1"), directory.join("2"));
        trees::make(&first, 1);
        trees::make(&second, 2);
        fs::write(second.join("etc/large"), vec![7; 3 << 20]).unwrap();
        let root = scenario.fleet.subs[0].root.clone();
        scenario.fleet.subs[0].daemon.kill().unwrap();
        run(&format!(
            "truncate -s 24M {0}; mkfs.ext4 -q -m 0 {0}; mount -o loop {0} {1}; \
             rmdir {1}/lost+found; mkdir -p {1}/var/log {1}/srv/data/deep; \
             for i in var/log srv/data/deep; do printf %s {2} > {1}/$i/own; done",
            directory.join("disk").display(),
            root.display(),
            scenario.fleet.subs[0].hostname
        ));
        scenario.fleet.subs[0].daemon.start_again().unwrap();
        scenario.add("test/1", &first);
        scenario.add("test/2", &second);
        scenario.converge("test/1");
        Self { scenario, root, first }
    }

    fn start_subd_again(&mut self) {
        let daemon = &mut self.scenario.fleet.subs[0].daemon;
        daemon.kill().unwrap();
        daemon.start_again().unwrap();
    }

    /// Waits until the machine has this status, and returns its detail.
    fn wait_for(&mut self, wanted: Status) -> String {
        let has = |subs: &[SubSummary]| subs[0].status == wanted;
        let subs = self.scenario.wait_until(&format!("the machine is {wanted}"), has);
        subs[0].detail.clone()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _stopped = self.scenario.fleet.stop();
        let _output = Command::new("umount").arg("--lazy").arg(&self.root).output();
    }
}

/// Writes files named `big` into `directory` until not a byte is free.
fn fill(directory: &Path) {
    let mut file = File::create(directory.join("big")).unwrap();
    for size in [1 << 20, 4_096, 1] {
        while file.write_all(&vec![1; size]).is_ok() {}
    }
    // Small files need blocks, and a directory that grows needs some, too.
    let small = |number: u32| fs::write(directory.join(format!("big-{number}")), [1; 4_000]);
    let _full = (0..).find(|number| small(*number).is_err());
}

#[test]
fn a_disk_that_is_full_of_what_the_image_does_not_have_is_emptied() {
    for restarts in [false, true] {
        let mut disk = SmallDisk::new();
        fill(&disk.root.join("usr/lib"));
        if restarts {
            disk.start_subd_again();
        }
        disk.scenario.wait_until("the files are removed", |subs| {
            let is_left = |name: &str| disk.root.join("usr/lib").join(name).exists();
            subs[0].status == Status::Synced && !is_left("big") && !is_left("big-0")
        });
        disk.scenario.verify(&disk.first);
        // What was used of the reserve is there again.
        let reserve = disk.root.join(".subd/reserve");
        eventually("the reserve is whole", || fs::read_dir(&reserve).unwrap().count() == 6);
    }
}

#[test]
fn room_for_a_new_image_is_made_by_removing_what_no_image_has() {
    let mut disk = SmallDisk::new();
    disk.scenario.fleet.subs[0].daemon.kill().unwrap();
    fill(&disk.root.join("usr/lib"));
    // The files may not be removed as drift from the first image.
    disk.scenario.fleet.require(Some("test/2")).unwrap();
    disk.scenario.fleet.subs[0].daemon.start_again().unwrap();
    disk.scenario.wait_until("the machine has the new image", |subs| {
        subs[0].status == Status::Synced && subs[0].detail.starts_with("equals test/2")
    });
    let second = disk.scenario.directory.path().join("2");
    disk.scenario.verify(&second);
}

#[test]
fn a_subd_that_starts_without_space_or_inodes_says_that_the_image_does_not_fit() {
    let mut disk = SmallDisk::new();
    fill(&disk.root.join("var/log"));
    disk.start_subd_again();
    disk.wait_for(Status::Synced);
    disk.scenario.fleet.require(Some("test/2")).unwrap();
    let detail = disk.wait_for(Status::InsufficientSpace);
    assert!(detail.starts_with("160 objects need "), "{detail}");

    run(&format!("rm {}/var/log/big*", disk.root.display()));
    disk.scenario.fleet.require(Some("test/1")).unwrap();
    disk.wait_for(Status::Synced);
    let empty = |number: u32| fs::write(disk.root.join(format!("var/log/empty-{number}")), "");
    let _full = (0..).find(|number| empty(*number).is_err());
    disk.start_subd_again();
    // No drift is seen: which times the disk keeps is found out without an inode.
    disk.wait_for(Status::Synced);
    disk.scenario.fleet.require(Some("test/2")).unwrap();
    let detail = disk.wait_for(Status::InsufficientSpace);
    assert!(detail.ends_with(" 0 inodes are free"), "{detail}");
    run(&format!("rm {}/var/log/empty*", disk.root.display()));
    disk.wait_for(Status::Synced);
}

#[test]
fn a_root_that_is_read_only_or_broken_is_a_failure_that_names_the_cause() {
    let mut disk = SmallDisk::new();
    // What an update leaves that is cut by the failure of the disk.
    let own = disk.root.join(".subd");
    let leftovers = ["staging/99/0", "undo/98.done/0", "objects/incoming.1"];
    for leftover in leftovers.map(|name| own.join(name)) {
        fs::create_dir_all(leftover.parent().unwrap()).unwrap();
        fs::write(leftover, "left").unwrap();
    }
    // subd may have a file open for writing.
    eventually("the root is read-only", || {
        let mut mount = Command::new("mount");
        mount.args(["-o", "remount,ro"]).arg(&disk.root).status().unwrap().success()
    });
    disk.scenario.fleet.require(Some("test/2")).unwrap();
    let read_only = "its root is mounted read-only: nothing can be changed";
    assert_eq!(disk.wait_for(Status::UpdateFailed), read_only);
    // A subd that starts there says so, too.
    disk.start_subd_again();
    let request = PollRequest { have: None, wait_ms: 0 };
    eventually("the root is reported as read-only", || {
        let reply = disk.scenario.fleet.ask_sub::<Poll>(0, &request);
        let alarms = reply.map_err(|error| format!("{error:#}"))?.alarms;
        if alarms == [Alarm::ReadOnly] { Ok(()) } else { Err(format!("{alarms:?}")) }
    });
    assert_eq!(disk.wait_for(Status::UpdateFailed), read_only);
    run(&format!("mount -o remount,rw {}", disk.root.display()));
    disk.wait_for(Status::Synced);
    assert_eq!(leftovers.map(|name| own.join(name).exists()), [false; 3]);

    // The ioctl that ends a file-system as an error of its medium does.
    run(&format!(
        "python3 -c \"import fcntl, os, struct; \
         fcntl.ioctl(os.open('{}', 0), 0x8004587d, struct.pack('I', 2))\"",
        disk.root.display()
    ));
    disk.scenario.fleet.require(Some("test/1")).unwrap();
    let failed = [Status::FetchFailed, Status::UpdateFailed];
    let subs = disk.scenario.wait_until("the machine has failed", |subs| {
        failed.contains(&subs[0].status) && subs[0].detail.contains("Input/output error")
    });
    assert!(subs[0].detail.contains("it cannot be recorded"), "{}", subs[0].detail);
}
