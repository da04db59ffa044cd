//! What has changed since the start, in order: what replicas wait for.
//!
//! Only the last change of each name is kept, and only the last [`CHANGES_MAX`] names. Who has
//! followed so little that something was forgotten since gets the whole list again.
// tidy: core

use std::collections::BTreeMap;

use api::image_server::replication::Cursor;

/// How many changed names are remembered.
pub const CHANGES_MAX: usize = 100_000;

/// The changes of one run of a server, by name. Directories with owners, once there are any, are
/// names of another kind.
#[derive(Debug)]
pub struct Log<Name> {
    instance: u64,
    sequence: u64,
    /// Changes up to this one may have been forgotten.
    forgotten: u64,
    by_sequence: BTreeMap<u64, Name>,
    by_name: BTreeMap<Name, u64>,
    limit: usize,
}

impl<Name: Ord + Clone> Log<Name> {
    /// No changes. `instance` is random.
    #[must_use]
    pub fn new(instance: u64) -> Self {
        Self::with_limit(instance, CHANGES_MAX)
    }

    fn with_limit(instance: u64, limit: usize) -> Self {
        let (by_sequence, by_name) = (BTreeMap::new(), BTreeMap::new());
        Self { instance, sequence: 0, forgotten: 0, by_sequence, by_name, limit }
    }

    /// Takes note that what has this name has changed.
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

    /// How far it goes.
    #[must_use]
    pub fn cursor(&self) -> Cursor {
        Cursor { instance: self.instance, sequence: self.sequence }
    }

    /// At most `limit` names that have changed after `cursor`, how far they go, and whether there
    /// are more. `None` if that is not known: of another run, or too long ago.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(sequence: u64) -> Cursor {
        Cursor { instance: 7, sequence }
    }

    #[test]
    fn each_name_is_told_once_with_its_last_change() {
        let mut log = Log::new(7);
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
        let mut log = Log::with_limit(7, 2);
        for name in ["a", "b", "c", "d"] {
            log.note(&name);
        }
        assert_eq!(log.since(cursor(1), 9), None);
        assert_eq!(log.since(cursor(2), 9), Some((vec!["c", "d"], cursor(4), false)));
    }
}
