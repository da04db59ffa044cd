//! Trees are compared as they are written.

use expect_test::{Expect, expect};
use model::object::Algorithm;
use model::tree::text::from_text;
use model::tree::{Child, Tree};

use super::*;

/// Makes a tree of text; `{x}` stands for a digest of its own.
fn tree(text: &str) -> Tree {
    let mut all = text.to_owned();
    for word in ["{1}", "{2}"] {
        all = all.replace(word, &Algorithm::Blake3.digest(word.as_bytes()).to_string());
    }
    from_text(Algorithm::Blake3, &all).unwrap()
}

/// Compares with nothing known at first; gives the lines, and kind many directories were fetched.
fn lines(before: &Tree, after: &Tree, ignore: &[IgnoredPart]) -> (String, usize) {
    let ignore = ignore.iter().copied().collect();
    let mut cache = DirectoryCache::default();
    let mut fetched = 0;
    loop {
        let changes = compare(&mut cache, before.digest(), after.digest(), &ignore).unwrap();
        let wanted = cache.wanted();
        if wanted.is_empty() {
            let lines: String = changes.iter().map(|change| change.line() + "\n").collect();
            return (lines, fetched);
        }
        for id in wanted {
            fetched += 1;
            let of = |tree: &Tree| {
                tree.nodes().find_map(|(path, _)| match tree.get(&path) {
                    Some(Child::Directory(found)) if found.digest() == id => Some(found.encode()),
                    _ => None,
                })
            };
            cache.insert(id, &of(before).or_else(|| of(after)).unwrap()).unwrap();
        }
    }
}

#[track_caller]
fn check(before: &str, after: &str, ignore: &[IgnoredPart], expect: Expect) {
    expect.assert_eq(&lines(&tree(before), &tree(after), ignore).0);
}

const BEFORE: &str = "\
d 755 0:0 /a
f 644 0:0 1.000000000 5 {1} /a/same
f 644 0:0 1.000000000 5 {1} /content
d 755 0:0 /directory
f 644 0:0 1.000000000 5 {1} /directory/inside
f 644 0:0 1.000000000 5 {1} /gone
f 644 0:0 1.000000000 5 {1} /metadata user.a=1 user.b=2
c 600 0:0 1.000000000 1,3 /null
l 0:0 /symlink -> one
";

const AFTER: &str = "\
d 755 0:0 /a
f 644 0:0 1.000000000 5 {1} /a/same
f 644 0:0 1.000000000 1250 {2} /content
l 0:0 /directory -> a
d 700 0:0 /new
f 644 0:0 1.000000000 5 {1} /new/inside
f 600 7:8 1.000000000 5 {1} /metadata user.a=1 user.b=3 user.c=4
c 600 0:0 1.000000000 1,5 /null
l 0:0 /symlink -> two
";

#[test]
fn each_difference_is_told_with_both_values() {
    check(
        BEFORE,
        AFTER,
        &[],
        expect![[r#"
            changed /content: content 5 B to 1.3 kB
            changed /directory: kind directory to symlink
            removed /directory/inside: file, 5 B
            removed /gone: file, 5 B
            changed /metadata: mode 644 to 600, owner 0:0 to 7:8, xattrs user.b user.c
            added   /new: directory
            added   /new/inside: file, 5 B
            changed /null: device 1,3 to 1,5
            changed /symlink: target one to two
        "#]],
    );
}

#[test]
fn times_are_told_in_full() {
    check(
        "p 600 0:0 1.000000000 /x\n",
        "p 600 0:0 1700000000.000000000 /x\n",
        &[],
        expect![[r#"
            changed /x: mtime 1970-01-01 00:00:01 UTC to 2023-11-14 22:13:20 UTC
        "#]],
    );
}

#[test]
fn what_is_ignored_is_no_difference() {
    use IgnoredPart::{Content, Device, Mode, Mtime, Owner, Target, Xattrs};
    check(
        BEFORE,
        AFTER,
        &[Content, Device, Mode, Mtime, Owner, Target, Xattrs],
        expect![[r#"
            changed /directory: kind directory to symlink
            removed /directory/inside: file, 5 B
            removed /gone: file, 5 B
            added   /new: directory
            added   /new/inside: file, 5 B
        "#]],
    );
}

#[test]
fn hard_links_are_compared_as_the_files_they_are() {
    let before = "\
d 755 0:0 /a
f 644 0:0 1.000000000 5 {1} /a/first
f 644 0:0 1.000000000 5 {1} /alone
h /linked -> /a/first
";
    let after = "\
d 755 0:0 /a
f 644 0:0 1.000000000 5 {1} /a/first
h /alone -> /a/first
f 600 0:0 1.000000000 5 {1} /linked
";
    check(
        before,
        after,
        &[],
        expect![[r#"
            changed /alone: links none to /a/first
            changed /linked: mode 644 to 600, links /a/first to none
        "#]],
    );
    check(
        before,
        after,
        &[IgnoredPart::Links],
        expect![[r#"
            changed /linked: mode 644 to 600
        "#]],
    );
}

#[test]
fn only_directories_that_differ_are_fetched() {
    let before = tree(BEFORE);
    assert_eq!(lines(&before, &before, &[]), (String::new(), 0));
    let large = |mode: &str| {
        let all: String = (0..9)
            .map(|at| format!("d 755 0:0 /{at}\nf 644 0:0 1.000000000 5 {{1}} /{at}/x\n"))
            .collect();
        tree(&format!("{all}d 755 0:0 /9\nf {mode} 0:0 1.000000000 5 {{1}} /9/x\n"))
    };
    let (text, fetched) = lines(&large("600"), &large("644"), &[]);
    assert_eq!(text, "changed /9/x: mode 600 to 644\n");
    // Both roots, and both of the directory that differs.
    assert_eq!(fetched, 4);
}

#[test]
fn changes_are_sorted_by_how_in_json() {
    let (before, after) = (tree(BEFORE), tree(AFTER));
    let mut cache = DirectoryCache::default();
    cache.insert_tree(&before);
    cache.insert_tree(&after);
    let (before, after) = (before.digest(), after.digest());
    let changes = compare(&mut cache, before, after, &Ignore::new()).unwrap();
    let json = serde_json::to_value(TreeChangesRecord::of(&changes)).unwrap();
    assert_eq!(
        json["added"][1],
        serde_json::json!({
            "path": "/new/inside",
            "kind": "file",
            "mode": "644",
            "uid": 0,
            "gid": 0,
            "mtime": {"seconds": "1", "nanoseconds": 0},
            "size_bytes": "5",
            "object": Algorithm::Blake3.digest(b"{1}").to_string(),
        })
    );
    assert_eq!(
        json["changed"][4],
        serde_json::json!({
            "path": "/symlink",
            "what": ["target"],
            "before": {"kind": "symlink", "mode": "777", "uid": 0, "gid": 0, "target": "one"},
            "after": {"kind": "symlink", "mode": "777", "uid": 0, "gid": 0, "target": "two"},
        })
    );
    assert_eq!(json["removed"].as_array().unwrap().len(), 2);
}
