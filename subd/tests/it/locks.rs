//! Files and directories with the flags immutable and append-only.

use std::path::Path;
use std::process::Command;

use api::subd::UpdateOutcome;
use model::tree::text::to_text;

use crate::fixture::{Edit, Source, Sub, path, request};

/// Gives and takes flags.
fn chattr(change: &str, at: &Path) {
    assert!(Command::new("chattr").arg(change).arg(at).status().unwrap().success(), "{at:?}");
}

/// Which of the two flags it has.
fn flags(at: &Path) -> String {
    let listed = Command::new("lsattr").arg("-d").arg(at).output().unwrap().stdout;
    let listed = String::from_utf8(listed).unwrap();
    let flags = listed.split(' ').next().unwrap();
    flags.chars().filter(|flag| "ia".contains(*flag)).collect()
}

const LOCKED: [(&str, &str); 8] = [
    ("/d", "i"),
    ("/d/replaced", "i"),
    ("/d/removed", "a"),
    ("/d/gone", "ia"),
    ("/changed", "a"),
    ("/other", "i"),
    ("/other/replaced", "i"),
    ("/tree/in", "i"),
];

fn lock_all(sub: &Sub) {
    // Below an immutable directory flags can still be set.
    for (text, locks) in LOCKED {
        chattr(&format!("+{locks}"), &sub.at(text));
    }
}

fn all_flags(sub: &Sub) -> Vec<(&'static str, String)> {
    LOCKED.iter().map(|(text, _)| (*text, flags(&sub.at(text)))).collect()
}

async fn start() -> (Sub, Source, model::tree::Tree) {
    let (sub, source) = (Sub::start().await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let mut edit = Edit::of(&empty, &source);
    for directory in ["/d", "/d/gone", "/other", "/tree"] {
        edit = edit.directory(directory, 0o755);
    }
    for file in ["/d/replaced", "/d/removed", "/changed", "/other/replaced", "/tree/in", "/z"] {
        edit = edit.file(file, "old");
    }
    let first = edit.done();
    assert_eq!(sub.converge(1, &source, &first).await.outcome, UpdateOutcome::Done);
    (sub, source, first)
}

#[tokio::test(flavor = "multi_thread")]
async fn flags_are_taken_from_planned_paths_alone_and_what_stays_gets_them_back() {
    let (sub, source, first) = start().await;
    lock_all(&sub);
    // Nothing is planned for `/other`, which stays locked with what it holds.
    let second = Edit::of(&first, &source)
        .file("/d/replaced", "new")
        .file("/d/new", "new")
        .remove("/d/removed")
        .remove("/d/gone")
        .metadata("/changed", |metadata| metadata.mode = 0o600)
        .remove("/tree")
        .file("/tree", "a file")
        .done();
    let last = sub.converge(2, &source, &second).await;
    assert_eq!(last.outcome, UpdateOutcome::Done);
    let mut unlocked = last.unlocked;
    unlocked.sort();
    let expected = ["/changed", "/d", "/d/gone", "/d/removed", "/d/replaced"].map(path);
    assert_eq!(unlocked, expected);
    assert_eq!(to_text(&sub.rescanned().await), to_text(&second));
    for (text, expected) in [
        ("/d", "i"),
        ("/d/replaced", ""),
        ("/d/new", ""),
        ("/changed", "a"),
        ("/other", "i"),
        ("/other/replaced", "i"),
    ] {
        assert_eq!(flags(&sub.at(text)), expected, "{text}");
    }
    // An update that needs none of them reports none.
    let third = Edit::of(&second, &source).file("/z", "new").done();
    assert_eq!(sub.converge(3, &source, &third).await.unlocked, []);
    // What was taken away is freed, flags or not.
    let undo = sub.at("/.subd/undo");
    testing::eventually_async("all is freed", async || {
        std::fs::read_dir(&undo).unwrap().count() == 0
    })
    .await;
    for text in ["/d", "/changed", "/other", "/other/replaced"] {
        chattr("-ia", &sub.at(text));
    }
    source.stop().await;
    sub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_that_is_rolled_back_leaves_all_flags_as_they_were() {
    let (sub, source, first) = start().await;
    lock_all(&sub);
    let before = all_flags(&sub);
    let expected = LOCKED.map(|(text, locks)| (text, locks.to_owned()));
    let sorted = |locks: &str| {
        let mut locks: Vec<char> = locks.chars().collect();
        locks.sort_unstable();
        locks
    };
    for ((text, found), (_, locks)) in before.iter().zip(&expected) {
        assert_eq!(sorted(found), sorted(locks), "{text}");
    }
    let second = Edit::of(&first, &source)
        .file("/d/replaced", "new")
        .file("/d/new", "new")
        .remove("/d/gone")
        .metadata("/changed", |metadata| metadata.mode = 0o600)
        .remove("/tree")
        .file("/tree", "a file")
        .remove("/z")
        .done();
    let (_, plan) = sub.plan(&second).await;
    sub.fetch_for(2, &source, &plan).await;
    let (reply, plan) = sub.plan(&second).await;
    sub.prepare(&request(2, &reply, &second, plan)).await.unwrap();
    // Another file, with another length: the name keeps the first one from using its inode.
    std::fs::rename(sub.at("/z"), sub.at("/.subd/z")).unwrap();
    std::fs::write(sub.at("/z"), "another length").unwrap();
    let UpdateOutcome::RolledBack(why) = sub.commit(2).await.outcome else { panic!() };
    assert!(why.starts_with("/z changed since it was scanned"), "{why}");
    assert_eq!(all_flags(&sub), before);
    std::fs::write(sub.at("/z"), "old").unwrap();
    let found = to_text(&sub.rescanned().await);
    let expected = Edit::of(&first, &source).done();
    let without_z = |text: &str| {
        text.lines().filter(|line| !line.ends_with(" /z")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(without_z(&found), without_z(&to_text(&expected)));
    for (text, _) in LOCKED {
        chattr("-ia", &sub.at(text));
    }
    source.stop().await;
    sub.stop().await;
}
