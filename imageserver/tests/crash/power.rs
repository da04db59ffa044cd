//! Stores on a file-system that is cut off, so that what was not synced is really gone.
//!
//! An ext4 on a loop device is told to shut down: what the kernel has in memory and not on the
//! medium is lost then, as when the power fails.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::calls::{Call, Fault, Kind, disturb, without_syncs};
use crate::trial::{Aside, Lab, Told, copy, judge, told};

/// How long the kernel may take to let go of a file-system.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long to wait before it is asked again: nobody tells.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// How large the file-system is, in bytes.
const BYTES: u64 = 24 << 20;

/// `EXT4_IOC_SHUTDOWN`. A program of its own, because Rust has no safe way.
const SHUTDOWN: &str = "
import fcntl, os, struct, sys
top = os.open(sys.argv[1], os.O_RDONLY)
fcntl.ioctl(top, 0x8004587d, struct.pack('I', int(sys.argv[2])))
";

/// What reaches the medium in the last moment.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// Nothing.
    Hard,
    /// The journal of the file-system, but no content that was not written yet.
    Journalled,
}

/// A file-system that is mounted until it is dropped.
struct Disk {
    file: PathBuf,
    top: PathBuf,
    options: String,
}

impl Disk {
    fn mount(file: PathBuf, top: PathBuf, options: &str) -> Self {
        // The kernel itself must not write anything in the background.
        let options = format!("loop,commit=300,{options}");
        let disk = Self { file, top, options };
        disk.mount_again();
        disk
    }

    fn mount_again(&self) {
        run(Command::new("mount").arg("-o").arg(&self.options).arg(&self.file).arg(&self.top));
    }

    /// Cuts the power and gives it back.
    fn cut(&self, cut: Cut) {
        let flag = match cut {
            Cut::Journalled => "1",
            Cut::Hard => "2",
        };
        run(Command::new("python3").args(["-c", SHUTDOWN]).arg(&self.top).arg(flag));
        self.unmount();
        self.mount_again();
    }

    /// The kernel may need a moment to let go of what a killed program had open.
    fn unmount(&self) {
        let start = Instant::now();
        let mut command = Command::new("umount");
        command.arg(&self.top).stderr(Stdio::null());
        while !command.status().unwrap().success() {
            assert!(start.elapsed() < PATIENCE, "{} is busy", self.top.display());
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.unmount();
    }
}

struct Point {
    call: Call,
    cut: Cut,
    options: &'static str,
}

impl fmt::Display for Point {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}:{}:{}", self.cut, self.options, self.call)
    }
}

impl Point {
    fn survive(&self, lab: &Lab, image: &Path) -> Result<(), String> {
        let (file, top) = (lab.free_path(), lab.free_path());
        run(Command::new("cp").arg("--sparse=always").arg(image).arg(&file));
        std::fs::create_dir(&top).unwrap();
        let disk = Disk::mount(file.clone(), top.clone(), self.options);
        let data = top.join("data");
        let output = disturb(&lab.program(&data), &lab.free_path(), &self.call, Fault::Kill)?;
        disk.cut(self.cut);
        let judged = judge(lab.change, &data, told(&output)?, Aside::Unneeded);
        drop(disk);
        std::fs::remove_dir(top).unwrap();
        std::fs::remove_file(file).unwrap();
        judged
    }
}

/// Makes a file-system that holds the store before the change.
fn image(lab: &Lab) -> PathBuf {
    let (image, top) = (lab.free_path(), lab.free_path());
    std::fs::File::create_new(&image).unwrap().set_len(BYTES).unwrap();
    run(Command::new("mkfs.ext4").args(["-q", "-J", "size=4"]).arg(&image));
    std::fs::create_dir(&top).unwrap();
    let disk = Disk::mount(image.clone(), top.clone(), "defaults");
    copy(&lab.template(), &top.join("data"));
    drop(disk);
    image
}

/// Lets nothing be synced, and cuts the power when the change is made: if that were not seen, the
/// other power cuts would prove nothing.
pub fn power_cut_without_syncs(lab: &Lab) -> Result<(), String> {
    let top = lab.free_path();
    std::fs::create_dir(&top).unwrap();
    let disk = Disk::mount(image(lab), top.clone(), "noauto_da_alloc");
    let data = top.join("data");
    let output = without_syncs(&lab.program(&data), &lab.free_path());
    disk.cut(Cut::Hard);
    match (told(&output)?, judge(lab.change, &data, Told::Done, Aside::Unneeded)) {
        (Told::Done, Err(_)) => Ok(()),
        other => Err(format!("that nothing was synced was not seen: {other:?}")),
    }
}

/// Cuts the power at each call that changes something.
pub fn power_cut(lab: &Lab) -> Result<(), String> {
    let image = image(lab);
    let mut all = Vec::new();
    for options in ["auto_da_alloc", "noauto_da_alloc", "noauto_da_alloc,data=writeback"] {
        for cut in [Cut::Hard, Cut::Journalled] {
            let calls = lab.of(Kind::Change).into_iter();
            all.extend(calls.map(|call| Point { call, cut, options }));
        }
    }
    lab.each("power cut", all, |point| point.survive(lab, &image))
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
