//! The content of an object that was verified, and how it is read.

use std::io::{self, Cursor, Read, Seek as _, SeekFrom, Take};

use bytes::Bytes;

use super::packed::Reader;

/// An object whose content was found to be what its id says.
pub enum Content {
    /// All of it.
    Whole(Bytes),
    /// The file, at its beginning, and its length in bytes.
    File(fs_err::File, u64),
    /// It is packed.
    Packed(PackedContent),
}

/// Content in chunks, as it travels to who takes it so.
pub struct PackedContent {
    size_bytes: u64,
    chunks: RawReader,
    chunks_bytes: u64,
}

/// What is in a file, or was read from it.
pub enum RawReader {
    /// It was read.
    Memory(Cursor<Bytes>),
    /// The rest of a file.
    File(Take<fs_err::File>),
}

/// Reads content.
pub enum ContentReader {
    /// What is as it is in the file.
    Raw(RawReader),
    /// What is unpacked.
    Packed(Box<Reader<RawReader>>),
}

impl Content {
    /// Its length, in bytes.
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
                ContentReader::Packed(Box::new(Reader::behind_head(chunks, size_bytes)))
            }
        }
    }

    /// All of it, which is known to be short enough for the memory.
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

    /// `file` stands behind its head.
    pub(super) fn in_file(size_bytes: u64, file: fs_err::File, chunks_bytes: u64) -> Self {
        Self { size_bytes, chunks: RawReader::File(file.take(chunks_bytes)), chunks_bytes }
    }

    /// Its chunks as they are, and their length in bytes.
    #[must_use]
    pub fn into_chunks(self) -> (ContentReader, u64) {
        (ContentReader::Raw(self.chunks), self.chunks_bytes)
    }
}

impl ContentReader {
    /// Leaves `bytes` out, of which there are as many. Only before anything is read.
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
