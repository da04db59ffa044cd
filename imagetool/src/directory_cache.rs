//! A cache of directories of images, by digest, that is filled on demand.
//!
//! A query reads the cache as if it had all directories. Directories that are missing are noted as
//! wanted, and the query gives an incomplete result. The caller fetches them and repeats the query
//! until nothing is wanted. A query is therefore a pure function of the cache, and directories that
//! no query reads are never fetched.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use model::object::ObjectId;
use model::path::TreePath;
use model::tree::encode::{Item, Listing, list};
use model::tree::{Child, Leaf, Tree, TreeError};

/// The result of a lookup by path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// A directory on the way is not in the cache; it is wanted now.
    NotFetched,
    Absent,
    Directory(ObjectId),
    Leaf(Leaf),
}

#[derive(Debug, Default)]
pub struct DirectoryCache {
    known: BTreeMap<ObjectId, Arc<Listing>>,
    wanted: BTreeSet<ObjectId>,
}

impl DirectoryCache {
    /// Returns the directory with that digest. If it is not in the cache, it is wanted from now on.
    pub fn get(&mut self, id: ObjectId) -> Option<Arc<Listing>> {
        let known = self.known.get(&id).cloned();
        if known.is_none() {
            self.wanted.insert(id);
        }
        known
    }

    /// Returns the digests of the wanted directories, sorted.
    pub fn wanted(&self) -> Vec<ObjectId> {
        self.wanted.iter().copied().collect()
    }

    /// Removes `id` from the wanted directories, because the server cannot provide it.
    pub fn mark_unavailable(&mut self, id: ObjectId) {
        self.wanted.remove(&id);
    }

    /// Adds the directory `id` from its encoding.
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

    /// Adds all directories of `tree`.
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

    /// Finds the entry at `path` in the tree of `root`. Hard links are not followed.
    pub fn find(&mut self, root: ObjectId, path: &TreePath) -> Lookup {
        let mut at = root;
        let mut components = path.components().peekable();
        while let Some(name) = components.next() {
            let Some(listing) = self.get(at) else { return Lookup::NotFetched };
            match listing.get(name) {
                None => return Lookup::Absent,
                Some(Item::Directory(below)) => at = *below,
                Some(Item::Leaf(leaf)) if components.peek().is_none() => {
                    return Lookup::Leaf(leaf.clone());
                }
                Some(Item::Leaf(_)) => return Lookup::Absent,
            }
        }
        Lookup::Directory(at)
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
        let mut cache = DirectoryCache::default();
        let path: TreePath = "/a/link".parse().unwrap();
        let mut asked = Vec::new();
        let lookup = loop {
            let lookup = cache.find(root, &path);
            let wanted = cache.wanted();
            if wanted.is_empty() {
                break lookup;
            }
            for id in wanted {
                let all = tree.nodes().filter_map(|(path, _)| match tree.get(&path) {
                    Some(Child::Directory(directory)) if directory.digest() == id => {
                        Some((path, directory))
                    }
                    _ => None,
                });
                let (path, directory) = all.take(1).next().unwrap();
                cache.insert(id, &directory.encode()).unwrap();
                asked.push(path.to_string());
            }
        };
        assert!(matches!(lookup, Lookup::Leaf(Leaf::Symlink(_))), "{lookup:?}");
        assert_eq!(asked, ["/", "/a"]);
        let mut find = |path: &str| cache.find(root, &path.parse().unwrap());
        assert_eq!(find("/none"), Lookup::Absent);
        assert_eq!(find("/a/link/x"), Lookup::Absent);
        assert_eq!(find("/"), Lookup::Directory(root));
        assert!(matches!(find("/c"), Lookup::Directory(_)));
        assert_eq!(find("/c/x"), Lookup::NotFetched);
    }

    #[test]
    fn bytes_of_another_directory_are_refused() {
        let tree = from_text(Algorithm::Blake3, "d 755 0:0 /a\n").unwrap();
        let other = Algorithm::Blake3.digest(b"other");
        let got = DirectoryCache::default().insert(other, &tree.root().encode());
        assert_eq!(got, Err(TreeError::Digest { want: other, got: tree.digest() }));
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NeededObjects {
    /// Directories, by the first path that was found for each.
    pub directories: BTreeMap<ObjectId, TreePath>,
    /// Contents of files: their length in bytes, and the first path that was found for each.
    pub files: BTreeMap<ObjectId, (u64, TreePath)>,
}

impl NeededObjects {
    /// Collects what the tree of `root` needs. Directories that are not in the cache are wanted
    /// afterwards, except those of `lost`. Each directory is read once.
    pub fn of(
        cache: &mut DirectoryCache,
        root: ObjectId,
        lost: impl Fn(&ObjectId) -> bool,
    ) -> Result<Self, TreeError> {
        let mut needed = Self::default();
        let mut stack = vec![(TreePath::root(), root)];
        while let Some((path, id)) = stack.pop() {
            if needed.directories.insert(id, path.clone()).is_some() || lost(&id) {
                continue;
            }
            let Some(listing) = cache.get(id) else { continue };
            if path.components().count() >= model::path::DEPTH_MAX {
                return Err(TreeError::TooDeep);
            }
            for (name, item) in listing.entries.iter().rev() {
                let below = || path.join(name.as_bytes()).expect("a name of a directory is one");
                match item {
                    Item::Directory(id) => stack.push((below(), *id)),
                    Item::Leaf(Leaf::File(file)) => {
                        let held = || (file.size_bytes, below());
                        needed.files.entry(file.object.id()).or_insert_with(held);
                    }
                    Item::Leaf(_) => {}
                }
            }
        }
        Ok(needed)
    }

    /// Returns the length of all contents together, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.values().fold(0, |sum, (size_bytes, _)| sum.saturating_add(*size_bytes))
    }
}

#[cfg(test)]
mod needed_objects_tests {
    use model::object::Algorithm;
    use model::tree::text::from_text;

    use super::*;

    #[test]
    fn each_object_is_counted_once_and_what_is_lost_is_not_looked_into() {
        let digest = Algorithm::Blake3.digest(b"x");
        let text = format!(
            "d 755 0:0 /a\nf 644 0:0 1.000000000 1 {digest} /a/x\nd 755 0:0 /b\n\
             f 644 0:0 1.000000000 1 {digest} /b/x\nl 0:0 /c -> x\n"
        );
        let tree = from_text(Algorithm::Blake3, &text).unwrap();
        let mut cache = DirectoryCache::default();
        cache.insert_tree(&tree);
        let all = NeededObjects::of(&mut cache, tree.digest(), |_| false).unwrap();
        // The two directories are equal.
        assert_eq!(all.directories.len(), 2);
        assert_eq!(all.files.values().collect::<Vec<_>>(), [&(1, "/a/x".parse().unwrap())]);
        assert_eq!(all.bytes(), 1);
        let none = NeededObjects::of(&mut cache, tree.digest(), |id| *id == tree.digest()).unwrap();
        assert_eq!((none.directories.len(), none.files.len()), (1, 0));
        assert_eq!(cache.wanted(), []);
    }
}
