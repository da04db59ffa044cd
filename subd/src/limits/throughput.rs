//! Measures the speed of the device of the root and of the network.
//!
//! The device is measured once, at the first start, by a short read around the page cache: of the
//! device itself where that can be opened, and otherwise of large files of the root. A root in
//! memory has no device. A device that cannot be measured is assumed to be slow. Neither keeps subd
//! from starting.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::path::TreePath;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::stat::{major, minor};

use crate::limits::read_bytes;
use crate::root::AlignedBuffer;
use crate::root::{Kind, Root, RootError};
use crate::state::persisted_state::DeviceSpeed;

/// How much is read at once, in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// How much is read in total, in bytes.
const READ_BYTES_MAX: u64 = 128 << 20;

/// The least that must be read to measure a device, in bytes.
const READ_BYTES_MIN: u64 = 4 << 20;

/// The longest time of reading.
const READ_TIME_MAX: Duration = Duration::from_secs(1);

/// How many entries are searched for large files, and for how long.
const ENTRIES_MAX: usize = 20_000;
const SEARCH_TIME_MAX: Duration = Duration::from_secs(2);

/// A block device.
struct BlockDevice {
    path: PathBuf,
    size_bytes: u64,
}

/// Measures the device of `root`, unless `known` is of that device. `None` if it has none or it
/// cannot be measured. Takes some seconds, or for ever if the device hangs.
pub fn measure_device(root: &Root, known: Option<&DeviceSpeed>) -> Option<DeviceSpeed> {
    let block = block_device(root);
    let device = match &block {
        Some(block) => format!("{} of {} bytes", block.path.display(), block.size_bytes),
        None => files_name(root)?,
    };
    if let Some(known) = known.filter(|known| known.device == device) {
        return Some(known.clone());
    }
    let measured = block.as_ref().and_then(|block| {
        let flags = OFlag::O_DIRECT | OFlag::O_CLOEXEC;
        let mut options = File::options();
        let file = options.read(true).custom_flags(flags.bits()).open(&block.path).ok()?;
        let step = block.size_bytes / (READ_BYTES_MAX / PIECE_BYTES as u64);
        let step = step - step % PIECE_BYTES as u64;
        ReadSpeed::default().read(&file, step.max(PIECE_BYTES as u64)).speed()
    });
    let bytes_per_second = measured.or_else(|| files_speed(root))?;
    Some(DeviceSpeed { device, bytes_per_second })
}

/// Returns the block device of `root`, if it is visible here.
fn block_device(root: &Root) -> Option<BlockDevice> {
    let status = root.directory(&TreePath::root()).and_then(|top| top.status()).ok()?;
    let number = status.filesystem;
    block_of(major(number), minor(number)).or_else(|| {
        // btrfs and others report numbers that belong to no device.
        let mounts = fs_err::read_to_string("/proc/self/mountinfo").ok()?;
        let source = mount_source(&mounts, &root.path().canonicalize().ok()?)?;
        let device = nix::sys::stat::stat(source.as_str()).ok()?.st_rdev;
        block_of(major(device), minor(device))
    })
}

fn block_of(major: u64, minor: u64) -> Option<BlockDevice> {
    let place = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let events = fs_err::read_to_string(place.join("uevent")).ok()?;
    let name = events.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    let sectors: u64 = fs_err::read_to_string(place.join("size")).ok()?.trim().parse().ok()?;
    Some(BlockDevice { path: Path::new("/dev").join(name), size_bytes: sectors * 512 })
}

/// Returns the path of the device that is mounted above `path`, by the text of `mountinfo`.
fn mount_source(mounts: &str, path: &Path) -> Option<String> {
    let mut found: Option<(usize, String)> = None;
    for line in mounts.lines() {
        let mut fields = line.split(' ');
        let Some(point) = fields.nth(4) else { continue };
        let Some(source) = fields.skip_while(|field| *field != "-").nth(2) else { continue };
        // Of several mounts on one path the last is visible.
        let nearer = found.as_ref().is_none_or(|(length, _)| *length <= point.len());
        if path.starts_with(point) && nearer {
            found = Some((point.len(), source.to_owned()));
        }
    }
    found.map(|(_, source)| source).filter(|source| source.starts_with("/dev/"))
}

/// Returns a name for the file-system of a root without a device.
fn files_name(root: &Root) -> Option<String> {
    let status = nix::sys::statfs::statfs(root.path()).ok()?;
    let kind = status.filesystem_type().0;
    Some(format!("a file-system of type {kind:x} and {} blocks", status.blocks()))
}

/// What was read, and how long that took.
struct ReadSpeed {
    buffer: AlignedBuffer,
    bytes: u64,
    took: Duration,
}

impl Default for ReadSpeed {
    fn default() -> Self {
        Self { buffer: AlignedBuffer::new(PIECE_BYTES), bytes: 0, took: Duration::ZERO }
    }
}

impl ReadSpeed {
    fn is_enough(&self) -> bool {
        self.bytes >= READ_BYTES_MAX || self.took >= READ_TIME_MAX
    }

    /// Reads a piece of `file` every `step` bytes, until it ends, fails or it is enough.
    fn read(mut self, file: &File, step: u64) -> Self {
        let mut offset = 0;
        while !self.is_enough() {
            let start = Instant::now();
            let Ok(length) = file.read_at(self.buffer.bytes(), offset) else { break };
            self.took += start.elapsed();
            self.bytes += length as u64;
            offset += step;
            if length < PIECE_BYTES {
                break;
            }
        }
        self
    }

    fn speed(&self) -> Option<u64> {
        let enough = self.bytes >= READ_BYTES_MIN && !self.took.is_zero();
        let speed = u128::from(self.bytes) * 1_000_000_000 / self.took.as_nanos().max(1);
        enough.then(|| u64::try_from(speed).unwrap_or(u64::MAX))
    }
}

/// Measures the speed of large files of `root`; `None` if `root` has no large files, or they are in
/// memory.
fn files_speed(root: &Root) -> Option<u64> {
    let before = read_bytes();
    let mut speed = ReadSpeed::default();
    let start = Instant::now();
    let mut directories = vec![TreePath::root()];
    let mut entries = 0;
    while let Some(path) = directories.pop() {
        // The scan reports what cannot be read.
        let Ok(directory) = root.directory(&path) else { continue };
        for name in directory.names().unwrap_or_default() {
            entries += 1;
            if entries > ENTRIES_MAX || start.elapsed() > SEARCH_TIME_MAX || speed.is_enough() {
                return speed.speed().filter(|_| read_bytes() > before);
            }
            let Ok(status) = directory.stat(&name) else { continue };
            match status.kind {
                Kind::Directory => directories.extend(path.join(&name)),
                Kind::File if status.size_bytes >= PIECE_BYTES as u64 => {
                    if let Ok(file) = open_direct(&directory, &name) {
                        speed = speed.read(&file, PIECE_BYTES as u64);
                    }
                }
                _ => {}
            }
        }
    }
    speed.speed().filter(|_| read_bytes() > before)
}

fn open_direct(directory: &crate::root::Directory, name: &[u8]) -> Result<File, RootError> {
    let file = directory.open_file(name)?;
    let set = fcntl(&file, FcntlArg::F_GETFL)
        .map(|flags| OFlag::from_bits_retain(flags) | OFlag::O_DIRECT)
        .and_then(|flags| fcntl(&file, FcntlArg::F_SETFL(flags)));
    set.map_err(|errno| directory.error("read around the page cache", name, errno))?;
    Ok(file)
}

/// Returns the speed of the interface of the default route in bytes per second, if it is known. A
/// virtual one reports a number that has nothing to do with its speed, unless it is made of
/// devices.
pub fn network_speed() -> Option<u64> {
    let read = |path: &Path| -> io::Result<String> { fs_err::read_to_string(path) };
    let interface = interface_of(
        &read(Path::new("/proc/net/route")).unwrap_or_default(),
        &read(Path::new("/proc/net/ipv6_route")).unwrap_or_default(),
    )?;
    let place = Path::new("/sys/class/net").join(interface);
    if !is_of_device(&place, INTERFACE_LAYERS_MAX) {
        return None;
    }
    let megabits: i64 = read(&place.join("speed")).ok()?.trim().parse().ok()?;
    // Some report -1 or nothing.
    u64::try_from(megabits).ok().filter(|megabits| *megabits > 0).map(|megabits| megabits * 125_000)
}

/// How many interfaces may be stacked, such as a bridge on a VLAN on a bond.
const INTERFACE_LAYERS_MAX: usize = 8;

/// True if an interface, at this place in sysfs, is a device or lies above one: a bond, a bridge or
/// a VLAN. At most so many layers are looked at.
fn is_of_device(place: &Path, layers: usize) -> bool {
    if place.join("device").exists() {
        return true;
    }
    let Ok(entries) = fs_err::read_dir(place) else { return false };
    let mut lower = entries.flatten().map(|entry| entry.path()).filter(|path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"lower_"))
    });
    layers > 0 && lower.any(|place| is_of_device(&place, layers - 1))
}

/// Returns the interface of the default route, by the kernel's tables for IPv4 and IPv6.
fn interface_of(ipv4: &str, ipv6: &str) -> Option<String> {
    let ipv4 = ipv4.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let interface = fields.next()?;
        let mask = fields.clone().nth(6)?;
        (fields.next()? == "00000000" && mask == "00000000").then_some(interface)
    });
    let ipv6 = || {
        ipv6.lines().find_map(|line| {
            let mut fields = line.split_whitespace();
            let (destination, length) = (fields.next()?, fields.next()?);
            let interface = fields.next_back()?;
            let is_default = length == "00" && destination.bytes().all(|digit| digit == b'0');
            (is_default && interface != "lo").then_some(interface)
        })
    };
    ipv4.or_else(ipv6).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_above_a_device_is_one() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        std::fs::create_dir_all(at("eth0/device")).unwrap();
        for (name, lower) in [("bond0", "eth0"), ("br0", "bond0"), ("veth1", ""), ("ring", "ring")]
        {
            std::fs::create_dir(at(name)).unwrap();
            if !lower.is_empty() {
                let link = at(name).join(format!("lower_{lower}"));
                std::os::unix::fs::symlink(at(lower), link).unwrap();
            }
        }
        let of = |name: &str| is_of_device(&at(name), INTERFACE_LAYERS_MAX);
        let found = ["eth0", "bond0", "br0", "veth1", "ring", "none"].map(of);
        assert_eq!(found, [true, true, true, false, false, false]);
    }

    #[test]
    fn the_mount_next_above_a_path_names_its_device() {
        let mounts = "\
            1 0 254:0 / / rw - ext4 /dev/vda1 rw\n\
            2 1 0:30 / /srv rw shared:2 - tmpfs tmpfs rw\n\
            3 1 0:31 /sub /srv/data rw - btrfs /dev/vdb rw\n\
            nonsense\n\
            4 1 0:32 / /opt rw - btrfs /dev/vdc rw\n\
            5 4 0:33 / /opt rw - overlay overlay rw\n";
        #[rustfmt::skip]
        let table = [
            ("/", Some("/dev/vda1")), ("/srvx", Some("/dev/vda1")), ("/srv", None),
            ("/srv/data/x", Some("/dev/vdb")), ("/opt", None),
        ];
        for (path, device) in table {
            assert_eq!(mount_source(mounts, Path::new(path)).as_deref(), device, "{path}");
        }
    }

    #[test]
    fn the_default_route_names_its_interface() {
        let heading = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n";
        let local = "eth1\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        let default = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        let zeros = "0".repeat(32);
        let lo = format!("{zeros} 00 {zeros} 00 {zeros} ffffffff 1 0 00200200       lo\n");
        let six = format!("{zeros} 00 {zeros} 00 fe80 400 1 0 00450003   ens3\n");
        #[rustfmt::skip]
        let table = [
            (format!("{heading}{local}{default}"), String::new(), Some("eth0")),
            (format!("{heading}{local}"), format!("{lo}{six}"), Some("ens3")),
            (heading.to_owned(), lo, None),
            (String::new(), String::new(), None),
        ];
        for (ipv4, ipv6, interface) in table {
            assert_eq!(interface_of(&ipv4, &ipv6).as_deref(), interface, "{ipv4}{ipv6}");
        }
    }

    #[test]
    fn a_device_is_measured_once() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::open(place.path()).unwrap();
        // Without a device that can be read, and without a large file, nothing is known.
        if let Some(first) = measure_device(&root, None) {
            assert!(first.bytes_per_second > 0);
            let known = DeviceSpeed { bytes_per_second: 1, ..first };
            assert_eq!(measure_device(&root, Some(&known)), Some(known));
            let other = DeviceSpeed { device: "another".to_owned(), bytes_per_second: 1 };
            assert_ne!(measure_device(&root, Some(&other)), Some(other));
        }
    }
}
