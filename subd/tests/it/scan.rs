//! The scanner on real trees: what it records, what it notices, and how it is steered.

#![allow(clippy::unwrap_used, reason = "what these functions unwrap fails the test")]

mod cache;
mod churn;
mod coverage;
mod extremes;
mod noticing;
mod owners;
mod stall;
mod steering;
mod tamper;
mod whole;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::subd::Limits;
use model::escape::ByteText;
use model::filter::Patterns;
use model::object::Algorithm;
use model::path::TreePath;
use model::scope::{Attributes, ScanSettings};
use model::tree::text::to_text;
use model::tree::{
    Device, File, Leaf, Metadata, Node, Special, Symlink, Time, Tree, TreeBuilder, Xattrs,
};
use subd::limits::Budgets;
use subd::limits::rates::{Ceilings, Speeds};
use subd::root::Root;
use subd::{
    scan::{Scanner, pace::Pace},
    state::Snapshot,
};
use tempfile::TempDir;

/// Passes run when they are asked for, and otherwise never again in the time of a test.
pub fn on_demand() -> Pace {
    let never = Duration::from_secs(86_400);
    Pace {
        metadata_interval_min: never,
        metadata_interval_max: never,
        content_pause: never,
        media_pause: never,
        ..Pace::default()
    }
}

/// Nothing is limited.
fn unlimited() -> Arc<Budgets> {
    Arc::new(Budgets::new(Ceilings::NONE, Limits::default(), Speeds::default()))
}

fn start(at: &Path, settings: ScanSettings, exclusions: &[&str], pace: Pace) -> Scanner {
    start_on(Arc::new(Root::open(at).unwrap()), settings, exclusions, pace)
}

/// Starts to scan without limits.
pub fn start_on(
    root: Arc<Root>,
    settings: ScanSettings,
    exclusions: &[&str],
    pace: Pace,
) -> Scanner {
    let exclusions = Patterns::new(exclusions).unwrap();
    Scanner::start(root, exclusions, settings, pace, unlimited()).unwrap()
}

struct Fixture {
    directory: TempDir,
    scanner: Scanner,
}

impl Fixture {
    /// Scans a directory that `fill` has filled.
    fn new(fill: impl FnOnce(&Path)) -> Self {
        Self::with(ScanSettings::default(), &[], on_demand(), fill)
    }

    fn with(
        settings: ScanSettings,
        exclusions: &[&str],
        pace: Pace,
        fill: impl FnOnce(&Path),
    ) -> Self {
        let directory = TempDir::new().unwrap();
        fill(directory.path());
        let scanner = start(directory.path(), settings, exclusions, pace);
        Self { directory, scanner }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    async fn rescan(&self) -> Arc<Snapshot> {
        self.scanner.rescan_now().await.unwrap()
    }

    /// Scans until nothing is read again, which takes until the last change is settled.
    async fn settle(&self) -> Arc<Snapshot> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let before = self.scanner.counters().hashed_bytes;
            let snapshot = self.rescan().await;
            if self.scanner.counters().hashed_bytes == before {
                return snapshot;
            }
            assert!(Instant::now() < deadline, "files are read again and again");
        }
    }

    async fn assert_exact(&self) {
        let snapshot = self.rescan().await;
        let algorithm = snapshot.settings.algorithm;
        assert_same(tree(&snapshot), &independent(self.directory.path(), algorithm));
    }
}

fn tree(snapshot: &Snapshot) -> &Tree {
    let report = snapshot.report.as_ref().unwrap();
    let tree = snapshot.tree.as_ref().unwrap();
    assert_eq!(report.root, tree.digest());
    assert_eq!(report.totals, tree.root().totals());
    assert_eq!(report.scope, snapshot.scope);
    tree.verify().unwrap();
    tree
}

#[track_caller]
fn assert_same(have: &Tree, want: &Tree) {
    assert_eq!(to_text(have), to_text(want));
    assert_eq!(have.digest(), want.digest());
}

fn paths(texts: &[&str]) -> Vec<TreePath> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// The tree below `at`, found without any of the scanner's code.
pub fn independent(at: &Path, algorithm: Algorithm) -> Tree {
    let mut builder = TreeBuilder::new(algorithm);
    let mut links = BTreeMap::new();
    builder.insert(TreePath::root(), Node::Directory(metadata(at))).unwrap();
    add(at, &TreePath::root(), algorithm, &mut builder, &mut links);
    builder.finish().unwrap()
}

fn add(
    at: &Path,
    place: &TreePath,
    algorithm: Algorithm,
    builder: &mut TreeBuilder,
    links: &mut BTreeMap<u64, TreePath>,
) {
    let mut files: Vec<PathBuf> =
        fs::read_dir(at).unwrap().map(|entry| entry.unwrap().path()).collect();
    // The first name of a file carries it.
    files.sort_unstable();
    for file in files {
        let path = place.join(file.file_name().unwrap().as_bytes()).unwrap();
        if path == "/.subd".parse().unwrap() {
            continue;
        }
        let status = fs::symlink_metadata(&file).unwrap();
        let kind = status.file_type();
        let mtime = Time {
            seconds: status.mtime(),
            nanoseconds: u32::try_from(status.mtime_nsec()).unwrap(),
        };
        let special = |device| {
            Node::Leaf(Leaf::Special(Special { metadata: metadata(&file), mtime, device }))
        };
        let node = if kind.is_dir() {
            add(&file, &path, algorithm, builder, links);
            Node::Directory(metadata(&file))
        } else if kind.is_symlink() {
            let target = ByteText(fs::read_link(&file).unwrap().into_os_string().into_vec());
            Node::Leaf(Leaf::Symlink(Symlink { metadata: metadata(&file), target }))
        } else if kind.is_fifo() {
            special(Device::Fifo)
        } else if kind.is_char_device() {
            let (major, minor) = device_numbers(status.rdev());
            special(Device::Character { major, minor })
        } else if kind.is_block_device() {
            let (major, minor) = device_numbers(status.rdev());
            special(Device::Block { major, minor })
        } else if let Some(first) = links.get(&status.ino()) {
            Node::Leaf(Leaf::HardLink(first.clone()))
        } else {
            links.insert(status.ino(), path.clone());
            let content = fs::read(&file).unwrap();
            Node::Leaf(Leaf::File(File {
                metadata: metadata(&file),
                mtime,
                size_bytes: content.len() as u64,
                object: algorithm.digest(&content).into(),
            }))
        };
        builder.insert(path, node).unwrap();
    }
}

fn device_numbers(device: u64) -> (u32, u32) {
    let number = |part: u64| u32::try_from(part).unwrap();
    (number(nix::sys::stat::major(device)), number(nix::sys::stat::minor(device)))
}

fn metadata(file: &Path) -> Metadata {
    let status = fs::symlink_metadata(file).unwrap();
    let xattrs: Xattrs = xattr::list(file)
        .unwrap()
        .filter(|name| Attributes::Basic.manage(name.as_bytes()))
        .map(|name| (name.clone().into_vec(), xattr::get(file, &name).unwrap().unwrap()))
        .collect();
    let mode = if status.is_symlink() { 0o777 } else { status.mode() & 0o7777 };
    Metadata { mode, uid: status.uid(), gid: status.gid(), xattrs }
}
