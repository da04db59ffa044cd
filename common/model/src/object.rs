//! Object ids: which algorithm, and the digest of a file's content or of a directory's encoding.

pub mod set;

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, Serializer};
use sha2::Digest as _;

/// A digest algorithm.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    /// BLAKE3 with 32 bytes of output: the default, many times faster than SHA-512.
    #[default]
    Blake3,
    /// SHA-512 (FIPS 180-4).
    Sha512,
}

impl Algorithm {
    /// The code of the algorithm in encodings: 1 or 2.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Blake3 => 1,
            Self::Sha512 => 2,
        }
    }

    /// The algorithm with that code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Blake3),
            2 => Some(Self::Sha512),
            _ => None,
        }
    }

    /// The length of a digest, in bytes.
    #[must_use]
    pub fn digest_bytes(self) -> usize {
        match self {
            Self::Blake3 => 32,
            Self::Sha512 => 64,
        }
    }

    /// The name in texts: `blake3` or `sha512`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Blake3 => "blake3",
            Self::Sha512 => "sha512",
        }
    }

    /// The id of an object that holds exactly `content`.
    #[must_use]
    pub fn digest(self, content: &[u8]) -> ObjectId {
        let mut hasher = Hasher::new(self);
        hasher.update(content);
        hasher.finish()
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = ObjectIdError;

    fn from_str(text: &str) -> Result<Self, ObjectIdError> {
        match text {
            "blake3" => Ok(Self::Blake3),
            "sha512" => Ok(Self::Sha512),
            _ => Err(ObjectIdError::UnknownAlgorithm { name: text.to_owned() }),
        }
    }
}

/// A text that is not an object id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObjectIdError {
    /// The part before the colon is no known algorithm.
    #[error("unknown digest algorithm `{name}`: use blake3 or sha512")]
    UnknownAlgorithm {
        /// What was given.
        name: String,
    },
    /// There is no colon, or the digest has the wrong length or is no lower-case hexadecimal.
    #[error("`{text}` is not an object id: expected blake3:<64 hex> or sha512:<128 hex>")]
    BadDigest {
        /// What was given.
        text: String,
    },
}

/// Names an object by the digest of its content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectId {
    /// A BLAKE3 digest.
    Blake3([u8; 32]),
    /// A SHA-512 digest.
    Sha512([u8; 64]),
}

impl ObjectId {
    /// The algorithm that made the digest.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        match self {
            Self::Blake3(_) => Algorithm::Blake3,
            Self::Sha512(_) => Algorithm::Sha512,
        }
    }

    /// The digest: 32 or 64 bytes.
    #[must_use]
    pub fn digest(&self) -> &[u8] {
        match self {
            Self::Blake3(digest) => digest,
            Self::Sha512(digest) => digest,
        }
    }

    /// Takes `digest` as one of `algorithm`; `None` if its length is another.
    #[must_use]
    pub fn from_digest(algorithm: Algorithm, digest: &[u8]) -> Option<Self> {
        match algorithm {
            Algorithm::Blake3 => digest.try_into().ok().map(Self::Blake3),
            Algorithm::Sha512 => digest.try_into().ok().map(Self::Sha512),
        }
    }

    /// The digest in lower-case hexadecimal, without the algorithm.
    #[must_use]
    pub fn hex(&self) -> String {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = String::with_capacity(2 * self.digest().len());
        for byte in self.digest() {
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        text
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.algorithm(), self.hex())
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.algorithm(), &self.hex()[..12])
    }
}

impl FromStr for ObjectId {
    type Err = ObjectIdError;

    fn from_str(text: &str) -> Result<Self, ObjectIdError> {
        let bad = || ObjectIdError::BadDigest { text: text.to_owned() };
        let (algorithm, hex) = text.split_once(':').ok_or_else(bad)?;
        let algorithm: Algorithm = algorithm.parse()?;
        let value = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        let digest: Option<Vec<u8>> = hex
            .as_bytes()
            .chunks(2)
            .map(|pair| match pair {
                [high, low] => Some(value(*high)? << 4 | value(*low)?),
                _ => None,
            })
            .collect();
        digest.and_then(|digest| Self::from_digest(algorithm, &digest)).ok_or_else(bad)
    }
}

impl Serialize for ObjectId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return serializer.collect_str(self);
        }
        let mut bytes = Vec::with_capacity(65);
        bytes.push(self.algorithm().code());
        bytes.extend_from_slice(self.digest());
        serializer.serialize_bytes(&bytes)
    }
}

impl<'de> Deserialize<'de> for ObjectId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            return String::deserialize(deserializer)?.parse().map_err(D::Error::custom);
        }
        let bytes = crate::escape::deserialize_bytes(deserializer)?;
        bytes
            .split_first()
            .and_then(|(&code, digest)| Self::from_digest(Algorithm::from_code(code)?, digest))
            .ok_or_else(|| D::Error::custom("not an object id"))
    }
}

/// Hashes content that comes in pieces.
pub struct Hasher(State);

enum State {
    Blake3(Box<blake3::Hasher>),
    Sha512(Box<sha2::Sha512>),
}

impl Hasher {
    /// Starts a digest.
    #[must_use]
    pub fn new(algorithm: Algorithm) -> Self {
        Self(match algorithm {
            Algorithm::Blake3 => State::Blake3(Box::new(blake3::Hasher::new())),
            Algorithm::Sha512 => State::Sha512(Box::new(sha2::Sha512::new())),
        })
    }

    /// Adds `content` to the end.
    pub fn update(&mut self, content: &[u8]) {
        match &mut self.0 {
            State::Blake3(hasher) => {
                hasher.update(content);
            }
            State::Sha512(hasher) => hasher.update(content),
        }
    }

    /// The id of all content so far.
    #[must_use]
    pub fn finish(&self) -> ObjectId {
        match &self.0 {
            State::Blake3(hasher) => ObjectId::Blake3(*hasher.finalize().as_bytes()),
            State::Sha512(hasher) => ObjectId::Sha512(hasher.clone().finalize().into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_known_digests_hold() {
        // The empty input, from the BLAKE3 paper's test vectors and FIPS 180-4 examples.
        let blake3 = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        let sha512 = "sha512:cf83e1357eefb8bdf1542850d66d8007d620e4050b5715dc83f4a921d36ce9ce\
                      47d0d13c5d85f2b0ff8318d2877eec2f63b931bd47417a81a538327af927da3e";
        for (algorithm, text) in [(Algorithm::Blake3, blake3), (Algorithm::Sha512, sha512)] {
            let id = algorithm.digest(b"");
            assert_eq!(id.to_string(), text);
            assert_eq!(text.parse::<ObjectId>().unwrap(), id);
        }
    }

    #[test]
    fn refuses_other_texts() {
        let upper = format!("blake3:{}", "AB".repeat(32));
        for text in ["", "blake3", "blake3:", "blake3:ab", "md5:ab", upper.as_str(), "blake3:abc"] {
            assert!(text.parse::<ObjectId>().is_err(), "{text}");
        }
    }
}
