//! Builds a tree from a list of paths.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::node::{Leaf, Metadata, Node};
use super::{Child, Directory, Entry, Name, Tree, TreeError};
use crate::object::Algorithm;
use crate::path::{DEPTH_MAX, TreePath};

/// Collects paths in any order and makes a [`Tree`] of them.
///
/// Hard links may name any path of their group, before or after it; the builder lets the first
/// path in component order carry the file.
pub struct TreeBuilder {
    algorithm: Algorithm,
    nodes: BTreeMap<TreePath, Node>,
}

impl TreeBuilder {
    /// Starts an empty tree.
    #[must_use]
    pub fn new(algorithm: Algorithm) -> Self {
        Self { algorithm, nodes: BTreeMap::new() }
    }

    /// Adds `node` at `path`.
    ///
    /// # Errors
    ///
    /// [`TreeError::Duplicate`] if the path is there already.
    pub fn insert(&mut self, path: TreePath, node: Node) -> Result<(), TreeError> {
        if self.nodes.contains_key(&path) {
            return Err(TreeError::Duplicate { path });
        }
        self.nodes.insert(path, node);
        Ok(())
    }

    /// Adds `node` at `path`, in the place of what was there, which is returned.
    pub fn replace(&mut self, path: TreePath, node: Node) -> Option<Node> {
        self.nodes.insert(path, node)
    }

    /// Takes away what is at `path`, but nothing below it.
    pub fn remove(&mut self, path: &TreePath) -> Option<Node> {
        self.nodes.remove(path)
    }

    /// What is at `path`.
    #[must_use]
    pub fn get(&self, path: &TreePath) -> Option<&Node> {
        self.nodes.get(path)
    }

    /// All paths so far, in component order.
    pub fn iter(&self) -> impl Iterator<Item = (&TreePath, &Node)> {
        self.nodes.iter()
    }

    /// All paths with their nodes, in component order.
    pub fn into_nodes(self) -> impl Iterator<Item = (TreePath, Node)> {
        self.nodes.into_iter()
    }

    /// Makes the tree. A root that was not given has mode 755 and is owned by root.
    ///
    /// # Errors
    ///
    /// [`TreeError::NoParent`] if a path is in no directory, [`TreeError::BadLink`] if a hard link
    /// leads to no regular file, and what [`Directory::new`] refuses.
    pub fn finish(mut self) -> Result<Tree, TreeError> {
        self.carry_links_by_first_path()?;
        let root = self.nodes.remove(&TreePath::root());
        let metadata = match root {
            None => Metadata::new(0o755, 0, 0),
            Some(Node::Directory(metadata)) => metadata,
            Some(Node::Leaf(_)) => return Err(TreeError::NoParent { path: TreePath::root() }),
        };
        // In component order a directory comes right before all it holds, so one stack of open
        // directories is enough.
        let mut open = vec![Open { path: TreePath::root(), metadata, entries: Vec::new() }];
        for (path, node) in self.nodes {
            while open.last().is_some_and(|last| !path.starts_with(&last.path)) {
                close(&mut open, self.algorithm)?;
            }
            let parent = path.parent();
            let last = open.last_mut().ok_or_else(|| TreeError::NoParent { path: path.clone() })?;
            if parent.as_ref() != Some(&last.path) {
                return Err(TreeError::NoParent { path });
            }
            match node {
                Node::Directory(metadata) => {
                    if open.len() == DEPTH_MAX {
                        return Err(TreeError::TooDeep);
                    }
                    open.push(Open { path, metadata, entries: Vec::new() });
                }
                Node::Leaf(leaf) => {
                    let name = Name::new(path.name())?;
                    last.entries.push(Entry { name, child: Child::Leaf(leaf) });
                }
            }
        }
        while open.len() > 1 {
            close(&mut open, self.algorithm)?;
        }
        let root = open.pop().expect("the root is closed last");
        let root = Directory::new(self.algorithm, root.metadata, root.entries)?;
        Ok(Tree::new(Arc::new(root)))
    }

    fn carry_links_by_first_path(&mut self) -> Result<(), TreeError> {
        let mut groups: BTreeMap<TreePath, Vec<TreePath>> = BTreeMap::new();
        // Where the links that were followed so far end, so that a long chain is walked once.
        let mut ends: BTreeMap<&TreePath, &TreePath> = BTreeMap::new();
        for (path, node) in &self.nodes {
            let Node::Leaf(Leaf::HardLink(first)) = node else { continue };
            let bad = || TreeError::BadLink { path: path.clone(), target: first.clone() };
            let mut seen = BTreeSet::from([path]);
            let mut target = first;
            let file = loop {
                if let Some(end) = ends.get(target) {
                    break *end;
                }
                match self.nodes.get(target) {
                    Some(Node::Leaf(Leaf::File(_))) => break target,
                    Some(Node::Leaf(Leaf::HardLink(next))) if seen.insert(target) => target = next,
                    _ => return Err(bad()),
                }
            };
            ends.extend(seen.into_iter().map(|link| (link, file)));
            groups.entry(file.clone()).or_default().push(path.clone());
        }
        for (file, links) in groups {
            let first = links.first().filter(|first| **first < file).unwrap_or(&file).clone();
            if first != file {
                let node = self.nodes.remove(&file).expect("the group was found by this file");
                self.nodes.insert(first.clone(), node);
            }
            for link in links.into_iter().chain([file]).filter(|link| *link != first) {
                self.nodes.insert(link, Node::Leaf(Leaf::HardLink(first.clone())));
            }
        }
        Ok(())
    }
}

struct Open {
    path: TreePath,
    metadata: Metadata,
    entries: Vec<Entry>,
}

fn close(open: &mut Vec<Open>, algorithm: Algorithm) -> Result<(), TreeError> {
    let done = open.pop().expect("only called with a directory open");
    let directory = Directory::new(algorithm, done.metadata, done.entries)?;
    let parent = open.last_mut().ok_or_else(|| TreeError::NoParent { path: done.path.clone() })?;
    parent.entries.push(Entry {
        name: Name::new(done.path.name())?,
        child: Child::Directory(Arc::new(directory)),
    });
    Ok(())
}
