//! Updates of trees that are odd: names, times, and very many names of one file.

use std::fs;
use std::os::unix::fs::MetadataExt;

use api::subd::{ScanNow, ScanNowRequest, UpdateOutcome};
use model::path::TreePath;
use model::plan::Plan;
use model::tree::{File, Leaf, Metadata, Node, Time, Tree};

use crate::disk::{Disk, run};
use crate::fixture::{Edit, Source, Sub, file, path, request};

async fn converge(sub: &Sub, id: u64, source: &Source, want: &Tree) {
    assert_eq!(sub.converge(id, source, want).await.outcome, UpdateOutcome::Done);
    assert_eq!(sub.tree().await.1, *want);
}

fn file_at(source: &Source, seconds: i64, nanoseconds: u32) -> Node {
    match file(source, "content", Metadata::new(0o644, 0, 0)) {
        Node::Leaf(Leaf::File(file)) => {
            Node::Leaf(Leaf::File(File { mtime: Time { seconds, nanoseconds }, ..file }))
        }
        other => other,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_times_may_be_odd() {
    let disk = Disk::new(64 << 20);
    run("rmdir", &[disk.at("lost+found").to_str().unwrap()]);
    let (sub, source) = (Sub::start_on(&disk.root(), &[]).await, Source::start().await);
    let (_, empty) = sub.tree().await;
    let longest = [b'n'; 255];
    let bytes = [0xff; 255];
    let names: [&[u8]; 12] = [
        &longest, &bytes, b"-rf", b"--", b"\n", b" ", b"*", b"~", b"\\", b"...", b"a\n-b", b"$(x)",
    ];
    // The first and the last second of the file-system, and the times about 1970.
    let times = [
        (-2_147_483_648, 0),
        (-1, 999_999_999),
        (0, 0),
        (0, 1),
        (2_147_483_648, 500_000_000),
        (15_032_385_535, 0),
    ];
    let mut edit = Edit::of(&empty, &source);
    for (number, name) in names.iter().enumerate() {
        let (seconds, nanoseconds) = times[number % times.len()];
        let below = TreePath::root().join(name).unwrap();
        let inner = below.join(name).unwrap();
        edit = edit.put_at(below, Node::Directory(Metadata::new(0o755, 0, 0)));
        edit = edit.put_at(inner, file_at(&source, seconds, nanoseconds));
    }
    let want = edit.done();
    converge(&sub, 1, &source, &want).await;
    let of_last = fs::metadata(disk.at("$(x)/$(x)")).unwrap();
    assert_eq!((of_last.mtime(), of_last.mtime_nsec()), (15_032_385_535, 0));

    // A nanosecond is drift, and so is a name.
    run("touch", &["-d", "@0.000000002", disk.at("~/~").to_str().unwrap()]);
    fs::rename(disk.at("-rf"), disk.at("-rf ")).unwrap();
    assert_ne!(sub.rescanned().await, want);
    converge(&sub, 2, &source, &want).await;

    // A time that the file-system does not have is its last one, and no drift.
    let late = file_at(&source, 15_032_385_536, 0);
    let later = Edit::of(&want, &source).put("/late", late).done();
    assert_eq!(sub.converge(3, &source, &later).await.outcome, UpdateOutcome::Done);
    assert_eq!(fs::metadata(disk.at("/late")).unwrap().mtime(), 15_032_385_535);
    assert_eq!(sub.plan(&later).await.1, Plan::default());
    converge(&sub, 4, &source, &empty).await;
    source.stop().await;
    sub.stop().await;
}

/// The tree after a scan that is made now.
async fn scanned(sub: &Sub) -> Tree {
    let passes = sub.poll().await.counters.metadata_passes;
    testing::eventually_async("two scans have ended", async || {
        let scan = ScanNowRequest { content: false, media: false };
        sub.client.call::<ScanNow>(&scan).await.unwrap();
        sub.poll().await.counters.metadata_passes >= passes + 2
    })
    .await;
    sub.tree().await.1
}

/// How many names the file has.
const LINKS: u32 = 40_000;

#[tokio::test(flavor = "multi_thread")]
async fn forty_thousand_names_of_one_file_are_moved_and_moved_back() {
    let place = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let (root, source) = (place.path(), Source::start().await);
    fs::create_dir(root.join("old")).unwrap();
    fs::write(root.join("z"), "old").unwrap();
    fs::write(root.join("old/f"), "shared").unwrap();
    for number in 1..LINKS {
        fs::hard_link(root.join("old/f"), root.join(format!("old/f{number}"))).unwrap();
    }
    let sub = Sub::start_on(root, &[]).await;
    let (_, want) = sub.tree().await;
    fs::rename(root.join("old"), root.join("new")).unwrap();
    let moved = scanned(&sub).await;
    assert_eq!(moved.root().totals().hard_links, u64::from(LINKS) - 1);

    // A step fails after all new names are made, so that they are undone.
    let without_z = Edit::of(&want, &source).remove("/z").done();
    let (reply, plan) = sub.plan(&without_z).await;
    assert_eq!(plan.operations.len(), 2 * (LINKS as usize + 1) + 1);
    sub.fetch_for(1, &source, &plan).await;
    sub.prepare(&request(1, &reply, &without_z, plan.clone())).await.unwrap();
    fs::rename(root.join("z"), root.join(".subd/z")).unwrap();
    fs::create_dir(root.join("z")).unwrap();
    let UpdateOutcome::RolledBack(why) = sub.commit(1).await.outcome else { panic!() };
    assert!(why.starts_with("/z changed since it was scanned"), "{why}");
    fs::remove_dir(root.join("z")).unwrap();
    fs::rename(root.join(".subd/z"), root.join("z")).unwrap();
    assert_eq!(scanned(&sub).await, moved);

    // The same plan, less `/z`.
    let mut plan = plan;
    plan.operations.retain(|operation| operation.path != path("/z"));
    sub.fetch_for(2, &source, &plan).await;
    sub.prepare(&request(2, &reply, &want, plan)).await.unwrap();
    assert_eq!(sub.commit(2).await.outcome, UpdateOutcome::Done);
    assert_eq!(sub.tree().await.1, want);
    assert_eq!(fs::metadata(root.join("old/f")).unwrap().nlink(), u64::from(LINKS));
    source.stop().await;
    sub.stop().await;
}
