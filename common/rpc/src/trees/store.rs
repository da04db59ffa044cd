//! All directories of all images and machines, each once.
//!
//! The store keeps no directory alive: images and machines do. It only lets them find what
//! others hold already.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use model::object::ObjectId;
use model::tree::{Child, Directory, Tree};

/// The fewest directories for which looking for dead ones is worth the time.
const PURGE_MIN: usize = 4_096;

/// See the module's text.
#[derive(Debug, Default)]
pub struct DirectoryStore {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    directories: BTreeMap<ObjectId, Weak<Directory>>,
    purge_at: usize,
}

impl DirectoryStore {
    /// The directory with that digest, if anyone holds it.
    #[must_use]
    pub fn get(&self, digest: &ObjectId) -> Option<Arc<Directory>> {
        let inner = self.inner.lock().expect("no holder panics");
        inner.directories.get(digest)?.upgrade()
    }

    /// Makes all directories of `tree` known. Does not look into those that are.
    pub fn share(&self, tree: &Tree) {
        let mut inner = self.inner.lock().expect("no holder panics");
        let mut stack = vec![tree.root()];
        while let Some(directory) = stack.pop() {
            let known = inner.directories.get(&directory.digest());
            if known.is_some_and(|known| known.strong_count() > 0) {
                continue;
            }
            inner.directories.insert(directory.digest(), Arc::downgrade(directory));
            stack.extend(directory.entries().iter().filter_map(|entry| match &entry.child {
                Child::Directory(below) => Some(below),
                Child::Leaf(_) => None,
            }));
        }
        if inner.directories.len() > inner.purge_at.max(PURGE_MIN) {
            inner.directories.retain(|_, directory| directory.strong_count() > 0);
            inner.purge_at = inner.directories.len() * 2;
        }
    }

    /// How many directories are alive.
    #[must_use]
    pub fn alive(&self) -> u64 {
        let inner = self.inner.lock().expect("no holder panics");
        let alive = inner.directories.values().filter(|known| known.strong_count() > 0);
        alive.count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::object::Algorithm;
    use model::tree::text::from_text;

    #[test]
    fn holds_nothing_that_nobody_else_holds() {
        let store = DirectoryStore::default();
        let tree = |text| from_text(Algorithm::Blake3, text).unwrap();
        let one = tree("d 755 0:0 /a\nd 755 0:0 /a/b\nd 755 0:0 /c\n");
        store.share(&one);
        // The root, /a and the two empty directories, which are one.
        assert_eq!(store.alive(), 3);
        let two = tree("d 755 0:0 /a\nd 755 0:0 /a/b\n");
        store.share(&two);
        assert_eq!(store.alive(), 4);
        assert_eq!(store.get(&one.digest()).unwrap().digest(), one.digest());
        let digest = one.digest();
        drop(one);
        assert!(store.get(&digest).is_none());
        drop(two);
        assert_eq!(store.alive(), 0);
    }
}
