//! Compares two trees on disk, attribute by attribute.
//!
//! It shares no code with the scanner, the planner or imagetool, so that it detects their errors.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Compares `left` with `right` and returns a line for each difference, sorted by path.
///
/// `skip` returns true for paths, relative to the roots, that are left out with everything below.
/// Times of directories and symlinks are not compared. Managed extended attributes are.
///
/// # Errors
///
/// If something cannot be read.
pub fn compare(
    left: &Path,
    right: &Path,
    skip: &dyn Fn(&Path) -> bool,
) -> anyhow::Result<Vec<String>> {
    let mut differences = Vec::new();
    let (left_tree, right_tree) = (list(left, skip)?, list(right, skip)?);
    let paths: BTreeSet<&PathBuf> = left_tree.keys().chain(right_tree.keys()).collect();
    for path in paths {
        let shown = path.display();
        match (left_tree.get(path), right_tree.get(path)) {
            (Some(_), None) => differences.push(format!("{shown}: only in {}", left.display())),
            (None, Some(_)) => differences.push(format!("{shown}: only in {}", right.display())),
            (Some(one), Some(two)) => {
                for what in differences_of(left, one, right, two, path)? {
                    differences.push(format!("{shown}: {what}"));
                }
            }
            (None, None) => {}
        }
    }
    for path in groups(&left_tree).symmetric_difference(&groups(&right_tree)) {
        let names: Vec<_> = path.iter().map(|name| name.display().to_string()).collect();
        differences.push(format!("hard links differ: {}", names.join(" ")));
    }
    Ok(differences)
}

/// The sets of names that share an inode, for inodes with more than one.
fn groups(listing: &Listing) -> BTreeSet<Vec<PathBuf>> {
    let mut by_inode: BTreeMap<(u64, u64), Vec<PathBuf>> = BTreeMap::new();
    for (path, metadata) in listing.iter().filter(|(_, metadata)| metadata.is_file()) {
        by_inode.entry((metadata.dev(), metadata.ino())).or_default().push(path.clone());
    }
    by_inode.into_values().filter(|names| names.len() > 1).collect()
}

fn differences_of(
    left: &Path,
    one: &Metadata,
    right: &Path,
    two: &Metadata,
    path: &Path,
) -> anyhow::Result<Vec<String>> {
    if kind(one) != kind(two) {
        return Ok(vec![format!("kind {} against {}", kind(one), kind(two))]);
    }
    let mut found = Vec::new();
    let mut note = |what: &str, one: String, two: String| {
        if one != two {
            found.push(format!("{what} {one} against {two}"));
        }
    };
    note("owner", format!("{}:{}", one.uid(), one.gid()), format!("{}:{}", two.uid(), two.gid()));
    note("mode", format!("{:o}", one.mode() & 0o7777), format!("{:o}", two.mode() & 0o7777));
    let (left, right) = (at(left, path), at(right, path));
    if kind(one) == "symlink" {
        let target = |path: &Path| -> anyhow::Result<String> {
            let target = std::fs::read_link(path).context("cannot read a symlink")?;
            Ok(target.display().to_string())
        };
        note("target", target(&left)?, target(&right)?);
    } else if kind(one) != "directory" {
        let time =
            |metadata: &Metadata| format!("{}.{:09}", metadata.mtime(), metadata.mtime_nsec());
        note("mtime", time(one), time(two));
        note("device", one.rdev().to_string(), two.rdev().to_string());
    }
    note("xattrs", attributes(&left)?, attributes(&right)?);
    if one.is_file() {
        note("size", one.len().to_string(), two.len().to_string());
        if one.len() == two.len() && !same_content(&left, &right)? {
            found.push("content".into());
        }
    }
    Ok(found)
}

/// `path` below `root`. The root itself may be a file, and then must not get a final slash.
fn at(root: &Path, path: &Path) -> PathBuf {
    if path == Path::new("") { root.to_owned() } else { root.join(path) }
}

fn kind(metadata: &Metadata) -> &'static str {
    let kind = metadata.file_type();
    match () {
        () if kind.is_dir() => "directory",
        () if kind.is_file() => "file",
        () if kind.is_symlink() => "symlink",
        () if kind.is_block_device() => "block device",
        () if kind.is_char_device() => "character device",
        () if kind.is_fifo() => "fifo",
        () => "socket",
    }
}

fn attributes(path: &Path) -> anyhow::Result<String> {
    let mut list = BTreeMap::new();
    for name in xattr::list(path).with_context(|| format!("cannot list {}", path.display()))? {
        let managed = name.as_bytes().starts_with(b"user.")
            || name == "security.capability"
            || name.as_bytes().starts_with(b"system.posix_acl_");
        if managed {
            let value = xattr::get(path, &name).context("cannot read an attribute")?;
            list.insert(name, value.unwrap_or_default());
        }
    }
    Ok(format!("{list:?}"))
}

fn same_content(left: &Path, right: &Path) -> anyhow::Result<bool> {
    let open =
        |path: &Path| File::open(path).with_context(|| format!("cannot open {}", path.display()));
    let (mut left, mut right) = (open(left)?, open(right)?);
    let (mut one, mut two) = (vec![0; 128 << 10], vec![0; 128 << 10]);
    loop {
        let length = left.read(&mut one).context("cannot read")?;
        if length == 0 {
            return Ok(right.read(&mut two).context("cannot read")? == 0);
        }
        if right.read_exact(&mut two[..length]).is_err() || one[..length] != two[..length] {
            return Ok(false);
        }
    }
}

/// Paths relative to a root, sorted, with their metadata; the root itself is the empty path.
pub type Listing = BTreeMap<PathBuf, Metadata>;

/// Lists `root` without the paths, relative to it, that `skip` names, and what lies below them.
/// Symlinks are not followed.
///
/// # Errors
///
/// If something cannot be read.
pub fn list(root: &Path, skip: &dyn Fn(&Path) -> bool) -> anyhow::Result<Listing> {
    let mut listing = Listing::new();
    let relative = |path: &Path| path.strip_prefix(root).unwrap_or(path).to_owned();
    let walk = walkdir::WalkDir::new(root)
        .into_iter()
        .filter_entry(|entry| entry.depth() == 0 || !skip(&relative(entry.path())));
    for entry in walk {
        let entry = entry.with_context(|| format!("cannot walk {}", root.display()))?;
        let metadata = entry.metadata().context("cannot read metadata")?;
        listing.insert(relative(entry.path()), metadata);
    }
    Ok(listing)
}
