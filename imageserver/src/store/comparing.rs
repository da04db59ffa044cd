//! An object that comes although it is here already: it is hashed, and compared byte by byte.
//!
//! Two contents of one digest have never been found for the algorithms that are used. If they are,
//! or if the memory of a machine fails, nobody must get the one for the other.

use std::io::Read as _;

use model::object::{Hasher, ObjectId};

use super::content::{Content, ContentReader};
use crate::store::error::{StoreError, failed};

/// Compares what comes with what is here.
pub struct Comparing {
    id: ObjectId,
    hasher: Hasher,
    content: ContentReader,
    buffer: Vec<u8>,
    differs: bool,
}

impl Comparing {
    /// Compares with `content`, which is here and was verified; `size_bytes` come.
    #[must_use]
    pub fn new(id: ObjectId, size_bytes: u64, content: Content) -> Self {
        let (hasher, differs) = (Hasher::new(id.algorithm()), content.size_bytes() != size_bytes);
        Self { id, hasher, content: content.into_reader(), buffer: Vec::new(), differs }
    }

    /// Takes what comes next.
    ///
    /// # Errors
    ///
    /// What the file-system says.
    pub fn write(&mut self, part: &[u8]) -> Result<(), StoreError> {
        self.hasher.update(part);
        if self.differs {
            return Ok(());
        }
        self.buffer.clear();
        (&mut self.content)
            .take(part.len() as u64)
            .read_to_end(&mut self.buffer)
            .map_err(failed(format!("read object {}", self.id)))?;
        self.differs = self.buffer != part;
        Ok(())
    }

    /// Ends the comparison.
    ///
    /// # Errors
    ///
    /// [`StoreError::Content`] if what came is not what was announced, [`StoreError::Collision`] if
    /// it is, and is something else than what is here.
    pub fn finish(self) -> Result<(), StoreError> {
        let got = self.hasher.finish();
        if got != self.id {
            return Err(StoreError::Content { want: self.id, got });
        }
        if self.differs {
            return Err(StoreError::Collision { id: self.id });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn what_comes_is_the_same_or_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let id = Algorithm::Blake3.digest(b"abcdef");
        // What the store says to have, and what comes as `id`.
        let table: [(&[u8], &[u8], &str); 5] = [
            (b"abcdef", b"abcdef", "same"),
            (b"abcdef", b"abcdeX", "other content"),
            (b"abcdef", b"abc", "other content"),
            (b"abXdef", b"abcdef", "collision"),
            (b"abcde", b"abcdef", "collision"),
        ];
        for (here, comes, expected) in table {
            let path = directory.path().join("object");
            std::fs::write(&path, here).unwrap();
            let file = fs_err::File::open(&path).unwrap();
            let whole = Content::Whole(Bytes::copy_from_slice(here));
            for content in [whole, Content::File(file, here.len() as u64)] {
                let mut comparing = Comparing::new(id, comes.len() as u64, content);
                comes.chunks(2).for_each(|part| comparing.write(part).unwrap());
                let got = match comparing.finish() {
                    Ok(()) => "same",
                    Err(StoreError::Content { .. }) => "other content",
                    Err(StoreError::Collision { .. }) => "collision",
                    Err(error) => panic!("{error}"),
                };
                assert_eq!(got, expected, "{here:?} {comes:?}");
            }
        }
    }
}
