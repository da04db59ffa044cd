//! Lists of changes that were just made: machines that have the same tree and get the same image
//! change the same, which is listed once and held once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::object::ObjectId;

use crate::storage::history_rows::List;

/// How many lists are remembered.
const LISTS_MAX: usize = 32;

/// How long the remembered lists are together at most, in bytes, but for the last one: they are in
/// memory when all machines are done with them.
const BYTES_MAX: usize = 32 << 20;

/// What a list of changes is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) tree: ObjectId,
    pub(super) image: ObjectId,
    pub(super) plan: ObjectId,
    pub(super) former: Option<ObjectId>,
}

#[derive(Debug, Default)]
pub(super) struct Lists {
    /// The one that was of use last comes last.
    made: Mutex<VecDeque<(Source, Arc<List>)>>,
}

impl Lists {
    /// The list that is made from this, if it was made lately.
    pub(super) fn find(&self, source: Source) -> Option<Arc<List>> {
        find(&mut self.locked(), source)
    }

    /// Remembers what was made from this. If another was quicker, all have the other's list.
    pub(super) fn keep(&self, source: Source, list: List) -> Arc<List> {
        let mut made = self.locked();
        if let Some(known) = find(&mut made, source) {
            return known;
        }
        let list = Arc::new(list);
        made.push_back((source, Arc::clone(&list)));
        let mut bytes: usize = made.iter().map(|(_, list)| list.bytes()).sum();
        while made.len() > LISTS_MAX || (bytes > BYTES_MAX && made.len() > 1) {
            bytes -= made.pop_front().map_or(0, |(_, oldest)| oldest.bytes());
        }
        list
    }

    fn locked(&self) -> MutexGuard<'_, VecDeque<(Source, Arc<List>)>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find(made: &mut VecDeque<(Source, Arc<List>)>, source: Source) -> Option<Arc<List>> {
    let at = made.iter().position(|(known, _)| *known == source)?;
    let found = made.remove(at)?;
    let list = Arc::clone(&found.1);
    made.push_back(found);
    Some(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::object::Algorithm;

    fn source(number: usize) -> Source {
        let id = Algorithm::Blake3.digest(&number.to_le_bytes());
        Source { tree: id, image: id, plan: id, former: None }
    }

    fn list(bytes: usize) -> List {
        let chunks = vec![([0; 32], vec![0; bytes])];
        List { digest: [0; 32], chunks, marks: 0, reasons: [0; 3] }
    }

    /// The numbers of the lists that are held, of `lists` so many bytes long each.
    fn held(lists: usize, bytes: usize) -> Vec<usize> {
        let held = Lists::default();
        for number in 0..lists {
            held.keep(source(number), list(bytes));
        }
        (0..lists).filter(|&number| held.find(source(number)).is_some()).collect()
    }

    #[test]
    fn few_lists_are_held_and_large_ones_one_at_a_time() {
        assert_eq!(held(2 * LISTS_MAX, 10), Vec::from_iter(LISTS_MAX..2 * LISTS_MAX));
        assert_eq!(held(9, BYTES_MAX / 4), [5, 6, 7, 8]);
        assert_eq!(held(3, BYTES_MAX / 2 + 1), [2]);
        assert_eq!(held(3, 2 * BYTES_MAX), [2]);
    }

    #[test]
    fn the_first_of_two_equal_lists_is_the_one_that_all_have() {
        let lists = Lists::default();
        let first = lists.keep(source(1), list(1));
        assert!(Arc::ptr_eq(&lists.keep(source(1), list(1)), &first));
        assert!(Arc::ptr_eq(&lists.find(source(1)).unwrap(), &first));
        assert_eq!(lists.locked().len(), 1);
    }
}
