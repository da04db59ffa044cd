//! The content of an object that was verified, and how it is read.

use std::io::{self, Read, Seek as _, SeekFrom, Take};
use std::os::fd::AsFd;

use bytes::{Buf as _, Bytes};
use rustix::buffer::spare_capacity;
use rustix::io::Errno;

use super::packed::PackedReader;

/// An object whose content was found to be what its id says.
pub enum Content {
    /// The whole content.
    Whole(Bytes),
    /// The file, at its beginning, and its length in bytes.
    File(fs_err::File, u64),
    /// Packed content.
    Packed(PackedContent),
}

/// What [`Objects::open_into`](super::contract::Objects::open_into) has done with an object.
pub enum Opened {
    /// Its content is at the end of the buffer.
    Appended,
    Content(Content),
}

/// Packed content in chunks, as clients receive it.
pub struct PackedContent {
    size_bytes: u64,
    chunks: RawReader,
    chunks_bytes: u64,
}

/// Reads content as it is in a file.
pub enum RawReader {
    /// Content in memory.
    Memory(Bytes),
    /// The rest of a file.
    File(Take<fs_err::File>),
}

/// Reads content.
pub enum ContentReader {
    /// Content as it is in the file.
    Raw(RawReader),
    /// Packed content, which is unpacked while it is read.
    Packed(Box<PackedReader<RawReader>>),
}

impl Content {
    /// Returns the length in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        match self {
            Self::Whole(bytes) => bytes.len() as u64,
            Self::File(_, size_bytes) => *size_bytes,
            Self::Packed(packed) => packed.size_bytes,
        }
    }

    /// Reads it from its beginning.
    #[must_use]
    pub fn into_reader(self) -> ContentReader {
        match self {
            Self::Whole(bytes) => ContentReader::Raw(RawReader::Memory(bytes)),
            Self::File(file, size_bytes) => {
                ContentReader::Raw(RawReader::File(file.take(size_bytes)))
            }
            Self::Packed(PackedContent { size_bytes, chunks, .. }) => {
                ContentReader::Packed(Box::new(PackedReader::behind_head(chunks, size_bytes)))
            }
        }
    }

    /// Reads all of the content, which the caller knows to fit into memory.
    pub fn into_bytes(self) -> io::Result<Bytes> {
        if let Self::Whole(bytes) = self {
            return Ok(bytes);
        }
        let mut bytes = Vec::new();
        let size_bytes = usize::try_from(self.size_bytes()).map_err(io::Error::other)?;
        self.into_reader().append(size_bytes, &mut bytes)?;
        Ok(bytes.into())
    }
}

impl PackedContent {
    pub(super) fn in_memory(size_bytes: u64, chunks: Bytes) -> Self {
        let chunks_bytes = chunks.len() as u64;
        Self { size_bytes, chunks: RawReader::Memory(chunks), chunks_bytes }
    }

    /// `file` is positioned behind the head.
    pub(super) fn in_file(size_bytes: u64, file: fs_err::File, chunks_bytes: u64) -> Self {
        Self { size_bytes, chunks: RawReader::File(file.take(chunks_bytes)), chunks_bytes }
    }

    /// Returns the chunks as they are stored, and their length in bytes.
    #[must_use]
    pub fn into_chunks(self) -> (ContentReader, u64) {
        (ContentReader::Raw(self.chunks), self.chunks_bytes)
    }
}

impl ContentReader {
    /// Appends the next part to `buffer`, of at most `limit` bytes. Returns its length, which is
    /// shorter at the end.
    pub fn append(&mut self, limit: usize, buffer: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Raw(RawReader::File(file)) => {
                let part = limit.min(usize::try_from(file.limit()).unwrap_or(limit));
                let got = append_from(file.get_ref().file(), part, buffer).map_err(|error| {
                    let path = file.get_ref().path().display();
                    io::Error::new(error.kind(), format!("cannot read {path}: {error}"))
                })?;
                file.set_limit(file.limit() - got as u64);
                Ok(got)
            }
            Self::Raw(RawReader::Memory(content)) => {
                let part = content.split_to(limit.min(content.len()));
                buffer.extend_from_slice(&part);
                Ok(part.len())
            }
            Self::Packed(reader) => reader.take(limit as u64).read_to_end(buffer),
        }
    }

    /// Skips `bytes`, which must be there. Must be called before anything is read.
    pub fn skip(&mut self, bytes: u64) -> io::Result<()> {
        match self {
            Self::Packed(reader) => reader.skip(bytes),
            Self::Raw(RawReader::Memory(content)) => {
                content.advance(usize::try_from(bytes).map_err(io::Error::other)?);
                Ok(())
            }
            Self::Raw(RawReader::File(file)) => {
                file.get_mut().seek(SeekFrom::Start(bytes))?;
                file.set_limit(file.limit().saturating_sub(bytes));
                Ok(())
            }
        }
    }
}

/// Appends at most `limit` bytes of `file` to `buffer`, with as few system calls as possible and
/// without clearing its memory. Returns how many; fewer at the end of the file.
pub(super) fn append_from(
    file: impl AsFd,
    limit: usize,
    buffer: &mut Vec<u8>,
) -> io::Result<usize> {
    buffer.reserve(limit);
    let start = buffer.len();
    while buffer.len() < start + limit {
        match rustix::io::read(&file, spare_capacity(buffer)) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // There may have been more room.
    let surplus = buffer.len().saturating_sub(start + limit);
    if surplus > 0 {
        let back = i64::try_from(surplus).map_err(io::Error::other)?;
        rustix::fs::seek(&file, rustix::fs::SeekFrom::Current(-back))?;
        buffer.truncate(start + limit);
    }
    Ok(buffer.len() - start)
}

impl Read for RawReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Memory(content) => {
                let part = content.split_to(buffer.len().min(content.len()));
                buffer[..part.len()].copy_from_slice(&part);
                Ok(part.len())
            }
            Self::File(file) => file.read(buffer),
        }
    }
}

impl Read for ContentReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Raw(reader) => reader.read(buffer),
            Self::Packed(reader) => reader.read(buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_appended_goes_on_where_it_ended() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs_err::write(file.path(), b"0123456789").unwrap();
        let readers = [
            Content::File(fs_err::File::open(file.path()).unwrap(), 9),
            Content::Whole(Bytes::from_static(b"012345678")),
        ];
        for mut reader in readers.map(Content::into_reader) {
            // There is more room than is asked for.
            let mut buffer = Vec::with_capacity(100);
            reader.skip(1).unwrap();
            for (limit, got, all) in [(3, 3, "123"), (0, 0, "123"), (90, 5, "12345678")] {
                assert_eq!(reader.append(limit, &mut buffer).unwrap(), got);
                assert_eq!(buffer, all.as_bytes());
            }
        }
    }
}
