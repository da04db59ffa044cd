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
    let content = Content::File(Algorithm::Blake3.digest(b"abc"));
    KnownLeaf { stamp, content, xattrs: Xattrs::none() }
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
    let object = Algorithm::Blake3.digest(b"abc");
    assert_eq!(memory.content_of(&same, Algorithm::Blake3), Some(&Content::File(object)));
    let moved = [
        Status { size_bytes: 4, ..same },
        Status { mtime: time(6), ..same },
        Status { ctime: time(1), ..same },
        Status { inode: 9, ..same },
        Status { kind: Kind::Symlink, ..same },
        Status { kind: Kind::Special(Device::Fifo), ..same },
    ];
    for status in moved {
        assert_eq!(memory.content_of(&status, Algorithm::Blake3), None, "{status:?}");
    }
    assert_eq!(memory.content_of(&same, Algorithm::Sha512), None);
    assert!(memory.stamp.holds_attributes(&same, Attributes::Basic));
    assert!(!memory.stamp.holds_attributes(&same, Attributes::Labels));
}

#[test]
fn an_unsettled_stamp_holds_nothing() {
    let stamp = Stamp::unsettled(&status(-100_000), Attributes::Basic);
    assert!(!stamp.holds(&status(-100_000)));
}

#[test]
fn an_equal_directory_is_shared_and_another_is_not() {
    let entry = |mode| {
        let memory = memory(Stamp::new(
            &status(0),
            time(1_000),
            Attributes::Basic,
            TimePrecision::default(),
        ));
        let leaf = leaf_of(&Status { mode, ..status(0) }, &memory);
        vec![Entry { name: model::tree::Name::new(b"f").unwrap(), child: Child::Leaf(leaf) }]
    };
    let plain = || Metadata::new(0o755, 0, 0);
    let first = assemble(Algorithm::Blake3, plain(), entry(0o644), None).unwrap();
    let again = |metadata, entries| {
        assemble(Algorithm::Blake3, metadata, entries, Some(Arc::clone(&first))).unwrap()
    };
    assert!(Arc::ptr_eq(&first, &again(plain(), entry(0o644))));
    assert_ne!(first, again(plain(), entry(0o600)));
    assert_ne!(first, again(Metadata::new(0o700, 0, 0), entry(0o644)));
    assert_ne!(first, again(plain(), Vec::new()));
    let empty = assemble(Algorithm::Blake3, plain(), Vec::new(), None).unwrap();
    let other = assemble(Algorithm::Sha512, plain(), Vec::new(), Some(empty)).unwrap();
    assert_eq!(other.digest().algorithm(), Algorithm::Sha512);
}
