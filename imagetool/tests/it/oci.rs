//! Images of other tools: as umoci and skopeo make them, and as nobody should.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use expect_test::{expect, expect_file};
use model::object::Algorithm;
use serde_json::{Value, json};

use crate::command::{Place, is_root, rsync_finds_no_difference};
use crate::layouts::{CONFIG, INDEX, LAYER, Layout, named, platform, sha256};
use crate::tars::{Member, archive};
use crate::trees::{fill, read, shown, tool};

/// The digest of the tree of the image that `arguments` add.
#[track_caller]
fn added(place: &Place, arguments: &[&str]) -> String {
    let output = place.run(&[&["--format", "json", "add"], arguments].concat());
    let start = output.find("{\n").unwrap_or_else(|| panic!("{output}"));
    let json = serde_json::Deserializer::from_str(&output[start..]).into_iter::<Value>().next();
    let json = json.unwrap().unwrap();
    json["root"].as_str().unwrap().to_owned()
}

/// Changes the tree that `fill` made, in every way in which layers change one.
fn change(root: &Path) {
    fs::remove_file(root.join("etc/dangling")).unwrap();
    fs::remove_dir_all(root.join("empty")).unwrap();
    // Replacements: a file by a directory and back, a symlink by a file, a directory by a symlink.
    fs::remove_file(root.join("etc/motd")).unwrap();
    fs::create_dir(root.join("etc/motd")).unwrap();
    fs::write(root.join("etc/motd/new"), "new").unwrap();
    fs::remove_dir_all(root.join("etc/conf.d")).unwrap();
    fs::write(root.join("etc/conf.d"), "a file now").unwrap();
    fs::remove_file(root.join("bin")).unwrap();
    fs::write(root.join("bin"), "no symlink").unwrap();
    symlink("etc", root.join("empty")).unwrap();
    // Metadata of an existing directory alone, and of a file alone.
    fs::set_permissions(root.join("usr"), fs::Permissions::from_mode(0o711)).unwrap();
    fs::set_permissions(root.join("etc/empty"), fs::Permissions::from_mode(0o600)).unwrap();
    // A name of a group goes; a new group comes.
    fs::remove_file(root.join("usr/again")).unwrap();
    fs::create_dir(root.join("srv")).unwrap();
    fs::write(root.join("srv/one"), "linked").unwrap();
    fs::hard_link(root.join("srv/one"), root.join("srv/two")).unwrap();
}

#[test]
fn images_by_umoci_and_skopeo_are_what_umoci_unpacks() {
    assert!(is_root(), "umoci unpacks devices and owners only as root");
    let place = Place::new();
    let directory = place.path("");
    let run = |words: &[&str]| tool(&directory, words);
    run(&["umoci", "init", "--layout", "layout"]);
    run(&["umoci", "new", "--image", "layout:none"]);
    run(&["umoci", "unpack", "--image", "layout:none", "b0"]);
    fill(&place.path("b0/rootfs"));
    fs::write(place.path("b0/rootfs/etc/motd"), "replaced by a directory").unwrap();
    run(&["umoci", "repack", "--image", "layout:one", "b0"]);
    run(&["umoci", "unpack", "--image", "layout:one", "b1"]);
    change(&place.path("b1/rootfs"));
    run(&["umoci", "repack", "--image", "layout:two", "b1"]);
    // A directory that hides what is below it, and a whiteout by itself.
    fs::create_dir(place.path("opaque")).unwrap();
    fs::write(place.path("opaque/alone"), "alone").unwrap();
    let insert = ["umoci", "insert", "--image", "layout:two", "--tag", "three"];
    run(&[&insert[..], &["--opaque", "opaque", "/usr/bin"]].concat());
    let insert = ["umoci", "insert", "--image", "layout:three", "--tag", "three"];
    run(&[&insert[..], &["--whiteout", "/srv/one"]].concat());
    for (image, number) in [("one", 1), ("two", 2), ("three", 3)] {
        let bundle = format!("unpacked{number}");
        run(&["umoci", "unpack", "--image", &format!("layout:{image}"), &bundle]);
        let rootfs = place.path(&bundle).join("rootfs");
        let want = read(&rootfs);
        let name = format!("t/{number}");
        let root = added(&place, &[&name, "layout", "-", "-", "--image-ref", image]);
        let tree = place.run(&["show", &name, "--tree"]);
        assert_eq!(root, want.digest().to_string(), "{image}\n{tree}\n{}", shown(&want));
        let copy = format!("copy{number}");
        assert!(place.run(&["get", &name, &copy]).ends_with("exit 0\n"));
        rsync_finds_no_difference(&rootfs, &place.path(&copy));
        let archives = [
            (format!("oci{number}.tar"), "oci-archive", "x"),
            (format!("docker{number}.tar"), "docker-archive", "x/y:z"),
        ];
        for (file, transport, tag) in archives {
            let to = format!("{transport}:{file}:{tag}");
            run(&["skopeo", "--insecure-policy", "copy", &format!("oci:layout:{image}"), &to]);
            assert_eq!(added(&place, &[&file, &file, "-", "-"]), root, "{file}");
            run(&["gzip", "--keep", &file]);
            let packed = format!("{file}.gz");
            assert_eq!(added(&place, &[&packed, &packed, "-", "-"]), root, "{packed}");
        }
    }
    place.check(
        &["add", "t/4", "layout", "-", "-"],
        expect![[r#"
            error: layout: it contains several images for linux/amd64: none, one, three, two
            hint: choose one with --image-ref NAME, or a narrower --platform
            exit 1
        "#]],
    );
}

#[test]
fn what_a_higher_layer_replaces_is_not_uploaded() {
    let place = Place::new();
    let layout = Layout::new(&place.path("layout"));
    let lower = archive([
        Member::file(b"a", b"replaced"),
        Member::file(b"b", b"removed"),
        Member::file(b"c", b"kept"),
        Member::file(b"d/e", b"hidden"),
    ]);
    let upper = archive([
        Member::file(b"a", b"new"),
        Member::file(b".wh.b", b""),
        Member::file(b"d/.wh..wh..opq", b""),
    ]);
    layout.index(&[layout.image("amd64", &[&lower, &upper])]);
    place.check(
        &["add", "a", "layout", "-", "-"],
        expect![[r#"
            Added a: 3 entries, 7 B; sent 4 new objects (235 B), 0 were there already.
            exit 0
        "#]],
    );
    let objects = &place.server.state().objects;
    for (content, want) in
        [("new", true), ("kept", true), ("replaced", false), ("removed", false), ("hidden", false)]
    {
        let id = Algorithm::Blake3.digest(content.as_bytes());
        assert_eq!(objects.contains_key(&id), want, "{content}");
    }
}

#[test]
fn one_of_several_platforms_is_taken() {
    let place = Place::new();
    let layout = Layout::new(&place.path("layout"));
    let image = |architecture: &str| {
        let content = archive([Member::file(architecture.as_bytes(), b"")]);
        let image = layout.image(architecture, &[&content]);
        platform(image, "linux", architecture)
    };
    let mut attestation = platform(image("of-the-build"), "unknown", "unknown");
    attestation["annotations"] = json!({"vnd.docker.reference.type": "attestation-manifest"});
    let [amd64, arm64] = [image("amd64"), image("arm64")];
    // A list in a list, as registries have it.
    layout.index(&[layout.list(&[amd64, arm64.clone(), attestation])]);
    let paths = |name: &str| {
        let tree = place.run(&["show", name, "--tree", "--format", "json"]);
        let tree: Value = serde_json::from_str(tree.strip_suffix("exit 0\n").unwrap()).unwrap();
        tree["tree"][1].as_str().unwrap().rsplit(' ').next().unwrap().to_owned()
    };
    added(&place, &["own", "layout", "-", "-"]);
    let own = if cfg!(target_arch = "x86_64") { "/amd64" } else { "/arm64" };
    assert_eq!(paths("own"), own);
    added(&place, &["arm", "layout", "-", "-", "--platform", "linux/arm64"]);
    assert_eq!(paths("arm"), "/arm64");
    // As an archive by GNU tar, with its `./` and directories.
    tool(&place.path("layout"), &["tar", "-cf", "../layout.tar", "."]);
    added(&place, &["tar", "layout.tar", "-", "-", "--platform", "linux/arm64"]);
    assert_eq!(paths("tar"), "/arm64");
    let all = [
        place.run(&["add", "x", "layout", "-", "-", "--platform", "linux/s390x"]),
        place.run(&["add", "x", "layout", "-", "-", "--platform", "linux"]),
        place.run(&["add", "x", "layout", "-", "-", "--image-ref", "none"]),
        place.run(&["add", "x", "layout", "-", "-", "--plain", "--platform", "linux/s390x"]),
    ];
    expect_file!["expected/platforms.txt"].assert_eq(&all.join("\n"));
    // The only one is taken whatever it is for, and a layout may be taken for what it is.
    layout.index(&[named(arm64, "only")]);
    added(&place, &["only", "layout", "-", "-"]);
    assert_eq!(paths("only"), "/arm64");
    added(&place, &["plain", "layout", "-", "-", "--plain"]);
    assert_eq!(paths("plain"), "/blobs");
}

#[test]
fn layers_may_end_without_a_mark_because_their_digest_tells_where() {
    let place = Place::new();
    let whole = archive([Member::file(b"a", b"1"), Member::file(b"b", &[7; 600])]);
    let ends = [whole.len(), whole.len() - 512, whole.len() - 1_024, 1_536 + 600, 1_024, 513, 0];
    for (end, paths) in ends.into_iter().zip([3, 3, 3, 3, 2, 2, 1]) {
        let layout = Layout::new(&place.path(&end.to_string()));
        layout.index(&[layout.image("amd64", &[&whole[..end]])]);
        let name = end.to_string();
        added(&place, &[&name, &name, "-", "-"]);
        let tree = place.run(&["show", &name, "--tree"]);
        let lines = tree.lines().filter(|line| !line.starts_with(['#', 'e']));
        assert_eq!(lines.count(), paths, "{end}: {tree}");
    }
}

#[test]
fn layers_may_be_packed_in_any_way() {
    let place = Place::new();
    let content = archive([Member::file(b"a", &[7; 3_000])]);
    for (index, (name, packed)) in crate::hostile::compressed(&content).into_iter().enumerate() {
        let layout = Layout::new(&place.path(name));
        let config = json!({
            "os": "linux", "architecture": "amd64",
            "rootfs": {"type": "layers", "diff_ids": [sha256(&content).to_string()]},
        });
        let config = layout.document(CONFIG, &config);
        let kind = ["", "+gzip", "+zstd", "", ""][index];
        let layer = layout.blob(&format!("{LAYER}{kind}"), &packed);
        layout.index(&[layout.manifest(&config, &[layer])]);
        added(&place, &[name, name, "-", "-"]);
    }
    assert_eq!(place.server.state().objects.len(), 2);
}

/// What is said of a layout that `make` makes.
fn refused(make: impl FnOnce(&Layout)) -> String {
    let place = Place::new();
    make(&Layout::new(&place.path("layout")));
    let said = place.run(&["add", "a", "layout", "-", "-"]);
    let state = place.server.state();
    assert_eq!((state.received, state.images.len()), (0, 0), "{said}");
    let said = said.strip_suffix("exit 1\n").unwrap_or_else(|| panic!("{said}"));
    let said = said.strip_prefix("error: layout: ").unwrap_or(said);
    said.split("\nhint: ").next().unwrap().to_owned()
}

#[test]
fn layouts_that_lie_are_refused_whole() {
    let good = || archive([Member::file(b"a", b"1")]);
    let config = |layers: &[&[u8]]| {
        let digests: Vec<String> = layers.iter().map(|one| sha256(one).to_string()).collect();
        json!({"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": digests}})
    };
    let with_layer = |change: fn(&Layout, &mut Value)| {
        move |layout: &Layout| {
            let content = archive([Member::file(b"a", b"1")]);
            let mut layer = layout.blob(LAYER, &content);
            let digest = sha256(&content).to_string();
            let config =
                json!({"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [digest]}});
            let config = layout.document(CONFIG, &config);
            change(layout, &mut layer);
            layout.index(&[layout.manifest(&config, &[layer])]);
        }
    };
    type Make<'a> = Box<dyn FnOnce(&Layout) + 'a>;
    let table: Vec<(Make<'_>, &str)> = vec![
        (Box::new(|layout| layout.index(&[])), "it contains no image"),
        (
            Box::new(with_layer(|layout, layer| {
                let digest = layer["digest"].as_str().unwrap().to_owned().try_into().unwrap();
                let path = layout.path(&digest);
                let mut bytes = fs::read(&path).unwrap();
                bytes[600] ^= 1;
                fs::write(path, bytes).unwrap();
            })),
            "should have the digest sha256:",
        ),
        (
            Box::new(with_layer(|layout, layer| {
                let digest = layer["digest"].as_str().unwrap().to_owned().try_into().unwrap();
                let path = layout.path(&digest);
                let bytes = fs::read(&path).unwrap();
                fs::write(path, &bytes[..1_000]).unwrap();
            })),
            "should have 2048 bytes, but has 1000",
        ),
        (
            Box::new(with_layer(|_, layer| layer["size"] = json!(7))),
            "should have 7 bytes, but has 8",
        ),
        (
            Box::new(with_layer(|_, layer| {
                layer["digest"] = json!(format!("sha256:{}", "0".repeat(64)));
            })),
            "is missing",
        ),
        (
            Box::new(with_layer(|_, layer| layer["digest"] = json!("sha256:../../etc/passwd"))),
            "invalid digest `sha256:../../etc/passwd`: expected sha256:<64 hex> or \
             sha512:<128 hex>",
        ),
        (
            Box::new(with_layer(|_, layer| layer["mediaType"] = json!("x/encrypted"))),
            "is not an image of a machine: its layer has the type `x/encrypted`",
        ),
        (
            Box::new(|layout| {
                let config = layout.document("application/vnd.cncf.helm.config", &json!({}));
                layout.index(&[layout.manifest(&config, &[])]);
            }),
            "its configuration has the type `application/vnd.cncf.helm.config`",
        ),
        (
            Box::new(|layout| {
                let config = layout.document(CONFIG, &config(&[&good(), &good()]));
                layout.index(&[layout.manifest(&config, &[layout.blob(LAYER, &good())])]);
            }),
            "the image has 1 layers, but lists the digests of 2",
        ),
        (
            Box::new(|layout| {
                let config = layout.document(CONFIG, &config(&[b"other"]));
                layout.index(&[layout.manifest(&config, &[layout.blob(LAYER, &good())])]);
            }),
            "): its expanded content has the digest sha256:",
        ),
        (
            // A document of five megabytes.
            Box::new(|layout| {
                let large = json!({"manifests": [], "x": "x".repeat(5 << 20)});
                layout.index(&[layout.document(INDEX, &large)]);
            }),
            "is longer than 4194304 bytes, too long for a document",
        ),
        (
            Box::new(|layout| {
                layout.index(&[layout.blob(INDEX, "[".repeat(100_000).as_bytes())]);
            }),
            "is not a valid document: ",
        ),
        (
            // Lists in lists; none can name itself by digest, but deep they can be.
            Box::new(|layout| {
                let mut list = layout.image("amd64", &[]);
                for _ in 0..12 {
                    list = layout.list(&[list]);
                }
                layout.index(&[list]);
            }),
            "it has too many lists of images, or they are nested too deeply",
        ),
        (
            Box::new(|layout| {
                let lists: Vec<Value> =
                    (0..300).map(|number| named(layout.list(&[]), &number.to_string())).collect();
                layout.index(&lists);
            }),
            "it has too many lists of images, or they are nested too deeply",
        ),
        (
            Box::new(|layout| {
                let image = layout.image("amd64", &[]);
                layout.index(&vec![image; 1_001]);
            }),
            "it has too many lists of images, or they are nested too deeply",
        ),
        (
            // A list that says it is named by its own digest is not what that digest says.
            Box::new(|layout| {
                let list = layout.list(&[]);
                let digest = list["digest"].as_str().unwrap().to_owned().try_into().unwrap();
                let looped = json!({"manifests": [list]}).to_string();
                fs::write(layout.path(&digest), looped).unwrap();
                layout.index(&[list]);
            }),
            "should have the digest sha256:",
        ),
        (
            Box::new(|layout| {
                let below = archive([Member::symlink(b"etc", b"/etc")]);
                let above = archive([Member::file(b"etc/passwd", b"")]);
                layout.index(&[layout.image("amd64", &[&below, &above])]);
            }),
            "): the entry `etc/passwd` is refused: it is below /etc, which is a symlink",
        ),
        (
            Box::new(|layout| {
                let layer = archive([Member::file(b"../x", b"")]);
                layout.index(&[layout.image("amd64", &[&layer])]);
            }),
            "): the entry `../x` is refused: its name contains `..`",
        ),
        (
            Box::new(|layout| {
                let layer = archive([Member::file(b"a", &[7; 3_000])]);
                layout.index(&[layout.image("amd64", &[&layer[..1_000]])]);
            }),
            "): the archive is truncated: it ends at byte 1000, after a",
        ),
    ];
    for (make, want) in table {
        let got = refused(make);
        assert!(got.contains(want), "{got}\nwanted: {want}");
    }
}

#[test]
fn saved_images_that_lie_are_refused_whole() {
    let layer = archive([Member::file(b"a", b"1")]);
    let config = json!({
        "os": "linux", "architecture": "amd64",
        "rootfs": {"diff_ids": [sha256(&layer).to_string()]},
    })
    .to_string();
    let digest = sha256(config.as_bytes());
    let name = format!("{}.json", digest.hex());
    let tar = format!("{}.tar", sha256(&layer).hex());
    let link = format!("{}/layer.tar", "0".repeat(64));
    let members = |layer_name: &str, config: &str| {
        let manifest = json!([{"Config": name, "RepoTags": ["x:1"], "Layers": [layer_name]}]);
        vec![
            Member::file(b"manifest.json", manifest.to_string().as_bytes()),
            Member::file(name.as_bytes(), config.as_bytes()),
            Member::file(tar.as_bytes(), &layer),
            Member::symlink(link.as_bytes(), format!("../{tar}").as_bytes()),
        ]
    };
    let place = Place::new();
    let add = |image: &str, members: Vec<Member>| {
        place.write("a.tar", archive(members));
        place.run(&["add", image, "a.tar", "-", "-"])
    };
    assert!(add("one", members(&tar, &config)).ends_with("exit 0\n"));
    assert!(add("two", members(&link, &config)).ends_with("exit 0\n"));
    let table = [
        (members("../../etc/passwd", &config), "`manifest.json` names `../../etc/passwd`, which"),
        (members("/etc/passwd", &config), "`manifest.json` names `/etc/passwd`, which"),
        (members("absent", &config), "`absent` is missing"),
        (members(&tar, &config.replace("amd64", "arm64")), "should have the digest sha256:"),
        (members("manifest.json", &config), "): this is not a tar archive"),
    ];
    for (members, want) in table {
        let got = add("three", members);
        assert!(got.contains(want), "{got}\nwanted: {want}");
        assert!(got.ends_with("exit 1\n"), "{got}");
    }
    // So are archives with names that no member can have, as an archive of files.
    let outside = |name: &[u8]| {
        let mut members = members(&tar, &config);
        members.push(Member::file(name, b""));
        members
    };
    for (name, why) in [
        (&b"blobs/../../x"[..], "its name contains `..`"),
        (b"/blobs/x", "its name is absolute"),
        (b"manifest.json", "it is in the archive twice"),
    ] {
        let got = add("three", outside(name));
        assert!(got.contains(why) && got.ends_with("exit 1\n"), "{got}");
    }
    // What only begins like an image is an archive of files.
    let plain = vec![Member::file(b"manifest.json", b"{}"), Member::file(b"main.js", b"")];
    assert!(add("four", plain).ends_with("exit 0\n"));
}
