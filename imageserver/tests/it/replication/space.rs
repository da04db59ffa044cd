//! A replica whose disk is full.

use std::process::Command;

use super::*;
use crate::space::Mount;

/// An image that takes some hundred kilobytes of its own, whatever packs it.
async fn add_large(root: &Server, image: &str, seed: u32) {
    let block = |index: u32| {
        let bytes = [seed.to_le_bytes(), index.to_le_bytes()].concat();
        crate::fixture::ALGORITHM.digest(&bytes).digest().to_vec()
    };
    let content: Vec<u8> = (0..25_000).flat_map(block).collect();
    add_of(root, image, &content).await.unwrap();
}

#[tokio::test]
async fn a_replica_whose_disk_is_full_says_so_serves_on_and_catches_up() {
    let data = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let Some(mount) = Mount::new(data[1].path()) else {
        eprintln!("skipped: this needs the right to mount");
        return;
    };
    let root = Server::start(data[0].path());
    add(&root, "base/1").await.unwrap();
    let replica = replica(&mount.path().join("data"), &address(&root), &[]);
    until_level(&replica).await;

    // What its own disk has room for comes, and what it has not is told.
    let images: Vec<String> = (0..6).map(|number| format!("large/{number}")).collect();
    for (seed, image) in (0..).zip(&images) {
        add_large(&root, image, seed).await;
    }
    set_tag(&root, "base/1", "tested", "yes").await.unwrap();
    let is_failing = async || {
        let troubles = troubles(&replica).await;
        !troubles.is_empty()
            && troubles.iter().all(|(_, trouble)| *trouble == ReplicationTrouble::Failing)
    };
    until(is_failing).await;
    until(async || {
        let master = master_of(&replica).await;
        let troubled = master.troubles_total;
        // All others are here.
        master.images_behind == troubled && names(&replica).await.len() as u64 == 7 - troubled
    })
    .await;
    let master = master_of(&replica).await;
    assert!(!master.is_level && master.link.name() == "connected");
    for image in &master.troubles {
        assert!(image.text.contains("no space left to "), "{}", image.text);
    }
    assert!(replica.get("/", "").text().contains("no space left to "));
    assert_ne!(replica.metric("dominator_replication_failing"), "0");
    until(async || replica.logged("an image failed, trying again: ")).await;

    // Reading goes on, of all that is here, and nothing of the others is seen.
    assert_eq!(get(&replica, &images[5]).await.is_ok(), names(&replica).await.contains(&images[5]));
    assert_eq!(replica.expect_whole().await as u64, 7 - master.troubles_total);
    // A change over it is made on the master all the same; here it comes later if it must.
    add(&replica, "base/2").await.map(drop).unwrap_or_else(|fault| {
        assert_eq!(fault.code, FaultCode::NoSpace, "{}", fault.message);
    });

    let mut grow = Command::new("mount");
    grow.args(["-o", "remount,size=64m"]).arg(mount.path());
    assert!(grow.status().unwrap().success());
    until_level(&replica).await;
    until(async || names(&replica).await == names(&root).await).await;
    expect_same(&root, &replica).await;
    assert_eq!(troubles(&replica).await, []);
    assert!(replica.expect_whole().await >= 7);
    replica.stop().await;
    expect_clean(&mount.path().join("data"));
}
