//! Archives by other tools, in each of their formats, hold the tree that they were made of.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use imagetool::archive::Archive;
use imagetool::output::progress::Meter;
use model::object::Algorithm;
use model::tree::Tree;

use crate::command::{Place, is_root};
use crate::tar_out::add_hard_cases;
use crate::trees::{coarse, fill, read, shown, tool};

fn archived(path: &Path) -> Tree {
    let read = Archive::open(path).and_then(|mut it| it.read(Algorithm::Blake3, &Meter::hidden()));
    let read = read.unwrap_or_else(|error| panic!("{}", model::display::error_chain(&error)));
    read.finish().unwrap()
}

/// A directory to work in, and in it one called `tree` with entries of every kind.
fn filled(hard: bool) -> (tempfile::TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("tree");
    fs::create_dir(&root).unwrap();
    fill(&root);
    if hard {
        add_hard_cases(&root);
    }
    let file = File::create(root.join("holes")).unwrap();
    file.set_len(3_000_000).unwrap();
    for at in 0..8 {
        file.write_all_at(b"data", at * 300_000 + 7).unwrap();
    }
    (place, root)
}

#[test]
fn pax_archives_hold_everything() {
    let (place, root) = filled(true);
    let want = shown(&read(&root));
    let tar = ["tar", "--format=posix", "--acls", "--xattrs", "--xattrs-include=*"];
    let ways: [&[&str]; 9] = [
        &[],
        &["--sparse"],
        &["--sparse", "--sparse-version=0.0"],
        &["--sparse", "--sparse-version=0.1"],
        &["--sparse", "--sparse-version=1.0", "-z"],
        &["--zstd"],
        &["-J"],
        &["-j"],
        &["--label=volume"],
    ];
    let archive = place.path().join("a.tar");
    for way in ways {
        tool(&root, &[&tar, way, &["-cf", "../a.tar", "."]].concat());
        assert_eq!(shown(&archived(&archive)), want, "{way:?}");
    }
    // Records for all entries, which a second of them takes back for one.
    let global = ["--pax-option=globexthdr.name=g,gid=77,comment=of all"];
    tool(&root, &[&tar, &global[..], &["-cf", "../a.tar", "."]].concat());
    assert!(fs::read(&archive).unwrap().windows(7).any(|bytes| bytes == b" gid=77"));
    assert!(shown(&archived(&archive)).lines().next().unwrap().starts_with("d 755 0:77 "));
    // Only with root can libarchive's `user:NAME:...` be told from that of another machine.
    tool(&root, &["bsdtar", "--format=pax", "--acls", "--xattrs", "-cf", "../a.tar", "."]);
    assert_eq!(shown(&archived(&archive)), want, "bsdtar");
}

#[test]
fn other_formats_hold_what_they_can() {
    let (place, root) = filled(false);
    // Libarchive takes the bits of the group from the list, even where it writes no lists.
    let _ = xattr::remove(root.join("etc/empty"), "system.posix_acl_access");
    let want = coarse(&read(&root));
    let archive = place.path().join("a.tar");
    let python = |format: &str| {
        format!(
            "import tarfile; t = tarfile.open('../a.tar', 'w:gz', format=tarfile.{format}_FORMAT); \
             t.add('.'); t.close()"
        )
    };
    let (pax, gnu, ustar) = (python("PAX"), python("GNU"), python("USTAR"));
    let ways: [&[&str]; 12] = [
        &["tar", "--format=gnu", "-cf", "../a.tar", "."],
        &["tar", "--format=gnu", "--sparse", "-cf", "../a.tar", "."],
        &["tar", "--format=oldgnu", "--sparse", "-cf", "../a.tar", "."],
        &["tar", "--format=ustar", "-cf", "../a.tar", "."],
        &["bsdtar", "--format=gnutar", "-cf", "../a.tar", "."],
        &["bsdtar", "--format=ustar", "-cf", "../a.tar", "."],
        &["bsdtar", "--format=pax", "--zstd", "-cf", "../a.tar", "."],
        &["bsdtar", "--format=paxr", "-cf", "../a.tar", "."],
        &["bsdtar", "-jcf", "../a.tar", "."],
        &["python3", "-c", &pax],
        &["python3", "-c", &gnu],
        &["python3", "-c", &ustar],
    ];
    for way in ways {
        tool(&root, way);
        assert_eq!(coarse(&archived(&archive)), want, "{way:?}");
    }
    // Names as long as they come are held by GNU's own headers too.
    let long = root.join("n".repeat(200)).join("m".repeat(255));
    fs::create_dir_all(&long).unwrap();
    std::os::unix::fs::symlink("t".repeat(1_000), long.join("link")).unwrap();
    let want = coarse(&read(&root));
    for way in [ways[0], ways[4], ways[10]] {
        tool(&root, way);
        assert_eq!(coarse(&archived(&archive)), want, "{way:?}");
    }
}

#[test]
fn devices_have_any_numbers_in_all_formats() {
    assert!(is_root(), "devices are made only by root");
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("tree");
    fs::create_dir(&root).unwrap();
    for (index, (major, minor)) in [
        (1, 3),
        (8, 255),
        (8, 256),
        (259, 65_535),
        (259, 65_536),
        (511, 262_144),
        (4_095, 1_048_575),
    ]
    .into_iter()
    .enumerate()
    {
        use nix::sys::stat::{Mode, SFlag, makedev, mknod};
        let kind = if index % 2 == 0 { SFlag::S_IFCHR } else { SFlag::S_IFBLK };
        let path = root.join(index.to_string());
        mknod(&path, kind, Mode::S_IRUSR, makedev(major, minor)).unwrap();
    }
    let want = coarse(&read(&root));
    let python = "import tarfile; t = tarfile.open('../a.tar', 'w'); t.add('.'); t.close()";
    let ways: [&[&str]; 5] = [
        &["tar", "--format=gnu", "-cf", "../a.tar", "."],
        &["tar", "--format=ustar", "-cf", "../a.tar", "."],
        &["tar", "--format=posix", "-cf", "../a.tar", "."],
        &["bsdtar", "--format=pax", "-cf", "../a.tar", "."],
        &["python3", "-c", python],
    ];
    for way in ways {
        tool(&root, way);
        assert_eq!(coarse(&archived(&place.path().join("a.tar"))), want, "{way:?}");
    }
}

#[test]
fn sockets_and_directories_that_are_not_named_are_no_hindrance() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("tree");
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::write(root.join("a/b/c"), "1").unwrap();
    // Longer than the name of a socket may be.
    let _socket = UnixListener::bind(place.path().join("socket")).unwrap();
    fs::rename(place.path().join("socket"), root.join("socket")).unwrap();
    for way in [&["tar", "-cf", "../a.tar", "."][..], &["bsdtar", "-cf", "../a.tar", "."]] {
        tool(&root, way);
        let paths = archived(&place.path().join("a.tar"));
        let paths: Vec<String> = paths.nodes().map(|(path, _)| path.to_string()).collect();
        assert_eq!(paths, ["/", "/a", "/a/b", "/a/b/c"], "{way:?}");
    }
    tool(&root, &["tar", "-cf", "../a.tar", "a/b/c"]);
    let text = shown(&archived(&place.path().join("a.tar")));
    assert!(text.starts_with("d 755 0:0 /\nd 755 0:0 /a\nd 755 0:0 /a/b\nf 644 "), "{text}");
}

#[test]
fn an_archive_of_hard_linked_symlinks_is_that_of_the_directory() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("tree");
    fs::create_dir(&root).unwrap();
    std::os::unix::fs::symlink("nowhere", root.join("one")).unwrap();
    fs::hard_link(root.join("one"), root.join("two")).unwrap();
    tool(&root, &["tar", "-cf", "../a.tar", "."]);
    assert_eq!(shown(&archived(&place.path().join("a.tar"))), shown(&read(&root)));
}

#[test]
fn what_expands_without_end_is_refused_where_it_does() {
    let place = Place::new();
    let root = place.path("tree");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("a"), "small").unwrap();
    let file = File::create(root.join("bomb")).unwrap();
    file.set_len(2 << 30).unwrap();
    tool(&root, &["tar", "--zstd", "-cf", "../packed.tar", "a", "bomb"]);
    tool(&root, &["tar", "--sparse", "-cf", "../sparse.tar", "a", "bomb"]);
    for archive in ["packed.tar", "sparse.tar"] {
        let said = place.run(&["add", "x", archive, "-", "-"]);
        let want = "the archive is refused at byte ";
        assert!(said.starts_with(&format!("error: {archive}: {want}")), "{said}");
        let end = ", after bomb: it expands to more than 200 times its size\n\
                   hint: nothing was uploaded; if that is meant, unpack it and give \
                   the directory\nexit 1\n";
        assert!(said.ends_with(end), "{said}");
    }
    assert_eq!(place.server.state().received, 0);
}

#[test]
fn an_archive_by_mmdebstrap_is_the_system_that_it_makes() {
    let Some(trees) = std::env::var_os("DEBIAN_TREES").map(PathBuf::from) else {
        eprintln!("skipped: DEBIAN_TREES is not set; `.ci/debian-trees DIR` makes the archive");
        return;
    };
    let archive = trees.join("mmdebstrap.tar");
    let unpacked = tempfile::tempdir().unwrap();
    let archive_name = archive.to_str().unwrap();
    let flags = ["--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf", archive_name];
    tool(unpacked.path(), &[&["tar"], &flags[..]].concat());
    // Without the time zone of this machine, and all else that is of the unpacking.
    assert_eq!(shown(&archived(&archive)), shown(&read(unpacked.path())));
}
