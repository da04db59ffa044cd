//! Applies a plan to a tree in memory.
//!
//! This is a model of what subd does to a real file-system, and as strict: an operation that does
//! not fit the tree is an error.

use std::collections::BTreeMap;

use super::{Action, Plan};
use crate::path::TreePath;
use crate::tree::{File, Leaf, Metadata, Node, Tree, TreeBuilder, TreeError};

/// Why a plan does not fit the tree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApplyError {
    /// The plan names paths that cannot be changed.
    #[error("the plan is blocked at {path}")]
    Blocked { path: TreePath },
    /// An entry exists where none should.
    #[error("{path} exists already")]
    Exists { path: TreePath },
    /// An entry is missing.
    #[error("{path} does not exist")]
    Missing { path: TreePath },
    /// The directory that should hold the path is no directory.
    #[error("{path} is in no directory")]
    NoParent { path: TreePath },
    /// An entry has another kind than the operation expects.
    #[error("{path} is of another kind than the operation expects")]
    Kind { path: TreePath },
    /// A directory is removed or replaced that holds something the plan does not name.
    #[error("directory {path} holds {entry}, which the plan does not name")]
    NotEmpty {
        /// The directory.
        path: TreePath,
        entry: TreePath,
    },
    /// A hard link names no regular file.
    #[error("{path} is to be a hard link to {target}, which is no regular file")]
    BadLink {
        /// The link.
        path: TreePath,
        /// What it names.
        target: TreePath,
    },
    /// The result is not a valid tree.
    #[error("the result is not a valid tree")]
    Tree {
        #[source]
        source: TreeError,
    },
}

/// A tree like in a file-system: names, and files that several names may share.
struct World {
    slots: BTreeMap<TreePath, Slot>,
    files: Vec<File>,
}

enum Slot {
    Directory(Metadata),
    /// Index of the file.
    File(usize),
    Other(Leaf),
}

/// Carries out `plan` on `have` and returns the tree that results.
///
/// # Errors
///
/// [`ApplyError`] names the first path where the plan does not fit.
pub fn apply(have: &Tree, plan: &Plan) -> Result<Tree, ApplyError> {
    if let Some(blocked) = plan.blocked.first() {
        return Err(ApplyError::Blocked { path: blocked.path.clone() });
    }
    let mut world = World::new(have)?;
    for operation in &plan.operations {
        let path = &operation.path;
        match &operation.action {
            Action::Create(node) => world.create(path, node)?,
            Action::Replace { node, displaced } => world.replace(path, node, displaced)?,
            Action::Change(node) => world.change(path, node)?,
            Action::Remove => world.remove(path)?,
        }
    }
    world.into_tree(have)
}

impl World {
    fn new(tree: &Tree) -> Result<Self, ApplyError> {
        let mut world = Self { slots: BTreeMap::new(), files: Vec::new() };
        for (path, node) in tree.nodes() {
            let slot = world.slot(&path, &node)?;
            world.slots.insert(path, slot);
        }
        Ok(world)
    }

    fn slot(&mut self, path: &TreePath, node: &Node) -> Result<Slot, ApplyError> {
        Ok(match node {
            Node::Directory(metadata) => Slot::Directory(metadata.clone()),
            Node::Leaf(Leaf::File(file)) => {
                self.files.push(file.clone());
                Slot::File(self.files.len() - 1)
            }
            Node::Leaf(Leaf::HardLink(target)) => match self.slots.get(target) {
                Some(Slot::File(index)) => Slot::File(*index),
                _ => {
                    return Err(ApplyError::BadLink { path: path.clone(), target: target.clone() });
                }
            },
            Node::Leaf(other) => Slot::Other(other.clone()),
        })
    }

    /// Returns the paths below `path`, in component order.
    fn below(&self, path: &TreePath) -> impl Iterator<Item = &TreePath> {
        self.slots
            .range(path.clone()..)
            .skip(1)
            .map(|(other, _)| other)
            .take_while(move |other| other.starts_with(path))
    }

    fn create(&mut self, path: &TreePath, node: &Node) -> Result<(), ApplyError> {
        if self.slots.contains_key(path) {
            return Err(ApplyError::Exists { path: path.clone() });
        }
        let parent = path.parent().and_then(|parent| self.slots.get(&parent));
        if !matches!(parent, Some(Slot::Directory(_))) {
            return Err(ApplyError::NoParent { path: path.clone() });
        }
        let slot = self.slot(path, node)?;
        self.slots.insert(path.clone(), slot);
        Ok(())
    }

    fn replace(
        &mut self,
        path: &TreePath,
        node: &Node,
        displaced: &[TreePath],
    ) -> Result<(), ApplyError> {
        let was_directory = match self.slots.get(path) {
            None => return Err(ApplyError::Missing { path: path.clone() }),
            Some(slot) => matches!(slot, Slot::Directory(_)),
        };
        if path.is_root() || (was_directory && node.is_directory()) {
            return Err(ApplyError::Kind { path: path.clone() });
        }
        let slot = self.slot(path, node)?;
        for gone in displaced {
            let inside = gone != path && gone.starts_with(path);
            if !inside || self.slots.remove(gone).is_none() {
                return Err(ApplyError::Missing { path: gone.clone() });
            }
        }
        if let Some(entry) = self.below(path).next() {
            return Err(ApplyError::NotEmpty { path: path.clone(), entry: entry.clone() });
        }
        self.slots.insert(path.clone(), slot);
        Ok(())
    }

    fn change(&mut self, path: &TreePath, node: &Node) -> Result<(), ApplyError> {
        let missing = || ApplyError::Missing { path: path.clone() };
        let slot = self.slots.get_mut(path).ok_or_else(missing)?;
        match (slot, node) {
            (Slot::Directory(metadata), Node::Directory(new)) => *metadata = new.clone(),
            (Slot::File(index), Node::Leaf(Leaf::File(new))) => {
                let file = &mut self.files[*index];
                if file.object != new.object || file.size_bytes != new.size_bytes {
                    return Err(ApplyError::Kind { path: path.clone() });
                }
                *file = new.clone();
            }
            (Slot::Other(Leaf::Special(special)), Node::Leaf(Leaf::Special(new)))
                if special.device == new.device =>
            {
                *special = new.clone();
            }
            _ => return Err(ApplyError::Kind { path: path.clone() }),
        }
        Ok(())
    }

    fn remove(&mut self, path: &TreePath) -> Result<(), ApplyError> {
        if path.is_root() {
            return Err(ApplyError::Kind { path: path.clone() });
        }
        if let Some(entry) = self.below(path).next() {
            return Err(ApplyError::NotEmpty { path: path.clone(), entry: entry.clone() });
        }
        match self.slots.remove(path) {
            Some(_) => Ok(()),
            None => Err(ApplyError::Missing { path: path.clone() }),
        }
    }

    fn into_tree(self, have: &Tree) -> Result<Tree, ApplyError> {
        let tree = |source| ApplyError::Tree { source };
        let mut builder = TreeBuilder::new(have.algorithm());
        let mut first_names: BTreeMap<usize, TreePath> = BTreeMap::new();
        for (path, slot) in self.slots {
            let node = match slot {
                Slot::Directory(metadata) => Node::Directory(metadata),
                Slot::Other(leaf) => Node::Leaf(leaf),
                Slot::File(index) => match first_names.get(&index) {
                    Some(first) => Node::Leaf(Leaf::HardLink(first.clone())),
                    None => {
                        first_names.insert(index, path.clone());
                        Node::Leaf(Leaf::File(self.files[index].clone()))
                    }
                },
            };
            builder.insert(path, node).map_err(tree)?;
        }
        builder.finish().map_err(tree)
    }
}
