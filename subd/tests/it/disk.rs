//! A file-system of a test's own, on a loop device upon a file.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// Runs a program that has to succeed; gives what it printed.
#[track_caller]
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A mounted file-system; unmounted when it is dropped.
pub struct Disk {
    place: TempDir,
}

impl Disk {
    /// An ext4 file-system of `bytes`.
    pub fn new(bytes: u64) -> Self {
        let disk = Self { place: tempfile::tempdir().unwrap() };
        File::create(disk.image()).unwrap().set_len(bytes).unwrap();
        fs::create_dir(disk.root()).unwrap();
        run("mkfs.ext4", &["-q", "-F", "-m", "0", disk.image().to_str().unwrap()]);
        disk.mount();
        disk
    }

    fn image(&self) -> PathBuf {
        self.place.path().join("image")
    }

    /// Where it is mounted.
    pub fn root(&self) -> PathBuf {
        self.place.path().join("root")
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.root().join(path.trim_start_matches('/'))
    }

    fn mount(&self) {
        let (image, root) = (self.image(), self.root());
        run("mount", &["-o", "loop", image.to_str().unwrap(), root.to_str().unwrap()]);
    }

    /// Mounts it anew: nothing of it is in the page cache then.
    pub fn remount(&self) {
        run("umount", &[self.root().to_str().unwrap()]);
        self.mount();
    }

    /// Writes all that is changed to the medium.
    pub fn sync(&self) {
        nix::unistd::syncfs(File::open(self.root()).unwrap()).unwrap();
    }

    /// Changes the byte of the medium at `physical`, which the file-system knows nothing of.
    pub fn spoil(&self, physical: u64) {
        let image = File::options().read(true).write(true).open(self.image()).unwrap();
        let mut byte = [0];
        image.read_exact_at(&mut byte, physical).unwrap();
        image.write_all_at(&[byte[0] ^ 0x55], physical).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Whatever a failed test has left open goes with its process.
        let _output = Command::new("umount").arg("--lazy").arg(self.root()).output();
    }
}

/// How much of a file is in the page cache, in bytes.
pub fn cached_bytes(file: &Path) -> u64 {
    let arguments = ["--bytes", "--noheadings", "--output", "RES", file.to_str().unwrap()];
    run("fincore", &arguments).trim().parse().unwrap()
}
