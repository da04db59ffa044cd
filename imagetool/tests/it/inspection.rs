//! Verbs that look at images on the server: diff, show-file, get-file, check, verify.

use std::fs;

use bytes::Bytes;
use expect_test::{expect, expect_file};
use model::object::Algorithm;

use crate::command::Place;
use crate::tars::{Member, archive};

/// Two images that differ in all that images can differ in.
fn two_images() -> Place {
    let place = Place::new();
    place.write(
        "a.tar",
        archive([
            Member::file(b"etc/passwd", b"root"),
            Member::file(b"etc/gone", b"1"),
            Member::file(b"same/deep/file", b"same"),
        ]),
    );
    place.write(
        "b.tar",
        archive([
            Member::file(b"etc/passwd", b"root and more"),
            Member::file(b"etc/new\xff", b"22"),
            Member::file(b"same/deep/file", b"same"),
            Member::hard_link(b"same/link", b"same/deep/file"),
        ]),
    );
    place.write("filter-a", "/home/.*\n/tmp/.*\n");
    place.write("filter-b", "/tmp/.*\n/srv/.*\n");
    place.write("triggers-a", r#"[{"MatchLines": ["/etc/ssh"], "Service": "ssh"}]"#);
    place.write("triggers-b", r#"[{"MatchLines": ["/etc/ssh"], "Service": "sshd"}]"#);
    for name in ["a", "b"] {
        let (tar, filter) = (format!("{name}.tar"), format!("filter-{name}"));
        let add = ["add", name, &tar, &filter, &format!("triggers-{name}"), "--required-paths", ""];
        let added = place.run(&add);
        assert!(added.ends_with("exit 0\n"), "{added}");
    }
    place
}

#[test]
fn images_are_compared() {
    let place = two_images();
    place.check(
        &["diff", "a", "b"],
        expect![[r#"
        removed /etc/gone: file, 1 B
        added   /etc/new\xff: file, 2 B
        changed /etc/passwd: content 4 B to 13 B
        added   /same/link: hard link to /same/deep/file
        filter removed: /home/.*
        filter added: /srv/.*
        trigger removed: ssh (restart): /etc/ssh
        trigger added: sshd (restart): /etc/ssh
        a to b: 2 added, 1 removed, 1 changed; different: filter, triggers.
        exit 3
    "#]],
    );
    place.check(
        &["diff", "b", "b"],
        expect![[r#"
        b and b are the same.
        exit 0
    "#]],
    );
    let json = place.run(&["diff", "a", "b", "--format", "json"]);
    expect_file!["expected/diff.json"].assert_eq(&json);
    let ignore = ["--ignore", "tree,filter", "--ignore", "triggers"];
    place.check(
        &[&["diff", "a", "b"], &ignore[..]].concat(),
        expect![[r#"
        a and b are the same, as far as they were compared.
        exit 0
    "#]],
    );
    place.check(
        &["diff", "a", "none"],
        expect![[r#"
        error: none: ImageServer.GetImage at ADDRESS: there is no such image
        hint: `imagetool list` lists all images
        exit 1
    "#]],
    );
}

#[test]
fn an_image_is_compared_with_files() {
    let place = two_images();
    place.write(
        "c.tar",
        archive([
            Member::file(b"etc/passwd", b"root"),
            Member::file(b"home/is-kept", b"1"),
            Member::file(b"same/deep/file", b"same"),
        ]),
    );
    place.check(
        &["diff", "a", "file:c.tar"],
        expect![[r#"
        removed /etc/gone: file, 1 B
        added   /home: directory
        a to file:c.tar: 1 added, 1 removed, 0 changed.
        exit 3
    "#]],
    );
    place.run(&["get", "a", "copy"]);
    place.check(
        &["diff", "file:copy", "a", "--ignore", "owner"],
        expect![[r#"
        file:copy and a are the same, as far as they were compared.
        exit 0
    "#]],
    );
    place.check(
        &["diff", "a", "file:none"],
        expect![[r#"
        error: cannot open the archive `none`: No such file or directory (os error 2)
        exit 1
    "#]],
    );
    place.run(&["add", "long", "a.tar", "-", "-", "--digest", "sha512"]);
    let refused = place.run(&["diff", "a", "long"]);
    let error = "error: one image has blake3 digests, the other sha512 digests
hint: ";
    assert!(
        refused.starts_with(error)
            && refused.ends_with(
                "
exit 1
"
            ),
        "{refused}"
    );
}

#[test]
fn one_entry_is_shown_and_copied() {
    let place = two_images();
    let all = [
        &["show-file", "b", "/etc/passwd"][..],
        &["show-file", "b", "/same/link/"],
        &["show-file", "b", "/same"],
        &["show-file", "b", "/etc/new\\xff", "--format", "json"],
        &["show-file", "b", "/none"],
        &["show-file", "b", "etc"],
        &["get-file", "b", "/etc/passwd"],
        &["get-file", "b", "/same/link", "-o", "copy"],
        &["get-file", "b", "/same"],
        &["get-file", "b", "/same", "-o", "copy"],
        &["get-file", "b", "/etc/passwd", "-o", "none/copy"],
        &["get-file", "c", "/etc/passwd"],
    ];
    let all: Vec<String> =
        all.iter().map(|line| format!("$ {}\n{}", line.join(" "), place.run(line))).collect();
    expect_file!["expected/one-entry.txt"].assert_eq(&all.join("\n"));
    assert_eq!(fs::read(place.path("copy")).unwrap(), b"same");
    assert_eq!(temporaries(&place), 0);
}

/// How many files that are being written are in the place.
fn temporaries(place: &Place) -> usize {
    let names = fs::read_dir(place.directory.path()).unwrap();
    let is_temporary = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(".imagetool-");
    names.filter(|entry| is_temporary(&entry.as_ref().unwrap().file_name())).count()
}

#[test]
fn a_file_of_a_server_that_lies_is_not_put_in_place() {
    let place = two_images();
    place.write("copy", "before");
    let id = Algorithm::Blake3.digest(b"root and more");
    place.server.state().objects.insert(id, Bytes::from_static(b"root and evil"));
    let get = || place.run(&["get-file", "b", "/etc/passwd", "-o", "copy"]);
    let evil = get();
    let want = format!(
        "error: cannot fetch /etc/passwd: requested {id}, but the received content has the digest "
    );
    assert!(evil.starts_with(&want) && evil.ends_with("exit 1\n"), "{evil}");
    place.server.state().withheld.insert(id);
    let absent = get();
    let want = format!("error: cannot fetch /etc/passwd: the image server does not have {id}\n");
    assert!(absent.starts_with(&want) && absent.ends_with("exit 1\n"), "{absent}");
    assert_eq!(fs::read(place.path("copy")).unwrap(), b"before");
    assert_eq!(temporaries(&place), 0);
}

#[test]
fn an_interrupted_copy_leaves_nothing_behind() {
    let place = two_images();
    place.server.state().stalled.insert(Algorithm::Blake3.digest(b"root"));
    let words = ["get-file", "a", "/etc/passwd", "-o", "copy"];
    let said = place.interrupt(&words, b"", || temporaries(&place) > 0);
    assert_eq!(said, "error: interrupted\nhint: nothing was left behind\nexit 1\n");
    assert_eq!((temporaries(&place), place.path("copy").exists()), (0, false));
}

#[test]
fn images_are_looked_for() {
    let place = two_images();
    place.run(&["add", "c", "a.tar", "-", "-"]);
    place.run(&["delete", "c", "--yes"]);
    place.check(
        &["check", "a", "b"],
        expect![[r#"
        a is there
        b is there
        exit 0
    "#]],
    );
    place.check(
        &["check", "a", "none", "c"],
        expect![[r#"
        a is there
        none is not there
        c was deleted or has expired
        exit 3
    "#]],
    );
    place.check(
        &["check", "none", "--format", "json"],
        expect![[r#"
        [
          {
            "name": "none",
            "state": "missing"
          }
        ]
        exit 3
    "#]],
    );
    place.check(
        &["list", "--glob", "?", "--sort", "created", "--reverse"],
        expect![[r#"
        NAME  ENTRIES    SIZE  FILTER  TRIGGERS  CREATED                  EXPIRES
        b       1,234  5.7 MB       2         1  2023-11-14 22:13:20 UTC  never
        a       1,234  5.7 MB       2         1  2023-11-14 22:13:20 UTC  never
        exit 0
    "#]],
    );
}

#[test]
fn what_an_image_lacks_is_named() {
    let place = two_images();
    place.check(
        &["verify", "b"],
        expect![[r#"
        b: 7 objects, 19 B: all are there and unchanged.
        exit 0
    "#]],
    );
    place.check(
        &["verify", "b", "--quick"],
        expect![[r#"
        b: 7 objects, 19 B: all are there.
        exit 0
    "#]],
    );
    let id = |content: &[u8]| Algorithm::Blake3.digest(content);
    let (changed, evil, lost) = (id(b"22"), id(b"23"), id(b"same"));
    {
        let mut state = place.server.state();
        state.objects.insert(changed, Bytes::from_static(b"23"));
        state.objects.remove(&lost);
    }
    let run = |line: &[&str]| {
        let named = [(changed, "CHANGED"), (evil, "EVIL"), (lost, "LOST")];
        named.iter().fold(place.run(line), |text, (id, name)| text.replace(&id.to_string(), name))
    };
    expect![[r#"
        /etc/new\xff CHANGED: damaged: its content has the digest EVIL
        /same/deep/file LOST: missing, or found damaged by the server
        b: 7 objects, 19 B: 2 objects missing or damaged.
        exit 3
    "#]]
    .assert_eq(&run(&["verify", "b"]));
    expect![[r#"
        /same/deep/file LOST: missing
        b: 7 objects, 19 B: 1 object missing or damaged.
        exit 3
    "#]]
    .assert_eq(&run(&["verify", "b", "--quick"]));
    let root = {
        let mut state = place.server.state();
        let root = state.images.values().nth(1).unwrap().content.root;
        state.withheld.insert(root);
        root
    };
    let gone = place.run(&["verify", "b", "--format", "json"]);
    expect![[r#"
        {
          "name": "b",
          "root": "ROOT",
          "quick": false,
          "objects": 1,
          "bytes": "0",
          "problems": [
            {
              "path": "/",
              "object": "ROOT",
              "problem": "missing"
            }
          ]
        }
        b: 1 object, 0 B: 1 object missing or damaged.
        exit 3
    "#]]
    .assert_eq(&gone.replace(&root.to_string(), "ROOT"));
}

#[test]
fn what_others_have_written_plays_no_tricks_with_the_terminal() {
    let place = Place::new();
    place.write("a.tar", archive([Member::file(b"file", b"content")]));
    place.write("notes", "fast\x1b[2Jer\nand\tsafe\n");
    let add = ["add", "a", "a.tar", "-", "-", "--required-paths", "", "--release-notes", "notes"];
    let said = place.run(&add);
    assert!(said.ends_with("exit 0\n"), "{said}");
    let shown = place.run(&["show", "a"]);
    assert!(shown.contains("Notes:     fast [2Jer\n           and safe\n"), "{shown:?}");
}
