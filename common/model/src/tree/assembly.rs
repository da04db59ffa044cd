//! Puts a tree together from directories that arrive by digest, in any order.
//!
//! Fetching a tree is a conversation: ask for the root, learn which directories it names, ask for
//! those that nobody has given yet. This is that conversation without the network, so that the
//! dominator, `imagetool get` and the simulation share it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::encode::{decode, references};
use super::{Directory, Tree, TreeError};
use crate::object::ObjectId;

/// A tree that is being put together.
pub struct Assembly {
    root: ObjectId,
    known: BTreeMap<ObjectId, Arc<Directory>>,
    waiting: BTreeMap<ObjectId, Vec<u8>>,
    wanted: BTreeSet<ObjectId>,
}

impl Assembly {
    /// Starts with the digest of the root; `shared` gives directories that are at hand already.
    pub fn new(root: ObjectId, shared: impl Fn(&ObjectId) -> Option<Arc<Directory>>) -> Self {
        let mut assembly = Self {
            root,
            known: BTreeMap::new(),
            waiting: BTreeMap::new(),
            wanted: BTreeSet::new(),
        };
        assembly.want(root, &shared);
        assembly
    }

    /// The digests to ask for next, sorted; empty when the tree is complete.
    #[must_use]
    pub fn wanted(&self) -> Vec<ObjectId> {
        self.wanted.iter().copied().collect()
    }

    /// Takes the encoding of a directory that was wanted. Others are refused, so that a peer
    /// cannot fill the memory with what nobody asked for.
    ///
    /// # Errors
    ///
    /// [`TreeError::Digest`] if it hashes to nothing that was wanted, and what
    /// [`references`] refuses.
    pub fn insert(
        &mut self,
        bytes: Vec<u8>,
        shared: impl Fn(&ObjectId) -> Option<Arc<Directory>>,
    ) -> Result<(), TreeError> {
        let digest = self.root.algorithm().digest(&bytes);
        if !self.wanted.contains(&digest) {
            let want = self.wanted.first().copied().unwrap_or(self.root);
            return Err(TreeError::Digest { want, got: digest });
        }
        let named = references(self.root.algorithm(), &bytes)?;
        self.wanted.remove(&digest);
        self.waiting.insert(digest, bytes);
        for child in named.directories {
            self.want(child, &shared);
        }
        Ok(())
    }

    fn want(&mut self, digest: ObjectId, shared: &impl Fn(&ObjectId) -> Option<Arc<Directory>>) {
        if self.known.contains_key(&digest) || self.waiting.contains_key(&digest) {
            return;
        }
        match shared(&digest) {
            Some(directory) => {
                self.known.insert(digest, directory);
            }
            None => {
                self.wanted.insert(digest);
            }
        }
    }

    /// Makes the tree, and checks its hard links.
    ///
    /// # Errors
    ///
    /// [`TreeError::MissingDirectory`] while something is wanted; otherwise what [`decode`] and
    /// [`Tree::verify`] refuse.
    pub fn finish(mut self) -> Result<Tree, TreeError> {
        if let Some(&digest) = self.wanted.first() {
            return Err(TreeError::MissingDirectory { digest });
        }
        let algorithm = self.root.algorithm();
        // Depth first, without recursion: a directory is decoded when all it names is known.
        let mut stack = vec![self.root];
        while let Some(&digest) = stack.last() {
            let Some(bytes) = self.waiting.get(&digest) else {
                stack.pop();
                continue;
            };
            let missing: Vec<ObjectId> = references(algorithm, bytes)?
                .directories
                .into_iter()
                .filter(|child| !self.known.contains_key(child))
                .collect();
            if missing.is_empty() {
                let directory = decode(algorithm, bytes, |child| self.known.get(child).cloned())?;
                self.waiting.remove(&digest);
                self.known.insert(digest, Arc::new(directory));
                stack.pop();
            } else {
                stack.extend(missing);
            }
        }
        let root = self.known.remove(&self.root);
        let tree = Tree::new(root.ok_or(TreeError::MissingDirectory { digest: self.root })?);
        tree.verify()?;
        Ok(tree)
    }
}
