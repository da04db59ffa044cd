//! Which replicas follow this server, by what they say when they ask.
// tidy: core

use std::collections::BTreeMap;

use api::image_server::replication::{ReplicaReport, ReplicaState, ServerId};
use model::tree::Time;

/// The most replicas that are remembered; the one that was seen longest ago is forgotten.
pub const REPLICAS_MAX: usize = 1_000;

/// For how long one is remembered that does not ask any more, in seconds.
pub const REMEMBERED_SECONDS: i64 = 30 * 24 * 3_600;

/// Who asks again within this time is connected, in seconds.
const CONNECTED_SECONDS: i64 = 90;

/// All that have asked.
#[derive(Clone, Debug, Default)]
pub struct Roster {
    replicas: BTreeMap<ServerId, ReplicaState>,
}

impl Roster {
    /// Takes note that a replica at `address` has asked.
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

    /// All of them, sorted by address.
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

    fn at(seconds: i64) -> Time {
        Time { seconds, nanoseconds: 0 }
    }

    fn report(number: u128) -> ReplicaReport {
        let server = ServerId::from(number);
        ReplicaReport { server, port: 1, is_level: number == 1, images_behind: 7 }
    }

    #[test]
    fn who_asks_is_known_and_who_does_not_is_shown_as_gone_and_then_forgotten() {
        let mut roster = Roster::default();
        roster.note(at(0), "b:1".to_owned(), &report(1));
        roster.note(at(100), "a:1".to_owned(), &report(2));
        let state = |number, address: &str, seen, is_connected| ReplicaState {
            server: ServerId::from(number),
            address: address.to_owned(),
            seen: at(seen),
            is_connected,
            is_level: number == 1,
            images_behind: 7,
        };
        let both = [state(2, "a:1", 100, true), state(1, "b:1", 0, false)];
        assert_eq!(roster.list(at(101)), both);
        roster.note(at(REMEMBERED_SECONDS + 1), "c:1".to_owned(), &report(2));
        let last = state(2, "c:1", REMEMBERED_SECONDS + 1, true);
        assert_eq!(roster.list(at(REMEMBERED_SECONDS + 1)), [last]);
        for number in 0..2 * REPLICAS_MAX as u128 {
            roster.note(at(REMEMBERED_SECONDS + 2), "d:1".to_owned(), &report(number));
        }
        assert_eq!(roster.list(at(0)).len(), REPLICAS_MAX);
    }
}
