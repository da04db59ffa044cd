//! File-system trees: what an image holds and what a scan saw.
//!
//! A [`Tree`] is a Merkle tree of [`Directory`] values. A directory is digested over its canonical
//! encoding (`tree-1`, [`encode`], specified in `docs/IMAGE-FORMAT.md`), which names its
//! sub-directories by digest, so that equal sub-trees are known to be equal without looking into
//! them, and are shared in memory by `Arc`.
//!
//! # Invariants
//!
//! * The entries of a directory are sorted by name, and no name occurs twice.
//! * All digests of a tree are of one algorithm.
//! * Of a group of hard links the first path in component order holds the file; the others hold
//!   that path.
//! * Times of directories and symlinks are not part of a tree.

pub mod assembly;
pub mod blocks;
pub mod build;
pub mod encode;
pub mod node;
pub mod text;
pub mod xattrs;

use std::sync::Arc;

pub use build::TreeBuilder;
pub use node::{
    Computed, Device, File, Leaf, Metadata, Node, Special, Symlink, Time, TimePrecision,
    only_root_writes,
};
pub use xattrs::Xattrs;

use serde::{Deserialize, Serialize};

use crate::JsonSchema;
use crate::object::{Algorithm, ObjectId};
use crate::path::{TreePath, fault_of_name};

/// The most entries of a tree, directories counted. Directories are shared by digest, so a few
/// kilobytes from a hostile peer can name more paths than could ever be walked; the sums know
/// before anyone walks.
pub const ENTRIES_MAX: u64 = 1 << 24;

/// Why a tree is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TreeError {
    /// A name in a directory is not a name.
    #[error("bad entry name `{name}`: {why}")]
    BadName {
        /// The name, escaped.
        name: String,
        why: &'static str,
    },
    /// Two entries of a directory have the same name, or they are out of order.
    #[error("entry `{name}` is repeated or out of order")]
    Order {
        /// The second of the two, escaped.
        name: String,
    },
    /// A path is given twice.
    #[error("{path} is given twice")]
    Duplicate { path: TreePath },
    /// The directory that should hold a path is missing or is no directory.
    #[error("{path} is in no directory")]
    NoParent { path: TreePath },
    /// A hard link names no regular file of the tree.
    #[error("{path} is a hard link to {target}, which is no regular file of the tree")]
    BadLink {
        /// The link.
        path: TreePath,
        /// What it names.
        target: TreePath,
    },
    /// A digest has another algorithm than the tree.
    #[error("`{name}` has a digest of another algorithm than {algorithm}")]
    Algorithm {
        /// The entry, escaped.
        name: String,
        /// The algorithm of the tree.
        algorithm: Algorithm,
    },
    /// A value is out of the range of its field.
    #[error("`{name}` has a bad {field}")]
    BadField {
        /// The entry, escaped.
        name: String,
        /// Which field.
        field: &'static str,
    },
    /// The tree has too many entries.
    #[error("the tree has more than {ENTRIES_MAX} entries")]
    TooLarge,
    /// A tree is deeper than paths may be.
    #[error("the tree is deeper than {} directories", crate::path::DEPTH_MAX)]
    TooDeep,
    /// The bytes are not the encoding of a directory.
    #[error("bad directory encoding at byte {offset}: {what}")]
    Encoding {
        /// Where decoding stopped, in bytes.
        offset: usize,
        /// What was expected there.
        what: &'static str,
    },
    /// A directory that another one names is missing.
    #[error("directory {digest} is missing")]
    MissingDirectory { digest: ObjectId },
    /// A directory does not have the requested digest.
    #[error("directory {want} was asked for, {got} came")]
    Digest {
        /// The requested digest.
        want: ObjectId,
        /// The actual digest.
        got: ObjectId,
    },
}

/// A name in a directory: 1 to 255 bytes without slash and zero.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<[u8]>);

impl Name {
    /// Takes `bytes` as a name.
    ///
    /// # Errors
    ///
    /// [`TreeError::BadName`] says what is wrong with it.
    pub fn new(bytes: &[u8]) -> Result<Self, TreeError> {
        Self::try_from(Box::from(bytes))
    }

    /// The bytes of the name.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl TryFrom<Box<[u8]>> for Name {
    type Error = TreeError;

    fn try_from(bytes: Box<[u8]>) -> Result<Self, TreeError> {
        match fault_of_name(&bytes) {
            None => Ok(Self(bytes)),
            Some(why) => Err(TreeError::BadName { name: crate::escape::escape(&bytes), why }),
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&crate::escape::escape(&self.0))
    }
}

impl std::fmt::Debug for Name {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "\"{self}\"")
    }
}

/// An entry of a directory, without its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Child {
    /// A directory with all that it holds.
    Directory(Arc<Directory>),
    /// Anything else.
    Leaf(Leaf),
}

impl Child {
    /// The entry by itself, without what a directory holds.
    #[must_use]
    pub fn node(&self) -> Node {
        match self {
            Self::Directory(directory) => Node::Directory(directory.metadata().clone()),
            Self::Leaf(leaf) => Node::Leaf(leaf.clone()),
        }
    }
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name, unique in its directory.
    pub name: Name,
    /// The entry without its name.
    pub child: Child,
}

/// There is one for each entry of a machine, and its name besides.
const _: () = assert!(size_of::<Entry>() <= 104);

/// Totals of a directory and everything below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Totals {
    /// Entries below the directory, directories counted, itself not.
    #[serde(with = "crate::json::LargeNumber")]
    pub entries: u64,
    /// Directories below it.
    #[serde(with = "crate::json::LargeNumber")]
    pub directories: u64,
    /// Sum of the sizes of its regular files, each group of hard links once, in bytes.
    #[serde(with = "crate::json::LargeNumber")]
    pub bytes: u64,
    /// Entries that are further names of a file (`Leaf::HardLink`).
    #[serde(with = "crate::json::LargeNumber")]
    pub hard_links: u64,
    /// Computed files whose content is not filled in.
    #[serde(with = "crate::json::LargeNumber")]
    pub computed: u64,
    /// Levels of directories below it.
    pub depth: u32,
}

/// A directory with all that it holds, its digest and its sums. Immutable; shared by `Arc`.
#[derive(Debug)]
pub struct Directory {
    metadata: Metadata,
    entries: Box<[Entry]>,
    digest: ObjectId,
    totals: Totals,
}

impl Directory {
    /// Makes a directory of `entries`, in any order, and computes its digest and sums.
    ///
    /// Costs one encoding and one digest of the directory itself; sub-directories bring theirs.
    ///
    /// # Errors
    ///
    /// [`TreeError`] if a name occurs twice, a value is out of range, a digest is of another
    /// algorithm, or the tree gets too deep.
    pub fn new(
        algorithm: Algorithm,
        metadata: Metadata,
        mut entries: Vec<Entry>,
    ) -> Result<Self, TreeError> {
        entries.sort_by(|left, right| left.name.cmp(&right.name));
        let digest = encode::digest(algorithm, &metadata, &entries)?;
        Self::with_digest(metadata, entries, digest)
    }

    /// Makes a directory whose digest is known; `entries` are sorted.
    pub(crate) fn with_digest(
        metadata: Metadata,
        entries: Vec<Entry>,
        digest: ObjectId,
    ) -> Result<Self, TreeError> {
        let mut totals = Totals::default();
        for entry in &entries {
            totals.entries += 1;
            match &entry.child {
                Child::Directory(directory) => {
                    let below = directory.totals;
                    // Each sum below is at most the limit, which is checked here at each level.
                    totals.directories += 1 + below.directories;
                    totals.entries += below.entries;
                    if totals.entries > ENTRIES_MAX {
                        return Err(TreeError::TooLarge);
                    }
                    totals.bytes = totals.bytes.saturating_add(below.bytes);
                    totals.hard_links += below.hard_links;
                    totals.computed += below.computed;
                    totals.depth = totals.depth.max(below.depth + 1);
                }
                Child::Leaf(Leaf::File(file)) => {
                    totals.bytes = totals.bytes.saturating_add(file.size_bytes);
                }
                Child::Leaf(Leaf::HardLink(_)) => totals.hard_links += 1,
                Child::Leaf(Leaf::Computed(_)) => totals.computed += 1,
                Child::Leaf(Leaf::Symlink(_) | Leaf::Special(_)) => {}
            }
        }
        if totals.entries > ENTRIES_MAX {
            return Err(TreeError::TooLarge);
        }
        if totals.depth as usize >= crate::path::DEPTH_MAX {
            return Err(TreeError::TooDeep);
        }
        Ok(Self { metadata, entries: entries.into_boxed_slice(), digest, totals })
    }

    /// Mode, owner and extended attributes of the directory itself.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The entries, sorted by name.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The digest of the canonical encoding.
    #[must_use]
    pub fn digest(&self) -> ObjectId {
        self.digest
    }

    /// Sums over all that the directory holds.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// The canonical encoding, whose digest is [`Directory::digest`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        encode::encode(self.digest.algorithm(), &self.metadata, &self.entries)
            .expect("a directory was encoded once when it was made")
    }

    /// What has the name `name`. Takes a binary search.
    #[must_use]
    pub fn get(&self, name: &[u8]) -> Option<&Child> {
        let index = self.entries.binary_search_by(|entry| entry.name.as_bytes().cmp(name)).ok()?;
        Some(&self.entries[index].child)
    }
}

impl PartialEq for Directory {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Directory {}

/// A whole tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    root: Arc<Directory>,
}

impl Tree {
    /// Takes `root` as a tree. Hard links are not checked; [`Tree::verify`] does that.
    #[must_use]
    pub fn new(root: Arc<Directory>) -> Self {
        Self { root }
    }

    /// A tree with nothing in it: mode 755, owned by root.
    #[must_use]
    pub fn empty(algorithm: Algorithm) -> Self {
        let root = Directory::new(algorithm, Metadata::new(0o755, 0, 0), Vec::new())
            .expect("an empty directory breaks no rule");
        Self::new(Arc::new(root))
    }

    /// The root directory.
    #[must_use]
    pub fn root(&self) -> &Arc<Directory> {
        &self.root
    }

    /// The digest of the root directory: of the whole tree.
    #[must_use]
    pub fn digest(&self) -> ObjectId {
        self.root.digest
    }

    /// The algorithm of all digests in the tree.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.root.digest.algorithm()
    }

    /// What is at `path`, or `None`. Hard links are not followed.
    #[must_use]
    pub fn get(&self, path: &TreePath) -> Option<Child> {
        let mut child = Child::Directory(Arc::clone(&self.root));
        for component in path.components() {
            let Child::Directory(directory) = &child else { return None };
            child = directory.get(component)?.clone();
        }
        Some(child)
    }

    /// Every path with its node, in component order, the root first.
    pub fn nodes(&self) -> Nodes<'_> {
        Nodes { root: Some(&self.root), stack: Vec::new() }
    }

    /// The regular file behind `path`, following one hard link.
    #[must_use]
    pub fn file(&self, path: &TreePath) -> Option<File> {
        match self.get(path)? {
            Child::Leaf(Leaf::File(file)) => Some(file),
            Child::Leaf(Leaf::HardLink(target)) => match self.get(&target)? {
                Child::Leaf(Leaf::File(file)) => Some(file),
                _ => None,
            },
            _ => None,
        }
    }

    /// Checks what the shape of the values does not ensure: each hard link names a regular file
    /// that comes before it, and all digests are of one algorithm.
    ///
    /// Visits only directories that hold hard links.
    ///
    /// # Errors
    ///
    /// [`TreeError::BadLink`] names the link.
    pub fn verify(&self) -> Result<(), TreeError> {
        let mut stack = vec![(TreePath::root(), &self.root)];
        while let Some((path, directory)) = stack.pop() {
            for entry in directory.entries() {
                match &entry.child {
                    Child::Directory(below) if below.totals().hard_links > 0 => {
                        stack.push((path.join_name(entry.name.as_bytes()), below));
                    }
                    Child::Leaf(Leaf::HardLink(target)) => {
                        let link = path.join_name(entry.name.as_bytes());
                        let carrier = self.get(target);
                        if *target >= link || !matches!(carrier, Some(Child::Leaf(Leaf::File(_)))) {
                            return Err(TreeError::BadLink { path: link, target: target.clone() });
                        }
                    }
                    Child::Directory(_) | Child::Leaf(_) => {}
                }
            }
        }
        Ok(())
    }

    /// The tree without the paths for which `drop` is true, nor anything below them.
    ///
    /// A group of hard links that loses its first path is carried by the next one. Directories
    /// that lose nothing are shared with this tree.
    ///
    /// # Errors
    ///
    /// None today for a tree that [`Tree::verify`] accepts.
    pub fn without(&self, drop: impl Fn(&TreePath) -> bool) -> Result<Self, TreeError> {
        let mut builder = TreeBuilder::new(self.algorithm());
        let mut dropped_any = false;
        let mut lost: Option<TreePath> = None;
        let mut lost_files: std::collections::BTreeMap<TreePath, File> = Default::default();
        let mut moved: std::collections::BTreeMap<TreePath, TreePath> = Default::default();
        for (path, node) in self.nodes() {
            let inside = lost.as_ref().is_some_and(|lost| path.starts_with(lost));
            if inside || (!path.is_root() && drop(&path)) {
                dropped_any = true;
                if !inside {
                    lost = Some(path.clone());
                }
                if let Node::Leaf(Leaf::File(file)) = node {
                    lost_files.insert(path, file);
                }
                continue;
            }
            let node = match node {
                Node::Leaf(Leaf::HardLink(target)) => match lost_files.get(&target) {
                    None => Node::Leaf(Leaf::HardLink(target)),
                    Some(file) => match moved.get(&target) {
                        Some(carrier) => Node::Leaf(Leaf::HardLink(carrier.clone())),
                        None => {
                            moved.insert(target.clone(), path.clone());
                            Node::Leaf(Leaf::File(file.clone()))
                        }
                    },
                },
                other => other,
            };
            builder.insert(path, node)?;
        }
        if dropped_any { builder.finish() } else { Ok(self.clone()) }
    }
}

/// Iterates over all paths of a tree; made by [`Tree::nodes`].
pub struct Nodes<'tree> {
    root: Option<&'tree Arc<Directory>>,
    stack: Vec<(TreePath, std::slice::Iter<'tree, Entry>)>,
}

impl Iterator for Nodes<'_> {
    type Item = (TreePath, Node);

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(root) = self.root.take() {
            self.stack.push((TreePath::root(), root.entries.iter()));
            return Some((TreePath::root(), Node::Directory(root.metadata.clone())));
        }
        loop {
            let (parent, entries) = self.stack.last_mut()?;
            let Some(entry) = entries.next() else {
                self.stack.pop();
                continue;
            };
            let path = parent.join_name(entry.name.as_bytes());
            if let Child::Directory(directory) = &entry.child {
                self.stack.push((path.clone(), directory.entries.iter()));
            }
            return Some((path, entry.child.node()));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
