//! Opens an archive whatever it is compressed with, known by its first bytes and not by its name.

use std::io::{self, BufRead, BufReader, Read};

/// How much is read from the disk at once, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// The most memory that decompression may take, in bytes: enough for `xz -9` and `zstd --ultra`.
const XZ_MEMORY_BYTES_MAX: u64 = 1 << 30;

/// The largest window of a zstd archive, as a power of two: what `zstd --ultra -22 --long=30`
/// makes.
const ZSTD_WINDOW_LOG_MAX: u32 = 30;

/// What an archive is compressed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Nothing.
    None,
    /// gzip.
    Gzip,
    /// Zstandard.
    Zstd,
    /// xz.
    Xz,
    /// bzip2.
    Bzip2,
}

impl Compression {
    /// Tells the compression from the first bytes of a file; six are enough.
    #[must_use]
    pub fn of(first: &[u8]) -> Self {
        match first {
            [0x1f, 0x8b, ..] => Self::Gzip,
            // A frame, or a skippable frame in front of one.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Self::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => Self::Bzip2,
            _ => Self::None,
        }
    }
}

/// The decompressed bytes of `input`.
///
/// # Errors
///
/// What reading its first bytes, or the start of a decompressor, gives.
pub fn open(input: impl Read + Send + 'static) -> io::Result<Box<dyn Read + Send>> {
    let mut input = BufReader::with_capacity(BUFFER_BYTES, input);
    Ok(match Compression::of(input.fill_buf()?) {
        Compression::None => Box::new(input),
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            Box::new(decoder)
        }
        Compression::Xz => {
            let stream = liblzma::stream::Stream::new_stream_decoder(
                XZ_MEMORY_BYTES_MAX,
                liblzma::stream::CONCATENATED,
            )
            .map_err(io::Error::other)?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(input, stream))
        }
        Compression::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(input)),
    })
}
