//! Machines whose file-system is cut off, so that what was not synced is really gone.
//!
//! The root is an ext4 on a loop device in a file. The `shutdown` ioctl of ext4 stops all writing:
//! what the kernel has in memory and not on the medium is lost, as when the power fails.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::fixture::Template;
use crate::machine::{LOOK_AGAIN, Machine, PATIENCE};

/// How large the file-system is, in bytes.
const BYTES: u64 = 48 << 20;

/// `EXT4_IOC_SHUTDOWN`: `_IOR('X', 125, u32)`. A program of its own, because Rust has no safe way.
const SHUTDOWN: &str = "
    use Fcntl;
    sysopen(my $top, $ARGV[0], O_RDONLY) or die $!;
    ioctl($top, 0x8004587d, pack('L', $ARGV[1])) or die $!;
";

/// How much reaches the medium in the last moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Nothing.
    Hard,
    /// The journal of the file-system: names and inodes, but no content that was not written yet.
    Journalled,
}

impl Cut {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hard => "hard",
            Self::Journalled => "journalled",
        }
    }

    /// As the ioctl has it.
    fn flag(self) -> &'static str {
        match self {
            Self::Hard => "2",
            Self::Journalled => "1",
        }
    }
}

/// A file with an ext4 that holds the template's root.
pub struct Image {
    file: PathBuf,
}

impl Image {
    /// Makes the file-system in `file`.
    pub fn make(template: &Template, file: PathBuf) -> Self {
        std::fs::File::create_new(&file).unwrap().set_len(BYTES).unwrap();
        run(Command::new("mkfs.ext4").args(["-q", "-I", "256", "-J", "size=4"]).arg(&file));
        let image = Self { file };
        let top = image.file.with_extension("top");
        std::fs::create_dir(&top).unwrap();
        let disk = Disk::mount(image.file.clone(), top.clone(), "defaults");
        std::fs::remove_dir(top.join("lost+found")).unwrap();
        run(Command::new("cp").arg("-a").arg(template.directory.join("root/.")).arg(&top));
        disk.remove();
        std::fs::remove_dir(top).unwrap();
        image
    }

    /// Mounts a copy of it as the root of `machine`. `options` are further options.
    pub fn copy(&self, machine: &Machine<'_>, options: &str) -> Disk {
        let (file, top) = (machine.directory().join("image"), machine.directory().join("root"));
        run(Command::new("cp").arg("--sparse=always").arg(&self.file).arg(&file));
        Disk::mount(file, top, options)
    }
}

/// A file-system that is mounted.
pub struct Disk {
    file: PathBuf,
    top: PathBuf,
    options: String,
    mounted: bool,
}

impl Disk {
    fn mount(file: PathBuf, top: PathBuf, options: &str) -> Self {
        // The kernel itself must not write anything in the background.
        let options = format!("loop,commit=300,{options}");
        let mut disk = Self { file, top, options, mounted: false };
        disk.mount_again();
        disk
    }

    fn mount_again(&mut self) {
        let mut command = Command::new("mount");
        command.arg("-o").arg(&self.options).arg(&self.file).arg(&self.top);
        run(&mut command);
        self.mounted = true;
    }

    /// The kernel may need a moment to let go of what a killed program had open.
    fn unmount(&mut self) {
        let start = Instant::now();
        let mut command = Command::new("umount");
        command.arg(&self.top).stderr(Stdio::null());
        while !command.status().unwrap().success() {
            assert!(start.elapsed() < PATIENCE, "{} is busy", self.top.display());
            std::thread::sleep(LOOK_AGAIN);
        }
        self.mounted = false;
    }

    /// Cuts the power and gives it back.
    pub fn cut(&mut self, cut: Cut) {
        run(Command::new("perl").args(["-e", SHUTDOWN]).arg(&self.top).arg(cut.flag()));
        self.unmount();
        self.mount_again();
    }

    /// Leaves the file-system in its file.
    pub fn remove(mut self) {
        self.unmount();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.mounted {
            // What it was for has failed already.
            let _done = Command::new("umount").arg("-l").arg(&self.top).status();
        }
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| {
        panic!("{}: {error}: install it", command.get_program().display());
    });
    assert!(
        output.status.success(),
        "{command:?}: {}; these tests need root, loop devices and ext4",
        String::from_utf8_lossy(&output.stderr)
    );
}
