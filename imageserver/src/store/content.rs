//! The content of an object that was verified, and how it is read.

use std::io::{self, Cursor, Read, Seek as _, SeekFrom, Take};

use bytes::Bytes;

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

/// Packed content in chunks, as clients receive it.
pub struct PackedContent {
    size_bytes: u64,
    chunks: RawReader,
    chunks_bytes: u64,
}

/// Reads content as it is in a file.
pub enum RawReader {
    /// Content in memory.
    Memory(Cursor<Bytes>),
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
            Self::Whole(bytes) => ContentReader::Raw(RawReader::Memory(Cursor::new(bytes))),
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
        let size_bytes = self.size_bytes();
        let mut bytes = Vec::new();
        self.into_reader().take(size_bytes).read_to_end(&mut bytes)?;
        Ok(bytes.into())
    }
}

impl PackedContent {
    pub(super) fn in_memory(size_bytes: u64, chunks: Bytes) -> Self {
        let chunks_bytes = chunks.len() as u64;
        Self { size_bytes, chunks: RawReader::Memory(Cursor::new(chunks)), chunks_bytes }
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
    /// Skips `bytes`, which must be there. Must be called before anything is read.
    pub fn skip(&mut self, bytes: u64) -> io::Result<()> {
        match self {
            Self::Packed(reader) => reader.skip(bytes),
            Self::Raw(RawReader::Memory(cursor)) => {
                cursor.set_position(bytes);
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

impl Read for RawReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Memory(cursor) => cursor.read(buffer),
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
