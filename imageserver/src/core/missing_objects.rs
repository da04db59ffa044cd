//! Finds the objects that an image needs and the store lacks.
// tidy: core

use std::collections::BTreeSet;

use model::object::ObjectId;
use model::tree::encode::references;

/// Looks up objects in a store.
pub trait ObjectLookup {
    /// The error of a lookup.
    type Error;

    /// Returns the encoding of a directory, which hashes to `id`; `None` if it is not stored.
    fn directory(&mut self, id: &ObjectId) -> Result<Option<Vec<u8>>, Self::Error>;

    /// Returns true if the content of a file of `size_bytes` is there.
    fn has(&mut self, id: &ObjectId, size_bytes: u64) -> Result<bool, Self::Error>;
}

/// Finds the missing objects of one image after the other. Memory grows with the number of
/// different directories: images share most of them.
#[derive(Debug, Default)]
pub struct MissingObjects {
    /// Directories that are complete, with all below them.
    whole: BTreeSet<ObjectId>,
}

impl MissingObjects {
    /// Returns the objects that the tree `root` needs and `store` lacks.
    pub fn of_tree<H: ObjectLookup>(
        &mut self,
        root: ObjectId,
        store: &mut H,
    ) -> Result<BTreeSet<ObjectId>, H::Error> {
        let mut missing = BTreeSet::new();
        let mut seen = BTreeSet::new();
        let mut ahead = vec![root];
        while let Some(id) = ahead.pop() {
            if self.whole.contains(&id) || !seen.insert(id) {
                continue;
            }
            let encoding = store.directory(&id)?;
            let named = encoding.and_then(|bytes| references(root.algorithm(), &bytes).ok());
            let Some(named) = named else {
                missing.insert(id);
                continue;
            };
            for (file, size_bytes) in named.files {
                if !missing.contains(&file) && !store.has(&file, size_bytes)? {
                    missing.insert(file);
                }
            }
            ahead.extend(named.directories);
        }
        if missing.is_empty() {
            self.whole.append(&mut seen);
        }
        Ok(missing)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use model::object::Algorithm;
    use model::tree::text::from_text;
    use model::tree::{Child, Directory, Tree};

    use super::*;

    /// A store of some directories and files, which counts what it is asked.
    #[derive(Default)]
    struct Model {
        directories: BTreeMap<ObjectId, Vec<u8>>,
        files: BTreeSet<ObjectId>,
        asked: usize,
    }

    impl Model {
        fn take(&mut self, directory: &Directory) {
            self.directories.insert(directory.digest(), directory.encode());
            for (file, _) in references(Algorithm::Blake3, &directory.encode()).unwrap().files {
                self.files.insert(file);
            }
            for entry in directory.entries() {
                if let Child::Directory(below) = &entry.child {
                    self.take(below);
                }
            }
        }
    }

    impl ObjectLookup for Model {
        type Error = Infallible;

        fn directory(&mut self, id: &ObjectId) -> Result<Option<Vec<u8>>, Infallible> {
            self.asked += 1;
            Ok(self.directories.get(id).cloned())
        }

        fn has(&mut self, id: &ObjectId, _: u64) -> Result<bool, Infallible> {
            self.asked += 1;
            Ok(self.files.contains(id))
        }
    }

    fn tree(file: &str) -> Tree {
        let [shared, own] = ["shared", file].map(|text| Algorithm::Blake3.digest(text.as_bytes()));
        let text = format!(
            "d 755 0:0 /\nd 755 0:0 /a\n\
             f 644 0:0 1.000000000 6 {shared} /a/shared\nf 644 0:0 1.000000000 1 {own} /own\n"
        );
        from_text(Algorithm::Blake3, &text).unwrap()
    }

    #[test]
    fn what_is_not_there_is_named_and_what_is_shared_is_looked_at_once() {
        let (one, two) = (tree("1"), tree("2"));
        let mut model = Model::default();
        model.take(one.root());
        model.take(two.root());
        let mut missing = MissingObjects::default();
        assert_eq!(missing.of_tree(one.digest(), &mut model), Ok(BTreeSet::new()));
        assert_eq!(model.asked, 4);
        assert_eq!(missing.of_tree(two.digest(), &mut model), Ok(BTreeSet::new()));
        assert_eq!(model.asked, 6, "only its root and its own file");

        let own = Algorithm::Blake3.digest(b"1");
        model.files.remove(&own);
        let mut missing = MissingObjects::default();
        assert_eq!(missing.of_tree(one.digest(), &mut model), Ok([own].into()));
        assert_eq!(missing.of_tree(two.digest(), &mut model), Ok(BTreeSet::new()));
        model.directories.remove(&one.digest());
        assert_eq!(missing.of_tree(one.digest(), &mut model), Ok([one.digest()].into()));
    }
}
