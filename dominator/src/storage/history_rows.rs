//! Records as they are stored: what the bytes in the database mean.
//!
//! What an update changes is a list that is stored once, under its digest, however many machines
//! get it; each machine has a small row that names the list. A list is cut into chunks where the
//! paths say so, so that lists that differ in a few paths share most of their chunks.
// tidy: core

use api::codec::{CodecError, Encoding, decode, encode};
use api::dominator::events::{PathChange, Reason};
use api::subd::Outcome;
use model::object::Algorithm;
use model::tree::Time;
use serde::{Deserialize, Serialize};

use crate::core::event_filter::mark;

/// A digest of a list or a chunk.
pub type Digest = [u8; 32];

/// The most changes of a chunk.
const CHUNK_CHANGES_MAX: usize = 4_096;

/// The longest row or chunk that is read back, in bytes.
const ROW_BYTES_MAX: usize = 256 << 20;

/// A change of a machine's status, or that some of them are not on record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StatusRow {
    /// The machine has another status.
    Status {
        /// When.
        time: Time,
        /// Which machine.
        host: String,
        /// Which status.
        status: String,
        /// In words.
        detail: String,
    },
    /// Some could not be recorded.
    Gap {
        /// When that was over.
        time: Time,
        /// How many.
        lost: u64,
    },
}

impl StatusRow {
    /// When it was.
    #[must_use]
    pub fn time(&self) -> Time {
        match self {
            Self::Status { time, .. } | Self::Gap { time, .. } => *time,
        }
    }
}

/// An update that was ordered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateRow {
    /// When.
    pub time: Time,
    /// Of which machine.
    pub host: String,
    /// The id by which the sub knows it.
    pub update_id: u64,
    /// The image that it brings.
    pub image: String,
    /// The image before it; empty if none is known.
    pub former: String,
    /// What it changes.
    pub list: Digest,
    /// The marks of the paths that it changes.
    pub marks: u64,
    /// How many changes there are for each reason, in the order of [`Reason::ALL`].
    pub reasons: [u32; 3],
}

impl UpdateRow {
    /// True if it changes a path for that reason.
    #[must_use]
    pub fn has(&self, reason: Reason) -> bool {
        let index = Reason::ALL.iter().position(|known| *known == reason);
        index.is_some_and(|index| self.reasons[index] > 0)
    }
}

/// How an update ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndRow {
    /// When that was recorded.
    pub time: Time,
    /// How.
    pub outcome: Outcome,
}

/// The bytes of a row.
///
/// # Panics
///
/// Never: rows are plain structures.
#[must_use]
pub fn bytes_of(row: &impl Serialize) -> Vec<u8> {
    encode(Encoding::Bincode, "record", row).expect("rows are plain structures")
}

/// The row that these are the bytes of.
///
/// # Errors
///
/// If they are not those of such a row.
pub fn row_of<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    decode(Encoding::Bincode, "record", bytes, ROW_BYTES_MAX)
}

/// How many changes a chunk has.
#[must_use]
pub fn count_of(chunk: &[u8]) -> u32 {
    let length = chunk.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    u32::try_from(length).unwrap_or(u32::MAX)
}

/// What an update changes, ready to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List {
    /// Names it.
    pub digest: Digest,
    /// The chunks in their order, by digest.
    pub chunks: Vec<(Digest, Vec<u8>)>,
    /// See [`UpdateRow::marks`].
    pub marks: u64,
    /// See [`UpdateRow::reasons`].
    pub reasons: [u32; 3],
}

impl List {
    /// The list of these changes.
    #[must_use]
    pub fn of(changes: &[PathChange]) -> Self {
        let mut list = Self { digest: [0; 32], chunks: Vec::new(), marks: 0, reasons: [0; 3] };
        let mut start = 0;
        for (index, change) in changes.iter().enumerate() {
            list.marks |= mark(&change.path);
            if let Some(reason) = Reason::ALL.iter().position(|known| *known == change.reason) {
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

    /// How long its chunks are together.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.chunks.iter().map(|(_, bytes)| bytes.len()).sum()
    }

    /// The digests of its chunks, one after the other.
    #[must_use]
    pub fn index(&self) -> Vec<u8> {
        self.chunks.iter().flat_map(|(digest, _)| *digest).collect()
    }
}

fn digest(bytes: &[u8]) -> Digest {
    let id = Algorithm::Blake3.digest(bytes);
    id.digest().try_into().expect("a BLAKE3 digest has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::dominator::events::Operation;
    use model::path::TreePath;

    fn change(path: String, reason: Reason) -> PathChange {
        let path = TreePath::new(path).unwrap();
        let operation = Operation::Remove;
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
        let end = EndRow { time, outcome: Outcome::RolledBack("x".to_owned()) };
        assert_eq!(hex(bytes_of(&end)), format!("{when}02000000{one}78"));
    }

    #[test]
    fn lists_that_differ_in_a_path_share_nearly_all_chunks() {
        let all = |extra: Option<&str>| {
            let mut changes: Vec<PathChange> = (0..20_000)
                .map(|number| change(format!("/usr/f{number:05}"), Reason::Image))
                .collect();
            if let Some(path) = extra {
                changes.insert(10_000, change(path.to_owned(), Reason::Drift));
            }
            List::of(&changes)
        };
        let (one, other) = (all(None), all(Some("/usr/f10000a")));
        assert!(one.chunks.len() > 40, "{} chunks", one.chunks.len());
        let known: Vec<Digest> = one.chunks.iter().map(|(digest, _)| *digest).collect();
        let new = other.chunks.iter().filter(|(digest, _)| !known.contains(digest)).count();
        assert!(new <= 2, "{new} new chunks");
        assert_eq!((one.reasons, other.reasons), ([0, 20_000, 0], [1, 20_000, 0]));
        assert_eq!(all(None), one);
        let read: Vec<PathChange> = other
            .chunks
            .iter()
            .flat_map(|(_, bytes)| row_of::<Vec<PathChange>>(bytes).unwrap())
            .collect();
        assert_eq!(List::of(&read), other);
        let counts = other.chunks.iter().map(|(_, bytes)| count_of(bytes));
        assert_eq!(counts.sum::<u32>(), 20_001);
        assert_eq!(List::of(&[]).chunks, []);
    }
}
