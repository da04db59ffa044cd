//! What programs and web servers gave for machines, how long that is valid, and when a failed one
//! is asked again.
// tidy: core

use core::time::Duration;
use std::collections::BTreeMap;

use api::file_generator::GeneratedContent;
use model::backoff::doubled;
use model::object::{Algorithm, ObjectId};

/// The most results that are kept. Beyond that all are dropped, and content is made again.
const RESULTS_MAX: usize = 200_000;

/// The pause after the first failure.
const RETRY_FIRST: Duration = Duration::from_secs(5);

/// The longest pause after a failure.
const RETRY_LONGEST: Duration = Duration::from_secs(300);

/// What a result is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResultKey {
    /// The version of the generator; that of each path is another.
    pub generator: ObjectId,
    /// The digest of the machine's record.
    pub record: ObjectId,
    pub algorithm: Algorithm,
}

/// A point in time.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// The time of day, in seconds since 1970.
    pub wall_seconds: u64,
    /// The time since the start.
    pub elapsed: Duration,
}

/// Results, and work that is under way, for which `Work` is a handle.
#[derive(Debug)]
pub struct Results<Work> {
    entries: BTreeMap<ResultKey, Entry<Work>>,
}

impl<Work> Default for Results<Work> {
    fn default() -> Self {
        Self { entries: BTreeMap::new() }
    }
}

#[derive(Debug)]
enum Entry<Work> {
    Running {
        work: Work,
        /// How often it failed before.
        failures: u32,
    },
    Made(GeneratedContent),
    Failed {
        why: String,
        failures: u32,
        retry_at: Duration,
    },
}

/// What is known of a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Known<Work> {
    Made(GeneratedContent),
    Failed(String),
    /// It is being made.
    Running(Work),
    /// It must be made now, by the caller.
    Start,
}

impl<Work: Clone> Results<Work> {
    /// Returns what is known of `key`. If nothing is that counts, it is made from now on: `work`
    /// returns the handle for others that ask meanwhile.
    pub fn ask(&mut self, key: ResultKey, now: Now, work: impl FnOnce() -> Work) -> Known<Work> {
        let failures = match self.entries.get(&key) {
            Some(Entry::Running { work, .. }) => return Known::Running(work.clone()),
            Some(Entry::Made(made)) => match made.valid_until_seconds {
                until if until == 0 || now.wall_seconds < until => return Known::Made(*made),
                _ => 0,
            },
            Some(Entry::Failed { why, retry_at, .. }) if now.elapsed < *retry_at => {
                return Known::Failed(why.clone());
            }
            Some(Entry::Failed { failures, .. }) => *failures,
            None => 0,
        };
        if self.entries.len() >= RESULTS_MAX {
            self.entries.retain(|_, entry| matches!(entry, Entry::Running { .. }));
        }
        self.entries.insert(key, Entry::Running { work: work(), failures });
        Known::Start
    }

    /// Takes the result of what was started.
    pub fn finish(&mut self, key: ResultKey, made: Result<GeneratedContent, String>, now: Now) {
        let before = match self.entries.get(&key) {
            Some(Entry::Running { failures, .. }) => *failures,
            _ => 0,
        };
        let entry = match made {
            Ok(made) => Entry::Made(made),
            Err(why) => {
                let failures = before.saturating_add(1);
                let pause = doubled(RETRY_FIRST, RETRY_LONGEST, failures);
                Entry::Failed { why, failures, retry_at: now.elapsed + pause }
            }
        };
        self.entries.insert(key, entry);
    }

    /// Forgets a result whose content is gone.
    pub fn forget(&mut self, key: &ResultKey) {
        self.entries.remove(key);
    }

    /// Forgets the results of generators that are not `used`, except work under way.
    pub fn retain(&mut self, used: impl Fn(&ObjectId) -> bool) {
        self.entries
            .retain(|key, entry| matches!(entry, Entry::Running { .. }) || used(&key.generator));
    }

    /// Returns, for each generator with content that ends after `now`, when the next one does, in
    /// seconds since 1970.
    #[must_use]
    pub fn next_ends(&self, now: Now) -> BTreeMap<ObjectId, u64> {
        let mut ends = BTreeMap::new();
        for (key, entry) in &self.entries {
            if let Entry::Made(GeneratedContent { valid_until_seconds: until, .. }) = entry
                && *until > now.wall_seconds
            {
                let end = ends.entry(key.generator).or_insert(*until);
                *end = (*end).min(*until);
            }
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(seconds: u64) -> Now {
        Now { wall_seconds: 1_000 + seconds, elapsed: Duration::from_secs(seconds) }
    }

    fn key(byte: u8) -> ResultKey {
        let [generator, record] = [byte, 1].map(|byte| Algorithm::Blake3.digest(&[byte]));
        ResultKey { generator, record, algorithm: Algorithm::Blake3 }
    }

    fn made(until: u64) -> GeneratedContent {
        GeneratedContent {
            id: Algorithm::Blake3.digest(b"content"),
            size_bytes: 7,
            valid_until_seconds: until,
            generator: key(1).generator,
            is_secret: true,
        }
    }

    #[test]
    fn work_is_done_once_and_counts_until_it_ends() {
        let mut results = Results::default();
        assert_eq!(results.ask(key(1), now(0), || 7), Known::Start);
        assert_eq!(results.ask(key(1), now(0), || 8), Known::Running(7));
        assert_eq!(results.ask(key(2), now(0), || 9), Known::Start);
        results.finish(key(1), Ok(made(1_010)), now(1));
        results.finish(key(2), Ok(made(0)), now(1));
        assert_eq!(results.ask(key(1), now(9), || 8), Known::Made(made(1_010)));
        assert_eq!(results.next_ends(now(9)), [(key(1).generator, 1_010)].into());
        assert_eq!(results.ask(key(1), now(10), || 8), Known::Start);
        assert_eq!(results.ask(key(2), now(1_000_000), || 8), Known::Made(made(0)));
        results.forget(&key(2));
        assert_eq!(results.ask(key(2), now(10), || 8), Known::Start);
        results.finish(key(2), Ok(made(0)), now(11));
        results.retain(|_| false);
        assert_eq!(results.ask(key(1), now(10), || 9), Known::Running(8));
        assert_eq!(results.ask(key(2), now(11), || 8), Known::Start);
    }

    #[test]
    fn what_fails_is_tried_again_later_and_later() {
        let mut results = Results::default();
        let mut at = 0;
        let mut pauses = Vec::new();
        for _ in 0..9 {
            assert_eq!(results.ask(key(1), now(at), || ()), Known::Start);
            results.finish(key(1), Err("no".into()), now(at));
            let failed = at;
            while results.ask(key(1), now(at), || ()) == Known::Failed("no".into()) {
                at += 1;
            }
            pauses.push(at - failed);
            results.finish(key(1), Err("no".into()), now(at));
            at += 1_000;
        }
        // Each round fails twice.
        assert_eq!(pauses, [5, 20, 80, 300, 300, 300, 300, 300, 300]);
        assert_eq!(results.ask(key(1), now(at), || ()), Known::Start);
        results.finish(key(1), Ok(made(0)), now(at));
        results.forget(&key(1));
        assert_eq!(results.ask(key(1), now(at), || ()), Known::Start);
        results.finish(key(1), Err("no".into()), now(at));
        assert_eq!(results.ask(key(1), now(at + 5), || ()), Known::Start);
    }
}
