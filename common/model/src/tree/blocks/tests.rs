//! Directories in blocks: what a change sends, and what a peer may send.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::{btree_set, vec};
use proptest::prelude::*;

use super::*;
use crate::tree::{Child, Entry, File, Leaf, Metadata, Name, Time};

const BYTES_MAX: usize = 8 << 20;

/// A directory with a file for each number, whose content is its value.
fn directory(files: &BTreeMap<u32, u8>, mode: u32) -> Arc<Directory> {
    let entries = files.iter().map(|(number, content)| Entry {
        name: Name::new(format!("{number:0>100}").as_bytes()).unwrap(),
        child: Child::Leaf(Leaf::File(File {
            metadata: Metadata::new(0o644, 0, 0),
            mtime: Time::default(),
            size_bytes: 1,
            object: Algorithm::Blake3.digest(&[*content]).into(),
        })),
    });
    let metadata = Metadata::new(mode, 0, 0);
    Arc::new(Directory::new(Algorithm::Blake3, metadata, entries.collect()).unwrap())
}

fn numbered(count: u32) -> BTreeMap<u32, u8> {
    (0..count).map(|number| (number * 2, 0)).collect()
}

/// Puts `want` together from the blocks of `own` and those that it lacks; returns these too.
fn send(want: &Directory, own: Option<&Arc<Directory>>) -> (Vec<u8>, Vec<Vec<u8>>) {
    let mut joining = Joining::new(own.cloned(), usize::MAX, BYTES_MAX);
    let have: BTreeMap<ObjectId, u32> = joining.digests().iter().copied().zip(0..).collect();
    let mut sent = Vec::new();
    for block in Blocks::from(want, 0) {
        match have.get(&Algorithm::Blake3.digest(&block.bytes)) {
            Some(index) => joining.add_own(*index).unwrap(),
            None => {
                joining.add(&block.bytes).unwrap();
                sent.push(block.bytes);
            }
        }
    }
    (joining.finish(), sent)
}

#[test]
fn a_change_of_entries_sends_their_blocks_only() {
    let files = numbered(10_000);
    let own = directory(&files, 0o755);
    let blocks = Blocks::from(&own, 0).count();
    let bytes = own.encode().len();
    assert!((bytes / (64 << 10)..bytes / BLOCK_BYTES_MIN).contains(&blocks), "{blocks} blocks");
    let sent = |change: &dyn Fn(&mut BTreeMap<u32, u8>), mode| {
        let mut files = files.clone();
        change(&mut files);
        let want = directory(&files, mode);
        let (bytes, sent) = send(&want, Some(&own));
        assert_eq!(bytes, want.encode());
        sent.len()
    };
    assert_eq!(sent(&|_| (), 0o755), 0);
    assert_eq!(sent(&|_| (), 0o700), 1);
    let three: &dyn Fn(&mut BTreeMap<u32, u8>) =
        &|files| files.extend([(2, 1), (10_000, 1), (19_998, 1)]);
    assert_eq!(sent(three, 0o755), 3);
    for number in [0, 10_000, 19_998] {
        let removal = sent(&|files| files.retain(|other, _| *other != number), 0o755);
        let arrival = sent(&|files| files.extend([(number + 1, 7)]), 0o755);
        assert!(removal <= 4 && arrival <= 4, "{removal} and {arrival} blocks for {number}");
    }
    assert_eq!(send(&own, None).1.len(), blocks);
}

#[test]
fn blocks_go_on_after_any_block_and_end_with_the_last() {
    let own = directory(&numbered(2_000), 0o755);
    let all: Vec<Block> = Blocks::from(&own, 0).collect();
    let whole: Vec<u8> = all.iter().flat_map(|block| block.bytes.clone()).collect();
    assert_eq!(whole, own.encode());
    for (index, block) in all.iter().enumerate() {
        let rest = block.next.into_iter().flat_map(|next| Blocks::from(&own, next));
        assert!(rest.eq(all[index + 1..].iter().cloned()), "after block {index}");
    }
    for position in [2_001, u32::MAX] {
        assert_eq!(Blocks::from(&own, position).next(), None);
    }
    let empty: Vec<Block> = Blocks::from(&directory(&BTreeMap::new(), 0o755), 0).collect();
    assert_eq!(empty.len(), 1);
}

#[test]
fn names_that_never_end_a_block_do_not_make_it_endless() {
    let names = (0..20_000_u32).map(|number| number.to_string());
    let names: BTreeSet<String> = names.filter(|name| !ends_block(name.as_bytes())).collect();
    let entries = names.iter().map(|name| Entry {
        name: Name::new(name.as_bytes()).unwrap(),
        child: Child::Directory(directory(&BTreeMap::new(), 0o755)),
    });
    let metadata = Metadata::new(0o755, 0, 0);
    let crowded = Directory::new(Algorithm::Blake3, metadata, entries.collect()).unwrap();
    let longest = Blocks::from(&crowded, 0).map(|block| block.bytes.len()).max().unwrap();
    assert!((BLOCK_BYTES_MAX..BLOCK_BYTES_MAX + 64).contains(&longest), "{longest} bytes");
}

#[test]
fn blocks_that_were_not_offered_or_come_twice_are_refused() {
    let own = directory(&numbered(1_000), 0o755);
    let mut joining = Joining::new(Some(Arc::clone(&own)), 3, 300 << 10);
    assert_eq!(joining.digests().len(), 3);
    joining.add_own(1).unwrap();
    for index in [0, 1, 3, u32::MAX] {
        assert_eq!(joining.add_own(index), Err(BlockError::Unknown { index }));
    }
    joining.add_own(2).unwrap();
    assert_eq!(Joining::new(None, 3, 1).add_own(0), Err(BlockError::Unknown { index: 0 }));
    let limit = 300 << 10;
    assert_eq!(joining.add(&vec![0; limit]), Err(BlockError::TooLarge { limit }));
}

/// What a peer may send.
#[derive(Clone, Debug)]
enum Sent {
    Own(u32),
    New(usize),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_directory_is_sent_from_any_other(
        own in btree_set(0..4_000_u32, 0..1_500),
        gone in btree_set(0..4_000_u32, 0..40),
        changed in btree_set(0..4_000_u32, 0..40),
    ) {
        let files: BTreeMap<u32, u8> = own.iter().map(|number| (*number, 0)).collect();
        let mut wanted = files.clone();
        wanted.retain(|number, _| !gone.contains(number));
        wanted.extend(changed.iter().map(|number| (*number, 1)));
        let (own, want) = (directory(&files, 0o755), directory(&wanted, 0o755));
        prop_assert_eq!(send(&want, Some(&own)).0, want.encode());
        prop_assert_eq!(send(&own, Some(&want)).0, own.encode());
    }

    #[test]
    fn whatever_a_peer_sends_takes_no_more_than_the_limit(
        sent in vec(prop_oneof![
            (0..12_u32).prop_map(Sent::Own),
            (0..50_000_usize).prop_map(Sent::New),
        ], 0..40),
    ) {
        let limit = 200_000;
        let mut joining = Joining::new(Some(directory(&numbered(1_000), 0o755)), 10, limit);
        for sent in sent {
            // A refusal may be the answer.
            let _result = match sent {
                Sent::Own(index) => joining.add_own(index),
                Sent::New(length) => joining.add(&vec![7; length]),
            };
        }
        prop_assert!(joining.finish().len() <= limit);
    }
}
