//! What one fetch has received, from which sources, and the complaints about them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::subd::Complaint;
use model::object::ObjectId;

/// The most complaints that are told; further ones are only logged.
const COMPLAINTS_MAX: usize = 16;

/// The longest text of a complaint, in characters.
const TEXT_CHARACTERS_MAX: usize = 500;

/// A stretch of an object that came from one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    /// Who sent it; `None` for what came in an earlier fetch.
    pub source: Option<Arc<str>>,
    /// Where it ends, in bytes.
    pub end: u64,
    /// The digest of the object as it came, up to there.
    pub digest: ObjectId,
}

/// What has arrived so far.
#[derive(Default)]
pub(super) struct Ledger {
    pub objects: AtomicU64,
    /// Bytes that arrived and were kept.
    pub bytes: AtomicU64,
    /// Objects that were on the machine.
    pub reused: AtomicU64,
    arrived: Mutex<Vec<ObjectId>>,
    complaints: Mutex<Vec<Complaint>>,
    origins: Mutex<BTreeMap<ObjectId, Vec<Origin>>>,
    suspects: Mutex<BTreeMap<ObjectId, Vec<Origin>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one insertion or removal, so a panic cannot leave it half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ledger {
    /// Notes that `id` is in the cache.
    pub fn arrive(&self, id: ObjectId) {
        lock(&self.origins).remove(&id);
        lock(&self.arrived).push(id);
    }

    /// Takes the objects that arrived since it was asked last.
    pub fn take_arrived(&self) -> Vec<ObjectId> {
        std::mem::take(&mut *lock(&self.arrived))
    }

    /// Objects and bytes that arrived.
    pub fn amount(&self) -> (u64, u64) {
        (self.objects.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// Notes that bytes which had arrived were not kept.
    pub fn lose(&self, bytes: u64) {
        let less = |sum: u64| Some(sum.saturating_sub(bytes));
        // It always gives a value, so it always succeeds.
        let _previous = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Notes what is wrong with `source`, once.
    pub fn complain(&self, source: &str, lies: bool, text: &str) {
        let text: String = text.chars().take(TEXT_CHARACTERS_MAX).collect();
        if lies {
            tracing::error!(source, text, "a source sent wrong content");
        } else {
            tracing::warn!(source, text, "a source failed");
        }
        let complaint = Complaint { source: source.to_owned(), lies, text };
        let mut complaints = lock(&self.complaints);
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
        lock(&self.complaints).iter().any(|known| known.lies && known.source == source)
    }

    /// All complaints, in their order.
    pub fn complaints(&self) -> Vec<Complaint> {
        lock(&self.complaints).clone()
    }

    /// Takes what is known of where the partial of `id` came from.
    pub fn take_origins(&self, id: &ObjectId) -> Vec<Origin> {
        lock(&self.origins).remove(id).unwrap_or_default()
    }

    /// Notes where the partial of `id` came from.
    pub fn put_origins(&self, id: ObjectId, origins: Vec<Origin>) {
        lock(&self.origins).insert(id, origins);
    }

    /// Notes that the stretches of `id` do not make up the object: some are wrong.
    pub fn suspect(&self, id: ObjectId, origins: Vec<Origin>) {
        lock(&self.suspects).insert(id, origins);
    }

    /// The stretches of `id` of which some were wrong.
    pub fn suspects(&self, id: &ObjectId) -> Vec<Origin> {
        lock(&self.suspects).get(id).cloned().unwrap_or_default()
    }

    /// The object `id` has come, and had the digests `right` where its suspect stretches end: the
    /// first that differs is wrong.
    pub fn convict(&self, id: &ObjectId, right: &[ObjectId]) {
        let Some(suspects) = lock(&self.suspects).remove(id) else { return };
        let wrong = suspects.iter().zip(right).find(|(suspect, right)| suspect.digest != **right);
        if let Some((Origin { source: Some(source), end, .. }, _)) = wrong {
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
        let ledger = Ledger::default();
        for number in 0..40 {
            ledger.complain(&format!("host{number}"), false, &"x".repeat(2_000));
            ledger.complain("liar", true, "wrong");
        }
        assert!(ledger.is_liar("liar") && !ledger.is_liar("host1"));
        for number in 0..40 {
            ledger.complain(&format!("liar{number}"), true, "wrong");
        }
        let complaints = ledger.complaints();
        assert_eq!(complaints.len(), COMPLAINTS_MAX);
        assert!(complaints.iter().all(|complaint| complaint.lies), "{complaints:?}");
        assert!(ledger.is_liar("liar"));
    }

    #[test]
    fn the_first_wrong_stretch_is_to_blame() {
        let digest = |text: &str| Algorithm::Blake3.digest(text.as_bytes());
        let id = digest("abcdef");
        let origin = |source: Option<&str>, end, text: &str| Origin {
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
            let ledger = Ledger::default();
            let ends = [2, 4, 6];
            let origins = (0..3).map(|at| origin(sources[at], ends[at], texts[at])).collect();
            ledger.suspect(id, origins);
            ledger.convict(&id, &right);
            let named: Vec<String> =
                ledger.complaints().into_iter().map(|complaint| complaint.source).collect();
            assert_eq!(named.first().map(String::as_str), liar, "{texts:?}");
        }
    }
}
