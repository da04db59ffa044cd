//! All objects that an image needs, each once, with a path that needs it.
// tidy: core

use std::collections::BTreeMap;

use model::object::ObjectId;
use model::path::TreePath;
use model::tree::encode::Item;
use model::tree::{Leaf, TreeError};

use crate::listings::Listings;

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Directories, by the first path that was found for each.
    pub directories: BTreeMap<ObjectId, TreePath>,
    /// Contents of files: their length in bytes, and the first path that was found for each.
    pub files: BTreeMap<ObjectId, (u64, TreePath)>,
}

impl Inventory {
    /// What the tree of `root` needs, as far as its directories are known; those that are not are
    /// wanted of `listings` afterwards, save those of `lost`. Looks into each directory once.
    ///
    /// # Errors
    ///
    /// [`TreeError::TooDeep`].
    pub fn of(
        listings: &mut Listings,
        root: ObjectId,
        lost: impl Fn(&ObjectId) -> bool,
    ) -> Result<Self, TreeError> {
        let mut inventory = Self::default();
        let mut stack = vec![(TreePath::root(), root)];
        while let Some((path, id)) = stack.pop() {
            if inventory.directories.insert(id, path.clone()).is_some() || lost(&id) {
                continue;
            }
            let Some(listing) = listings.get(id) else { continue };
            if path.components().count() >= model::path::DEPTH_MAX {
                return Err(TreeError::TooDeep);
            }
            for (name, item) in listing.entries.iter().rev() {
                let below = || path.join(name.as_bytes()).expect("a name of a directory is one");
                match item {
                    Item::Directory(id) => stack.push((below(), *id)),
                    Item::Leaf(Leaf::File(file)) => {
                        let held = || (file.size_bytes, below());
                        inventory.files.entry(file.object).or_insert_with(held);
                    }
                    Item::Leaf(_) => {}
                }
            }
        }
        Ok(inventory)
    }

    /// The length of all contents together, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.values().fold(0, |sum, (size_bytes, _)| sum.saturating_add(*size_bytes))
    }
}

#[cfg(test)]
mod tests {
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
        let mut listings = Listings::default();
        listings.insert_tree(&tree);
        let all = Inventory::of(&mut listings, tree.digest(), |_| false).unwrap();
        // The two directories are equal.
        assert_eq!(all.directories.len(), 2);
        assert_eq!(all.files.values().collect::<Vec<_>>(), [&(1, "/a/x".parse().unwrap())]);
        assert_eq!(all.bytes(), 1);
        let none = Inventory::of(&mut listings, tree.digest(), |id| *id == tree.digest()).unwrap();
        assert_eq!((none.directories.len(), none.files.len()), (1, 0));
        assert_eq!(listings.wanted(), []);
    }
}
