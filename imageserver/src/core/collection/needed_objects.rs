//! Which objects images need, as far as they were walked.
//!
//! An object is known by the first eight bytes of its digest: one that begins like another that is
//! needed is kept as well, and stays garbage. A directory that was walked is known by all of what
//! matters of its digest, because one that was taken for another would not be walked, and what it
//! needs would be lost.
// tidy: core

use std::collections::BTreeSet;

use model::object::ObjectId;

use super::leases::short;

/// As many bytes of a digest as no one can find two contents for.
const STRONG_BYTES: usize = 32;

/// See the module's text. Takes some 14 bytes for each object that is needed.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    needed: BTreeSet<u64>,
    walked: BTreeSet<[u8; STRONG_BYTES]>,
}

impl Marks {
    /// Takes note that an image needs `id`.
    pub fn need(&mut self, id: &ObjectId) {
        self.needed.insert(short(id));
    }

    /// Takes note that an image needs the directory `id`. True if it is to be walked: it was not
    /// before.
    pub fn enter(&mut self, id: &ObjectId) -> bool {
        self.need(id);
        let strong = id.digest().first_chunk().expect("a digest has at least 32 bytes");
        self.walked.insert(*strong)
    }

    /// True if an image needs `id`, or an object that begins like it.
    #[must_use]
    pub fn needs(&self, id: &ObjectId) -> bool {
        self.needed.contains(&short(id))
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn a_directory_is_entered_once() {
        let mut marks = Marks::default();
        let [file, directory, other] = [1, 2, 3].map(|byte| Algorithm::Blake3.digest(&[byte]));
        marks.need(&file);
        assert!(marks.enter(&directory));
        assert!(!marks.enter(&directory));
        assert!(marks.needs(&file) && marks.needs(&directory) && !marks.needs(&other));
    }

    #[test]
    fn objects_that_begin_alike_are_kept_and_directories_that_do_are_told_apart() {
        let mut marks = Marks::default();
        let (mut one, mut two) = ([7; 32], [7; 32]);
        (one[31], two[31]) = (1, 2);
        let (one, two) = (ObjectId::Blake3(one), ObjectId::Blake3(two));
        assert!(marks.enter(&one));
        assert!(marks.needs(&two));
        assert!(marks.enter(&two));
    }
}
