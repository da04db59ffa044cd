//! Packs the content of objects with zstd, chunk by chunk.
//!
//! A packed object is a sequence of chunks that are packed separately, so that sender and reader
//! need memory for one chunk, whatever the length of the object. A chunk is
//!
//! | bytes | what |
//! |---|---|
//! | 4 | length of the content, little-endian: 1 to [`CHUNK_BYTES_MAX`] |
//! | 4 | length of what follows, little-endian: that of the content, or less |
//! | | if shorter than the content: a zstd frame (RFC 8878); otherwise the content itself |
//!
//! A sender may send any chunk unpacked, such as compressed content or when its processor is busy.
// tidy: core

use std::time::Duration;

use bytes::{BufMut, Bytes};
use zstd::bulk::{Compressor, Decompressor};

/// The most content in one chunk, in bytes.
pub const CHUNK_BYTES_MAX: usize = 128 << 10;

/// The length of the head of a chunk, in bytes.
pub const CHUNK_HEAD_BYTES: usize = 8;

/// Content that is shorter than this is not worth packing, in bytes.
pub const CONTENT_BYTES_MIN: usize = 256;

/// The value of the headers `accept-encoding` and `content-encoding`.
pub const ENCODING: &str = "zstd";

/// The part of its length by which content must become shorter to be sent packed.
const GAIN_PART: usize = 16;

/// How fast a stream of objects must be, in bytes a second, for them to be sent as they are: a
/// quarter of a gigabit. subd reads two streams at a time, so it gets them so over more than half a
/// gigabit. Then it writes no faster than they come, and packing would cost the sender more
/// processor time than all the rest of its work.
const FAST_STREAM: u64 = 31_250_000;

/// Less than this says nothing about the link, in bytes: it may be in buffers.
const LINK_SAMPLE_BYTES_MIN: u64 = 4 << 20;

/// What the link had to do with a part of a stream of objects, as its sender or its reader sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkUse {
    /// How many bytes went over the link.
    pub wire_bytes: u64,
    /// How long was waited for it: by the sender until they were taken, by the reader until they
    /// came. What each of them takes to make or to use them does not count.
    pub waited: Duration,
}

impl LinkUse {
    /// Returns whether what comes next is to be packed: not if the link is fast. `None` if this
    /// does not tell.
    #[must_use]
    pub fn must_pack(&self) -> Option<bool> {
        let at_fast_link = u128::from(FAST_STREAM) * self.waited.as_nanos() / 1_000_000_000;
        (self.wire_bytes >= LINK_SAMPLE_BYTES_MIN)
            .then_some(u128::from(self.wire_bytes) < at_fast_link)
    }
}

/// Why bytes are not a chunk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    #[error(
        "a packed chunk has invalid lengths: {packed_bytes} bytes for {content_bytes} bytes of \
         content, where {rest_bytes} are missing"
    )]
    Lengths {
        /// The stated length of the content.
        content_bytes: u32,
        /// The stated length of the packed content.
        packed_bytes: u32,
        /// The remaining length of the object.
        rest_bytes: u64,
    },
    #[error("a packed chunk of {content_bytes} bytes cannot be unpacked: {why}")]
    Garbled {
        /// The stated length of the content.
        content_bytes: usize,
        why: String,
    },
}

/// Returns true if the value of a header `accept-encoding` accepts [`ENCODING`] (RFC 9110, 12.5.3).
#[must_use]
pub fn is_accepted(value: &str) -> bool {
    value.split(',').any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_named = parts.next().is_some_and(|name| name.eq_ignore_ascii_case(ENCODING));
        let weight = parts.find_map(|part| part.strip_prefix("q=").or(part.strip_prefix("Q=")));
        let weight = weight.map_or(Ok(1.0), str::parse::<f32>);
        is_named && weight.is_ok_and(|weight| weight > 0.0)
    })
}

/// The head of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHead {
    /// The length of the content, in bytes.
    pub content_bytes: usize,
    /// The length of what follows, in bytes. If it equals `content_bytes` the content is not
    /// packed.
    pub packed_bytes: usize,
}

impl ChunkHead {
    /// Decodes the head of a chunk of an object with `rest_bytes` remaining.
    ///
    /// # Errors
    ///
    /// [`UnpackError::Lengths`] if there can be no such chunk.
    pub fn decode(bytes: [u8; CHUNK_HEAD_BYTES], rest_bytes: u64) -> Result<Self, UnpackError> {
        let [a, b, c, d, e, f, g, h] = bytes;
        let content_bytes = u32::from_le_bytes([a, b, c, d]);
        let packed_bytes = u32::from_le_bytes([e, f, g, h]);
        let fits = content_bytes as usize <= CHUNK_BYTES_MAX
            && u64::from(content_bytes) <= rest_bytes
            && (1..=content_bytes).contains(&packed_bytes);
        if !fits {
            return Err(UnpackError::Lengths { content_bytes, packed_bytes, rest_bytes });
        }
        let (content_bytes, packed_bytes) = (content_bytes as usize, packed_bytes as usize);
        Ok(Self { content_bytes, packed_bytes })
    }

    /// Returns true if the content is not packed.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.content_bytes == self.packed_bytes
    }
}

/// Appends one chunk: `content`, which has 1 to [`CHUNK_BYTES_MAX`] bytes, or what a [`Packer`]
/// made of it.
pub fn append(out: &mut impl BufMut, content: &[u8], packed: Option<&[u8]>) {
    debug_assert!((1..=CHUNK_BYTES_MAX).contains(&content.len()));
    let bytes = packed.unwrap_or(content);
    for length in [content.len(), bytes.len()] {
        out.put_u32_le(u32::try_from(length).expect("a chunk is short"));
    }
    out.put_slice(bytes);
}

/// Packs chunks. Takes about a megabyte of memory, so senders share a few.
pub struct Packer {
    compressor: Compressor<'static>,
    packed: Vec<u8>,
}

impl Packer {
    /// Returns a packer with a compression level of zstd.
    ///
    /// # Errors
    ///
    /// Fails if there is not enough memory.
    pub fn new(level: i32) -> std::io::Result<Self> {
        Ok(Self { compressor: Compressor::new(level)?, packed: Vec::new() })
    }

    /// Packs `content` into a frame. Returns `None` if it does not become much shorter.
    pub fn pack(&mut self, content: &[u8]) -> Option<&[u8]> {
        if content.len() < CONTENT_BYTES_MIN {
            return None;
        }
        let limit = content.len() - content.len() / GAIN_PART;
        self.packed.clear();
        self.packed.shrink_to(limit);
        self.packed.reserve_exact(limit);
        // Compression fails if the result is longer than the buffer.
        let length = self.compressor.compress_to_buffer(content, &mut self.packed).ok()?;
        (length <= limit).then_some(&self.packed[..])
    }

    /// As [`Packer::pack`], but always returns a frame.
    ///
    /// # Errors
    ///
    /// Fails if there is not enough memory.
    pub fn frame(&mut self, content: &[u8]) -> std::io::Result<Vec<u8>> {
        self.compressor.compress(content)
    }
}

/// Unpacks chunks.
#[derive(Default)]
pub struct Unpacker {
    decompressor: Option<Decompressor<'static>>,
}

impl Unpacker {
    /// Unpacks the content of a chunk.
    ///
    /// # Errors
    ///
    /// [`UnpackError::Garbled`] if `packed` is no frame, or one of another length.
    pub fn unpack(&mut self, head: ChunkHead, packed: &[u8]) -> Result<Bytes, UnpackError> {
        let ChunkHead { content_bytes, .. } = head;
        let garbled = |why: String| UnpackError::Garbled { content_bytes, why };
        let decompressor = match &mut self.decompressor {
            Some(decompressor) => decompressor,
            none => {
                let new = Decompressor::new().map_err(|error| garbled(error.to_string()))?;
                none.insert(new)
            }
        };
        let content = decompressor
            .decompress(packed, content_bytes)
            .map_err(|error| garbled(error.to_string()))?;
        if content.len() != content_bytes {
            return Err(garbled(format!("it has {} bytes", content.len())));
        }
        Ok(content.into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What a reader makes of one chunk.
    fn read(bytes: &[u8], rest_bytes: u64) -> Result<Bytes, UnpackError> {
        let (head, packed) = bytes.split_first_chunk().unwrap();
        let head = ChunkHead::decode(*head, rest_bytes)?;
        assert_eq!(packed.len(), head.packed_bytes);
        match head.is_plain() {
            true => Ok(Bytes::copy_from_slice(packed)),
            false => Unpacker::default().unpack(head, packed),
        }
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_out_again(
            (period, length) in (1..5_000_usize, 1..=CHUNK_BYTES_MAX),
            level in 1..4,
        ) {
            let noise = |index: usize| blake3::hash(&(index % period).to_le_bytes()).as_bytes()[0];
            let content: Vec<u8> = (0..length).map(noise).collect();
            let mut packer = Packer::new(level).unwrap();
            let packed = packer.pack(&content);
            let mut chunk = Vec::new();
            append(&mut chunk, &content, packed);
            prop_assert!(chunk.len() <= length + CHUNK_HEAD_BYTES);
            prop_assert_eq!(read(&chunk, length as u64), Ok(content.into()));
        }

        #[test]
        fn garbage_is_refused_or_has_its_length(
            mut bytes in proptest::collection::vec(any::<u8>(), 1..300),
            content_bytes in 1..1_000_u32,
        ) {
            bytes.truncate(content_bytes as usize);
            let mut chunk = content_bytes.to_le_bytes().to_vec();
            chunk.extend((bytes.len() as u32).to_le_bytes());
            chunk.extend(bytes);
            if let Ok(content) = read(&chunk, 1_000) {
                prop_assert_eq!(content.len(), content_bytes as usize);
            }
        }
    }

    #[test]
    fn a_slow_link_is_told_from_a_fast_one() {
        let quarter = 31_250_000;
        #[rustfmt::skip]
        let table = [
            ((0,             60_000), None),
            (((4 << 20) - 1, 60_000), None),
            ((4 << 20,       0),      Some(false)),
            ((4 << 20,       134),    Some(false)),
            ((4 << 20,       135),    Some(true)),
            ((quarter,       1_000),  Some(false)),
            ((quarter - 1,   1_000),  Some(true)),
            ((u64::MAX,      1_000),  Some(false)),
            ((1 << 30,       60_000), Some(true)),
        ];
        for ((wire_bytes, waited_ms), packs) in table {
            let link = LinkUse { wire_bytes, waited: Duration::from_millis(waited_ms) };
            assert_eq!(link.must_pack(), packs, "{link:?}");
        }
    }

    #[test]
    fn who_accepts_it_is_known() {
        for value in ["zstd", "gzip, zstd", "gzip;q=1.0, ZSTD ; q=0.5", "br,zstd;Q=1"] {
            assert!(is_accepted(value), "{value}");
        }
        for value in ["", "gzip", "*", "zstd;q=0", "zstd; q=0.0", "zstdx", "zstd;q=x"] {
            assert!(!is_accepted(value), "{value}");
        }
    }

    #[test]
    fn what_gains_nothing_is_left_as_it_is() {
        let mut packer = Packer::new(1).unwrap();
        let noise: Vec<u8> =
            (0..4_096_u32).map(|n| blake3::hash(&n.to_le_bytes()).as_bytes()[0]).collect();
        assert_eq!(packer.pack(&noise), None);
        assert_eq!(packer.pack(&[7; CONTENT_BYTES_MIN - 1]), None);
        assert!(packer.pack(&[7; CHUNK_BYTES_MAX]).is_some_and(|packed| packed.len() < 100));
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        let most = CHUNK_BYTES_MAX as u32;
        let table = [
            ((0, 0, 9), false),
            ((1, 0, 9), false),
            ((1, 1, 9), true),
            ((1, 2, 9), false),
            ((9, 9, 9), true),
            ((10, 9, 9), false),
            ((most, 1, u64::MAX), true),
            ((most + 1, 1, u64::MAX), false),
            ((u32::MAX, u32::MAX, u64::MAX), false),
        ];
        for ((content_bytes, packed_bytes, rest_bytes), fits) in table {
            let mut bytes = [0; CHUNK_HEAD_BYTES];
            bytes[..4].copy_from_slice(&content_bytes.to_le_bytes());
            bytes[4..].copy_from_slice(&packed_bytes.to_le_bytes());
            let expected = match fits {
                true => Ok(ChunkHead {
                    content_bytes: content_bytes as usize,
                    packed_bytes: packed_bytes as usize,
                }),
                false => Err(UnpackError::Lengths { content_bytes, packed_bytes, rest_bytes }),
            };
            assert_eq!(ChunkHead::decode(bytes, rest_bytes), expected);
        }
        // A bomb: a frame of more than it is said to be.
        let mut packer = Packer::new(1).unwrap();
        let packed = packer.pack(&[0; CHUNK_BYTES_MAX]).unwrap();
        let head = ChunkHead { content_bytes: 300, packed_bytes: packed.len() };
        assert!(matches!(
            Unpacker::default().unpack(head, packed),
            Err(UnpackError::Garbled { content_bytes: 300, .. })
        ));
    }
}
