//! Archives of images: what comes out is what went in, for us and for other tools.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use expect_test::{expect, expect_file};
use model::object::Algorithm;

use crate::command::{Place, is_root, rsync_finds_no_difference};
use crate::tars::{Member, archive};
use crate::trees::{coarse, fill, read, shown, tool};

/// Adds to the tree that `fill` makes what is hard to put into an archive.
pub fn add_hard_cases(root: &Path) {
    let long = "a long name ".repeat(20);
    let deep = root.join(&long).join(&long).join(&long);
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("file"), "deep").unwrap();
    fs::hard_link(deep.join("file"), root.join("link to a long name")).unwrap();
    let target = OsStr::from_bytes(&[0xe9; 3_000]);
    std::os::unix::fs::symlink(target, root.join("odd target")).unwrap();
    fs::write(root.join(OsStr::from_bytes(&[0xe9; 150])), "an odd long name").unwrap();
    fs::write(root.join("x".repeat(98)), "just fits").unwrap();
    fs::write(root.join("x".repeat(99)), "just does not").unwrap();
    for (name, time) in [
        // Whole seconds: libarchive puts fractions of times before 1970 at the wrong side.
        ("old", SystemTime::UNIX_EPOCH - Duration::from_secs(5)),
        ("new", SystemTime::UNIX_EPOCH + Duration::from_secs(0o77_777_777_777 + 5)),
        ("exact", SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 123_456_789)),
    ] {
        fs::write(root.join(name), name).unwrap();
        File::options().write(true).open(root.join(name)).unwrap().set_modified(time).unwrap();
    }
    xattr::set(root.join("new"), "user.odd=100%", b"\0=\n").unwrap();
    xattr::set(root.join("new"), "user.empty", b"").unwrap();
    if !is_root() {
        return;
    }
    std::os::unix::fs::chown(root.join("old"), Some(3_000_000), Some(u32::MAX - 1)).unwrap();
    tool(root, &["setcap", "cap_net_raw+ep", "usr/bin/tool"]);
    tool(root, &["setfacl", "-m", "u:7:rwx,g:70000:r,d:u:8:rx", "etc/conf.d"]);
    let kinds = [
        ("minor-300", nix::sys::stat::SFlag::S_IFCHR, 5, 300),
        ("minor-65536", nix::sys::stat::SFlag::S_IFBLK, 259, 65_536),
        ("minor-last", nix::sys::stat::SFlag::S_IFCHR, 4_095, 1_048_575),
    ];
    for (name, kind, major, minor) in kinds {
        let device = nix::sys::stat::makedev(major, minor);
        nix::sys::stat::mknod(&root.join(name), kind, nix::sys::stat::Mode::S_IRUSR, device)
            .unwrap();
    }
}

/// A place with an image `t/1` of the directory that is returned.
fn filled() -> (Place, PathBuf) {
    let place = Place::new();
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    fill(&tree);
    add_hard_cases(&tree);
    assert!(place.run(&["add", "t/1", "tree", "-", "-"]).ends_with("exit 0\n"));
    (place, tree)
}

#[test]
fn an_archive_of_an_image_is_the_image_and_always_the_same() {
    let (place, tree) = filled();
    let root = read(&tree).digest().to_string();
    let said = place.run(&["tar", "t/1", "-o", "plain.tar"]);
    let entries = read(&tree).root().totals().entries;
    assert!(said.starts_with(&format!("Wrote t/1: {entries} entries, ")), "{said}");
    assert!(said.ends_with("to plain.tar.\nexit 0\n"), "{said}");
    let bytes = fs::read(place.path("plain.tar")).unwrap();
    // The same of an image that was made of the archive.
    place.run(&["add", "t/2", "plain.tar", "-", "-"]);
    place.run(&["tar", "t/2", "-o", "again.tar"]);
    assert!(fs::read(place.path("again.tar")).unwrap() == bytes);
    let json = place.run(&["--format", "json", "tar", "t/2", "-o", "again.tar"]);
    assert!(json.contains(&format!("\"root\": \"{root}\"")), "{json}");
    let direct = Command::new(env!("CARGO_BIN_EXE_imagetool"))
        .args(["--insecure", "--imageserver", &place.server.address.to_string(), "tar", "t/1"])
        .output()
        .unwrap();
    assert!(direct.stdout == bytes);
    for (index, name) in ["a.tgz", "a.tar.zst", "a.tar.xz", "a.tar.bz2"].into_iter().enumerate() {
        place.run(&["tar", "t/1", "-o", name]);
        let how = ["gzip", "zstd", "xz", "bzip2"][index];
        place.run(&["tar", "t/1", "-o", how, "--compress", how]);
        assert!(fs::read(place.path(name)).unwrap() == fs::read(place.path(how)).unwrap());
        tool(&place.path(""), &[how, "-q", "-t", name]);
        let added = place.run(&["--format", "json", "add", how, name, "-", "-"]);
        assert!(added.contains(&format!("\"root\": \"{root}\"")), "{name}: {added}");
    }
    let left: Vec<_> = fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap()).collect();
    assert!(left.iter().all(|entry| !entry.path().display().to_string().contains("incomplete")));
}

#[test]
fn other_tools_make_the_tree_of_an_archive() {
    assert!(is_root(), "owners and devices are made only by root");
    let (place, tree) = filled();
    place.run(&["tar", "t/1", "-o", "a.tar"]);
    let want = shown(&read(&tree));
    let all: [&[&str]; 4] = [
        &["tar", "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf", "../a.tar"],
        &["tar", "--acls", "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf", "../a.tar"],
        &["bsdtar", "--numeric-owner", "-xpf", "../a.tar"],
        &["bsdtar", "--acls", "--xattrs", "--numeric-owner", "-xpf", "../a.tar"],
    ];
    for (index, command) in all.into_iter().enumerate() {
        let copy = place.path(&format!("copy{index}"));
        fs::create_dir(&copy).unwrap();
        tool(&copy, command);
        let got = shown(&read(&copy));
        // Libarchive does not decode the names of attributes as GNU tar encodes them.
        let got = got.replace("user.odd%3D100%25", "user.odd\\x3d100%");
        assert_eq!(got, want, "{command:?}");
        if index < 2 {
            rsync_finds_no_difference(&tree, &copy);
        }
    }
    // Python knows no extended attributes, but all the rest.
    let copy = place.path("python");
    fs::create_dir(&copy).unwrap();
    // Later versions refuse devices unless they are told not to.
    let program = "import tarfile\n\
        trust = getattr(tarfile, 'fully_trusted_filter', lambda member, path: member)\n\
        tarfile.TarFile.extraction_filter = staticmethod(trust)\n\
        tarfile.open('../a.tar').extractall('.', numeric_owner=True)";
    tool(&copy, &["python3", "-c", program]);
    // It keeps times as floating-point numbers, and so only the seconds are exact.
    assert_eq!(coarse(&read(&copy)), coarse(&read(&tree)));
}

#[test]
fn computed_files_are_left_out_of_archives() {
    let place = Place::new();
    place.write("a.tar", archive([Member::file(b"a", b"1"), Member::file(b"b", b"2")]));
    place.write("computed", "/b files.example:1\n");
    place.run(&["add", "a", "a.tar", "-", "-", "--computed", "computed"]);
    place.check(
        &["tar", "a", "-o", "out.tar"],
        expect![[r#"
            warning: 1 computed files are left out: their content is made for each machine: /b
            Wrote a: 2 entries, 1 B to out.tar.
            exit 3
        "#]],
    );
    assert_eq!(tool(&place.path(""), &["tar", "-tf", "out.tar"]), b"./\n./a\n");
}

#[test]
fn an_archive_that_fails_leaves_what_was_there() {
    let place = Place::new();
    place.tree("tree");
    place.run(&["add", "a", "tree", "-", "-"]);
    place.write("out.tar", "before");
    let id = Algorithm::Blake3.digest(b"odd");
    let honest = place.server.state().objects[&id].clone();
    place.server.state().objects.insert(id, Bytes::from_static(b"bad"));
    let lying = place.run(&["tar", "a", "-o", "out.tar"]);
    place.server.state().objects.insert(id, honest);
    place.server.state().withheld.insert(id);
    let absent = place.run(&["tar", "a", "-o", "out.tar"]);
    place.server.state().withheld.clear();
    let nowhere = place.run(&["tar", "a", "-o", "missing/out.tar"]);
    let full = place.run(&["tar", "a", "-o", "/dev/full"]);
    let unknown = place.run(&["tar", "b", "-o", "out.tar"]);
    expect_file!["expected/failed-archives.txt"]
        .assert_eq(&[lying, absent, nowhere, full, unknown].join("\n"));
    assert_eq!(fs::read(place.path("out.tar")).unwrap(), b"before");
    assert_eq!(fs::read_dir(place.path("")).unwrap().count(), 2);
}

#[test]
fn an_interrupted_archive_leaves_nothing_behind() {
    let place = Place::new();
    place.tree("tree");
    place.run(&["add", "a", "tree", "-", "-"]);
    place.server.state().stalled.insert(Algorithm::Blake3.digest(b"odd"));
    let entries = || fs::read_dir(place.path("")).unwrap().count();
    let said = place.interrupt(&["tar", "a", "-o", "out.tar"], b"", || entries() == 2);
    assert_eq!(said, "error: interrupted\nexit 1\n");
    assert_eq!(entries(), 1);
}

#[test]
fn a_debian_system_goes_round_and_stays_the_same() {
    let Some(trees) = std::env::var_os("DEBIAN_TREES").map(PathBuf::from) else {
        eprintln!("skipped: DEBIAN_TREES is not set; `.ci/debian-trees DIR` makes the trees");
        return;
    };
    let debian = trees.join("minbase");
    let place = Place::new();
    let run = |words: &[&str]| {
        let said = place.run(words);
        assert!(said.ends_with("exit 0\n"), "{words:?}: {said}");
    };
    let bytes = |name: &str| fs::read(place.path(name)).unwrap();
    let tree = ["tar", "--format=posix", "--acls", "--xattrs", "--xattrs-include=*"];
    let debian = debian.to_str().unwrap();
    let flags = ["--numeric-owner", "-C", debian, "-cf", "0.tar", "."];
    tool(&place.path(""), &[&tree[..], &flags].concat());
    run(&["add", "1", "0.tar", "-", "-"]);
    run(&["tar", "1", "-o", "1.tar"]);
    run(&["add", "2", "1.tar", "-", "-"]);
    run(&["tar", "2", "-o", "2.tar"]);
    assert!(bytes("1.tar") == bytes("2.tar"));
    run(&["get", "2", "copy"]);
    let copy = place.path("copy");
    assert_eq!(shown(&read(&copy)), shown(&read(Path::new(debian))));
    rsync_finds_no_difference(Path::new(debian), &copy);
}
