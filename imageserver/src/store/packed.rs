//! Files of packed objects, in the format in which packed objects are sent.
//!
//! | bytes | what |
//! |---|---|
//! | 42 or 74 | the head of a packed object in an object stream ([`api::object_stream`]) |
//! | | its chunks ([`rpc::packing`]) until all of the content has come |
//!
//! Any other file, or a longer one, is damaged. Lengths in a file are limited before memory is
//! allocated: a reader holds one chunk at a time.

use std::io::{self, Read};

use api::object_stream::{ContentForm, HEAD_BYTES_MAX, ObjectHead};
use bytes::Bytes;
use model::object::{Hasher, ObjectId};
use rpc::packing::{CHUNK_HEAD_BYTES, ChunkHead, UnpackError, Unpacker};

/// Content of at most this length in bytes is not packed: it takes one block of a disk.
pub const PLAIN_BYTES_MAX: u64 = 4_096;

/// The part of its length by which content must become shorter.
const GAIN_PART: u64 = 8;

/// The unit in which disks give space, in bytes.
const BLOCK_BYTES: u64 = 4_096;

/// Returns true if a packed file of `packed_bytes` saves enough space for content of
/// `content_bytes`.
#[must_use]
pub fn is_worth(content_bytes: u64, packed_bytes: u64) -> bool {
    packed_bytes <= content_bytes - content_bytes / GAIN_PART
        && packed_bytes.div_ceil(BLOCK_BYTES) < content_bytes.div_ceil(BLOCK_BYTES)
}

/// Returns the head of the packed file of `id`.
#[must_use]
pub fn head(id: ObjectId, size_bytes: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD_BYTES_MAX);
    ObjectHead::Object { id, size_bytes }.encode_as(ContentForm::Packed, &mut bytes);
    bytes
}

/// Returns the length of the head, in bytes.
#[must_use]
pub fn head_bytes(id: &ObjectId) -> u64 {
    head(*id, 0).len() as u64
}

fn damaged(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Returns true if reading failed because of what the file holds, not because of the medium.
#[must_use]
pub fn is_damage(error: &io::Error) -> bool {
    let is_ours = matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof);
    is_ours && error.raw_os_error().is_none()
}

/// Reads packed content, a chunk at a time.
pub struct PackedReader<R> {
    file: R,
    size_bytes: u64,
    /// The length of the content that was not read yet, in bytes.
    rest_bytes: u64,
    unpacker: Unpacker,
    packed: Vec<u8>,
    /// Content that was unpacked and not returned.
    content: Bytes,
}

/// A chunk as it is in the file.
#[derive(Debug, PartialEq, Eq)]
pub enum PackedChunk<'reader> {
    /// Content.
    Plain(&'reader [u8]),
    /// A zstd frame, and the length of its content in bytes.
    Frame(&'reader [u8], usize),
}

impl<R: Read> PackedReader<R> {
    /// Reads the file of `id` from its beginning.
    pub fn open(mut file: R, id: &ObjectId) -> io::Result<Self> {
        let mut bytes = head(*id, 0);
        file.read_exact(&mut bytes)?;
        match ObjectHead::decode(&bytes) {
            Ok(Some((ObjectHead::Object { id: of, size_bytes }, ContentForm::Packed, _)))
                if of == *id =>
            {
                Ok(Self::behind_head(file, size_bytes))
            }
            _ => Err(damaged("it does not begin as the packed file of its object")),
        }
    }

    /// Reads content of `size_bytes` from behind the head.
    pub fn behind_head(file: R, size_bytes: u64) -> Self {
        Self {
            file,
            size_bytes,
            rest_bytes: size_bytes,
            unpacker: Unpacker::default(),
            packed: Vec::new(),
            content: Bytes::new(),
        }
    }

    /// The length of all content, in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn chunk_head(&mut self) -> io::Result<Option<ChunkHead>> {
        if self.rest_bytes == 0 {
            return Ok(None);
        }
        let mut head = [0; CHUNK_HEAD_BYTES];
        self.file.read_exact(&mut head)?;
        let head = ChunkHead::decode(head, self.rest_bytes).map_err(damaged)?;
        self.packed.resize(head.packed_bytes, 0);
        self.file.read_exact(&mut self.packed)?;
        self.rest_bytes -= head.content_bytes as u64;
        Ok(Some(head))
    }

    /// Returns the next chunk as it is stored; `None` at the end. Must not be mixed with other
    /// reads.
    pub fn chunk(&mut self) -> io::Result<Option<PackedChunk<'_>>> {
        let head = self.chunk_head()?;
        Ok(head.map(|head| match head.is_plain() {
            true => PackedChunk::Plain(&self.packed),
            false => PackedChunk::Frame(&self.packed, head.content_bytes),
        }))
    }

    /// Returns the next content, of at most one chunk; empty at the end.
    fn next(&mut self) -> io::Result<&mut Bytes> {
        if self.content.is_empty()
            && let Some(head) = self.chunk_head()?
        {
            self.content = match head.is_plain() {
                true => Bytes::copy_from_slice(&self.packed),
                false => self.unpacker.unpack(head, &self.packed).map_err(damaged)?,
            };
        }
        Ok(&mut self.content)
    }

    /// Skips `bytes` of the content.
    pub fn skip(&mut self, mut bytes: u64) -> io::Result<()> {
        while bytes > 0 {
            if self.content.is_empty() {
                match self.chunk_head()? {
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                    // The chunk is skipped without unpacking.
                    Some(head) if head.content_bytes as u64 <= bytes => {
                        bytes -= head.content_bytes as u64;
                        continue;
                    }
                    Some(head) if head.is_plain() => {
                        self.content = Bytes::copy_from_slice(&self.packed);
                    }
                    Some(head) => {
                        let content = self.unpacker.unpack(head, &self.packed);
                        self.content = content.map_err(|error: UnpackError| damaged(error))?;
                    }
                }
            }
            let part = usize::try_from(bytes).unwrap_or(usize::MAX).min(self.content.len());
            drop(self.content.split_to(part));
            bytes -= part as u64;
        }
        Ok(())
    }

    /// Hashes all content. Fails if the file is longer.
    pub fn hash(mut self, id: &ObjectId) -> io::Result<ObjectId> {
        let mut hasher = Hasher::new(id.algorithm());
        loop {
            let content = std::mem::take(self.next()?);
            if content.is_empty() {
                break;
            }
            hasher.update(&content);
        }
        if self.file.read(&mut [0])? > 0 {
            return Err(damaged("it goes on behind the end of its content"));
        }
        Ok(hasher.finish())
    }
}

impl<R: Read> Read for PackedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let content = self.next()?;
        let part = content.split_to(content.len().min(buffer.len()));
        buffer[..part.len()].copy_from_slice(&part);
        Ok(part.len())
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;
    use rpc::packing::{CHUNK_BYTES_MAX, Packer, append};

    use super::*;

    fn packed(content: &[u8]) -> (ObjectId, Vec<u8>) {
        let id = Algorithm::Sha512.digest(content);
        let mut bytes = head(id, content.len() as u64);
        let mut packer = Packer::new(1).unwrap();
        for chunk in content.chunks(CHUNK_BYTES_MAX) {
            append(&mut bytes, chunk, packer.pack(chunk));
        }
        (id, bytes)
    }

    /// Two chunks that gain, one that does not, and a short one.
    fn content() -> Vec<u8> {
        let mut content = vec![b'a'; 2 * CHUNK_BYTES_MAX];
        let noise = |index: usize| Algorithm::Blake3.digest(&index.to_le_bytes()).digest()[0];
        content.extend((0..CHUNK_BYTES_MAX).map(noise));
        content.extend([b'b'; 1_000]);
        content
    }

    #[test]
    fn content_comes_back_from_any_place_on() {
        let content = content();
        let (id, bytes) = packed(&content);
        assert_eq!(bytes.len() as u64 - head_bytes(&id), bytes.len() as u64 - 74);
        let open = || PackedReader::open(&bytes[..], &id).unwrap();
        assert_eq!(open().size_bytes(), content.len() as u64);
        assert_eq!(open().hash(&id).unwrap(), id);
        for from in [0, 1, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1, 300_000, content.len()] {
            let mut reader = open();
            reader.skip(from as u64).unwrap();
            let mut got = Vec::new();
            reader.read_to_end(&mut got).unwrap();
            assert!(got == content[from..], "from {from}");
        }
        assert!(is_damage(&open().skip(content.len() as u64 + 1).unwrap_err()));
        let mut chunks = open();
        let mut kinds = Vec::new();
        while let Some(chunk) = chunks.chunk().unwrap() {
            kinds.push(match chunk {
                PackedChunk::Plain(bytes) => (false, bytes.len()),
                PackedChunk::Frame(_, content_bytes) => (true, content_bytes),
            });
        }
        let whole = CHUNK_BYTES_MAX;
        assert_eq!(kinds, [(true, whole), (true, whole), (false, whole), (true, 1_000)]);
    }

    #[test]
    fn every_damage_is_found_and_takes_no_memory() {
        let content = vec![b'a'; 10_000];
        let (id, bytes) = packed(&content);
        let is_whole = |bytes: &[u8]| {
            let hashed = PackedReader::open(bytes, &id).and_then(|reader| reader.hash(&id));
            match hashed {
                Ok(got) => got == id,
                Err(error) => {
                    assert!(is_damage(&error), "{error}");
                    false
                }
            }
        };
        assert!(is_whole(&bytes));
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 0x81;
            assert!(!is_whole(&changed), "byte {index} changed");
            assert!(!is_whole(&bytes[..index]), "cut at byte {index}");
        }
        assert!(!is_whole(&[&bytes[..], b"x"].concat()));
        // Of a head that says to have most of all, no more is taken than one chunk.
        let bomb = [&head(id, u64::MAX)[..], &[0xff; 8], &bytes[..]].concat();
        assert!(!is_whole(&bomb));
        let (other, _) = packed(b"other");
        assert!(is_damage(&PackedReader::open(&bytes[..], &other).err().unwrap()));
    }

    #[test]
    fn only_what_frees_a_block_and_an_eighth_is_packed() {
        #[rustfmt::skip]
        let table = [
            (8_192,     4_096,   true),
            (8_192,     4_097,   false),
            (5_000,     4_097,   false),
            (5_000,     4_096,   true),
            (100_000,   87_500,  true),
            (100_000,   87_501,  false),
            (100_000,   100_009, false),
            (1,         9,       false),
        ];
        for (content_bytes, packed_bytes, expected) in table {
            assert_eq!(is_worth(content_bytes, packed_bytes), expected, "{content_bytes}");
        }
    }
}
