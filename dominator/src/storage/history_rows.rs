//! The rows of the history, and their bytes.
//!
//! The changes of an update are a list that is stored once, under its digest, for all machines that
//! get it; each machine has a small row with the digest. Lists are cut into chunks at places that
//! depend on the paths, so that lists that differ in a few paths share most of their chunks.
// tidy: core

use api::codec::{CodecError, Encoding, decode, encode};
use api::dominator::events::{ChangeReason, PathChange};
use api::subd::UpdateOutcome;
use model::object::Algorithm;
use model::tree::Time;
use serde::{Deserialize, Serialize};

use crate::core::event_filter::path_mark;

/// A digest of a list or a chunk.
pub type ListDigest = [u8; 32];

/// The most changes of a chunk.
const CHUNK_CHANGES_MAX: usize = 4_096;

/// The longest row or chunk that is read, in bytes.
const ROW_BYTES_MAX: usize = 256 << 20;

/// An order as it is recorded, in JSON.
///
/// The audit log of the daemon (`rpc::audit_log`) has the same orders, as calls with their outcome,
/// and is no source from which these rows could be made again: it has five of the hosts or values
/// of an order at most, 400 bytes of a reason (here: 4,096), no position among updates and changes
/// of status, and no brake that a restored backup pulled. The rows are written in the transaction
/// that changes the state; the audit log is chained, so that changes to it are found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrderRow {
    pub time: Time,
    /// The name of the command.
    pub verb: String,
    /// A machine, an image; empty for the whole fleet.
    pub about: String,
    /// What exactly was ordered; empty if `verb` says it. Former releases recorded none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub what: String,
    pub who: String,
    /// Empty if no reason was given.
    pub why: String,
}

/// A change of status, or a gap in the record of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StatusRow {
    Status {
        time: Time,
        host: String,
        status: String,
        detail: String,
    },
    /// Some changes could not be recorded.
    Gap {
        /// When recording was possible again.
        time: Time,
        /// How many are missing.
        lost: u64,
    },
}

impl StatusRow {
    pub fn time(&self) -> Time {
        match self {
            Self::Status { time, .. } | Self::Gap { time, .. } => *time,
        }
    }
}

/// An update that was ordered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateRow {
    pub time: Time,
    pub host: String,
    pub update_id: u64,
    pub image: String,
    /// The former image; empty if it is not known.
    pub former: String,
    /// The digest of its list of changes.
    pub list: ListDigest,
    /// The marks of the paths that it changes.
    pub marks: u64,
    /// How many changes there are for each reason, in the order of [`ChangeReason::ALL`].
    pub reasons: [u32; 3],
}

impl UpdateRow {
    /// True if it changes a path for this reason.
    #[must_use]
    pub fn has(&self, reason: ChangeReason) -> bool {
        let index = ChangeReason::ALL.iter().position(|known| *known == reason);
        index.is_some_and(|index| self.reasons[index] > 0)
    }
}

/// How an update ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndRow {
    /// When the end was recorded.
    pub time: Time,
    pub outcome: UpdateOutcome,
    /// Describes the triggers that failed; empty if none did. The first release knew it not: the
    /// row ends before it if it is empty.
    pub failed_triggers: String,
}

impl EndRow {
    /// Encodes the row.
    pub fn bytes(&self) -> Vec<u8> {
        match &*self.failed_triggers {
            "" => bytes_of(&(self.time, &self.outcome)),
            _ => bytes_of(self),
        }
    }

    /// Decodes a row.
    pub fn of(bytes: &[u8]) -> Result<Self, CodecError> {
        let failed_triggers = String::new();
        match row_of(bytes) {
            Ok((time, outcome)) => Ok(Self { time, outcome, failed_triggers }),
            Err(_) => row_of(bytes),
        }
    }
}

/// An update that was undone because its health check failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UndoneRow {
    pub update_id: u64,
    pub image: String,
    /// What the health check said.
    pub why: String,
}

/// Encodes a row.
pub fn bytes_of(row: &impl Serialize) -> Vec<u8> {
    encode(Encoding::Bincode, "record", row).expect("rows are plain structures")
}

/// Decodes a row.
pub fn row_of<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    decode(Encoding::Bincode, "record", bytes, ROW_BYTES_MAX)
}

/// Returns how many changes a chunk has.
pub fn count_of(chunk: &[u8]) -> u32 {
    let length = chunk.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// The changes of an update, encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeList {
    pub digest: ListDigest,
    /// The chunks in their order, with their digests.
    pub chunks: Vec<(ListDigest, Vec<u8>)>,
    /// See [`UpdateRow::marks`].
    pub marks: u64,
    /// See [`UpdateRow::reasons`].
    pub reasons: [u32; 3],
}

impl ChangeList {
    /// Encodes a list of changes.
    pub fn new(changes: &[PathChange]) -> Self {
        let mut list = Self { digest: [0; 32], chunks: Vec::new(), marks: 0, reasons: [0; 3] };
        let mut start = 0;
        for (index, change) in changes.iter().enumerate() {
            list.marks |= path_mark(&change.path);
            if let Some(reason) = ChangeReason::ALL.iter().position(|known| *known == change.reason)
            {
                list.reasons[reason] += 1;
            }
            let is_cut = digest(change.path.as_bytes())[0] == 0;
            let length = index + 1 - start;
            if is_cut || length == CHUNK_CHANGES_MAX || index + 1 == changes.len() {
                let chunk = bytes_of(&&changes[start..=index]);
                list.chunks.push((digest(&chunk), chunk));
                start = index + 1;
            }
        }
        list.digest = digest(&list.index());
        list
    }

    /// Returns the size of all chunks, in bytes.
    pub fn bytes(&self) -> usize {
        self.chunks.iter().map(|(_, bytes)| bytes.len()).sum()
    }

    /// Returns the digests of the chunks, concatenated.
    pub fn index(&self) -> Vec<u8> {
        self.chunks.iter().flat_map(|(digest, _)| *digest).collect()
    }
}

fn digest(bytes: &[u8]) -> ListDigest {
    let id = Algorithm::Blake3.digest(bytes);
    id.digest().try_into().expect("a BLAKE3 digest has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::dominator::events::PathOperation;
    use model::path::TreePath;

    fn change(path: String, reason: ChangeReason) -> PathChange {
        let path = TreePath::new(path).unwrap();
        let operation = PathOperation::Remove;
        PathChange { path, operation, reason, differs: Vec::new(), old: None, new: None }
    }

    #[test]
    fn rows_have_these_bytes() {
        let time = Time { seconds: 7, nanoseconds: 8 };
        let (host, image, former) = ("h".to_owned(), "i".to_owned(), "f".to_owned());
        let update = UpdateRow {
            time,
            host: host.clone(),
            update_id: 9,
            image,
            former,
            list: [0xaa; 32],
            marks: 1,
            reasons: [1, 2, 3],
        };
        let hex = |bytes: Vec<u8>| -> String {
            bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let when = "070000000000000008000000";
        let one = "0100000000000000";
        let list = "aa".repeat(32);
        let id = "0900000000000000";
        let counts = "010000000200000003000000";
        let expected = format!("{when}{one}68{id}{one}69{one}66{list}{one}{counts}");
        assert_eq!(hex(bytes_of(&update)), expected);
        let (status, detail) = ("s".to_owned(), "d".to_owned());
        let row = StatusRow::Status { time, host, status, detail };
        assert_eq!(hex(bytes_of(&row)), format!("00000000{when}{one}68{one}73{one}64"));
        assert_eq!(row_of::<StatusRow>(&bytes_of(&row)).unwrap(), row);
        let outcome = UpdateOutcome::RolledBack("x".to_owned());
        let ended = format!("{when}02000000{one}78");
        for (failed_triggers, more) in [("", String::new()), ("y", format!("{one}79"))] {
            let failed_triggers = failed_triggers.to_owned();
            let end = EndRow { time, outcome: outcome.clone(), failed_triggers };
            assert_eq!(hex(end.bytes()), format!("{ended}{more}"));
            assert_eq!(EndRow::of(&end.bytes()).unwrap(), end);
        }
    }

    #[test]
    fn lists_that_differ_in_a_path_share_nearly_all_chunks() {
        let all = |extra: Option<&str>| {
            let mut changes: Vec<PathChange> = (0..20_000)
                .map(|number| change(format!("/usr/f{number:05}"), ChangeReason::Image))
                .collect();
            if let Some(path) = extra {
                changes.insert(10_000, change(path.to_owned(), ChangeReason::Drift));
            }
            ChangeList::new(&changes)
        };
        let (one, other) = (all(None), all(Some("/usr/f10000a")));
        assert!(one.chunks.len() > 40, "{} chunks", one.chunks.len());
        let known: Vec<ListDigest> = one.chunks.iter().map(|(digest, _)| *digest).collect();
        let new = other.chunks.iter().filter(|(digest, _)| !known.contains(digest)).count();
        assert!(new <= 2, "{new} new chunks");
        assert_eq!((one.reasons, other.reasons), ([0, 20_000, 0], [1, 20_000, 0]));
        assert_eq!(all(None), one);
        let read: Vec<PathChange> = other
            .chunks
            .iter()
            .flat_map(|(_, bytes)| row_of::<Vec<PathChange>>(bytes).unwrap())
            .collect();
        assert_eq!(ChangeList::new(&read), other);
        let counts = other.chunks.iter().map(|(_, bytes)| count_of(bytes));
        assert_eq!(counts.sum::<u32>(), 20_001);
        assert_eq!(ChangeList::new(&[]).chunks, []);
    }
}
