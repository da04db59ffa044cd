//! Decompresses archives, whose format is detected by the first bytes, and compresses them.

use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;

/// How much is read from the disk at once, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// The most memory that decompression may take, in bytes: enough for `xz -9` and `zstd --ultra`.
const XZ_MEMORY_BYTES_MAX: u64 = 1 << 30;

/// The largest window of a zstd archive, as a power of two: what `zstd --ultra -22 --long=30`
/// makes.
const ZSTD_WINDOW_LOG_MAX: u32 = 30;

/// The default compression levels of zstd and xz.
const ZSTD_LEVEL: i32 = 3;
const XZ_LEVEL: u32 = 6;

/// What an archive is compressed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
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

    /// Returns the compression that belongs to the extension of a file name.
    pub fn of_name(path: &Path) -> Self {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz" | "tgz") => Self::Gzip,
            Some("zst" | "tzst") => Self::Zstd,
            Some("xz" | "txz") => Self::Xz,
            Some("bz2" | "tbz" | "tbz2") => Self::Bzip2,
            _ => Self::None,
        }
    }
}

/// Compresses what is written to it. The same input gives the same output.
pub enum Compressor<W: Write> {
    /// Not at all.
    None(BufWriter<W>),
    /// With gzip.
    Gzip(flate2::write::GzEncoder<BufWriter<W>>),
    /// With zstd.
    Zstd(zstd::stream::write::Encoder<'static, BufWriter<W>>),
    /// With xz.
    Xz(liblzma::write::XzEncoder<BufWriter<W>>),
    /// With bzip2.
    Bzip2(bzip2::write::BzEncoder<BufWriter<W>>),
}

impl<W: Write> Compressor<W> {
    /// Writes to `output`.
    pub fn new(compression: Compression, output: W) -> io::Result<Self> {
        let output = BufWriter::with_capacity(BUFFER_BYTES, output);
        Ok(match compression {
            Compression::None => Self::None(output),
            Compression::Gzip => {
                let level = flate2::Compression::default();
                Self::Gzip(flate2::write::GzEncoder::new(output, level))
            }
            Compression::Zstd => {
                let mut encoder = zstd::stream::write::Encoder::new(output, ZSTD_LEVEL)?;
                encoder.include_checksum(true)?;
                Self::Zstd(encoder)
            }
            Compression::Xz => Self::Xz(liblzma::write::XzEncoder::new(output, XZ_LEVEL)),
            Compression::Bzip2 => {
                let level = bzip2::Compression::best();
                Self::Bzip2(bzip2::write::BzEncoder::new(output, level))
            }
        })
    }

    /// Writes the rest, and returns the output.
    pub fn finish(self) -> io::Result<W> {
        let output = match self {
            Self::None(output) => output,
            Self::Gzip(encoder) => encoder.finish()?,
            Self::Zstd(encoder) => encoder.finish()?,
            Self::Xz(encoder) => encoder.finish()?,
            Self::Bzip2(encoder) => encoder.finish()?,
        };
        output.into_inner().map_err(|error| error.into_error())
    }
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::None(output) => output.write(buffer),
            Self::Gzip(encoder) => encoder.write(buffer),
            Self::Zstd(encoder) => encoder.write(buffer),
            Self::Xz(encoder) => encoder.write(buffer),
            Self::Bzip2(encoder) => encoder.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::None(output) => output.flush(),
            Self::Gzip(encoder) => encoder.flush(),
            Self::Zstd(encoder) => encoder.flush(),
            Self::Xz(encoder) => encoder.flush(),
            Self::Bzip2(encoder) => encoder.flush(),
        }
    }
}

/// Returns the decompressed bytes of `input`.
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
