//! What a master keeps for its replicas: the numbered changes since its start, and who follows.
//!
//! Only the last change of each name is kept, and only the last [`CHANGES_MAX`] names. A replica
//! that asks for older changes gets the whole list again.
// tidy: core

use std::collections::BTreeMap;

use api::image_server::replication::{Cursor, ReplicaReport, ReplicaState, ServerId};
use model::tree::Time;

/// How many changed names are remembered.
pub const CHANGES_MAX: usize = 100_000;

/// The changes of one run of a server, by name.
#[derive(Debug)]
pub struct ChangeLog<Name> {
    instance: u64,
    sequence: u64,
    /// The changes up to this number may have been forgotten.
    forgotten: u64,
    by_sequence: BTreeMap<u64, Name>,
    by_name: BTreeMap<Name, u64>,
    limit: usize,
}

impl<Name: Ord + Clone> ChangeLog<Name> {
    /// Returns an empty log. `instance` is random.
    #[must_use]
    pub fn new(instance: u64) -> Self {
        Self::with_limit(instance, CHANGES_MAX)
    }

    fn with_limit(instance: u64, limit: usize) -> Self {
        let (by_sequence, by_name) = (BTreeMap::new(), BTreeMap::new());
        Self { instance, sequence: 0, forgotten: 0, by_sequence, by_name, limit }
    }

    /// Records a change of `name`.
    pub fn note(&mut self, name: &Name) {
        self.sequence += 1;
        if let Some(former) = self.by_name.insert(name.clone(), self.sequence) {
            self.by_sequence.remove(&former);
        }
        self.by_sequence.insert(self.sequence, name.clone());
        if self.by_sequence.len() > self.limit
            && let Some((sequence, name)) = self.by_sequence.pop_first()
        {
            self.by_name.remove(&name);
            self.forgotten = sequence;
        }
    }

    /// Returns the position of the last change.
    #[must_use]
    pub fn cursor(&self) -> Cursor {
        Cursor { instance: self.instance, sequence: self.sequence }
    }

    /// Returns at most `limit` names that changed after `cursor`, the new position, and true if
    /// there are more. `None` if the changes are not known: of another run, or too old.
    #[must_use]
    pub fn since(&self, cursor: Cursor, limit: usize) -> Option<(Vec<Name>, Cursor, bool)> {
        let is_known = cursor.instance == self.instance
            && (self.forgotten..=self.sequence).contains(&cursor.sequence);
        if !is_known {
            return None;
        }
        let mut rest = self.by_sequence.range(cursor.sequence + 1..);
        let some: Vec<(u64, Name)> =
            rest.by_ref().take(limit).map(|(sequence, name)| (*sequence, name.clone())).collect();
        let more = rest.next().is_some();
        let sequence = match some.last() {
            Some((sequence, _)) if more => *sequence,
            _ => self.sequence,
        };
        let names = some.into_iter().map(|(_, name)| name).collect();
        Some((names, Cursor { instance: self.instance, sequence }, more))
    }
}

/// The most replicas that are remembered; the one that asked longest ago is forgotten.
pub const REPLICAS_MAX: usize = 1_000;

/// How long a replica is remembered that does not ask any more, in seconds.
pub const REMEMBERED_SECONDS: i64 = 30 * 24 * 3_600;

/// A replica that asks again within this time is connected, in seconds.
const CONNECTED_SECONDS: i64 = 90;

/// The replicas that have asked for changes.
#[derive(Clone, Debug, Default)]
pub struct Replicas {
    replicas: BTreeMap<ServerId, ReplicaState>,
}

impl Replicas {
    /// Records that a replica at `address` has asked.
    pub fn note(&mut self, now: Time, address: String, report: &ReplicaReport) {
        let ReplicaReport { server, port: _, is_level, images_behind } = report.clone();
        let oldest = now.seconds.saturating_sub(REMEMBERED_SECONDS);
        self.replicas.retain(|_, replica| replica.seen.seconds >= oldest);
        let state = ReplicaState {
            server: server.clone(),
            address,
            seen: now,
            is_connected: true,
            is_level,
            images_behind,
        };
        self.replicas.insert(server, state);
        if self.replicas.len() > REPLICAS_MAX {
            let oldest = self.replicas.values().min_by_key(|replica| replica.seen);
            if let Some(oldest) = oldest.map(|replica| replica.server.clone()) {
                self.replicas.remove(&oldest);
            }
        }
    }

    /// Returns all replicas, sorted by address.
    #[must_use]
    pub fn list(&self, now: Time) -> Vec<ReplicaState> {
        let mut list: Vec<ReplicaState> = self.replicas.values().cloned().collect();
        for replica in &mut list {
            let since = now.seconds.saturating_sub(replica.seen.seconds);
            replica.is_connected = since < CONNECTED_SECONDS;
        }
        list.sort_by(|one, two| one.address.cmp(&two.address));
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(sequence: u64) -> Cursor {
        Cursor { instance: 7, sequence }
    }

    #[test]
    fn each_name_is_told_once_with_its_last_change() {
        let mut log = ChangeLog::new(7);
        assert_eq!(log.since(cursor(0), 9), Some((vec![], cursor(0), false)));
        for name in ["a", "b", "a", "c"] {
            log.note(&name);
        }
        assert_eq!(log.cursor(), cursor(4));
        #[rustfmt::skip]
        let table = [
            (0, 9, Some((vec!["b", "a", "c"], cursor(4), false))),
            (0, 2, Some((vec!["b", "a"], cursor(3), true))),
            (3, 2, Some((vec!["c"], cursor(4), false))),
            (4, 2, Some((vec![], cursor(4), false))),
            (5, 2, None),
        ];
        for (from, limit, expected) in table {
            assert_eq!(log.since(cursor(from), limit), expected, "after {from}");
        }
        assert_eq!(log.since(Cursor { instance: 8, sequence: 0 }, 9), None);
    }

    #[test]
    fn who_was_away_for_too_long_gets_the_list() {
        let mut log = ChangeLog::with_limit(7, 2);
        for name in ["a", "b", "c", "d"] {
            log.note(&name);
        }
        assert_eq!(log.since(cursor(1), 9), None);
        assert_eq!(log.since(cursor(2), 9), Some((vec!["c", "d"], cursor(4), false)));
    }

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn report(number: u128) -> ReplicaReport {
        let server = ServerId::from(number);
        ReplicaReport { server, port: 1, is_level: number == 1, images_behind: 7 }
    }

    #[test]
    fn who_asks_is_known_and_who_does_not_is_shown_as_gone_and_then_forgotten() {
        let mut replicas = Replicas::default();
        replicas.note(at(0), "b:1".to_owned(), &report(1));
        replicas.note(at(100), "a:1".to_owned(), &report(2));
        let state = |number, address: &str, seen, is_connected| ReplicaState {
            server: ServerId::from(number),
            address: address.to_owned(),
            seen: at(seen),
            is_connected,
            is_level: number == 1,
            images_behind: 7,
        };
        let both = [state(2, "a:1", 100, true), state(1, "b:1", 0, false)];
        assert_eq!(replicas.list(at(101)), both);
        replicas.note(at(REMEMBERED_SECONDS + 1), "c:1".to_owned(), &report(2));
        let last = state(2, "c:1", REMEMBERED_SECONDS + 1, true);
        assert_eq!(replicas.list(at(REMEMBERED_SECONDS + 1)), [last]);
        for number in 0..2 * REPLICAS_MAX as u128 {
            replicas.note(at(REMEMBERED_SECONDS + 2), "d:1".to_owned(), &report(number));
        }
        assert_eq!(replicas.list(at(0)).len(), REPLICAS_MAX);
    }
}
