//! File-systems whose power is cut, so that everything that was not synced is really lost.
//!
//! An ext4 on a loop device in a file. The `shutdown` ioctl of ext4 stops all writing: what the
//! kernel has in memory and not on the medium is lost, as when the power fails.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::eventually;

const MOUNT_POINT: &str = "the mount point is made and removed";

/// `EXT4_IOC_SHUTDOWN`: `_IOR('X', 125, u32)`. In perl, because Rust needs unsafe code for it.
const SHUTDOWN: &str = "
    use Fcntl;
    sysopen(my $top, $ARGV[0], O_RDONLY) or die $!;
    ioctl($top, 0x8004587d, pack('L', $ARGV[1])) or die $!;
";

/// What still reaches the medium when the power is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Nothing.
    Hard,
    /// The journal of the file-system: names and inodes, but no content that was not written yet.
    Journalled,
}

impl Cut {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::Hard, Self::Journalled];

    /// Returns the name in the names of points.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hard => "hard",
            Self::Journalled => "journalled",
        }
    }

    /// Returns the argument of the ioctl.
    fn flag(self) -> &'static str {
        match self {
            Self::Hard => "2",
            Self::Journalled => "1",
        }
    }
}

/// A file with an ext4, of which each attempt gets a copy.
#[derive(Debug)]
pub struct Image {
    file: PathBuf,
}

impl Image {
    /// Makes a file-system of `size_bytes` in `file`, and lets `fill` put files into it.
    pub fn make(file: PathBuf, size_bytes: u64, fill: impl FnOnce(&Path)) -> Self {
        let disk = fs_err::File::create_new(&file).expect("the file of a disk is made");
        disk.set_len(size_bytes).expect("the file of a disk gets its length");
        run(Command::new("mkfs.ext4").args(["-q", "-I", "256", "-J", "size=4"]).arg(&file));
        let top = file.with_extension("top");
        fs_err::create_dir(&top).expect(MOUNT_POINT);
        let disk = Disk::mount(file.clone(), top.clone(), "defaults");
        fs_err::remove_dir(top.join("lost+found")).expect("mkfs.ext4 made lost+found");
        fill(&top);
        disk.unmount();
        fs_err::remove_dir(top).expect(MOUNT_POINT);
        Self { file }
    }

    /// Copies the file-system to `file` and mounts it on `top`, with further mount `options`.
    #[must_use]
    pub fn mount_copy(&self, file: PathBuf, top: PathBuf, options: &str) -> Disk {
        run(Command::new("cp").arg("--sparse=always").arg(&self.file).arg(&file));
        Disk::mount(file, top, options)
    }
}

/// A file-system that is mounted.
#[derive(Debug)]
pub struct Disk {
    file: PathBuf,
    top: PathBuf,
    options: String,
    is_mounted: bool,
}

impl Disk {
    fn mount(file: PathBuf, top: PathBuf, options: &str) -> Self {
        // A long commit interval: the kernel must not write anything in the background.
        let options = format!("loop,commit=300,{options}");
        let mut disk = Self { file, top, options, is_mounted: false };
        disk.mount_again();
        disk
    }

    fn mount_again(&mut self) {
        let mut command = Command::new("mount");
        run(command.arg("-o").arg(&self.options).arg(&self.file).arg(&self.top));
        self.is_mounted = true;
    }

    /// Waits, because the kernel needs a moment to close the files of a killed program.
    fn unmount_now(&mut self) {
        let mut command = Command::new("umount");
        command.arg(&self.top).stderr(Stdio::null());
        let what = format!("{} is unmounted", self.top.display());
        eventually(&what, || {
            command.status().expect("umount is installed").success().then_some(())
        });
        self.is_mounted = false;
    }

    /// Cuts the power and gives it back.
    pub fn cut(&mut self, cut: Cut) {
        run(Command::new("perl").args(["-e", SHUTDOWN]).arg(&self.top).arg(cut.flag()));
        self.unmount_now();
        self.mount_again();
    }

    /// Unmounts the file-system; its file stays.
    pub fn unmount(mut self) {
        self.unmount_now();
    }

    /// Unmounts the file-system and removes its file and mount point.
    pub fn remove(self) {
        let (file, top) = (self.file.clone(), self.top.clone());
        self.unmount();
        fs_err::remove_dir(top).expect(MOUNT_POINT);
        fs_err::remove_file(file).expect("the file of a disk is removed");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_mounted {
            // The test has failed already.
            let _done = Command::new("umount").arg("-l").arg(&self.top).status();
        }
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| {
        panic!("cannot run {}: {error}: install it", command.get_program().display());
    });
    assert!(
        output.status.success(),
        "{command:?}: {}; these tests need root, loop devices and ext4",
        String::from_utf8_lossy(&output.stderr)
    );
}
