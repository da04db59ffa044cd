//! Finds the paths of a root that the kernel uses: mount points and active swap files.
//!
//! `/proc/thread-self/mountinfo` and `/proc/swaps` hold paths as the process sees them. A path of
//! the root is found in two ways: by its path below the root as the process sees it, and, because a
//! file-system can be mounted in several places (bind mounts, subvolumes), by its path in the
//! file-system. One path too many is better than one too few: a path that is found wrongly is left
//! alone, and reported.
// tidy: core

use std::collections::BTreeMap;

use model::path::TreePath;
use model::plan::Occupant;

/// The location of the root.
#[derive(Clone, Copy, Debug)]
pub struct RootLocation<'a> {
    /// The number of its mount, as all processes see it.
    pub mount: u64,
    /// Its path as the process sees it.
    pub path: &'a [u8],
}

/// One line of mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    number: u64,
    parent: u64,
    device: Vec<u8>,
    /// The directory of the file-system that is mounted.
    root: Vec<u8>,
    point: Vec<u8>,
}

/// Returns the paths below `place` that the kernel uses. Lines that cannot be parsed are ignored.
/// The root itself is never returned.
pub fn used_paths(
    place: RootLocation<'_>,
    mountinfo: &[u8],
    swaps: &[u8],
) -> BTreeMap<TreePath, Occupant> {
    let mounts: Vec<Mount> = mountinfo.split(|&byte| byte == b'\n').filter_map(mount).collect();
    let mut found = BTreeMap::new();
    for path in swaps.split(|&byte| byte == b'\n').skip(1).filter_map(swap_file) {
        let holders = mounts.iter().map(|mount| mount.number).chain([place.mount]);
        for inside in holders.filter_map(|number| inside(place, &mounts, number, &path)) {
            found.insert(inside, Occupant::SwapFile);
        }
    }
    for mount in mounts.iter().filter(|mount| mount.number != place.mount) {
        if let Some(inside) = inside(place, &mounts, mount.parent, &mount.point) {
            found.insert(inside, Occupant::MountPoint);
        }
    }
    found.remove(&TreePath::root());
    found
}

/// Returns the path in the root of what has the path `seen` on the mount `number`; `None` if it is
/// not in the root.
fn inside(place: RootLocation<'_>, mounts: &[Mount], number: u64, seen: &[u8]) -> Option<TreePath> {
    if number == place.mount {
        return tree_path(below(seen, place.path)?);
    }
    let by_number = |number: u64| mounts.iter().find(|mount| mount.number == number);
    let (own, other) = (by_number(place.mount)?, by_number(number)?);
    if own.device != other.device {
        return None;
    }
    let root = joined(&own.root, below(place.path, &own.point)?);
    let path = joined(&other.root, below(seen, &other.point)?);
    tree_path(below(&path, &root)?)
}

/// Returns the rest of `path` below `directory`, without a leading slash; `None` if it is
/// elsewhere.
fn below<'path>(path: &'path [u8], directory: &[u8]) -> Option<&'path [u8]> {
    let directory = directory.strip_suffix(b"/").unwrap_or(directory);
    let rest = path.strip_prefix(directory)?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix(b"/") }
}

fn joined(directory: &[u8], rest: &[u8]) -> Vec<u8> {
    let mut path = directory.strip_suffix(b"/").unwrap_or(directory).to_vec();
    path.push(b'/');
    path.extend(rest);
    path
}

fn tree_path(rest: &[u8]) -> Option<TreePath> {
    TreePath::new(joined(b"", rest)).ok()
}

fn mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let number = decimal(fields.next()?)?;
    let parent = decimal(fields.next()?)?;
    let device = fields.next()?.to_vec();
    let root = unescaped(fields.next()?);
    let point = unescaped(fields.next()?);
    Some(Mount { number, parent, device, root, point })
}

/// Returns the path of a line of `/proc/swaps`; `None` for a device, or a deleted file.
fn swap_file(line: &[u8]) -> Option<Vec<u8>> {
    let mut fields =
        line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|field| !field.is_empty());
    let (path, kind) = (unescaped(fields.next()?), fields.next()?);
    (kind == b"file" && !path.ends_with(b" (deleted)")).then_some(path)
}

fn decimal(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// Undoes escapes: the kernel writes white space and backslashes in names as a backslash and three
/// octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let escape = |digits: &[u8]| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok().filter(|_| !digits.starts_with('+'))
        };
        let escaped = if first == b'\\' { after.get(..3).and_then(escape) } else { None };
        match escaped {
            Some(byte) => {
                plain.push(byte);
                rest = &after[3..];
            }
            None => {
                plain.push(first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(mount: u64, path: &str, mountinfo: &str, swaps: &str, expected: &[(&str, Occupant)]) {
        let place = RootLocation { mount, path: path.as_bytes() };
        let swaps = format!("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n{swaps}");
        let found = used_paths(place, mountinfo.as_bytes(), swaps.as_bytes());
        let found: Vec<(String, Occupant)> =
            found.into_iter().map(|(path, occupant)| (path.to_string(), occupant)).collect();
        let expected: Vec<(String, Occupant)> =
            expected.iter().map(|(path, occupant)| ((*path).to_owned(), *occupant)).collect();
        assert_eq!(found, expected, "{path} on {mount}");
    }

    const MACHINE: &str = "\
22 27 0:21 / /proc rw,relatime - proc proc rw
24 27 0:6 / /dev rw - devtmpfs devtmpfs rw,size=12334492k
25 24 0:23 / /dev/shm rw,relatime shared:3 master:2 - tmpfs tmpfs rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 8:1 / /srv/a\\040b rw - ext4 /dev/sda1 rw
31 30 0:40 / /srv/a\\040b/in rw - tmpfs none rw
32 30 0:41 / /srv/a\\040b/in rw - tmpfs none rw
33 27 254:0 /var/lib /mnt/lib rw - ext4 /dev/vda rw
34 33 0:42 / /mnt/lib/x/\\134y rw - tmpfs none rw
35 27 254:0 /etc/hosts /etc/motd rw - ext4 /dev/vda rw
36 27 0:43 / /srv/other rw - tmpfs none rw
nonsense
";

    #[test]
    fn finds_what_is_mounted_upon_paths_of_the_root() {
        use Occupant::MountPoint;
        #[rustfmt::skip]
        check(27, "/", MACHINE, "", &[
            ("/dev", MountPoint), ("/etc/motd", MountPoint), ("/mnt/lib", MountPoint),
            ("/proc", MountPoint), ("/srv/a b", MountPoint), ("/srv/other", MountPoint),
            // Through the other place where a part of the same file-system is mounted.
            ("/var/lib/x/\\\\y", MountPoint),
        ]);
        check(27, "/srv", MACHINE, "", &[("/a b", MountPoint), ("/other", MountPoint)]);
        check(27, "/var", MACHINE, "", &[("/lib/x/\\\\y", MountPoint)]);
        check(27, "/va", MACHINE, "", &[]);
        check(30, "/srv/a b", MACHINE, "", &[("/in", MountPoint)]);
        check(31, "/srv/a b/in", MACHINE, "", &[]);
        check(33, "/mnt/lib", MACHINE, "", &[("/x/\\\\y", MountPoint)]);
    }

    #[test]
    fn works_where_the_mount_of_the_root_itself_is_out_of_sight() {
        // In a chroot whose top is no mount point, its own mount is not listed.
        let mountinfo = "50 27 0:21 / /proc rw - proc proc rw\n51 27 0:22 / /r/x rw - tmpfs t rw\n";
        check(
            27,
            "/",
            mountinfo,
            "",
            &[("/proc", Occupant::MountPoint), ("/r/x", Occupant::MountPoint)],
        );
        check(27, "/r", mountinfo, "", &[("/x", Occupant::MountPoint)]);
    }

    #[test]
    fn knows_subvolumes_and_mounts_over_the_root() {
        let mountinfo = "\
27 1 0:30 /@ / rw - btrfs /dev/vda rw,subvol=/@
28 27 0:30 /@home /home rw - btrfs /dev/vda rw,subvol=/@home
29 27 0:30 / /mnt rw - btrfs /dev/vda rw,subvol=/
30 29 0:31 / /mnt/@/opt/x rw - tmpfs none rw
31 27 0:32 / / rw - tmpfs none rw
";
        check(
            27,
            "/",
            mountinfo,
            "",
            &[
                ("/home", Occupant::MountPoint),
                ("/mnt", Occupant::MountPoint),
                ("/opt/x", Occupant::MountPoint),
            ],
        );
        check(28, "/home", mountinfo, "", &[]);
    }

    #[test]
    fn finds_swap_files_and_no_swap_devices() {
        let swaps = "\
/dev/sda2                               partition\t1048572\t0\t-2
/swap\\040file                           file\t4092\t0\t-3
/mnt/lib/swap                           file\t4092\t0\t-4
/srv/a\\040b/swap                        file\t4092\t0\t-5
/gone\\040(deleted)                      file\t4092\t0\t-6
";
        #[rustfmt::skip]
        check(27, "/", "27 1 254:0 / / rw - ext4 /dev/vda rw\n", swaps, &[
            ("/mnt/lib/swap", Occupant::SwapFile), ("/srv/a b/swap", Occupant::SwapFile),
            ("/swap file", Occupant::SwapFile),
        ]);
        check(
            30,
            "/srv/a b",
            MACHINE,
            swaps,
            &[("/in", Occupant::MountPoint), ("/swap", Occupant::SwapFile)],
        );
        check(
            27,
            "/var",
            MACHINE,
            swaps,
            &[("/lib/swap", Occupant::SwapFile), ("/lib/x/\\\\y", Occupant::MountPoint)],
        );
        check(31, "/srv/a b/in", MACHINE, swaps, &[]);
        check(27, "/", "", "", &[]);
    }

    #[test]
    fn undoes_escapes_and_leaves_what_is_none() {
        for (field, plain) in [
            ("a\\040b", "a b"),
            ("\\134\\011", "\\\t"),
            ("\\", "\\"),
            ("\\9", "\\9"),
            ("\\+12", "\\+12"),
        ] {
            assert_eq!(unescaped(field.as_bytes()), plain.as_bytes(), "{field}");
        }
    }
}
