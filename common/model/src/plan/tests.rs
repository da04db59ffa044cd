//! Plans: exact for any two trees, and readable.

use std::collections::{BTreeMap, BTreeSet};

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::{
    Action, Blocked, Difference, FormerTree, Obstacle, Occupant, Plan, RefusedChange,
    RefusedChanges, RefusedKind, ScannedTree, apply, first_that_holds, plan,
};
use crate::object::Algorithm;
use crate::path::TreePath;
use crate::tree::tests::generate::{similar_trees, trees};
use crate::tree::text::{from_text, to_text};
use crate::tree::{Child, Leaf, Node, TimePrecision, Tree, TreeBuilder, only_root_writes};

fn run(have: &Tree, want: &Tree, kept: &BTreeSet<TreePath>, external: &BTreeSet<TreePath>) -> Plan {
    run_around(have, want, kept, external, &RefusedChanges::default())
}

fn run_around(
    have: &Tree,
    want: &Tree,
    kept: &BTreeSet<TreePath>,
    external: &BTreeSet<TreePath>,
    refused: &RefusedChanges,
) -> Plan {
    let occupied = BTreeMap::new();
    let have = ScannedTree {
        tree: have,
        kept_directories: kept,
        externally_linked: external,
        occupied: &occupied,
        refused,
        times: TimePrecision::default(),
    };
    plan(&have, want)
}

/// Refused changes of some paths of the trees.
fn refusals(have: &Tree, want: &Tree, seeds: &[(prop::sample::Index, u8)]) -> RefusedChanges {
    let paths: BTreeSet<TreePath> =
        have.nodes().chain(want.nodes()).map(|(path, _)| path).collect();
    let paths: Vec<TreePath> = paths.into_iter().filter(|path| !path.is_root()).collect();
    let refuse = |(index, kind): &(prop::sample::Index, u8)| {
        let path = index.get(&paths).clone();
        let kind = match (kind, want.get(&path)) {
            (0, Some(node)) => RefusedKind::Become(Box::new(node.node())),
            (0 | 1, _) => RefusedKind::Any,
            (2, _) => RefusedKind::Removal,
            (3, _) => RefusedKind::Below,
            _ => RefusedKind::Boundary,
        };
        RefusedChange { path, kind, why: "it was refused".to_owned() }
    };
    match paths.is_empty() {
        true => RefusedChanges::default(),
        false => seeds.iter().map(refuse).collect(),
    }
}

/// What a tree has at a path, without how files are shared.
fn resolved(tree: &Tree, path: &TreePath) -> Option<Node> {
    match tree.file(path) {
        Some(file) => Some(Node::Leaf(Leaf::File(file))),
        None => tree.get(path).map(|child| child.node()),
    }
}

fn nothing() -> BTreeSet<TreePath> {
    BTreeSet::new()
}

/// Directories of `have` that are not in `want` and hold kept content somewhere: they stay.
fn stays(have: &Tree, kept: &BTreeSet<TreePath>, path: &TreePath) -> bool {
    matches!(have.get(path), Some(Child::Directory(_)))
        && kept.iter().any(|directory| directory.starts_with(path))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn applying_a_plan_gives_what_is_required(
        have in trees(Algorithm::Blake3),
        want in trees(Algorithm::Blake3),
    ) {
        let plan = run(&have, &want, &nothing(), &nothing());
        prop_assert_eq!(&plan.blocked, &[]);
        let got = apply(&have, &plan).unwrap();
        prop_assert_eq!(to_text(&got), to_text(&want), "{:#?}", plan);
        prop_assert!(run(&got, &want, &nothing(), &nothing()).is_empty());
    }

    #[test]
    fn refused_changes_are_left_out_and_nothing_else(
        (have, want) in similar_trees(Algorithm::Blake3),
        seeds in prop::collection::vec((any::<prop::sample::Index>(), 0..5_u8), 0..4),
    ) {
        let refused = refusals(&have, &want, &seeds);
        let around = |have: &Tree| run_around(have, &want, &nothing(), &nothing(), &refused);
        let plan = around(&have);
        let got = apply(&have, &plan.without_blocked()).unwrap();
        prop_assert_eq!(&around(&got).operations, &[], "{:#?}", plan);
        let is_blocked = |path: &TreePath| {
            path.ancestors().any(|at| plan.blocked.iter().any(|blocked| blocked.path == at))
        };
        let paths = want.nodes().chain(got.nodes()).map(|(path, _)| path);
        for path in paths.filter(|path| !is_blocked(path)) {
            prop_assert_eq!(resolved(&got, &path), resolved(&want, &path), "{} {:#?}", path, plan);
        }
        for Blocked { path, .. } in &plan.blocked {
            prop_assert_eq!(got.get(path).is_some(), have.get(path).is_some(), "{}", path);
        }
    }

    #[test]
    fn a_plan_between_similar_trees_is_exact((have, want) in similar_trees(Algorithm::Blake3)) {
        let plan = run(&have, &want, &nothing(), &nothing());
        let got = apply(&have, &plan).unwrap();
        prop_assert_eq!(to_text(&got), to_text(&want), "{:#?}", plan);
        let untouched = plan.operations.iter().all(|operation| {
            have.get(&operation.path) != want.get(&operation.path)
                || operation.reason == [Difference::Links]
        });
        prop_assert!(untouched, "{:#?}", plan);
    }

    #[test]
    fn equal_trees_need_no_change(tree in trees(Algorithm::Blake3)) {
        prop_assert_eq!(run(&tree, &tree, &nothing(), &nothing()), Plan::default());
    }

    #[test]
    fn what_is_kept_stays_and_the_rest_converges(
        have in trees(Algorithm::Blake3),
        want in trees(Algorithm::Blake3),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 1..4),
    ) {
        let directories: Vec<TreePath> = have
            .nodes()
            .filter(|(_, node)| node.is_directory())
            .map(|(path, _)| path)
            .collect();
        let kept: BTreeSet<TreePath> =
            picks.iter().map(|pick| pick.get(&directories).clone()).collect();
        let plan = run(&have, &want, &kept, &nothing());
        for operation in &plan.operations {
            let takes_away = matches!(operation.action, Action::Remove | Action::Replace { .. });
            prop_assert!(!(takes_away && stays(&have, &kept, &operation.path)), "{operation}");
        }
        if let Some(blocked) = plan.blocked.first() {
            prop_assert!(stays(&have, &kept, &blocked.path));
            prop_assert!(!matches!(want.get(&blocked.path), Some(Child::Directory(_))));
            return Ok(());
        }
        let mut expected = TreeBuilder::new(Algorithm::Blake3);
        for (path, node) in want.nodes() {
            expected.insert(path, node).unwrap();
        }
        for (path, node) in have.nodes() {
            if stays(&have, &kept, &path) && expected.get(&path).is_none() {
                expected.insert(path, node).unwrap();
            }
        }
        let got = apply(&have, &plan).unwrap();
        prop_assert_eq!(to_text(&got), to_text(&expected.finish().unwrap()));
        let left: BTreeSet<TreePath> =
            kept.into_iter().filter(|path| got.get(path).is_some()).collect();
        prop_assert!(run(&got, &want, &left, &nothing()).is_empty());
    }

    #[test]
    fn files_linked_from_outside_are_never_changed_in_place(
        have in trees(Algorithm::Blake3),
        want in trees(Algorithm::Blake3),
    ) {
        let external: BTreeSet<TreePath> = have.nodes().map(|(path, _)| path).collect();
        let plan = run(&have, &want, &nothing(), &external);
        for operation in &plan.operations {
            if let Action::Change(node) = &operation.action {
                prop_assert!(!matches!(node, Node::Leaf(Leaf::File(_))), "{operation}");
            }
        }
        prop_assert_eq!(to_text(&apply(&have, &plan).unwrap()), to_text(&want));
    }

    #[test]
    fn files_with_privileges_or_other_writers_are_replaced_not_changed(
        have in trees(Algorithm::Blake3),
        want in trees(Algorithm::Blake3),
    ) {
        for operation in run(&have, &want, &nothing(), &nothing()).operations {
            if let Action::Change(Node::Leaf(Leaf::File(file))) = &operation.action {
                let old = have.file(&operation.path).unwrap().metadata;
                let (was, new) = (only_root_writes(old.uid, old.mode), &file.metadata);
                prop_assert!(was || old == *new, "{operation}");
                prop_assert!((old.mode | new.mode) & 0o6000 == 0, "{operation}");
            }
        }
    }
}

fn tree(text: &str) -> Tree {
    // `#x` stands for the id of the one-byte object `x`.
    let mut full = String::new();
    for word in text.split_inclusive([' ', '\n']) {
        match word.strip_prefix('#') {
            Some(rest) if rest.trim().len() == 1 => {
                full.push_str(&Algorithm::Blake3.digest(rest.trim().as_bytes()).to_string());
                full.push_str(&rest[1..]);
            }
            _ => full.push_str(word),
        }
    }
    from_text(Algorithm::Blake3, &full).unwrap()
}

#[track_caller]
fn check(have: &str, want: &str, kept: &[&str], expect: Expect) {
    let kept = kept.iter().map(|path| path.parse().unwrap()).collect();
    let plan = run(&tree(have), &tree(want), &kept, &nothing());
    let mut lines = String::new();
    for operation in &plan.operations {
        let line = operation.to_string();
        // Digests make the lines long and say nothing here.
        let short: Vec<&str> =
            line.split(' ').filter(|word| !word.starts_with("blake3:")).collect();
        lines.push_str(&short.join(" "));
        lines.push('\n');
    }
    for blocked in &plan.blocked {
        lines.push_str(&format!("blocked {}: {}\n", blocked.path, blocked.why));
    }
    expect.assert_eq(&lines);
}

const T: &str = "1.000000000";

#[test]
fn metadata_is_set_in_place_and_content_is_replaced() {
    check(
        &format!("f 644 0:0 {T} 1 #x /a\nf 644 0:0 {T} 1 #x /b\nf 4755 0:0 {T} 1 #x /c"),
        &format!("f 600 0:1 {T} 1 #x /a\nf 644 0:0 {T} 1 #y /b\nf 755 0:0 {T} 1 #x /c"),
        &[],
        expect![[r#"
            change f 600 0:1 1.000000000 1 /a (mode, owner)
            replace f 644 0:0 1.000000000 1 /b (content)
            replace f 755 0:0 1.000000000 1 /c (mode)
        "#]],
    );
}

#[test]
fn a_file_that_others_could_write_is_replaced_if_its_rights_change() {
    let have = format!(
        "f 644 7:7 {T} 1 #x /a\nf 664 0:7 {T} 1 #x /b\nf 646 0:0 {T} 1 #x /c\n\
         f 644 7:7 {T} 1 #x /d\nh /e -> /d\nf 644 7:7 1.000000001 1 #x /f\nf 755 0:7 {T} 1 #x /g"
    );
    check(
        &have,
        &format!(
            "f 644 0:0 {T} 1 #x /a\nf 644 0:7 {T} 1 #x /b\nf 644 0:0 {T} 1 #x /c\n\
             f 644 0:0 {T} 1 #x /d\nh /e -> /d\nf 644 7:7 {T} 1 #x /f\nf 700 7:0 {T} 1 #x /g"
        ),
        &[],
        expect![[r#"
            replace f 644 0:0 1.000000000 1 /a (owner)
            replace f 644 0:7 1.000000000 1 /b (mode)
            replace f 644 0:0 1.000000000 1 /c (mode)
            replace f 644 0:0 1.000000000 1 /d (owner)
            replace h /e -> /d (links)
            change f 644 7:7 1.000000000 1 /f (mtime)
            change f 700 7:0 1.000000000 1 /g (mode, owner)
        "#]],
    );
}

#[test]
fn a_directory_makes_way_for_a_symlink_in_one_step() {
    check(
        &format!("d 755 0:0 /lib\nd 755 0:0 /lib/x\nf 644 0:0 {T} 1 #x /lib/x/y\nd 755 0:0 /usr"),
        "l 0:0 /lib -> usr/lib\nd 755 0:0 /usr",
        &[],
        expect![[r#"
            replace l 0:0 /lib -> usr/lib [displaces 2 paths] (kind)
        "#]],
    );
}

#[test]
fn a_symlink_makes_way_for_a_directory() {
    check(
        "l 0:0 /lib -> usr/lib",
        &format!("d 755 0:0 /lib\nf 644 0:0 {T} 1 #x /lib/y"),
        &[],
        expect![[r#"
            replace d 755 0:0 /lib (kind)
            create f 644 0:0 1.000000000 1 /lib/y (missing)
        "#]],
    );
}

#[test]
fn kept_content_blocks_what_stands_in_its_place_and_keeps_its_directories() {
    check(
        "d 755 0:0 /srv\nd 755 0:0 /srv/data\nd 755 0:0 /srv/x\nd 755 0:0 /var\nd 755 0:0 /var/log",
        &format!("f 644 0:0 {T} 1 #x /var"),
        &["/srv/data", "/var/log"],
        expect![[r#"
            remove /srv/x (extra)
            blocked /var: /var/log holds content that the machine keeps
        "#]],
    );
}

#[test]
fn libraries_come_first_then_programs_then_boot_files_then_removals() {
    check(
        &format!("d 755 0:0 /old\nf 644 0:0 {T} 1 #x /old/x"),
        &format!(
            "d 755 0:0 /boot\nf 644 0:0 {T} 1 #k /boot/vmlinuz\nf 755 0:0 {T} 1 #p /app\n\
             f 644 0:0 {T} 1 #l /libx.so.6\nf 644 0:0 {T} 1 #e /etc"
        ),
        &[],
        expect![[r#"
            create f 644 0:0 1.000000000 1 /libx.so.6 (missing)
            create f 644 0:0 1.000000000 1 /etc (missing)
            create f 755 0:0 1.000000000 1 /app (missing)
            create d 755 0:0 /boot (missing)
            create f 644 0:0 1.000000000 1 /boot/vmlinuz (missing)
            remove /old/x (extra)
            remove /old (extra)
        "#]],
    );
}

#[test]
fn a_broken_hard_link_is_mended_and_a_group_changes_in_place_only_whole() {
    let whole = format!("f 644 0:0 {T} 1 #x /a\nh /b -> /a");
    check(
        &format!("f 644 0:0 {T} 1 #x /a\nf 644 0:0 {T} 1 #x /b"),
        &whole,
        &[],
        expect![[r#"
            replace h /b -> /a (links)
        "#]],
    );
    check(
        &whole,
        &format!("f 600 0:0 {T} 1 #x /a\nh /b -> /a"),
        &[],
        expect![[r#"
            change f 600 0:0 1.000000000 1 /a (mode)
        "#]],
    );
    check(
        &whole,
        &format!("f 600 0:0 {T} 1 #x /a\nf 644 0:0 {T} 1 #x /b"),
        &[],
        expect![[r#"
            replace f 600 0:0 1.000000000 1 /a (mode)
        "#]],
    );
    check(
        &whole,
        &format!("f 644 0:0 {T} 1 #y /a\nh /b -> /a"),
        &[],
        expect![[r#"
            replace f 644 0:0 1.000000000 1 /a (content)
            replace h /b -> /a (links)
        "#]],
    );
}

#[test]
fn a_computed_file_without_content_blocks_the_plan() {
    check(
        "",
        "g 644 0:0 files:6972 /resolv.conf",
        &[],
        expect![[r#"
            blocked /resolv.conf: the content that files:6972 should compute is missing
        "#]],
    );
}

#[test]
fn what_the_kernel_uses_is_neither_replaced_nor_removed() {
    let have = tree(
        "d 755 0:0 /extra\nd 755 0:0 /extra/mnt\nd 755 0:0 /proc\nd 755 0:0 /was\n\
         d 755 0:0 /was/mnt",
    );
    let want = tree("d 700 0:0 /proc\nl 0:0 /was -> proc");
    let occupied = ["/extra/mnt", "/proc", "/was/mnt"]
        .map(|path| (path.parse().unwrap(), Occupant::MountPoint));
    let have = ScannedTree {
        tree: &have,
        kept_directories: &nothing(),
        externally_linked: &nothing(),
        occupied: &occupied.into(),
        refused: &RefusedChanges::default(),
        times: TimePrecision::default(),
    };
    let plan = plan(&have, &want);
    let operations: Vec<String> = plan.operations.iter().map(ToString::to_string).collect();
    assert_eq!(operations, ["change d 700 0:0 /proc (mode)"]);
    let blocked: Vec<String> = plan.blocked.iter().map(|one| one.path.to_string()).collect();
    assert_eq!(blocked, ["/extra", "/extra/mnt", "/was"]);
}

#[test]
fn a_special_file_with_other_names_is_replaced_not_changed() {
    let have = tree("p 644 0:0 1.000000000 /a\np 644 0:0 1.000000000 /b");
    let want = tree("p 600 0:0 1.000000000 /a\np 644 0:0 1.000000000 /b");
    let planned = |external: &[&str]| {
        let external = external.iter().map(|path| path.parse().unwrap()).collect();
        run(&have, &want, &nothing(), &external).operations[0].to_string()
    };
    assert_eq!(planned(&[]), "change p 600 0:0 1.000000000 /a (mode)");
    assert_eq!(planned(&["/a", "/b"]), "replace p 600 0:0 1.000000000 /a (mode)");
}

#[test]
fn a_time_that_the_file_system_rounds_is_no_difference() {
    let file = |path, time| {
        format!("f 644 0:0 {time}00000000 1 #x /{path}\np 644 0:0 {time}00000000 /{path}p\n")
    };
    let want = tree(&(file("a", "5.9") + &file("b", "5.9") + &file("c", "6.0")));
    let have = tree(&(file("a", "5.0") + &file("b", "4.0") + &file("c", "6.0")));
    let times = TimePrecision { granularity_ns: 1_000_000_000, ..TimePrecision::default() };
    let (nothing, occupied) = (nothing(), BTreeMap::new());
    let have = ScannedTree {
        tree: &have,
        kept_directories: &nothing,
        externally_linked: &nothing,
        occupied: &occupied,
        refused: &RefusedChanges::default(),
        times,
    };
    let plan = plan(&have, &want);
    let paths: Vec<String> = plan.operations.iter().map(|one| one.path.to_string()).collect();
    assert_eq!(paths, ["/b", "/bp"]);
}

#[test]
fn what_depends_on_a_refused_change_is_blocked_with_it() {
    let have = tree(
        "d 755 0:0 /extra\nf 644 0:0 1.000000000 1 #x /extra/held\n\
         f 644 0:0 1.000000000 1 #x /extra/loose\nf 644 0:0 1.000000000 1 #x /new\n\
         d 755 0:0 /user\nf 644 0:0 1.000000000 1 #x /user/file",
    );
    let want = tree(
        "f 644 0:0 1.000000000 1 #y /a\nh /b -> /a\nd 755 0:0 /new\nd 755 0:0 /new/below\n\
         f 644 0:0 1.000000000 1 #z /new/below/file\nd 700 0:0 /user\n\
         f 644 0:0 1.000000000 1 #y /user/file\nd 755 0:0 /volume\n\
         f 644 0:0 1.000000000 1 #y /volume/file",
    );
    let refused = |path: &str, kind| {
        let why = format!("{path} was refused");
        RefusedChange { path: path.parse().unwrap(), kind, why }
    };
    let node = |path: &str| Box::new(want.get(&path.parse().unwrap()).unwrap().node());
    let refused: RefusedChanges = [
        refused("/a", RefusedKind::Become(node("/a"))),
        refused("/extra/held", RefusedKind::Removal),
        refused("/gone", RefusedKind::Removal),
        refused("/new", RefusedKind::Any),
        refused("/user", RefusedKind::Below),
        refused("/volume", RefusedKind::Boundary),
    ]
    .into_iter()
    .collect();
    let plan = run_around(&have, &want, &nothing(), &nothing(), &refused);
    let operations: Vec<String> = plan.operations.iter().map(ToString::to_string).collect();
    assert_eq!(operations, ["change d 700 0:0 /user (mode)", "remove /extra/loose (extra)"]);
    let shown = |Blocked { path, why }: &Blocked| format!("{path}: {why}");
    let blocked: Vec<String> = plan.blocked.iter().map(shown).collect();
    let expected = [
        "/a: /a was refused",
        "/b: /a would have to change first",
        "/extra: /extra/held would have to change first",
        "/extra/held: /extra/held was refused",
        "/new: /new was refused",
        "/new/below: /new would have to change first",
        "/new/below/file: /new/below would have to change first",
        "/user/file: /user was refused",
        "/volume: another file-system, such as a btrfs subvolume, is there and is left as it is",
        "/volume/file: /volume would have to change first",
    ];
    assert_eq!(blocked, expected);
}

#[test]
fn a_directory_that_is_left_alone_is_blocked_whatever_is_required_of_it() {
    let have = tree("d 755 0:0 /a\nd 755 0:0 /a/full\nf 644 0:0 1.000000000 1 #x /z");
    let full: TreePath = "/a/full".parse().unwrap();
    let kept = BTreeSet::from([full.clone()]);
    let refused = |path: &TreePath| RefusedChange {
        path: path.clone(),
        kind: RefusedKind::LeftAlone,
        why: "too many".to_owned(),
    };
    let gone: TreePath = "/gone".parse().unwrap();
    let refused: RefusedChanges = [refused(&full), refused(&gone)].into_iter().collect();
    let file = "f 644 0:0 1.000000000 1 #y";
    // What is required of it: the same, another mode, a file in it, nothing twice, something else.
    let table = [
        ("d 755 0:0 /a\nd 755 0:0 /a/full".to_owned(), 1),
        ("d 755 0:0 /a\nd 700 0:0 /a/full".to_owned(), 1),
        (format!("d 755 0:0 /a\nd 755 0:0 /a/full\n{file} /a/full/f"), 2),
        ("d 755 0:0 /a".to_owned(), 1),
        (String::new(), 1),
        (format!("d 755 0:0 /a\n{file} /a/full"), 1),
    ];
    for (want, blocked) in table {
        let plan = run_around(&have, &tree(&want), &kept, &nothing(), &refused);
        let operations: Vec<String> = plan.operations.iter().map(ToString::to_string).collect();
        assert_eq!(operations, ["remove /z (extra)"], "{want}");
        assert_eq!(plan.blocked.len(), blocked, "{want}: {:?}", plan.blocked);
        assert_eq!(plan.blocked[0].path, full, "{want}");
    }
}

#[test]
fn a_new_image_is_held_by_what_it_requires_and_the_former_did_not() {
    let former = tree(
        "d 755 0:0 /d\nf 644 0:0 1.000000000 1 #x /linked\nf 644 0:0 1.000000000 1 #x /old\n\
         f 644 0:0 1.000000000 1 #x /same",
    );
    let want = tree(
        "d 700 0:0 /d\nd 755 0:0 /dir\nf 644 0:0 1.000000000 1 #y /dir/file\n\
         f 644 0:0 1.000000000 1 #x /a\nh /linked -> /a\nf 644 0:0 1.000000000 1 #x /same",
    );
    let refused = Obstacle::Refused { why: String::new() };
    // The blocked path; whether it holds a machine that had the former image, an unknown one, none.
    let table = [
        ("/same", &refused, [false, true, true]),
        ("/linked", &refused, [false, true, true]),
        ("/extra", &refused, [false, true, false]),
        ("/old", &refused, [true, true, false]),
        ("/a", &refused, [true, true, true]),
        ("/d", &refused, [true, true, true]),
        ("/dir", &Obstacle::Boundary, [false, false, false]),
        ("/a", &Obstacle::Boundary, [true, true, true]),
    ];
    for (path, why, expected) in table {
        let blocked = [Blocked { path: path.parse().unwrap(), why: why.clone() }];
        let formers = [FormerTree::Known(&former), FormerTree::Unknown, FormerTree::Nothing];
        let held = formers.map(|former| first_that_holds(&blocked, &want, former).is_some());
        assert_eq!(held, expected, "{path} {why:?}");
    }
    let blocked: [TreePath; 2] = ["/dir", "/dir/file"].map(|path| path.parse().unwrap());
    let [above, below] = &blocked;
    let blocked = [
        Blocked { path: above.clone(), why: Obstacle::Boundary },
        Blocked { path: below.clone(), why: Obstacle::Needs { path: above.clone() } },
    ];
    assert_eq!(first_that_holds(&blocked, &want, FormerTree::Known(&former)), None);
}
