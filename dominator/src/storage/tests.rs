//! The database: what was kept is there, and what is kept is limited.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use super::*;
use crate::storage::history_rows::{ChangeList, EndRow, StatusRow, UndoneRow, UpdateRow};
use api::dominator::events::{
    ChangeReason, EventDetails, EventKind, EventPosition, HistoryEvent, PathChange, PathOperation,
};
use api::dominator::orders::UpdatePause;
use api::dominator::rollback::{Rollback, RolledBackMachine};
use api::subd::UpdateOutcome;
use model::object::Algorithm;
use model::path::TreePath;
use model::plan::Difference;
use redb::ReadableTableMetadata as _;

/// A transaction that is open: whatever else is to be written waits for it.
pub(crate) struct HeldDisk {
    go_on: Sender<()>,
    disk: JoinHandle<Result<(), StorageError>>,
}

impl HeldDisk {
    /// Nothing is written to `state` from now on.
    pub(crate) fn of(state: Arc<Storage>) -> Self {
        let (held, is_held) = channel();
        let (go_on, goes_on) = channel::<()>();
        let disk = std::thread::spawn(move || {
            state.database.transact(None, |_| {
                held.send(()).unwrap();
                goes_on.recv().unwrap();
                Ok(())
            })
        });
        is_held.recv().unwrap();
        Self { go_on, disk }
    }

    /// All that waits is written.
    pub(crate) fn let_go(self) {
        self.go_on.send(()).unwrap();
        self.disk.join().unwrap().unwrap();
    }
}

fn set_brake(state: &Storage, brake: Option<&Brake>, order: &Order) {
    let brake = brake.cloned().map(Arc::new);
    state.brake.set_through(brake, with_order::<StorageError>(order)).unwrap();
}

#[test]
fn the_brake_is_kept_and_the_file_is_locked() {
    let directory = tempfile::tempdir().unwrap();
    let brake = Brake { reason: "storm".into(), who: "ops".into(), since: Time::default() };
    let state = Storage::open(directory.path()).unwrap();
    assert_eq!(*state.brake.get(), None);
    set_brake(&state, Some(&brake), &Order::new("disable-updates", "ops").why("storm"));
    let second = Storage::open(directory.path()).unwrap_err();
    assert!(matches!(second, StorageError::InUse { .. }), "{second}");
    drop(state);
    let state = Storage::open(directory.path()).unwrap();
    assert_eq!(state.brake.get().as_deref(), Some(&brake));
    set_brake(&state, None, &Order::new("enable-updates", "ops"));
    assert_eq!(*state.brake.get(), None);
    state.record(&Order::new("retry", "ann").about("web1")).unwrap();
    drop(state);
    let request = ListEventsRequest::default();
    let state = Storage::open(directory.path()).unwrap();
    let orders = state.events(EventFilter::new(&request).unwrap(), &request).unwrap().events;
    let texts: Vec<[String; 4]> = orders
        .into_iter()
        .map(|event| match event.what {
            EventDetails::Order { verb, who, why } => [verb, event.about, who, why],
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = [
        ["retry", "web1", "ann", ""],
        ["enable-updates", "", "ops", ""],
        ["disable-updates", "", "ops", "storm"],
    ];
    assert_eq!(texts, expected);
}

#[test]
fn the_machines_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let text = r#"[{"Hostname": "a", "RequiredImage": "x"}, {"Hostname": "b"}]"#;
    let machines = model::mdb::parse(text).unwrap();
    let machines: SharedMachines =
        machines.into_iter().map(|(name, machine)| (name, Arc::new(machine))).collect();
    let state = Storage::open(directory.path()).unwrap();
    assert_eq!(*state.machines.get(), None);
    state.machines.set(Some(machines.clone())).unwrap();
    drop(state);
    assert_eq!(*Storage::open(directory.path()).unwrap().machines.get(), Some(machines));
}

#[test]
fn identities_are_saved_changed_and_removed() {
    let known = |machine_id: &str| {
        Some(KnownIdentity { machine_id: machine_id.into(), is_own: true, trust: None })
    };
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    assert_eq!(state.identities().unwrap(), BTreeMap::new());
    let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
    state.save_identities(&[(a.clone(), known("1")), (b.clone(), known("2"))], None).unwrap();
    state.save_identities(&[(a, None), (b.clone(), known("3"))], None).unwrap();
    drop(state);
    let state = Storage::open(directory.path()).unwrap();
    assert_eq!(state.identities().unwrap(), BTreeMap::from([(b, known("3").unwrap())]));
}

#[test]
fn a_value_is_json_in_its_row_and_a_default_value_has_no_row() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let row = |key: &str| {
        let read = |database: &redb::Database| {
            let table = database.begin_read()?.open_table(SETTINGS)?;
            Ok(table.get(key)?.map(|row| String::from_utf8(row.value().to_vec()).unwrap()))
        };
        state.database.with("read", read).unwrap()
    };
    let until = at(7);
    let pause = UpdatePause { until, reason: "r".into(), who: "w".into(), since: at(1) };
    let mut pauses = Pauses::default();
    pauses.pause(vec!["a".to_owned(), "b".to_owned()], &Arc::new(pause));
    state.pauses.set(pauses).unwrap();
    let time = |seconds| format!(r#"{{"seconds":"{seconds}","nanoseconds":0}}"#);
    let expected = format!(
        r#"[[{{"until":{},"reason":"r","who":"w","since":{}}},["a","b"]]]"#,
        time(7),
        time(1)
    );
    assert_eq!(row("pauses").unwrap(), expected);
    state.pauses.set(Pauses::default()).unwrap();
    assert_eq!(row("pauses"), None);
    let machines = model::mdb::parse(r#"[{"Hostname": "a"}]"#).unwrap();
    let text = serde_json::to_string(&machines).unwrap();
    let shared = machines.into_iter().map(|(name, machine)| (name, Arc::new(machine)));
    state.machines.set(Some(shared.collect())).unwrap();
    assert_eq!(row("machines").unwrap(), text);
    state.machines.set(Some(BTreeMap::new())).unwrap();
    assert_eq!(row("machines").unwrap(), "{}");
}

#[test]
fn rollbacks_are_saved_with_their_orders_and_former_images_are_found_in_the_history() {
    let directory = tempfile::tempdir().unwrap();
    let name = |text: &str| ImageName::new(text).unwrap();
    let rollback = RolledBackMachine {
        hostname: "a".to_owned(),
        rollback: Rollback {
            from: name("web/8"),
            image: name("web/7"),
            who: "ann".to_owned(),
            why: "it crashes".to_owned(),
            since: at(7),
        },
    };
    let state = Storage::open(directory.path()).unwrap();
    let records = [
        update(1, "a", 1, &[]),
        end(2, "a", 1, UpdateOutcome::Done),
        update(3, "b", 1, &[]),
        end(4, "b", 1, UpdateOutcome::RolledBack("no".to_owned())),
    ];
    state.append(&records, ROOM, Some(at(5))).unwrap();
    let order = Order::new("rollback", "ann").about("a").why("it crashes");
    let change = |rollbacks: &mut Rollbacks| {
        rollbacks.add(vec![rollback.clone()]);
        Ok::<_, StorageError>(())
    };
    state.rollbacks.modify_through(change, with_order(&order)).unwrap();
    drop(state);

    let state = Storage::open(directory.path()).unwrap();
    let mut saved = Rollbacks::default();
    saved.add(vec![rollback]);
    assert_eq!(*state.rollbacks.get(), saved);
    let kinds = vec![EventKind::Order];
    let events = ask(&state, &ListEventsRequest { kinds, ..ListEventsRequest::default() });
    let (verb, who) = ("rollback".to_owned(), "ann".to_owned());
    assert_eq!(events[0].what, EventDetails::Order { verb, who, why: "it crashes".to_owned() });
    let required = |pairs: &[(&str, &str)]| -> BTreeMap<String, ImageName> {
        pairs.iter().map(|(host, image)| ((*host).to_owned(), name(image))).collect()
    };
    let asked = required(&[("a", "web/8"), ("b", "web/8"), ("c", "web/8")]);
    let found = state.former_images(asked).unwrap();
    assert_eq!(found, required(&[("a", "web/7"), ("b", "web/7")]));
    let found = state.former_images(required(&[("a", "web/9"), ("b", "web/9")])).unwrap();
    assert_eq!(found, required(&[("a", "web/8"), ("b", "web/7")]));
}

const ROOM: HistoryLimits = HistoryLimits { bytes: 1 << 30, seconds: 1 << 40 };

fn at(seconds: i64) -> Time {
    Time { seconds, nanoseconds: 0 }
}

fn status(seconds: i64, host: &str) -> HistoryRecord {
    let (status, detail) = ("synced".to_owned(), "equals base".to_owned());
    HistoryRecord::Status(StatusRow::Status {
        time: at(seconds),
        host: host.to_owned(),
        status,
        detail,
    })
}

fn removal(path: &str, reason: ChangeReason) -> PathChange {
    let path = TreePath::new(path).unwrap();
    let differs = vec![Difference::Extra];
    PathChange { path, operation: PathOperation::Remove, reason, differs, old: None, new: None }
}

fn update(seconds: i64, host: &str, update_id: u64, changes: &[PathChange]) -> HistoryRecord {
    let list = ChangeList::new(changes);
    let row = UpdateRow {
        time: at(seconds),
        host: host.to_owned(),
        update_id,
        image: "web/8".to_owned(),
        former: "web/7".to_owned(),
        list: list.digest,
        marks: list.marks,
        reasons: list.reasons,
    };
    HistoryRecord::Update(row, Arc::new(list))
}

fn end(seconds: i64, host: &str, update_id: u64, outcome: UpdateOutcome) -> HistoryRecord {
    let row = EndRow { time: at(seconds), outcome, failed_triggers: String::new() };
    HistoryRecord::End { host: host.to_owned(), update_id, row }
}

/// All events that are asked for, page by page.
fn ask(state: &Storage, request: &ListEventsRequest) -> Vec<HistoryEvent> {
    let (mut request, mut events) = (request.clone(), Vec::new());
    loop {
        let filter = EventFilter::new(&request).unwrap();
        let reply = state.events(filter, &request).unwrap();
        events.extend(reply.events);
        match reply.next {
            Some(next) => request.before = Some(next),
            None => return events,
        }
    }
}

/// What an event was about, with its path or its kind.
fn brief(events: &[HistoryEvent]) -> Vec<String> {
    let of = |event: &HistoryEvent| match &event.what {
        EventDetails::Change { change, .. } => format!("{}:{}", event.about, change.path),
        EventDetails::Update(update) | EventDetails::TriggersFailed { update, .. } => {
            format!("{}:update {}", event.about, update.update_id)
        }
        EventDetails::Status { status, .. } => format!("{}:{status}", event.about),
        EventDetails::Order { verb, .. } => format!("{}:{verb}", event.about),
        EventDetails::Gap { lost } => format!("gap {lost}"),
    };
    events.iter().map(of).collect()
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn events_after_one_are_those_of_later_records() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let changes = [removal("/a", ChangeReason::Drift), removal("/b", ChangeReason::Drift)];
    let records = [status(1, "a"), update(2, "a", 7, &changes), status(3, "b"), status(4, "a")];
    state.append(&records, ROOM, Some(at(5))).unwrap();
    let after = |number, part, hosts: &[&str]| {
        let kinds = EventKind::ALL.to_vec();
        let after = Some(EventPosition { number, part });
        let request = ListEventsRequest { hosts: texts(hosts), kinds, after, ..Default::default() };
        brief(&ask(&state, &request))
    };
    let all = ["a:synced", "b:synced", "a:/b", "a:/a", "a:update 7", "a:synced"];
    assert_eq!(after(0, 9, &[]), all);
    assert_eq!(after(1, 0, &[]), all[..5]);
    assert_eq!(after(2, 0, &[]), all[..2]);
    assert_eq!(after(2, 0, &["a"]), all[..1]);
    assert_eq!(after(4, 0, &[]), all[..0]);
}

#[test]
fn an_update_is_told_with_the_triggers_that_failed() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let failed_triggers = "start web failed: exit code 1".to_owned();
    let row = EndRow { time: at(3), outcome: UpdateOutcome::Done, failed_triggers };
    let end = HistoryRecord::End { host: "a".to_owned(), update_id: 7, row };
    let changes = [removal("/a", ChangeReason::Drift)];
    state.append(&[update(2, "a", 7, &changes), end], ROOM, Some(at(3))).unwrap();
    let request = ListEventsRequest { kinds: vec![EventKind::Update], ..Default::default() };
    let told: Vec<String> = ask(&state, &request)
        .iter()
        .map(|event| api::dominator::text::describe_event(&event.what).1)
        .collect();
    let expected = "to web/8 from web/7: 1 path (drift): done, but start web failed: exit code 1";
    assert_eq!(told, [expected]);
}

#[test]
fn events_come_the_newest_first_in_pages_of_any_size() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let both = [removal("/a", ChangeReason::Drift), removal("/b", ChangeReason::Image)];
    state.append(&[status(1, "h1"), update(2, "h1", 7, &both)], ROOM, Some(at(3))).unwrap();
    state.record(&Order::new("retry", "ann").about("h1")).unwrap();
    let records =
        [update(4, "h2", 8, &both[..1]), status(5, "h2"), end(6, "h1", 7, UpdateOutcome::Done)];
    state.append(&records, ROOM, Some(at(6))).unwrap();

    let all = ListEventsRequest { kinds: EventKind::ALL.to_vec(), ..Default::default() };
    let expected = [
        "h2:synced",
        "h2:/a",
        "h2:update 8",
        "h1:retry",
        "h1:/b",
        "h1:/a",
        "h1:update 7",
        "h1:synced",
    ];
    for limit in [0, 1, 2, 3, 7, 8, 100] {
        let request = ListEventsRequest { limit, ..all.clone() };
        assert_eq!(brief(&ask(&state, &request)), expected, "pages of {limit}");
    }
    // A place that was shown is where one may go on.
    let shown = ask(&state, &all);
    for (index, event) in shown.iter().enumerate() {
        let request = ListEventsRequest { before: Some(event.at), ..all.clone() };
        assert_eq!(brief(&ask(&state, &request)), expected[index + 1..], "{event:?}");
    }

    let table: [(ListEventsRequest, &[&str]); 7] = [
        (
            ListEventsRequest::default(),
            &["h2:synced", "h2:update 8", "h1:retry", "h1:update 7", "h1:synced"],
        ),
        (ListEventsRequest { paths: texts(&["/b"]), ..Default::default() }, &["h1:/b"]),
        (
            ListEventsRequest { reasons: vec![ChangeReason::Drift], ..all },
            &["h2:/a", "h2:update 8", "h1:/a", "h1:update 7"],
        ),
        (
            ListEventsRequest { hosts: texts(&["*2"]), ..Default::default() },
            &["h2:synced", "h2:update 8"],
        ),
        (ListEventsRequest { who: texts(&["ann"]), ..Default::default() }, &["h1:retry"]),
        (ListEventsRequest { images: texts(&["mail"]), ..Default::default() }, &[]),
        (
            ListEventsRequest { since: Some(at(2)), until: Some(at(4)), ..Default::default() },
            &["h2:update 8", "h1:update 7"],
        ),
    ];
    for (request, expected) in table {
        assert_eq!(brief(&ask(&state, &request)), expected, "{request:?}");
    }
    let one = ListEventsRequest { paths: texts(&["/b"]), ..Default::default() };
    match &ask(&state, &one)[0].what {
        EventDetails::Change { update, change } => {
            assert_eq!((&update.outcome, update.ended), (&Some(UpdateOutcome::Done), Some(at(6))));
            assert_eq!((update.drift, update.of_image), (1, 1));
            assert_eq!(**change, both[1]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_update_is_recorded_once_and_its_end_may_change() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let changes = [removal("/a", ChangeReason::Drift)];
    let updates = ListEventsRequest { kinds: vec![EventKind::Update], ..Default::default() };
    let outcomes = |state: &Storage| -> Vec<(Option<UpdateOutcome>, Option<Time>)> {
        let of = |event: HistoryEvent| match event.what {
            EventDetails::Update(update) => (update.outcome, update.ended),
            other => panic!("{other:?}"),
        };
        ask(state, &updates).into_iter().map(of).collect()
    };
    for seconds in [1, 2] {
        state.append(&[update(seconds, "h", 7, &changes)], ROOM, Some(at(2))).unwrap();
    }
    assert_eq!(outcomes(&state), [(None, None)]);
    // What is told again ended when it was told first; another machine's end is no news.
    for (seconds, host) in [(3, "h"), (4, "h"), (5, "other")] {
        state.append(&[end(seconds, host, 7, UpdateOutcome::Done)], ROOM, Some(at(5))).unwrap();
    }
    assert_eq!(outcomes(&state), [(Some(UpdateOutcome::Done), Some(at(3)))]);
    let undone = UpdateOutcome::Undone("sick".to_owned());
    state.append(&[end(6, "h", 7, undone.clone())], ROOM, Some(at(6))).unwrap();
    assert_eq!(outcomes(&state), [(Some(undone.clone()), Some(at(6)))]);
    // After the next update nothing more is heard of this one.
    let later = [update(7, "h", 8, &changes), end(8, "h", 7, UpdateOutcome::Done)];
    state.append(&later, ROOM, Some(at(8))).unwrap();
    assert_eq!(outcomes(&state), [(None, None), (Some(undone), Some(at(6)))]);
    assert_eq!(state.last_updates().unwrap(), [("h".to_owned(), 8)].into());
}

#[test]
fn an_update_that_was_undone_is_remembered_until_another_image_is_installed() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let changes = [removal("/a", ChangeReason::Image)];
    let repair = |seconds, update_id| match update(seconds, "h", update_id, &changes) {
        HistoryRecord::Update(row, list) => {
            let image = row.former.clone();
            HistoryRecord::Update(UpdateRow { image, ..row }, list)
        }
        other => other,
    };
    let undone = || UpdateOutcome::Undone("sick".to_owned());
    let remembered = |record, outcome, update_id| {
        let records = [record, end(1, "h", update_id, outcome)];
        state.append(&records, ROOM, Some(at(1))).unwrap();
        state.undone("h").unwrap()
    };
    let (image, why) = ("web/8".to_owned(), "sick".to_owned());
    let row = Some(UndoneRow { update_id: 7, image, why });
    assert_eq!(remembered(update(1, "h", 7, &changes), undone(), 7), row);
    // It was put back to web/7, which is repaired, or fails its health check too.
    assert_eq!(remembered(repair(2, 8), UpdateOutcome::Done, 8), row);
    assert_eq!(remembered(repair(3, 9), undone(), 9), row);
    assert_eq!(state.undone("other").unwrap(), None);
    assert_eq!(remembered(update(4, "h", 10, &changes), UpdateOutcome::Done, 10), None);
}

#[test]
fn a_clock_that_jumps_hides_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    // Far more than a segment, with the clock a day ahead in between.
    for batch in 0..12 {
        let base = if batch == 5 { 86_400 } else { i64::from(batch) * 1_000 };
        let records: Vec<HistoryRecord> =
            (0..1_000).map(|second| status(base + second, "h")).collect();
        state.append(&records, ROOM, Some(at(0))).unwrap();
    }
    let count = |since, until| {
        let (since, until) = (Some(at(since)), Some(at(until)));
        ask(&state, &ListEventsRequest { since, until, ..Default::default() }).len()
    };
    assert_eq!(count(3_000, 3_999), 1_000);
    assert_eq!(count(86_400, 90_000), 1_000);
    assert_eq!(count(11_500, 20_000), 500);
    assert_eq!(count(0, 100_000), 12_000);
}

/// How many rows each table of the log has.
fn rows(state: &Storage) -> [u64; 6] {
    state
        .database
        .with("read", |database| {
            let read = database.begin_read()?;
            Ok([
                read.open_table(history_log::STATUSES)?.len()?,
                read.open_table(history_log::UPDATES)?.len()?,
                read.open_table(history_log::ENDS)?.len()?,
                read.open_table(history_log::LAST)?.len()?,
                read.open_table(history_log::LISTS)?.len()?,
                read.open_table(history_log::CHUNKS)?.len()?,
            ])
        })
        .unwrap()
}

#[test]
fn what_is_too_old_goes_and_lists_go_with_the_last_that_names_them() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let limits = HistoryLimits { seconds: 100, ..ROOM };
    let (one, other) = ([removal("/a", ChangeReason::Drift)], [removal("/b", ChangeReason::Drift)]);
    let records = [
        status(0, "h1"),
        update(0, "h1", 1, &one),
        end(0, "h1", 1, UpdateOutcome::Done),
        update(0, "h2", 2, &one),
        update(0, "h2", 3, &other),
    ];
    state.append(&records, limits, Some(at(0))).unwrap();
    assert_eq!(rows(&state), [1, 3, 1, 2, 2, 2]);
    // The rows of a segment go together, when the last of them is too old.
    let filler: Vec<HistoryRecord> = (0..5_000).map(|_| status(0, "h")).collect();
    state.append(&filler, ROOM, Some(at(0))).unwrap();
    state.append(&[update(90, "h3", 4, &one)], limits, Some(at(150))).unwrap();
    state.record(&Order::new("retry", "ann")).unwrap();
    while state.append(&[], limits, Some(at(150))).unwrap() > 0 {}
    assert_eq!(rows(&state), [0, 1, 0, 1, 1, 1]);
    while state.append(&[], limits, Some(at(500))).unwrap() > 0 {}
    assert_eq!(rows(&state), [0; 6]);
    let left = ask(&state, &ListEventsRequest::default());
    assert_eq!(brief(&left), [":retry"], "orders are kept");
    // Numbers go on, so that places stay what they are.
    state.append(&[status(600, "h")], limits, Some(at(600))).unwrap();
    assert!(ask(&state, &ListEventsRequest::default())[0].at > left[0].at);
}

#[test]
fn what_is_too_much_goes_and_the_file_does_not_grow_for_ever() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let limits = HistoryLimits { bytes: 2 << 20, seconds: 1 << 40 };
    let length = || std::fs::metadata(directory.path().join(FILE)).unwrap().len();
    let mut lengths = Vec::new();
    for batch in 0..200_u64 {
        let records: Vec<HistoryRecord> = (0..500_u64)
            .flat_map(|number| {
                let (id, seconds) = (batch * 500 + number, i64::try_from(batch).unwrap());
                let host = format!("h{number}");
                let own = [removal(&format!("/f{id}"), ChangeReason::Drift)];
                [
                    status(seconds, &host),
                    update(seconds, &host, id, &own),
                    end(seconds, &host, id, UpdateOutcome::Done),
                ]
            })
            .collect();
        state.append(&records, limits, Some(at(0))).unwrap();
        state.record(&Order::new("retry", "ann").why(&"w".repeat(2_000))).unwrap();
        lengths.push(length());
    }
    let [statuses, updates, ends, last, lists, chunks] = rows(&state);
    assert!(statuses > 2_000 && statuses < 12_000, "{statuses}");
    assert!(updates > 2_000 && updates < 10_000, "{updates}");
    assert_eq!((ends, lists, chunks), (updates, updates, updates));
    assert!(last <= 500, "{last}");
    assert_eq!(lengths[140], lengths[199], "it grows: {lengths:?}");
    assert!(lengths[199] < 8 << 20, "{lengths:?}");
    let orders = ListEventsRequest { kinds: vec![EventKind::Order], ..Default::default() };
    let orders = ask(&state, &orders).len();
    assert!((100..=130).contains(&orders), "orders have room of their own: {orders}");
}

#[test]
fn a_copy_is_complete_and_starts_with_the_brake_once() {
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let changes = [removal("/a", ChangeReason::Drift)];
    state.append(&[update(1, "h", 7, &changes)], ROOM, Some(at(1))).unwrap();
    let copy = state.copy().unwrap();
    let bytes = copy.read(0, usize::MAX).unwrap();
    assert_eq!(bytes.len() as u64, copy.size_bytes);
    assert_eq!(Algorithm::Blake3.digest(&bytes), copy.digest);
    assert_eq!(copy.read(copy.size_bytes, 10).unwrap(), Vec::<u8>::new());
    assert_eq!(*state.brake.get(), None, "the original goes on");
    assert!(!directory.path().join("backup.redb").exists());
    state.append(&[status(2, "later")], ROOM, Some(at(2))).unwrap();

    let restored = tempfile::tempdir().unwrap();
    std::fs::write(restored.path().join(FILE), bytes).unwrap();
    let state = Storage::open(restored.path()).unwrap();
    let brake = Option::clone(&state.brake.get()).expect("updates are disabled");
    assert!(brake.reason.starts_with("the dominator was started on the backup of 2"), "{brake:?}");
    let all = ask(&state, &ListEventsRequest::default());
    assert_eq!(brief(&all), [":disable-updates", "h:update 7"]);
    set_brake(&state, None, &Order::new("enable-updates", "ann"));
    drop(state);
    assert_eq!(*Storage::open(restored.path()).unwrap().brake.get(), None);
}

#[test]
fn a_database_that_is_lost_starts_with_the_brake_once() {
    type Loss = fn(&std::path::Path);
    let losses: [Loss; 3] = [
        |file| std::fs::remove_file(file).unwrap(),
        |file| std::fs::File::options().write(true).open(file).unwrap().set_len(0).unwrap(),
        // The dominator was killed after it had made the file.
        |file| drop(redb::Database::create(file).unwrap()),
    ];
    for lose in losses {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        assert_eq!(*Storage::open(directory.path()).unwrap().brake.get(), None);
        std::fs::create_dir(directory.path().join("audit")).unwrap();
        assert_eq!(*Storage::open(directory.path()).unwrap().brake.get(), None);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "").unwrap();
        lose(&path);
        let state = Storage::open(directory.path()).unwrap();
        let brake = Option::clone(&state.brake.get()).expect("updates are disabled");
        let begin = format!("{} was missing or empty, and a dominator has run", path.display());
        assert!(brake.reason.starts_with(&begin), "{brake:?}");
        assert_eq!(brief(&ask(&state, &ListEventsRequest::default())), [":disable-updates"]);
        set_brake(&state, None, &Order::new("enable-updates", "ann"));
        drop(state);
        assert_eq!(*Storage::open(directory.path()).unwrap().brake.get(), None);
    }
}

#[test]
fn only_the_owner_may_read_the_database() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    drop(Storage::open(directory.path()).unwrap());
    assert_eq!(mode(), 0o600);
    // As former releases made it.
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    drop(Storage::open(directory.path()).unwrap());
    assert_eq!(mode(), 0o600);
}

/// Measures: `HISTORY_ROWS=1000000 cargo test --release -p dominator --lib rows -- --nocapture`.
#[test]
fn many_rows_are_written_and_searched() {
    let count = std::env::var("HISTORY_ROWS").map_or(20_000, |count| count.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let state = Storage::open(directory.path()).unwrap();
    let started = std::time::Instant::now();
    let shared: Vec<PathChange> =
        (0..40).map(|number| removal(&format!("/usr/f{number}"), ChangeReason::Image)).collect();
    for batch in 0..count / 1_000 {
        let records: Vec<HistoryRecord> = (0..1_000_u64)
            .map(|number| {
                let (id, host) = (batch * 1_000 + number, format!("host{:05}", number * 7));
                let seconds = i64::try_from(id / 10).unwrap();
                match id % 10_000 {
                    77 => {
                        update(seconds, &host, id, &[removal("/etc/passwd", ChangeReason::Drift)])
                    }
                    place if place % 2 == 0 => update(seconds, &host, id, &shared),
                    place => {
                        let path = format!("/srv/f{place}");
                        update(seconds, &host, id, &[removal(&path, ChangeReason::Drift)])
                    }
                }
            })
            .collect();
        state.append(&records, ROOM, Some(at(0))).unwrap();
    }
    let wrote = started.elapsed();
    let passwd = ListEventsRequest {
        paths: texts(&["/etc/passwd"]),
        reasons: vec![ChangeReason::Drift],
        since: Some(at(0)),
        ..Default::default()
    };
    let timed = |request: &ListEventsRequest| {
        let started = std::time::Instant::now();
        (ask(&state, request).len(), started.elapsed())
    };
    let (found, took) = timed(&passwd);
    let day = Some(at(i64::try_from(count / 10).unwrap() - 86_400));
    let lately = timed(&ListEventsRequest { since: day, ..passwd.clone() });
    let glob = timed(&ListEventsRequest { paths: texts(&["/etc/**"]), ..passwd });
    let length = std::fs::metadata(directory.path().join(FILE)).unwrap().len();
    println!(
        "{count} updates: written in {wrote:?}, {length} bytes; a path in all {took:?}, in the \
         last day {lately:?}, a pattern in all {glob:?}"
    );
    assert_eq!(found as u64, count.div_ceil(10_000));
    assert_eq!(glob.0, found);

    let started = std::time::Instant::now();
    let copy = state.copy().unwrap();
    println!("a copy of {} bytes, repaired: {:?}", copy.size_bytes, started.elapsed());
    let started = std::time::Instant::now();
    let limits = HistoryLimits { bytes: ROOM.bytes / 1_000, ..ROOM };
    while state.append(&[], limits, Some(at(0))).unwrap() > 0 {}
    let evicted = started.elapsed();
    drop(state);
    let started = std::time::Instant::now();
    drop(Storage::open(directory.path()).unwrap());
    let left = std::fs::metadata(directory.path().join(FILE)).unwrap().len();
    println!(
        "all but a little goes in {evicted:?}; opened in {:?}, {left} bytes",
        started.elapsed()
    );
}
