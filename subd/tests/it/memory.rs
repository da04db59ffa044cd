//! How much memory subd takes for large trees, and that it gives back what it needs no longer.
//!
//! `SUBD_ENTRIES=50000 cargo test -p subd --test it memory -- --nocapture` makes the trees as large
//! as the limits allow, and prints what is measured.

use std::fs;
use std::path::{Path, PathBuf};

use api::file_generator::{CONTENT_BYTES_MAX, ComputedContent};
use api::subd::{AddObjects, AddObjectsRequest, ScanNow, ScanNowRequest, UpdateOutcome};
use model::escape::ByteText;
use model::object::Algorithm;
use tempfile::TempDir;

use crate::fixture::{Edit, Source, Sub};
use crate::process::Process;

/// How many entries the trees of the normal run have.
const ENTRIES: usize = 20_000;

/// How many entries a directory and its files are.
const FILES: usize = 24;

/// About how many files change in an update of a part of the tree.
const CHANGED: usize = 4_000;

/// The most memory of its own that subd may have with 50,000 entries, in KiB: when it has nothing
/// to do, when it scans or updates a part of the tree, and when it updates all of it. The program
/// itself is not counted: it takes 8 MiB where it is installed, and more in tests.
const RESIDENT_KIB: u64 = 24 << 10;
const PEAK_KIB: u64 = 40 << 10;
const PEAK_OF_ALL_KIB: u64 = 88 << 10;

fn entries() -> usize {
    match std::env::var("SUBD_ENTRIES") {
        Ok(number) => number.parse().unwrap(),
        Err(_) => ENTRIES,
    }
}

/// A subd that runs on a root.
struct Lab {
    place: TempDir,
    process: Process,
    sub: Sub,
}

impl Lab {
    /// Starts on `place`, where `fill` makes something.
    fn start(place: TempDir, fill: impl FnOnce(&Path)) -> Self {
        fill(place.path());
        let flags = ["--insecure", "--device-speed", "1000000000"];
        let process = Process::start_with(place.path(), &flags);
        let sub = Sub::elsewhere(place.path(), process.client.clone());
        Self { place, process, sub }
    }

    /// Waits until a scan that began after the call has ended. It has no limits.
    async fn scan(&self) {
        // A pass that is under way may end the first wait.
        for _ in 0..2 {
            let passes = self.sub.poll().await.counters.metadata_passes;
            let scan = ScanNowRequest { content: false, media: false };
            self.sub.client.call::<ScanNow>(&scan).await.unwrap();
            testing::eventually_async("a scan has ended", async || {
                self.sub.poll().await.counters.metadata_passes > passes
            })
            .await;
        }
    }

    /// A line of the status of the process, in KiB.
    fn kib(&self, name: &str) -> u64 {
        let status = format!("/proc/{}/status", self.process.child.id());
        let status = fs::read_to_string(status).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// The memory of its own that is resident, in KiB.
    fn resident(&self) -> u64 {
        self.kib("RssAnon:")
    }

    /// Returns the most that was resident since the last call, without the program, in KiB.
    fn peak(&self) -> u64 {
        let peak = self.kib("VmHWM:") - self.kib("RssFile:");
        fs::write(format!("/proc/{}/clear_refs", self.process.child.id()), "5").unwrap();
        peak
    }

    /// Waits until no more than `limit` KiB are resident. The peak until then must be no more than
    /// `peak_max`.
    async fn settle(&self, what: &str, limit: u64, peak_max: u64) {
        let peak = self.peak();
        let last = testing::eventually_async(what, async || match self.resident() {
            resident if resident <= limit => Ok(resident),
            resident => Err(format!("{resident} KiB of {limit}")),
        });
        println!("{what}: {} KiB of its own, at most {peak}", last.await);
        assert!(peak <= peak_max, "{what}: {peak} KiB of {peak_max}");
    }

    async fn stop(self) {
        self.sub.stop().await;
        assert_eq!(self.process.stop(), Some(0));
    }
}

/// Where no other test waits for the disk.
fn in_memory() -> TempDir {
    TempDir::new_in("/dev/shm").unwrap()
}

/// The paths of a tree with so many entries: directories, each before its files.
fn paths(count: usize) -> impl Iterator<Item = (bool, PathBuf)> {
    (0..count).map(|number| {
        let directory = PathBuf::from(format!("directory-{}", number / FILES));
        match number % FILES {
            0 => (true, directory),
            _ => (false, directory.join(format!("libfile-{number}.so"))),
        }
    })
}

/// Makes these entries in `root`. The content of each file is its number.
fn fill(root: &Path, count: usize) {
    for (number, (is_directory, path)) in paths(count).enumerate() {
        match is_directory {
            true => fs::create_dir(root.join(path)).unwrap(),
            false => fs::write(root.join(path), number.to_string()).unwrap(),
        }
    }
}

/// Sets one of a few dozen labels on each entry, as SELinux does.
fn set_labels(root: &Path, count: usize) {
    for (number, (_, path)) in paths(count).enumerate() {
        let label = format!("system_u:object_r:kind_{}_t:s0", number % 40);
        xattr::set(root.join(path), "user.label", label.as_bytes()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_with_a_label_on_each_entry_takes_little() {
    let (count, source) = (entries(), Source::start().await);
    let lab = Lab::start(in_memory(), |root| {
        fill(root, count);
        set_labels(root, count);
    });
    let (_, first) = lab.sub.tree().await;
    assert_eq!(first.nodes().count(), count + 1);
    lab.settle("scanned", RESIDENT_KIB, PEAK_KIB).await;

    let mut edit = Edit::of(&first, &source);
    for (number, (is_directory, path)) in paths(count).enumerate().step_by(count / CHANGED) {
        if !is_directory {
            edit = edit.content(&format!("/{}", path.display()), &format!("other {number}"));
        }
    }
    let labelled = edit.done();
    let last = lab.sub.converge(1, &source, &labelled).await;
    assert_eq!(last.outcome, UpdateOutcome::Done);
    lab.settle("updated in part", RESIDENT_KIB, PEAK_KIB).await;

    for (_, path) in paths(count) {
        xattr::remove(lab.place.path().join(path), "user.label").unwrap();
    }
    lab.scan().await;
    lab.settle("without labels", RESIDENT_KIB, PEAK_KIB).await;
    let last = lab.sub.converge(2, &source, &labelled).await;
    assert_eq!(last.outcome, UpdateOutcome::Done);
    assert_eq!(lab.sub.tree().await.1.digest(), labelled.digest());
    lab.settle("updated as a whole", RESIDENT_KIB, PEAK_OF_ALL_KIB).await;
    lab.stop().await;
    source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_files_took_that_came_and_went_is_given_back() {
    let count = entries() * 2;
    let lab = Lab::start(in_memory(), |_| {});
    lab.scan().await;
    let before = lab.resident();
    let full = lab.place.path().join("full");
    fs::create_dir(&full).unwrap();
    fill(&full, count);
    lab.scan().await;
    let with_files = lab.resident();
    println!("{count} files come: {before} KiB of its own before, {with_files} with them");
    fs::remove_dir_all(&full).unwrap();
    lab.scan().await;
    // Threads that were not there before have stacks.
    let left_max = before + (with_files - before) / 3;
    lab.settle("files went", left_max, u64::MAX).await;
    lab.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_largest_request_to_add_objects_is_in_memory_twice_at_most() {
    let lab = Lab::start(in_memory(), |_| {});
    lab.scan().await;
    let (before, _) = (lab.resident(), lab.peak());
    let content = |seed: u8| {
        let bytes = vec![seed; CONTENT_BYTES_MAX];
        ComputedContent { id: Algorithm::Blake3.digest(&bytes), bytes: ByteText(bytes) }
    };
    let request = AddObjectsRequest { contents: vec![content(1), content(2), content(3)] };
    lab.sub.client.call::<AddObjects>(&request).await.unwrap();
    // As it came, and decoded; and what is in the buffers of the connection.
    let peak_max = before + 2 * (12 << 10) + (6 << 10);
    lab.settle("objects were added", before + (4 << 10), peak_max).await;
    lab.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hard_links_of_a_long_path_name_it_once() {
    let count = entries();
    let lab = Lab::start(in_memory(), |root| {
        let mut carrier = root.to_owned();
        for depth in 0..4 {
            carrier.push(format!("a{depth}{}", "x".repeat(240)));
            fs::create_dir(&carrier).unwrap();
        }
        carrier.push("carrier");
        fs::write(&carrier, "content").unwrap();
        fs::create_dir(root.join("links")).unwrap();
        for number in 0..count {
            fs::hard_link(&carrier, root.join(format!("links/{number:05}"))).unwrap();
        }
    });
    lab.scan().await;
    let entries = lab.sub.poll().await.scan.unwrap().totals.entries;
    assert_eq!(entries, count as u64 + 6);
    lab.settle("linked", RESIDENT_KIB, PEAK_KIB).await;
    lab.stop().await;
}
