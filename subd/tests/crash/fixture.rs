//! The machine: a tree before the update, the tree that is wanted, and what lies around them.
//!
//! The trees are in `old.tree` and `new.tree`, one entry a line. [`Template::make`] puts into a
//! directory all that a run needs; each run works on a copy.
//!
//! | in the directory | what |
//! |---|---|
//! | `root` | the old tree, with the objects of the new one in the cache, but what is computed |
//! | `have.txt`, `want.txt` | the old and the new tree without what is kept, as subd knows trees |
//! | `running` | a directory for each service that runs |
//! | `driver` | the service command: makes and removes those |

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use model::escape::{ByteText, unescape};
use model::filter::Filter;
use model::object::Algorithm;
use model::path::TreePath;
use model::tree::text::to_text;
use model::tree::{Device, File, Leaf, Metadata, Node, Special, Symlink, Time, Tree, TreeBuilder};
use model::trigger::Triggers;
use nix::sys::stat::{Mode, SFlag, UtimensatFlags, makedev, mknod, utimensat};
use nix::sys::time::TimeSpec;
use subd::state::persisted_state::PersistedState;

use crate::listing::Listing;

/// The part of a second in all times of modification.
const NANOSECONDS: u32 = 123_456_789;

const OLD: &str = include_str!("old.tree");
const NEW: &str = include_str!("new.tree");

/// What is below these stays whatever the image says.
const KEPT: [&str; 3] = ["/var/log/.*", "/home", "/srv/.*\\.local$"];

/// The services that run before the update. The old image does not name `fresh`, which subd stops
/// and starts all the same.
pub const RUN_BEFORE: [&str; 6] = ["conf", "fresh", "gone", "idle", "shell", "web"];

/// Those that run after it.
pub const RUN_AFTER: [&str; 5] = ["conf", "fresh", "idle", "shell", "web"];

const OLD_TRIGGERS: &str = r#"[
    {"MatchLines": ["/bin/.*"], "Service": "shell"},
    {"MatchLines": ["/etc/.*"], "Service": "conf", "DoReload": true},
    {"MatchLines": ["/usr/.*"], "Service": "web"},
    {"MatchLines": ["/srv/.*"], "Service": "gone"},
    {"MatchLines": ["/nothing/.*"], "Service": "idle"}
]"#;

const NEW_TRIGGERS: &str = r#"[
    {"MatchLines": ["/bin/.*"], "Service": "shell"},
    {"MatchLines": ["/etc/.*"], "Service": "conf", "DoReload": true},
    {"MatchLines": ["/usr/.*"], "Service": "web"},
    {"MatchLines": ["/opt/.*"], "Service": "fresh"},
    {"MatchLines": ["/nothing/.*"], "Service": "idle"}
]"#;

/// A file of the new tree whose content is computed, and that content.
pub const COMPUTED: (&str, &str) = ("/etc/shadow", "shadow-2");

/// `mkdir` and `rmdir` are calls that subd itself never makes, so that counting its calls is not
/// disturbed.
const DRIVER: &str = "#!/bin/sh
case $3 in
    start) [ -d \"$1/$2\" ] || mkdir \"$1/$2\" ;;
    stop) [ ! -d \"$1/$2\" ] || rmdir \"$1/$2\" ;;
esac
";

/// `cap_net_raw+ep`.
const CAPABILITY: &[u8] = &[1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// `cap_net_admin+ep`.
const CAPABILITY2: &[u8] = &[1, 0, 0, 2, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// `user::rw-,user:1:r--,group::r--,mask::r--,other::---`.
const ACL: &[u8] = &[
    2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 1, 0, 0, 0, 4, 0, 4, 0, 255, 255, 255,
    255, 16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255,
];

/// The directories that hold what is kept.
pub fn kept_directories() -> BTreeSet<TreePath> {
    ["/", "/srv", "/var/log"].map(|path| path.parse().unwrap()).into()
}

/// The triggers of the new image.
pub fn new_triggers() -> Triggers {
    Triggers::from_json(NEW_TRIGGERS).unwrap()
}

/// A machine that every run gets a copy of, and what it may look like afterwards.
pub struct Template {
    /// Where it is.
    pub directory: PathBuf,
    /// The tree before the update, and the services that run.
    pub old: Listing,
    /// The tree after it, and the services that run.
    pub new: Listing,
}

impl Template {
    /// Makes the template in `directory`, which must be empty.
    pub fn make(directory: &Path) -> Self {
        let (root, wanted) = (directory.join("root"), directory.join("wanted"));
        let (running, after) = (directory.join("running"), directory.join("after"));
        for (services, place) in [(&RUN_BEFORE[..], &running), (&RUN_AFTER[..], &after)] {
            std::fs::create_dir(place).unwrap();
            services.iter().for_each(|name| std::fs::create_dir(place.join(name)).unwrap());
        }
        plant(OLD, &root);
        plant(NEW, &wanted);
        for (name, text) in [("have.txt", OLD), ("want.txt", NEW)] {
            std::fs::write(directory.join(name), to_text(&tree(text))).unwrap();
        }
        let (old, new) = (Listing::of(&root, &running), Listing::of(&wanted, &after));
        let cache = root.join(".subd/objects");
        std::fs::create_dir_all(&cache).unwrap();
        // What is computed is sent with the update.
        let computed = wanted.join(COMPUTED.0.trim_start_matches('/'));
        for path in files(&wanted).into_iter().filter(|path| *path != computed) {
            let content = std::fs::read(&path).unwrap();
            let object = cache.join(Algorithm::Blake3.digest(&content).to_string());
            std::fs::write(&object, content).unwrap();
            std::fs::set_permissions(&object, PermissionsExt::from_mode(0o600)).unwrap();
        }
        let state = root.join(".subd/state");
        std::fs::create_dir(&state).unwrap();
        let triggers = Triggers::from_json(OLD_TRIGGERS).unwrap();
        let persisted = PersistedState { triggers, ..PersistedState::default() };
        std::fs::write(state.join("state.json"), serde_json::to_vec(&persisted).unwrap()).unwrap();
        for own in [root.join(".subd"), cache, state] {
            std::fs::set_permissions(own, PermissionsExt::from_mode(0o700)).unwrap();
        }
        std::fs::remove_dir_all(wanted).unwrap();
        std::fs::remove_dir_all(after).unwrap();
        let driver = directory.join("driver");
        std::fs::write(&driver, DRIVER).unwrap();
        std::fs::set_permissions(&driver, PermissionsExt::from_mode(0o755)).unwrap();
        Self { directory: directory.to_owned(), old, new }
    }
}

/// The regular files below `root` that an update brings: everything but what is kept.
fn files(root: &Path) -> Vec<PathBuf> {
    let kept = |path: &Path| {
        ["var/log", "home", "srv/data.local"].iter().any(|kept| path.starts_with(root.join(kept)))
    };
    let mut files = Vec::new();
    let mut stack = vec![root.to_owned()];
    while let Some(directory) = stack.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            match () {
                () if kept(&path) => {}
                () if kind.is_dir() => stack.push(path),
                () if kind.is_file() => files.push(path),
                () => {}
            }
        }
    }
    files
}

/// One line of a tree.
struct Line<'text> {
    kind: &'text str,
    mode: u32,
    owner: (u32, u32),
    seconds: i64,
    path: PathBuf,
    tree_path: TreePath,
    /// Content, target or device.
    rest: String,
    attributes: Vec<(&'text str, &'text [u8])>,
}

impl<'text> Line<'text> {
    fn parse(line: &'text str, root: &Path) -> Self {
        let mut words = line.split(' ').peekable();
        let mut word = || words.next().unwrap();
        let kind = word();
        let (mut mode, mut owner, mut seconds) = (0o777, (0, 0), 0);
        if !matches!(kind, "l" | "h") {
            mode = u32::from_str_radix(word(), 8).unwrap();
            let (uid, gid) = word().split_once(':').unwrap();
            owner = (uid.parse().unwrap(), gid.parse().unwrap());
            if kind != "d" {
                seconds = 1_600_000_000 + word().parse::<i64>().unwrap();
            }
        }
        let tree_path = tree_path(word());
        let path = at(root, &tree_path);
        let is_attribute = |word: &&str| word.contains('=');
        let rest = words.next_if(|word| !is_attribute(word)).unwrap_or_default().to_owned();
        let attributes = words.map(|word| {
            let (key, value) = word.split_once('=').unwrap();
            let value = match value {
                "CAPABILITY" => CAPABILITY,
                "CAPABILITY2" => CAPABILITY2,
                "ACL" => ACL,
                plain => plain.as_bytes(),
            };
            (key, value)
        });
        let attributes = attributes.collect();
        Self { kind, mode, owner, seconds, path, tree_path, rest, attributes }
    }

    /// Makes the entry; it gets its appearance later.
    fn make(&self, root: &Path) {
        let path = &self.path;
        let special = |kind, device| mknod(path, kind, Mode::from_bits_truncate(0o600), device);
        let device = || {
            let (major, minor) = self.numbers();
            makedev(major.into(), minor.into())
        };
        match self.kind {
            "d" => std::fs::create_dir(path).unwrap(),
            "f" => std::fs::write(path, self.content()).unwrap(),
            "l" => symlink(&self.rest, path).unwrap(),
            "h" => std::fs::hard_link(at(root, &tree_path(&self.rest)), path).unwrap(),
            "p" => special(SFlag::S_IFIFO, 0).unwrap(),
            "c" => special(SFlag::S_IFCHR, device()).unwrap(),
            "b" => special(SFlag::S_IFBLK, device()).unwrap(),
            other => panic!("kind {other}"),
        }
    }

    fn content(&self) -> String {
        let (word, count) = self.rest.split_once('*').unwrap_or((&self.rest, "1"));
        word.repeat(count.parse().unwrap())
    }

    fn numbers(&self) -> (u32, u32) {
        let (major, minor) = self.rest.split_once(',').unwrap();
        (major.parse().unwrap(), minor.parse().unwrap())
    }

    /// The entry, as subd knows it.
    fn node(&self) -> Node {
        let attributes = self.attributes.iter();
        let xattrs = attributes.map(|(key, value)| (key.as_bytes().to_vec(), value.to_vec()));
        let (uid, gid) = self.owner;
        let metadata = Metadata { mode: self.mode, uid, gid, xattrs: xattrs.collect() };
        let mtime = Time { seconds: self.seconds, nanoseconds: NANOSECONDS };
        let (major, minor) = if self.rest.contains(',') { self.numbers() } else { (0, 0) };
        let special = |metadata, device| Leaf::Special(Special { metadata, mtime, device });
        Node::Leaf(match self.kind {
            "d" => return Node::Directory(metadata),
            "f" => {
                let content = self.content();
                let object = Algorithm::Blake3.digest(content.as_bytes()).into();
                Leaf::File(File { metadata, mtime, size_bytes: content.len() as u64, object })
            }
            "l" => {
                let target = ByteText(self.rest.as_bytes().to_vec());
                Leaf::Symlink(Symlink { metadata, target })
            }
            "h" => Leaf::HardLink(tree_path(&self.rest)),
            "p" => special(metadata, Device::Fifo),
            "c" => special(metadata, Device::Character { major, minor }),
            "b" => special(metadata, Device::Block { major, minor }),
            other => panic!("kind {other}"),
        })
    }

    fn dress(&self) {
        if matches!(self.kind, "l" | "h") {
            return;
        }
        let path = &self.path;
        lchown(path, Some(self.owner.0), Some(self.owner.1)).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(self.mode)).unwrap();
        for (key, value) in &self.attributes {
            xattr::set(path, key, value).unwrap();
        }
        let time = TimeSpec::new(self.seconds, NANOSECONDS.into());
        utimensat(nix::fcntl::AT_FDCWD, path, &time, &time, UtimensatFlags::NoFollowSymlink)
            .unwrap();
    }
}

fn tree_path(word: &str) -> TreePath {
    TreePath::new(unescape(word).unwrap()).unwrap()
}

fn at(root: &Path, path: &TreePath) -> PathBuf {
    root.join(OsStr::from_bytes(&path.as_bytes()[1..])).components().as_path().to_owned()
}

fn lines<'text>(text: &'text str, root: &Path) -> Vec<Line<'text>> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| Line::parse(line, root)).collect()
}

/// Makes the tree that `text` says at `root`.
fn plant(text: &str, root: &Path) {
    let lines = lines(text, root);
    let (links, others): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.kind == "h");
    others.iter().chain(&links).for_each(|line| line.make(root));
    // What a directory holds comes after it, and must not inherit from it.
    others.iter().rev().for_each(|line| line.dress());
}

/// The tree that `text` says, without what is kept.
fn tree(text: &str) -> Tree {
    let filter = Filter::new(KEPT).unwrap();
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    for line in lines(text, Path::new("/")) {
        if !filter.keeps(&line.tree_path) {
            builder.insert(line.tree_path.clone(), line.node()).unwrap();
        }
    }
    builder.finish().unwrap()
}

/// `path` as a word of a command that is split at white space.
pub fn as_word(path: &Path) -> String {
    let text: OsString = path.into();
    String::from_utf8(text.into_vec()).unwrap()
}
