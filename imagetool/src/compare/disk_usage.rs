//! The disk space of a tree on a machine, and what a machine with another tree would fetch.
//!
//! The numbers are for a file-system with blocks of 4 KiB, without its journal, its inodes, and
//! attributes that do not fit into the inodes.
// tidy: core

use std::collections::BTreeMap;

use api::image_server::estimate::Sum;
use model::object::ObjectId;
use model::tree::{Leaf, Node, Tree};
use serde::Serialize;

/// The block of a file-system, in bytes.
const BLOCK_BYTES: u64 = 4_096;

/// The longest target of a symlink that is kept in its inode, in bytes.
const SHORT_TARGET_BYTES: usize = 59;

/// What a tree takes on a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Space for contents and directories, in bytes.
    #[serde(with = "model::wide")]
    pub bytes: u64,
    /// Inodes: a file with several names has one.
    #[serde(with = "model::wide")]
    pub inodes: u64,
    /// Files of which nobody knows kind long they will be, because they are computed.
    #[serde(with = "model::wide")]
    pub computed: u64,
}

/// What `tree` takes on a disk.
pub fn usage(tree: &Tree) -> Usage {
    let mut usage = Usage::default();
    let blocks = |bytes: u64| bytes.div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES);
    for (_, node) in tree.nodes() {
        let bytes = match &node {
            Node::Leaf(Leaf::HardLink(_)) => continue,
            Node::Directory(_) => BLOCK_BYTES,
            Node::Leaf(Leaf::File(file)) => blocks(file.size_bytes),
            Node::Leaf(Leaf::Symlink(symlink)) => {
                let length = symlink.target.0.len();
                if length > SHORT_TARGET_BYTES { BLOCK_BYTES } else { 0 }
            }
            Node::Leaf(Leaf::Computed(_)) => {
                usage.computed += 1;
                BLOCK_BYTES
            }
            Node::Leaf(Leaf::Special(_)) => 0,
        };
        usage.inodes += 1;
        usage.bytes = usage.bytes.saturating_add(bytes);
    }
    usage
}

/// The contents of files that `tree` has, by their digests, with their lengths in bytes.
pub fn contents(tree: &Tree) -> BTreeMap<ObjectId, u64> {
    let files = tree.nodes().filter_map(|(_, node)| match node {
        Node::Leaf(Leaf::File(file)) => Some((file.object, file.size_bytes)),
        _ => None,
    });
    files.collect()
}

/// What a machine that has `have` would fetch to get `want`.
pub fn to_fetch(have: &Tree, want: &Tree) -> Sum {
    let have = contents(have);
    let mut sum = Sum::default();
    for (_, size_bytes) in contents(want).iter().filter(|(id, _)| !have.contains_key(id)) {
        sum.count(*size_bytes);
    }
    sum
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;
    use model::tree::text::from_text;

    use super::*;

    fn tree(text: &str) -> Tree {
        let id = |byte: &[u8]| Algorithm::Blake3.digest(byte).to_string();
        let text = text.replace("ONE", &id(b"1")).replace("TWO", &id(b"2"));
        from_text(Algorithm::Blake3, &text).unwrap()
    }

    #[test]
    fn a_tree_takes_whole_blocks_and_each_content_is_fetched_once() {
        let long = "x".repeat(60);
        let some = tree(&format!(
            "d 755 0:0 /a\n\
             f 644 0:0 1.000000000 1 ONE /a/one\n\
             f 644 0:0 1.000000000 0 {} /a/zero\n\
             h /b -> /a/one\n\
             f 644 0:0 1.000000000 4097 TWO /c\n\
             f 644 0:0 1.000000000 4097 TWO /d\n\
             l 0:0 /e -> short\n\
             l 0:0 /f -> {long}\n\
             p 600 0:0 1.000000000 /g\n",
            Algorithm::Blake3.digest(b"")
        ));
        // The root, /a, /a/one, twice two blocks, and /f.
        let want = Usage { bytes: 8 * 4_096, inodes: 9, computed: 0 };
        assert_eq!(usage(&some), want);
        let other = tree("f 644 0:0 1.000000000 1 ONE /elsewhere\n");
        assert_eq!(to_fetch(&other, &some), Sum { objects: 2, bytes: 4_097 });
        assert_eq!(to_fetch(&some, &other), Sum::default());
        let none = Tree::empty(Algorithm::Blake3);
        assert_eq!(usage(&none), Usage { bytes: 4_096, inodes: 1, computed: 0 });
        assert_eq!(to_fetch(&none, &some), Sum { objects: 3, bytes: 4_098 });
    }
}
