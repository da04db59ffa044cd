//! Measures installations of an empty machine: of a whole system, beside rsync, and of a tree of
//! 1.0 GB, beside `cp -a` and `sync`.
//!
//! For the second the machine fetches from an address that is not one of the loopback: subd and the
//! imageserver treat it as another machine. It is one of the loopback device in a network namespace
//! of its own, so no packet leaves the machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use nix::sched::{CloneFlags, unshare};

use super::fixture::{self, BYTES, FILES, WORDS};
use super::measure::{Row, Samples, Took, cpu_of, run, seconds};
use super::update::rsync;
use super::{Bench, settle, subd_of, unlimited, update_to, upload};
use crate::fleet::Addresses;

/// The network of the namespace: the first three bytes of its addresses.
const NETWORK: [u8; 3] = [10, 78, 0];

/// The size of a disk, in bytes. The files of its image take what is written.
const DISK_BYTES: u64 = 4 << 30;

/// The goal for the processor time of the imageserver, in seconds, and that of the Go Dominator.
const SERVER_CPU_WANTED: f64 = 1.0;
const GO_SERVER_CPU: f64 = 2.1;

/// The goal for the time, beside `cp -a` and `sync`.
const COPY_WANTED: f64 = 1.5;

/// Measures the installation of a whole system on an empty machine.
///
/// # Errors
///
/// If there is no system, or an update fails.
pub fn install(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let (system, name) = bench.system()?;
    let (mut ours, mut peer) = (Samples::default(), Samples::default());
    let mut entries = 0;
    for _ in 0..bench.runs().min(3) {
        let mut fleet = bench.fleet("install", None, false)?;
        upload(&fleet, "system", &system, &[])?;
        settle()?;
        ours.add(update_to(&mut fleet, "system")?.as_secs_f64());
        let detail = fleet.detail("sub-1")?;
        entries = detail.poll.and_then(|poll| poll.totals).map_or(0, |totals| totals.entries);
        bench.end("install", fleet)?;
        let target = bench.place.join("rsync");
        std::fs::create_dir(&target).context("cannot make a directory")?;
        settle()?;
        let took = rsync(&["-aHAX", "--fsync"], &system, &target)?;
        peer.add(took.wall.as_secs_f64());
        std::fs::remove_dir_all(target).context("cannot remove a tree")?;
    }
    Ok(vec![Row {
        what: format!("installing {entries} entries ({name}): edit to synced"),
        ours: ours.shown(seconds),
        peer: format!("rsync -aHAX --fsync: {}", peer.shown(seconds)),
        ratio: Some(ours.median() / peer.median()),
        wanted: String::new(),
    }])
}

/// An empty ext4 of its own, which is unmounted on drop.
struct Disk {
    image: PathBuf,
    at: PathBuf,
}

impl Disk {
    fn new(image: PathBuf, at: PathBuf) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&at).context("cannot make a directory")?;
        let file = std::fs::File::create(&image).context("cannot make the image of a disk")?;
        file.set_len(DISK_BYTES).context("cannot make the image of a disk")?;
        // Nothing is left for the background, which would be measured too.
        let now = "lazy_itable_init=0,lazy_journal_init=0";
        run(Command::new("mkfs.ext4").args(["-q", "-E", now]).arg(&image), &[0])?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at), &[0])?;
        let disk = Self { image, at };
        std::fs::remove_dir(disk.at.join("lost+found")).context("cannot empty a disk")?;
        Ok(disk)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // An error leaves a mount behind; nothing more can be done.
        let _ended = run(Command::new("umount").arg("-l").arg(&self.at), &[0]);
        let _removed = std::fs::remove_file(&self.image);
    }
}

/// Measures the installation of the tree of 1.0 GB on ext4.
///
/// # Errors
///
/// If there is no namespace or disk to be had, or an update fails.
pub fn install_tree(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let bench = &*bench;
    let inside = || {
        unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace")?;
        let [first, second, third] = NETWORK;
        let network = format!("{first}.{second}.{third}.1/24");
        for words in [["link", "set", "up", "dev", "lo"], ["addr", "add", &network, "dev", "lo"]] {
            run(Command::new("ip").args(words), &[0])?;
        }
        beside_copy(bench)
    };
    // What a thread starts is in its namespace.
    std::thread::scope(|scope| scope.spawn(inside).join())
        .map_err(|_| anyhow::anyhow!("a thread panicked"))?
}

fn beside_copy(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let tree = bench.place.join("words");
    eprintln!("making the tree of {FILES} files that can be packed");
    fixture::make(&tree, WORDS)?;
    let (mut ours, mut server_cpu, mut sub_cpu) =
        (Samples::default(), Samples::default(), Samples::default());
    let (mut peer, mut peer_cpu) = (Samples::default(), Samples::default());
    for _ in 0..bench.runs() {
        let root = bench.fleet_directory("install").join("roots/sub-1");
        let disk = Disk::new(bench.place.join("disk"), root)?;
        let addresses = Addresses::in_network(NETWORK)?;
        let mut fleet = bench.fleet_at("install", addresses, unlimited())?;
        upload(&fleet, "tree", &tree, &[])?;
        settle()?;
        let sub = subd_of(&fleet)?;
        let server = fleet.imageserver.id().context("the imageserver does not run")?;
        let before = (cpu_of(server)?, cpu_of(sub)?);
        ours.add(update_to(&mut fleet, "tree")?.as_secs_f64());
        server_cpu.add(cpu_of(server)?.saturating_sub(before.0).as_secs_f64());
        sub_cpu.add(cpu_of(sub)?.saturating_sub(before.1).as_secs_f64());
        fleet.stop()?;
        drop(disk);
        bench.end("install", fleet)?;
        let disk = Disk::new(bench.place.join("disk"), bench.place.join("copy"))?;
        settle()?;
        let (copied, synced) = copy(&tree, &disk.at)?;
        peer.add((copied.wall + synced.wall).as_secs_f64());
        peer_cpu.add((copied.cpu + synced.cpu).as_secs_f64());
    }
    std::fs::remove_dir_all(tree).context("cannot remove a tree")?;
    let what = |what: &str| {
        format!("installing {FILES} files of {:.1} GB on ext4: {what}", BYTES as f64 / 1e9)
    };
    let beside = |peer: &Samples| format!("cp -a, sync: {}", peer.shown(seconds));
    Ok(vec![
        Row {
            what: what("edit to synced"),
            ours: ours.shown(seconds),
            peer: beside(&peer),
            ratio: Some(ours.median() / peer.median()),
            wanted: format!("{COPY_WANTED} times"),
        },
        Row {
            what: what("CPU of the machine"),
            ours: sub_cpu.shown(seconds),
            peer: beside(&peer_cpu),
            ratio: Some(sub_cpu.median() / peer_cpu.median()),
            wanted: String::new(),
        },
        Row {
            what: what("CPU of the imageserver"),
            ours: server_cpu.shown(seconds),
            peer: format!("Go imageserver: {}", seconds(GO_SERVER_CPU)),
            ratio: Some(server_cpu.median() / SERVER_CPU_WANTED),
            wanted: seconds(SERVER_CPU_WANTED),
        },
    ])
}

/// Copies `source` to `target`, durably.
fn copy(source: &Path, target: &Path) -> anyhow::Result<(Took, Took)> {
    let mut command = Command::new("cp");
    let copied = run(command.arg("-a").arg(source.join(".")).arg(target), &[0])?;
    let synced = run(Command::new("sync").arg("-f").arg(target), &[0])?;
    Ok((copied, synced))
}
