//! Object ids: the algorithm and the digest of a file's content or of a directory's encoding.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::Digest as _;

use crate::JsonSchema;

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
    Serialize,
    Deserialize,
    JsonSchema,
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
    UnknownAlgorithm { name: String },
    /// There is no colon, or the digest has the wrong length or is no lower-case hexadecimal.
    #[error("`{text}` is not an object id: expected blake3:<64 hex> or sha512:<128 hex>")]
    BadDigest { text: String },
}

/// Names an object by the digest of its content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema)]
#[schemars(with = "String", extend("pattern" = "^(blake3:[0-9a-f]{64}|sha512:[0-9a-f]{128})$"))]
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

/// An [`ObjectId`] as the files of a tree hold it: a BLAKE3 digest takes no more memory than it
/// needs. SHA-512 takes an allocation.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "ObjectId", into = "ObjectId")]
pub struct CompactId(Compact);

#[derive(Clone, PartialEq, Eq)]
enum Compact {
    Blake3([u8; 32]),
    Sha512(Box<[u8; 64]>),
}

impl CompactId {
    /// The id itself.
    #[must_use]
    pub fn id(&self) -> ObjectId {
        match &self.0 {
            Compact::Blake3(digest) => ObjectId::Blake3(*digest),
            Compact::Sha512(digest) => ObjectId::Sha512(**digest),
        }
    }
}

impl From<ObjectId> for CompactId {
    fn from(id: ObjectId) -> Self {
        Self(match id {
            ObjectId::Blake3(digest) => Compact::Blake3(digest),
            ObjectId::Sha512(digest) => Compact::Sha512(Box::new(digest)),
        })
    }
}

impl From<CompactId> for ObjectId {
    fn from(compact: CompactId) -> Self {
        compact.id()
    }
}

impl fmt::Debug for CompactId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.id(), formatter)
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

/// A sorted set of object ids. A lookup takes logarithmic time; many changes are made in one pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ObjectSet {
    blake3: Box<[[u8; 32]]>,
    sha512: Box<[[u8; 64]]>,
}

impl ObjectSet {
    /// Returns the number of ids.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blake3.len() + self.sha512.len()
    }

    /// Returns true if the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if `id` is in the set.
    #[must_use]
    pub fn contains(&self, id: &ObjectId) -> bool {
        match id {
            ObjectId::Blake3(digest) => self.blake3.binary_search(digest).is_ok(),
            ObjectId::Sha512(digest) => self.sha512.binary_search(digest).is_ok(),
        }
    }

    /// Returns a lookup for ids that are asked for in ascending order. It continues where the last
    /// one has ended, which is faster than [`ObjectSet::contains`] for many ids.
    pub fn ascending(&self) -> impl FnMut(&ObjectId) -> bool {
        let (mut blake3, mut sha512) = (&*self.blake3, &*self.sha512);
        move |id| match id {
            ObjectId::Blake3(digest) => is_next(&mut blake3, digest),
            ObjectId::Sha512(digest) => is_next(&mut sha512, digest),
        }
    }

    /// Returns the ids, sorted.
    pub fn iter(&self) -> impl Iterator<Item = ObjectId> {
        let blake3 = self.blake3.iter().copied().map(ObjectId::Blake3);
        blake3.chain(self.sha512.iter().copied().map(ObjectId::Sha512))
    }

    /// Returns the set without `removed` and with `added`. An id in both is in the result.
    #[must_use]
    pub fn changed(&self, added: &[ObjectId], removed: &[ObjectId]) -> Self {
        let removed: BTreeSet<&ObjectId> = removed.iter().collect();
        let rest = self.iter().filter(|id| !removed.contains(id));
        rest.chain(added.iter().copied()).collect()
    }
}

impl FromIterator<ObjectId> for ObjectSet {
    fn from_iter<Ids: IntoIterator<Item = ObjectId>>(ids: Ids) -> Self {
        let (mut blake3, mut sha512) = (Vec::new(), Vec::new());
        for id in ids {
            match id {
                ObjectId::Blake3(digest) => blake3.push(digest),
                ObjectId::Sha512(digest) => sha512.push(digest),
            }
        }
        Self { blake3: sorted(blake3), sha512: sorted(sha512) }
    }
}

/// Skips the digests before `wanted`, and returns true if it is the next one. Looks at distances
/// that double, because it is near as a rule.
fn is_next<Digest: Ord>(sorted: &mut &[Digest], wanted: &Digest) -> bool {
    let mut end = 1;
    while sorted.get(end - 1).is_some_and(|digest| digest < wanted) {
        end *= 2;
    }
    let near = &sorted[end / 2..end.min(sorted.len())];
    *sorted = &sorted[end / 2 + near.partition_point(|digest| digest < wanted)..];
    sorted.first() == Some(wanted)
}

/// Sorts `digests`, and removes duplicates.
fn sorted<Digest: Ord>(mut digests: Vec<Digest>) -> Box<[Digest]> {
    digests.sort_unstable();
    digests.dedup();
    digests.into_boxed_slice()
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
            let compact = CompactId::from(id);
            assert_eq!((compact.id(), format!("{compact:?}")), (id, format!("{id:?}")));
            let json = serde_json::to_string(&compact).unwrap();
            assert_eq!(json, serde_json::to_string(&id).unwrap());
            assert_eq!(serde_json::from_str::<CompactId>(&json).unwrap(), compact);
        }
    }

    #[test]
    fn refuses_other_texts() {
        let upper = format!("blake3:{}", "AB".repeat(32));
        for text in ["", "blake3", "blake3:", "blake3:ab", "md5:ab", upper.as_str(), "blake3:abc"] {
            assert!(text.parse::<ObjectId>().is_err(), "{text}");
        }
    }

    use proptest::prelude::*;

    fn id(number: u8) -> ObjectId {
        let algorithm =
            if number.is_multiple_of(3) { Algorithm::Sha512 } else { Algorithm::Blake3 };
        algorithm.digest(&[number])
    }

    fn ids() -> impl Strategy<Value = Vec<ObjectId>> {
        prop::collection::vec((0_u8..30).prop_map(id), 0..40)
    }

    fn listed(ids: impl IntoIterator<Item = ObjectId>) -> Vec<ObjectId> {
        ids.into_iter().collect()
    }

    proptest! {
        #[test]
        fn it_holds_what_any_set_would(
            first in ids(),
            added in ids(),
            removed in ids(),
        ) {
            let mut want: BTreeSet<ObjectId> = first.iter().copied().collect();
            let set: ObjectSet = first.into_iter().collect();
            prop_assert_eq!(listed(set.iter()), listed(want.iter().copied()));
            let set = set.changed(&added, &removed);
            want.retain(|id| !removed.contains(id));
            want.extend(added);
            prop_assert_eq!(listed(set.iter()), listed(want.iter().copied()));
            prop_assert_eq!((set.len(), set.is_empty()), (want.len(), want.is_empty()));
            let mut all: Vec<ObjectId> = (0..30).map(id).collect();
            all.sort_unstable();
            let (mut ascending, mut twice) = (set.ascending(), set.ascending());
            for id in &all {
                prop_assert_eq!(set.contains(id), want.contains(id));
                prop_assert_eq!(ascending(id), want.contains(id));
                prop_assert_eq!(twice(id) && twice(id), want.contains(id));
            }
            // Also with gaps between the lookups.
            let mut every_third = set.ascending();
            for id in all.iter().step_by(3) {
                prop_assert_eq!(every_third(id), want.contains(id));
            }
        }
    }
}
