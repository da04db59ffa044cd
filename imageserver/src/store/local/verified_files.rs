//! Remembers which object files were read and found good since the server started.
//!
//! A large object is hashed before it is served, and not again while its file is the same: same
//! inode, length, and times of change. A user cannot set the time of the last status change back.
//! What is remembered is a short digest of all that; if the memory is full it is emptied, which
//! costs no more than hashing again.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Mutex;

use model::lock::locked;
use model::object::{Algorithm, ObjectId};

/// The most files that are remembered: 17 bytes each, and as much again while the table grows.
const REMEMBERED_MAX: usize = 250_000;

/// Which object files are known to be good.
#[derive(Default)]
pub struct Verified(Mutex<HashSet<[u8; 16]>>);

impl Verified {
    /// True if the file that `metadata` describes was found to be the object `id`.
    pub fn knows(&self, id: &ObjectId, metadata: &std::fs::Metadata) -> bool {
        locked(&self.0).contains(&stamp(id, metadata))
    }

    /// Remembers that the file that `metadata` describes is the object `id`.
    pub fn remember(&self, id: &ObjectId, metadata: &std::fs::Metadata) {
        let mut stamps = locked(&self.0);
        if stamps.len() >= REMEMBERED_MAX {
            stamps.clear();
        }
        stamps.insert(stamp(id, metadata));
    }

    /// Forgets the file that `metadata` describes: it is not the object `id` any more.
    pub fn forget(&self, id: &ObjectId, metadata: &std::fs::Metadata) {
        let mut stamps = locked(&self.0);
        stamps.remove(&stamp(id, metadata));
    }
}

fn stamp(id: &ObjectId, metadata: &std::fs::Metadata) -> [u8; 16] {
    let mut bytes = Vec::with_capacity(64 + 7 * 8);
    bytes.extend_from_slice(id.digest());
    for number in [metadata.dev(), metadata.ino(), metadata.size()] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    let times = [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()];
    for number in times {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    let digest = Algorithm::Blake3.digest(&bytes);
    let mut short = [0; 16];
    short.copy_from_slice(&digest.digest()[..16]);
    short
}
