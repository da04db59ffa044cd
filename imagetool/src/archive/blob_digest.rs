//! Digests by which the blobs of images are known: `sha256:<64 hex>` or `sha512:<128 hex>`.
//!
//! They differ from object ids: they name what a registry stores, for instance compressed layers,
//! which the image server does not store.
// tidy: core

use std::fmt;
use std::io::{self, Read};

use serde::Deserialize;
use sha2::{Digest as _, Sha256, Sha512};

/// A text that is no digest of a blob.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid digest `{text}`: expected sha256:<64 hex> or sha512:<128 hex>")]
pub struct BlobDigestError {
    text: String,
}

/// The algorithm of a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlobAlgorithm {
    /// SHA-256, as nearly all have it.
    Sha256,
    Sha512,
}

impl BlobAlgorithm {
    /// Returns the name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    fn digits(self) -> usize {
        match self {
            Self::Sha256 => 64,
            Self::Sha512 => 128,
        }
    }
}

/// The digest of a blob. Its text is safe in a path: it has no slash and no dot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct BlobDigest {
    algorithm: BlobAlgorithm,
    hex: String,
}

impl BlobDigest {
    pub fn algorithm(&self) -> BlobAlgorithm {
        self.algorithm
    }

    /// Returns the digits, in lower case.
    pub fn hex(&self) -> &str {
        &self.hex
    }

    /// Returns the digest of `content`.
    pub fn of(algorithm: BlobAlgorithm, content: &[u8]) -> Self {
        let mut hasher = BlobHasher::new(algorithm);
        hasher.update(content);
        hasher.finish()
    }
}

impl TryFrom<String> for BlobDigest {
    type Error = BlobDigestError;

    fn try_from(text: String) -> Result<Self, BlobDigestError> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let found = [BlobAlgorithm::Sha256, BlobAlgorithm::Sha512].into_iter().find_map(|one| {
            let hex = text.strip_prefix(one.name())?.strip_prefix(':')?;
            let sound = hex.len() == one.digits() && hex.bytes().all(is_digit);
            sound.then(|| Self { algorithm: one, hex: hex.to_owned() })
        });
        found.ok_or_else(|| BlobDigestError { text: model::escape::escape(text.as_bytes()) })
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.algorithm.name(), self.hex)
    }
}

/// Computes a [`BlobDigest`].
#[derive(Clone, Debug)]
pub enum BlobHasher {
    /// With SHA-256.
    Sha256(Sha256),
    /// With SHA-512.
    Sha512(Sha512),
}

impl BlobHasher {
    /// Starts with nothing.
    pub fn new(algorithm: BlobAlgorithm) -> Self {
        match algorithm {
            BlobAlgorithm::Sha256 => Self::Sha256(Sha256::new()),
            BlobAlgorithm::Sha512 => Self::Sha512(Sha512::new()),
        }
    }

    /// Adds `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::Sha512(hasher) => hasher.update(bytes),
        }
    }

    /// Returns the digest of all that was added.
    pub fn finish(self) -> BlobDigest {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Sha256(hasher) => {
                BlobDigest { algorithm: BlobAlgorithm::Sha256, hex: hex(&hasher.finalize()) }
            }
            Self::Sha512(hasher) => {
                BlobDigest { algorithm: BlobAlgorithm::Sha512, hex: hex(&hasher.finalize()) }
            }
        }
    }
}

/// Computes the digest of what is read through it, if one is wanted.
pub struct DigestReader<R> {
    input: R,
    hasher: Option<BlobHasher>,
}

impl<R: Read> DigestReader<R> {
    /// Reads `input`, and digests it with `algorithm` unless that is `None`.
    pub fn new(input: R, algorithm: Option<BlobAlgorithm>) -> Self {
        Self { input, hasher: algorithm.map(BlobHasher::new) }
    }

    /// Returns the digest of all that was read.
    pub fn finish(self) -> Option<BlobDigest> {
        self.hasher.map(BlobHasher::finish)
    }
}

impl<R: Read> Read for DigestReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&buffer[..read]);
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_nothing_but_an_algorithm_and_digits() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest = BlobDigest::of(BlobAlgorithm::Sha256, b"");
        assert_eq!(digest.to_string(), format!("sha256:{empty}"));
        assert_eq!(BlobDigest::try_from(digest.to_string()), Ok(digest));
        let long = BlobDigest::of(BlobAlgorithm::Sha512, b"");
        assert_eq!(BlobDigest::try_from(long.to_string()), Ok(long));
        let table = [
            String::new(),
            empty.to_owned(),
            format!("md5:{empty}"),
            format!("sha512:{empty}"),
            format!("sha256:{}", empty.to_uppercase()),
            format!("sha256:{}", &empty[1..]),
            format!("sha256:../{}", &empty[3..]),
            format!("sha256:{empty}\n"),
        ];
        for text in table {
            assert!(BlobDigest::try_from(text.clone()).is_err(), "{text}");
        }
    }
}
