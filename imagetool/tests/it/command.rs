//! The command line, as operators meet it, against a server in memory.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use bytes::Bytes;
use expect_test::{Expect, expect, expect_file};
use model::object::Algorithm;
use testing::eventually;

use crate::server::Server;
use crate::tars::{Member, archive};
use crate::trees::{fill, gnu_tar, read, shown};

/// A server, and a directory to work in.
pub struct Place {
    pub server: Server,
    pub directory: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        Self { server: Server::start(), directory: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    /// A directory with entries of every kind.
    pub fn tree(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir(&path).unwrap();
        fill(&path);
        path
    }

    /// Runs imagetool in the directory, and gives its output and exit code as one text.
    pub fn run(&self, arguments: &[&str]) -> String {
        self.run_with_input(arguments, b"")
    }

    pub fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> String {
        let mut child = Command::new(env!("CARGO_BIN_EXE_imagetool"))
            .args(["--insecure", "--imageserver", &self.server.address.to_string()])
            .args(arguments)
            .current_dir(self.directory.path())
            .env_remove("DOMINATOR_IMAGESERVER")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The tool may end before it has read everything.
        let _ = child.stdin.take().unwrap().write_all(input);
        self.said(&child.wait_with_output().unwrap())
    }

    /// Runs imagetool in the directory and interrupts it: when it has read most of `input`, of
    /// which the end does not come, and `is_under_way` says so.
    pub fn interrupt(
        &self,
        arguments: &[&str],
        input: &[u8],
        is_under_way: impl Fn() -> bool,
    ) -> String {
        // Tests that run in the background of a shell are to ignore the signal, and so would this.
        let mut child = Command::new("env")
            .args(["--default-signal=INT", env!("CARGO_BIN_EXE_imagetool")])
            .args(["--insecure", "--imageserver", &self.server.address.to_string()])
            .args(arguments)
            .current_dir(self.directory.path())
            .env("TMPDIR", self.directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input).unwrap();
        eventually("the program is running", || is_under_way().then_some(()));
        let id = nix::unistd::Pid::from_raw(child.id().try_into().unwrap());
        nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGINT).unwrap();
        let output = child.wait_with_output().unwrap();
        drop(stdin);
        self.said(&output)
    }

    /// What was said and how it ended, in words that are the same everywhere.
    fn said(&self, output: &Output) -> String {
        let end = match output.status.code() {
            Some(code) => format!("exit {code}\n"),
            None => format!("{}\n", output.status),
        };
        let [stdout, stderr] =
            [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
        format!("{stdout}{stderr}{end}")
            .replace(&self.server.address.to_string(), "ADDRESS")
            .replace(&self.directory.path().display().to_string(), "PLACE")
    }

    #[track_caller]
    pub fn check(&self, arguments: &[&str], expect: Expect) {
        expect.assert_eq(&self.run(arguments));
    }
}

pub fn rsync_finds_no_difference(source: &Path, copy: &Path) {
    let output = Command::new("rsync")
        .args(["-aHAXOJ", "--checksum", "--dry-run", "--itemize-changes", "--delete"])
        .arg(source.join(""))
        .arg(copy.join(""))
        .output();
    match output {
        Ok(output) => {
            assert_eq!(String::from_utf8_lossy(&output.stdout), "");
            assert!(output.status.success(), "{output:?}");
        }
        // The comparison by our own reading has been made; this one is a second opinion.
        Err(error) => eprintln!("rsync cannot be run: {error}"),
    }
}

#[test]
fn what_is_added_is_what_is_got() {
    let place = Place::new();
    let tree = place.tree("tree");
    assert!(place.run(&["add", "t/1", "tree", "-", "-"]).ends_with("exit 0\n"));
    assert_eq!(
        place.run(&["get", "t/1", "copy"]),
        format!("Got t/1: {} entries, 700.0 kB in copy.\nexit 0\n", 15 + u8::from(is_root()))
    );
    let copy = place.path("copy");
    assert_eq!(shown(&read(&copy)), shown(&read(&tree)));
    rsync_finds_no_difference(&tree, &copy);
    assert!(!place.path("copy.incomplete").exists());
    // An empty directory is taken, and SHA-512 does as well.
    assert!(
        place.run(&["add", "t/2", "tree", "-", "-", "--digest", "sha512"]).ends_with("exit 0\n")
    );
    fs::create_dir(place.path("again")).unwrap();
    assert!(place.run(&["get", "t/2", "again"]).ends_with("exit 0\n"));
    rsync_finds_no_difference(&tree, &place.path("again"));
}

pub fn is_root() -> bool {
    nix::unistd::Uid::effective().is_root()
}

#[test]
fn an_image_may_name_a_health_check() {
    let place = Place::new();
    place.write("a.tar", archive([Member::file(b"one", b"1")]));
    place.write(
        "health.json",
        r#"{"command": ["/bin/answers", "to me"], "within_seconds": 5, "undo": true}"#,
    );
    let add = ["add", "web/1", "a.tar", "-", "-", "--health-check", "health.json"];
    assert!(place.run(&add).ends_with("exit 0\n"));
    let shown = place.run(&["show", "web/1"]);
    let line = shown.lines().find(|line| line.starts_with("Health:")).unwrap();
    assert_eq!(line, "Health:    /bin/answers \"to me\", within 5 s, else undone");
    let json = place.run(&["show", "web/1", "--format", "json"]);
    assert!(json.contains("\"within_seconds\": 5"), "{json}");
    place.write("health.json", r#"{"command": [], "within": 5}"#);
    let add = ["add", "web/2", "a.tar", "-", "-", "--health-check", "health.json"];
    let refused = place.run(&add);
    let error = "error: health.json: unknown field `within`, expected one of `command`";
    assert!(refused.starts_with(error), "{refused}");
    let hint = "hint: imagetool add --help shows one\nexit 1\n";
    assert!(refused.ends_with(hint), "{refused}");
}

#[test]
fn only_new_objects_are_sent() {
    let place = Place::new();
    place.write("a.tar", archive([Member::file(b"one", b"1"), Member::file(b"two", b"22")]));
    place.check(
        &["add", "a", "a.tar", "-", "-"],
        expect![[r#"
            Added a: 2 entries, 3 B; sent 3 new objects (173 B), 0 were there already.
            exit 0
        "#]],
    );
    place.write("b.tar", archive([Member::file(b"one", b"1"), Member::file(b"new", b"333")]));
    let pipe = fs::read(place.path("b.tar")).unwrap();
    let compressed = zstd::stream::encode_all(&pipe[..], 3).unwrap();
    expect![[r#"
        Added b: 2 entries, 4 B; sent 2 new objects (173 B), 1 was there already.
        exit 0
    "#]]
    .assert_eq(&place.run_with_input(&["add", "b", "-", "-", "-"], &compressed));
    place.check(
        &["add", "c", "b.tar", "-", "-"],
        expect![[r#"
            Added c: 2 entries, 4 B; sent 0 new objects (0 B), 3 were there already.
            exit 0
        "#]],
    );
    assert_eq!(place.server.state().received, 5);
}

#[test]
fn an_upload_that_was_lost_is_taken_up_again() {
    let place = Place::new();
    place.server.state().uploads_to_lose = 2;
    let members =
        (0..50_u8).map(|number| Member::file(&[b'a' + number / 26, b'a' + number % 26], &[number]));
    place.write("a.tar", archive(members));
    assert!(place.run(&["add", "a", "a.tar", "-", "-"]).ends_with("exit 0\n"));
    let state = place.server.state();
    assert_eq!((state.received, state.objects.len(), state.images.len()), (51, 51, 1));
}

#[test]
fn images_are_listed_shown_and_deleted() {
    let place = Place::new();
    place.check(
        &["list"],
        expect![[r#"
        There are no images.
        exit 0
    "#]],
    );
    let members = [Member::directory(b"./"), Member::file(b"./a b", b"1")];
    place.write("a.tar", archive(members.clone()));
    let placeholder = Member::file(b"./resolv.conf", b"placeholder");
    place.write("computed.tar", archive(members.into_iter().chain([placeholder])));
    place.write(
        "filter",
        "# ours\n/home/.*\n/etc/machine-id$\n/etc/fstab$\n/etc/hostname$\n/etc/ssh/ssh_host_.*\n",
    );
    place.write(
        "triggers",
        r#"[{"MatchLines": ["/etc/ssh/.*"], "Service": "ssh", "DoReload": true},
            {"MatchLines": ["/boot/.*"], "Service": "reboot", "HighImpact": true}]"#,
    );
    place.write("computed", "/resolv.conf files.example\n");
    place.check(
        &[
            "add",
            "/base/a",
            "computed.tar",
            "filter",
            "triggers",
            "--computed",
            "computed",
            "--required-paths",
            "",
        ],
        expect![[r#"
            warning: every machine would lose its own /etc/dominator/tls/*, /etc/subd/*
            hint: to leave this to the machines, add to the filter:
              /etc/dominator/tls$
              /etc/subd$
            Added base/a: 2 entries, 1 B; sent 2 new objects (148 B), 0 were there already.
            exit 0
        "#]],
    );
    place.run(&["add", "base/b", "a.tar", "-", "-"]);
    place.check(
        &["list"],
        expect![[r#"
            NAME    ENTRIES    SIZE  FILTER  TRIGGERS  CREATED                  EXPIRES  COMPUTED
            base/a    1,234  5.7 MB       5         2  2023-11-14 22:13:20 UTC  never    1
            base/b    1,234  5.7 MB  sparse         0  2023-11-14 22:13:20 UTC  never    0
            exit 0
        "#]],
    );
    place.check(
        &["show", "base/a"],
        expect![[r#"
            Name:      base/a
            Digest:    blake3:aa55e8e5e0cd5b82d9cfcacd275741e161fdb325783db83d8416ce81e84c5830
            Tree:      blake3:948139a9b36bc5bd8849343aa148a174f73c97d74d1d8c239ed3710f529052ba
            Entries:   2 (0 directories, 0 hard links, 1 computed files)
            Size:      1 B
            Created:   1970-01-01 00:00:00 UTC by ?
            Filter:    machines keep
                       /home/.*
                       /etc/machine-id$
                       /etc/fstab$
                       /etc/hostname$
                       /etc/ssh/ssh_host_.*
            Triggers:  ssh (reload): /etc/ssh/.*
                       reboot (reboot, high impact): /boot/.*
            Health:    none
            Computed:  /resolv.conf by files.example:6972
            exit 0
        "#]],
    );
    expect_file!["expected/show-tree.txt"].assert_eq(&place.run(&["show", "base/b", "--tree"]));
    let json = place.run(&["show", "base/b", "--tree", "--format", "json"]);
    let json: serde_json::Value =
        serde_json::from_str(json.strip_suffix("exit 0\n").unwrap()).unwrap();
    assert_eq!(json["tree"][0], "d 755 0:0 /");
    assert_eq!(json["totals"]["entries"], "1");
    place.check(
        &["delete", "base/a"],
        expect![[r#"
            error: will not delete base/a without a confirmation
            hint: give --yes to confirm
            exit 2
        "#]],
    );
    place.check(
        &["delete", "base/a", "--yes"],
        expect![[r#"
            Deleted base/a.
            exit 0
        "#]],
    );
    place.check(
        &["add", "base/a", "a.tar", "-", "-"],
        expect![[r#"
            error: base/a: ImageServer.GetImage at ADDRESS: there is no such image
            hint: the name was deleted or has expired, and names are never used again
            exit 1
        "#]],
    );
    place.check(
        &["show", "base/none"],
        expect![[r#"
            error: base/none: ImageServer.GetImage at ADDRESS: there is no such image
            hint: `imagetool list` lists all images
            exit 1
        "#]],
    );
}

#[test]
fn bad_input_is_refused_before_anything_is_sent() {
    let place = Place::new();
    place.write("bad.tar", archive([Member::file(b"good", b"1"), Member::file(b"../bad", b"2")]));
    place.write("good.tar", archive([Member::file(b"good", b"1")]));
    place.write("bad-filter", "/ok\n/bad(\n");
    place.write("inverted", "!\n");
    place.write("bad-triggers", r#"[{"MatchLines": ["/x"], "Service": "-x"}]"#);
    place.write("no-slash", "etc/no-slash\n");
    place.write(
        "misspelt-triggers",
        "[{\"MatchLines\": [\"/x\"], \"Service\": \"x\",\n\"HighImapct\": true}]",
    );
    place.write("bad-computed", "/good\n");
    let add = |arguments: &[&str]| place.run(&[&["add"], arguments].concat());
    let all = [
        add(&["a", "bad.tar", "-", "-"]),
        add(&["a", "missing.tar", "-", "-"]),
        add(&["a", "good.tar", "bad-filter", "-"]),
        add(&["a", "good.tar", "inverted", "-"]),
        add(&["a", "good.tar", "missing", "-"]),
        add(&["a", "good.tar", "no-slash", "-"]),
        add(&["a", "good.tar", "-", "bad-triggers"]),
        add(&["a", "good.tar", "-", "misspelt-triggers"]),
        add(&["a", "good.tar", "-", "-", "--computed", "bad-computed"]),
        add(&["a/../b", "good.tar", "-", "-"]),
        add(&["a", "good.tar", "-", "-", "--digest", "md5"]),
    ];
    expect_file!["expected/bad-input.txt"].assert_eq(&all.join("\n"));
    let state = place.server.state();
    assert_eq!((state.received, state.images.len()), (0, 0));
}

#[test]
fn the_filter_is_applied_and_what_it_forgets_is_told() {
    let place = Place::new();
    place.write("filter", "/home/.*\n/etc/ssh/ssh_host_.*\n");
    place.write(
        "a.tar",
        archive([
            Member::file(b"home/user/notes", b"1"),
            Member::hard_link(b"kept/link", b"home/user/notes"),
        ]),
    );
    expect_file!["expected/filter-warning.txt"].assert_eq(&place.run(&[
        "add",
        "a",
        "a.tar",
        "filter",
        "-",
        "--required-paths",
        "",
    ]));
    let tree = place.run(&["show", "a", "--tree"]);
    let tree: String = tree
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect();
    expect_file!["expected/filtered-tree.txt"].assert_eq(&tree);
}

#[test]
fn a_server_that_lies_is_found_out_and_nothing_is_left() {
    let place = Place::new();
    place.tree("tree");
    place.run(&["add", "a", "tree", "-", "-"]);
    let get = |what: &str| {
        let got = place.run(&["get", "a", "copy"]);
        assert!(!place.path("copy").exists(), "{what}");
        assert!(!place.path("copy.incomplete").exists(), "{what}");
        got
    };
    let id = Algorithm::Blake3.digest(b"odd");
    let honest = place.server.state().objects[&id].clone();
    place.server.state().objects.insert(id, Bytes::from_static(b"bad"));
    let changed = get("changed content");
    place.server.state().objects.insert(id, Bytes::from_static(b"longer"));
    let longer = get("longer content");
    place.server.state().objects.insert(id, honest.clone());
    place.server.state().withheld.insert(id);
    let absent = get("absent content");
    place.server.state().withheld.clear();
    let root = place.server.state().images.values().next().unwrap().content.root;
    let encoding = place.server.state().objects.insert(root, honest).unwrap();
    let directory = get("changed directory");
    let all = [changed, longer, absent, directory].join("\n");
    expect_file!["expected/lying-server.txt"].assert_eq(&all.replace(&root.to_string(), "ROOT"));
    place.server.state().objects.insert(root, encoding);
    assert!(place.run(&["get", "a", "copy"]).ends_with("exit 0\n"));
}

#[test]
fn a_directory_that_is_not_free_is_not_touched() {
    let place = Place::new();
    place.tree("tree");
    place.run(&["add", "a", "tree", "-", "-"]);
    fs::create_dir(place.path("other.incomplete")).unwrap();
    std::os::unix::fs::symlink("elsewhere", place.path("link")).unwrap();
    let all = [
        place.run(&["get", "a", "tree"]),
        place.run(&["get", "a", "other"]),
        place.run(&["get", "a", "link"]),
        place.run(&["get", "a", "missing/copy"]),
    ];
    expect![[r#"
        error: `tree` already exists and is not an empty directory
        hint: give a directory that is not there yet
        exit 1

        error: `PLACE/other.incomplete` already exists: an earlier attempt was killed
        hint: remove it with `rm -r PLACE/other.incomplete`, and try again
        exit 1

        error: `link` already exists and is not an empty directory
        hint: give a directory that is not there yet
        exit 1

        error: cannot make the directory `missing/copy`: No such file or directory (os error 2)
        exit 1
    "#]]
    .assert_eq(&all.join("\n"));
    assert!(!place.path("elsewhere").exists());
}

#[test]
fn computed_files_are_left_out_and_told() {
    let place = Place::new();
    place.write("a.tar", archive([Member::file(b"a", b"1"), Member::file(b"b", b"2")]));
    place.write("computed", "/b files.example:1\n");
    place.run(&["add", "a", "a.tar", "-", "-", "--computed", "computed"]);
    place.check(
        &["get", "a", "copy"],
        expect![[r#"
            warning: 1 computed files are left out: their content is made for each machine: /b
            Got a: 2 entries, 1 B in copy.
            exit 3
        "#]],
    );
    assert!(place.path("copy/a").exists());
    assert!(!place.path("copy/b").exists());
}

#[test]
fn misuse_is_explained() {
    let place = Place::new();
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_imagetool"))
            .args(arguments)
            .current_dir(place.directory.path())
            .env_remove("DOMINATOR_IMAGESERVER")
            .env("HOME", "/nonexistent")
            .output()
            .unwrap();
        let code = output.status.code().unwrap();
        let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).replace(&format!(" {host} "), " HOST ");
        format!("{text}exit {code}\n")
    };
    let all = [
        run(&["list"]),
        run(&["--insecure", "--imageserver", "127.0.0.1:1", "list"]),
        run(&["--insecure", "--imageserver", "a b", "list"]),
    ];
    expect_file!["expected/misuse.txt"].assert_eq(&all.join("\n"));
}

#[test]
fn an_archive_by_gnu_tar_in_every_compression_is_the_same_image() {
    let place = Place::new();
    let tree = place.tree("tree");
    let flags = ["--format=pax", "--acls", "--xattrs", "--xattrs-include=*"];
    gnu_tar(&tree, &place.path("plain"), &flags);
    let want = read(&tree).digest().to_string();
    let plain = fs::read(place.path("plain")).unwrap();
    for (name, bytes) in crate::hostile::compressed(&plain) {
        place.write(name, bytes);
        let got = place.run(&["add", name, name, "-", "-", "--format", "json"]);
        assert!(got.contains(&format!("\"root\": \"{want}\"")), "{name}: {got}");
    }
}

#[test]
fn an_interrupted_get_leaves_nothing_behind() {
    let place = Place::new();
    place.tree("tree");
    place.run(&["add", "a", "tree", "-", "-"]);
    place.server.state().stalled.insert(Algorithm::Blake3.digest(b"odd"));
    let skeleton = place.path("copy.incomplete/usr/bin");
    let said = place.interrupt(&["get", "a", "copy"], b"", || skeleton.exists());
    assert_eq!(said, "error: interrupted\nhint: nothing was left behind\nexit 1\n");
    assert!(!place.path("copy").exists() && !place.path("copy.incomplete").exists());
}
