//! Trees: encodings and texts are lossless and canonical, hard links are normalised.

pub(crate) mod generate;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;

use super::assembly::Assembly;
use super::text::{from_text, to_text};
use super::*;
use generate::{trees, trees_with_computed};

/// The encodings of all directories, by digest.
fn encodings(tree: &Tree) -> BTreeMap<ObjectId, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut stack = vec![Arc::clone(tree.root())];
    while let Some(directory) = stack.pop() {
        found.insert(directory.digest(), directory.encode());
        for entry in directory.entries() {
            if let Child::Directory(below) = &entry.child {
                stack.push(Arc::clone(below));
            }
        }
    }
    found
}

fn assemble(root: ObjectId, encodings: &BTreeMap<ObjectId, Vec<u8>>) -> Result<Tree, TreeError> {
    let mut assembly = Assembly::new(root, |_| None);
    loop {
        let wanted = assembly.wanted();
        if wanted.is_empty() {
            return assembly.finish();
        }
        for digest in wanted {
            let bytes = encodings.get(&digest).ok_or(TreeError::MissingDirectory { digest })?;
            assembly.insert(bytes.clone(), |_| None)?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_tree_is_rebuilt_from_its_encodings(tree in trees_with_computed(Algorithm::Blake3)) {
        let again = assemble(tree.digest(), &encodings(&tree)).unwrap();
        prop_assert_eq!(again.nodes().collect::<Vec<_>>(), tree.nodes().collect::<Vec<_>>());
        prop_assert_eq!(again.digest(), tree.digest());
        prop_assert_eq!(again.root().totals(), tree.root().totals());
    }

    #[test]
    fn a_tree_is_read_back_from_its_text(tree in trees_with_computed(Algorithm::Sha512)) {
        let text = to_text(&tree);
        let again = from_text(Algorithm::Sha512, &text).unwrap();
        prop_assert_eq!(to_text(&again), text);
        prop_assert_eq!(again.digest(), tree.digest());
    }

    #[test]
    fn trees_are_equal_exactly_if_their_digests_are(
        left in trees(Algorithm::Blake3),
        right in trees(Algorithm::Blake3),
    ) {
        let nodes = |tree: &Tree| tree.nodes().collect::<Vec<_>>();
        prop_assert_eq!(nodes(&left) == nodes(&right), left.digest() == right.digest());
        let rebuilt = from_text(Algorithm::Blake3, &to_text(&left)).unwrap();
        prop_assert_eq!(rebuilt.digest(), left.digest());
    }

    #[test]
    fn one_changed_node_changes_the_digest(
        tree in trees(Algorithm::Blake3),
        pick in any::<prop::sample::Index>(),
    ) {
        let nodes: Vec<_> = tree.nodes().collect();
        let (path, node) = pick.get(&nodes).clone();
        let Some(metadata) = node.metadata() else { return Ok(()) };
        let mut changed = node.clone();
        let other = Metadata { gid: metadata.gid + 1, ..metadata.clone() };
        *changed.metadata_mut().unwrap() = other;
        let mut builder = TreeBuilder::new(Algorithm::Blake3);
        for (path, node) in nodes {
            builder.insert(path, node).unwrap();
        }
        builder.replace(path, changed);
        prop_assert_ne!(builder.finish().unwrap().digest(), tree.digest());
    }

    #[test]
    fn a_damaged_encoding_is_refused_or_is_another_directory(
        tree in trees(Algorithm::Blake3),
        pick in any::<prop::sample::Index>(),
        value in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let bytes = tree.root().encode();
        let known: BTreeMap<_, _> = tree.root().entries().iter().filter_map(|entry| {
            match &entry.child {
                Child::Directory(directory) => Some((directory.digest(), Arc::clone(directory))),
                Child::Leaf(_) => None,
            }
        }).collect();
        let decode = |bytes: &[u8]| {
            encode::decode(Algorithm::Blake3, bytes, |digest| known.get(digest).cloned())
        };
        let at = pick.index(bytes.len());
        let damaged = [&bytes[..at], &[value], &bytes[at + 1..]].concat();
        // Whatever is accepted encodes to exactly the bytes that were read.
        if let Ok(directory) = decode(&damaged) {
            prop_assert_eq!(directory.encode(), damaged);
        }
        prop_assert!(decode(&bytes[..cut.index(bytes.len())]).is_err());
        let longer = [&bytes[..], &[value]].concat();
        prop_assert!(decode(&longer).is_err());
    }

    #[test]
    fn dropping_paths_drops_them_and_what_lies_below(
        tree in trees(Algorithm::Blake3),
        pick in any::<prop::sample::Index>(),
    ) {
        let nodes: Vec<_> = tree.nodes().collect();
        let gone = pick.get(&nodes).0.clone();
        prop_assume!(!gone.is_root());
        let left = tree.without(|path| *path == gone).unwrap();
        left.verify().unwrap();
        let expected: Vec<_> =
            nodes.iter().map(|(path, _)| path).filter(|path| !path.starts_with(&gone)).collect();
        let got: Vec<_> = left.nodes().map(|(path, _)| path).collect();
        prop_assert_eq!(got.iter().collect::<Vec<_>>(), expected);
        for (path, _) in left.nodes() {
            prop_assert_eq!(left.file(&path), tree.file(&path));
        }
    }
}

fn path(text: &str) -> TreePath {
    text.parse().unwrap()
}

fn file(content: &[u8]) -> Node {
    Node::Leaf(Leaf::File(File {
        metadata: Metadata::new(0o644, 0, 0),
        mtime: Time::default(),
        size_bytes: content.len() as u64,
        object: Algorithm::Blake3.digest(content).into(),
    }))
}

fn link(target: &str) -> Node {
    Node::Leaf(Leaf::HardLink(path(target)))
}

fn build(items: &[(&str, Node)]) -> Result<Tree, TreeError> {
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    for (at, node) in items {
        builder.insert(path(at), node.clone())?;
    }
    builder.finish()
}

#[test]
fn the_first_path_carries_a_group_however_it_was_given() {
    let expected = build(&[("/a", file(b"x")), ("/b", link("/a")), ("/c", link("/a"))]).unwrap();
    let ways: [[(&str, Node); 3]; 3] = [
        [("/c", file(b"x")), ("/a", link("/c")), ("/b", link("/c"))],
        [("/b", file(b"x")), ("/c", link("/b")), ("/a", link("/c"))],
        [("/a", link("/b")), ("/b", link("/c")), ("/c", file(b"x"))],
    ];
    for way in ways {
        assert_eq!(to_text(&build(&way).unwrap()), to_text(&expected));
    }
}

#[test]
fn a_long_chain_of_links_is_walked_once() {
    let name = |number: u32| path(&format!("/{number:06}"));
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    builder.insert(name(0), file(b"x")).unwrap();
    // Walked again for each link, this would take minutes.
    for number in 1..50_000 {
        builder.insert(name(number), Node::Leaf(Leaf::HardLink(name(number - 1)))).unwrap();
    }
    let tree = builder.finish().unwrap();
    assert_eq!(tree.root().totals().hard_links, 49_999);
    let last = tree.get(&name(49_999)).unwrap();
    assert_eq!(last, Child::Leaf(Leaf::HardLink(name(0))));
}

#[test]
fn a_directory_is_digested_in_pieces_and_names_the_carrier_of_its_links_once() {
    let text = format!("/carrier-{}", "x".repeat(200));
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    builder.insert(path(&text), file(b"x")).unwrap();
    for number in 0..1_000 {
        builder.insert(path(&format!("/link-{number}")), link(&text)).unwrap();
    }
    let tree = builder.finish().unwrap();
    let encoding = tree.root().encode();
    assert!(encoding.len() > 200_000, "several pieces");
    assert_eq!(Algorithm::Blake3.digest(&encoding), tree.digest());
    let read = encode::decode(Algorithm::Blake3, &encoding, |_| None).unwrap();
    assert_eq!(read, **tree.root());
    for directory in [&read, tree.root()] {
        let carriers = directory.entries().iter().filter_map(|entry| match &entry.child {
            Child::Leaf(Leaf::HardLink(carrier)) => Some(carrier.as_bytes().as_ptr()),
            _ => None,
        });
        assert_eq!(carriers.clone().count(), 1_000);
        assert_eq!(carriers.collect::<BTreeSet<_>>().len(), 1);
    }
}

#[test]
fn what_is_no_tree_is_refused_by_name() {
    let orphan = build(&[("/a/b", file(b""))]).unwrap_err();
    assert_eq!(orphan.to_string(), "/a/b is in no directory");
    let below_file = build(&[("/a", file(b"")), ("/a/b", file(b""))]).unwrap_err();
    assert_eq!(below_file.to_string(), "/a/b is in no directory");
    let nowhere = build(&[("/a", link("/b"))]).unwrap_err();
    assert_eq!(
        nowhere.to_string(),
        "/a is a hard link to /b, which is no regular file of the tree"
    );
    let circle = build(&[("/a", link("/b")), ("/b", link("/a"))]).unwrap_err();
    assert!(matches!(circle, TreeError::BadLink { .. }), "{circle}");
    let twice = build(&[("/a", file(b"")), ("/a", file(b""))]).unwrap_err();
    assert_eq!(twice.to_string(), "/a is given twice");
    // An input that the generator of random ones has found.
    let metadata = Metadata { mode: 0o644, uid: 0, gid: 0, xattrs: Xattrs::default() };
    let nobody = Node::Leaf(Leaf::Computed(Computed { metadata, source: String::new() }));
    let nobody = build(&[("/a", nobody)]).unwrap_err();
    assert!(matches!(nobody, TreeError::BadField { field: "source", .. }), "{nobody}");
}

#[test]
fn deep_trees_are_refused_before_they_are_a_danger() {
    let mut builder = TreeBuilder::new(Algorithm::Blake3);
    let mut at = TreePath::root();
    let directory = || Node::Directory(Metadata::new(0o755, 0, 0));
    for _ in 0..crate::path::DEPTH_MAX - 1 {
        at = at.join(b"d").unwrap();
        builder.insert(at.clone(), directory()).unwrap();
    }
    let tree = builder.finish().unwrap();
    assert_eq!(tree.root().totals().depth as usize, crate::path::DEPTH_MAX - 1);
    let text = to_text(&tree);
    let deeper = format!("{text}d 755 0:0 {at}/d\n");
    assert!(matches!(
        from_text(Algorithm::Blake3, &deeper),
        Err(super::text::TextError::Tree { source: TreeError::TooDeep })
    ));
}

#[test]
fn an_assembly_refuses_what_nobody_asked_for() {
    let tree = build(&[("/a", file(b"x"))]).unwrap();
    let other = Tree::empty(Algorithm::Blake3);
    let mut assembly = Assembly::new(tree.digest(), |_| None);
    assert_eq!(
        assembly.insert(other.root().encode(), |_| None),
        Err(TreeError::Digest { want: tree.digest(), got: other.digest() })
    );
    assert_eq!(
        assembly.finish().unwrap_err(),
        TreeError::MissingDirectory { digest: tree.digest() }
    );
}

#[test]
fn a_few_directories_that_name_endless_paths_are_refused() {
    let leaf = Leaf::Symlink(Symlink {
        metadata: Metadata::new(0o777, 0, 0),
        target: crate::escape::ByteText(b"x".to_vec()),
    });
    let entry =
        |name: &[u8], child: &Child| Entry { name: Name::new(name).unwrap(), child: child.clone() };
    let mut child = Child::Leaf(leaf);
    let mut levels = 0;
    // Each level holds the one below twice: 2^levels paths in a few hundred bytes.
    let error = loop {
        let entries = vec![entry(b"a", &child), entry(b"b", &child)];
        match Directory::new(Algorithm::Blake3, Metadata::new(0o755, 0, 0), entries) {
            Ok(directory) => child = Child::Directory(Arc::new(directory)),
            Err(error) => break error,
        }
        levels += 1;
    };
    assert_eq!((error, levels), (TreeError::TooLarge, 23));
}
