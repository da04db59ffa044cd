//! Makes the trees of the benchmark, the same on every machine.
//!
//! `first` has 40,000 files with 1.0 GB in total, with sizes like those of a system: most small, a
//! few large. The other trees are `first` with some changed files; equal files are hard-linked to
//! save disk space.

use std::fs::{self, File, FileTimes};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};

/// The number of files of the tree.
pub const FILES: usize = 40_000;

/// The total size of these files, in bytes.
pub const BYTES: u64 = 1_000_000_000;

/// The number of files in each directory.
const FILES_PER_DIRECTORY: usize = 16;

/// The number of directories in each directory of the first level.
const DIRECTORIES_PER_DIRECTORY: usize = 50;

/// The size of the largest file, in bytes, before all sizes are scaled to [`BYTES`].
const FILE_BYTES_MAX: f64 = 32e6;

/// The parameters of a tree.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Another seed gives other content and other sizes.
    pub seed: u64,
    /// The number of files: at most [`FILES`].
    pub files: usize,
    /// The total size of these files, in bytes.
    pub bytes: u64,
    pub content: Content,
}

/// What the files of a tree hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// What cannot be packed.
    Noise,
    /// Words, which can be packed to less than half.
    Words,
}

/// The tree that machines have at first.
pub const FIRST: Shape =
    Shape { seed: 0x5eed_0001, files: FILES, bytes: BYTES, content: Content::Noise };

/// A tree of the same shape whose files can be packed, as most of a system can.
pub const WORDS: Shape = Shape { content: Content::Words, ..FIRST };

/// The parameters of a changed tree.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// The name of the directory and the image.
    pub name: &'static str,
    /// Another seed changes other files.
    pub seed: u64,
    /// The number of files with other content.
    pub files: usize,
    /// The total size of these files, in bytes.
    pub bytes: u64,
}

/// A security update.
pub const SMALL: Change =
    Change { name: "small", seed: 0x5eed_1000 + 68, files: 68, bytes: 1_000_000 };
/// A new release.
pub const LARGE: Change =
    Change { name: "large", seed: 0x5eed_1000 + 3_633, files: 3_633, bytes: 98_000_000 };
/// The change that is timed from the edit of the machine database on.
pub const QUICK: Change =
    Change { name: "quick", seed: 0x5eed_1000 + 50, files: 50, bytes: 500_000 };

/// Xorshift64*: the same numbers everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number between 0 and 1, both excluded.
    fn unit(&mut self) -> f64 {
        ((self.next() >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }

    /// Returns a normally distributed number with mean 0 and deviation 1.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Returns sizes of files, in total about `total` bytes: log-normal, with a deviation of e
    /// squared.
    fn sizes(&mut self, count: usize, total: u64) -> Vec<u64> {
        let raw: Vec<f64> =
            (0..count).map(|_| (2.0 * self.normal()).exp().min(FILE_BYTES_MAX / 3_400.0)).collect();
        let scale = total as f64 / raw.iter().sum::<f64>();
        raw.iter().map(|size| (size * scale) as u64).collect()
    }

    /// Appends some content.
    fn append(&mut self, content: Content, block: &mut Vec<u8>) {
        let number = self.next();
        match content {
            Content::Noise => block.extend_from_slice(&number.to_le_bytes()),
            // One of 4,096 words, of 1 to 8 letters.
            Content::Words => {
                let word = (number >> 52).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let length = 1 + usize::from(word.to_le_bytes()[0] % 8);
                block.extend(word.to_be_bytes()[..length].iter().map(|byte| b'a' + byte % 26));
                block.push(b' ');
            }
        }
    }

    fn write(&mut self, path: &Path, mut size: u64, content: Content) -> anyhow::Result<()> {
        let mut file =
            File::create_new(path).with_context(|| format!("cannot make {}", path.display()))?;
        let mut block = Vec::with_capacity(64 << 10);
        while size > 0 {
            let length = size.min(64 << 10);
            block.clear();
            while (block.len() as u64) < length {
                self.append(content, &mut block);
            }
            block.truncate(usize::try_from(length).context("a block is small")?);
            file.write_all(&block).context("cannot write")?;
            size -= length;
        }
        // Whole seconds, which each tool can set.
        let day = Duration::from_secs(1_700_000_000 + self.next() % 10_000_000);
        file.set_times(FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + day))
            .context("cannot set a time")?;
        let mode = if self.next().is_multiple_of(8) { 0o755 } else { 0o644 };
        file.set_permissions(fs::Permissions::from_mode(mode)).context("cannot set a mode")
    }
}

/// Returns the path of the file with a number, relative to the root.
fn path_of(number: usize) -> PathBuf {
    let directory = number / FILES_PER_DIRECTORY;
    let (outer, inner) =
        (directory / DIRECTORIES_PER_DIRECTORY, directory % DIRECTORIES_PER_DIRECTORY);
    PathBuf::from(format!("d{outer:02}/e{inner:02}/file-{number:05}"))
}

/// Makes a tree at `target`.
///
/// # Errors
///
/// If it cannot be written.
pub fn make(target: &Path, shape: Shape) -> anyhow::Result<()> {
    let mut random = Random(shape.seed);
    let sizes = random.sizes(shape.files, shape.bytes);
    for (number, size) in sizes.into_iter().enumerate() {
        let path = target.join(path_of(number));
        if number % FILES_PER_DIRECTORY == 0 {
            let directory = path.parent().context("a file is in a directory")?;
            fs::create_dir_all(directory).context("cannot make a directory")?;
        }
        random.write(&path, size, shape.content)?;
    }
    Ok(())
}

/// Makes the tree `first`, which has `files` files, with `change` at `target`. Returns the files
/// that differ.
///
/// # Errors
///
/// If it cannot be written.
pub fn changed(
    first: &Path,
    files: usize,
    target: &Path,
    change: Change,
) -> anyhow::Result<Vec<PathBuf>> {
    let mut command = Command::new("cp");
    let status = command.arg("-al").arg(first).arg(target).status().context("cannot run cp")?;
    ensure!(status.success(), "cp: {status}");
    let mut random = Random(change.seed);
    let sizes = random.sizes(change.files, change.bytes);
    let step = files / change.files;
    let mut paths = Vec::with_capacity(change.files);
    for (index, size) in sizes.into_iter().enumerate() {
        let path = path_of(index * step + usize::try_from(random.next() % step as u64)?);
        fs::remove_file(target.join(&path)).context("cannot remove")?;
        random.write(&target.join(&path), size + 1, Content::Noise)?;
        paths.push(path);
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_same_everywhere_and_add_up() {
        let sizes = Random(FIRST.seed).sizes(FILES, BYTES);
        let total: u64 = sizes.iter().sum();
        assert!(BYTES - total < FILES as u64, "{total}");
        let mut sorted = sizes.clone();
        sorted.sort_unstable();
        let (median, largest) = (sorted[FILES / 2], sorted[FILES - 1]);
        assert!((3_000..6_000).contains(&median), "{median}");
        assert!((5_000_000..40_000_000).contains(&largest), "{largest}");
        assert_eq!(sizes[..4], Random(FIRST.seed).sizes(FILES, BYTES)[..4]);
        assert_eq!(path_of(39_999), Path::new("d49/e49/file-39999"));
    }
}
