//! The trees that images are made of: real files of this machine, or a directory or archive of the
//! user.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use crate::compare::list;

/// The directories that files are copied from, until there are enough.
const SOURCES: [&str; 6] = ["etc", "usr/bin", "usr/sbin", "usr/share", "usr/lib", "usr/include"];

/// The minimum number of files of an image.
pub const FILES_MIN: usize = 6_000;

/// The minimum total size of the files of an image, in bytes.
pub const BYTES_MIN: u64 = 128 << 20;

/// The largest file that is copied, in bytes.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// In the first round, one source provides at most this fraction of the minimum.
const SHARE: usize = 4;

/// Copies real files of this machine to `target`, a new directory: at least [`FILES_MIN`] and
/// [`BYTES_MIN`], with their directories, symlinks, owners, modes and times. Calls `progress` with
/// a line of text before it reads a directory.
///
/// # Errors
///
/// If the machine does not have as many, or the copy fails.
pub fn from_this_machine(target: &Path, progress: &dyn Fn(&str)) -> anyhow::Result<()> {
    fs::create_dir(target).with_context(|| format!("cannot make {}", target.display()))?;
    let mut copy = Copy { target, files: 0, bytes: 0 };
    for limited in [true, false] {
        for source in SOURCES {
            if copy.is_complete() {
                break;
            }
            progress(&format!(
                "  copying the files of /{source} ({} files, {} MB so far)",
                copy.files,
                copy.bytes / 1_000_000
            ));
            copy.take_from(Path::new("/"), Path::new(source), limited)?;
        }
    }
    ensure!(
        copy.is_complete(),
        "this machine has only {} suitable files with {} bytes; give a tree with --image",
        copy.files,
        copy.bytes
    );
    for made in ["tmp", "var/log"] {
        fs::create_dir_all(target.join(made)).context("cannot make a directory")?;
    }
    Ok(())
}

struct Copy<'target> {
    target: &'target Path,
    files: usize,
    bytes: u64,
}

impl Copy<'_> {
    fn is_complete(&self) -> bool {
        self.files >= FILES_MIN && self.bytes >= BYTES_MIN
    }

    fn take_from(&mut self, root: &Path, source: &Path, limited: bool) -> anyhow::Result<()> {
        let (files_before, bytes_before) = (self.files, self.bytes);
        let walk =
            walkdir::WalkDir::new(root.join(source)).sort_by_file_name().same_file_system(true);
        for entry in walk.into_iter().filter_map(Result::ok) {
            let share_used = self.files - files_before > FILES_MIN / SHARE
                || self.bytes - bytes_before > BYTES_MIN / SHARE as u64;
            if self.is_complete() || (limited && share_used) {
                break;
            }
            let Ok(relative) = entry.path().strip_prefix(root) else { continue };
            let target = self.target.join(relative);
            let Ok(metadata) = entry.metadata() else { continue };
            if fs::symlink_metadata(&target).is_ok() {
                continue;
            }
            if metadata.is_dir() {
                self.directories_to(root, relative)?;
            } else if metadata.file_type().is_symlink() {
                self.directories_to(root, relative.parent().unwrap_or(Path::new("")))?;
                let to = fs::read_link(entry.path()).context("cannot read a symlink")?;
                symlink(to, &target).context("cannot make a symlink")?;
                lchown(&target, Some(metadata.uid()), Some(metadata.gid()))
                    .context("cannot set an owner")?;
            } else if metadata.is_file() && metadata.len() <= FILE_BYTES_MAX {
                self.directories_to(root, relative.parent().unwrap_or(Path::new("")))?;
                // A file that cannot be read or that disappears is skipped.
                if fs::copy(entry.path(), &target).is_ok() {
                    attributes(&target, &metadata)?;
                    self.files += 1;
                    self.bytes += metadata.len();
                }
            }
        }
        Ok(())
    }

    fn directories_to(&self, root: &Path, relative: &Path) -> anyhow::Result<()> {
        let mut path = PathBuf::new();
        for component in relative.components() {
            path.push(component);
            let target = self.target.join(&path);
            if fs::symlink_metadata(&target).is_err() {
                fs::create_dir(&target).context("cannot make a directory")?;
                let metadata = fs::metadata(root.join(&path)).context("cannot stat")?;
                attributes(&target, &metadata)?;
            }
        }
        Ok(())
    }
}

/// Gives `target` the owner, mode and mtime of `metadata`.
fn attributes(target: &Path, metadata: &fs::Metadata) -> anyhow::Result<()> {
    lchown(target, Some(metadata.uid()), Some(metadata.gid())).context("cannot set an owner")?;
    fs::set_permissions(target, metadata.permissions()).context("cannot set a mode")?;
    let mtime = TimeSpec::new(metadata.mtime(), metadata.mtime_nsec());
    utimensat(AT_FDCWD, target, &TimeSpec::UTIME_OMIT, &mtime, UtimensatFlags::NoFollowSymlink)
        .context("cannot set a time")
}

/// Provides `source`, a directory or an archive that GNU tar reads, as a directory. An archive is
/// extracted to `target`.
///
/// # Errors
///
/// If there is no such file, or tar fails.
pub fn from_image(source: &Path, target: &Path) -> anyhow::Result<PathBuf> {
    let metadata =
        fs::metadata(source).with_context(|| format!("cannot read {}", source.display()))?;
    if metadata.is_dir() {
        return Ok(source.to_owned());
    }
    fs::create_dir(target).with_context(|| format!("cannot make {}", target.display()))?;
    run(Command::new("tar")
        .args(["--xattrs", "--xattrs-include=*", "--acls", "--same-owner", "-xpf"])
        .arg(source)
        .arg("-C")
        .arg(target))?;
    Ok(target.to_owned())
}

/// Copies a whole tree with all its attributes.
///
/// # Errors
///
/// If cp fails.
pub fn copy(source: &Path, target: &Path) -> anyhow::Result<()> {
    run(Command::new("cp").args(["-a", "--reflink=auto"]).arg(source).arg(target))
}

/// Copies programs of this machine to a tree, with their libraries, so that they run there. A
/// symlink becomes the file.
///
/// # Errors
///
/// If ldd fails, or a file cannot be copied.
pub fn copy_programs<'path>(
    programs: impl IntoIterator<Item = &'path str>,
    tree: &Path,
) -> anyhow::Result<()> {
    let copy = |path: &str| {
        let to = tree.join(path.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap_or(tree)).context("cannot make a directory")?;
        fs::copy(path, to).with_context(|| format!("cannot copy {path}"))
    };
    for program in programs {
        copy(program)?;
        let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let libraries = text.split_whitespace().filter(|word| word.starts_with('/'));
        for library in libraries.filter(|word| !word.ends_with(':')) {
            copy(library)?;
        }
    }
    Ok(())
}

/// Changes `root` like a new version of an image: fifty files get new content, ten are added in a
/// new directory, five are removed. Returns the number of changed files.
///
/// # Errors
///
/// If the tree has fewer than sixty files, or cannot be written.
pub fn next_version(root: &Path, skip: &dyn Fn(&Path) -> bool) -> anyhow::Result<usize> {
    let mut files = Vec::new();
    for (path, metadata) in list(root, skip)? {
        if metadata.is_file() && metadata.nlink() == 1 && metadata.mode() & 0o6000 == 0 {
            files.push(root.join(path));
        }
    }
    ensure!(files.len() >= 60, "{} has too few files", root.display());
    let step = files.len() / 55;
    for (index, path) in files.iter().step_by(step).take(55).enumerate() {
        if index % 11 == 10 {
            fs::remove_file(path).context("cannot remove")?;
        } else {
            let mut content = fs::read(path).context("cannot read")?;
            content.extend_from_slice(b"# version 2\n");
            fs::write(path, content).context("cannot write")?;
        }
    }
    let added = root.join("opt/version-2");
    fs::create_dir_all(&added).context("cannot make a directory")?;
    for number in 0..10 {
        fs::write(added.join(format!("file-{number}")), format!("new file {number}\n"))
            .context("cannot write")?;
    }
    Ok(65)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        bail!("{name}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
