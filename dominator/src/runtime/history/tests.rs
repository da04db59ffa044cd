//! What is put on record, and what waits for it.

use super::*;
use crate::core::changes::tests::ordered;
use crate::storage::tests::HeldDisk;
use futures_util::future::join_all;
use model::object::Algorithm;
use model::tree::text::from_text;

const ROOM: HistoryLimits = HistoryLimits { bytes: 1 << 30, seconds: 1 << 40 };

/// An update that makes a directory of this name.
fn update(id: u64, name: &str) -> Box<Ordered> {
    let tree = |name: &str| from_text(Algorithm::Blake3, &format!("d 755 0:0 /{name}\n")).unwrap();
    Box::new(Ordered { update_id: id, ..ordered(&tree("before"), &tree(name), &[]) })
}

#[tokio::test]
async fn machines_that_change_the_same_share_one_list() {
    let directory = tempfile::tempdir().unwrap();
    let state = Arc::new(State::open(directory.path()).unwrap());
    let (history, reader) = (History::start(state, ROOM).unwrap(), Reader::new(2));
    // All ask before the first has its answer.
    let asked = (0..100).map(|id| {
        let name = ["one", "other"][usize::from(id % 2 == 1)];
        history.list(update(id, name), Had::Unknown, &reader)
    });
    let lists = join_all(asked).await.into_iter().map(|list| list.unwrap().0);
    let lists: Vec<Arc<List>> = lists.collect();
    assert_ne!(lists[0].digest, lists[1].digest);
    for (number, list) in lists.iter().enumerate() {
        assert!(Arc::ptr_eq(list, &lists[number % 2]), "{number}");
    }
}

#[test]
fn ends_of_updates_are_not_lost_when_changes_of_status_are() {
    let directory = tempfile::tempdir().unwrap();
    let state = Arc::new(State::open(directory.path()).unwrap());
    let history = History::start(Arc::clone(&state), ROOM).unwrap();
    let disk = HeldDisk::of(state);
    for _ in 0..STATUSES_WAITING + 10 {
        history.status("web", Status::Synced, "");
    }
    history.ended("web", 1, Outcome::Done);
    assert_eq!(*history.lost.lock().unwrap(), 10);
    disk.let_go();
    history.close();
    assert_eq!(*history.lost.lock().unwrap(), 0, "how many were lost is on record");
}
