//! Values as bytes: bincode between daemons, JSON for people and scripts.
//!
//! The one file that knows bincode, so that it can be replaced here (`docs/decisions/`). The
//! bincode encoding is little-endian with fixed-size integers; it is pinned by golden bytes.
//! Nothing is allocated for a length before the length was held against the limit, and bytes
//! after the value are an error.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Bytes that are not the value that was expected, or a value that has no such bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The value cannot be encoded.
    #[error("cannot encode {what}: {why}")]
    Encode {
        /// What it is.
        what: &'static str,
        /// What the encoder said.
        why: String,
    },
    /// The bytes are not such a value, or claim a length above the limit.
    #[error("bad {what}: {why}")]
    Decode {
        /// What was expected.
        what: &'static str,
        /// What the decoder said.
        why: String,
    },
    /// There are more bytes than the value has.
    #[error("bad {what}: {extra} bytes follow its end")]
    Trailing {
        /// What was expected.
        what: &'static str,
        /// How many bytes too many.
        extra: usize,
    },
    /// The bytes are more than are accepted.
    #[error("{what} of {length} bytes: at most {limit} are accepted")]
    TooLarge {
        /// What was expected.
        what: &'static str,
        /// How many bytes there are.
        length: usize,
        /// How many are accepted.
        limit: usize,
    },
}

/// How a body is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// For machines.
    Bincode,
    /// For people and scripts.
    Json,
}

impl Encoding {
    /// The content type of such a body.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Bincode => "application/octet-stream",
            Self::Json => "application/json",
        }
    }
}

/// The most that any single decoding may claim, in bytes: a backstop behind the methods' limits.
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

/// Decodes a value of at most `limit` bytes; `what` names it in errors.
///
/// # Errors
///
/// [`CodecError`]; no input makes it panic or allocate more than a small multiple of `limit`.
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
            let (value, used) = bincode::serde::decode_from_slice(bytes, format())
                .map_err(|error| CodecError::Decode { what, why: error.to_string() })?;
            if used < bytes.len() {
                return Err(CodecError::Trailing { what, extra: bytes.len() - used });
            }
            Ok(value)
        }
        Encoding::Json => serde_json::from_slice(bytes)
            .map_err(|error| CodecError::Decode { what, why: error.to_string() }),
    }
}
