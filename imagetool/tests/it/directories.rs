//! Directories are read as they are, and give the same tree as an archive of them.

use std::fs::{self, File};
use std::os::unix::net::UnixListener;

use imagetool::archive::Archive;
use imagetool::image_source::directory;
use imagetool::output::progress::Meter;
use model::filter::Filter;
use model::object::Algorithm;

use crate::trees::{fill, gnu_tar, read, shown};

#[test]
fn an_archive_of_a_directory_gives_the_same_tree() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("root");
    fs::create_dir(&root).unwrap();
    fill(&root);
    let file = File::create(root.join("holes")).unwrap();
    file.set_len(3_000_000).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"in the middle", 1_500_000).unwrap();
    let want = shown(&read(&root));
    let all = ["--format=pax", "--acls", "--xattrs", "--xattrs-include=*"];
    let versions: [&[&str]; 4] =
        [&[], &["-S"], &["-S", "--sparse-version=0.0"], &["-S", "--sparse-version=0.1"]];
    for flags in versions {
        let archive = place.path().join("archive.tar");
        gnu_tar(&root, &archive, &[&all, flags].concat());
        let builder = Archive::open(&archive)
            .and_then(|mut archive| archive.read(Algorithm::Blake3, &Meter::hidden()));
        assert_eq!(shown(&builder.unwrap().finish().unwrap()), want, "{flags:?}");
    }
}

#[test]
fn kept_paths_sockets_and_the_state_of_subd_are_left_out() {
    let place = tempfile::tempdir().unwrap();
    for directory in ["var/log", "home/user", ".subd/objects"] {
        fs::create_dir_all(place.path().join(directory)).unwrap();
    }
    for file in ["var/log/syslog", "home/user/notes", "kept", ".subd/x"] {
        fs::write(place.path().join(file), file).unwrap();
    }
    // A group of hard links loses the path that would have carried it.
    fs::write(place.path().join("home/first"), "content").unwrap();
    fs::hard_link(place.path().join("home/first"), place.path().join("second")).unwrap();
    let _socket = UnixListener::bind(place.path().join("var/socket")).unwrap();
    let filter = Filter::new(["/var/log/.*", "/home", "/kept$"]).unwrap();
    let found =
        directory::read(place.path(), Algorithm::Blake3, Some(&filter), &Meter::hidden()).unwrap();
    let warnings = [
        "/.subd is left out: it belongs to the subd of each machine",
        "1 sockets are left out: /var/socket",
    ];
    assert_eq!(found.warnings, warnings);
    let tree = found.builder.finish().unwrap();
    let paths: Vec<String> = tree.nodes().map(|(path, _)| path.to_string()).collect();
    assert_eq!(paths, ["/", "/second", "/var", "/var/log"]);
}

#[test]
fn files_with_large_holes_are_named() {
    let place = tempfile::tempdir().unwrap();
    for (name, length) in [("large", 20 << 20), ("small", 1 << 20)] {
        fs::File::create(place.path().join(name)).unwrap().set_len(length).unwrap();
    }
    fs::write(place.path().join("full"), vec![1; 20 << 20]).unwrap();
    let found = directory::read(place.path(), Algorithm::Blake3, None, &Meter::hidden()).unwrap();
    let expected =
        "1 files have large holes, which are zeros in the image and take space on machines: /large";
    assert_eq!(found.warnings, [expected]);
}

#[test]
fn what_cannot_be_read_is_named() {
    let missing = std::path::Path::new("/nowhere/at/all");
    let error = directory::read(missing, Algorithm::Blake3, None, &Meter::hidden()).err().unwrap();
    assert_eq!(
        model::display::error_chain(&error),
        "cannot read `/nowhere/at/all`: No such file or directory (os error 2)"
    );
}
