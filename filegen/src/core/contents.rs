//! Content that was made, by digest, until there is too much of it.
//!
//! Secrets are apart from other content: the same bytes may be in both. A secret is returned only
//! for machines that it was made for.
// tidy: core

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use model::object::{Algorithm, ObjectId};

/// What an entry takes besides its bytes, in bytes.
const ENTRY_BYTES: usize = 300;

/// The content of a file. Each of its digests is computed once.
pub struct Content {
    pub bytes: Box<[u8]>,
    blake3: OnceLock<ObjectId>,
    sha512: OnceLock<ObjectId>,
}

impl std::fmt::Debug for Content {
    /// The bytes may be secret.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Content of {} bytes", self.bytes.len())
    }
}

impl Content {
    #[must_use]
    pub fn new(bytes: impl Into<Box<[u8]>>) -> Arc<Self> {
        let (blake3, sha512) = (OnceLock::new(), OnceLock::new());
        Arc::new(Self { bytes: bytes.into(), blake3, sha512 })
    }

    #[must_use]
    pub fn id(&self, algorithm: Algorithm) -> ObjectId {
        let id = match algorithm {
            Algorithm::Blake3 => &self.blake3,
            Algorithm::Sha512 => &self.sha512,
        };
        *id.get_or_init(|| algorithm.digest(&self.bytes))
    }
}

/// The most recently used content.
#[derive(Debug)]
pub struct Contents {
    bytes_max: usize,
    bytes: usize,
    /// By whether it is secret, and its digest.
    entries: BTreeMap<(bool, ObjectId), Entry>,
    /// The entries by the time of their last use.
    by_use: BTreeMap<u64, (bool, ObjectId)>,
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    content: Arc<Content>,
    used: u64,
    /// The machines that a secret was made for.
    hostnames: BTreeSet<String>,
}

impl Contents {
    /// Returns an empty store that keeps about `bytes_max` bytes.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        let (entries, by_use) = (BTreeMap::new(), BTreeMap::new());
        Self { bytes_max, bytes: 0, entries, by_use, uses: 0 }
    }

    /// Returns the size of what is kept, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps the content `id`, which is not secret.
    pub fn keep(&mut self, id: ObjectId, content: &Arc<Content>) {
        self.add((false, id), content);
        self.shrink();
    }

    /// Keeps the secret `id`, which was made for `hostname`.
    pub fn keep_secret(&mut self, id: ObjectId, content: &Arc<Content>, hostname: &str) {
        let entry = self.add((true, id), content);
        if !entry.hostnames.contains(hostname) {
            entry.hostnames.insert(hostname.to_owned());
            self.bytes += hostname.len() + ENTRY_BYTES;
        }
        self.shrink();
    }

    /// Returns the content `id` if it is kept and is not secret.
    pub fn get(&mut self, id: ObjectId) -> Option<Arc<Content>> {
        self.use_entry((false, id)).map(|entry| Arc::clone(&entry.content))
    }

    /// Returns the secret `id` if it is kept and was made for one of `hostnames`.
    pub fn get_secret<'a>(
        &mut self,
        id: ObjectId,
        hostnames: impl IntoIterator<Item = &'a str>,
    ) -> Option<Arc<Content>> {
        let entry = self.use_entry((true, id))?;
        let is_for_one = hostnames.into_iter().any(|hostname| entry.hostnames.contains(hostname));
        is_for_one.then(|| Arc::clone(&entry.content))
    }

    fn add(&mut self, key: (bool, ObjectId), content: &Arc<Content>) -> &mut Entry {
        if !self.entries.contains_key(&key) {
            self.bytes += content.bytes.len() + ENTRY_BYTES;
            let (content, hostnames) = (Arc::clone(content), BTreeSet::new());
            self.entries.insert(key, Entry { content, used: 0, hostnames });
        }
        self.use_entry(key).expect("it was added")
    }

    /// Makes an entry the most recently used one.
    fn use_entry(&mut self, key: (bool, ObjectId)) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(&key)?;
        self.by_use.remove(&entry.used);
        self.uses += 1;
        entry.used = self.uses;
        self.by_use.insert(self.uses, key);
        Some(entry)
    }

    /// Drops what was not used for the longest time, but not the last entry.
    fn shrink(&mut self) {
        while self.bytes > self.bytes_max && self.entries.len() > 1 {
            let Some((_, key)) = self.by_use.pop_first() else { return };
            let Some(entry) = self.entries.remove(&key) else { return };
            let names: usize = entry.hostnames.iter().map(|name| name.len() + ENTRY_BYTES).sum();
            self.bytes -= entry.content.bytes.len() + ENTRY_BYTES + names;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(content: &Content) -> ObjectId {
        content.id(Algorithm::Blake3)
    }

    #[test]
    fn what_was_not_used_for_long_makes_room() {
        let [a, b, c] = [1, 2, 3].map(|byte| Content::new(vec![byte; 1_000]));
        let mut contents = Contents::new(2 * (1_000 + ENTRY_BYTES));
        contents.keep(id(&a), &a);
        contents.keep(id(&b), &b);
        contents.keep(id(&b), &b);
        assert!(contents.get(id(&a)).is_some());
        contents.keep(id(&c), &c);
        let kept = [&a, &b, &c].map(|content| contents.get(id(content)).is_some());
        assert_eq!(kept, [true, false, true]);
        assert_eq!(contents.bytes(), 2 * (1_000 + ENTRY_BYTES));
        // A single one is kept, whatever its size.
        let large = Content::new(vec![0; 10_000]);
        contents.keep(id(&large), &large);
        let kept = [&a, &c, &large].map(|content| contents.get(id(content)).is_some());
        assert_eq!(kept, [false, false, true]);
    }

    #[test]
    fn a_secret_is_only_for_those_it_was_made_for() {
        let secret = Content::new(*b"password");
        let mut contents = Contents::new(10_000);
        contents.keep_secret(id(&secret), &secret, "a");
        contents.keep_secret(id(&secret), &secret, "b");
        let mut for_one = |hostnames: &[&str]| {
            contents.get_secret(id(&secret), hostnames.iter().copied()).is_some()
        };
        assert!(for_one(&["a"]) && for_one(&["b"]) && for_one(&["c", "b"]));
        assert!(!for_one(&["c"]) && !for_one(&[]));
        assert!(contents.get(id(&secret)).is_none());
        // The same bytes that are no secret elsewhere stay a secret here.
        contents.keep(id(&secret), &secret);
        assert!(contents.get(id(&secret)).is_some());
        assert!(contents.get_secret(id(&secret), ["c"]).is_none());
        contents.bytes_max = 0;
        let other = Content::new(*b"other");
        contents.keep(id(&other), &other);
        assert_eq!(contents.bytes(), 5 + ENTRY_BYTES);
        assert_eq!(format!("{secret:?}"), "Content of 8 bytes");
    }
}
