//! What `add` refuses and warns of, also on a real Debian tree if there is one.

use std::path::PathBuf;

use expect_test::{expect, expect_file};

use crate::command::Place;
use crate::tars::{Member, archive};

#[test]
fn an_image_that_no_machine_could_run_is_refused() {
    let place = Place::new();
    place.write("filter", "/tmp/.*\n");
    place.write("a.tar", archive([Member::file(b"root/etc/passwd", b"1")]));
    let refused = place.run(&["add", "a", "a.tar", "filter", "-"]);
    expect_file!["expected/required-paths.txt"].assert_eq(&refused);
    place.check(
        &["add", "b", "a.tar", "-", "-", "--required-paths", "etc"],
        expect![[r#"
        error: invalid value 'etc' for '--required-paths <PATHS>': path `etc` is not absolute

        For more information, try '--help'.
        exit 2
    "#]],
    );
}

#[test]
fn what_a_debian_would_take_from_machines_is_told() {
    let Some(trees) = std::env::var_os("DEBIAN_TREES") else {
        eprintln!("DEBIAN_TREES is not set: nothing was tried");
        return;
    };
    let tree = PathBuf::from(trees).join("systemd");
    let place = Place::new();
    place.write("filter", "/tmp/.*\n/var/log/.*\n");
    let added = place.run(&["add", "debian/1", tree.to_str().unwrap(), "filter", "-"]);
    let found: String = added
        .lines()
        .filter(|line| !line.starts_with("Added "))
        .map(|line| format!("{line}\n"))
        .collect();
    expect_file!["expected/debian-warnings.txt"].assert_eq(&found);
    // With the lines that were advised there is nothing left to be found.
    let advised: String = added
        .lines()
        .filter_map(|line| line.strip_prefix("  "))
        .map(|line| format!("{line}\n"))
        .collect();
    place.write("better", advised);
    let added = place.run(&["add", "debian/2", tree.to_str().unwrap(), "better", "-"]);
    assert!(added.starts_with("Added debian/2: "), "{added}");
    let differ = place.run(&["diff", "debian/1", "debian/2", "--ignore", "filter"]);
    let removed: Vec<&str> = differ
        .lines()
        .filter_map(|line| line.strip_prefix("removed ")?.split_once(':'))
        .map(|(path, _)| path)
        .collect();
    let ours = ["/etc/fstab", "/etc/hostname", "/etc/machine-id", "/var/lib/dbus/machine-id"];
    assert_eq!(removed, ours);
}

/// A system with one service, whose user has this number.
fn system(uid: &str) -> Vec<u8> {
    let passwd = format!("root:x:0:0::/root:/bin/sh\nredis:x:{uid}:{uid}::/:/bin/sh\n");
    let owner = uid.parse().unwrap();
    let unit = "[Service]\nExecStart=/usr/bin/redis\nReadWritePaths=/var/log/redis\n";
    archive([
        Member::file(b"etc/passwd", passwd.as_bytes()),
        Member::file(b"usr/lib/systemd/system/redis.service", unit.as_bytes()),
        Member::file(b"usr/bin/redis", b"1"),
        Member::directory(b"var/lib/redis").change(|header| header.set_uid(owner)),
        Member::directory(b"var/log/redis"),
    ])
}

#[test]
fn what_an_image_would_take_from_services_is_told() {
    let place = Place::new();
    let common = "/etc/[^p].*\n/var/log/.*\n";
    place.write("filter", common);
    place.write("better", format!("{common}/var/lib/redis/.*\n"));
    place.write("good", "/etc/[^p].*\n/var/log/[^/]*/.*\n/var/lib/redis/.*\n");
    place.write("1.tar", system("101"));
    place.write("2.tar", system("102"));
    let unit = place.path("root/usr/lib/systemd/system");
    std::fs::create_dir_all(&unit).unwrap();
    std::fs::create_dir(place.path("root/etc")).unwrap();
    place.write("root/etc/passwd", "redis:x:103:103::/:/bin/sh\n");
    std::fs::write(unit.join("redis.service"), "StateDirectory=other\n").unwrap();
    let steps: [&[&str]; 9] = [
        &["add", "redis/1", "1.tar", "filter", "-"],
        &["add", "redis/2", "2.tar", "good", "-"],
        &["diff", "redis/1", "redis/2", "--ignore", "owner,mtime,filter"],
        // Only what is new in B is told.
        &["diff", "redis/1", "redis/1"],
        &["diff", "redis/1", "file:2.tar", "--ignore", "owner,mtime"],
        &["diff", "redis/2", "redis/1", "--ignore", "owner,mtime,filter"],
        &["diff", "redis/2", "file:1.tar", "--ignore", "owner,mtime"],
        &["diff", "redis/2", "file:root", "--ignore", "owner,mtime"],
        &["add", "redis/3", "2.tar", "good", "-"],
    ];
    let told: String = steps
        .iter()
        .map(|step| format!("$ imagetool {}\n{}\n", step.join(" "), place.run(step)))
        .collect();
    expect_file!["expected/service-warnings.txt"].assert_eq(&told);
}

#[test]
fn an_interrupted_add_leaves_nothing_behind() {
    let place = Place::new();
    let all = archive([Member::file(b"large", &vec![b'x'; 4 << 20])]);
    // More than a pipe holds: most of it has been read when it is written.
    let said = place.interrupt(&["add", "a", "-", "-", "-"], &all[..2 << 20], || true);
    assert_eq!(said, "signal: 2 (SIGINT)\n");
    assert_eq!(std::fs::read_dir(place.path("")).unwrap().count(), 0);
    let state = place.server.state();
    assert_eq!((state.received, state.images.len()), (0, 0));
}
