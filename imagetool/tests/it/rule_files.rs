//! Verbs that work with filter and trigger files, without a server.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use expect_test::{Expect, expect, expect_file};

/// Runs imagetool in `directory`, with no server to be asked.
fn run(directory: &Path, arguments: &[&str], input: &str) -> String {
    use std::io::Write as _;
    let mut child = Command::new(env!("CARGO_BIN_EXE_imagetool"))
        .args(arguments)
        .current_dir(directory)
        .env("HOME", directory)
        .env("DOMINATOR_IMAGESERVER", "nowhere.invalid")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    format!(
        "{}{}exit {}\n",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
        output.status.code().unwrap()
    )
}

#[track_caller]
fn check(directory: &Path, arguments: &[&str], input: &str, expect: Expect) {
    expect.assert_eq(&run(directory, arguments, input));
}

#[test]
fn files_are_merged() {
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(place.path().join(name), text).unwrap();
    write("one", "# ours\n/tmp/.*\n/home/.*\n");
    write("two", "/var/log/.*\n/tmp/.*\n");
    write("bad", "/ok\n(\n");
    check(
        place.path(),
        &["merge-filters", "one", "two"],
        "",
        expect![[r#"
        /home/.*
        /tmp/.*
        /var/log/.*
        exit 0
    "#]],
    );
    check(
        place.path(),
        &["merge-filters", "one", "bad"],
        "",
        expect![[r#"
        error: bad: line 2: `(` is no regular expression: regex parse error:
            \A(?:()
              ^
        error: unclosed group
        exit 1
    "#]],
    );
    write("one", r#"[{"MatchLines": ["/b"], "Service": "web", "DoReload": true}]"#);
    write("two", r#"[{"MatchLines": ["/a"], "Service": "web", "DoReload": true}]"#);
    check(
        place.path(),
        &["merge-triggers", "one", "two"],
        "",
        expect![[r#"
        [
          {
            "MatchLines": [
              "/a",
              "/b"
            ],
            "Service": "web",
            "DoReload": true
          }
        ]
        exit 0
    "#]],
    );
    let bad = ["merge-triggers", "one", "bad"];
    expect_file!["expected/bad-merge.txt"].assert_eq(&run(place.path(), &bad, ""));
}

#[test]
fn triggers_tell_what_they_would_do() {
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(place.path().join(name), text).unwrap();
    write(
        "triggers",
        r#"[{"MatchLines": ["/etc/ssh/.*", "/usr/sbin/sshd$"], "Service": "ssh"},
            {"MatchLines": ["/etc/nginx/.*"], "Service": "nginx", "DoReload": true},
            {"MatchLines": ["/boot/.*"], "Service": "reboot"}]"#,
    );
    write("old", r#"[{"MatchLines": ["/etc/ssh/.*"], "Service": "dropbear"}]"#);
    let paths = ["match-triggers", "triggers", "/etc/ssh/sshd_config", "/etc/nginx/x", "/srv/x"];
    check(
        place.path(),
        &paths,
        "",
        expect![[r#"
        /etc/ssh/sshd_config: trigger 1, ssh (restart), by /etc/ssh/.*
        /etc/nginx/x: trigger 2, nginx (reload), by /etc/nginx/.*
        /srv/x: no trigger
        before the change: stop ssh
        after the change: reload nginx
        after the change: start ssh
        exit 0
    "#]],
    );
    let old = ["match-triggers", "triggers", "--old", "old", "/etc/ssh/sshd_config"];
    check(
        place.path(),
        &old,
        "",
        expect![[r#"
        /etc/ssh/sshd_config: trigger 1, ssh (restart), by /etc/ssh/.*
        before the change: stop dropbear
        before the change: stop ssh
        after the change: start ssh
        exit 0
    "#]],
    );
    let input = "/boot/vmlinuz\n\n/etc/motd\n";
    check(
        place.path(),
        &["match-triggers", "triggers"],
        input,
        expect![[r#"
        /boot/vmlinuz: trigger 3, reboot (reboot), by /boot/.*
        /etc/motd: no trigger
        at the end: reboot the machine
        HIGH IMPACT: the machine's disruption command is asked first
        exit 0
    "#]],
    );
    check(
        place.path(),
        &["match-triggers", "triggers"],
        "etc\n",
        expect![[r#"
        error: the standard input: path `etc` is not absolute
        exit 1
    "#]],
    );
    let json = ["match-triggers", "triggers", "/etc/nginx/x", "--format", "json"];
    check(
        place.path(),
        &json,
        "",
        expect![[r#"
        {
          "paths": [
            {
              "path": "/etc/nginx/x",
              "triggers": [
                {
                  "number": 2,
                  "service": "nginx",
                  "action": "reload",
                  "lines": [
                    "/etc/nginx/.*"
                  ]
                }
              ]
            }
          ],
          "services": {
            "before": [],
            "after": [
              {
                "service": "nginx",
                "verb": "reload",
                "may_fail": false
              }
            ],
            "own": false,
            "reboot": false,
            "high_impact": false
          }
        }
        exit 0
    "#]],
    );
}

#[test]
fn a_filter_is_tried_on_a_directory() {
    let place = tempfile::tempdir().unwrap();
    let root = place.path().join("root");
    for directory in ["var/log/apt", "home/user", "etc", ".subd/objects"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    for (file, length) in [("var/log/apt/term", 900), ("var/log/syslog", 100), ("home/user/x", 7)] {
        fs::write(root.join(file), vec![b'x'; length]).unwrap();
    }
    fs::hard_link(root.join("var/log/syslog"), root.join("var/log/syslog.1")).unwrap();
    fs::write(place.path().join("filter"), "/var/log/.*\n/home\n/srv/.*\n/var/log/apt$\n").unwrap();
    check(
        place.path(),
        &["scan-filter", "filter", "root", "--list"],
        "",
        expect![[r#"
        /home: 3 entries, 7 B, by /home
        /var/log/apt: 2 entries, 900 B, by /var/log/.* /var/log/apt$
        /var/log/syslog: 1 entry, 100 B, by /var/log/.*
        /var/log/syslog.1: 1 entry, 0 B, by /var/log/.*

        PATHS  ENTRIES    SIZE  LINE
            3        4  1.0 kB  /var/log/.*
            1        3     7 B  /home
            0        0     0 B  /srv/.*
            1        2   900 B  /var/log/apt$
        The filter keeps 7 of 10 entries, 1.0 kB.
        note: 1 line matches nothing: /srv/.*
        exit 0
    "#]],
    );
    fs::write(place.path().join("filter"), "/etc$\n").unwrap();
    let json = ["scan-filter", "filter", "root", "--format", "json"];
    check(
        place.path(),
        &json,
        "",
        expect![[r#"
        {
          "lines": [
            {
              "line": "/etc$",
              "paths": 1,
              "entries": 1,
              "bytes": "0"
            }
          ],
          "kept": [
            {
              "path": "/etc",
              "entries": 1,
              "bytes": "0",
              "lines": [
                1
              ]
            }
          ],
          "entries": 10,
          "kept_entries": 1,
          "kept_bytes": "0"
        }
        The filter keeps 1 of 10 entries, 0 B.
        exit 0
    "#]],
    );
    check(
        place.path(),
        &["scan-filter", "filter", "none"],
        "",
        expect![[r#"
        error: cannot read `none`: No such file or directory (os error 2)
        exit 1
    "#]],
    );
}

#[test]
fn completions_and_manual_pages_are_made() {
    let place = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let run = Command::new(env!("CARGO_BIN_EXE_imagetool"))
            .args(["completions", shell])
            .env("HOME", place.path())
            .output()
            .unwrap();
        let script = String::from_utf8(run.stdout).unwrap();
        assert!(run.status.success() && script.contains("match-triggers"), "{shell}: {script}");
    }
    let pages = place.path().join("man/man1");
    check(
        place.path(),
        &["man", pages.to_str().unwrap()],
        "",
        expect![[r#"
        exit 0
    "#]],
    );
    let page = fs::read_to_string(pages.join("imagetool-diff.1")).unwrap();
    assert!(page.contains("Shows the differences of two images"), "{page}");
    assert!(pages.join("imagetool.1").exists());
}
