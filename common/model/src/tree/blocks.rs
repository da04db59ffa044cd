//! The encoding of a directory in blocks, so that a changed directory is sent without what the
//! receiver has.
//!
//! [`Blocks`] cuts the encoding of a directory before its first entry, and then after entries that
//! their names choose. A change of an entry changes the block that holds it; an entry that comes or
//! goes changes also the first block, which has the number of entries, and at most a few blocks
//! after its own. [`Joining`] puts an encoding together from received blocks and those of another
//! directory, by their digests. Where one side cuts is not part of the protocol: the receiver
//! verifies the whole by its `tree-1` digest.

use std::sync::Arc;

use super::Directory;
use super::encode::append;
use crate::object::{Algorithm, ObjectId};

/// A block is not cut before it has so many bytes, except for the first.
const BLOCK_BYTES_MIN: usize = 16 << 10;

/// A block ends with the entry with which it has so many bytes.
const BLOCK_BYTES_MAX: usize = 128 << 10;

/// One entry in so many, a power of two, ends a block that is long enough.
const CUT_ONE_IN: u8 = 128;

/// A block of an encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub bytes: Vec<u8>,
    /// The position after it, for [`Blocks::from`]; `None` if it is the last.
    pub next: Option<u32>,
}

/// Iterates over the blocks of the encoding of a directory, which it makes one after the other.
#[derive(Debug)]
pub struct Blocks<'directory> {
    directory: &'directory Directory,
    /// 0 for what comes before the entries, then the number of the next entry, from 1.
    position: usize,
}

impl<'directory> Blocks<'directory> {
    /// Starts at `position`: 0, or the one after another block. There is no block after the end.
    #[must_use]
    pub fn from(directory: &'directory Directory, position: u32) -> Self {
        Self { directory, position: usize::try_from(position).unwrap_or(usize::MAX) }
    }
}

impl Iterator for Blocks<'_> {
    type Item = Block;

    fn next(&mut self) -> Option<Block> {
        let entries = self.directory.entries();
        let mut bytes = Vec::new();
        if self.position == 0 {
            append(self.directory, None, &mut bytes);
            self.position = 1;
        } else {
            for entry in entries.get(self.position - 1..)? {
                append(self.directory, Some(entry), &mut bytes);
                self.position += 1;
                if bytes.len() >= BLOCK_BYTES_MAX
                    || (bytes.len() >= BLOCK_BYTES_MIN && ends_block(entry.name.as_bytes()))
                {
                    break;
                }
            }
        }
        let next = (self.position <= entries.len()).then(|| {
            u32::try_from(self.position).expect("the number of entries was encoded in 32 bits")
        });
        (!bytes.is_empty()).then_some(Block { bytes, next })
    }
}

/// True if a block may end with the entry called `name`.
fn ends_block(name: &[u8]) -> bool {
    Algorithm::Blake3.digest(name).digest()[0].is_multiple_of(CUT_ONE_IN)
}

/// A received block that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// There is no such block, or a block after it was used already.
    #[error("block {index} was not offered, or is out of order")]
    Unknown { index: u32 },
    #[error("the directory has more than {limit} bytes")]
    TooLarge { limit: usize },
}

/// An encoding that is being put together. It takes at most the memory of its limit.
#[derive(Debug)]
pub struct Joining {
    own: Option<Arc<Directory>>,
    /// The digest of each block of `own`, up to the limit of their number.
    digests: Vec<ObjectId>,
    /// Where each of these blocks starts.
    positions: Vec<u32>,
    /// The first block of `own` that may be used next.
    unused: usize,
    bytes: Vec<u8>,
    bytes_max: usize,
}

impl Joining {
    /// Starts with the first `blocks_max` blocks of the directory that is at hand, if there is one.
    /// The result has at most `bytes_max` bytes.
    #[must_use]
    pub fn new(own: Option<Arc<Directory>>, blocks_max: usize, bytes_max: usize) -> Self {
        let (mut digests, mut positions) = (Vec::new(), Vec::new());
        if let Some(own) = &own {
            let mut position = Some(0);
            for block in Blocks::from(own, 0).take(blocks_max) {
                digests.push(own.digest().algorithm().digest(&block.bytes));
                positions.extend(position);
                position = block.next;
            }
        }
        Self { own, digests, positions, unused: 0, bytes: Vec::new(), bytes_max }
    }

    /// The digests of the own blocks, in order.
    #[must_use]
    pub fn digests(&self) -> &[ObjectId] {
        &self.digests
    }

    /// Appends an own block, by its place among [`Joining::digests`]. Each is used at most once,
    /// and in order, as it is in any two directories, because entries are sorted.
    pub fn add_own(&mut self, index: u32) -> Result<(), BlockError> {
        let unknown = BlockError::Unknown { index };
        let at = usize::try_from(index).map_err(|_| unknown)?;
        let position = self.positions.get(at).filter(|_| at >= self.unused).ok_or(unknown)?;
        let own = self.own.as_deref().ok_or(unknown)?;
        let block = Blocks::from(own, *position).next().ok_or(unknown)?;
        self.unused = at + 1;
        self.add(&block.bytes)
    }

    /// Appends a received block.
    pub fn add(&mut self, bytes: &[u8]) -> Result<(), BlockError> {
        if bytes.len() > self.bytes_max - self.bytes.len() {
            return Err(BlockError::TooLarge { limit: self.bytes_max });
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Returns the whole, whose digest nobody has verified yet.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests;
