//! Detection: thousands of random tampers over a real tree, none of which may be missed.
//!
//! The tree lies on a loop device, so that its medium can be changed under the file-system. Tampers
//! come in batches; after each, the set of paths in which two snapshots differ must be exactly the
//! set of paths that were tampered with: after two metadata passes those whose time of change has
//! moved, after a content pass those that a reader can see, after a media pass all.
//!
//! `SUBD_TAMPERS=10000 DEBIAN_TREES=DIR cargo test -p subd --test it tamper -- --nocapture` tries
//! ten thousand over a Debian root; the normal run tries some hundred over a tree that is made up.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use model::tree::Tree;
use nix::sys::stat::{Mode, UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use super::*;
use crate::disk::{Disk, run};

/// How many tampers the normal run makes.
const TAMPERS: usize = 300;

/// How many tampers are made between two checks at least, and how many checks there are at most.
const BATCH_MIN: usize = 100;
const BATCHES_MAX: usize = 20;

/// Numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        number ^ (number >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(limit).unwrap()).unwrap()
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(length).collect()
    }
}

/// The program that has the means that Rust has not.
struct Hands {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Hands {
    fn new() -> Self {
        let mut child = Command::new("python3")
            .args(["-c", include_str!("tamper/hands.py")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    fn ask(&mut self, verb: &str, path: &Path) -> u64 {
        writeln!(self.input, "{verb} {}", path.display()).unwrap();
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        answer.trim().parse().unwrap_or_else(|_| panic!("{verb} {path:?}: {answer}"))
    }

    fn end(mut self) {
        drop(self.input);
        assert!(self.child.wait().unwrap().success());
    }
}

/// A way to tamper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Content,
    Mapped,
    Mode,
    DirectoryMode,
    Owner,
    Attribute,
    Capability,
    Acl,
    LinkAdded,
    LinkBroken,
    IntoSymlink,
    IntoDirectory,
    IntoFifo,
    Added,
    Deleted,
    /// On the medium, of a file that is not in the page cache.
    Raw,
    /// On the medium, of a file that is in the page cache.
    RawUnderCache,
}

const KINDS: [Kind; 17] = [
    Kind::Content,
    Kind::Mapped,
    Kind::Mode,
    Kind::DirectoryMode,
    Kind::Owner,
    Kind::Attribute,
    Kind::Capability,
    Kind::Acl,
    Kind::LinkAdded,
    Kind::LinkBroken,
    Kind::IntoSymlink,
    Kind::IntoDirectory,
    Kind::IntoFifo,
    Kind::Added,
    Kind::Deleted,
    Kind::Raw,
    Kind::RawUnderCache,
];

/// What can be tampered with, each path once in a batch.
struct Targets {
    /// Regular files with one name and some content.
    files: Vec<TreePath>,
    /// Further names of files with two.
    links: Vec<TreePath>,
    directories: Vec<TreePath>,
}

impl Targets {
    fn of(tree: &Tree, spoilt: &BTreeSet<TreePath>) -> Self {
        let nodes: BTreeMap<TreePath, Node> = tree.nodes().collect();
        let mut names: BTreeMap<&TreePath, Vec<&TreePath>> = BTreeMap::new();
        for (path, node) in &nodes {
            if let Node::Leaf(Leaf::HardLink(carrier)) = node {
                names.entry(carrier).or_default().push(path);
            }
        }
        let mut targets = Self { files: Vec::new(), links: Vec::new(), directories: Vec::new() };
        for (path, node) in &nodes {
            // The program takes a path in a line of text.
            let plain = path.to_string().bytes().all(|byte| byte.is_ascii_graphic());
            match node {
                _ if !plain || spoilt.contains(path) => {}
                Node::Directory(_) => targets.directories.push(path.clone()),
                Node::Leaf(Leaf::File(file)) if file.size_bytes > 0 => {
                    if !names.contains_key(path) {
                        targets.files.push(path.clone());
                    }
                }
                Node::Leaf(Leaf::HardLink(carrier)) if names[carrier].len() == 1 => {
                    targets.links.push(path.clone());
                }
                Node::Leaf(_) => {}
            }
        }
        targets
    }
}

/// The paths that two trees do not have alike.
fn different(before: &Tree, after: &Tree) -> BTreeSet<TreePath> {
    let before: BTreeMap<TreePath, Node> = before.nodes().collect();
    let after: BTreeMap<TreePath, Node> = after.nodes().collect();
    let paths: BTreeSet<&TreePath> = before.keys().chain(after.keys()).collect();
    paths.into_iter().filter(|path| before.get(path) != after.get(path)).cloned().collect()
}

struct Range {
    disk: Disk,
    scanner: Scanner,
    hands: Hands,
    dice: Dice,
    spoilt: BTreeSet<TreePath>,
    made: usize,
    counts: BTreeMap<Kind, usize>,
}

/// What a batch changed, by the passes that have to see it.
#[derive(Default)]
struct Expected {
    metadata: BTreeSet<TreePath>,
    content: BTreeSet<TreePath>,
    media: BTreeSet<TreePath>,
}

impl Range {
    fn at(&self, path: &TreePath) -> PathBuf {
        self.disk.at(std::str::from_utf8(path.relative()).unwrap())
    }

    /// Chooses what to do, and what has to be done before the state that is compared with.
    fn choose(&mut self, tree: &Tree, count: usize) -> Vec<(Kind, TreePath)> {
        let mut targets = Targets::of(tree, &self.spoilt);
        let mut chosen = Vec::new();
        while chosen.len() < count {
            let kind = KINDS[self.dice.below(KINDS.len())];
            let pool = match kind {
                Kind::DirectoryMode | Kind::Added => &mut targets.directories,
                Kind::LinkBroken => &mut targets.links,
                _ => &mut targets.files,
            };
            if pool.is_empty() {
                continue;
            }
            let path = pool.swap_remove(self.dice.below(pool.len()));
            let at = self.at(&path);
            match kind {
                Kind::Mapped => {
                    // A store into a page that is dirty already moves no time any more.
                    self.hands.ask("open_map", &at);
                    self.hands.ask("poke", &at);
                }
                Kind::Raw | Kind::RawUnderCache if self.hands.ask("physical", &at) == 0 => continue,
                _ => {}
            }
            chosen.push((kind, path));
        }
        chosen
    }

    fn tamper(&mut self, kind: Kind, path: &TreePath, expected: &mut Expected) {
        let at = self.at(path);
        self.made += 1;
        *self.counts.entry(kind).or_default() += 1;
        let mut changed = path.clone();
        match kind {
            Kind::Mapped => {
                self.hands.ask("poke", &at);
                expected.content.insert(changed);
                return;
            }
            Kind::Raw | Kind::RawUnderCache => {
                let physical = self.hands.ask("physical", &at);
                self.hands.ask("cached", &at);
                self.disk.spoil(physical);
                self.spoilt.insert(changed.clone());
                if kind == Kind::Raw {
                    self.hands.ask("uncached", &at);
                    expected.content.insert(changed);
                } else {
                    expected.media.insert(changed);
                }
                return;
            }
            Kind::Added => {
                let name = format!("added-{}", self.made);
                changed = path.join(name.as_bytes()).unwrap();
                let length = 1 + self.dice.below(9_000);
                fs::write(at.join(name), self.dice.bytes(length)).unwrap();
            }
            Kind::LinkAdded => {
                // It sorts after the first name, which goes on to carry the file.
                let name = [path.name(), format!(".link{}", self.made).as_bytes()].concat();
                changed = path.parent().unwrap().join(&name).unwrap();
                fs::hard_link(&at, self.at(&changed)).unwrap();
            }
            _ => self.change_in_place(kind, &at),
        }
        expected.metadata.insert(changed);
    }

    fn change_in_place(&mut self, kind: Kind, at: &Path) {
        match kind {
            Kind::Content => change_and_restore_times(at, &mut self.dice),
            Kind::Mode | Kind::DirectoryMode => {
                let mode = fs::symlink_metadata(at).unwrap().mode() ^ 0o020;
                fs::set_permissions(at, Permissions::from_mode(mode)).unwrap();
            }
            Kind::Owner => {
                let owner = 1_000 + u32::try_from(self.made).unwrap();
                std::os::unix::fs::lchown(at, Some(owner), None).unwrap();
            }
            Kind::Attribute => {
                xattr::set(at, "user.tamper", &self.dice.bytes(24)).unwrap();
            }
            Kind::Capability => {
                let mut value = [0_u8; 20];
                value[3] = 2;
                value[4..8].copy_from_slice(&(1 + self.dice.next() as u32 % 0xffff).to_le_bytes());
                xattr::set(at, "security.capability", &value).unwrap();
            }
            Kind::Acl => {
                let entry = format!("u:{}:r", 2_000 + self.made);
                run("setfacl", &["-m", &entry, at.to_str().unwrap()]);
            }
            Kind::LinkBroken => {
                let copy = at.with_extension("copy");
                let [from, to] = [at, &copy].map(|path| path.to_str().unwrap());
                run("cp", &["-a", from, to]);
                fs::rename(&copy, at).unwrap();
            }
            Kind::Deleted => fs::remove_file(at).unwrap(),
            Kind::IntoSymlink => {
                fs::remove_file(at).unwrap();
                symlink("/etc/passwd", at).unwrap();
            }
            Kind::IntoDirectory => {
                fs::remove_file(at).unwrap();
                fs::create_dir(at).unwrap();
            }
            _ => {
                assert_eq!(kind, Kind::IntoFifo);
                fs::remove_file(at).unwrap();
                nix::unistd::mkfifo(at, Mode::S_IRUSR).unwrap();
            }
        }
    }

    async fn settle(&self) -> Arc<Snapshot> {
        loop {
            let before = self.scanner.counters().hashed_bytes;
            let snapshot = self.scanner.rescan_now().await.unwrap();
            if self.scanner.counters().hashed_bytes == before {
                return snapshot;
            }
        }
    }

    /// Lets the passes over all files go round once; gives what the tree is then.
    async fn pass(&self, content: bool, media: bool) -> Arc<Snapshot> {
        let before = self.scanner.counters();
        self.scanner.boost(content, media);
        let ended = || {
            let now = self.scanner.counters();
            now.content_passes >= before.content_passes + u64::from(content)
                && now.media_passes >= before.media_passes + u64::from(media)
        };
        testing::eventually_async("the passes have ended", async || ended()).await;
        self.scanner.rescan_now().await.unwrap()
    }

    /// Tampers `count` times, and checks that each pass sees what it has to.
    async fn batch(&mut self, count: usize) {
        let chosen = self.choose(&self.scanner.snapshot().tree.clone().unwrap(), count);
        self.disk.sync();
        let before = self.settle().await;
        let mut expected = Expected::default();
        for (kind, path) in &chosen {
            self.tamper(*kind, path, &mut expected);
        }
        let seen = |after: Arc<Snapshot>| different(tree(&before), tree(&after));
        let not_in = |part: &BTreeSet<TreePath>, whole: &BTreeSet<TreePath>| {
            let missing = part.difference(whole);
            missing.map(|path| (path.clone(), kind_of(&chosen, path))).collect::<Vec<_>>()
        };

        self.scanner.rescan_now().await.unwrap();
        let metadata = seen(self.scanner.rescan_now().await.unwrap());
        assert_eq!(not_in(&expected.metadata, &metadata), [], "missed by metadata passes");

        let readable = &expected.metadata | &expected.content;
        let content = seen(self.pass(true, false).await);
        assert_eq!(not_in(&readable, &content), [], "missed by the content pass");
        assert_eq!(not_in(&metadata, &content), [], "forgotten by the content pass");

        let all = &readable | &expected.media;
        let media = seen(self.pass(false, true).await);
        assert_eq!(not_in(&all, &media), [], "missed by the media pass");
        assert_eq!(not_in(&media, &all), [], "seen and never done");
        assert_eq!(not_in(&content, &all), [], "seen and never done");

        // What the cache holds is not believed again.
        let again = seen(self.pass(true, false).await);
        assert_eq!(again, all);
        for (_, path) in chosen.iter().filter(|(kind, _)| *kind == Kind::Mapped) {
            self.hands.ask("release", &self.at(path));
        }
    }
}

fn kind_of(chosen: &[(Kind, TreePath)], path: &TreePath) -> Option<Kind> {
    let at = |other: &TreePath| path == other || path.to_string().starts_with(&other.to_string());
    chosen.iter().find(|(_, other)| at(other)).map(|(kind, _)| *kind)
}

/// Changes some bytes, and sets size and time of modification back.
fn change_and_restore_times(at: &Path, dice: &mut Dice) {
    let status = fs::symlink_metadata(at).unwrap();
    let file = fs::File::options().read(true).write(true).open(at).unwrap();
    let offset = dice.next() % status.len();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0].wrapping_add(1)], offset).unwrap();
    let time = |seconds, nanoseconds| TimeSpec::new(seconds, nanoseconds);
    utimensat(
        nix::fcntl::AT_FDCWD,
        at,
        &time(status.atime(), status.atime_nsec()),
        &time(status.mtime(), status.mtime_nsec()),
        UtimensatFlags::NoFollowSymlink,
    )
    .unwrap();
}

/// Fills the disk with a Debian root, or with something like it.
fn fill(root: &Path, dice: &mut Dice) {
    if let Some(trees) = std::env::var_os("DEBIAN_TREES") {
        let minbase = PathBuf::from(trees).join("minbase");
        run("cp", &["-a", minbase.join(".").to_str().unwrap(), root.to_str().unwrap()]);
        return;
    }
    for directory in 0..40 {
        let directory = root.join(format!("usr/lib/{}/d{directory}", directory % 5));
        fs::create_dir_all(&directory).unwrap();
        for file in 0..20 {
            let length = match dice.below(20) {
                0 => 0,
                1 => 700_000,
                _ => dice.below(20_000),
            };
            fs::write(directory.join(format!("f{file}")), dice.bytes(length)).unwrap();
        }
        symlink("f1", directory.join("s")).unwrap();
        for file in 0..3 {
            fs::write(directory.join(format!("h{file}")), dice.bytes(100)).unwrap();
            let [first, second] = [format!("h{file}"), format!("i{file}")];
            fs::hard_link(directory.join(first), directory.join(second)).unwrap();
        }
    }
}

#[tokio::test]
async fn no_tamper_is_missed() {
    let wanted = match std::env::var("SUBD_TAMPERS") {
        Ok(number) => number.parse().unwrap(),
        Err(_) => TAMPERS,
    };
    let mut dice = Dice(20_260_101);
    let disk = Disk::new(1 << 30);
    fill(&disk.root(), &mut dice);
    let scanner = start(&disk.root(), ScanSettings::default(), &[], on_demand());
    scanner.rescan_now().await.unwrap();
    let mut range = Range {
        disk,
        scanner,
        hands: Hands::new(),
        dice,
        spoilt: BTreeSet::new(),
        made: 0,
        counts: BTreeMap::new(),
    };
    let batch = wanted.div_ceil(BATCHES_MAX).max(BATCH_MIN);
    let begun = Instant::now();
    while range.made < wanted {
        range.batch(batch.min(wanted - range.made)).await;
        eprintln!("{} of {wanted} tampers after {:.0?}", range.made, begun.elapsed());
    }
    let entries = range.scanner.snapshot().report.as_ref().unwrap().totals.entries;
    let took = begun.elapsed();
    eprintln!("{} tampers over {entries} entries, none missed, in {took:.1?}", range.made);
    eprintln!("{:?}", range.counts);
    range.scanner.stop();
    range.hands.end();
}
