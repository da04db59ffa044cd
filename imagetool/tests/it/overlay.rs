//! Images that are made of another one and a layer.

use std::fs;

use expect_test::{expect, expect_file};
use model::object::Algorithm;

use crate::command::Place;
use crate::layouts::Layout;
use crate::tars::{Member, archive};

/// A server with the image `base`, of which it gives no file but only directories.
fn with_base() -> Place {
    let place = Place::new();
    let base = archive([
        Member::directory(b"./").change(|header| header.set_mode(0o750)),
        Member::directory(b"etc"),
        Member::file(b"etc/one", b"1"),
        Member::file(b"etc/two", b"22"),
        Member::hard_link(b"etc/zwei", b"etc/two"),
        Member::file(b"home/user", b"mine"),
        Member::directory(b"usr").change(|header| header.set_mode(0o711)),
        Member::file(b"usr/tool", b"tool"),
    ]);
    place.write("base.tar", base);
    // The base is no system: what every machine needs, or has of its own, is kept.
    let own = "/etc/(machine-id|fstab|hostname|passwd|subd|dominator/tls)$";
    place.write("filter", format!("/home/.*\n{own}\n/etc/ssh/.*\n/usr/bin$\n"));
    place.write("triggers", r#"[{"MatchLines": ["/usr/.*"], "Service": "tool"}]"#);
    place.write("health", r#"{"command": ["/bin/true"]}"#);
    let add = ["add", "base", "base.tar", "filter", "triggers", "--health-check", "health"];
    let said = place.run(&add);
    assert!(said.ends_with("exit 0\n"), "{said}");
    for content in ["1", "22", "tool"] {
        place.server.state().withheld.insert(Algorithm::Blake3.digest(content.as_bytes()));
    }
    place
}

fn tree(place: &Place, name: &str) -> String {
    let shown = place.run(&["show", name, "--tree"]);
    let lines = shown.lines().filter(|line| !line.starts_with('#') && !line.starts_with("exit"));
    lines
        .map(|line| {
            let words = line.split(' ').map(|word| match word.strip_prefix("blake3:") {
                Some(hex) => &hex[..8],
                None => word,
            });
            words.collect::<Vec<_>>().join(" ") + "\n"
        })
        .collect()
}

#[test]
fn a_layer_changes_what_it_names_and_only_that_travels() {
    let place = with_base();
    place.write(
        "layer.tar",
        archive([
            Member::file(b"etc/.wh.two", b""),
            Member::hard_link(b"etc/eins", b"etc/one"),
            Member::file(b"usr/tool", b"new tool"),
            Member::file(b"home/other", b"is kept, and so left out"),
            Member::file(b"opt/a/b", b"tool"),
        ]),
    );
    place.check(
        &["add-overlay", "/web/1", "base", "layer.tar"],
        expect![[r#"
            Added web/1: 10 entries, 15 B; sent 6 new objects (634 B), 4 were there already.
            exit 0
        "#]],
    );
    expect![[r#"
        d 750 0:0 /
        d 755 0:0 /etc
        f 644 0:0 1700000000.000000000 1 d63bd9a8 /etc/eins
        h /etc/one -> /etc/eins
        f 644 0:0 1700000000.000000000 2 93aed7df /etc/zwei
        d 755 0:0 /home
        d 755 0:0 /opt
        d 755 0:0 /opt/a
        f 644 0:0 1700000000.000000000 4 5c9cc8c5 /opt/a/b
        d 711 0:0 /usr
        f 644 0:0 1700000000.000000000 8 e04ad74d /usr/tool
    "#]]
    .assert_eq(&tree(&place, "web/1"));
    let state = place.server.state();
    let images = &state.images;
    let [base, web] = ["base", "web/1"].map(|name| &images[&name.parse().unwrap()]);
    assert_eq!(web.notes.source_image.as_ref().unwrap().as_str(), "base");
    assert_eq!(web.content.filter, base.content.filter);
    assert_eq!(web.content.triggers, base.content.triggers);
    assert_eq!(web.content.health_check, base.content.health_check);
}

#[test]
fn a_directory_is_a_layer_without_its_root() {
    let place = with_base();
    fs::create_dir_all(place.path("layer/usr")).unwrap();
    fs::write(place.path("layer/usr/.wh.tool"), "").unwrap();
    fs::create_dir_all(place.path("layer/etc")).unwrap();
    fs::write(place.path("layer/etc/.wh..wh..opq"), "").unwrap();
    let status = std::process::Command::new("chmod")
        .args(["-R", "u=rwX,go=rX", "layer"])
        .current_dir(place.path(""))
        .status();
    assert!(status.unwrap().success());
    assert!(place.run(&["add-overlay", "web", "base", "layer"]).ends_with("exit 0\n"));
    let owner = |text: String| {
        let ids = format!("{}:{}", nix::unistd::getuid(), nix::unistd::getgid());
        text.replace(&format!(" {ids} "), " 0:0 ")
    };
    expect![[r#"
        d 750 0:0 /
        d 755 0:0 /etc
        d 755 0:0 /home
        d 755 0:0 /usr
    "#]]
    .assert_eq(&owner(tree(&place, "web")));
}

#[test]
fn an_image_of_another_tool_is_as_many_layers_as_it_has() {
    let place = with_base();
    let layout = Layout::new(&place.path("layout"));
    let lower = archive([Member::file(b".wh.usr", b""), Member::file(b"lower", b"")]);
    let upper = archive([Member::file(b".wh.lower", b""), Member::file(b"etc/.wh.one", b"")]);
    layout.index(&[layout.image("amd64", &[&lower, &upper])]);
    let add = ["add-overlay", "web", "base", "layout", "--required-paths", ""];
    assert!(place.run(&add).ends_with("exit 0\n"));
    expect![[r#"
        d 750 0:0 /
        d 755 0:0 /etc
        f 644 0:0 1700000000.000000000 2 93aed7df /etc/two
        h /etc/zwei -> /etc/two
        d 755 0:0 /home
    "#]]
    .assert_eq(&tree(&place, "web"));
}

#[test]
fn filter_triggers_and_health_check_may_be_others() {
    let place = with_base();
    place.write("layer.tar", archive([Member::file(b"new", b"")]));
    place.write("other", r#"[{"MatchLines": ["/new"], "Service": "other"}]"#);
    let image = |name: &str, words: &[&str]| {
        let said = place.run(&[&["add-overlay", name, "base", "layer.tar"], words].concat());
        assert!(said.ends_with("exit 0\n"), "{said}");
        place.server.state().images[&name.parse().unwrap()].content.clone()
    };
    let base = place.server.state().images[&"base".parse().unwrap()].content.clone();
    let one = image("1", &["=", "other"]);
    assert_eq!((&one.filter, &*one.triggers.0[0].service), (&base.filter, "other"));
    let two = image("2", &["-", "="]);
    assert_eq!((&two.filter, &two.triggers), (&None, &base.triggers));
    let three = image("3", &["=", "-", "--health-check", "-"]);
    assert_eq!((three.triggers.0.len(), &three.health_check), (0, &None));
}

#[test]
fn layers_that_cannot_be_are_refused_before_anything_is_sent() {
    let place = with_base();
    let received = place.server.state().received;
    let add = |name: &str, members: Vec<Member>| {
        place.write("layer.tar", archive(members));
        place.run(&["add-overlay", name, "base", "layer.tar"])
    };
    let all = [
        add("web", vec![Member::file(b"etc/one/x", b"")]),
        add("web", vec![Member::hard_link(b"a", b"etc/none")]),
        add("web", vec![Member::directory(b"etc/.wh.one")]),
        add("base", vec![]),
        place.run(&["add-overlay", "web", "none", "layer.tar"]),
    ];
    expect_file!["expected/bad-layers.txt"].assert_eq(&all.join("\n"));
    assert_eq!(place.server.state().received, received);
}
