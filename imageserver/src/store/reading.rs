//! Hashes files as the medium has them: around the page cache, which hides what became of the
//! medium, and which others have better uses for.

use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use common::object::{Hasher, ObjectId};
use nix::errno::Errno;
use nix::fcntl::OFlag;

/// How much is read at once, in bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// What the addresses of buffers, and what is read at once, are multiples of: enough for any
/// device.
const ALIGNMENT: usize = 4_096;

/// Reads files with one buffer.
pub struct MediumReader {
    buffer: Vec<u8>,
    start: usize,
}

/// What a file turned out to be.
#[derive(Debug)]
pub struct Found {
    /// What its content is.
    pub id: ObjectId,
    /// The file, as it was when it was opened.
    pub metadata: std::fs::Metadata,
}

impl Default for MediumReader {
    fn default() -> Self {
        let buffer = vec![0; CHUNK_BYTES + ALIGNMENT];
        let start = buffer.as_ptr().addr().next_multiple_of(ALIGNMENT) - buffer.as_ptr().addr();
        Self { buffer, start }
    }
}

impl MediumReader {
    /// Hashes the file at `path` as content of `id`. `pace` is told the length in bytes of each
    /// piece that was read, and may take its time; when it says `false`, there is no result.
    ///
    /// # Errors
    ///
    /// What the kernel said.
    pub fn hash(
        &mut self,
        path: &Path,
        id: &ObjectId,
        pace: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<Option<Found>> {
        let tried = self.hash_with(path, OFlag::O_DIRECT, id, pace);
        match tried {
            // Not every file-system can read around the cache.
            Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {
                self.hash_with(path, OFlag::empty(), id, pace)
            }
            done => done,
        }
    }

    fn hash_with(
        &mut self,
        path: &Path,
        flags: OFlag,
        id: &ObjectId,
        pace: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<Option<Found>> {
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file = std::fs::OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)?;
        let metadata = file.metadata()?;
        let buffer = &mut self.buffer[self.start..self.start + CHUNK_BYTES];
        let mut hasher = Hasher::new(id.algorithm());
        loop {
            let length = match io::Read::read(&mut &file, buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            hasher.update(&buffer[..length]);
            if !pace(length as u64) {
                return Ok(None);
            }
            // Around the cache, nothing can be read from behind an end that is not aligned.
            if length == 0 || !length.is_multiple_of(ALIGNMENT) {
                return Ok(Some(Found { id: hasher.finish(), metadata }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use common::object::Algorithm;

    use super::*;

    #[test]
    fn files_of_any_length_are_hashed() {
        let directory = tempfile::tempdir().unwrap();
        let mut reader = MediumReader::default();
        for length in [0, 1, 4_095, 4_096, 4_097, CHUNK_BYTES, CHUNK_BYTES + 5_000] {
            let content: Vec<u8> = (0..length).map(|index| (index % 251) as u8).collect();
            let path = directory.path().join(length.to_string());
            std::fs::write(&path, &content).unwrap();
            let id = Algorithm::Sha512.digest(&content);
            let mut told = 0;
            let mut pace = |bytes| {
                told += bytes;
                true
            };
            let found = reader.hash(&path, &id, &mut pace).unwrap().unwrap();
            assert_eq!((found.id, told), (id, length as u64));
            assert!(reader.hash(&path, &id, &mut |_| false).unwrap().is_none());
        }
    }
}
