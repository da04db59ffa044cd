//! Directories and the text of trees.

use std::sync::Arc;

use model::object::Algorithm;
use model::tree::encode::{self, Item};
use model::tree::{Directory, Metadata, Tree, text};

/// The encoding of a directory: the first byte says by which algorithm it is digested.
pub fn directory(bytes: &[u8]) {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let algorithm = if first & 1 == 0 { Algorithm::Blake3 } else { Algorithm::Sha512 };
    let Ok(listing) = encode::list(algorithm, bytes) else {
        encode::references(algorithm, bytes).expect_err("what has no list names nothing");
        return;
    };
    let references = encode::references(algorithm, bytes).expect("what has a list is whole");
    let mut named = listing.entries.iter().filter_map(|(_, item)| match item {
        Item::Directory(digest) => Some(*digest),
        Item::Leaf(_) => None,
    });
    assert!(references.directories.iter().copied().eq(named.by_ref()));
    // Sub-directories of any content will do: their digests cannot be met, but the bytes may be
    // read without any.
    let empty = Metadata::new(0o755, 0, 0);
    let below = Directory::new(algorithm, empty, Vec::new()).expect("a directory may be empty");
    let below = Arc::new(below);
    let Ok(directory) = encode::decode(algorithm, bytes, |_| Some(Arc::clone(&below))) else {
        return;
    };
    assert_eq!(directory.digest(), algorithm.digest(bytes));
    if references.directories.is_empty() {
        assert_eq!(directory.encode(), bytes, "two encodings of one directory");
        assert_eq!(encode::Listing::of(&directory), listing);
        let tree = Tree::new(Arc::new(directory));
        if tree.verify().is_ok() {
            round(algorithm, &tree);
        }
    }
}

/// The text of a tree.
pub fn text(bytes: &[u8]) {
    let Ok(written) = std::str::from_utf8(bytes) else { return };
    let algorithm = match written.contains("sha512:") {
        true => Algorithm::Sha512,
        false => Algorithm::Blake3,
    };
    let Ok(tree) = text::from_text(algorithm, written) else { return };
    tree.verify().expect("a tree that was built is one");
    round(algorithm, &tree);
}

/// The text of a tree gives the tree again.
fn round(algorithm: Algorithm, tree: &Tree) {
    let written = text::to_text(tree);
    let again = text::from_text(algorithm, &written);
    assert_eq!(again.map(|again| again.digest()), Ok(tree.digest()), "{written}");
}
