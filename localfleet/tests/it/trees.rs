//! Trees for the tests: small, but with every kind of entry.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

/// `security.capability` of `cap_net_raw+ep`, version 2 (capabilities(7)).
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Fills `root` with a small tree of the given version. Versions differ in content, in kinds and
/// in hard links.
pub fn make(root: &Path, version: u32) {
    fs::create_dir_all(root).unwrap();
    for directory in ["etc", "usr/bin", "usr/lib", "var/log", "srv/data", "dev", "boot", "empty"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    let file = |path: &str, content: &str| fs::write(root.join(path), content).unwrap();
    for number in 0..200 {
        file(&format!("usr/lib/module-{number}"), &format!("module {number}\n"));
        file(
            &format!("etc/setting-{number}"),
            &format!("{number} of {}\n", version * (number % 4)),
        );
    }
    file("usr/lib/libx.so.1", &format!("library of version {version}"));
    file("usr/bin/tool", &format!("tool of version {version}"));
    mode(root, "usr/bin/tool", 0o755);
    file("usr/bin/su", "a program with a set-id bit");
    chown(root.join("usr/bin/su"), Some(0), Some(7)).unwrap();
    mode(root, "usr/bin/su", 0o4755);
    file("usr/bin/ping", "a program with a capability");
    xattr::set(root.join("usr/bin/ping"), "security.capability", &CAPABILITY).unwrap();
    file("boot/vmlinuz", &format!("kernel {version}"));
    file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
    xattr::set(root.join("etc/passwd"), "user.origin", b"image").unwrap();
    mknod(&root.join("dev/null"), SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3))
        .unwrap();
    nix::unistd::mkfifo(&root.join("dev/pipe"), Mode::from_bits_truncate(0o600)).unwrap();
    symlink("usr/bin", root.join("bin")).unwrap();
    let odd = OsStr::from_bytes(b"etc/odd-\xff-name \n");
    fs::write(root.join(odd), "a name that is no text\n").unwrap();
    file("etc/one", "shared by several names\n");
    fs::hard_link(root.join("etc/one"), root.join("usr/two")).unwrap();
    match version {
        1 => {
            fs::hard_link(root.join("etc/one"), root.join("three")).unwrap();
            fs::create_dir_all(root.join("lib/deep/er")).unwrap();
            file("lib/deep/er/file", "a directory that becomes a symlink\n");
            symlink("etc", root.join("settings")).unwrap();
            file("opt", "a file that becomes a directory\n");
        }
        _ => {
            file("three", "on its own now\n");
            symlink("usr/lib", root.join("lib")).unwrap();
            fs::create_dir_all(root.join("settings/real")).unwrap();
            file("settings/real/file", "a symlink that became a directory\n");
            fs::create_dir_all(root.join("opt/tool")).unwrap();
            file("opt/tool/run", "new\n");
            fs::remove_dir(root.join("empty")).unwrap();
            mode(root, "etc/passwd", 0o640);
        }
    }
}

fn mode(root: &Path, path: &str, mode: u32) {
    fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).unwrap();
}
