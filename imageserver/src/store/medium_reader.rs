//! Hashes files as they are on the medium, around the page cache.
//!
//! The page cache hides damage of the medium, and other programs need it more.

use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use api::object_stream::ContentForm;
use model::object::{Hasher, ObjectId};
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::packed::{PackedReader, is_damage};

/// The result of reading an object from the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnMedium {
    /// The content has the digest of the id, and that length in bytes.
    Whole(u64),
    /// The object is not there, or is the empty file that a crash leaves.
    Absent,
    /// The content did not have the digest of the id, and was quarantined.
    Corrupt,
    /// The reader was stopped.
    Stopped,
}

/// How much is read at once, in bytes.
const CHUNK_BYTES: usize = 1 << 20;

/// The alignment of buffers and of reads: enough for any device.
const ALIGNMENT: usize = 4_096;

/// Reads files with one buffer.
pub struct MediumReader {
    buffer: Vec<u8>,
    start: usize,
}

/// The result of hashing a file.
#[derive(Debug)]
pub struct HashedFile {
    /// True if the content has the digest of the id.
    pub is_whole: bool,
    /// The length of the content in bytes; of a damaged file, that of the file.
    pub size_bytes: u64,
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
    /// Hashes the file at `path`, which holds `id` in that form. Calls `pace` with the length in
    /// bytes of each piece that was read; it may wait. Returns `None` if `pace` returns false.
    pub fn hash(
        &mut self,
        path: &Path,
        form: ContentForm,
        id: &ObjectId,
        pace: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<Option<HashedFile>> {
        let tried = self.hash_with(path, OFlag::O_DIRECT, form, id, pace);
        match tried {
            // Not every file-system supports `O_DIRECT`.
            Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => {
                self.hash_with(path, OFlag::empty(), form, id, pace)
            }
            done => done,
        }
    }

    fn hash_with(
        &mut self,
        path: &Path,
        flags: OFlag,
        form: ContentForm,
        id: &ObjectId,
        pace: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<Option<HashedFile>> {
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file = std::fs::OpenOptions::new().read(true).custom_flags(flags.bits()).open(path)?;
        let metadata = file.metadata()?;
        let buffer = &mut self.buffer[self.start..self.start + CHUNK_BYTES];
        let mut pieces =
            Pieces { file, buffer, range: 0..0, is_at_end: false, is_stopped: false, pace };
        let hashed = match form {
            ContentForm::Plain => pieces.hash(id).map(|got| (got, metadata.len())),
            ContentForm::Packed => PackedReader::open(&mut pieces, id).and_then(|reader| {
                let size_bytes = reader.size_bytes();
                reader.hash(id).map(|got| (got, size_bytes))
            }),
        };
        if pieces.is_stopped {
            return Ok(None);
        }
        let (is_whole, size_bytes) = match hashed {
            Ok((got, size_bytes)) => (got == *id, size_bytes),
            Err(error) if is_damage(&error) => (false, metadata.len()),
            Err(error) => return Err(error),
        };
        Ok(Some(HashedFile { is_whole, size_bytes, metadata }))
    }
}

/// A file that is read in pieces of one buffer.
struct Pieces<'reader> {
    file: std::fs::File,
    buffer: &'reader mut [u8],
    /// The part of the buffer that was read and not returned.
    range: std::ops::Range<usize>,
    is_at_end: bool,
    is_stopped: bool,
    pace: &'reader mut dyn FnMut(u64) -> bool,
}

impl Pieces<'_> {
    /// Returns the next piece; empty at the end, and when `pace` has returned false.
    fn piece(&mut self) -> io::Result<&[u8]> {
        if self.range.is_empty() && !self.is_at_end {
            let length = loop {
                match self.file.read(self.buffer) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    other => break other?,
                }
            };
            self.range = 0..length;
            // Around the cache, nothing can be read from behind an end that is not aligned.
            self.is_at_end = length == 0 || !length.is_multiple_of(ALIGNMENT);
            if !(self.pace)(length as u64) {
                (self.range, self.is_at_end, self.is_stopped) = (0..0, true, true);
            }
        }
        Ok(&self.buffer[self.range.clone()])
    }

    fn hash(&mut self, id: &ObjectId) -> io::Result<ObjectId> {
        let mut hasher = Hasher::new(id.algorithm());
        loop {
            let piece = self.piece()?;
            if piece.is_empty() {
                return Ok(hasher.finish());
            }
            hasher.update(piece);
            self.range = 0..0;
        }
    }
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let piece = self.piece()?;
        let length = piece.len().min(buffer.len());
        buffer[..length].copy_from_slice(&piece[..length]);
        self.range.start += length;
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;
    use rpc::packing::{self, Packer};

    use super::super::packed::head;
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
            let found = reader.hash(&path, ContentForm::Plain, &id, &mut pace).unwrap().unwrap();
            assert_eq!((found.is_whole, told), (true, length as u64));
            assert!(reader.hash(&path, ContentForm::Plain, &id, &mut |_| false).unwrap().is_none());
            let other = Algorithm::Sha512.digest(b"other");
            let found =
                reader.hash(&path, ContentForm::Plain, &other, &mut |_| true).unwrap().unwrap();
            assert_eq!((found.is_whole, found.size_bytes), (false, length as u64));

            // Packed, it is as long as before and not.
            let mut packed = head(id, content.len() as u64);
            let mut packer = Packer::new(1).unwrap();
            for chunk in content.chunks(packing::CHUNK_BYTES_MAX) {
                packing::append(&mut packed, chunk, packer.pack(chunk));
            }
            std::fs::write(&path, &packed).unwrap();
            let mut told = 0;
            let mut pace = |bytes| {
                told += bytes;
                true
            };
            let found = reader.hash(&path, ContentForm::Packed, &id, &mut pace).unwrap().unwrap();
            assert_eq!((found.is_whole, found.size_bytes), (true, length as u64));
            assert_eq!(told, packed.len() as u64);
            assert!(
                reader.hash(&path, ContentForm::Packed, &id, &mut |_| false).unwrap().is_none()
            );
            std::fs::write(&path, &packed[..packed.len() - 1]).unwrap();
            let found =
                reader.hash(&path, ContentForm::Packed, &id, &mut |_| true).unwrap().unwrap();
            assert!(!found.is_whole);
        }
    }
}
