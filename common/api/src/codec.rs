//! Encodes values: as bincode between daemons, as JSON for people and scripts.
//!
//! This is the only file that knows bincode, so that it can be replaced here (`docs/decisions/`).
//! The bincode encoding is little-endian with fixed-size integers; golden tests pin it. Memory is
//! allocated only after a length was compared with that of the input, and bytes after the value are
//! an error.

use bincode::de::read::Reader;
use bincode::de::{Decode as _, Decoder as _, DecoderImpl};
use bincode::error::DecodeError;
use bincode::serde::Compat;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why a value cannot be encoded or decoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The value cannot be encoded.
    #[error("cannot encode {what}: {why}")]
    Encode {
        /// The name of the value.
        what: &'static str,
        /// The error of the encoder.
        why: String,
    },
    /// The bytes are not such a value, or claim a length above the limit.
    #[error("bad {what}: {why}")]
    Decode {
        /// The name of the value.
        what: &'static str,
        /// The error of the decoder.
        why: String,
    },
    /// Bytes follow the end of the value.
    #[error("bad {what}: {extra} bytes follow its end")]
    Trailing {
        /// The name of the value.
        what: &'static str,
        extra: usize,
    },
    /// There are more bytes than the limit.
    #[error("{what} of {length} bytes: at most {limit} are accepted")]
    TooLarge {
        /// The name of the value.
        what: &'static str,
        length: usize,
        limit: usize,
    },
}

/// How a body is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Between daemons.
    Bincode,
    /// For people and scripts.
    Json,
}

impl Encoding {
    /// Returns the content type of such a body.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Bincode => "application/octet-stream",
            Self::Json => "application/json",
        }
    }
}

/// The largest limit of any decoding, in bytes, whatever the method allows.
const CLAIM_BYTES_MAX: usize = 256 << 20;

fn format() -> impl bincode::config::Config {
    bincode::config::standard()
        .with_little_endian()
        .with_fixed_int_encoding()
        .with_limit::<CLAIM_BYTES_MAX>()
}

/// Encodes `value`; `what` names it in errors.
///
/// # Errors
///
/// [`CodecError::Encode`] for a value that has no encoding (in JSON, a map with odd keys).
pub fn encode<T: Serialize>(
    encoding: Encoding,
    what: &'static str,
    value: &T,
) -> Result<Vec<u8>, CodecError> {
    match encoding {
        Encoding::Bincode => bincode::serde::encode_to_vec(value, format())
            .map_err(|error| CodecError::Encode { what, why: error.to_string() }),
        Encoding::Json => serde_json::to_vec(value)
            .map_err(|error| CodecError::Encode { what, why: error.to_string() }),
    }
}

/// Returns how many bytes `value` takes as bincode, without making them; `what` names it in errors.
///
/// # Errors
///
/// As [`encode`].
pub fn length(what: &'static str, value: &impl Serialize) -> Result<usize, CodecError> {
    let mut counter = bincode::enc::write::SizeWriter::default();
    bincode::serde::encode_into_writer(value, &mut counter, format())
        .map_err(|error| CodecError::Encode { what, why: error.to_string() })?;
    Ok(counter.bytes_written)
}

/// What is left of the bytes that are decoded.
struct Rest<'bytes>(&'bytes [u8]);

impl Reader for Rest<'_> {
    #[inline]
    fn read(&mut self, bytes: &mut [u8]) -> Result<(), DecodeError> {
        let Some((read, rest)) = self.0.split_at_checked(bytes.len()) else {
            let additional = bytes.len() - self.0.len();
            return Err(DecodeError::UnexpectedEnd { additional });
        };
        bytes.copy_from_slice(read);
        self.0 = rest;
        Ok(())
    }
}

/// Decodes a value of at most [`CLAIM_BYTES_MAX`] bytes. Returns also how many bytes follow it.
///
/// bincode allocates the memory of a text before it reads it, if its length is within the limit.
/// The limit is a constant. So that a length is compared with that of `bytes`, the rest of the
/// limit is claimed first.
fn from_bincode<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, usize), DecodeError> {
    let mut decoder = DecoderImpl::new(Rest(bytes), format(), ());
    decoder.claim_bytes_read(CLAIM_BYTES_MAX.saturating_sub(bytes.len()))?;
    let Compat(value) = Compat::decode(&mut decoder)?;
    Ok((value, decoder.reader().0.len()))
}

/// Decodes a value of at most `limit` bytes; `what` names it in errors.
///
/// # Errors
///
/// [`CodecError`], except that of encoding. No input causes a panic, or allocates more than a small
/// multiple of its length.
pub fn decode<T: DeserializeOwned>(
    encoding: Encoding,
    what: &'static str,
    bytes: &[u8],
    limit: usize,
) -> Result<T, CodecError> {
    if bytes.len() > limit {
        return Err(CodecError::TooLarge { what, length: bytes.len(), limit });
    }
    match encoding {
        Encoding::Bincode => {
            let (value, extra) = from_bincode(bytes)
                .map_err(|error| CodecError::Decode { what, why: error.to_string() })?;
            if extra > 0 { Err(CodecError::Trailing { what, extra }) } else { Ok(value) }
        }
        Encoding::Json => serde_json::from_slice(bytes)
            .map_err(|error| CodecError::Decode { what, why: error.to_string() }),
    }
}
