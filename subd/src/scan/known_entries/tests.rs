//! Tests of what one pass leaves for the next.

use super::*;

fn time(milliseconds: i64) -> Time {
    let (seconds, rest) = (milliseconds.div_euclid(1_000), milliseconds.rem_euclid(1_000));
    Time { seconds, nanoseconds: u32::try_from(rest).unwrap() * 1_000_000 }
}

fn status(ctime_ms: i64) -> Status {
    Status {
        kind: Kind::File,
        mode: 0o644,
        uid: 1,
        gid: 2,
        size_bytes: 3,
        mtime: time(5),
        ctime: time(ctime_ms),
        inode: 7,
        filesystem: 8,
        links: 1,
    }
}

fn memory(stamp: Stamp) -> KnownLeaf {
    let leaf = file_leaf(&status(0), Xattrs::none(), Algorithm::Blake3.digest(b"abc").into());
    KnownLeaf { stamp, leaf }
}

#[test]
fn a_reading_soon_after_a_change_settles_nothing() {
    #[rustfmt::skip]
    let table = [
        (1_000, 900, true), (1_000, 979, true), (1_000, 980, false), (1_000, 1_000, false),
        (1_000, 1_020, false), (1_000, 1_021, true), (-5, 1, false), (0, 86_400_000, true),
    ];
    for (started, ctime, settled) in table {
        let stamp =
            Stamp::new(&status(ctime), time(started), Attributes::Basic, TimePrecision::default());
        assert_eq!(stamp.holds(&status(ctime)), settled, "started {started}, changed {ctime}");
    }
}

#[test]
fn the_coarser_the_times_the_longer_a_reading_settles_nothing() {
    let times = TimePrecision { granularity_ns: 1_000_000_000, ..TimePrecision::default() };
    let table = [(5_000, 5_000, false), (5_999, 5_000, false), (6_020, 5_000, false)];
    for (started, ctime, settled) in table.into_iter().chain([(6_021, 5_000, true)]) {
        let stamp = Stamp::new(&status(ctime), time(started), Attributes::Basic, times);
        assert_eq!(stamp.holds(&status(ctime)), settled, "started {started}, changed {ctime}");
    }
}

#[test]
fn any_moved_field_forgets_the_content() {
    let memory =
        memory(Stamp::new(&status(0), time(1_000), Attributes::Basic, TimePrecision::default()));
    let same = status(0);
    let recalled = |status: &Status, algorithm| {
        memory.clone().with_status(status, algorithm).map(|known| known.leaf)
    };
    let chmod = Status { mode: 0o600, uid: 3, ..same };
    let object = Algorithm::Blake3.digest(b"abc");
    for status in [same, chmod] {
        let expected = file_leaf(&status, Xattrs::none(), object.into());
        assert_eq!(recalled(&status, Algorithm::Blake3), Some(expected));
    }
    let moved = [
        Status { size_bytes: 4, ..same },
        Status { mtime: time(6), ..same },
        Status { ctime: time(1), ..same },
        Status { inode: 9, ..same },
        Status { kind: Kind::Symlink, ..same },
        Status { kind: Kind::Special(Device::Fifo), ..same },
    ];
    for status in moved {
        assert_eq!(recalled(&status, Algorithm::Blake3), None, "{status:?}");
    }
    assert_eq!(recalled(&same, Algorithm::Sha512), None);
    assert!(memory.stamp.holds_attributes(&same, Attributes::Basic));
    assert!(!memory.stamp.holds_attributes(&same, Attributes::Labels));
}

#[test]
fn an_unsettled_stamp_holds_nothing() {
    let stamp = Stamp::unsettled(&status(-100_000), Attributes::Basic);
    assert!(!stamp.holds(&status(-100_000)));
}

fn entry(name: &str, size_bytes: u64) -> Entry {
    let status = Status { size_bytes, ..status(0) };
    let leaf = file_leaf(&status, Xattrs::none(), Algorithm::Blake3.digest(b"abc").into());
    Entry { name: Name::new(name.as_bytes()).unwrap(), child: Child::Leaf(leaf) }
}

fn recorded(former: Option<&Arc<Directory>>, entries: &[Entry]) -> RecordedEntries {
    let mut recorded = RecordedEntries::new(former.cloned(), entries.len());
    entries.iter().for_each(|entry| recorded.add(entry.clone()));
    recorded
}

#[test]
fn an_equal_directory_is_shared_and_another_is_not() {
    let metadata = || Metadata::new(0o755, 0, 0);
    let built = |former: Option<&Arc<Directory>>, entries: &[Entry], algorithm, metadata| {
        recorded(former, entries).finish(algorithm, metadata).unwrap()
    };
    let entries = ["a", "b", "c"].map(|name| entry(name, 3));
    let first = built(None, &entries, Algorithm::Blake3, metadata());
    assert_eq!(first.entries(), entries);
    let same = recorded(Some(&first), &entries);
    assert!(same.changed.is_none());
    assert!(Arc::ptr_eq(&first, &same.finish(Algorithm::Blake3, metadata()).unwrap()));
    let [a, b, c] = entries.clone();
    let others = [
        vec![],
        vec![a.clone(), b.clone()],
        vec![b.clone(), c.clone()],
        vec![a.clone(), c.clone()],
        vec![a.clone(), entry("b", 4), c.clone()],
        vec![a.clone(), entry("aa", 3), b.clone(), c.clone()],
        vec![a, b, c, entry("d", 3)],
    ];
    for other in others {
        let made = built(Some(&first), &other, Algorithm::Blake3, metadata());
        assert_eq!(made, built(None, &other, Algorithm::Blake3, metadata()));
        assert_eq!(made.entries(), other);
        assert_eq!(recorded(Some(&first), &other).into_entries(), other);
    }
    let private = Metadata::new(0o700, 0, 0);
    assert_ne!(first, built(Some(&first), &entries, Algorithm::Blake3, private));
    let empty = built(None, &[], Algorithm::Blake3, metadata());
    let other = built(Some(&empty), &[], Algorithm::Sha512, metadata());
    assert_eq!(other.digest().algorithm(), Algorithm::Sha512);
}
