//! How many refused calls are recorded one by one.
//!
//! Whoever may do nothing here can still call. So that they cannot fill the log, or push out of it
//! what others did, only some refusals of each caller and minute are recorded; the others are
//! counted, and the count is recorded when the minute is over.
// tidy: core

use std::collections::BTreeMap;

/// How many refusals of one caller are recorded in one minute.
pub const PER_MINUTE: u32 = 10;

/// How many callers are told apart; the others share a count.
pub const CALLERS_MAX: usize = 100;

/// What all callers beyond [`CALLERS_MAX`] are called.
pub const OTHERS: &str = "others";

/// Counts refusals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    minute: u64,
    counts: BTreeMap<String, u32>,
}

/// Refusals that were not recorded one by one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct More {
    /// Whose.
    pub caller: String,
    /// How many.
    pub count: u32,
}

impl Quota {
    /// Counts a refusal of `caller`; true if it is to be recorded.
    pub fn admit(&mut self, caller: &str) -> bool {
        let is_known = self.counts.contains_key(caller) || self.counts.len() < CALLERS_MAX;
        let caller = if is_known { caller } else { OTHERS };
        let count = self.counts.entry(caller.to_owned()).or_default();
        *count = count.saturating_add(1);
        *count <= PER_MINUTE
    }

    /// True if no more refusals of `caller` are recorded in this minute.
    #[must_use]
    pub fn is_spent(&self, caller: &str) -> bool {
        let count = self.counts.get(caller).or_else(|| {
            let is_full = self.counts.len() >= CALLERS_MAX;
            is_full.then(|| self.counts.get(OTHERS)).flatten()
        });
        count.is_some_and(|count| *count >= PER_MINUTE)
    }

    /// Takes note of the time, as minutes since some moment. When a minute has passed, gives what
    /// was counted in it and not recorded.
    pub fn tick(&mut self, minute: u64) -> Vec<More> {
        if minute == self.minute {
            return Vec::new();
        }
        self.minute = minute;
        let counts = std::mem::take(&mut self.counts).into_iter();
        counts
            .filter(|(_, count)| *count > PER_MINUTE)
            .map(|(caller, count)| More { caller, count: count - PER_MINUTE })
            .collect()
    }
}
