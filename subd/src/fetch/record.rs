//! The record of one fetch: what was received from which sources, and the complaints about them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use api::subd::Complaint;
use model::lock::locked;
use model::object::ObjectId;

/// The most complaints that are reported. Further ones are only logged.
const COMPLAINTS_MAX: usize = 16;

/// The longest text of a complaint, in characters.
const TEXT_CHARACTERS_MAX: usize = 500;

/// A part of an object that came from one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// The source; `None` for what came in an earlier fetch.
    pub source: Option<Arc<str>>,
    /// Where it ends, in bytes.
    pub end: u64,
    /// The digest of the object up to there.
    pub digest: ObjectId,
}

/// What was received so far.
#[derive(Default)]
pub(super) struct FetchRecord {
    pub objects: AtomicU64,
    /// Bytes that were received and kept.
    pub bytes: AtomicU64,
    /// Objects that were copied from files of the machine.
    pub reused: AtomicU64,
    arrived: Mutex<Vec<ObjectId>>,
    complaints: Mutex<Vec<Complaint>>,
    segments: Mutex<BTreeMap<ObjectId, Vec<Segment>>>,
    suspects: Mutex<BTreeMap<ObjectId, Vec<Segment>>>,
}

impl FetchRecord {
    /// Records that `id` is in the cache.
    pub fn arrive(&self, id: ObjectId) {
        locked(&self.segments).remove(&id);
        locked(&self.arrived).push(id);
    }

    /// Takes the objects that arrived since the last call.
    pub fn take_arrived(&self) -> Vec<ObjectId> {
        std::mem::take(&mut *locked(&self.arrived))
    }

    /// Returns the numbers of objects and bytes that were received.
    pub fn amount(&self) -> (u64, u64) {
        (self.objects.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// Records that received bytes were not kept.
    pub fn lose(&self, bytes: u64) {
        let less = |sum: u64| Some(sum.saturating_sub(bytes));
        // The closure always returns a value, so this always succeeds.
        let _previous = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Records a complaint about `source`, once.
    pub fn complain(&self, source: &str, lies: bool, text: &str) {
        let text: String = text.chars().take(TEXT_CHARACTERS_MAX).collect();
        if lies {
            tracing::error!(source, text, "a source sent wrong content");
        } else {
            tracing::warn!(source, text, "a source failed");
        }
        let complaint = Complaint { source: source.to_owned(), lies, text };
        let mut complaints = locked(&self.complaints);
        if complaints.contains(&complaint) {
            return;
        }
        if complaints.len() == COMPLAINTS_MAX {
            // Wrong content is more important than a failure.
            match complaints.iter().rposition(|old| !old.lies).filter(|_| lies) {
                Some(place) => drop(complaints.remove(place)),
                None => return,
            }
        }
        complaints.push(complaint);
    }

    /// True if `source` sent wrong content.
    pub fn is_liar(&self, source: &str) -> bool {
        locked(&self.complaints).iter().any(|known| known.lies && known.source == source)
    }

    /// Returns all complaints in their order.
    pub fn complaints(&self) -> Vec<Complaint> {
        locked(&self.complaints).clone()
    }

    /// Takes the segments of the partial of `id`.
    pub fn take_segments(&self, id: &ObjectId) -> Vec<Segment> {
        locked(&self.segments).remove(id).unwrap_or_default()
    }

    /// Records the segments of the partial of `id`.
    pub fn put_segments(&self, id: ObjectId, segments: Vec<Segment>) {
        locked(&self.segments).insert(id, segments);
    }

    /// Records that the segments of `id` do not make up the object: some are wrong.
    pub fn suspect(&self, id: ObjectId, segments: Vec<Segment>) {
        locked(&self.suspects).insert(id, segments);
    }

    /// Returns the segments of `id` of which some were wrong.
    pub fn suspects(&self, id: &ObjectId) -> Vec<Segment> {
        locked(&self.suspects).get(id).cloned().unwrap_or_default()
    }

    /// Finds the wrong segment: the object `id` was received and has the digests `right` where its
    /// suspect segments end. The first segment whose digest differs is wrong.
    pub fn convict(&self, id: &ObjectId, right: &[ObjectId]) {
        let Some(suspects) = locked(&self.suspects).remove(id) else { return };
        let wrong_segment =
            suspects.iter().zip(right).find(|(suspect, right)| suspect.digest != **right);
        if let Some((Segment { source: Some(source), end, .. }, _)) = wrong_segment {
            let text = format!("what it sent of object {id}, up to byte {end}, was wrong");
            self.complain(source, true, &text);
        }
    }
}

#[cfg(test)]
mod tests {
    use model::object::Algorithm;

    use super::*;

    #[test]
    fn complaints_are_bounded_and_lies_go_first() {
        let record = FetchRecord::default();
        for number in 0..40 {
            record.complain(&format!("host{number}"), false, &"x".repeat(2_000));
            record.complain("liar", true, "wrong");
        }
        assert!(record.is_liar("liar") && !record.is_liar("host1"));
        for number in 0..40 {
            record.complain(&format!("liar{number}"), true, "wrong");
        }
        let complaints = record.complaints();
        assert_eq!(complaints.len(), COMPLAINTS_MAX);
        assert!(complaints.iter().all(|complaint| complaint.lies), "{complaints:?}");
        assert!(record.is_liar("liar"));
    }

    #[test]
    fn the_first_wrong_stretch_is_to_blame() {
        let digest = |text: &str| Algorithm::Blake3.digest(text.as_bytes());
        let id = digest("abcdef");
        let segment = |source: Option<&str>, end, text: &str| Segment {
            source: source.map(Arc::from),
            end,
            digest: digest(text),
        };
        let right = [digest("ab"), digest("abcd"), id];
        let table = [
            ([Some("a"), Some("b"), Some("c")], ["ab", "abxx", "abxxef"], Some("b")),
            ([Some("a"), Some("b"), Some("c")], ["xx", "xxcd", "xxcdef"], Some("a")),
            ([Some("a"), Some("b"), Some("c")], ["ab", "abcd", "abcdxx"], Some("c")),
            ([None, Some("b"), Some("c")], ["xx", "xxcd", "xxcdef"], None),
        ];
        for (sources, texts, liar) in table {
            let record = FetchRecord::default();
            let ends = [2, 4, 6];
            let segments = (0..3).map(|at| segment(sources[at], ends[at], texts[at])).collect();
            record.suspect(id, segments);
            record.convict(&id, &right);
            let named: Vec<String> =
                record.complaints().into_iter().map(|complaint| complaint.source).collect();
            assert_eq!(named.first().map(String::as_str), liar, "{texts:?}");
        }
    }
}
