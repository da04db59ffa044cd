//! One line of an audit log, and the chain that lines make.
//!
//! A line is a JSON object that ends with `,"hash":"<64 hex digits>"}`. The hash is BLAKE3 over all
//! bytes of the line before that, so that neither JSON nor its spaces have to be understood to
//! check it: `sed 's/,"hash":"[^"]*"}$//' | tr -d '\n' | b3sum` does.

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use model::tree::Time;

/// What stands between what is hashed and the hash.
const BEFORE_HASH: &str = ",\"hash\":\"";

/// What stands behind the hash.
const BEHIND_HASH: &str = "\"}";

/// The length of a hash as text.
const HASH_TEXT_BYTES: usize = 64;

/// The longest line that is taken for a record, in bytes. Every text in a record is cut to less.
pub const LINE_BYTES_MAX: usize = 16 << 10;

/// A BLAKE3 hash; as text, 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash([u8; 32]);

impl Hash {
    /// What the first record of a chain has for the one before it.
    pub const NONE: Self = Self([0; 32]);

    /// The hash of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// The first 48 bits as a number: what a metric can carry exactly.
    #[must_use]
    pub fn prefix(self) -> u64 {
        self.0[..6].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// A text that is no hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a hash has 64 hex digits")]
pub struct HashError;

impl FromStr for Hash {
    type Err = HashError;

    fn from_str(text: &str) -> Result<Self, HashError> {
        // One way to write it, so that no byte of a line can be changed unseen.
        let is_plain = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() != HASH_TEXT_BYTES || !text.bytes().all(is_plain) {
            return Err(HashError);
        }
        blake3::Hash::from_hex(text).map(|hash| Self(*hash.as_bytes())).map_err(|_| HashError)
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Where a chain ends: its newest record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The number of the record.
    pub sequence: u64,
    /// Its hash.
    pub hash: Hash,
}

impl fmt::Display for Head {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.sequence, self.hash)
    }
}

/// A call that changes something.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Act {
    /// The user whom a certificate names; `None` for a caller without one.
    pub user: Option<String>,
    /// The groups of the user, separated by commas.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub groups: String,
    /// Where the call comes from.
    pub address: String,
    /// `Service.Method`.
    pub method: String,
    /// What it asks for, in short.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub arguments: String,
    /// Why, as the caller says.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Who, as the caller says.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub who: String,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It was done.
    Done,
    /// The caller may not do it; nothing was changed.
    Denied,
    /// It was refused for another reason, or failed.
    Failed,
    /// The caller went away before the end: it may have been done or not.
    Left,
}

/// What a record tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Event {
    /// A file begins. The first line of each, and nowhere else.
    File {
        /// The number of the file: one more than that of the file before.
        file: u64,
    },
    /// The daemon has started.
    Started {
        /// Its version.
        version: String,
    },
    /// What stands between the record before and this one is no record: the daemon found it when
    /// it started, as a crash in the middle of writing leaves it.
    Torn {
        /// How long it is, in bytes.
        bytes: u64,
        /// Its hash.
        digest: Hash,
        /// How it begins.
        text: String,
    },
    /// A call is about to be carried out.
    Begun(Act),
    /// It was carried out, or not.
    Ended {
        /// The number of the record with which it began.
        of: u64,
        /// `Service.Method`.
        method: String,
        /// How it ended.
        outcome: Outcome,
        /// Why it was not done.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        text: String,
    },
    /// A call was refused before anything was done.
    Denied {
        /// The call.
        #[serde(flatten)]
        act: Act,
        /// Why.
        text: String,
    },
    /// So many calls more were refused.
    DeniedMore {
        /// Whose: a user, or an address.
        caller: String,
        /// How many.
        count: u32,
    },
    /// The daemon changes something by itself.
    Decided {
        /// What it does: `expire-image`.
        decision: String,
        /// With what.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        arguments: String,
        /// Why.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        why: String,
    },
    /// So many records before this one could not be written; the daemon's own log has them.
    Missed {
        /// How many.
        count: u64,
        /// Why the last one could not.
        text: String,
    },
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// One more than that of the record before, over files and restarts.
    pub sequence: u64,
    /// When it was written, in UTC.
    pub time: String,
    /// The daemon.
    pub daemon: String,
    /// What it tells.
    #[serde(flatten)]
    pub event: Event,
    /// The hash of the record before.
    pub previous: Hash,
}

/// A line that is no record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// It does not end as a record does.
    #[error("it is no whole record")]
    Torn,
    /// It is not what was hashed.
    #[error("it was changed: its hash is another one")]
    Changed {
        /// What it says of its place in the chain, if that can be read.
        head: Option<Head>,
    },
    /// Its hash is right, but it is no record of this form.
    #[error("it is hashed, but no record: {text}")]
    Strange {
        /// What is wrong.
        text: String,
    },
}

/// A line whose hash is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sealed {
    /// Its number and hash.
    pub head: Head,
    /// The hash of the record before.
    pub previous: Hash,
    /// What it tells; `None` if that is of a kind that this release does not know.
    pub record: Option<Record>,
}

/// As much of a record as the chain needs.
#[derive(Deserialize)]
struct Place {
    sequence: u64,
    previous: Hash,
}

/// Reads a line, without its line feed.
///
/// # Errors
///
/// [`LineError`].
pub fn open(line: &[u8]) -> Result<Sealed, LineError> {
    let (body, hash) = split(line).ok_or(LineError::Torn)?;
    let text = core::str::from_utf8(body).ok();
    // What was hashed is the object up to the hash.
    let object = text.map(|text| format!("{text}}}"));
    let place = object.as_deref().and_then(|text| serde_json::from_str::<Place>(text).ok());
    if Hash::of(body) != hash {
        let head = place.map(|place| Head { sequence: place.sequence, hash });
        return Err(LineError::Changed { head });
    }
    let (Some(object), Some(place)) = (object, place) else {
        return Err(LineError::Strange {
            text: "its number or the hash before are missing".into(),
        });
    };
    let head = Head { sequence: place.sequence, hash };
    Ok(Sealed { head, previous: place.previous, record: serde_json::from_str(&object).ok() })
}

/// What is hashed, and the hash.
fn split(line: &[u8]) -> Option<(&[u8], Hash)> {
    let rest = line.strip_suffix(BEHIND_HASH.as_bytes())?;
    let (rest, hash) = rest.split_at_checked(rest.len().checked_sub(HASH_TEXT_BYTES)?)?;
    let body = rest.strip_suffix(BEFORE_HASH.as_bytes())?;
    Some((body, core::str::from_utf8(hash).ok()?.parse().ok()?))
}

/// Where new records are put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    daemon: String,
    head: Option<Head>,
}

impl Chain {
    /// The chain of `daemon` that ends with `head`; a new one if that is `None`.
    #[must_use]
    pub fn new(daemon: &str, head: Option<Head>) -> Self {
        Self { daemon: daemon.to_owned(), head }
    }

    /// Its newest record.
    #[must_use]
    pub fn head(&self) -> Option<Head> {
        self.head
    }

    /// Adds a record of `event` at `time`, and gives its line, with the line feed.
    pub fn append(&mut self, time: Time, event: Event) -> String {
        let (sequence, previous) =
            self.head.map_or((1, Hash::NONE), |head| (head.sequence + 1, head.hash));
        let time = stamp(time);
        let daemon = self.daemon.clone();
        let record = Record { sequence, time, daemon, event, previous };
        let mut line = serde_json::to_string(&record).expect("a record is a plain structure");
        line.pop();
        let hash = Hash::of(line.as_bytes());
        line.push_str(&format!("{BEFORE_HASH}{hash}{BEHIND_HASH}\n"));
        self.head = Some(Head { sequence, hash });
        line
    }
}

/// A moment in UTC, to the microsecond.
#[must_use]
pub fn stamp(time: Time) -> String {
    let nanoseconds = i32::try_from(time.nanoseconds).unwrap_or(0);
    match jiff::Timestamp::new(time.seconds, nanoseconds) {
        Ok(stamp) => format!("{stamp:.6}"),
        Err(_) => format!("{} s after 1970", time.seconds),
    }
}
