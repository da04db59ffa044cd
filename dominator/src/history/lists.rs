//! Lists of changes that were just made: machines that have the same tree and get the same image
//! change the same, which is listed once and held once.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::object::ObjectId;

use super::row::List;

/// How many lists are remembered.
const LISTS_MAX: usize = 32;

/// What a list of changes is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) tree: ObjectId,
    pub(super) image: ObjectId,
    pub(super) plan: ObjectId,
    pub(super) former: Option<ObjectId>,
}

/// See the module's text.
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
        if made.len() > LISTS_MAX {
            made.pop_front();
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
