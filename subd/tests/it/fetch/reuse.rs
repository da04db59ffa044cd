//! Objects that are on the machine already, on file-systems that share blocks and on one that does
//! not.

use std::path::Path;
use std::process::Command;

use api::subd::FetchFailure;

use super::{MIB, cached, fetch, object, partials};
use crate::fetch::host::{Host, Vice, content};
use crate::fixture::Sub;

/// A file-system on a file.
pub struct Loop {
    place: tempfile::TempDir,
}

pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

impl Loop {
    pub fn new(kind: &str) -> Self {
        let place = tempfile::tempdir().unwrap();
        let (image, at) = (place.path().join("image"), place.path().join("at"));
        let (image, at) = (image.to_str().unwrap(), at.to_str().unwrap());
        std::fs::create_dir(at).unwrap();
        // The smallest that mkfs.xfs makes.
        run("truncate", &["-s", "320M", image]);
        run(&format!("mkfs.{kind}"), &["-q", image]);
        run("mount", &["-o", "loop", image, at]);
        Self { place }
    }

    pub fn root(&self) -> std::path::PathBuf {
        self.place.path().join("at")
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _done = Command::new("umount").arg("-l").arg(self.root()).status();
    }
}

fn free_bytes(path: &Path) -> u64 {
    run("sync", &["-f", path.to_str().unwrap()]);
    let status = nix::sys::statvfs::statvfs(path).unwrap();
    status.blocks_free() * status.fragment_size()
}

/// Fetches what a file of the machine holds; gives how much less is free afterwards, in bytes.
async fn taken_by_reuse(kind: &str) -> u64 {
    let disk = Loop::new(kind);
    let host = Host::start(Vice::None).await;
    let large = content(3, 8 * MIB);
    std::fs::create_dir(disk.root().join("d")).unwrap();
    std::fs::write(disk.root().join("d/here"), &large).unwrap();
    let sub = Sub::start_on(&disk.root(), &[]).await;
    sub.tree().await;
    let before = free_bytes(&disk.root());
    let last = fetch(&sub, 1, &[&host.address], &[object(&large)]).await;
    assert_eq!((last.error, last.objects, last.bytes, last.reused), (None, 0, 0, 1), "{kind}");
    assert_eq!(host.asked(), [""; 0], "{kind}");
    assert_eq!(cached(&sub).await, [object(&large).id], "{kind}");
    let after = free_bytes(&disk.root());
    // It is a file of its own: what is done to the other changes nothing.
    std::fs::write(disk.root().join("d/here"), b"changed").unwrap();
    assert_eq!(cached(&sub).await, [object(&large).id], "{kind}");
    host.stop().await;
    sub.stop().await;
    before.saturating_sub(after)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_file_holds_is_shared_where_the_file_system_can() {
    for kind in ["btrfs", "xfs"] {
        let taken = taken_by_reuse(kind).await;
        assert!(taken < 2 * MIB as u64, "{kind}: {taken}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_another_file_holds_is_copied_elsewhere() {
    let taken = taken_by_reuse("ext4").await;
    assert!((8 * MIB as u64..10 * MIB as u64).contains(&taken), "{taken}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changed_since_it_was_scanned_is_not_trusted() {
    let place = tempfile::tempdir().unwrap();
    let (right, wrong) = (content(4, MIB), content(5, MIB));
    // Paths come in order: what others made of the first two must not stop the third.
    for name in ["a", "b", "c"] {
        std::fs::write(place.path().join(name), &right).unwrap();
    }
    let host = Host::start(Vice::None).await;
    let sub = Sub::start_on(place.path(), &[]).await;
    sub.tree().await;
    std::fs::write(sub.at("/a"), &wrong).unwrap();
    std::fs::remove_file(sub.at("/b")).unwrap();
    std::os::unix::fs::symlink("c", sub.at("/b")).unwrap();
    let last = fetch(&sub, 1, &[&host.address], &[object(&right)]).await;
    assert_eq!((last.error, last.reused), (None, 1));
    // None is left: it is fetched, and that it is nowhere is told.
    let (other, changed) = (content(6, MIB), content(7, MIB));
    std::fs::write(sub.at("/d"), &other).unwrap();
    sub.rescanned().await;
    std::fs::write(sub.at("/d"), &changed).unwrap();
    let last = fetch(&sub, 2, &[&host.address], &[object(&other)]).await;
    assert!(matches!(last.error, Some(FetchFailure::Sources(_))), "{last:?}");
    host.add(&other);
    let last = fetch(&sub, 3, &[&host.address], &[object(&other)]).await;
    assert_eq!((last.error, last.objects, last.reused), (None, 1, 0));
    assert_eq!(cached(&sub).await.len(), 2);
    assert_eq!(partials(&sub), [""; 0]);
    host.stop().await;
    sub.stop().await;
}
