//! Tests of the object cache on a real directory.

use std::path::PathBuf;

use model::object::Algorithm;
use model::path::TreePath;
use nix::mount::{MsFlags, mount, umount};

use super::receive::{PARTIAL_BYTES_MIN, PARTIALS_MAX};
use super::*;
use crate::root::Root;

struct Place {
    _place: tempfile::TempDir,
    path: PathBuf,
    directory: Arc<Directory>,
}

fn place() -> Place {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().to_owned();
    let directory = Root::open(&path).unwrap().directory(&TreePath::root()).unwrap();
    Place { _place: place, path, directory: Arc::new(directory) }
}

fn store(cache: &Cache, content: &str) -> ObjectId {
    let id = Algorithm::Blake3.digest(content.as_bytes());
    let mut receiving = cache.receive(id, content.len() as u64).unwrap();
    receiving.write(content.as_bytes()).unwrap();
    receiving.finish().unwrap();
    id
}

#[test]
fn trusts_no_name_after_a_restart() {
    let place = place();
    let (cache, opened) = Cache::open(Arc::clone(&place.directory)).unwrap();
    assert_eq!(opened, OpenReport::default());
    let good = store(&cache, "good");
    let bad = store(&cache, "bad");
    std::fs::write(place.path.join(bad.to_string()), "evil").unwrap();
    std::fs::write(place.path.join("incoming.0"), "half").unwrap();
    std::fs::create_dir(place.path.join("strange")).unwrap();
    let (cache, opened) = Cache::open(Arc::clone(&place.directory)).unwrap();
    assert_eq!(opened, OpenReport { objects: 1, removed: 3 });
    assert_eq!(cache.ids(), [good]);
    assert_eq!(cache.size_of(&good), Some(4));
    assert_eq!(place.directory.names().unwrap(), [name_of(&good).into_boxed_slice()]);
}

#[test]
fn keeps_nothing_that_is_not_what_was_asked_for() {
    let place = place();
    let (cache, _) = Cache::open(Arc::clone(&place.directory)).unwrap();
    let want = Algorithm::Sha512.digest(b"right");
    let mut receiving = cache.receive(want, 5).unwrap();
    receiving.write(b"wrong").unwrap();
    let error = receiving.finish().unwrap_err();
    assert!(matches!(error, CacheError::Wrong { got_bytes: 5, .. }), "{error}");
    let mut receiving = cache.receive(want, 5).unwrap();
    assert!(receiving.write(b"right and more").is_err());
    drop(receiving);
    let receiving = cache.receive(want, 5).unwrap();
    assert!(matches!(receiving.finish().unwrap_err(), CacheError::Wrong { got_bytes: 0, .. }));
    assert_eq!(cache.ids(), []);
    assert!(place.directory.names().unwrap().is_empty());
}

/// A file-system of `bytes` for the time of a test.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(bytes: u64) -> Self {
        let (place, tmpfs) = (tempfile::tempdir().unwrap(), Some("tmpfs"));
        let (options, flags) = (format!("size={bytes},mode=700"), MsFlags::empty());
        mount(tmpfs, place.path(), tmpfs, flags, Some(&*options)).unwrap();
        Self(place)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _unmounted = umount(self.0.path());
    }
}

#[test]
fn what_is_sent_is_added_as_a_whole_or_not_at_all() {
    let disk = SmallDisk::new(64 << 10);
    let directory = Root::open(disk.0.path()).unwrap().directory(&TreePath::root()).unwrap();
    let (cache, _) = Cache::open(Arc::new(directory)).unwrap();
    let [good, bad] = [b"good".as_slice(), b"bad"].map(|content| Algorithm::Sha512.digest(content));
    assert!(cache.add(good, b"good").unwrap());
    assert!(!cache.add(good, b"good").unwrap());
    for id in [good, bad] {
        let wrong = cache.add(id, b"evil").unwrap_err();
        assert!(matches!(wrong, CacheError::Wrong { want, .. } if want == id), "{wrong}");
    }
    // Half of it can be written.
    let large = vec![7; 120 << 10];
    let full = cache.add(Algorithm::Blake3.digest(&large), &large).unwrap_err();
    assert!(full.is_full(), "{full}");
    assert_eq!(cache.ids(), [good]);
    assert_eq!(cache.directory.names().unwrap(), [name_of(&good).into_boxed_slice()]);
}

#[test]
fn what_is_in_the_place_of_an_object_is_replaced() {
    let place = place();
    let (cache, _) = Cache::open(Arc::clone(&place.directory)).unwrap();
    let id = Algorithm::Blake3.digest(b"good");
    std::fs::write(place.path.join(id.to_string()), "go").unwrap();
    assert!(cache.add(id, b"good").unwrap());
    assert_eq!(cache.read(&id, 9).unwrap(), b"good");
    assert_eq!(place.directory.names().unwrap(), [name_of(&id).into_boxed_slice()]);
}

#[test]
fn hashes_again_what_was_touched() {
    let place = place();
    let (cache, _) = Cache::open(Arc::clone(&place.directory)).unwrap();
    let same = store(&cache, "same");
    let evil = store(&cache, "good");
    let gone = store(&cache, "gone");
    let file = |id: &ObjectId| place.path.join(id.to_string());
    std::fs::write(file(&same), "same").unwrap();
    std::fs::write(file(&evil), "evil").unwrap();
    std::fs::remove_file(file(&gone)).unwrap();
    place.directory.make_directory(b"to", 0o700).unwrap();
    let to = place.directory.open_child(b"to").unwrap();
    cache.copy(&same, &to, b"copy", &CancellationToken::new()).unwrap();
    cache.take(&same, &to, b"taken").unwrap();
    assert!(matches!(cache.take(&evil, &to, b"x").unwrap_err(), CacheError::Absent { .. }));
    assert!(matches!(cache.take(&gone, &to, b"x").unwrap_err(), CacheError::Absent { .. }));
    assert_eq!(cache.ids(), [same]);
    assert_eq!(std::fs::read(place.path.join("to/copy")).unwrap(), b"same");
}

#[test]
fn what_was_taken_comes_back_or_is_forgotten() {
    let place = place();
    let (cache, _) = Cache::open(Arc::clone(&place.directory)).unwrap();
    let (back, used, spoilt) =
        (store(&cache, "back"), store(&cache, "used"), store(&cache, "spoilt"));
    for (id, name) in [(back, b"1"), (used, b"2"), (spoilt, b"3")] {
        cache.take(&id, &place.directory, name).unwrap();
    }
    let mut all = vec![back, used, spoilt];
    all.sort();
    assert_eq!(cache.ids(), all);
    assert_eq!(cache.remove(&all).unwrap(), []);
    place.directory.set_mode(b"1", 0o4755).unwrap();
    std::fs::hard_link(place.path.join("1"), place.path.join("1-again")).unwrap();
    let retrieved = cache.retrieve(&back, &place.directory, b"1", Visible::No).unwrap();
    std::fs::remove_file(place.path.join("1-again")).unwrap();
    cache.restore(retrieved).unwrap();
    std::fs::write(place.path.join("3"), "other!").unwrap();
    let retrieved = cache.retrieve(&spoilt, &place.directory, b"3", Visible::No).unwrap();
    assert!(cache.restore(retrieved).is_err());
    // Another file is where an object was, and has names elsewhere.
    let foreign = store(&cache, "foreign");
    cache.take(&foreign, &place.directory, b"4").unwrap();
    std::fs::write(place.path.join("theirs"), "theirs").unwrap();
    place.directory.set_mode(b"theirs", 0o4711).unwrap();
    std::fs::remove_file(place.path.join("4")).unwrap();
    std::fs::hard_link(place.path.join("theirs"), place.path.join("4")).unwrap();
    let retrieved = cache.retrieve(&foreign, &place.directory, b"4", Visible::No).unwrap();
    assert!(cache.restore(retrieved).is_err());
    assert_eq!(place.directory.stat(b"theirs").unwrap().mode, 0o4711);
    std::fs::remove_file(place.path.join("theirs")).unwrap();
    assert_eq!(cache.forget(&[used, back]), [used]);
    assert_eq!(cache.ids(), [back]);
    assert_eq!(cache.remove(&[used, back]).unwrap(), [back]);
    assert_eq!(place.directory.names().unwrap(), [Box::from(b"2".as_slice())]);
}

/// Leaves the first half of `content` as a partial; returns its id.
fn begin(cache: &Cache, content: &[u8]) -> ObjectId {
    let id = Algorithm::Blake3.digest(content);
    let mut receiving = cache.receive(id, content.len() as u64).unwrap();
    let half = content.len() / 2;
    receiving.write(&content[..half]).unwrap();
    let kept = if half as u64 >= PARTIAL_BYTES_MIN { half as u64 } else { 0 };
    assert_eq!(receiving.keep_partial().unwrap(), kept);
    assert_eq!(cache.partial_bytes(&id), kept);
    id
}

fn content(seed: u8) -> Vec<u8> {
    vec![seed; 200_000 + usize::from(seed)]
}

#[test]
fn what_was_cut_goes_on_where_it_ended() {
    let place = place();
    let (cache, _) = Cache::open(Arc::clone(&place.directory)).unwrap();
    let (same, restarted, spoilt) = (content(1), content(2), content(3));
    let go_on = |cache: &Cache, content: &[u8]| {
        let id = Algorithm::Blake3.digest(content);
        let mut receiving = cache.resume(id, content.len() as u64).unwrap().unwrap();
        assert_eq!(receiving.got_bytes(), content.len() as u64 / 2);
        receiving.write(&content[content.len() / 2..]).unwrap();
        receiving.finish()
    };
    let mut ids = vec![begin(&cache, &same), begin(&cache, &restarted)];
    go_on(&cache, &same).unwrap();
    assert!(cache.resume(ids[0], same.len() as u64).unwrap().is_none());
    let id = begin(&cache, &spoilt);
    let (cache, opened) = Cache::open(Arc::clone(&place.directory)).unwrap();
    assert_eq!(opened, OpenReport { objects: 1, removed: 0 });
    go_on(&cache, &restarted).unwrap();
    // What somebody changed in the meantime is noticed in the end.
    std::fs::write(place.path.join(format!("partial.{id}")), vec![0; spoilt.len() / 2]).unwrap();
    assert!(matches!(go_on(&cache, &spoilt).unwrap_err(), CacheError::Wrong { .. }));
    ids.sort();
    assert_eq!(cache.ids(), ids);
    // One of another length, or that is complete, is none.
    let id = begin(&cache, &spoilt);
    std::fs::write(place.path.join(format!("partial.{id}")), b"short").unwrap();
    assert!(cache.resume(id, spoilt.len() as u64).unwrap().is_none());
    begin(&cache, &spoilt);
    assert!(cache.resume(id, spoilt.len() as u64 / 2).unwrap().is_none());
    assert_eq!(place.directory.names().unwrap().len(), 2);
}

#[test]
fn partials_are_few_and_large_and_go_when_nobody_wants_them() {
    let place = place();
    let (cache, _) = Cache::open(Arc::clone(&place.directory)).unwrap();
    begin(&cache, b"small");
    assert!(place.directory.names().unwrap().is_empty());
    let count = u8::try_from(PARTIALS_MAX).unwrap();
    let ids: Vec<ObjectId> = (0..=count + 1).map(|seed| begin(&cache, &content(seed))).collect();
    assert_eq!(place.directory.names().unwrap().len(), PARTIALS_MAX);
    // The smallest went.
    let kept: Vec<u64> = ids.iter().map(|id| cache.partial_bytes(id)).collect();
    assert_eq!(kept.iter().filter(|bytes| **bytes == 0).count(), 2);
    assert_eq!(kept[0], 0, "{kept:?}");
    let wanted = ids[5];
    cache.discard_partials(|id| *id == wanted).unwrap();
    assert_eq!(place.directory.names().unwrap().len(), 1);
    assert_eq!(cache.remove(&[wanted]).unwrap(), []);
    assert!(place.directory.names().unwrap().is_empty());
}

#[test]
fn what_others_could_write_does_not_come_back_after_a_rollback() {
    let place = place();
    let (cache, _) = Cache::open(Arc::clone(&place.directory)).unwrap();
    // Owner and mode in the tree, whether it was visible, and whether it is cached again.
    let table = [
        (0, 0o644, Visible::Yes, true),
        (0, 0o4755, Visible::Yes, true),
        (7, 0o444, Visible::Yes, false),
        (0, 0o664, Visible::Yes, false),
        (0, 0o602, Visible::Yes, false),
        (7, 0o666, Visible::No, true),
    ];
    for (uid, mode, visible, comes_back) in table {
        let id = store(&cache, "object");
        cache.take(&id, &place.directory, b"1").unwrap();
        place.directory.set_owner(b"1", uid, 0).unwrap();
        place.directory.set_mode(b"1", mode).unwrap();
        let writer = std::fs::File::options().write(true).open(place.path.join("1")).unwrap();
        let retrieved = cache.retrieve(&id, &place.directory, b"1", visible).unwrap();
        assert_eq!(cache.restore(retrieved).is_ok(), comes_back, "{uid} {mode:o} {visible:?}");
        let expected = if comes_back { vec![id] } else { Vec::new() };
        assert_eq!(cache.ids(), expected, "{uid} {mode:o} {visible:?}");
        // The inode itself is gone, unless it is cached.
        let links = std::os::unix::fs::MetadataExt::nlink(&writer.metadata().unwrap());
        assert_eq!(links, u64::from(comes_back), "{uid} {mode:o} {visible:?}");
        cache.remove(&[id]).unwrap();
    }
}
