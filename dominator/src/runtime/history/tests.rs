//! What is put on record, and what waits for it.

use api::dominator::events::{EventKind, ListEventsRequest};
use futures_util::future::join_all;
use model::object::Algorithm;
use model::tree::text::from_text;
use system::trusted_clock::SavedClock;

use super::*;
use crate::core::changes::tests::ordered;
use crate::core::event_filter::EventFilter;
use crate::storage::tests::HeldDisk;

const ROOM: HistoryLimits = HistoryLimits { bytes: 1 << 30, seconds: 1 << 40 };

/// An update that makes a directory of this name.
fn update(id: u64, name: &str) -> Box<OrderedUpdate> {
    let tree = |name: &str| from_text(Algorithm::Blake3, &format!("d 755 0:0 /{name}\n")).unwrap();
    Box::new(OrderedUpdate { update_id: id, ..ordered(&tree("before"), &tree(name), &[]) })
}

#[tokio::test]
async fn machines_that_change_the_same_share_one_list() {
    let directory = tempfile::tempdir().unwrap();
    let state = Arc::new(Storage::open(directory.path()).unwrap());
    let (history, reader) =
        (History::start(state, ROOM, Clock::start()).unwrap(), TreeReader::new(2));
    // All ask before the first has its answer.
    let asked = (0..100).map(|id| {
        let name = ["one", "other"][usize::from(id % 2 == 1)];
        history.list(update(id, name), FormerImage::Unknown, &reader)
    });
    let lists = join_all(asked).await.into_iter().map(|list| list.unwrap().0);
    let lists: Vec<Arc<ChangeList>> = lists.collect();
    assert_ne!(lists[0].digest, lists[1].digest);
    for (number, list) in lists.iter().enumerate() {
        assert!(Arc::ptr_eq(list, &lists[number % 2]), "{number}");
    }
}

#[test]
fn ends_of_updates_are_not_lost_when_changes_of_status_are() {
    let directory = tempfile::tempdir().unwrap();
    let state = Arc::new(Storage::open(directory.path()).unwrap());
    let history = History::start(Arc::clone(&state), ROOM, Clock::start()).unwrap();
    let disk = HeldDisk::of(state);
    for _ in 0..STATUSES_WAITING + 10 {
        history.status("web", Status::Synced, "");
    }
    history.ended("web", 1, UpdateOutcome::Done, "");
    assert_eq!(*history.lost.lock().unwrap(), 10);
    disk.let_go();
    history.close();
    assert_eq!(*history.lost.lock().unwrap(), 0, "how many were lost is on record");
}

fn source(number: usize) -> ListInput {
    let id = Algorithm::Blake3.digest(&number.to_le_bytes());
    ListInput { tree: id, image: id, plan: id, former: None }
}

fn list(bytes: usize) -> ChangeList {
    let chunks = vec![([0; 32], vec![0; bytes])];
    ChangeList { digest: [0; 32], chunks, marks: 0, reasons: [0; 3] }
}

/// The numbers of the lists that are held, of `lists` so many bytes long each.
fn held(lists: usize, bytes: usize) -> Vec<usize> {
    let held = Recent::new(LISTS_MAX, LISTS_BYTES_MAX);
    for number in 0..lists {
        held.add(source(number), list(bytes), bytes);
    }
    let is_held = |number| held.find(|known| *known == source(number)).is_some();
    (0..lists).filter(|&number| is_held(number)).collect()
}

#[test]
fn few_lists_are_held_and_large_ones_one_at_a_time() {
    assert_eq!(held(2 * LISTS_MAX, 10), Vec::from_iter(LISTS_MAX..2 * LISTS_MAX));
    assert_eq!(held(9, LISTS_BYTES_MAX / 4), [5, 6, 7, 8]);
    assert_eq!(held(3, LISTS_BYTES_MAX / 2 + 1), [2]);
    assert_eq!(held(3, 2 * LISTS_BYTES_MAX), [2]);
}

#[test]
fn the_first_of_two_equal_lists_is_the_one_that_all_have() {
    let lists = Recent::new(LISTS_MAX, LISTS_BYTES_MAX);
    let add = || lists.add(source(1), Arc::new(list(1)), 1);
    let first = add();
    assert!(Arc::ptr_eq(&add(), &first));
    assert!(Arc::ptr_eq(&lists.find(|known| *known == source(1)).unwrap(), &first));
}

fn wait_until(is_so: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it takes too long");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn statuses(state: &Storage) -> usize {
    let request = ListEventsRequest { kinds: vec![EventKind::Status], ..Default::default() };
    let filter = EventFilter::new(&request).unwrap();
    state.events(filter, &request).unwrap().events.len()
}

#[test]
fn a_clock_that_jumped_removes_nothing_before_an_operator_accepts_it() {
    let directory = tempfile::tempdir().unwrap();
    let state = Arc::new(Storage::open(directory.path()).unwrap());
    let (clock, day) = (Clock::start(), 86_400);
    let now = clock.now().wall.seconds;
    // The clock was trusted 400 days ago, before the machine was started again.
    let saved = SavedClock { boot_id: "former".into(), wall: now - 400 * day, offset: 0 };
    state.clock.set(Some(saved)).unwrap();
    let old = StatusRow::Status {
        time: Time { seconds: now - 399 * day, nanoseconds: 0 },
        host: "web".into(),
        status: "synced".into(),
        detail: String::new(),
    };
    state.append(&vec![HistoryRecord::Status(old); 5_000], ROOM, None).unwrap();
    let limits = HistoryLimits { seconds: 365 * day, ..ROOM };

    let history = History::start(Arc::clone(&state), limits, clock).unwrap();
    let jumped = history.clock_jumped().expect("the clock jumped");
    // A machine may be off for 30 days.
    assert!((369 * day..=371 * day).contains(&jumped), "{jumped}");
    history.status("web", Status::Synced, "");
    history.close();
    assert_eq!(statuses(&state), 1_000, "a page of them");
    assert_eq!(history.trouble(), None);

    let history = History::start(Arc::clone(&state), limits, clock).unwrap();
    assert!(history.accept_clock() >= 369 * day);
    assert_eq!(history.clock_jumped(), None);
    history.status("web", Status::Synced, "");
    // The first segment of records goes.
    wait_until(|| statuses(&state) < 1_000);
    history.close();
    let saved = Option::clone(&state.clock.get()).expect("the accepted clock is saved");
    assert!((now - day..now + day).contains(&saved.wall), "{saved:?}");
}
