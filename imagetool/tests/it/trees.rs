//! Makes a directory with entries of every kind, for tests.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use imagetool::image_source::directory;
use imagetool::output::progress::Meter;
use model::object::Algorithm;
use model::tree::{Tree, text};

/// Fills the empty directory `root`. Devices and owners only as root.
pub fn fill(root: &Path) {
    for directory in ["etc/conf.d", "usr/bin", "empty"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\n").unwrap();
    fs::write(root.join("etc/empty"), "").unwrap();
    fs::write(root.join("etc/conf.d/same"), "").unwrap();
    fs::write(root.join("usr/bin/tool"), vec![b'#'; 700_000]).unwrap();
    fs::write(root.join(OsStr::from_bytes(b"usr/odd\xff\nname \\")), "odd").unwrap();
    fs::hard_link(root.join("usr/bin/tool"), root.join("usr/again")).unwrap();
    fs::hard_link(root.join("usr/bin/tool"), root.join("usr/bin/zz")).unwrap();
    symlink("usr/bin", root.join("bin")).unwrap();
    symlink("/nowhere/at all", root.join("etc/dangling")).unwrap();
    let mode = |path: &str, mode| {
        fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    mode("usr/bin/tool", 0o755);
    mode("etc/passwd", 0o600);
    mode("etc/conf.d", 0o1777);
    nix::unistd::mkfifo(&root.join("etc/pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let _ = xattr::set(root.join("etc/passwd"), "user.origin", b"a\n\0b");
    let _ = xattr::set(root.join("etc/conf.d"), "user.directory", b"yes");
    if nix::unistd::Uid::effective().is_root() {
        let owner = |path: &str, uid, gid| {
            std::os::unix::fs::lchown(root.join(path), Some(uid), Some(gid)).unwrap();
        };
        owner("etc/passwd", 7, 8);
        owner("bin", 12, 12);
        owner("etc/conf.d", 1, 2);
        owner("usr/bin/tool", 0, 42);
        mode("usr/bin/tool", 0o2755);
        let (kind, mode) = (nix::sys::stat::SFlag::S_IFCHR, nix::sys::stat::Mode::S_IRUSR);
        let device = nix::sys::stat::makedev(1, 3);
        nix::sys::stat::mknod(&root.join("etc/null"), kind, mode, device).unwrap();
        let list = b"\x02\0\0\0\x01\0\x06\0\xff\xff\xff\xff\x02\0\x04\0\x21\0\0\0\x04\0\x04\0\
                     \xff\xff\xff\xff\x10\0\x06\0\xff\xff\xff\xff\x20\0\0\0\xff\xff\xff\xff";
        let _ = xattr::set(root.join("etc/empty"), "system.posix_acl_access", list);
    }
}

/// Reads a directory without a filter.
pub fn read(root: &Path) -> Tree {
    let found = directory::read(root, Algorithm::Blake3, None, &Meter::hidden()).unwrap();
    found.builder.finish().unwrap()
}

/// The text of a tree.
pub fn shown(tree: &Tree) -> String {
    text::to_text(tree)
}

/// What any format of archives can hold: no attributes, and whole seconds.
pub fn coarse(tree: &Tree) -> String {
    let is_attribute =
        |word: &str| ["user.", "system.", "security."].iter().any(|space| word.starts_with(space));
    let word = |word: &str| match word.split_once('.') {
        Some((seconds, part))
            if part.len() == 9 && part.bytes().all(|byte| byte.is_ascii_digit()) =>
        {
            seconds.to_owned()
        }
        _ => word.to_owned(),
    };
    let line = |line: &str| {
        let words = line.split(' ').filter(|word| !is_attribute(word)).map(word);
        words.collect::<Vec<_>>().join(" ") + "\n"
    };
    shown(tree).lines().map(line).collect()
}

/// Makes an archive of `root` with GNU tar.
pub fn gnu_tar(root: &Path, archive: &Path, flags: &[&str]) {
    let status = Command::new("tar")
        .args(flags)
        .args(["--numeric-owner", "-cf"])
        .arg(archive)
        .arg("-C")
        .arg(root)
        .arg(".")
        .status()
        .unwrap();
    assert!(status.success());
}

/// Runs a program of the tests, which must be there and succeed, and gives its output.
#[track_caller]
pub fn tool(directory: &Path, words: &[&str]) -> Vec<u8> {
    let output = Command::new(words[0]).args(&words[1..]).current_dir(directory).output();
    let output = output.unwrap_or_else(|error| panic!("{words:?}: {error}: is it installed?"));
    assert!(output.status.success(), "{words:?}: {output:?}");
    output.stdout
}
