//! The last changes of a machine's status, kept in memory.
// tidy: core

use std::collections::VecDeque;

use api::dominator::Status;
use model::tree::Time;

/// How many changes are kept of each machine.
pub const CHANGES_MAX: usize = 50;

/// The last changes of the status of one machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatusHistory {
    changes: VecDeque<(Time, Status, String)>,
}

impl StatusHistory {
    /// Adds a change; the oldest goes when there are more than [`CHANGES_MAX`].
    pub fn record(&mut self, when: Time, status: Status, detail: &str) {
        if self.changes.len() == CHANGES_MAX {
            self.changes.pop_front();
        }
        self.changes.push_back((when, status, detail.to_owned()));
    }

    /// The changes, the newest first.
    #[must_use]
    pub fn newest_first(&self) -> Vec<(Time, Status, String)> {
        self.changes.iter().rev().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_newest_changes() {
        let mut history = StatusHistory::default();
        for seconds in 0..60 {
            let when = Time { seconds, nanoseconds: 0 };
            history.record(when, Status::Synced, &format!("number {seconds}"));
        }
        let changes = history.newest_first();
        assert_eq!(changes.len(), CHANGES_MAX);
        assert_eq!(changes[0].2, "number 59");
        assert_eq!(changes[CHANGES_MAX - 1].2, "number 10");
    }
}
