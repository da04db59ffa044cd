//! Directories of images, each by its digest, known only as far as somebody looked into them.
//!
//! Whoever looks asks for directories as if all were there, and does without those that are not.
//! These are noted as wanted; when they have been fetched the look is taken again. A look is so a
//! function of what is known, and what nobody looks at never travels.
// tidy: core

pub mod fetch;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::object::ObjectId;
use model::path::TreePath;
use model::tree::encode::{Item, Listing, list};
use model::tree::{Child, Leaf, Tree, TreeError};

/// What is at a path, as far as is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    /// A directory on the way is not known yet, and is wanted now.
    Unknown,
    /// Nothing.
    Nothing,
    /// The directory with that digest.
    Directory(ObjectId),
    /// Anything else.
    Leaf(Leaf),
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Listings {
    known: BTreeMap<ObjectId, Arc<Listing>>,
    wanted: BTreeSet<ObjectId>,
}

impl Listings {
    /// The directory with that digest. If it is not known it is wanted from now on.
    pub fn get(&mut self, id: ObjectId) -> Option<Arc<Listing>> {
        let known = self.known.get(&id).cloned();
        if known.is_none() {
            self.wanted.insert(id);
        }
        known
    }

    /// The digests of directories that are wanted, sorted.
    #[must_use]
    pub fn wanted(&self) -> Vec<ObjectId> {
        self.wanted.iter().copied().collect()
    }

    /// Wants the directory `id` no longer, because nobody can give it.
    pub fn give_up(&mut self, id: ObjectId) {
        self.wanted.remove(&id);
    }

    /// Takes the encoding of the directory `id`.
    ///
    /// # Errors
    ///
    /// [`TreeError`] if the bytes are not that directory.
    pub fn insert(&mut self, id: ObjectId, encoding: &[u8]) -> Result<(), TreeError> {
        let got = id.algorithm().digest(encoding);
        if got != id {
            return Err(TreeError::Digest { want: id, got });
        }
        let listing = list(id.algorithm(), encoding)?;
        self.wanted.remove(&id);
        self.known.insert(id, Arc::new(listing));
        Ok(())
    }

    /// Takes all directories of a tree that is at hand.
    pub fn insert_tree(&mut self, tree: &Tree) {
        let mut stack = vec![tree.root()];
        while let Some(directory) = stack.pop() {
            let id = directory.digest();
            if self.known.insert(id, Arc::new(Listing::of(directory))).is_some() {
                continue;
            }
            self.wanted.remove(&id);
            stack.extend(directory.entries().iter().filter_map(|entry| match &entry.child {
                Child::Directory(below) => Some(below),
                Child::Leaf(_) => None,
            }));
        }
    }

    /// What is at `path` in the tree of `root`. Hard links are not followed.
    pub fn find(&mut self, root: ObjectId, path: &TreePath) -> Sight {
        let mut at = root;
        let mut components = path.components().peekable();
        while let Some(name) = components.next() {
            let Some(listing) = self.get(at) else { return Sight::Unknown };
            match listing.get(name) {
                None => return Sight::Nothing,
                Some(Item::Directory(below)) => at = *below,
                Some(Item::Leaf(leaf)) if components.peek().is_none() => {
                    return Sight::Leaf(leaf.clone());
                }
                Some(Item::Leaf(_)) => return Sight::Nothing,
            }
        }
        Sight::Directory(at)
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;
    use model::tree::text::from_text;

    use super::*;

    #[test]
    fn only_what_is_looked_at_is_wanted() {
        let text = "d 755 0:0 /a\nl 0:0 /a/link -> x\nd 755 0:0 /a/b\nd 700 0:0 /c\n";
        let tree = from_text(Algorithm::Blake3, text).unwrap();
        let root = tree.digest();
        let mut listings = Listings::default();
        let path: TreePath = "/a/link".parse().unwrap();
        let mut asked = Vec::new();
        let sight = loop {
            let sight = listings.find(root, &path);
            let wanted = listings.wanted();
            if wanted.is_empty() {
                break sight;
            }
            for id in wanted {
                let all = tree.nodes().filter_map(|(path, _)| match tree.get(&path) {
                    Some(Child::Directory(directory)) if directory.digest() == id => {
                        Some((path, directory))
                    }
                    _ => None,
                });
                let (path, directory) = all.take(1).next().unwrap();
                listings.insert(id, &directory.encode()).unwrap();
                asked.push(path.to_string());
            }
        };
        assert!(matches!(sight, Sight::Leaf(Leaf::Symlink(_))), "{sight:?}");
        assert_eq!(asked, ["/", "/a"]);
        let mut find = |path: &str| listings.find(root, &path.parse().unwrap());
        assert_eq!(find("/none"), Sight::Nothing);
        assert_eq!(find("/a/link/x"), Sight::Nothing);
        assert_eq!(find("/"), Sight::Directory(root));
        assert!(matches!(find("/c"), Sight::Directory(_)));
        assert_eq!(find("/c/x"), Sight::Unknown);
    }

    #[test]
    fn bytes_of_another_directory_are_refused() {
        let tree = from_text(Algorithm::Blake3, "d 755 0:0 /a\n").unwrap();
        let other = Algorithm::Blake3.digest(b"other");
        let got = Listings::default().insert(other, &tree.root().encode());
        assert_eq!(got, Err(TreeError::Digest { want: other, got: tree.digest() }));
    }
}
