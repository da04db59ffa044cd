//! One line of an audit log, and the chain of lines.
//!
//! A line is a JSON object that ends with `,"hash":"<64 hex digits>"}`. The hash is BLAKE3 over all
//! bytes of the line before that, so a check need not parse JSON:
//! `sed 's/,"hash":"[^"]*"}$//' | tr -d '\n' | b3sum` computes it.

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use model::tree::Time;

/// The text between the hashed bytes and the hash.
const BEFORE_HASH: &str = ",\"hash\":\"";

/// The text after the hash.
const BEHIND_HASH: &str = "\"}";

/// The length of a hash as text.
const HASH_TEXT_BYTES: usize = 64;

/// The longest line that is read as a record, in bytes. Every text in a record is cut to less.
pub const LINE_BYTES_MAX: usize = 16 << 10;

/// A BLAKE3 hash; as text, 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash([u8; 32]);

impl Hash {
    /// The previous hash of the first record of a chain.
    pub const NONE: Self = Self([0; 32]);

    /// Returns the hash of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Returns the first 48 bits as a number, which a metric can carry exactly.
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

/// A text that is not a hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid hash: expected 64 hex digits")]
pub struct HashError;

impl FromStr for Hash {
    type Err = HashError;

    fn from_str(text: &str) -> Result<Self, HashError> {
        // Only one spelling is accepted, so that any changed byte of a line is noticed.
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

/// The newest record of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainHead {
    /// The number of the record.
    pub sequence: u64,
    pub hash: Hash,
}

impl fmt::Display for ChainHead {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.sequence, self.hash)
    }
}

/// A call that changes something.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditedCall {
    /// The user named by the certificate; `None` without a certificate.
    pub user: Option<String>,
    /// The groups of the user, separated by commas.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub groups: String,
    /// The address of the caller.
    pub address: String,
    /// `Service.Method`.
    pub method: String,
    /// The arguments, shortened.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub arguments: String,
    /// The reason, as the caller gave it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Who the caller claims to be.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub who: String,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CallOutcome {
    /// It was carried out.
    Done,
    /// The caller is not allowed to make it; nothing was changed.
    Denied,
    /// It was refused for another reason, or failed.
    Failed,
    /// The caller disconnected before the end. It may have been carried out or not.
    Left,
}

/// The event that a record describes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum AuditEvent {
    /// Begins a file: the first line of each file, and nowhere else.
    File {
        /// The number of the file: one more than that of the file before.
        file: u64,
    },
    /// The daemon has started.
    Started { version: String },
    /// The bytes between the previous record and this one are not a record: the daemon found them
    /// at its start, such as after a crash during a write.
    Torn {
        /// Their length.
        bytes: u64,
        /// The hash of the record.
        digest: Hash,
        /// Their beginning.
        text: String,
    },
    /// A call is about to be carried out.
    Begun(AuditedCall),
    /// A call has ended.
    Ended {
        /// The number of the record `begun` of the call.
        of: u64,
        /// `Service.Method`.
        method: String,
        outcome: CallOutcome,
        /// Why it was not carried out.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        text: String,
    },
    /// A call was refused before anything was done.
    Denied {
        #[serde(flatten)]
        act: AuditedCall,
        text: String,
    },
    /// More calls were refused than are recorded one by one.
    DeniedMore {
        /// A user, or an address.
        caller: String,
        count: u32,
    },
    /// The daemon changes something by its own decision.
    Decided {
        /// The kind of decision, such as `expire-image`.
        decision: String,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        arguments: String,
        #[serde(default, skip_serializing_if = "String::is_empty")]
        why: String,
    },
    /// Records before this one could not be written; the daemon's own log has them.
    Missed {
        count: u64,
        /// Why the last one could not be written.
        text: String,
    },
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// One more than that of the previous record, across files and restarts.
    pub sequence: u64,
    /// When it was written, in UTC.
    pub time: String,
    pub daemon: String,
    #[serde(flatten)]
    pub event: AuditEvent,
    /// The hash of the previous record.
    pub previous: Hash,
}

/// Why a line is not a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// It does not end like a record.
    #[error("it is no whole record")]
    Torn,
    /// Its content does not match its hash.
    #[error("it was changed: its hash is another one")]
    Changed {
        /// Its number and hash, if they can be read.
        head: Option<ChainHead>,
    },
    /// Its hash is right, but it lacks fields of a record.
    #[error("its hash is right, but its fields are invalid: {text}")]
    Strange { text: String },
}

/// A line whose hash is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedLine {
    pub head: ChainHead,
    /// The hash of the previous record.
    pub previous: Hash,
    /// The record; `None` if its kind is unknown to this release.
    pub record: Option<AuditRecord>,
}

/// The fields of a record that the chain needs.
#[derive(Deserialize)]
struct Place {
    sequence: u64,
    previous: Hash,
}

/// Reads a line, without its line feed, and checks its hash.
pub fn check_line(line: &[u8]) -> Result<CheckedLine, LineError> {
    let (body, hash) = split(line).ok_or(LineError::Torn)?;
    let text = core::str::from_utf8(body).ok();
    // The hashed bytes are the object up to the hash.
    let object = text.map(|text| format!("{text}}}"));
    let place = object.as_deref().and_then(|text| serde_json::from_str::<Place>(text).ok());
    if Hash::of(body) != hash {
        let head = place.map(|place| ChainHead { sequence: place.sequence, hash });
        return Err(LineError::Changed { head });
    }
    let (Some(object), Some(place)) = (object, place) else {
        return Err(LineError::Strange {
            text: "its number or the hash before are missing".into(),
        });
    };
    let head = ChainHead { sequence: place.sequence, hash };
    Ok(CheckedLine { head, previous: place.previous, record: serde_json::from_str(&object).ok() })
}

/// Splits a line into the hashed bytes and the hash.
fn split(line: &[u8]) -> Option<(&[u8], Hash)> {
    let rest = line.strip_suffix(BEHIND_HASH.as_bytes())?;
    let (rest, hash) = rest.split_at_checked(rest.len().checked_sub(HASH_TEXT_BYTES)?)?;
    let body = rest.strip_suffix(BEFORE_HASH.as_bytes())?;
    Some((body, core::str::from_utf8(hash).ok()?.parse().ok()?))
}

/// Appends records to a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    daemon: String,
    head: Option<ChainHead>,
}

impl Chain {
    /// Continues the chain of `daemon` after `head`; starts a new one if that is `None`.
    #[must_use]
    pub fn new(daemon: &str, head: Option<ChainHead>) -> Self {
        Self { daemon: daemon.to_owned(), head }
    }

    /// Returns the newest record.
    #[must_use]
    pub fn head(&self) -> Option<ChainHead> {
        self.head
    }

    /// Appends a record of `event` at `time`. Returns its line, with the line feed.
    pub fn append(&mut self, time: Time, event: AuditEvent) -> String {
        let (sequence, previous) =
            self.head.map_or((1, Hash::NONE), |head| (head.sequence + 1, head.hash));
        let time = timestamp(time);
        let daemon = self.daemon.clone();
        let record = AuditRecord { sequence, time, daemon, event, previous };
        let mut line = serde_json::to_string(&record).expect("a record is a plain structure");
        line.pop();
        let hash = Hash::of(line.as_bytes());
        line.push_str(&format!("{BEFORE_HASH}{hash}{BEHIND_HASH}\n"));
        self.head = Some(ChainHead { sequence, hash });
        line
    }
}

/// Formats a time in UTC, to the microsecond.
#[must_use]
pub fn timestamp(time: Time) -> String {
    let nanoseconds = i32::try_from(time.nanoseconds).unwrap_or(0);
    match jiff::Timestamp::new(time.seconds, nanoseconds) {
        Ok(stamp) => format!("{stamp:.6}"),
        Err(_) => format!("{} s after 1970", time.seconds),
    }
}
