//! Random trees for property tests: small, crowded, and odd in every way that is allowed.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::escape::ByteText;
use crate::object::Algorithm;
use crate::path::TreePath;
use crate::tree::node::{
    Computed, Device, File, Leaf, Metadata, Node, SYMLINK_MODE, Special, Symlink, Time,
};
use crate::tree::{Tree, TreeBuilder};

const NAMES: [&[u8]; 8] =
    [b"a", b"b", b"a-b", b"lib.so.1", b"boot", b"\xff\xfe", b"new\nline", b"z z"];

#[derive(Clone, Debug)]
enum Kind {
    Directory,
    File(u8),
    Computed,
    Symlink(u8),
    Special(u8),
    Link(usize),
}

fn odd_attribute() -> (Vec<u8>, Vec<u8>) {
    (b"user.x".to_vec(), b"\xff\x00=".to_vec())
}

fn metadata() -> impl Strategy<Value = Metadata> {
    let mode = prop_oneof![4 => Just(0o644), 2 => Just(0o755), 1 => Just(0o4755), 1 => Just(0o600)];
    let xattrs = prop_oneof![
        6 => Just(vec![]),
        1 => Just(vec![(b"user.x".to_vec(), b"1".to_vec())]),
        1 => Just(vec![odd_attribute(), (b"user.a b".to_vec(), vec![])]),
        1 => Just(vec![(b"security.capability".to_vec(), b"\x01\x00\x00\x02".to_vec())]),
    ];
    (mode, 0..2_u32, 0..2_u32, xattrs).prop_map(|(mode, uid, gid, xattrs)| Metadata {
        mode,
        uid,
        gid,
        xattrs: xattrs.into_iter().collect(),
    })
}

fn kind(computed: bool) -> impl Strategy<Value = Kind> {
    prop_oneof![
        2 => Just(Kind::Directory),
        6 => (0..4_u8).prop_map(Kind::File),
        1 => (0..3_u8).prop_map(Kind::Symlink),
        1 => (0..4_u8).prop_map(Kind::Special),
        4 => (0..6_usize).prop_map(Kind::Link),
        1 => Just(if computed { Kind::Computed } else { Kind::Directory }),
    ]
}

/// Trees of up to thirty entries and three levels, without computed files.
pub(crate) fn trees(algorithm: Algorithm) -> impl Strategy<Value = Tree> {
    trees_with(algorithm, false)
}

/// As [`trees`], with computed files.
pub(crate) fn trees_with_computed(algorithm: Algorithm) -> impl Strategy<Value = Tree> {
    trees_with(algorithm, true)
}

/// Two trees that agree in much: the second takes each entry of its root from the first or from a
/// third tree, so that groups of hard links are cut and joined in every way.
pub(crate) fn similar_trees(algorithm: Algorithm) -> impl Strategy<Value = (Tree, Tree)> {
    let picks = vec(any::<bool>(), NAMES.len());
    (trees(algorithm), trees(algorithm), picks).prop_map(|(first, third, picks)| {
        let from_first = |path: &TreePath| {
            let top = path.components().next();
            top.is_none_or(|top| NAMES.iter().zip(&picks).any(|(name, pick)| *name == top && *pick))
        };
        let mut builder = TreeBuilder::new(first.algorithm());
        for (path, node) in first.nodes().filter(|(path, _)| from_first(path)) {
            builder.insert(path, node).unwrap();
        }
        for (path, node) in third.nodes().filter(|(path, _)| !from_first(path)) {
            builder.insert(path, node).unwrap();
        }
        // A link whose file stayed behind becomes a file of its own, unless something that may
        // carry it is in the file's place.
        let links: Vec<(TreePath, TreePath)> = builder
            .iter()
            .filter_map(|(path, node)| match node {
                Node::Leaf(Leaf::HardLink(target)) => Some((path.clone(), target.clone())),
                _ => None,
            })
            .collect();
        for (path, target) in links {
            if !matches!(builder.get(&target), Some(Node::Leaf(Leaf::File(_)))) {
                let source = if from_first(&path) { &first } else { &third };
                let file = source.file(&path).expect("a generated link leads to a file");
                builder.replace(path, Node::Leaf(Leaf::File(file)));
            }
        }
        let second = builder.finish().unwrap();
        (first, second)
    })
}

fn trees_with(algorithm: Algorithm, computed: bool) -> impl Strategy<Value = Tree> {
    let place = vec(0..NAMES.len(), 1..4);
    let item = (place, kind(computed), metadata(), 0..3_i64);
    (vec(item, 0..30), metadata()).prop_map(move |(items, root)| {
        let mut builder = TreeBuilder::new(algorithm);
        let mut files: Vec<TreePath> = Vec::new();
        builder.replace(TreePath::root(), Node::Directory(root));
        for (place, kind, metadata, seconds) in items {
            let mut path = TreePath::root();
            let mut fits = true;
            for (level, index) in place.iter().enumerate() {
                path = path.join(NAMES[*index]).unwrap();
                if fits && level + 1 < place.len() {
                    match builder.get(&path) {
                        None => {
                            let parent = Node::Directory(Metadata::new(0o755, 0, 0));
                            builder.insert(path.clone(), parent).unwrap();
                        }
                        Some(node) => fits = fits && node.is_directory(),
                    }
                }
            }
            if fits && builder.get(&path).is_none() {
                let node = node(algorithm, &kind, metadata, seconds, &files);
                if let Node::Leaf(Leaf::File(_)) = node {
                    files.push(path.clone());
                }
                builder.insert(path, node).unwrap();
            }
        }
        builder.finish().unwrap()
    })
}

fn node(
    algorithm: Algorithm,
    kind: &Kind,
    metadata: Metadata,
    seconds: i64,
    files: &[TreePath],
) -> Node {
    let mtime = Time { seconds: seconds - 1, nanoseconds: 999_999_999 };
    let content = |number: u8| {
        Leaf::File(File {
            metadata: metadata.clone(),
            mtime,
            size_bytes: u64::from(number),
            object: algorithm.digest(&vec![number; usize::from(number)]).into(),
        })
    };
    let plain = Metadata { xattrs: crate::tree::Xattrs::none(), ..metadata.clone() };
    Node::Leaf(match kind {
        Kind::Directory => return Node::Directory(metadata),
        Kind::File(number) => content(*number),
        Kind::Computed => Leaf::Computed(Computed { metadata, source: "files:6972".into() }),
        Kind::Symlink(number) => Leaf::Symlink(Symlink {
            metadata: Metadata { mode: SYMLINK_MODE, ..plain },
            target: ByteText(format!("../target {number}").into_bytes()),
        }),
        Kind::Special(number) => {
            let minor = u32::from(*number) << 10;
            let device = match number {
                0 => Device::Fifo,
                1 => Device::Block { major: 8, minor },
                _ => Device::Character { major: 1, minor },
            };
            Leaf::Special(Special { metadata: plain, mtime, device })
        }
        Kind::Link(index) => match files.get(*index) {
            Some(target) => Leaf::HardLink(target.clone()),
            None => content(1),
        },
    })
}
