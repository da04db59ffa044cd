//! What is put on record, and what waits for it.

use super::*;
use crate::core::changes::tests::ordered;
use common::object::Algorithm;
use common::tree::text::from_text;
use common::wire::client::{Client, Peer};
use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const ROOM: HistoryLimits = HistoryLimits { bytes: 1 << 30, seconds: 1 << 40 };

/// A history on a disk of its own, and what it needs to list changes.
struct Desk {
    history: History,
    images: Arc<Images>,
    reader: Arc<Reader>,
    _directory: tempfile::TempDir,
}

fn desk() -> Desk {
    let directory = tempfile::tempdir().unwrap();
    let state = Arc::new(State::open(directory.path()).unwrap());
    let reader = Arc::new(Reader::new(2));
    // Nobody is asked there.
    let nobody = Peer { host: "nobody".to_owned(), port: 1, address: None };
    let (tracker, stop) = (TaskTracker::new(), CancellationToken::new());
    Desk {
        history: History::start(state, ROOM).unwrap(),
        images: Images::new(Client::new(nobody), Arc::clone(&reader), tracker, stop),
        reader,
        _directory: directory,
    }
}

/// An update that makes a directory of this name.
fn update(id: u64, name: &str) -> Box<Ordered> {
    let tree = |name: &str| from_text(Algorithm::Blake3, &format!("d 755 0:0 /{name}\n")).unwrap();
    Box::new(Ordered { update_id: id, ..ordered(&tree("before"), &tree(name), &[]) })
}

#[tokio::test]
async fn machines_that_change_the_same_share_one_list() {
    let desk = desk();
    // All ask before the first has its answer.
    let asked = (0..100).map(|id| {
        let name = ["one", "other"][usize::from(id % 2 == 1)];
        desk.history.list(update(id, name), &desk.images, &desk.reader)
    });
    let lists = join_all(asked).await.into_iter().map(|list| list.unwrap().0);
    let lists: Vec<Arc<List>> = lists.collect();
    assert_ne!(lists[0].digest, lists[1].digest);
    for (number, list) in lists.iter().enumerate() {
        assert!(Arc::ptr_eq(list, &lists[number % 2]), "{number}");
    }
}
