//! Images with computed files: what is refused, what is stored, and how they are shown.

use std::fs;

use expect_test::{expect, expect_file};
use model::object::Algorithm;

use crate::command::Place;
use crate::tars::{Member, archive};

/// A directory with the tree of a small system.
fn place() -> Place {
    let place = Place::new();
    fs::create_dir_all(place.path("root/etc/dominator/tls")).unwrap();
    fs::create_dir_all(place.path("root/usr")).unwrap();
    place.write("root/etc/motd", "hello");
    place.write("root/etc/resolv.conf", "placeholder");
    place.write("root/etc/dominator/tls/cert.pem", "");
    place.write("root/etc/one", "same");
    fs::hard_link(place.path("root/etc/one"), place.path("root/etc/two")).unwrap();
    std::os::unix::fs::symlink("usr/lib", place.path("root/lib")).unwrap();
    place.write("filter", "/home/.*\n/etc/dominator/tls$\n");
    place
}

#[test]
fn a_list_that_does_not_fit_the_tree_is_refused() {
    let place = place();
    let add = |filter: &str, list: &str| {
        place.write("computed", list);
        let add = ["add", "a", "root", filter, "-", "--computed", "computed"];
        format!("{list}{}", place.run(&[&add[..], &["--required-paths", ""]].concat()))
    };
    let all = [
        add("-", "# resolvers by location\n/etc/resolv.cnf files.example\n"),
        add("-", "/lib/x files.example\n"),
        add("-", "/etc/motd/x files.example\n"),
        add("-", "/usr files.example\n"),
        add("-", "/etc/one files.example\n"),
        add("-", "/etc/two files.example\n"),
        add("-", "/etc/motd files.example\n\n/etc/motd other.example\n"),
        add("-", "/etc/motd files.example:x\n"),
        add("-", "etc/motd files.example\n"),
        add("-", "/etc/motd\n"),
        add("filter", "/etc/dominator/tls/cert.pem files.example\n"),
        add("filter", "/home/none files.example\n"),
    ];
    expect_file!["expected/bad-computed.txt"].assert_eq(&all.join("\n"));
    let state = place.server.state();
    assert_eq!((state.received, state.images.len()), (0, 0));
}

#[test]
fn the_content_of_a_placeholder_is_not_sent() {
    let place = place();
    place
        .write("computed", "/etc/resolv.conf files.example\n/etc/dominator/tls/cert.pem [::1]:7\n");
    let add = ["add", "a", "root", "-", "-", "--computed", "computed"];
    assert!(place.run(&add).ends_with("exit 0\n"));
    let sent = |content: &str| {
        let id = Algorithm::Blake3.digest(content.as_bytes());
        place.server.state().objects.contains_key(&id)
    };
    assert_eq!(["hello", "same", "placeholder", ""].map(sent), [true, true, false, false]);
}

#[test]
fn computed_files_and_their_sources_are_shown() {
    let place = place();
    place.write("one", "/etc/resolv.conf files.example\n");
    place.write("two", "/etc/resolv.conf other.example:1\n/etc/motd files.example\n");
    place.run(&["add", "a", "root", "-", "-"]);
    place.run(&["add", "b", "root", "-", "-", "--computed", "one"]);
    place.run(&["add", "c", "root", "-", "-", "--computed", "two"]);
    let steps: [&[&str]; 10] = [
        &["show-computed-files", "a"],
        &["show-computed-files", "b"],
        &["show-computed-files", "c"],
        &["show-computed-files", "c", "--format", "json"],
        &["show-computed-files", "none"],
        &["list"],
        &["diff", "a", "b"],
        &["diff", "b", "c"],
        // The placeholders of a tree are no difference.
        &["diff", "c", "file:root"],
        &["get-file", "c", "/etc/motd"],
    ];
    let shown: String = steps
        .iter()
        .map(|step| format!("$ imagetool {}\n{}\n", step.join(" "), place.run(step)))
        .collect();
    expect_file!["expected/computed-files.txt"].assert_eq(&shown);
}

#[test]
fn a_layer_keeps_adds_and_changes_computed_files() {
    let place = place();
    place.write("of-base", "/etc/resolv.conf files.example\n/etc/motd files.example\n");
    place.run(&["add", "base", "root", "-", "-", "--computed", "of-base"]);
    place.write(
        "layer.tar",
        archive([Member::file(b"etc/motd", b"for all"), Member::file(b"etc/zone", b"")]),
    );
    place.write("of-layer", "/etc/zone files.example\n/etc/resolv.conf other.example\n");
    let add = ["add-overlay", "new", "base", "layer.tar", "--computed", "of-layer"];
    assert!(place.run(&add).ends_with("exit 0\n"));
    let shown = place.run(&["show", "new"]);
    let (_, computed) = shown.split_once("Computed:  ").unwrap();
    expect![[r#"
        /etc/resolv.conf by other.example:6972
                   /etc/zone by files.example:6972
        exit 0
    "#]]
    .assert_eq(computed);
    place.check(&["get-file", "new", "/etc/motd"], expect!["for allexit 0\n"]);
    place.write("of-layer", "/etc/none files.example\n");
    place.check(
        &["add-overlay", "other", "base", "layer.tar", "--computed", "of-layer"],
        expect![[r#"
            error: of-layer: line 1: /etc/none is not in the tree
            hint: put a placeholder there, a file that has the mode, owner and attributes
            exit 1
        "#]],
    );
}

#[test]
fn an_image_names_the_keys_that_sign_its_computed_files() {
    const KEYS: [&str; 2] = [
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIByiw1+aBsmSKnIN6HU2aMNBHg7vUqfdKq0rPsn81BJj",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKW/4eAgR9XAfJ6/YObyrXT+0VwW3otipP+QMd+F0o6n",
    ];
    let place = place();
    place.write("list", "/etc/resolv.conf files.example\n/etc/motd files.example\n");
    place.write("layer.tar", archive([Member::file(b"etc/zone", b"")]));
    place.write("all", format!("{} filegen\n", KEYS[0]));
    place.write("some", format!("{}\npaths=\"/etc/motd\" {}\n", KEYS[0], KEYS[1]));
    place.write("partly", format!("paths=\"/etc/motd\" {}\n", KEYS[0]));
    place.write("elsewhere", format!("paths=\"/etc/none\" {}\n", KEYS[0]));
    place.write("bad", "ssh-rsa AAAA\n");
    let add = |name: &'static str, signers: &'static str| {
        let words = ["add", name, "root", "-", "-", "--computed", "list", "--computed-signer"];
        [&words[..], &[signers]].concat()
    };
    let overlay = ["add-overlay", "layer", "b", "layer.tar"];
    let plain = ["add-overlay", "plain", "b", "layer.tar", "--computed-signer", "-"];
    let steps: [&[&str]; 12] = [
        &add("a", "all"),
        &add("b", "some"),
        &["show", "b"],
        &["diff", "a", "b"],
        &overlay,
        &["diff", "b", "layer"],
        &plain,
        &["diff", "b", "plain"],
        &add("c", "partly"),
        &add("c", "elsewhere"),
        &add("c", "bad"),
        &["add", "c", "root", "-", "-", "--computed-signer", "all"],
    ];
    let shown: String = steps
        .iter()
        .map(|step| format!("$ imagetool {}\n{}\n", step.join(" "), place.run(step)))
        .collect();
    // The times of the files are those of now.
    let is_fixed = |line: &&str| !line.starts_with("Digest:") && !line.starts_with("Tree:");
    let shown: String = shown.lines().filter(is_fixed).map(|line| format!("{line}\n")).collect();
    expect_file!["expected/computed-signers.txt"].assert_eq(&shown);
    let state = place.server.state();
    let formats = state.images.iter().map(|(name, image)| (name.to_string(), image.content.format));
    let mut formats: Vec<_> = formats.collect();
    formats.sort();
    let want = [("a", 2), ("b", 2), ("layer", 2), ("plain", 1)];
    assert_eq!(formats, want.map(|(name, format)| (name.to_owned(), format)));
}
