//! Applies layers to a tree: what each adds, replaces and removes.
//!
//! An ordinary archive is one layer that is applied to an empty tree. In a layer of an OCI image,
//! the name `.wh.NAME` removes `NAME` of lower layers, and `.wh..wh..opq` removes all that they
//! have in its directory. A layer removes before it adds, whatever the order of its members: it
//! never removes its own entries.
//!
//! # Invariants
//!
//! * A directory that a layer has again keeps its entries and gets the new owner, mode and
//!   attributes. Anything else is replaced, with all entries below it.
//! * The other names of a file stay when one of them is replaced or removed.
//! * Nothing is written through a symlink, of this layer or a lower one.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use model::object::Algorithm;
use model::path::TreePath;
use model::tree::{self, Leaf, Metadata, Node, Tree, TreeBuilder, TreeError};

use super::EntryError;

/// Prefix of the names of whiteouts.
const WHITEOUT: &[u8] = b".wh.";

/// The prefix of names that an old storage driver used for itself. They are ignored, except
/// [`OPAQUE`].
const OWN_USE: &[u8] = b".wh..wh.";

/// The name that removes all that lower layers have in its directory.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// How names of whiteouts are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whiteouts {
    /// They remove entries of lower layers.
    Applied,
    /// They are ordinary names.
    Ordinary,
}

/// The changes of one layer.
#[derive(Debug)]
pub struct Layer {
    whiteouts: Whiteouts,
    entries: BTreeMap<TreePath, LayerEntry>,
    removed: BTreeSet<TreePath>,
    emptied: BTreeSet<TreePath>,
}

#[derive(Debug)]
struct LayerEntry {
    node: Node,
    /// Name of the entry in the archive.
    name: Vec<u8>,
}

/// An entry that cannot be applied to the tree.
#[derive(Debug)]
pub struct RefusedEntry {
    /// Name in the archive.
    pub name: Vec<u8>,
    pub source: EntryError,
}

/// The change of a path by a layer.
enum LayerPath {
    Entry,
    Ignored,
    Removes(TreePath),
    Empties(TreePath),
}

impl Layer {
    /// Returns a layer without changes.
    pub fn new(whiteouts: Whiteouts) -> Self {
        let (removed, emptied) = (BTreeSet::new(), BTreeSet::new());
        Self { whiteouts, entries: BTreeMap::new(), removed, emptied }
    }

    /// Returns the number of entries that it adds and removes.
    pub fn len(&self) -> usize {
        self.entries.len() + self.removed.len() + self.emptied.len()
    }

    /// Returns true if it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds the entry at `path`, which has `name` in the archive. A hard link may refer to any path
    /// of this layer or of a lower one.
    ///
    /// # Errors
    ///
    /// [`EntryError::Duplicate`], and [`EntryError::Whiteout`] for an entry that has the name of a
    /// whiteout but not its form.
    pub fn insert(&mut self, path: TreePath, node: Node, name: &[u8]) -> Result<(), EntryError> {
        let layer_path = match self.whiteouts {
            Whiteouts::Applied => layer_path_of(&path, &node)?,
            Whiteouts::Ordinary => LayerPath::Entry,
        };
        match layer_path {
            LayerPath::Ignored => {}
            LayerPath::Removes(path) => {
                self.removed.insert(path);
            }
            LayerPath::Empties(path) => {
                self.emptied.insert(path);
            }
            LayerPath::Entry => {
                if self.entries.contains_key(&path) {
                    return Err(EntryError::Duplicate);
                }
                self.entries.insert(path, LayerEntry { node, name: name.to_owned() });
            }
        }
        Ok(())
    }
}

fn layer_path_of(path: &TreePath, node: &Node) -> Result<LayerPath, EntryError> {
    let bad = |why| EntryError::Whiteout { why };
    if path.components().any(|name| name.starts_with(OWN_USE) && name != OPAQUE) {
        return Ok(LayerPath::Ignored);
    }
    let parent = path.parent().unwrap_or_else(TreePath::root);
    if parent.components().any(|name| name.starts_with(WHITEOUT)) {
        return Err(bad("it is inside a directory that has the name of one"));
    }
    let Some(name) = path.name().strip_prefix(WHITEOUT) else { return Ok(LayerPath::Entry) };
    if node.is_directory() {
        return Err(bad("it is a directory"));
    }
    if path.name() == OPAQUE {
        return Ok(LayerPath::Empties(parent));
    }
    let removed = parent.join(name).map_err(|_| bad("the name that it removes is invalid"))?;
    Ok(LayerPath::Removes(removed))
}

/// A tree that layers are applied to.
#[derive(Debug, Default)]
pub struct LayeredTree {
    places: BTreeMap<TreePath, PathState>,
    files: Vec<tree::File>,
}

/// The entry at a path.
#[derive(Clone, Debug)]
enum PathState {
    /// A regular file, by its index. All names of one file have the same index.
    File(usize),
    /// A hard link that is not resolved yet. All are resolved when a layer has been applied.
    Link(TreePath),
    /// Anything else.
    Other(Node),
}

impl PathState {
    fn kind(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Link(_) => "hard link",
            Self::Other(node) => node.kind(),
        }
    }
}

impl LayeredTree {
    /// Starts with `tree`.
    ///
    /// # Errors
    ///
    /// [`TreeError::BadLink`] if a hard link of the tree names no file before it.
    pub fn of_tree(tree: &Tree) -> Result<Self, TreeError> {
        let mut layered = Self::default();
        for (path, node) in tree.nodes() {
            let place = match node {
                Node::Leaf(Leaf::HardLink(target)) => match layered.places.get(&target) {
                    Some(PathState::File(index)) => PathState::File(*index),
                    _ => return Err(TreeError::BadLink { path, target }),
                },
                node => layered.place_of(node),
            };
            layered.places.insert(path, place);
        }
        Ok(layered)
    }

    /// Applies `layer`.
    pub fn apply(&mut self, layer: Layer) -> Result<(), RefusedEntry> {
        for path in &layer.emptied {
            self.remove_below(path);
        }
        for path in &layer.removed {
            self.remove(path);
        }
        let mut links = Vec::new();
        // Directories come before their entries.
        for (path, LayerEntry { node, name }) in layer.entries {
            if let Err(source) = self.make_directories_above(&path) {
                return Err(RefusedEntry { name, source });
            }
            let stays = node.is_directory()
                && matches!(self.places.get(&path), Some(place) if is_directory(place));
            if !stays {
                self.remove(&path);
            }
            let place = self.place_of(node);
            if matches!(place, PathState::Link(_)) {
                links.push((path.clone(), name));
            }
            self.places.insert(path, place);
        }
        links.into_iter().try_for_each(|(path, name)| {
            self.follow(path).map_err(|source| RefusedEntry { name, source })
        })
    }

    /// Returns all entries. The first name of a file is the file, the others are hard links.
    pub fn into_builder(self, algorithm: Algorithm) -> TreeBuilder {
        let mut builder = TreeBuilder::new(algorithm);
        let mut carriers: BTreeMap<usize, TreePath> = BTreeMap::new();
        for (path, place) in self.places {
            let node = match place {
                PathState::File(index) => match carriers.get(&index) {
                    Some(carrier) => Node::Leaf(Leaf::HardLink(carrier.clone())),
                    None => {
                        carriers.insert(index, path.clone());
                        Node::Leaf(Leaf::File(self.files[index].clone()))
                    }
                },
                PathState::Link(target) => Node::Leaf(Leaf::HardLink(target)),
                PathState::Other(node) => node,
            };
            builder.replace(path, node);
        }
        builder
    }

    fn place_of(&mut self, node: Node) -> PathState {
        match node {
            Node::Leaf(Leaf::File(file)) => {
                self.files.push(file);
                PathState::File(self.files.len() - 1)
            }
            Node::Leaf(Leaf::HardLink(target)) => PathState::Link(target),
            node => PathState::Other(node),
        }
    }

    /// Creates the missing directories above `path`.
    fn make_directories_above(&mut self, path: &TreePath) -> Result<(), EntryError> {
        let mut missing = Vec::new();
        for ancestor in path.ancestors().skip(1) {
            match self.places.get(&ancestor) {
                Some(place) if is_directory(place) => break,
                Some(place) => return Err(EntryError::Below { kind: place.kind(), ancestor }),
                None => missing.push(ancestor),
            }
        }
        for ancestor in missing {
            let made = Node::Directory(Metadata::new(0o755, 0, 0));
            self.places.insert(ancestor, PathState::Other(made));
        }
        Ok(())
    }

    fn remove(&mut self, path: &TreePath) {
        self.places.remove(path);
        self.remove_below(path);
    }

    fn remove_below(&mut self, path: &TreePath) {
        let behind = (Bound::Excluded(path), Bound::Unbounded);
        let below = self.places.range::<TreePath, _>(behind).map(|(below, _)| below);
        let below: Vec<TreePath> =
            below.take_while(|below| below.starts_with(path)).cloned().collect();
        for path in below {
            self.places.remove(&path);
        }
    }

    /// Resolves the hard link at `path` and the links on the way. Trees have no hard links to
    /// symlinks or special files, so these are copied.
    fn follow(&mut self, path: TreePath) -> Result<(), EntryError> {
        let mut chain: BTreeSet<TreePath> = BTreeSet::new();
        let mut at = path;
        let found = loop {
            match self.places.get(&at) {
                Some(PathState::Link(target)) => {
                    let target = target.clone();
                    chain.insert(at);
                    if chain.contains(&target) {
                        return Err(EntryError::LinkToNowhere { target });
                    }
                    at = target;
                }
                Some(
                    found @ (PathState::File(_)
                    | PathState::Other(Node::Leaf(Leaf::Symlink(_) | Leaf::Special(_)))),
                ) => break found.clone(),
                Some(PathState::Other(_)) | None => {
                    return Err(EntryError::LinkToNowhere { target: at });
                }
            }
        };
        for link in chain {
            self.places.insert(link, found.clone());
        }
        Ok(())
    }
}

fn is_directory(place: &PathState) -> bool {
    matches!(place, PathState::Other(Node::Directory(_)))
}

#[cfg(test)]
mod tests;
