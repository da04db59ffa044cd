//! The network budget: limits the rate at which all machines together fetch objects.
//!
//! A granted fetch uses the budget for the time that its bytes need at the configured rate. The
//! next one is granted after that time. A quarter of the rate is reserved for repairs, so that
//! rollouts do not delay them. Prefetches come last.
// tidy: core

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use model::display::size;

use super::budget::ClaimantId;

/// The priority of a fetch; the first comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// For a repair, which has its own part of the rate.
    Repair,
    /// For an update to another image.
    Rollout,
    /// For the next image.
    Prefetch,
}

/// A fetch that a machine needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Download {
    pub urgency: Urgency,
    /// Since when it is needed.
    pub since: Duration,
    pub bytes: u64,
}

/// A part of the rate, and the queue for it.
#[derive(Clone, Debug, Default)]
struct Part {
    /// In bytes per second; at least one.
    rate: u64,
    /// When the next fetch can be granted.
    free_at: Duration,
    queue: BTreeSet<(Urgency, Duration, ClaimantId)>,
    /// The bytes of all fetches in the queue.
    queued: u64,
}

#[derive(Clone, Debug)]
pub struct NetworkBudget {
    /// In bytes per second; no limit if `None`.
    limit: Option<u64>,
    repairs: Part,
    others: Part,
    wanted: BTreeMap<ClaimantId, Download>,
    granted: BTreeMap<ClaimantId, Download>,
}

impl NetworkBudget {
    /// `limit` is in bytes per second.
    #[must_use]
    pub fn new(limit: Option<u64>) -> Self {
        let part = || Part { rate: u64::MAX, ..Part::default() };
        let mut network = Self {
            limit: None,
            repairs: part(),
            others: part(),
            wanted: BTreeMap::new(),
            granted: BTreeMap::new(),
        };
        network.set_limit(limit);
        network
    }

    /// Sets the limit, in bytes per second.
    pub fn set_limit(&mut self, limit: Option<u64>) {
        if self.limit == limit {
            return;
        }
        let rate = limit.unwrap_or(u64::MAX);
        self.limit = limit;
        for (part, rate) in [(&mut self.repairs, rate / 4), (&mut self.others, rate - rate / 4)] {
            (part.rate, part.free_at) = (rate.max(1), Duration::ZERO);
        }
    }

    /// Adds a fetch to the queue. Does nothing if the machine already has the same claim.
    pub fn ask(&mut self, claimant: ClaimantId, download: Download) {
        let known = self.wanted.get(&claimant).or_else(|| self.granted.get(&claimant));
        if known == Some(&download) {
            return;
        }
        self.cancel(claimant);
        if self.limit.is_none() {
            self.granted.insert(claimant, download);
            return;
        }
        let part = self.part_of(download.urgency);
        part.queue.insert((download.urgency, download.since, claimant));
        part.queued = part.queued.saturating_add(download.bytes);
        self.wanted.insert(claimant, download);
    }

    /// Removes the claim of a machine, because it is not needed any more or the fetch is ordered.
    pub fn cancel(&mut self, claimant: ClaimantId) {
        self.granted.remove(&claimant);
        if let Some(download) = self.wanted.remove(&claimant) {
            let part = self.part_of(download.urgency);
            part.queue.remove(&(download.urgency, download.since, claimant));
            part.queued = part.queued.saturating_sub(download.bytes);
        }
    }

    /// Grants the fetches that may be ordered now, and returns their machines.
    pub fn grant(&mut self, now: Duration) -> Vec<ClaimantId> {
        let mut granted = Vec::new();
        for part in [&mut self.repairs, &mut self.others] {
            while part.free_at <= now
                && let Some((_, _, claimant)) = part.queue.pop_first()
            {
                let Some(download) = self.wanted.remove(&claimant) else { continue };
                let bytes = download.bytes;
                part.queued = part.queued.saturating_sub(bytes);
                let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(part.rate);
                let takes = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
                part.free_at = now.saturating_add(takes);
                self.granted.insert(claimant, download);
                granted.push(claimant);
            }
        }
        granted
    }

    /// Returns when the next fetch can be granted, if one waits.
    #[must_use]
    pub fn next(&self) -> Option<Duration> {
        let parts = [&self.repairs, &self.others].into_iter();
        parts.filter(|part| !part.queue.is_empty()).map(|part| part.free_at).min()
    }

    /// True if the claim of a machine is granted.
    #[must_use]
    pub fn is_granted(&self, claimant: ClaimantId) -> bool {
        self.granted.contains_key(&claimant)
    }

    /// Returns what a machine waits for, as text.
    #[must_use]
    pub fn why(&self, claimant: ClaimantId) -> String {
        let Some(download) = self.wanted.get(&claimant) else { return String::new() };
        let (part, whose) = match download.urgency {
            Urgency::Repair => (&self.repairs, "repairs"),
            Urgency::Rollout | Urgency::Prefetch => (&self.others, "rollouts"),
        };
        format!(
            "the network budget for {whose}, {} per second, is used by other machines; {} are \
             waiting to be fetched (--network-limit {})",
            size(part.rate),
            size(part.queued),
            self.limit.unwrap_or(u64::MAX)
        )
    }

    /// Returns the number of waiting fetches, and the sum of their bytes.
    #[must_use]
    pub fn waiting(&self) -> (u32, u64) {
        let count = u32::try_from(self.wanted.len()).unwrap_or(u32::MAX);
        (count, self.repairs.queued.saturating_add(self.others.queued))
    }

    fn part_of(&mut self, urgency: Urgency) -> &mut Part {
        match urgency {
            Urgency::Repair => &mut self.repairs,
            Urgency::Rollout | Urgency::Prefetch => &mut self.others,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn download(urgency: Urgency, since: u64, bytes: u64) -> Download {
        Download { urgency, since: seconds(since), bytes }
    }

    #[test]
    fn fetches_are_ordered_one_after_the_other_and_what_is_ahead_of_need_comes_last() {
        let mut network = NetworkBudget::new(Some(400));
        network.ask(ClaimantId(1), download(Urgency::Prefetch, 0, 300));
        network.ask(ClaimantId(2), download(Urgency::Rollout, 2, 900));
        network.ask(ClaimantId(3), download(Urgency::Rollout, 1, 300));
        network.ask(ClaimantId(4), download(Urgency::Repair, 5, 1_000));
        network.ask(ClaimantId(5), download(Urgency::Repair, 6, 100));
        assert_eq!(network.grant(seconds(10)), [ClaimantId(4), ClaimantId(3)]);
        assert_eq!(network.next(), Some(seconds(11)));
        assert!(network.is_granted(ClaimantId(3)) && !network.is_granted(ClaimantId(2)));
        let why = "the network budget for rollouts, 300 bytes per second, is used by other \
                   machines; 1.2 kB are waiting to be fetched (--network-limit 400)";
        assert_eq!(network.why(ClaimantId(2)), why);
        assert_eq!(network.grant(seconds(11)), [ClaimantId(2)]);
        assert_eq!((network.grant(seconds(13)), network.next()), (vec![], Some(seconds(14))));
        assert_eq!(network.grant(seconds(14)), [ClaimantId(1)]);
        network.cancel(ClaimantId(5));
        assert_eq!((network.grant(seconds(100)), network.next()), (vec![], None));
        assert_eq!(network.waiting(), (0, 0));
    }

    #[test]
    fn without_a_limit_nobody_waits() {
        let mut network = NetworkBudget::new(None);
        network.ask(ClaimantId(1), download(Urgency::Prefetch, 0, u64::MAX));
        assert!(network.is_granted(ClaimantId(1)) && network.next().is_none());
        network.set_limit(Some(4));
        network.ask(ClaimantId(2), download(Urgency::Prefetch, 0, 1_000_000));
        network.ask(ClaimantId(3), download(Urgency::Prefetch, 1, 1));
        assert_eq!(network.grant(seconds(1)), [ClaimantId(2)]);
        network.set_limit(None);
        assert_eq!(network.grant(seconds(1)), [ClaimantId(3)]);
    }
}
