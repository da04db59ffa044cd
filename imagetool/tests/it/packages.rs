//! Packages are read from what is added, shown, looked for and compared.

use std::path::PathBuf;
use std::process::Command;

use expect_test::expect;

use crate::command::Place;
use crate::tars::{Member, archive};

const STATUS: &[u8] = b"\
Package: libc6
Status: install ok installed
Installed-Size: 12977
Architecture: amd64
Version: 2.36-9+deb12u10

Package: openssl
Status: install ok installed
Installed-Size: 2290
Architecture: amd64
Version: 3.0.15-1~deb12u1

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1
";

fn newer() -> Vec<u8> {
    let text = String::from_utf8(STATUS.to_vec()).unwrap();
    let text = text.replace("3.0.15-1", "3.0.17-1").replace("Package: libc6", "Package: libc7");
    text.into_bytes()
}

/// `a`, `b` with newer packages upon it, and `rpm`, whose packages cannot be read.
fn images() -> Place {
    let place = Place::new();
    place.write("a.tar", archive([Member::file(b"var/lib/dpkg/status", STATUS)]));
    place.write("b.tar", archive([Member::file(b"var/lib/dpkg/status", &newer())]));
    place.write("rpm.tar", archive([Member::file(b"var/lib/rpm/Packages", b"Berkeley")]));
    for (words, said) in [
        (["add", "a", "a.tar", "-", "-"], ""),
        (["add-overlay", "b", "a", "b.tar", "="], ""),
        (
            ["add", "rpm", "rpm.tar", "-", "-"],
            "warning: the packages of the image are not listed: unsupported package database \
             /var/lib/rpm/Packages: supported are those of dpkg, apk, and rpm with SQLite\n",
        ),
    ] {
        let added = place.run(&words);
        assert!(added.ends_with("exit 0\n") && added.starts_with(said), "{added}");
    }
    place
}

#[test]
fn packages_are_shown_compared_and_found() {
    let place = images();
    let shown = place.run(&["show", "a"]);
    assert!(shown.contains("\nPackages:  2, 15.6 MB installed\n"), "{shown}");
    place.check(
        &["show", "a", "--packages"],
        expect![[r#"
            PACKAGE  VERSION            INSTALLED
            libc6    2.36-9+deb12u10      13.3 MB
            openssl  3.0.15-1~deb12u1      2.3 MB
            exit 0
        "#]],
    );
    place.check(
        &["show", "b", "--packages", "--format", "json"],
        expect![[r#"
            [
              {
                "name": "libc7",
                "version": "2.36-9+deb12u10",
                "size_bytes": "13288448"
              },
              {
                "name": "openssl",
                "version": "3.0.17-1~deb12u1",
                "size_bytes": "2344960"
              }
            ]
            exit 0
        "#]],
    );
    place.check(
        &["show", "rpm", "--packages"],
        expect![[r#"
            No packages are recorded for rpm.
            exit 0
        "#]],
    );
    place.check(
        &["diff", "a", "b", "--ignore", "tree"],
        expect![[r#"
            package removed: libc6 2.36-9+deb12u10
            package added: libc7 2.36-9+deb12u10
            package changed: openssl 3.0.15-1~deb12u1 to 3.0.17-1~deb12u1
            a to b: 0 added, 0 removed, 0 changed; different: packages.
            exit 3
        "#]],
    );
    let found = |words: &[&str]| {
        let said = place.run(&[&["list", "--format", "json"], words].concat());
        let end = said.rfind(']').unwrap_or_else(|| panic!("{said}"));
        let list: serde_json::Value = serde_json::from_str(&said[..=end]).unwrap();
        let line = |image: &serde_json::Value| {
            let packages = image["packages"].as_array().cloned().unwrap_or_default();
            let words: Vec<&str> =
                packages.iter().map(|one| one["name"].as_str().unwrap()).collect();
            format!("{} {}", image["name"].as_str().unwrap(), words.join(","))
        };
        list.as_array().unwrap().iter().map(line).collect::<Vec<_>>()
    };
    assert_eq!(found(&[]), ["a ", "b ", "rpm "]);
    assert_eq!(found(&["--package", "openssl"]), ["a openssl", "b openssl"]);
    assert_eq!(found(&["--package", "openssl=3.0.17*"]), ["b openssl"]);
    let either = ["--package", "libc6", "--package", "openssl=3.0.17*"];
    assert_eq!(found(&either), ["a libc6", "b openssl"]);
    assert_eq!(found(&["--package", "*", "b"]), ["b libc7,openssl"]);
    assert_eq!(found(&["--package", "open"]), Vec::<String>::new());
    let table = place.run(&["list", "--package", "openssl=3.0.17*"]);
    assert!(table.lines().next().unwrap().ends_with("PACKAGES"), "{table}");
    assert!(table.contains("  openssl 3.0.17-1~deb12u1\n"), "{table}");
}

#[test]
fn the_packages_of_a_debian_are_those_that_dpkg_tells() {
    let Some(trees) = std::env::var_os("DEBIAN_TREES").map(PathBuf::from) else {
        eprintln!("skipped: DEBIAN_TREES is not set; `.ci/debian-trees DIR` makes the trees");
        return;
    };
    let tree = trees.join("systemd");
    let place = Place::new();
    let added = place.run(&["add", "debian", tree.to_str().unwrap(), "-", "-"]);
    assert!(added.ends_with("exit 0\n"), "{added}");
    let said = place.run(&["show", "debian", "--packages", "--format", "json"]);
    let list: serde_json::Value =
        serde_json::from_str(said.strip_suffix("exit 0\n").unwrap()).unwrap();
    let got: Vec<String> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            let word = |key: &str| one[key].as_str().unwrap().to_owned();
            format!("{} {} {}", word("name"), word("version"), word("size_bytes"))
        })
        .collect();
    let told = Command::new("dpkg-query")
        .arg(format!("--admindir={}", tree.join("var/lib/dpkg").display()))
        .args(["-W", "-f", "${db:Status-Status} ${Package} ${Version} ${Installed-Size}\n"])
        .output()
        .expect("dpkg-query can be run: it is part of Debian");
    let told = String::from_utf8(told.stdout).unwrap();
    let mut want: Vec<String> = told
        .lines()
        .filter_map(|line| {
            let (rest, kib) = line.strip_prefix("installed ")?.rsplit_once(' ')?;
            Some(format!("{rest} {}", kib.parse::<u64>().unwrap_or(0) * 1_024))
        })
        .collect();
    want.sort_by(|left, right| left.split(' ').cmp(right.split(' ')));
    assert!(want.len() > 80, "{want:?}");
    assert_eq!(got, want);
}

/// The database of an rpm with so many packages, as SQLite itself writes it.
fn rpm_database(place: &Place, count: usize, page_bytes: usize) -> Vec<u8> {
    let path = place.path(&format!("rpmdb-{count}-{page_bytes}"));
    let made = Command::new("python3")
        .args(["-c", include_str!("expected/rpmdb.py")])
        .arg(&path)
        .args([count.to_string(), page_bytes.to_string()])
        .output()
        .expect("python3 can be run: install it");
    assert!(made.status.success(), "{made:?}");
    std::fs::read(path).unwrap()
}

#[test]
fn the_packages_of_an_rpm_are_read() {
    let place = Place::new();
    for (count, page_bytes) in [(0, 4_096), (300, 512), (1_500, 4_096), (100, 65_536)] {
        let database = rpm_database(&place, count, page_bytes);
        let member = Member::file(b"usr/lib/sysimage/rpm/rpmdb.sqlite", &database);
        place.write("rpm.tar", archive([member]));
        let name = format!("rpm/{count}-{page_bytes}");
        let added = place.run(&["add", &name, "rpm.tar", "-", "-"]);
        assert!(added.starts_with("Added "), "{added}");
        let said = place.run(&["show", &name, "--packages", "--format", "json"]);
        let said = said.strip_suffix("exit 0\n").unwrap();
        let list: Vec<serde_json::Value> = serde_json::from_str(said).unwrap();
        let got: Vec<String> = list
            .iter()
            .map(|one| {
                let word = |key: &str| one[key].as_str().unwrap();
                format!("{} {} {}", word("name"), word("version"), word("size_bytes"))
            })
            .collect();
        // The third of all rows was removed, and the key is no package.
        let mut want: Vec<String> = (0..count)
            .filter(|number| *number != 2)
            .map(|number| {
                let epoch = if number % 10 == 0 { "2:" } else { "" };
                format!("package-{number} {epoch}1.{number}-3.fc40 {}", 1_000 + number)
            })
            .collect();
        want.push("noarch 1-1 5".to_owned());
        want.extend((count > 0).then(|| "glibc:i686 2.39-6.fc40 7".to_owned()));
        want.sort();
        assert_eq!(got, want, "{count} {page_bytes}");
    }
}

#[test]
fn a_hostile_database_of_an_rpm_is_refused_or_gives_nonsense_and_ends() {
    let place = Place::new();
    let database = rpm_database(&place, 40, 512);
    let mut random = 88_172_645_463_325_252_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    let part = imagetool::packages::DatabaseFile::of_rpm(&database);
    let mut refused = 0;
    for round in 0..3_000 {
        let mut hostile = database.clone();
        if round % 3 == 0 {
            hostile.truncate(next(database.len()));
        }
        // Mostly where the numbers of pages and the lengths are.
        for _ in 0..=next(4) {
            let page = next(hostile.len() / 512 + 1) * 512;
            let at = page + next(if round % 2 == 0 { 16 } else { 512 });
            if let Some(byte) = hostile.get_mut(at) {
                *byte = [0, 1, 0x7f, 0x80, 0xff, next(256) as u8][next(6)];
            }
        }
        let read = imagetool::packages::packages([(&part, hostile.as_slice())]);
        refused += usize::from(read.is_err());
    }
    assert!(refused > 500, "{refused}");
}
