//! What a tree on disk holds: every path with its metadata.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

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
