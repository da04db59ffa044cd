//! The state of a machine as lines of text that can be compared.
//!
//! Uses the standard library and no code of subd. A line has everything that is managed: kind,
//! mode, owner, content, target, device, all extended attributes, the first name of the same inode,
//! the number of names, so that a name left over anywhere shows, and the time of modification
//! except of directories and symlinks.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use model::object::Algorithm;
use testing::crash_points::entries;

/// How many lines of a difference are shown.
const SHOWN_MAX: usize = 6;

/// The lines of a tree, and those of the services that run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    lines: Vec<String>,
    services: Vec<String>,
}

impl Listing {
    /// Lists `root` without `/.subd`, and the services that `running` has a directory for.
    pub fn of(root: &Path, running: &Path) -> Self {
        let mut lines = Vec::new();
        let mut links: BTreeMap<u64, String> = BTreeMap::new();
        let mut stack = vec![root.to_owned()];
        while let Some(path) = stack.pop() {
            lines.push(line(root, &path, &mut links));
            if path.symlink_metadata().unwrap().is_dir() {
                let own = root.join(".subd");
                let mut below = entries(&path);
                below.retain(|path| *path != own);
                stack.extend(below.into_iter().rev());
            }
        }
        let name = |path: PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
        Self { lines, services: entries(running).into_iter().map(name).collect() }
    }

    /// Returns the number of lines in which `self` differs from `wanted`, and the first of them.
    pub fn difference(&self, wanted: &Self) -> (usize, String) {
        let (mut count, mut text) = (0, String::new());
        for (mark, from, to) in [('+', self, wanted), ('-', wanted, self)] {
            for line in from.lines.iter().filter(|line| !to.lines.contains(line)) {
                count += 1;
                if count <= SHOWN_MAX {
                    let _infallible = writeln!(text, "{mark} {line}");
                }
            }
        }
        if count > SHOWN_MAX {
            let _infallible = writeln!(text, "and {} more", count - SHOWN_MAX);
        }
        if self.services != wanted.services {
            let (have, want) = (self.services.join(" "), wanted.services.join(" "));
            let _infallible = writeln!(text, "these services run: {have}; instead of: {want}");
        }
        (count, text)
    }

    /// Returns true if the trees are equal, whatever services run.
    pub fn same_tree(&self, other: &Self) -> bool {
        self.lines == other.lines
    }

    pub fn len(&self) -> usize {
        self.lines.len()
    }
}

fn line(root: &Path, path: &Path, links: &mut BTreeMap<u64, String>) -> String {
    let name =
        format!("/{}", path.strip_prefix(root).unwrap().as_os_str().as_bytes().escape_ascii());
    let metadata = path.symlink_metadata().unwrap();
    let kind = metadata.file_type();
    let (mode, uid, gid) = (metadata.mode(), metadata.uid(), metadata.gid());
    let mut line = format!("{name} {mode:o} {uid}:{gid}");
    let mut add = |text: String| {
        line.push(' ');
        line.push_str(&text);
    };
    if !kind.is_dir() {
        add(format!("{} names", metadata.nlink()));
        let first = links.entry(metadata.ino()).or_insert(name);
        add(format!("of {first}"));
    }
    if !kind.is_dir() && !kind.is_symlink() {
        add(format!("{}.{:09}", metadata.mtime(), metadata.mtime_nsec()));
    }
    if kind.is_file() {
        let content = std::fs::read(path).unwrap();
        add(format!("{} {}", content.len(), Algorithm::Blake3.digest(&content)));
    }
    if kind.is_symlink() {
        let target = std::fs::read_link(path).unwrap();
        add(format!("-> {}", target.as_os_str().as_bytes().escape_ascii()));
    }
    if kind.is_block_device() || kind.is_char_device() {
        add(format!("device {:x}", metadata.rdev()));
    }
    let mut keys: Vec<_> = xattr::list(path).unwrap().collect();
    keys.sort_unstable();
    for key in keys {
        let value = xattr::get(path, &key).unwrap().unwrap();
        add(format!("{}={}", key.to_string_lossy(), value.escape_ascii()));
    }
    line
}
