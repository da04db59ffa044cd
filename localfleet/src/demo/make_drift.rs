//! Makes a machine drift, in all ways that a repair has to undo.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use crate::compare::list;

/// A path that was changed.
pub struct DriftedPath {
    /// A description of the change.
    pub what: String,
    /// The path, relative to the root.
    pub path: PathBuf,
}

/// Changes `root` in seven ways: content (size and mtime kept), mode, owner, a file deleted, a
/// file added, a symlink that points elsewhere, an extended attribute. `skip` returns
/// true for paths, relative to the root, that must not be changed.
///
/// # Errors
///
/// If the tree has too few files, or something cannot be changed.
pub fn make_drift(root: &Path, skip: &dyn Fn(&Path) -> bool) -> anyhow::Result<Vec<DriftedPath>> {
    let (files, links) = candidates(root, skip)?;
    ensure!(files.len() >= 10 && !links.is_empty(), "{} is too small", root.display());
    let pick = |index: usize| &files[index * (files.len() - 1) / 9];
    let mut done = Vec::new();
    let mut note = |what: &str, path: &Path| {
        done.push(DriftedPath { what: what.to_owned(), path: path.to_owned() });
    };

    let path = pick(1);
    flip_first_byte(&root.join(path))?;
    note("content changed, size and mtime as before", path);

    let path = pick(3);
    let mode = fs::metadata(root.join(path)).context("cannot stat")?.mode() ^ 0o022;
    fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode & 0o7777))
        .context("cannot change a mode")?;
    note("mode changed", path);

    let path = pick(5);
    std::os::unix::fs::chown(root.join(path), Some(4_242), None).context("cannot change owner")?;
    note("owner changed", path);

    let path = pick(7);
    fs::remove_file(root.join(path)).context("cannot remove")?;
    note("file deleted", path);

    let parent = pick(8).parent().unwrap_or(Path::new("")).join("intruder");
    fs::write(root.join(&parent), b"not part of the image\n").context("cannot write")?;
    note("file added", &parent);

    let path = &links[links.len() / 2];
    fs::remove_file(root.join(path)).context("cannot remove")?;
    symlink("/nowhere", root.join(path)).context("cannot make a symlink")?;
    note("symlink points elsewhere", path);

    let path = pick(9);
    xattr::set(root.join(path), "user.drift", b"1").context("cannot set an attribute")?;
    note("extended attribute added", path);
    Ok(done)
}

/// Regular files with one name and some content, and symlinks, both sorted.
fn candidates(
    root: &Path,
    skip: &dyn Fn(&Path) -> bool,
) -> anyhow::Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    let (mut files, mut links) = (Vec::new(), Vec::new());
    for (path, metadata) in list(root, skip)? {
        if metadata.is_file() && metadata.nlink() == 1 && metadata.len() > 0 {
            files.push(path);
        } else if metadata.file_type().is_symlink() {
            links.push(path);
        }
    }
    Ok((files, links))
}

/// Changes the first byte of a file, keeping its size and its mtime.
fn flip_first_byte(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::FileExt as _;
    let metadata = fs::metadata(path).context("cannot stat")?;
    let file = fs::File::options().read(true).write(true).open(path).context("cannot open")?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).context("cannot read")?;
    file.write_all_at(&[byte[0] ^ 0xff], 0).context("cannot write")?;
    let mtime = TimeSpec::new(metadata.mtime(), metadata.mtime_nsec());
    utimensat(AT_FDCWD, path, &TimeSpec::UTIME_OMIT, &mtime, UtimensatFlags::NoFollowSymlink)
        .context("cannot set a time")?;
    Ok(())
}
