//! Measures adding and fetching of images, beside ostree, restic and casync.
//!
//! All have the same tree on the same file-system. Each measurement ends when the data is on the
//! medium: `sync -f` writes out what a program left to the kernel. ostree commits to a bare
//! repository, which stores plain files, as an image server does, and pulls from an archive
//! repository in local files. It uses no server, which is to its advantage.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use model::tree::Totals;
use serde::Deserialize;

use super::measure::{Row, Samples, cpu_of, mebibytes, run, seconds};
use super::{Bench, settle};
use crate::fleet::Fleet;
use crate::source_trees;

/// The goal: a third of ostree's time.
const OSTREE_WANTED: f64 = 1.0 / 3.0;

/// The goals for an image that nearly equals a stored one: seconds, and the share of its bytes that
/// are sent.
const AGAIN_WANTED: f64 = 0.3;
const SENT_WANTED: f64 = 0.01;

/// The processor time of the Go imageserver for a first image on ext4, in seconds, the number of
/// its objects, and the goal as a share of it.
const GO_CPU: f64 = 7.5;
const GO_OBJECTS: f64 = 16_157.0;
const GO_WANTED: f64 = 0.5;

/// The JSON output of `imagetool add`.
#[derive(Deserialize)]
struct Added {
    totals: Totals,
    objects: u64,
    #[serde(with = "model::json::LargeNumber")]
    sent_bytes: u64,
}

/// A peer, and the shell commands that do what an image server does. `$S` is the tree, `$N` one
/// that nearly equals it, `$R` the directory of the repository, `$T` the target of the tree.
struct Peer {
    name: &'static str,
    /// Not measured.
    begin: &'static str,
    add: &'static str,
    again: &'static str,
    /// Not measured.
    offer: &'static str,
    fetch: &'static str,
}

const PEERS: [Peer; 3] = [
    Peer {
        name: "ostree",
        begin: "ostree --repo=$R/bare init --mode=bare",
        add: "ostree --repo=$R/bare commit -b one --tree=dir=$S",
        again: "ostree --repo=$R/bare commit -b two --tree=dir=$N",
        offer: "ostree --repo=$R/archive init --mode=archive && \
                ostree --repo=$R/archive pull-local $R/bare one && \
                ostree --repo=$R/client init --mode=bare && \
                ostree --repo=$R/client remote add --no-gpg-verify origin file://$R/archive",
        fetch: "ostree --repo=$R/client pull origin one && \
                ostree --repo=$R/client checkout -H one $T",
    },
    Peer {
        name: "restic",
        begin: "restic -q -r $R/restic init",
        add: "restic -q -r $R/restic --no-cache backup $S --tag one",
        again: "restic -q -r $R/restic --no-cache backup $N --tag two",
        offer: "true",
        fetch: "restic -q -r $R/restic --no-cache restore latest --tag one --target $T",
    },
    Peer {
        name: "casync",
        begin: "true",
        add: "casync make --store=$R/store.castr $R/one.caidx $S",
        again: "casync make --store=$R/store.castr $R/two.caidx $N",
        offer: "mkdir $T",
        fetch: "casync extract --store=$R/store.castr $R/one.caidx $T",
    },
];

/// The times of one program, in seconds.
#[derive(Default)]
struct Times {
    add: Samples,
    again: Samples,
    fetch: Samples,
}

/// One of [`Times`].
type Part = fn(&Times) -> &Samples;

/// The directories of the measurement.
struct Place {
    tree: PathBuf,
    next: PathBuf,
    /// Everything that was stored and fetched.
    all: PathBuf,
    /// The number of starts from nothing.
    begun: usize,
    stored: PathBuf,
    target: PathBuf,
}

impl Place {
    /// Runs `script`, and writes out what it has left to the kernel. Returns how long both took.
    fn shell(&self, script: &str) -> anyhow::Result<Duration> {
        let script = format!("{script} && sync -f $R");
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &script])
            .env("S", &self.tree)
            .env("N", &self.next)
            .env("R", &self.stored)
            .env("T", &self.target)
            .env("RESTIC_PASSWORD", "no secret");
        Ok(run(&mut shell, &[0]).with_context(|| script.clone())?.wall)
    }

    /// Starts with nothing stored. Earlier files stay until the end: for some minutes after the
    /// removal of many files, ext4 is several times slower to make new ones.
    fn begin(&mut self) -> anyhow::Result<()> {
        self.begun += 1;
        self.stored = self.all.join(format!("{}-stored", self.begun));
        self.target = self.all.join(format!("{}-fetched", self.begun));
        fs::create_dir_all(&self.stored).context("cannot make a directory")?;
        settle()
    }

    fn peer(&mut self, peer: &Peer, times: &mut Times) -> anyhow::Result<()> {
        eprintln!("{}: adding and fetching", peer.name);
        self.begin()?;
        self.shell(peer.begin)?;
        times.add.add(self.shell(peer.add)?.as_secs_f64());
        times.again.add(self.shell(peer.again)?.as_secs_f64());
        self.shell(peer.offer)?;
        times.fetch.add(self.shell(peer.fetch)?.as_secs_f64());
        Ok(())
    }
}

/// Results of our own runs, besides their times.
#[derive(Default)]
struct Ours {
    times: Times,
    add_cpu: Samples,
    again_cpu: Samples,
    fetch_cpu: Samples,
    totals: Totals,
    objects: u64,
    sent_again: u64,
}

/// Measures adding a system, adding it again with 65 changed files, and fetching it.
///
/// # Errors
///
/// If a peer is not installed, or something fails.
pub fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let (system, name) = bench.system()?;
    let at = |name: &str| bench.place.join(name);
    let mut place = Place {
        tree: at("store-tree"),
        next: at("store-next"),
        all: at("store"),
        begun: 0,
        stored: PathBuf::new(),
        target: PathBuf::new(),
    };
    source_trees::copy(&system, &place.tree)?;
    leave_out_special_files(&place.tree)?;
    source_trees::copy(&place.tree, &place.next)?;
    let changed = source_trees::next_version(&place.next, &|_| false)?;
    let mut ours = Ours::default();
    let mut peers: Vec<Times> = PEERS.iter().map(|_| Times::default()).collect();
    for _ in 0..bench.runs() {
        ours.run(bench, &mut place)?;
        for (peer, times) in PEERS.iter().zip(&mut peers) {
            place.peer(peer, times)?;
        }
    }
    fs::remove_dir_all(&place.all).context("cannot remove what was stored")?;
    Ok(ours.rows(&peers, &name, changed))
}

/// Removes devices, pipes and sockets, which ostree does not support.
fn leave_out_special_files(tree: &Path) -> anyhow::Result<()> {
    let mut find = Command::new("find");
    find.arg(tree).args(["!", "-type", "f", "!", "-type", "d", "!", "-type", "l", "-delete"]);
    run(&mut find, &[0]).map(drop)
}

impl Ours {
    fn run(&mut self, bench: &Bench<'_>, place: &mut Place) -> anyhow::Result<()> {
        place.begin()?;
        let directory = place.stored.join("fleet");
        fs::create_dir(&directory).context("cannot make a directory")?;
        let mut fleet = bench.servers(directory, bench.arguments.insecure)?;
        settle()?;
        let (first, took, cpu) = add(&fleet, "one", &place.tree)?;
        self.times.add.add(took);
        self.add_cpu.add(cpu);
        let (again, took, cpu) = add(&fleet, "two", &place.next)?;
        self.times.again.add(took);
        self.again_cpu.add(cpu);
        (self.totals, self.objects, self.sent_again) =
            (first.totals, first.objects, again.sent_bytes);
        settle()?;
        let (before, start) = (server_cpu(&fleet)?, Instant::now());
        imagetool(&fleet, &["get", "one", &place.target.display().to_string()])?;
        place.shell("true")?;
        self.times.fetch.add(start.elapsed().as_secs_f64());
        self.fetch_cpu.add((server_cpu(&fleet)? - before).as_secs_f64());
        fleet.stop()
    }

    fn rows(&self, peers: &[Times], name: &str, changed: usize) -> Vec<Row> {
        let (objects, bytes) = (self.objects as f64, self.totals.bytes as f64);
        let what = format!("{} objects, {} ({name})", self.objects, mebibytes(bytes));
        let mut rows = Vec::new();
        let parts: [(String, Part); 3] = [
            (format!("adding {what}: time"), |times| &times.add),
            (format!("adding it again with {changed} files changed: time"), |times| &times.again),
            (format!("fetching {what}: time"), |times| &times.fetch),
        ];
        for (index, (what, times_of)) in parts.into_iter().enumerate() {
            let mine = times_of(&self.times);
            for (peer, times) in PEERS.iter().zip(peers) {
                let theirs = times_of(times);
                let is_wanted = peer.name == "ostree" && index != 1;
                rows.push(Row {
                    what: what.clone(),
                    ours: mine.shown(seconds),
                    peer: format!("{}: {}", peer.name, theirs.shown(seconds)),
                    ratio: Some(mine.median() / theirs.median()),
                    wanted: if is_wanted { format!("{OSTREE_WANTED:.2}") } else { String::new() },
                });
            }
        }
        let mut alone = |what: &str, ours: String, peer: String, ratio, wanted: String| {
            rows.push(Row { what: what.to_owned(), ours, peer, ratio, wanted });
        };
        let again = self.times.again.median();
        alone(
            "adding it again: time",
            self.times.again.shown(seconds),
            String::new(),
            Some(again / AGAIN_WANTED),
            seconds(AGAIN_WANTED),
        );
        let sent = self.sent_again as f64;
        alone(
            "adding it again: sent",
            format!("{} ({:.2} % of the image)", mebibytes(sent), 1e2 * sent / bytes),
            String::new(),
            Some(sent / bytes / SENT_WANTED),
            format!("{:.0} %", SENT_WANTED * 1e2),
        );
        let by_object = self.add_cpu.median() / objects;
        alone(
            "adding: CPU of the imageserver, by objects",
            format!("{:.3} ms ({})", 1e3 * by_object, self.add_cpu.shown(seconds)),
            format!("Go imageserver: {:.3} ms", 1e3 * GO_CPU / GO_OBJECTS),
            Some(by_object / (GO_CPU / GO_OBJECTS)),
            format!("{GO_WANTED}"),
        );
        let nothing = String::new;
        let again = self.again_cpu.shown(seconds);
        alone("adding it again: CPU of the imageserver", again, nothing(), None, nothing());
        let fetch = self.fetch_cpu.shown(seconds);
        alone("fetching: CPU of the imageserver", fetch, nothing(), None, nothing());
        rows
    }
}

fn server_cpu(fleet: &Fleet) -> anyhow::Result<Duration> {
    cpu_of(fleet.imageserver.id().context("the imageserver does not run")?)
}

/// Adds `tree`. Returns the output, the duration, and the server's processor time.
fn add(fleet: &Fleet, image: &str, tree: &Path) -> anyhow::Result<(Added, f64, f64)> {
    eprintln!("imagetool: adding {image}");
    let (before, start) = (server_cpu(fleet)?, Instant::now());
    let tree = tree.display().to_string();
    let said = imagetool(fleet, &["--format", "json", "add", image, &tree, "-", "-"])?;
    let took = start.elapsed().as_secs_f64();
    let cpu = (server_cpu(fleet)? - before).as_secs_f64();
    Ok((serde_json::from_slice(&said).context("what imagetool says")?, took, cpu))
}

fn imagetool(fleet: &Fleet, words: &[&str]) -> anyhow::Result<Vec<u8>> {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let output = fleet.imagetool(&words)?;
    ensure!(output.status.success(), "imagetool: {}", String::from_utf8_lossy(&output.stderr));
    Ok(output.stdout)
}
